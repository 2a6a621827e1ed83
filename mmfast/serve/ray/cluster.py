"""Connection to Ray, on this machine or a cluster, and a spare worker process.

A new replica spends most of its start on importing torch and transformers. Ray gives idle worker
processes of a job to its actors, so one of them is started and imports ahead of time.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.serve.engine.base import LOG
from mmfast.serve.ray.preload import PLACE

KEPT = 30 * 24 * 3600  # seconds after which Ray may end an unused spare
_RAY = "ray.core.generated"
_PARTS = ("grpc", f"{_RAY}.common_pb2", f"{_RAY}.node_manager_pb2", f"{_RAY}.node_manager_pb2_grpc")
_SECONDS = 10.0  # timeout of an order
PATIENCE = 120.0  # seconds after which an order is given up
_SEEN = Path("/proc/self/cmdline").exists()  # the names of processes can be read


class Spare:
    """Keeps one spare worker process on a local cluster; must be made before Ray starts."""

    def __init__(self) -> None:
        self._orders, self._at, self._off = 0, 0.0, False
        self._folder = Path(tempfile.mkdtemp(prefix="mmfast-ray-"))
        os.environ[PLACE] = str(self._folder)
        os.environ.setdefault("RAY_preload_python_modules", "mmfast.serve.ray.preload")

    @property
    def ready(self) -> list[int]:
        """Ids of all processes that have imported everything, also of used or dead ones."""
        return sorted(int(each.name) for each in self._folder.iterdir() if each.name.isdigit())

    def due(self) -> bool:
        """Return True if no spare waits, and none is being started."""
        if self._off or any(map(_idle, self.ready)):
            return False
        late = time.monotonic() - self._at > PATIENCE
        return self._orders == 0 or (_SEEN and (len(self.ready) >= self._orders or late))

    def keep(self, ray: Any) -> None:
        """Order a spare where it is due; `ray` is the connected module."""
        if not self.due():
            return
        (self._folder / "warm").touch()
        self._orders, self._at = self._orders + 1, time.monotonic()
        try:
            self._order(ray)
        except Exception as error:  # an internal message of Ray, which other versions may lack
            self._off = True
            LOG.info("no spare worker on Ray: %s", type(error).__name__)

    def _order(self, ray: Any) -> None:
        made: list[Any] = [import_module(name) for name in _PARTS]  # modules without types
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
        """Remove the folder and the variable of the environment."""
        if os.environ.get(PLACE) == str(self._folder):
            del os.environ[PLACE]
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)


def _idle(pid: int) -> bool:
    """Return True if a worker is idle, by the name that Ray gives its process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::IDLE")
    return False


TRIES = 3  # to start a node
_AGENTS = (  # names of one port each
    "metrics-agent-port|grpc-port",
    "metrics[-_]export[-_]port",
    "runtime[-_]env[-_]agent[-_]port",
    "listen-port",
)


class Cluster:
    """Ray with Serve, without a dashboard and without a proxy, so it opens no further port.

    An existing connection of this process is used and left open. The address `local` starts Ray on
    this machine and stops it in the end; `cpus` and `objects`, the bytes of its object store, are
    for that case.
    """

    def __init__(
        self, address: str = "local", cpus: int | None = None, objects: int | None = None
    ) -> None:
        if address == "local":
            os.environ.setdefault("RAY_worker_niceness", "0")  # replicas run at normal priority
            # The default of 0.1 s is too short for a replica that computes.
            os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1")
        ray, serve = imported("the engine 'ray'", "ray", "ray.serve")
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
        """Return the CPUs and GPUs of all machines."""
        found: Mapping[str, float] = self._ray.cluster_resources()
        return found

    def have_spare(self) -> None:
        """Keep a spare worker where the cluster is local."""
        if self.spare is not None:
            self.spare.keep(self._ray)

    def machines(self) -> int:
        """Return the number of machines."""
        return max(1, sum(bool(node["Alive"]) for node in self._ray.nodes()))

    def close(self, apps: list[str]) -> None:
        """Stop applications, and a local cluster as a whole."""
        with calm(), contextlib.suppress(Exception):  # the cluster may be gone
            if self._serves:
                self._serve.shutdown()
            else:
                for app in apps:
                    self._serve.delete(app)
        if self._own:
            self._ray.shutdown()
        if self.spare is not None:
            self.spare.close()


