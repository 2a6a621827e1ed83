"""Starting Ray on this machine, or joining a cluster, and leaving again."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mmfast.core.errors import MmfastError

OBJECTS = 256 << 20  # bytes of the object store of a local cluster, if nothing else is said


def quiet() -> None:
    """Environment of Ray: it reports nothing to anybody, and a busy machine may start slowly."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")


class Cluster:
    """Ray with Serve, without a dashboard and without a proxy: nothing listens beyond Ray itself.

    Where this process is connected to Ray already, that is used, and left as it is.

    Args:
        address: `local` starts Ray on this machine and stops it in the end; else that of a
            cluster.
        cpus: Cores that a local cluster says it has; None counts them.
        objects: Bytes of a local cluster's object store.

    Raises:
        MmfastError: Ray cannot start, or there is no cluster.
    """

    def __init__(
        self, address: str = "local", cpus: int | None = None, objects: int = OBJECTS
    ) -> None:
        quiet()
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # this machine alone reaches it
            options |= {"include_dashboard": False, "object_store_memory": objects}
            options |= {} if cpus is None else {"num_cpus": cpus}
        try:
            import ray
            from ray import serve
        except ImportError as error:
            raise MmfastError(
                f"the engine 'ray' needs {error.name}, which is not installed: "
                'pip install "mmfast[ray]", or take the engine inproc or processes'
            ) from None
        self._own = not ray.is_initialized()
        if self._own:
            try:
                ray.init(address, **options)
            except Exception as error:  # Ray raises plain ones, too
                reason = " ".join(str(error).split())[:300]
                raise MmfastError(f"Ray cannot start at {address!r}: {reason}") from None
        self._serves = self._own and address == "local"
        with calm():
            serve.start(proxy_location="Disabled")

    def resources(self) -> Mapping[str, float]:
        """CPUs and GPUs of all machines."""
        import ray

        found: Mapping[str, float] = ray.cluster_resources()
        return found

    def close(self, apps: list[str]) -> None:
        """Take applications down, and with a cluster of our own everything."""
        import ray
        from ray import serve

        with calm(), contextlib.suppress(Exception):  # a cluster that is gone needs no goodbye
            if self._serves:
                serve.shutdown()
            else:
                for app in apps:
                    serve.delete(app)
        if self._own:
            ray.shutdown()


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
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
