"""Cost of calls: time to the first token and in the encoder, FLOPs and bytes of a stage.

FLOPs tell the best speed-up that a reduction can reach. Linear layers are read off the model,
attention from the token counts that were really used in each layer, so methods that prune before
the model, inside it or in the tower share one model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from mmfast.core.trace import settled, synchronize
from mmfast.models.packing import PackedLinear

T = TypeVar("T")
Clock = Callable[[], float]


def timed(fn: Callable[[], T], clock: Clock = time.perf_counter) -> tuple[T, float]:
    """Run `fn` and return its result and milliseconds, the device's queue drained on both ends."""
    synchronize()
    start = clock()
    result = fn()
    synchronize()
    return result, (clock() - start) * 1e3


class FirstToken:
    """A `generate` streamer that notes when the first new token arrives; `then` gets all, too."""

    def __init__(self, clock: Clock = time.perf_counter, then: Any = None) -> None:
        self.at, self._then = 0.0, then
        self._clock = clock
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with every new token."""
        if self._prompt_seen and not self.at:
            synchronize()
            self.at = self._clock()
        self._prompt_seen = True
        if self._then is not None:
            self._then.put(value)

    def end(self) -> None:
        """Called after the last token."""
        if self._then is not None:
            self._then.end()


@dataclass
class Stopwatch:
    """Milliseconds added up."""

    ms: float = 0.0


@contextmanager
def encoder_timer(model: Any) -> Iterator[Stopwatch]:
    """Add up the time spent inside the vision tower."""
    watch, started = Stopwatch(), [0.0]

    def before(*_: Any) -> None:
        started[0] = time.perf_counter()

    def after(*_: Any) -> None:
        watch.ms += (settled() - started[0]) * 1e3

    tower = model.get_encoder("image")
    with tower.register_forward_pre_hook(before), tower.register_forward_hook(after):
        yield watch


def linear_macs(module: nn.Module, part: str = "") -> int:
    """Multiply-adds per token of the linear layers whose name contains `part`."""
    return sum(
        m.in_features * m.out_features
        for name, m in module.named_modules()
        if isinstance(m, (nn.Linear, PackedLinear)) and part in name
    )


def attention_flops(n: int, width: int, causal: bool = True) -> int:
    """QK and PV of `n` queries on `n` keys over `width` = heads x head size.

    A causal row i reads i + 1 keys, hence n (n + 1) / 2 pairs instead of n squared.
    """
    return 2 * n * (n + 1) * width if causal else 4 * n * n * width


def prefill_flops(model: Any, lengths: Sequence[int], causal: bool = True) -> int:
    """FLOPs of one prefill of `lengths` tokens per decoder layer, and logits of one position.

    `causal` counts only the pairs a causal mask leaves (a fused kernel skips the others).
    """
    layers, width = model.get_decoder().layers, attention_width(model)
    body = sum(
        2 * linear_macs(layer) * n + attention_flops(n, width, causal)
        for layer, n in zip(layers, lengths, strict=True)
    )
    return body + 2 * int(model.get_output_embeddings().weight.numel())


def attention_width(model: Any) -> int:
    """Query heads x head size of the decoder."""
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_attention_heads * size)


def decode_bytes(model: Any, lengths: Sequence[int]) -> int:
    """Bytes one decoding step reads: every weight of the decoder and the keys and values.

    At batch 1 a step is bound by memory, not by FLOPs, so its ideal is a ratio of bytes.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings().weight
    size = attention_width(model) // config.num_attention_heads
    weights = sum(linear_macs(layer) for layer in model.get_decoder().layers) + head.numel()
    entries = 2 * config.num_key_value_heads * size * sum(lengths)
    return int((weights + entries) * head.element_size())


def tower_blocks(model: Any) -> nn.ModuleList:
    """The transformer blocks of the vision tower: its longest module list."""
    lists = [m for m in model.get_encoder("image").modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len)


def tower_pairs(model: Any, grid: tuple[int, int, int]) -> list[int]:
    """Query-key pairs of each tower block for patches (steps, rows, columns).

    Attention stays within a frame (a pair of frames for Qwen), and within windows in the
    windowed blocks of Qwen2.5-VL.
    """
    config, (steps, rows, columns) = model.config.vision_config, grid
    full = steps * (rows * columns) ** 2
    side = getattr(config, "window_size", None)
    if side is None:
        return [full] * len(tower_blocks(model))
    side //= config.patch_size
    # Each axis is cut into windows, so the sum of squared areas is a product of two sums.
    windowed = steps * _squares(rows, side) * _squares(columns, side)
    return [
        full if index in config.fullatt_block_indexes else windowed
        for index in range(len(tower_blocks(model)))
    ]


def _squares(n: int, side: int) -> int:
    return n // side * side**2 + (n % side) ** 2


def tower_flops(
    model: Any,
    grid: tuple[int, int, int],
    entering: Sequence[int],
    leaving: Sequence[int],
    folded: Collection[int] = (),
) -> int:
    """FLOPs of the tower's blocks; merging happens between attention and MLP.

    `grid` has the patches (steps, rows, columns) before any reduction; `entering` and `leaving` are
    the tokens in attention and MLP of each block, all frames together. Blocks numbered in `folded`
    have no attention (`models.vision.folding`).
    """
    whole = grid[0] * grid[1] * grid[2]
    blocks = tower_blocks(model)
    width = int(model.config.vision_config.hidden_size)
    total = 0
    parts = zip(blocks, tower_pairs(model, grid), entering, leaving, strict=True)
    for number, (block, pairs, n, m) in enumerate(parts):
        mlp = linear_macs(block, "mlp")
        total += 2 * mlp * m
        if number not in folded:
            total += 2 * (linear_macs(block) - mlp) * n + int(4 * pairs * (n / whole) ** 2 * width)
    return total
