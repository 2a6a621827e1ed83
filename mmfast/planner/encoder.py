"""Time of the vision encoder: one block on the real input times the number of blocks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.models.adapter import tower_of
from mmfast.models.flops import linear_macs, tower_pairs
from mmfast.models.records import features_given
from mmfast.models.scores import received
from mmfast.planner.calibrate import Bench
from mmfast.planner.capture import Reached, reach
from mmfast.planner.rates import Rates
from mmfast.planner.work import pixels_of

SHORT_MS = 1500.0  # an encoder this fast is run as a whole
SAMPLE_ROWS = 4  # frames or tiles of a batch are alike; more of them are counted, not run


def encoder_rates(bench: Bench, rates: Rates, inputs: Mapping[str, Any]) -> Rates:
    """Add a point for these inputs, unless one of half to twice their size is known."""
    pixels = pixels_of(inputs)
    if not pixels or any(0.5 <= pixels / size <= 2.0 for size, _ in rates.encode):
        return rates
    total, signal = 0.0, 0.0
    for kind in features_given(inputs):
        ms, read = _one_kind(bench, kind, inputs)
        total, signal = total + ms, signal + read
    return rates.gain(encode=[(pixels, total)], signal=[(pixels, signal)])


def _one_kind(bench: Bench, kind: str, inputs: Mapping[str, Any]) -> tuple[float, float]:
    base = bench.model.base_model
    method = getattr(base, f"get_{kind}_features")
    names = [name for name in inspect.signature(method).parameters if name in inputs]
    arguments = {name: inputs[name] for name in names}

    def whole() -> Any:
        return method(**arguments)

    blocks = _blocks(bench.model)
    with torch.inference_mode():
        found = reach(blocks[0], whole, bench.clock) if blocks else None
    if found is None:  # a tower of convolutions, or another encoder than the vision tower
        return bench.duration(whole), 0.0
    estimate, signal = _estimate(bench, found, blocks, arguments)
    complete = len(blocks) == bench.shape.blocks
    return bench.duration(whole) if estimate < SHORT_MS and complete else estimate, signal


def _blocks(model: Any) -> nn.ModuleList:
    try:
        return tower_of(model).blocks
    except (ModelError, StopIteration):
        return nn.ModuleList()


def _estimate(
    bench: Bench, found: Reached, blocks: nn.ModuleList, arguments: Mapping[str, Any]
) -> tuple[float, float]:
    """Milliseconds of the encoder, and of reading one attention signal."""
    hidden = found.hidden
    batch = hidden.shape[0] if hidden.ndim == 3 else 1
    rows = min(batch, SAMPLE_ROWS)
    call = found.rows(rows) if batch > rows else found
    one = bench.duration(lambda: blocks[0](*call.args, **call.kwargs)) * batch / rows
    tokens = hidden.shape[:-1].numel()
    rate = one / max(1, linear_macs(blocks[0]) * tokens)
    rest = _rest_macs(bench) * tokens * rate
    grid = next((v for k, v in arguments.items() if k.endswith("grid_thw")), None)
    segment = tokens // batch if grid is None else int(grid[0, 1] * grid[0, 2])
    extra = _whole_frames(bench, arguments, len(blocks))
    signal = _signal(bench, segment) * tokens / segment
    return found.ms + one * bench.shape.blocks + rest + extra, signal


def _rest_macs(bench: Bench) -> int:
    """Multiply-adds per patch outside the blocks: projector and merger."""
    base = bench.model.base_model
    names = ("multi_modal_projector", "connector", "mlp1", "aligner")
    found = [getattr(base, name) for name in names if hasattr(base, name)]
    merger = getattr(tower_of(bench.model).module, "merger", None)
    macs = sum(linear_macs(module) for module in found)
    return macs + (linear_macs(merger) // 4 if isinstance(merger, nn.Module) else 0)


def _whole_frames(bench: Bench, arguments: Mapping[str, Any], present: int) -> float:
    """What full-attention blocks take beyond windowed ones, block 0 being windowed."""
    vision = bench.model.config.vision_config
    grid = next((v for k, v in arguments.items() if k.endswith("grid_thw")), None)
    if not isinstance(grid, Tensor) or not getattr(vision, "window_size", None):
        return 0.0
    full = sum(1 for index in vision.fullatt_block_indexes if index < bench.shape.blocks)
    t, h, w = (int(v) for v in grid[0])
    pairs = t * (h * w) ** 2 - min(tower_pairs(bench.model, (t, h, w))[:present])
    patches = h * w
    per_pair = _vision_attention(bench, patches) / patches**2
    return full * pairs * per_pair * len(grid)


def _heads(bench: Bench) -> tuple[int, int]:
    vision = bench.model.config.vision_config
    names = ("num_attention_heads", "num_heads")
    heads = next((int(getattr(vision, n)) for n in names if hasattr(vision, n)), 1)
    return heads, max(1, int(getattr(vision, "hidden_size", heads)) // heads)


def _random_heads(bench: Bench, n: int) -> Tensor:
    heads, size = _heads(bench)
    return torch.randn(1, heads, n, size, device=bench.device).to(bench.dtype)


def _vision_attention(bench: Bench, n: int) -> float:
    q = _random_heads(bench, n)
    return bench.duration(lambda: F.scaled_dot_product_attention(q, q, q))


def _signal(bench: Bench, n: int) -> float:
    """Attention received within one frame: a softmax that the fused kernel never shows."""
    q = _random_heads(bench, n)
    return bench.duration(lambda: received(q, q, None, is_causal=False))
