"""Starting Ray on this machine, or joining a cluster, and leaving again."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmfast.core.errors import MmfastError

TRIES = 3  # to start a node


def quiet() -> None:
    """Environment of Ray: it reports nothing to anybody."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


class Cluster:
    """Ray with Serve, without a dashboard and without a proxy: nothing listens beyond Ray itself.

    Where this process is connected to Ray already, that is used, and left as it is.

    Args:
        address: `local` starts Ray on this machine and stops it in the end; else that of a
            cluster.
        cpus: Cores that a local cluster says it has; None counts them.
        objects: Bytes of a local cluster's object store; None leaves that to Ray.

    Raises:
        MmfastError: Ray cannot start, or there is no cluster.
    """

    def __init__(
        self, address: str = "local", cpus: int | None = None, objects: int | None = None
    ) -> None:
        quiet()
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # this machine alone reaches it
            os.environ.setdefault("RAY_worker_niceness", "0")  # replicas are no background work
            # A tenth of a second, Ray's own, is short for a replica that computes.
            os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1")
            options |= {
                "include_dashboard": False,
                "num_cpus": cpus,
                "object_store_memory": objects,
            }
        try:
            import ray
            from ray import serve
        except ImportError as error:
            raise MmfastError(
                f"the engine 'ray' needs {error.name}, which is not installed: "
                'pip install "mmfast[ray]", or take the engine inproc or processes'
            ) from None
        self._ray: Any = ray
        self._serve: Any = serve
        self._own = not self._ray.is_initialized()
        if self._own:
            start(ray, address, options)
        self._serves = self._own and address == "local"
        with calm():
            serve.start(proxy_location="Disabled")

    def resources(self) -> Mapping[str, float]:
        """CPUs and GPUs of all machines."""
        found: Mapping[str, float] = self._ray.cluster_resources()
        return found

    def close(self, apps: list[str]) -> None:
        """Take applications down, and with a cluster of our own everything."""
        with calm(), contextlib.suppress(Exception):  # a cluster that is gone needs no goodbye
            if self._serves:
                self._serve.shutdown()
            else:
                for app in apps:
                    self._serve.delete(app)
        if self._own:
            self._ray.shutdown()


def start(ray: Any, address: str, options: Mapping[str, Any]) -> None:
    """Connect; on a busy machine a node may need a second try, for Ray gives it 30 s."""
    for left in range(TRIES - 1, -1, -1):
        before = _children()
        try:
            ray.init(address, **options)
            return
        except Exception as error:  # Ray raises plain ones, too
            for pid in _children() - before:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            reason = " ".join(str(error).split())[:300]
            if not left or "timed out during startup" not in reason:
                raise MmfastError(f"Ray cannot start at {address!r}: {reason}") from None


def _children() -> set[int]:
    """Processes that this one started, where the system tells."""
    found: set[int] = set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in tasks.read_text(encoding="ascii").split()}
    return found


def share(have: Mapping[str, float], replicas: int, device: str | None) -> dict[str, float]:
    """Resources of one replica, so that all of them fit.

    Args:
        have: Of the cluster.
        replicas: Of all roles.
        device: What was asked for; a CPU leaves GPUs alone.
    """
    on_cpu = device is not None and not device.startswith("cuda")
    gpus, cpus = 0 if on_cpu else int(have.get("GPU", 0)), float(have.get("CPU", 1))

    def floor(value: float) -> float:
        # Rounded down: shares that add up to a little too much are waited for without end.
        return math.floor(1000 * value) / 1000

    # A tenth is left for Serve's controller and for whoever else works there.
    found = {"num_cpus": floor(min(1.0, 0.9 * cpus / replicas))}
    if gpus:
        found["num_gpus"] = 1.0 if gpus >= replicas else floor(1 / math.ceil(replicas / gpus))
    return found


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Serve's own log lines are about itself; what goes wrong is raised."""
    log = logging.getLogger("ray.serve")
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(logging.ERROR)  # Serve set it again
