"""Float32 products of a few rows, where the processor's library is slow at them.

A step of several answers, and a pass that verifies drafts, multiply 2 to 15 rows with every weight.
Reading the weights sets their time, but a general product lays them out anew first: on a Xeon, four
rows cost twice what one does. A batch of products of few outputs each does not, and where that was
measured to pay, it is what the layers compute. Sums run in another order, so last bits differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.models.packing import linear_layers
from mmfast.models.patching import is_compiled, override

# Numbers of rows that are measured together, by the one in the middle.
GROUPS = {3: range(2, 4), 6: range(4, 9), 12: range(9, 16)}
ROWS = range(2, 16)
PIECE = 16  # outputs of one product, at least
LARGE = 1 << 24  # weights of a model from which a pass is worth the change
_SHAPE, _ROUNDS = (9728, 896), 8  # of the weights that are measured, and how often
_GAIN = 1.15  # of the shorter time over the other


def pieces(outputs: int) -> int:
    """Return in how many equal pieces of at least `PIECE` outputs come."""
    most = max(1, outputs // PIECE)
    return next(count for count in range(most, 0, -1) if outputs % count == 0)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x` `[m, K]` times the transposed weights `[N, K]`, `[m, N]`."""
    outputs, inputs = weight.shape
    count = pieces(outputs)
    parts = weight.view(count, outputs // count, inputs).transpose(1, 2)
    found = torch.bmm(x.expand(count, -1, -1), parts)  # [pieces, m, N / pieces]
    return found.transpose(0, 1).reshape(len(x), outputs)


@cache
def paying_rows(threads: int) -> frozenset[int]:
    """Numbers of rows that are faster in pieces, measured once on so many threads."""
    weight = torch.randn(_SHAPE)
    found = set[int]()
    for middle, group in GROUPS.items():
        x = torch.randn(middle, weight.shape[1])
        stock, mine = list[float](), list[float]()
        for _ in range(_ROUNDS):
            stock.append(_seconds(F.linear, x, weight))
            mine.append(_seconds(product, x, weight))
        found |= {*group} if min(stock) > _GAIN * min(mine) else set()
    return frozenset(found)


def _seconds(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    start = time.perf_counter()
    run(x, weight)
    return time.perf_counter() - start


class FewRows:
    """The linear layers of a decoder and its head, in float32 on a CPU; none of a small model."""

    def __init__(self, model: Any) -> None:
        self._layers = _layers(model)

    @contextmanager
    def installed(self, rows: int | None = None) -> Iterator[None]:
        """Let them compute so what pays; `rows` are those of the pass, None where they vary."""
        layers = self._layers if rows is None or rows in ROWS else []
        pays = paying_rows(torch.get_num_threads()) if layers else frozenset[int]()
        with ExitStack() as stack:
            for layer in layers if pays and (rows is None or rows in pays) else ():
                stack.enter_context(override(layer, "forward", partial(_forward, layer, pays)))
            yield


def few_rows(model: Any) -> AbstractContextManager[None]:
    """Let the layers of a model compute so what pays, whatever rows its passes have."""
    return FewRows(model).installed()


def _layers(model: Any) -> list[nn.Linear]:
    """The layers of a model that is large enough, in float32 on a CPU, and not compiled."""
    found = [
        each
        for each in linear_layers(model)
        if type(each) is nn.Linear and each.weight.dtype == torch.float32
    ]
    cpu = all(each.weight.device.type == "cpu" for each in found)
    large = sum(each.weight.numel() for each in found) >= LARGE
    return found if cpu and large and not is_compiled(model) else []


def _forward(layer: nn.Linear, pays: frozenset[int], stock: Any, x: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if rows not in pays or torch.is_grad_enabled():
        found: Tensor = stock(x)
        return found
    found = product(x.reshape(rows, -1), layer.weight)
    if layer.bias is not None:
        found = found.add_(layer.bias)
    return found.reshape(*x.shape[:-1], -1)
