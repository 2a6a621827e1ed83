"""A faster vision tower, on request: `encoder="fast"`, `"compile"` or `"graph"`.

Nothing here drops or merges tokens. Features are those of the stock tower up to rounding, since
sums run in another order; leaving out blocks behind the feature layer, and a pooled head that is
not read, changes no bit.

Stock towers that pack the patches of all items into one sequence loop over its segments, except
under flash attention, which gets their boundaries. `attend` is an attention function of that kind
without a further package: its name makes the tower hand it the boundaries, and all windows or
frames are computed in one call.

A CUDA graph per input shape replays the tower in one launch. Positions and boundaries, which a
tower computes from grids on the host, are computed before and handed to it, so that recording never
waits for the device. A graph reads and writes memory of its own: inputs are copied in, outputs out.
"""

from __future__ import annotations

import inspect
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from os import environ
from typing import Any
from weakref import WeakKeyDictionary

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import AttentionInterface

from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.locks import WholeLock
from mmfast.models.families.adapter import tower_of
from mmfast.models.families.tower import SEGMENTS, Tower, attention_of, grid_tables
from mmfast.models.patching import override
from mmfast.models.vision.folding import plan_encoder
from mmfast.models.vision.row_blocks import in_blocks
from mmfast.ops.attention import segment_attention

Convolution = nn.Conv2d | nn.Conv3d
# By the number of sides of a patch: pictures to rows of patches, and their features to maps.
_PATCHES = {
    2: ("b c (h p) (w q) -> b h w (c p q)", "b h w d -> b d h w"),
    3: ("b c (n t) (h p) (w q) -> b n h w (c t p q)", "b n h w d -> b d n h w"),
}


def patch_convolutions(module: nn.Module) -> list[Convolution]:
    """Convolutions of a tower that cut their input into patches and do nothing else."""
    found = [each for each in module.modules() if isinstance(each, Convolution)]
    return [each for each in found if _cuts(each)]


def _cuts(conv: Convolution) -> bool:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and max(conv.kernel_size) > 1
    flush = conv.padding == "valid" or set(conv.padding) == {0}
    return plain and flush and conv.stride == conv.kernel_size


