"""Calls of a model in slices, between which its owner does other work."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from mmfast.core.locks import holding

T = TypeVar("T")
_LEAST = 16  # rows of a product that are worth a call of their own


class _Abandoned(BaseException):
    """The caller has dropped the result."""


class Slicer:
    """Runs calls in slices, in a thread that its owner waits for.

    Two threads never use the model at once. A call can stop before each of the blocks it is given,
    and, where it begins with a budget, at any function of torch: large products and attention are
    computed in pieces of rows, so that no slice does more than is allowed, however long the prompt.
    """

    def __init__(self) -> None:
        # seconds after which a call stops; None never stops it
        self.budget: float | None = None
        # multiplications after which it stops, too, and those since the last `allow`
        self.work, self.done = math.inf, 0.0
        # seconds of the last call's longest slice and of all; processor seconds of the thread
        self.longest = self.total = self.worked = 0.0
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._call: Callable[[], Any] | None = None
        self._result: tuple[bool, Any] | None = None
        self._stopping = False
        self._since = 0.0
        self._thread: threading.Thread | None = None

    def run(
        self, call: Callable[[], T], blocks: Iterable[nn.Module] = ()
    ) -> Generator[None, None, T]:
        """Yield each time `call` stops; return the value of the call."""
        self._call, self._result = call, None
        self.longest = self.total = 0.0
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mmfast-slices", daemon=True)
            self._thread.start()
        with self._stops(blocks):
            try:
                while not self._resumed():
                    yield
            except GeneratorExit:
                self._stopping = True
                self._resumed()
                self._stopping, self._result = False, None  # its frames hold the call's memory
                raise
        found: T = self._value()
        return found

    def allow(self, budget: float | None, work: float) -> None:
        """Let the next slices take so many seconds each, and so many multiplications in all."""
        self.budget, self.work, self.done = budget, work, 0.0

    def close(self) -> None:
        """End the thread; no call may be at work."""
        if self._thread is not None:
            self._call = None
            self._go.release()
            self._thread.join()
            self._thread = None

    def _value(self) -> Any:
        assert self._result is not None
        (fine, value), self._result = self._result, None
        if not fine:
            raise value
        return value

    def _resumed(self) -> bool:
        """Run the call to its next stop; return True if it has ended."""
        self._since = time.perf_counter()
        self._go.release()
        self._back.acquire()
        took = time.perf_counter() - self._since
        self.longest, self.total = max(self.longest, took), self.total + took
        return self._result is not None

    @contextmanager
    def _stops(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        handles = [block.register_forward_pre_hook(self._before) for block in blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, *_: Any) -> None:
        if threading.current_thread() is self._thread:
            self.look()

    # --- the thread of the calls --------------------------------------------------------------

    def look(self) -> None:
        """Stop where the seconds of the slice are over, unless other threads wait for a lock."""
        over = self.budget is not None and time.perf_counter() - self._since >= self.budget
        if over and not holding():
            self.stop()

    def stop(self) -> None:
        """Let the owner go on, until it resumes the call."""
        self.worked = time.thread_time()
        self._back.release()
        self._go.acquire()
        if self._stopping:
            raise _Abandoned

    def room(self, row: float, rows: int) -> int:
        """Return how many of so many rows to compute next; `row` is the work on each."""
        if self.fits(row, rows):
            return rows
        fit = (self.work - self.done) / max(1.0, row)
        if fit < min(_LEAST, rows) and self.done:
            self.stop()
            return self.room(row, rows)
        return max(1, int(fit))

    def fits(self, row: float, rows: int) -> bool:
        """Return True where nothing stops the next rows from being computed at once."""
        few = (self.work - self.done) / max(1.0, row) >= rows
        return few or self.budget is None or holding()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._call is None:
                return
            try:
                if self.budget is None:
                    self._result = True, self._call()
                else:
                    with _TorchCalls(self):
                        self._result = True, self._call()
            except BaseException as error:
                self._result = False, error
            self._call, self.worked = None, time.thread_time()
            self._back.release()


class _TorchCalls(TorchFunctionMode):
    """Lets the calls of torch's functions in a thread stop, and computes large ones in pieces."""

    def __init__(self, slicer: Slicer) -> None:
        super().__init__()
        self._slicer = slicer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Stand in the place of a function."""
        given = dict(kwargs or {})
        self._slicer.look()
        if (parted := _PARTED.get(func)) is None:
            return func(*args, **given)
        return parted(self._slicer, func, *args, **given)


def _linear(
    slicer: Slicer, stock: Callable[..., Tensor], x: Tensor, *args: Any, **more: Any
) -> Tensor:
    weight = args[0] if args else more["weight"]
    rows = x.numel() // max(1, x.shape[-1])
    work = float(weight.numel())
    if x.ndim < 2 or slicer.fits(work, rows):
        slicer.done += rows * work
        return stock(x, *args, **more)
    pieces, start, flat = list[Tensor](), 0, x.reshape(rows, x.shape[-1])
    while start < rows:
        n = slicer.room(work, rows - start)
        slicer.done += n * work
        pieces.append(stock(flat[start : start + n], *args, **more))
        start += n
    return torch.cat(pieces).reshape(*x.shape[:-1], -1)


def _product(
    slicer: Slicer, stock: Callable[..., Tensor], a: Any, b: Any, *args: Any, **more: Any
) -> Tensor:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.ndim, b.ndim) < 2:
        return stock(a, b, *args, **more)
    batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    rows, work = a.shape[-2], float(batch * a.shape[-1] * b.shape[-1])
    if args or slicer.fits(work, rows):
        slicer.done += rows * work
        return stock(a, b, *args, **more)
    out: Tensor | None = more.get("out")
    pieces, start = list[Tensor](), 0
    while start < rows:
        n = slicer.room(work, rows - start)
        slicer.done += n * work
        part = slice(start, start + n)
        given = {} if out is None else {"out": out[..., part, :]}
        pieces.append(stock(a[..., part, :], b, **given))
        start += n
    return torch.cat(pieces, -2) if out is None else out


def _convolution(
    slicer: Slicer, stock: Callable[..., Tensor], x: Tensor, *args: Any, **more: Any
) -> Tensor:
    """Run items `[B, C, …]` of a batch in pieces; patches, which do not overlap, count once."""
    weight = args[0] if args else more["weight"]
    work, pieces, start = float(x[:1].numel() * len(weight)), list[Tensor](), 0
    while start < len(x):
        n = slicer.room(work, len(x) - start)
        slicer.done += n * work
        pieces.append(stock(x[start : start + n], *args, **more))
        start += n
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _attention(
    slicer: Slicer,
    stock: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """Attend `[B, H, n, d]` in pieces: items of the batch, and queries where one is too long."""
    items, rows, size = len(query), query.shape[-2], key.shape[-2]
    work = float(query[0].numel() // max(1, rows) * (size + size))  # on one query of one item
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if dropout_p or slicer.fits(rows * work, items):
        slicer.done += items * rows * work
        return stock(*given, **more)
    if items > 1:
        masks = attn_mask is not None and attn_mask.ndim == query.ndim and len(attn_mask) > 1
        found, start = list[Tensor](), 0
        while start < items:
            n = slicer.room(rows * work, items - start)
            part = slice(start, start + n)
            mask = attn_mask[part] if masks and attn_mask is not None else attn_mask
            both = key[part], value[part], mask
            found.append(_attention(slicer, stock, query[part], *both, 0.0, is_causal, **more))
            start += n
        return torch.cat(found)
    return _queries(slicer, stock, work, *given, **more)


def _kernel(
    slicer: Slicer, stock: Callable[..., int], query: Tensor, key: Tensor, *args: Any, **more: Any
) -> int:
    """Choose no kernel that cannot be called in pieces, where the work is more than is left."""
    work = 2.0 * query.numel() * key.shape[-2]
    if slicer.budget is not None and slicer.done + work > slicer.work:
        return int(SDPBackend.MATH.value)
    slicer.done += work
    return stock(query, key, *args, **more)


def _queries(
    slicer: Slicer,
    stock: Callable[..., Tensor],
    work: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    **more: Any,
) -> Tensor:
    """Attend with some of the queries of one item at a time."""
    pieces, start, rows = list[Tensor](), 0, query.shape[-2]
    size = key.shape[-2]
    while start < rows:
        n = slicer.room(work, rows - start)
        stop = start + n
        seen, last = mask, size
        if is_causal:  # counted from the first key
            places, last = torch.arange(size, device=query.device), min(size, stop)
            seen = places[:last] <= places.new_tensor(range(start, stop))[:, None]
        elif mask is not None and mask.shape[-2] > 1:
            seen = mask[..., start:stop, :]
        slicer.done += n * work
        both = key[..., :last, :], value[..., :last, :]
        pieces.append(stock(query[..., start:stop, :], *both, seen, dropout_p, False, **more))
        start = stop
    return torch.cat(pieces, -2)


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.mm)
_PARTED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv2d, F.conv3d), _convolution),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys(_PRODUCTS, _product),
    torch._fused_sdp_choice: _kernel,
}
