"""Starting Ray on this machine, or joining a cluster, and leaving again.

A worker process of Ray that waits with everything imported, for the next replica that is lost.

Most of what a new replica takes is a process that imports torch and transformers. Ray hands idle
processes of a job to its actors, so one of them is started ahead of time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mmfast.core.errors import MmfastError
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


TRIES = 3  # to start a node


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
        if address == "local":
            os.environ.setdefault("RAY_worker_niceness", "0")  # replicas are no background work
            # A tenth of a second, Ray's own, is short for a replica that computes.
            os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1")
        ray, serve = imported("the engine 'ray'", "inproc or processes", "ray", "ray.serve")
        self._ray: Any = ray
        self._serve: Any = serve
        self._own = not self._ray.is_initialized()
        self._serves = self._own and address == "local"
        self.spare = Spare() if self._serves else None
        try:
            if self._own:
                start(ray, address, num_cpus=cpus, object_store_memory=objects)
        except BaseException:
            if self.spare is not None:
                self.spare.close()
            raise
        with calm():
            serve.start(proxy_location="Disabled")

    def resources(self) -> Mapping[str, float]:
        """CPUs and GPUs of all machines."""
        found: Mapping[str, float] = self._ray.cluster_resources()
        return found

    def have_spare(self) -> None:
        """Have a process wait for the next replica, where the cluster is our own."""
        if self.spare is not None:
            self.spare.keep(self._ray)

    def machines(self) -> int:
        """How many there are."""
        return max(1, sum(bool(node["Alive"]) for node in self._ray.nodes()))

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
        if self.spare is not None:
            self.spare.close()


def imported(what: str, instead: str, *modules: str) -> list[Any]:
    """Modules of Ray, which reports nothing to anybody.

    Raises:
        MmfastError: It is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return [import_module(name) for name in modules]
    except ImportError as error:
        raise MmfastError(
            f"{what} needs {error.name}, which is not installed: "
            f'pip install "mmfast[ray]", or take the engine {instead}'
        ) from None


def start(ray: Any, address: str, **local: Any) -> None:
    """Connect; on a busy machine a node may need a second try, for Ray gives it 30 s.

    Args:
        ray: The module.
        address: `local` starts a node here; else that of a cluster.
        **local: Options of `ray.init` for a node of our own.

    Raises:
        MmfastError: There is none.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it listens on this machine alone
        os.environ.setdefault("RAY_agent_register_timeout_ms", "100000")  # of a busy machine
        options |= {"include_dashboard": False, **local}
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


def share(
    have: Mapping[str, float], workers: int, device: str | None, spare: float = 0.0
) -> dict[str, float]:
    """Resources of one worker, so that all of them fit.

    Args:
        have: Of the cluster.
        workers: How many there are.
        device: What was asked for; a CPU leaves GPUs alone.
        spare: Part of all cores that is left to others.
    """
    gpus, cpus = gpus_of(have, device), float(have.get("CPU", 1))

    def floor(value: float) -> float:
        # Rounded down: shares that add up to a little too much are waited for without end.
        return math.floor(1000 * value) / 1000

    gpu = floor(1 / math.ceil(workers / gpus)) if gpus else 0.0
    return {"num_cpus": floor(min(1.0, (1 - spare) * cpus / workers)), "num_gpus": gpu}


def gpus_of(have: Mapping[str, float], device: str | None) -> int:
    """GPUs that may be used."""
    on_cpu = device is not None and not device.startswith("cuda")
    return 0 if on_cpu else int(have.get("GPU", 0))


def sharing(some: int, workers: int, places: int) -> int:
    """How many of `some` workers may come to be on one of the places that all workers share."""
    return max(1, min(some, math.ceil(workers / places)))


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Serve's own log lines are about itself; what goes wrong is raised."""
    log = logging.getLogger("ray.serve")
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(logging.ERROR)  # Serve set it again