def as_linear(conv: Convolution, call: Callable[..., Any], x: Tensor) -> Tensor:
    """The output of `conv` for `x` `[B, C, (T,) H, W]`, up to the order of summation.

    The result has the shape a convolution gives; where the towers flatten it, no copy is made.
    """
    sizes = conv.kernel_size
    if x.ndim != len(sizes) + 2:
        return call(x)  # type: ignore[no-any-return]
    counts = [have // size for have, size in zip(x.shape[2:], sizes, strict=True)]
    for axis, (count, size) in enumerate(zip(counts, sizes, strict=True), start=2):
        x = x.narrow(axis, 0, count * size)
    cut, joined = _PATCHES[len(sizes)]
    flat = rearrange(x, cut, **dict(zip("tpq"[-len(sizes) :], sizes, strict=True)))
    out = F.linear(flat, conv.weight.flatten(1), conv.bias)
    return rearrange(out, joined)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface: `[1, H, S, d]` each to `[1, S, H, d]`."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if k.shape[1] < q.shape[1]:  # EXAONE 4.5: a key for several queries
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    bias = None if attention_mask is None else attention_mask.reshape(-1)  # [1, 1, 1, S]
    out = segment_attention(q, k, v, cu_seq_lens_q, scale=scale, bias=bias, longest=max_length_q)
    return out[None], None


AttentionInterface.register(SEGMENTS, attend)  # once: what intercepts attention wraps it


@contextmanager
def fused_attention(tower: Tower) -> Iterator[None]:
    """SDPA everywhere, and segments of a packed tower together; flash and flex stay as they are."""
    config: Any = getattr(attention_of(tower.blocks[0]), "config", None) if tower.blocks else None
    before = getattr(config, "_attn_implementation", None)
    if before not in ("sdpa", "eager") or not getattr(tower.module, "_supports_sdpa", False):
        yield
        return
    config._attn_implementation = SEGMENTS if tower.packed else "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before


KEPT = 4  # shapes; each holds the activations of its pass
Run = Callable[[], Any]


def capture(run: Run) -> tuple[Run, Any]:
    """Record `run`, after it warmed up; returns what repeats it, and its output's memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output


class TowerGraphs:
    """Recorded passes of one tower, the least recently used dropped first."""

    def __init__(self, record: Callable[[Run], tuple[Run, Any]] = capture) -> None:
        self._record = record
        # A graph reads its inputs where they lie, so they are kept with it.
        self._known: OrderedDict[Any, tuple[Tensor, Any, Run, Any]] = OrderedDict()
        self._lock = WholeLock()  # a graph has one set of buffers

    def __len__(self) -> int:
        return len(self._known)

    def around(self, tower: Tower, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replay the tower; one whose attention is watched, or that is trained, runs as it is."""
        gates = (attention_of(block).__dict__ for block in tower.blocks)
        if torch.is_grad_enabled() or any("_mmfast_gate" in gate for gate in gates):
            return call(*args, **kwargs)
        pixels, *args = args or (kwargs.pop("pixel_values"),)  # type: ignore[assignment]
        weights = next(tower.module.parameters()).data_ptr()  # another one where a model moved
        key = (pixels.shape, pixels.dtype, weights, _key(args), _key(kwargs))
        with self._lock:
            if key not in self._known:
                if tower.packed:
                    kwargs |= prepared(tower, *args, **kwargs)
                still = pixels.clone()
                repeat, output = self._record(partial(call, still, *args, **kwargs))
                self._known[key] = still, (args, kwargs), repeat, output
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            still, _, repeat, output = self._known[key]
            still.copy_(pixels)
            repeat()
            return _copied(output)


# Kept from one call to the next, since recording takes several passes; gone with the tower.
_GRAPHS: WeakKeyDictionary[nn.Module, TowerGraphs] = WeakKeyDictionary()


@contextmanager
def graphed(tower: Tower) -> Iterator[None]:
    """Replay the tower's forward as a CUDA graph per shape; they serve later contexts, too.

    ModelError for a tower that pads its inputs, so that what it computes depends on more than
    shapes.
    """
    masks = {"patch_attention_mask", "pixel_attention_mask"} & {
        *inspect.signature(type(tower.module).forward).parameters
    }
    if masks or not len(tower.blocks):
        why = f"takes a {masks.pop()}" if masks else "has no blocks"
        raise ModelError(
            f"encoder='graph' repeats passes of one shape; {type(tower.module).__name__} {why}; "
            "use encoder='compile'"
        )
    graphs = _GRAPHS.setdefault(tower.module, TowerGraphs())
    name = "forward_features" if hasattr(tower.module, "forward_features") else "forward"  # timm
    with override(tower.module, name, partial(graphs.around, tower)):
        yield


def prepared(tower: Tower, grid_thw: Tensor, **_: Any) -> dict[str, Any]:
    """Tensors that a Qwen tower derives from its grids, on its device, under its own names."""
    device = next(tower.module.parameters()).device
    found = grid_tables(tower.module, grid_thw.cpu(), {})
    sizes = {
        name: int(found[ends].diff().max())
        for name, ends in (("max_seqlen", "cu_seqlens"), ("max_window_seqlen", "cu_window_seqlens"))
        if ends in found
    }
    return {**{name: table.to(device) for name, table in found.items()}, **sizes}


def _key(value: Any) -> Any:
    """A key that differs between calls: a graph has small tensors, such as grids, baked in."""
    if isinstance(value, Tensor):
        return (str(value.dtype), *value.shape, *value.flatten().tolist())
    if isinstance(value, dict):
        return tuple((name, _key(value[name])) for name in sorted(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _copied(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.clone()
    if isinstance(output, (list, tuple)):
        return type(output)([_copied(each) for each in output])
    if isinstance(output, dict):  # transformers' ModelOutput is one
        return type(output)(**{name: _copied(each) for name, each in output.items()})
    return output


def check_encoder(encoder: str | None, device: torch.device | None = None) -> None:
    """Refuse an unknown mode, `compile` on a CPU without a C++ compiler, `graph` without CUDA."""
    mode = plan_encoder(encoder).mode
    if mode is None or device is None:
        return
    compilers = (environ.get("CXX", "g++"), "g++", "clang++")
    if mode == "compile" and device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise MmfastError(
            "encoder='compile' needs a C++ compiler on the CPU; install g++ or use encoder='fast'"
        )
    if mode == "graph" and device.type != "cuda":
        raise MmfastError(
            f"encoder='graph' records CUDA graphs, and the tower is on {device}; use "
            "encoder='compile' or move the model to CUDA"
        )


@contextmanager
def fast_encoder(model: Any, encoder: str | None) -> Iterator[None]:
    """Speed the vision tower of a model up for as long as the `with` lasts; None leaves it stock.

    `fast` embeds patches by a matrix product, computes attention by SDPA with the windows or frames
    of a packed tower in one call, its rows on a CPU in blocks that a cache holds, and skips blocks
    and pooled heads whose output is not used.
    `compile` also compiles the tower's blocks when they first run (tens of seconds on a CPU; a new
    shape may compile again). `graph` records `fast` once per input shape and replays it.
    """
    mode = plan_encoder(encoder).mode
    if mode is None:
        yield
        return
    tower = tower_of(model)
    check_encoder(mode, next(tower.module.parameters()).device)
    with ExitStack() as stack:
        for conv in patch_convolutions(tower.module):
            stack.enter_context(override(conv, "forward", partial(as_linear, conv)))
        stack.enter_context(fused_attention(tower))
        stack.enter_context(_skipping(tower))
        if mode == "fast":
            stack.enter_context(in_blocks(tower))
        if mode == "compile":
            for block in tower.blocks:
                stack.enter_context(override(block, "forward", partial(_compiled, block)))
        if mode == "graph":
            stack.enter_context(graphed(tower))
        yield


@lru_cache
def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled function for all blocks of a class: their weights are its arguments."""
    return torch.compile(forward)


def _compiled(block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if watched(block):
        return call(*args, **kwargs)
    return _compile(type(block).forward)(block, *args, **kwargs)


def watched(block: Any) -> bool:
    """Signals are read from a block's attention."""
    return "_mmfast_gate" in attention_of(block).__dict__


@contextmanager
def _skipping(tower: Tower) -> Iterator[None]:
    """Skip blocks and heads that no feature depends on, while features are computed."""
    if tower.packed or tower.alone or not len(tower.blocks):
        yield
        return
    work = threading.local()
    with ExitStack() as stack:
        for name in tower.entries():
            stack.enter_context(override(tower.base, name, partial(_needed, tower, name, work)))
        for index, block in enumerate(tower.blocks):
            stack.enter_context(override(block, "forward", partial(_skip_block, work, index)))
        head = getattr(tower.module, "head", None)
        if isinstance(head, nn.Module):
            stack.enter_context(override(head, "forward", partial(_skip_head, work)))
        yield


def _needed(
    tower: Tower, name: str, work: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    arguments = tower.bind(name, args, kwargs)
    whole = kwargs.get("output_hidden_states") or tower.base.config.output_hidden_states
    if whole or getattr(work, "last", None) is not None:
        return call(*args, **kwargs)
    work.last = tower.last_used(arguments)
    try:
        return call(*args, **kwargs)
    finally:
        work.last = None


def _skip_block(
    work: Any, index: int, call: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
) -> Any:
    last = getattr(work, "last", None)
    return call(hidden, *args, **kwargs) if last is None or index <= last else hidden


def _skip_head(work: Any, call: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
    skip = getattr(work, "last", None) is not None
    return hidden[:, 0] if skip else call(hidden, *args)
