"""Recording of a function of static buffers: one launch replays hundreds of kernels.

A recorded function reads and writes tensors at fixed addresses and decides nothing on the host.
Without CUDA graphs the same function runs unrecorded, so that CPU tests cover it.
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
        """Return a replay of `run`, which may be called several times to record it."""


class Eager:
    """No recording: a function is its own replay."""

    def record(self, run: Run) -> Run:
        """Return the function."""
        return run


class Compiled:
    """One graph of torch.compile with these options, or an error where it would be several."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def record(self, run: Run) -> Run:
        """Return the compiled function; it compiles at its first call."""
        compiled: Run = torch.compile(run, fullgraph=True, dynamic=False, **self.options)
        return compiled


class CudaGraphs:
    """CUDA graphs that share a pool: only buffers made outside of functions outlive a replay."""

    def __init__(self, device: torch.device | str = "cuda", cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = torch.device(device), cuda
        self.pool: Any = None

    def record(self, run: Run) -> Run:
        """Warm up on a side stream, capture, and return the replay."""
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
    """Return a recorder of CUDA graphs on a CUDA device, `Eager` elsewhere."""
    return CudaGraphs(device) if torch.device(device).type == "cuda" else Eager()
