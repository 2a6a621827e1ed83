"""Parity with golden vectors: inputs and outputs of the authors' reference implementations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mmfast.bench.parity import DRIVERS
from mmfast.core.errors import MmfastError, unknown

FORMAT = "mmfast-golden/1"
_RTOL, _ATOL = 1e-4, 1e-5


@dataclass(frozen=True)
class Row:
    """One golden file and whether the reducers agree with it."""

    file: str
    method: str
    ok: bool
    detail: str

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


def verify(directory: Path) -> list[Row]:
    """Compare every golden file of a directory with the reducers, by name.

    Args:
        directory: Holds `*.safetensors` files of the format described in tests/golden/README.md.

    Returns:
        One row a file; a broken file is a row too, with the reason.

    Raises:
        MmfastError: There is no such directory, or no golden file in it.
    """
    if not directory.is_dir():
        raise MmfastError(
            f"{str(directory)!r} is no directory; give a folder of golden vectors (*.safetensors)"
        )
    files = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors")
    if not files:
        raise MmfastError(
            f"no golden file in {str(directory)!r}; give a folder of *.safetensors files, "
            "such as tests/golden"
        )
    return [_verify_file(path) for path in files]


def _verify_file(path: Path) -> Row:
    method = path.stem.rpartition("-")[0] or path.stem
    try:
        arrays, metadata = _load(path)
        method = metadata["method"]
        ok, detail = _compare_file(arrays, metadata)
    except Exception as error:  # whatever a broken file provokes is the result of this row
        reason = " ".join(str(error).split()) or "no reason given"
        return Row(path.name, method, False, f"{type(error).__name__}: {reason}")
    return Row(path.name, method, ok, detail)


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(str(path), framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise MmfastError(f"format is {metadata.get('format')!r} instead of {FORMAT!r}")
        missing = {"method", "params"} - metadata.keys()
        if missing:
            raise MmfastError(f"metadata lacks {', '.join(sorted(missing))}")
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def _compare_file(arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bool, str]:
    driver = DRIVERS.get(metadata["method"])
    if driver is None:
        raise MmfastError(unknown("method", metadata["method"], DRIVERS))
    inputs = {n.removeprefix("in."): a for n, a in arrays.items() if n.startswith("in.")}
    wanted = {n.removeprefix("out."): a for n, a in arrays.items() if n.startswith("out.")}
    if not wanted:
        raise MmfastError("the file holds no out.* array to compare with")
    with torch.no_grad():
        found, faults = driver(inputs, json.loads(metadata["params"]))
    how: dict[str, str] = json.loads(metadata.get("compare", "{}"))
    for name, array in wanted.items():
        exact = how.get(name, "close" if array.is_floating_point() else "exact") == "exact"
        fault = _difference(found.get(name), array, exact)
        if fault:
            faults.append(f"{name}: {fault}")
    if faults:
        return False, "; ".join(faults)
    return True, f"{len(wanted)} arrays: {', '.join(sorted(wanted))}"


def _difference(found: Tensor | None, wanted: Tensor, exact: bool) -> str:
    """What is wrong with an array, "" if nothing."""
    if found is None:
        return "no rule computes this array"
    if found.shape != wanted.shape:
        return f"shape {list(found.shape)} instead of {list(wanted.shape)}"
    ours, theirs = found.double(), wanted.double()
    equal = ours == theirs if exact else torch.isclose(ours, theirs, rtol=_RTOL, atol=_ATOL)
    if equal.all():
        return ""
    at = (~equal).nonzero()[0].tolist()
    value, truth = float(ours[tuple(at)]), float(theirs[tuple(at)])
    wrong = int((~equal).sum())
    return f"{wrong} of {equal.numel()} differ, at {at} {value:g} instead of {truth:g}"
