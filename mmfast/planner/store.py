"""The file that keeps measured rates between runs: a convenience, never a reason to fail."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmfast.models.device import device_name
from mmfast.planner.rates import Rates, from_dict

VERSION = 1
VARIABLE = "MMFAST_CACHE_DIR"


def cache_folder() -> Path:
    """`MMFAST_CACHE_DIR`, else `mmfast` in the user's cache directory of this platform."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local") / "mmfast"
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "mmfast"


def rates_key(device: torch.device, dtype: torch.dtype, model: str) -> dict[str, Any]:
    """What rates hold for: another device, version, dtype, thread count or shape has its own."""
    return {
        "version": VERSION,
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "model": model,
    }


def read_rates(key: Mapping[str, Any]) -> Rates | None:
    """Rates measured earlier; None where there are none, or the file is not what we wrote."""
    try:
        document = json.loads(_path(key).read_text(encoding="utf-8"))
        return from_dict(document["rates"]) if document["key"] == dict(key) else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_rates(key: Mapping[str, Any], rates: Rates) -> bool:
    """Keep rates for the next run; False where the folder cannot be written."""
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and moved: a reader sees the old file or the new one, never half of one.
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({"key": dict(key), "rates": rates.to_dict()}), encoding="utf-8")
        draft.replace(path)
    except (OSError, RuntimeError):
        return False
    return True


def _path(key: Mapping[str, Any]) -> Path:
    text = json.dumps(dict(key), sort_keys=True)
    return cache_folder() / f"rates-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
