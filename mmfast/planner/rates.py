"""Measured times of a device, and their interpolation between and beyond the points."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import MmfastError
from mmfast.core.files import whole_file
from mmfast.models.loading import device_name

Point = tuple[float, float]  # (amount of work, milliseconds)


@dataclass(frozen=True)
class Rates:
    """Milliseconds by amount of work, for one model shape on one device."""

    linear: tuple[Point, ...] = ()  # (tokens, ms) of a decoder layer without its attention
    attention: tuple[Point, ...] = ()  # (tokens, ms) of causal attention in a decoder layer
    head: float = 0.0  # ms of one row of logits
    noise: float = 0.0  # relative difference of two measurements of the same
    encode: tuple[Point, ...] = ()  # (numbers of pixels, ms) of the encoder with its projector
    signal: tuple[Point, ...] = ()  # (numbers of pixels, ms) of reading one attention signal
    select: Mapping[str, float] = field(default_factory=dict)  # ms of choosing, by `method:tokens`
    # ms of all else by kind of call: of stock calls and of reduced ones
    overhead: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # ms of the rest

    def gain(self, **found: Any) -> Rates:
        """A copy with more measured: points are added, tables joined."""
        changed: dict[str, Any] = {}
        for name, value in found.items():
            old = getattr(self, name)
            if isinstance(old, tuple):
                value = tuple(sorted({**dict(old), **dict(value)}.items()))
            elif isinstance(old, Mapping):
                value = {**old, **value}
            changed[name] = value
        return replace(self, **changed)


def from_dict(values: Mapping[str, Any]) -> Rates:
    """Read what `write_rates` wrote; ValueError, KeyError or TypeError where it is damaged."""
    curves = {
        name: tuple((_time(n), _time(ms)) for n, ms in values[name])
        for name in ("linear", "attention", "encode", "signal")
    }
    select = {str(k): _time(v) for k, v in values["select"].items()}
    overhead = {str(k): (_finite(a), _finite(b)) for k, (a, b) in values["overhead"].items()}
    noise = _time(values.get("noise", 0.0))
    return Rates(
        **curves, head=_time(values["head"]), select=select, overhead=overhead, noise=noise
    )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is no time")
    return number


def _time(value: Any) -> float:
    number = _finite(value)
    if number < 0:
        raise ValueError(f"{value!r} is no time")
    return number


def at(points: Sequence[Point], amount: float, power: float = 1.0) -> float:
    """Milliseconds at an amount of work, straight in `amount ** power` between two points."""
    if not points or amount <= 0:
        return 0.0
    sizes = [size for size, _ in points]
    place = bisect_left(sizes, amount)
    if place == 0:
        return points[0][1]
    if place == len(points):
        size, ms = points[-1]
        return float(ms * (amount / size) ** power)
    (low, before), (high, after) = points[place - 1 : place + 1]
    share = (amount**power - low**power) / (high**power - low**power)
    return float(before + (after - before) * share)


VERSION = 1
VARIABLE = "MMFAST_CACHE_DIR"


def cache_folder() -> Path:
    """`MMFAST_CACHE_DIR`, else `mmfast` in the user's cache directory of this platform.

    MmfastError: neither is set, and the user has no home, as in some containers.
    """
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    usual = {"win32": "AppData/Local", "darwin": "Library/Caches"}.get(sys.platform, ".cache")
    if os.environ.get(variable):
        return Path(os.environ[variable]) / "mmfast"
    try:
        return Path.home() / usual / "mmfast"
    except RuntimeError:
        raise MmfastError(f"there is no home folder to keep files in; set {VARIABLE}") from None


def rates_key(device: torch.device, dtype: torch.dtype, model: str) -> dict[str, Any]:
    """Conditions of rates: another device, version, dtype, thread count or shape has its own."""
    return {
        "version": VERSION,
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "model": model,
    }


def read_rates(key: Mapping[str, Any]) -> Rates | None:
    """Rates measured earlier, if any; None too where the file is not what we wrote."""
    try:
        document = json.loads(measured_path("rates", key).read_text(encoding="utf-8"))
        return from_dict(document["rates"]) if document["key"] == dict(key) else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_rates(key: Mapping[str, Any], rates: Rates) -> bool:
    """Keep rates for the next run; False where the folder cannot be written."""
    return write_measured("rates", key, rates=asdict(rates))


def measured_path(kind: str, key: Mapping[str, Any]) -> Path:
    """Return the file of what was measured under these conditions."""
    text = json.dumps(dict(key), sort_keys=True)
    return cache_folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def write_measured(kind: str, key: Mapping[str, Any], **found: Any) -> bool:
    """Keep what was measured for the next run; False where the folder cannot be written."""
    try:
        path = measured_path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"key": dict(key), **found})
        with whole_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except (OSError, RuntimeError, MmfastError):
        return False
    return True
