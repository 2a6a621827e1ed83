"""How much memory there is for keys and values."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from mmfast.planner.target import parse_bytes

_SHARE = {"cuda": 0.8, "cpu": 0.25}  # of what is free; the CPU's memory is not ours alone
_FALLBACK = 2 << 30


def kv_limit(memory: str | int | None, device: torch.device, sharing: int = 1) -> int:
    """Bytes for keys and values.

    Args:
        memory: `"2GB"` or bytes; None takes a share of what is free on the device.
        device: Where they lie.
        sharing: Workers that take the same share, this one included.

    Raises:
        MmfastError: It is no size.
    """
    given = parse_bytes(memory)
    if given is not None:
        return given
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _SHARE["cuda"] / sharing)
    return int(_free() * _SHARE["cpu"] / sharing)


def _free() -> int:
    """Free bytes of this machine, or of the container it runs in."""
    free = _FALLBACK
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known = dict(line.split(":", 1) for line in lines)
        free = int(known["MemAvailable"].split()[0]) * 1024
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        if most != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            free = min(free, max(0, int(most) - used))
    except (OSError, ValueError, KeyError):
        pass  # other systems keep other books
    return free
