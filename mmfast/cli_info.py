"""`mmfast methods`, `mmfast doctor` and `mmfast verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmfast.cli_options import Json


def methods(
    kind: Annotated[str | None, typer.Option(help="reducer or cache.")] = None,
    as_json: Json = False,
) -> None:
    """List the registered methods."""
    from mmfast.cli_output import print_methods
    from mmfast.core.registry import methods as rows

    print_methods(rows(kind), as_json)


def doctor(as_json: Json = False) -> None:
    """Show versions, devices and backends, what is missing and how to get it."""
    from mmfast.cli_output import print_checks
    from mmfast.doctor import checks

    rows = checks()
    print_checks(rows, as_json)
    if not all(row.ok for row in rows if row.required):
        raise typer.Exit(1)


def verify(
    directory: Annotated[Path, typer.Argument(help="Folder of golden vectors (*.safetensors).")],
    as_json: Json = False,
) -> None:
    """Compare every method with golden vectors; exit 1 on any mismatch."""
    from mmfast.bench.golden import verify as run
    from mmfast.cli_output import print_verify

    if not print_verify(run(directory), as_json):
        raise typer.Exit(1)
