"""`mmfast methods`, `mmfast doctor` and `mmfast verify`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import mmfast
from mmfast.cli.options import Json
from mmfast.cli.output import print_checks, print_methods, print_verify


def methods(
    kind: Annotated[str | None, typer.Option(help="reducer or cache.")] = None,
    as_json: Json = False,
) -> None:
    """List the registered methods."""
    from mmfast.core.registry import methods as rows

    print_methods(rows(kind), as_json)


def doctor(as_json: Json = False) -> None:
    """Show versions, devices and backends, what is missing and how to get it."""
    rows = checks()
    print_checks(rows, as_json)
    if not all(row.ok for row in rows if row.required):
        raise typer.Exit(1)


def verify(
    directory: Annotated[Path, typer.Argument(help="Folder of golden vectors (*.safetensors).")],
    as_json: Json = False,
) -> None:
    """Compare every method with golden vectors; exit 1 on any mismatch."""
    from mmfast.bench.gate import verify as run

    if not print_verify(run(directory), as_json):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Check:
    """One line of `mmfast doctor`; only a missing `required` one makes it exit 1."""

    what: str
    ok: bool
    found: str
    fix: str = ""
    required: bool = True


def checks() -> list[Check]:
    """Look at the interpreter, packages, devices, attention backends and embedded models."""
    return [
        Check("mmfast", True, mmfast.__version__),
        Check("python", sys.version_info >= (3, 11), platform.python_version(), "use Python 3.11+"),
        *map(_package, ("torch", "torchvision", "transformers", "timm", "av", "rich")),
        _package("decord", required=False, fix="none needed: PyAV reads video instead"),
        _package("triton", required=False, fix="only used on CUDA devices"),
        *_devices(),
        _embedded(),
    ]


def _package(name: str, required: bool = True, fix: str = "") -> Check:
    try:
        importlib.import_module(name)
        return Check(name, True, importlib.metadata.version(name), required=required)
    except (ImportError, OSError) as error:  # OSError: a shared library behind it is missing
        reason = " ".join(str(error).split())[:80]
        return Check(name, False, reason, fix or f"pip install {name}", required)


def _devices() -> list[Check]:
    import torch

    rows = [Check("cpu", True, f"{torch.get_num_threads()} threads of {os.cpu_count()} cores")]
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        rows.append(
            Check(f"cuda:{index}", True, f"{props.name}, {props.total_memory / 2**30:.0f} GiB")
        )
    if len(rows) == 1:
        rows.append(
            Check("cuda", False, "no device", "optional: a CUDA GPU and driver", required=False)
        )
    return rows


def _embedded() -> Check:
    from mmfast.models.loading import EMBEDDED, embedded_path

    try:
        path = embedded_path()
    except mmfast.ModelError as error:
        return Check(f"model {EMBEDDED}", False, str(error), "reinstall mmfast")
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return Check(f"model {EMBEDDED}", True, f"{size / 1e6:.1f} MB")
