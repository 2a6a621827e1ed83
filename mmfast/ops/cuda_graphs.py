"""A function of static buffers, recorded once and replayed: one launch for hundreds of kernels.

What is recorded reads and writes tensors that stay where they are, waits for nothing and decides
nothing on the host. The same function runs as it is on a device without CUDA graphs, so what a
GPU replays is what tests run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

WARM_UPS = 3  # lazy initialisation and choice of algorithms must be over before a recording
Run = Callable[[], None]


class GraphRecorder(Protocol):
    """Records functions."""

    def record(self, run: Run) -> Run:
        """What does the same as `run` from here on; `run` may be called several times for it."""


class Eager:
    """Nothing is recorded: a function is its own replay."""

    def record(self, run: Run) -> Run:
        """The function."""
        return run


class Compiled:
    """One graph of torch.compile, an error where it would be several.

    Args:
        **options: Of torch.compile, such as `backend="aot_eager"`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def record(self, run: Run) -> Run:
        """The compiled function; it compiles when it is called first."""
        compiled: Run = torch.compile(run, fullgraph=True, dynamic=False, **self.options)
        return compiled


class CudaGraphs:
    """CUDA graphs that share one pool of memory, replayed in turn on the current stream.

    Only buffers made outside of the functions outlive a replay: what a function allocates is
    memory that the next one uses again.

    Args:
        device: A CUDA device.
        cuda: What captures; `torch.cuda`, or a stand-in in tests.
    """

    def __init__(self, device: torch.device | str = "cuda", cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = torch.device(device), cuda
        self.pool: Any = None

    def record(self, run: Run) -> Run:
        """Warm up on a side stream, capture, and give the replay."""
        cuda = self.cuda
        with cuda.device(self.device):
            side = cuda.Stream()
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
            cuda.current_stream().wait_stream(side)
            if self.pool is None:
                self.pool = cuda.graph_pool_handle()
            graph = cuda.CUDAGraph()
            # Other threads may go on with their own work on the device meanwhile.
            with cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                run()
        replay: Run = graph.replay  # holds the graph
        return replay


def graphs_for(device: torch.device | str) -> GraphRecorder:
    """CUDA graphs on a CUDA device, elsewhere nothing is recorded."""
    return CudaGraphs(device) if torch.device(device).type == "cuda" else Eager()
