"""Parts of the engine on Ray that need no cluster: parcels, and the thread that starts a node."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.kv import KVBlock
from mmfast.serve.engine.slots import Embedded, Filled, moved
from mmfast.serve.engine.stages import PromptPiece
from mmfast.serve.ray import cluster
from mmfast.serve.ray.deployments import unwrap, wrap
from mmfast.serve.ray.engine import RayEngine


def carried(value: Any) -> Any:
    """Carry a value as Ray does: arrays apart from the pickle, read-only at the other end."""
    buffers: list[Any] = []
    body = pickle.dumps(wrap(value), 5, buffer_callback=buffers.append)
    return unwrap(pickle.loads(body, buffers=[bytes(each.raw()) for each in buffers]))


def test_a_parcel_keeps_every_value() -> None:
    same = torch.randn(30_000, 3)
    value = {
        "f": same,
        "again": same,
        "bf16": torch.randn(7).to(torch.bfloat16),
        "turned": torch.arange(10).reshape(5, 2).T,
        "part": torch.randn(10_000)[:3],
        "bool": torch.rand(9) > 0.5,
        "complex": torch.randn(3, dtype=torch.complex64),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "trained": torch.nn.Parameter(torch.randn(2)),
        "array": np.arange(30, dtype="<i2").reshape(3, 10)[:, ::-1],
        "columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "nothing": np.zeros((0, 3)),
        "number": np.array(2.5),
        "rest": ("text", 7, None),
    }
    back = carried(value)
    for name, before in value.items():
        if isinstance(before, torch.Tensor):
            assert back[name].dtype == before.dtype and torch.equal(back[name], before), name
        elif isinstance(before, np.ndarray):
            assert back[name].dtype == before.dtype and np.array_equal(back[name], before), name
        else:
            assert back[name] == before
    assert back["again"] is back["f"]
    back["f"] += 1  # its own memory, which may be written to
    assert not torch.equal(back["f"], same)


def test_a_parcel_copies_a_tensor_once_and_only_its_own_part() -> None:
    tensor = torch.zeros(1000, 100)
    parcel = wrap({"a": tensor, "b": tensor, "c": tensor[:10]})
    assert sum(each.nbytes for each in parcel.arrays) == tensor.nbytes + 10 * 100 * 4
    assert len(parcel.body) < 1000  # the values lie apart


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4))))
def test_tensors_of_any_shape_and_type(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [(torch.rand(shape) * 9).to(dtype) for dtype, shape in kinds]
    back = carried(tensors)
    assert [each.shape for each in back] == [each.shape for each in tensors]
    for after, before in zip(back, tensors, strict=True):
        assert after.dtype == before.dtype and torch.equal(after, before)


def test_the_data_of_a_replica_go_to_the_device_of_another() -> None:
    prompt = Embedded(torch.zeros(2, 4), torch.zeros(1, 2), planes=(torch.ones(1),))
    kv = KVBlock((torch.zeros(1, 2, 4),), (torch.zeros(1, 2, 4),))
    piece = PromptPiece(Filled(kv, torch.zeros(1), torch.zeros(9)), 2)
    there = torch.device("meta")
    back, filled = carried(prompt), carried(piece)
    assert moved(back, there).planes[0].device == there
    assert moved(filled, there).filled.kv.values[0].device == there
    assert moved({"a": [torch.zeros(1), "b"]}, there)["a"][1] == "b"
    assert moved(prompt, torch.device("cpu")) is prompt


# ---- a node lives as long as the thread that starts it


def fake_ray(calls: list[threading.Thread], error: Exception | None = None) -> Any:
    def init(address: str, **options: Any) -> None:
        calls.append(threading.current_thread())
        if error is not None:
            raise error

    return SimpleNamespace(init=init)


def test_a_short_thread_leaves_the_start_to_one_that_lives_on() -> None:
    calls: list[threading.Thread] = []
    starter = threading.Thread(target=cluster.start, args=(fake_ray(calls), "local"))
    starter.start()
    starter.join(30)
    time.sleep(0.1)
    (keeper,) = calls
    assert keeper is not starter and not starter.is_alive()
    assert keeper.is_alive() and keeper.daemon  # ends with the process, and delays it never


def test_the_handler_of_sigterm_outlives_the_start_of_a_node() -> None:
    """Ray sets its own below Python's."""
    put = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
        ("PyOS_setsig", ctypes.pythonapi)
    )
    ignore = 1  # SIG_IGN, which Python does not know of here

    def init(address: str, **options: Any) -> None:
        put(signal.SIGTERM, ignore)

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        starter = threading.Thread(
            target=cluster.start, args=(SimpleNamespace(init=init), "ray://somewhere:1")
        )
        starter.start()
        starter.join(30)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_main_thread_starts_a_node_itself() -> None:
    calls: list[threading.Thread] = []
    cluster.start(fake_ray(calls), "local")
    assert calls == [threading.main_thread()]


def test_an_error_of_the_start_comes_back_and_its_thread_ends() -> None:
    calls: list[threading.Thread] = []
    errors: list[BaseException] = []

    def start() -> None:
        try:
            cluster.start(fake_ray(calls, RuntimeError("no such cluster")), "ray://nowhere:1")
        except MmfastError as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    starter.join(30)
    assert "cannot start at 'ray://nowhere:1': no such cluster" in str(errors[0])
    calls[0].join(30)
    assert not calls[0].is_alive()


