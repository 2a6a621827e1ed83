"""`mmfast calibrate`: patterns of the heads of a model, stored beside it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from mmfast.cli import options as shared
from mmfast.cli.output import check_writable, print_json, print_rows
from mmfast.core.errors import MmfastError


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Folder of a model; an embedded one by name, with --out.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the patterns; that of the model if left out.")
    ] = None,
    count: Annotated[int, typer.Option(help="Prompts, at most.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of each one that is made or cut.")] = 256,
    gates: Annotated[
        bool, typer.Option("--gates", help="Train gates for fastkvzip, too; give prompts.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Prompts of your own: a .txt, or questions as in eval --data."),
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Prompts of a generated suite, such as video or needles.")
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Find what duo_attention, qfilter and, with --gates, fastkvzip read of a model's heads."""
    if min(count, length) < 1:
        raise MmfastError(f"--count {count} --length {length} reads nothing; give 1 or more")
    if data is not None and suite is not None:
        raise MmfastError(f"--data {data} and --suite {suite} both give prompts; drop one")
    if gates and data is None and suite is None:
        raise MmfastError("--gates learn from real prompts; give --data FILE or --suite NAME")
    from mmfast.bench.prompts import load_pair, own_prompts, suite_prompts
    from mmfast.models.kv.calibration import calibrate_heads
    from mmfast.models.kv.patterns import FILE
    from mmfast.models.loading import located
    from mmfast.models.quiet import quiet

    place = located(model)
    if not Path(place).is_dir():
        raise MmfastError(f"{model!r} is no folder of a model; give one with a config.json")
    if out is None and place != model:
        raise MmfastError(f"the embedded {model!r} stays as it is; give --out FOLDER")
    quiet()
    pair, prompts = load_pair(place), None
    if data is not None:
        prompts = own_prompts(pair, data, count, length)
    elif suite is not None:
        prompts = suite_prompts(pair, suite, count, length)
    home = Path(place) if out is None else out
    with suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
    check_writable("--out", home / FILE)  # before the work, not behind it
    found = calibrate_heads(pair[0], prompts, save=home, count=count, length=length, gates=gates)
    rows = {str(i): [round(float(x), 4) for x in reach] for i, reach in found.reach.items()}
    told = {"file": str(home / FILE), "gates": len(found.gates)}
    if as_json:
        return print_json({**told, "reach": rows})
    for name, value in told.items():
        print_rows((name, str(value)), [])
    print_rows(
        ("layer", "reach of its heads"), [(i, " ".join(map(str, r))) for i, r in rows.items()]
    )
