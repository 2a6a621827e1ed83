"""A worker process of Ray that waits with everything imported, for the next replica that is lost.

Most of what a new replica takes is a process that imports torch and transformers. Ray hands idle
processes of a job to its actors, so one of them is started ahead of time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from mmfast.serve.ray.preload import PLACE

LOG = logging.getLogger("mmfast.serve")
KEPT = 30 * 24 * 3600  # seconds after which Ray may end one that nobody took
_RAY = "ray.core.generated"
_PARTS = ("grpc", f"{_RAY}.common_pb2", f"{_RAY}.node_manager_pb2", f"{_RAY}.node_manager_pb2_grpc")
_SECONDS = 10.0  # for Ray to take the order
PATIENCE = 120.0  # seconds after which one that was ordered is given up
_SEEN = Path("/proc/self/cmdline").exists()  # what processes call themselves


class Spare:
    """Keeps a process in waiting on a cluster of our own; must be made before Ray starts."""

    def __init__(self) -> None:
        self._orders, self._at, self._off = 0, 0.0, False
        self._folder = Path(tempfile.mkdtemp(prefix="mmfast-ray-"))
        os.environ[PLACE] = str(self._folder)
        os.environ.setdefault("RAY_preload_python_modules", "mmfast.serve.ray.preload")

    @property
    def ready(self) -> list[int]:
        """Processes that have imported everything, whatever became of them since."""
        return sorted(int(each.name) for each in self._folder.iterdir() if each.name.isdigit())

    def due(self) -> bool:
        """Whether none waits, and none is on its way."""
        if self._off or any(map(_idle, self.ready)):
            return False
        late = time.monotonic() - self._at > PATIENCE
        return self._orders == 0 or (_SEEN and (len(self.ready) >= self._orders or late))

    def keep(self, ray: Any) -> None:
        """Have one started where it is due.

        Args:
            ray: The module, connected.
        """
        if not self.due():
            return
        (self._folder / "warm").touch()
        self._orders, self._at = self._orders + 1, time.monotonic()
        try:
            self._order(ray)
        except Exception as error:  # parts of Ray speak so to each other; other versions may not
            self._off = True
            LOG.info("no spare worker on Ray: %s", type(error).__name__)

    def _order(self, ray: Any) -> None:
        made: list[Any] = [import_module(name) for name in _PARTS]  # of no stated types
        grpc, common, messages, services = made
        order = messages.PrestartWorkersRequest(
            language=common.Language.Value("PYTHON"),
            job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
            keep_alive_duration_secs=KEPT,
            num_workers=1,
        )
        order.runtime_env_info.serialized_runtime_env = "{}"  # as replicas have none
        for node in ray.nodes():
            where = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            with grpc.insecure_channel(where) as channel:
                stub = services.NodeManagerServiceStub(channel)
                stub.PrestartWorkers(order, timeout=_SECONDS)

    def close(self) -> None:
        """Nobody is waited for any more."""
        if os.environ.get(PLACE) == str(self._folder):
            del os.environ[PLACE]
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)


def _idle(pid: int) -> bool:
    """Whether a worker waits: Ray names them by what they do."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::IDLE")
    return False
