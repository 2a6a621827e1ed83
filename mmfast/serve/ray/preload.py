"""Imports of a worker process of Ray before it is given anything to do.

See `mmfast.serve.ray.cluster.Spare`.

Every worker of a cluster imports this module. Only those that are started to wait go on from here:
controllers need nothing of it, and the first replicas need it no sooner than they import it.
"""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from pathlib import Path

_ENGINE = "mmfast.serve.engine"
PARTS = (
    *(f"{_ENGINE}.processes.preload", f"{_ENGINE}.services"),
    *("mmfast.serve.ray.deployments", "ray.serve._private.replica"),  # the last: Serve's own half
)
PLACE = "MMFAST_RAY_SPARES"  # environment: a folder; workers warm up once it holds a file `warm`


def warm(place: str) -> None:
    """Import what replicas need, and leave a file of one's number; nothing before it is asked for.

    Args:
        place: The folder, "" for none.
    """
    folder = Path(place)
    if not place or not (folder / "warm").exists():
        return
    for name in PARTS:
        # Whatever fails here fails again where it is needed, and says so there.
        with contextlib.suppress(Exception):
            import_module(name)
    with contextlib.suppress(OSError):
        (folder / str(os.getpid())).touch()


warm(os.environ.get(PLACE, ""))
