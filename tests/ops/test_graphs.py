"""Recording functions of static buffers: order of a capture, one pool, what it refuses."""

from __future__ import annotations

import pytest
import torch
from graph_recorder import CaptureError, FakeCuda

from mmfast.models.speech.moshi_graphs import WARM_UPS, CudaGraphs, compile_run, eager, graphs_for


def test_a_capture_is_warmed_up_on_a_side_stream_and_shares_one_pool() -> None:
    cuda, calls = FakeCuda(), []
    graphs = CudaGraphs("cpu", cuda)
    buffer = torch.zeros(3)

    def run() -> None:
        calls.append(1)
        buffer.add_(1)

    replay = graphs(run)
    expected = ["wait", "side", "back", "wait", "pool", "capture thread_local"]
    assert cuda.log == expected and len(calls) == WARM_UPS + 1
    graphs(run)
    assert cuda.log.count("pool") == 1 and cuda.pools == [graphs.pool] * 2
    before, count = buffer.clone(), len(calls)
    replay()
    assert torch.equal(buffer, before + 1) and len(calls) == count  # no Python in a replay


def test_the_recorder_tells_static_from_lost() -> None:
    buffer, other = torch.zeros(2), torch.zeros(2)
    holder = {"lost": torch.zeros(2)}

    def run() -> None:
        holder["lost"] = holder["lost"] + 1  # a new tensor each time, which no replay sees
        buffer.copy_(holder["lost"])
        other.add_(2)

    replay = CudaGraphs("cpu", FakeCuda())(run)
    stuck, moved = buffer.clone(), other.clone()
    replay()
    assert torch.equal(buffer, stuck) and torch.equal(other, moved + 2)


@pytest.mark.parametrize("what", ["item", "tensor", "nonzero"])
def test_the_recorder_refuses_what_a_capture_refuses(what: str) -> None:
    x = torch.ones(2)
    bad = {"item": lambda: x[0].item(), "tensor": lambda: torch.tensor([1.0]), "nonzero": x.nonzero}
    with pytest.raises(CaptureError, match="captured"):
        CudaGraphs("cpu", FakeCuda())(lambda: (bad[what](), None)[1])


def test_without_cuda_the_function_is_its_own_replay() -> None:
    def run() -> None:
        pass

    assert graphs_for("cpu")(run) is run and graphs_for("cpu") is eager
    assert isinstance(graphs_for("cuda"), CudaGraphs)


def test_compiled_is_one_graph_or_an_error() -> None:
    torch._dynamo.reset()
    x = torch.zeros(2)

    def good() -> None:
        x.add_(1)

    def bad() -> None:
        if x.sum() > 0:
            x.add_(1)

    replay = compile_run(good, backend="eager")
    replay()
    assert x.tolist() == [1, 1]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_run(bad, backend="eager")()
