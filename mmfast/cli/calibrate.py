"""`mmfast calibrate`: patterns of the heads of a model, stored beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmfast.cli import options as shared
from mmfast.cli.output import print_json, print_rows
from mmfast.core.errors import MmfastError


def calibrate(
    model: Annotated[str, typer.Argument(help="Folder of a model.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the patterns; that of the model if left out.")
    ] = None,
    count: Annotated[int, typer.Option(help="Prompts that are made.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 256,
    as_json: shared.Json = False,
) -> None:
    """Find the heads that retrieve and the way queries point, for duo_attention and qfilter."""
    if not Path(model).is_dir():
        raise MmfastError(f"{model!r} is no folder of a model; give one with a config.json")
    if count < 1:
        raise MmfastError(f"--count {count} reads nothing; give 1 or more")
    from mmfast.models.kv.calibration import FILE, calibrate_heads
    from mmfast.models.loading import load
    from mmfast.models.quiet import quiet

    quiet()
    loaded, _ = load(model, None, "auto")
    home = Path(model) if out is None else out
    found = calibrate_heads(loaded, save=home, count=count, length=length)
    rows = {str(i): [round(float(x), 4) for x in reach] for i, reach in found.reach.items()}
    if as_json:
        return print_json({"file": str(home / FILE), "reach": rows})
    print_rows(("file", str(home / FILE)), [])
    print_rows(
        ("layer", "reach of its heads"), [(i, " ".join(map(str, r))) for i, r in rows.items()]
    )
