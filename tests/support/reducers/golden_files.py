"""Golden files: the recorded ones, and others written from an oracle of the reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracles_reference import REFERENCES
from safetensors import safe_open
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
FILES = sorted(GOLDEN.glob("*.safetensors"))
DOUBLE = {"ratio", "effective_ratio"}


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def parts(arrays: Mapping[str, torch.Tensor], kind: str) -> dict[str, np.ndarray]:
    """The `in.*` or `out.*` arrays by their short names."""
    named = {n.partition(".")[2]: a for n, a in arrays.items() if n.startswith(f"{kind}.")}
    return {n: (a.float() if a.dtype == torch.bfloat16 else a).numpy() for n, a in named.items()}


def record(path: Path, inputs: Mapping[str, torch.Tensor], params: Mapping[str, Any]) -> None:
    """Write what the reference makes of `inputs`, in the format of the recorded files."""
    method = path.stem.rpartition("-")[0]
    given = {f"in.{name}": array.contiguous() for name, array in inputs.items()}
    results = {}
    for name, array in REFERENCES[method](parts(given, "in"), params).items():
        wide = array.dtype == np.float64 and name not in DOUBLE
        results[f"out.{name}"] = torch.tensor(array.astype(np.float32) if wide else array)
    kinds = {n[4:]: "close" if a.is_floating_point() else "exact" for n, a in results.items()}
    metadata = {
        "format": "mmfast-golden/1",
        "method": method,
        "params": json.dumps(params),
        "compare": json.dumps(kinds),
    }
    metadata |= {f"param.{name}": json.dumps(value) for name, value in params.items()}
    save_file(given | results, path, metadata)