def imported(user: str, *modules: str) -> list[Any]:
    """Import modules of Ray with its usage reports turned off.

    Without Ray, `MmfastError` is raised.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return [import_module(name) for name in modules]
    except ImportError as error:
        raise MmfastError(
            f"{user} needs {error.name}, which is not installed: "
            'pip install "mmfast[ray]", or take the engine inproc'
        ) from None


def start(ray: Any, address: str, **local: Any) -> None:
    """Connect to Ray, with retries: on a busy machine a node may not start within 30 s.

    The address `local` starts a node here with the options `local` of `ray.init`. On Linux the
    processes of a node end with the thread that started them, so a thread that may end before this
    process leaves the start to one that does not.
    """
    if threading.current_thread() is threading.main_thread():
        _start(ray, address, local)
        return
    started: Future[None] = Future()

    def keep() -> None:
        try:
            with _own_handler(signal.SIGTERM):
                _start(ray, address, local)
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
            threading.Event().wait()

    threading.Thread(target=keep, name="mmfast-ray-node", daemon=True).start()
    started.result()


@contextlib.contextmanager
def _own_handler(number: int) -> Iterator[None]:
    """Restore the handler of a signal afterwards, from any thread.

    That of Ray aborts the process 3 s after a SIGTERM, while the server still ends.
    """
    pointer = ctypes.c_void_p
    get = ctypes.PYFUNCTYPE(pointer, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
    put = ctypes.PYFUNCTYPE(pointer, ctypes.c_int, pointer)(("PyOS_setsig", ctypes.pythonapi))
    handler = get(number)
    try:
        yield
    finally:
        put(number, handler)


def _start(ray: Any, address: str, local: Mapping[str, Any]) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # of this machine alone
        os.environ.setdefault("RAY_agent_register_timeout_ms", "100000")  # of a busy machine
        # A worker that starts for longer is dropped, and what waits for it waits for ever.
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
        # Ray's monitor kills its controller or a worker where other programs fill the memory.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        options |= {"include_dashboard": False, **local}
    for left in range(TRIES - 1, -1, -1):
        before = _children()
        again = address == "local" and left < TRIES - 1
        try:
            with _agent_ports() if again else contextlib.nullcontext():
                ray.init(address, **options)
            return
        except Exception as error:  # Ray also raises plain exceptions
            for pid in _children() - before:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            reason = " ".join(str(error).split())[:300]
            if not left or "timed out during startup" not in reason:
                raise MmfastError(f"Ray cannot start at {address!r}: {reason}") from None


@contextlib.contextmanager
def _agent_ports() -> Iterator[None]:
    """Give the agents of a node their ports, for which `ray.init` has no options.

    A node waits 15 s for the ports that its agents choose, and no setting of Ray changes that: on a
    busy machine they still import then.
    """
    services: Any = import_module("ray._private.services")
    started = services.start_ray_process

    def start(command: list[str], kind: str, *given: Any, **named: Any) -> Any:
        return started(_with_ports(command) if kind == "raylet" else command, kind, *given, **named)

    services.start_ray_process = start
    try:
        yield
    finally:
        services.start_ray_process = started


def _with_ports(command: list[str]) -> list[str]:
    """Replace the ports of agents in the command of a node, which holds theirs, by free ones."""
    with contextlib.ExitStack() as stack:
        for names in _AGENTS:
            held = stack.enter_context(socket.socket())  # to its end, so that all differ
            held.bind(("", 0))
            port = held.getsockname()[1]
            command = [re.sub(rf"--({names})=\d+", rf"--\1={port}", each) for each in command]
    return [*command, f"--dashboard_agent_listen_port={port}"]  # Ray itself leaves this one out


def _children() -> set[int]:
    """Return the child processes of this one, where the system lists them."""
    found: set[int] = set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in tasks.read_text(encoding="ascii").split()}
    return found


def share(
    have: Mapping[str, float], workers: int, device: str | None, spare: float = 0.0
) -> dict[str, float]:
    """Return the resources of one worker, so that all of them fit.

    `device` `cpu` leaves GPUs alone; `spare` is the part of all cores to leave free.
    """
    gpus, cpus = gpus_of(have, device), float(have.get("CPU", 1))

    def floor(value: float) -> float:
        # Rounded down: Ray would wait forever for shares that add up to slightly too much.
        return math.floor(1000 * value) / 1000

    gpu = floor(1 / math.ceil(workers / gpus)) if gpus else 0.0
    return {"num_cpus": floor(min(1.0, (1 - spare) * cpus / workers)), "num_gpus": gpu}


def gpus_of(have: Mapping[str, float], device: str | None) -> int:
    """Return the number of GPUs that may be used."""
    on_cpu = device is not None and not device.startswith("cuda")
    return 0 if on_cpu else int(have.get("GPU", 0))


def sharing(some: int, workers: int, places: int) -> int:
    """Return how many of `some` workers may share one of the places of all workers."""
    return max(1, min(some, math.ceil(workers / places)))


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Silence the log of Ray Serve, whose errors are raised."""
    log = logging.getLogger("ray.serve")
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(logging.ERROR)  # Serve set it again