LATE = """
import sys, time
for name, seconds in (("dashboard/agent.py", 22), ("workers/default_worker.py", 62)):
    if any(each.endswith(name) for each in sys.orig_argv):
        time.sleep(seconds)
"""


def test_agents_that_were_late_have_ports_in_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    services = pytest.importorskip("ray._private.services")
    seen: list[list[str]] = []
    given = ["raylet", "--metrics-agent-port=0", "--metrics_export_port=0", "--node_port=0"]
    given += ["--runtime_env_agent_port=0", "--python_worker_command=w --metrics-agent-port=0"]
    given += ["--dashboard_agent_command=a --grpc-port=0 --metrics-export-port=0 --listen-port=5"]
    monkeypatch.setattr(services, "start_ray_process", lambda command, kind: seen.append(command))

    def init(address: str, **options: Any) -> None:
        services.start_ray_process(["monitor", "--listen-port=0"], "monitor")
        services.start_ray_process(given, "raylet")
        if len(seen) == 2:
            raise RuntimeError("The current node timed out during startup.")

    before = services.start_ray_process
    cluster.start(SimpleNamespace(init=init), "local")
    assert seen[:3] == [["monitor", "--listen-port=0"], given, ["monitor", "--listen-port=0"]]
    assert services.start_ray_process is before
    *command, listen = seen[3]
    ports = re.findall(r"(\w+)[-_]port=(\d+)", " ".join(command))
    metrics, export, node, runtime, worker, grpc, agent_export, agent_listen = (
        int(port) for _, port in ports
    )
    assert node == 0 and metrics == worker == grpc and export == agent_export
    assert listen == f"--dashboard_agent_listen_port={agent_listen}"
    assert len({metrics, export, runtime, agent_listen} - {0, 5}) == 4


@pytest.mark.slow
@pytest.mark.ray
def test_a_node_starts_whose_agents_and_workers_are_late(tmp_path: Path) -> None:
    """As on a busy machine: Ray itself waits 15 s for an agent, and 60 s for a worker."""
    pytest.importorskip("ray")
    (tmp_path / "sitecustomize.py").write_text(LATE, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    code = "import ray; from mmfast.serve.ray.cluster import start; start(ray, 'local', num_cpus=1)"
    code += "; print(ray.get(ray.remote(lambda: 'it computes').remote())); ray.shutdown()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout.endswith("it computes\n"), done.stderr[-2000:]


# ---- refusals before a cluster is started


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduce": "fastv@llm3:0.5"}, "fastv@llm3:0.5"),
        ({"cache": "snapkv:64"}, "snapkv:64"),
        ({"reduce": "evz:0.5"}, "did you mean 'evs'"),
        ({"cache": "snapkw:64", "replicas": 2}, "did you mean 'snapkv'"),
        ({"reduce": "evz:0.5", "replicas": 2}, "did you mean 'evs'"),
    ],
)
def test_specs_are_checked_first(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmfast.serve.ray.engine.Cluster", None)  # is not reached
    with pytest.raises(SpecError) as error:
        RayEngine(**options)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert ("--replicas" in str(error.value)) == ("evz" not in words and "did you" not in words)


# ---- roles, run here one behind the other


@pytest.mark.slow
def test_a_token_outside_the_vocabulary_is_refused_by_each_part_as_in_process() -> None:
    from mmfast.serve.engine.base import Failure, Finish, Message, Request, SamplingOptions
    from mmfast.serve.engine.request import checked
    from mmfast.serve.engine.scheduler import Scheduler
    from mmfast.serve.ray.deployments import (
        DecodeReplica,
        EncodeReplica,
        PrefillReplica,
        ReplicaSettings,
    )

    def asked(name: str, **options: Any) -> Request:
        sampling = checked(SamplingOptions(6, **options))
        return Request(name, (Message("user", ("which way does it move?",)),), sampling)

    plan = ReplicaSettings(device="cpu", threads=0)
    encode, prefill, decode = EncodeReplica(plan), PrefillReplica(plan), DecodeReplica(plan)
    here = Scheduler(None, device="cpu")
    wrongs: list[dict[str, Any]] = [
        {"logit_bias": ((10**6, 1.0),)},
        {"logit_bias": ((3, 1.0), (1400, -1.0))},
        {"stop_token_ids": (1400,)},
    ]

    async def answer(first: Request, second: Request) -> Any:
        piece = await prefill(await encode(first, None), 6)
        return [each async for each in decode(second, piece)][-1][-1]

    async def main() -> None:
        assert isinstance(await answer(asked("fine"), asked("fine")), Finish)
        for i, wrong in enumerate(wrongs):
            with pytest.raises(MmfastError) as caught:
                here.submit(asked("here", **wrong), print)
            told = Failure(str(caught.value), 400, "invalid_request_error")
            assert await encode(asked(f"a{i}", **wrong), None) == told
            assert await answer(asked(f"b{i}"), asked(f"b{i}", **wrong)) == told
            assert await answer(asked(f"c{i}", **wrong), asked(f"c{i}", **wrong)) == told

    try:
        asyncio.run(main())
    finally:
        here.close()
        for part in (encode, prefill, decode):
            part._stage.close()
