"""CUDA graphs on the CPU: operations are written down once and replayed on the same tensors.

No Python runs in a replay, as on a GPU: what the host decided while recording stays decided, and
what was not written into a tensor of its own is lost. What a capture refuses is refused here:
reading a value back, and tensors made from Python numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SYNCS = ("_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "masked_select", "equal")
BLANK = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class CaptureError(RuntimeError):
    """The operation waits for the device."""


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SYNCS:
            raise CaptureError(f"{name} cannot be captured")
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if name not in BLANK and not views:
            self.entries.append((func, args, kwargs or {}, out))
        return out


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.tape = _Tape()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, out in self.tape.entries:
                _into(out, func(*args, **kwargs))


def _into(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        if old is not new:
            old.copy_(new)
    elif isinstance(old, (list, tuple)):
        for one, other in zip(old, new, strict=True):
            _into(one, other)


class _Stream:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_stream(self, other: Any) -> None:
        self.log.append("wait")


class FakeCuda:
    """As `torch.cuda`, as far as `ops.graphs` uses it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.graphs: list[Graph] = []
        self.pools: list[Any] = []

    def device(self, device: Any) -> Any:
        return nullcontext()

    def Stream(self) -> _Stream:
        return _Stream(self.log)

    current_stream = Stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append("side")
        yield
        self.log.append("back")

    def graph_pool_handle(self) -> Any:
        self.log.append("pool")
        return (0, len(self.log))

    def CUDAGraph(self) -> Graph:
        self.graphs.append(Graph())
        return self.graphs[-1]

    @contextmanager
    def graph(self, graph: Graph, pool: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        self.log.append(f"capture {capture_error_mode}")
        self.pools.append(pool)
        with graph.tape:
            yield
