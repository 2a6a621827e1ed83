"""Imports of a spare worker process of Ray; see `mmfast.serve.ray.cluster.Spare`.

Every worker of a cluster imports this module, so it must be light. Only workers that are started
as spares import the rest ahead of time: controllers do not need it, and the first replicas import
it themselves.
"""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from pathlib import Path

# transformers imports on first use: its three modules are those that load a checkpoint.
# The last module is the part of Ray Serve in a replica.
PARTS = (
    "mmfast.serve.engine.scheduler",
    "mmfast.serve.engine.stages",
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "mmfast.serve.ray.deployments",
    "ray.serve._private.replica",
)
PLACE = "MMFAST_RAY_SPARES"  # environment: a folder; workers warm up once it holds a file `warm`


def warm(place: str) -> None:
    """Import what replicas need, and write a file named by the process id into a folder.

    Does nothing until the folder `place` ("" for none) holds the file `warm`.
    """
    folder = Path(place)
    if not place or not (folder / "warm").exists():
        return
    for name in PARTS:
        # An import that fails here is reported where the module is needed.
        with contextlib.suppress(Exception):
            import_module(name)
    with contextlib.suppress(OSError):
        (folder / str(os.getpid())).touch()


warm(os.environ.get(PLACE, ""))
