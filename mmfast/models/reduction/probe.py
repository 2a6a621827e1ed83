"""Attention scores without eager attention: sdpa stays sdpa, flash stays flash.

While at least one module is intercepted, every attention function it can reach is wrapped in place,
under its own name: the functions of transformers' attention interface, and the module-local
`eager_attention_forward` of the modelling files involved, which the interface takes as its default.
The wrapper looks for a gate on the calling module and otherwise only passes on, so other models and
threads see no difference.

The importance of keys is read from softmax rows recomputed from q and k in float32, never L x L at
once. Sums over many queries go through `ops.attention_column_sums`; a few rows, and masks that are
rules, are plain torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import AttentionInterface

from mmfast.core.errors import ModelError
from mmfast.core.locks import WholeLock
from mmfast.ops.attention import attend
from mmfast.ops.attention_column_sums import attention_column_sums

HIDDEN = torch.finfo(torch.float32).min  # not -inf: a row that sees nothing must not become NaN


def bias_of(
    mask: Any, query: Tensor, key: Tensor, places: Tensor, is_causal: bool, row: int | None = None
) -> Tensor | None:
    """Addend `[B or 1, 1 or H, c, S]` to the logits of the queries at `places` [c], or None."""
    size = key.shape[2]
    offset = size - query.shape[2]
    if isinstance(mask, BlockMask):
        return _hide(_evaluate(mask, range(len(query)) if row is None else [row], places, size))
    if mask is not None and mask.ndim == 4:
        rows = mask[..., :size]
        rows = rows if mask.shape[2] == 1 else rows.index_select(2, places)
        return _hide(rows) if rows.dtype == torch.bool else rows.float().clamp_min(HIDDEN)
    visible = None
    if is_causal:
        last = places[:, None] + offset
        visible = (torch.arange(size, device=key.device)[None] <= last)[None, None]
    if mask is not None:  # a padding query is blind, so that it does not count in a mean
        real = mask[:, -size:] != 0
        pairs = (real[:, None, :] & real[:, places + offset, None])[:, None]
        visible = pairs if visible is None else visible & pairs
    return None if visible is None else _hide(visible)


def _evaluate(mask: BlockMask, rows: Sequence[int], places: Tensor, size: int) -> Tensor:
    """Rows of a flex mask, whose rule takes indices: `[B, 1, c, S]` bool."""
    b = torch.tensor(list(rows), device=places.device)[:, None, None]
    q = places[None, :, None]
    k = torch.arange(size, device=places.device)[None, None, :]
    rule: Tensor = mask.mask_mod(b, torch.zeros_like(b), q, k)
    return rule.expand(len(rows), len(places), size)[:, None]


def _hide(visible: Tensor) -> Tensor:
    zeros = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
    return zeros.masked_fill_(~visible, HIDDEN)


def softmax_rows(query: Tensor, key: Tensor, bias: Tensor | None, scaling: float | None) -> Tensor:
    """Softmax rows `[B, H, c, S]`; grouped heads share their keys without a copy per head."""
    batch, heads, count, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads * count, width)
    with torch.autocast(query.device.type, enabled=False):  # float32 also under a caller's bf16
        logits = grouped @ key.float().transpose(2, 3)
    logits = logits.mul_(width**-0.5 if scaling is None else scaling)
    logits = logits.reshape(batch, heads, count, key.shape[2])
    return (logits if bias is None else logits.add_(bias)).softmax(dim=-1)


# Logits held at a time: 16 MB of float32, about the size of a last-level cache.
_CHUNK = 1 << 22

# Fewer queries than this are a window: their rows are made as they are.
_FEW = 64


def last_query_scores(
    query: Tensor, key: Tensor, mask: Any = None, scaling: float | None = None
) -> Tensor:
    """Attention `[B, S]` float32 of the last of the queries, mean over heads; rows sum to 1.

    `mask` is None (every key is seen), bool (True = visible) or additive
    `[B | 1, H | 1, L | 1, S or more]`, a padding mask `[B, S]` (non-zero = visible), or a flex
    BlockMask.
    """
    last = torch.arange(query.shape[2] - 1, query.shape[2], device=query.device)
    bias = bias_of(mask, query, key, last, is_causal=False)
    return softmax_rows(query[:, :, -1:], key, bias, scaling).mean(dim=(1, 2))


def rows_of(
    query: Tensor,
    key: Tensor,
    row: int,
    places: Tensor,
    mask: Any = None,
    scaling: float | None = None,
    is_causal: bool = True,
) -> Iterator[Tensor]:
    """Attention `[H, c, S]` float32 of the queries at `places` `[n]` of one batch row, in chunks.

    The mask is as in `last_query_scores`; without one, and causal, query i sees the keys up to
    `S - L + i`. Rows sum to 1 in each head.
    """
    for weights, _ in _row_chunks(query, key, row, places, mask, scaling, is_causal):
        yield weights


def head_mass(
    query: Tensor,
    key: Tensor,
    row: int,
    places: Tensor,
    mask: Any = None,
    scaling: float | None = None,
    is_causal: bool = True,
    lse: Tensor | None = None,
    counted: bool = False,
) -> Tensor:
    """Attention `[Hkv, S]` float32 that keys receive from the queries at `places` of one batch row.

    Sum over the queries, mean over the query heads that share a KV head; `lse` as in `received`.
    `counted` multiplies what a query gives by the number of keys that it sees.
    """
    heads, size = key.shape[1], key.shape[2]
    if not counted and len(places) >= _FEW and _direct(mask, query):
        one = slice(row, row + 1)
        if mask is not None and len(mask) > 1:
            mask = mask[one]
        weights = query.new_zeros(1, 1, query.shape[2], dtype=torch.float32)
        weights.index_fill_(2, places, 1.0)
        seen, causal = _visible(mask, size, is_causal)
        sums = attention_column_sums(
            query[one], key[one], None if lse is None else lse[one], scale=scaling, causal=causal,
            mask=seen, weights=weights, queries=_range(places), heads="key",
        )  # fmt: skip
        return sums[0].float() / (query.shape[1] // heads)
    total = torch.zeros(heads, size, dtype=torch.float32, device=key.device)
    for weights, bias in _row_chunks(query, key, row, places, mask, scaling, is_causal):
        if counted:
            weights = weights * _seen(bias, size)
        total += weights.unflatten(0, (heads, -1)).sum(2).mean(1)
    return total


def probe_mass(
    query: Tensor,
    key: Tensor,
    row: int,
    places: Tensor,
    mask: Any = None,
    scaling: float | None = None,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention `[Hkv, S]` as `head_mass`, and by how many of the queries keys are seen, `[S]`."""
    heads, size = key.shape[1], key.shape[2]
    total = torch.zeros(heads, size, dtype=torch.float32, device=key.device)
    seen = torch.zeros(size, dtype=torch.float32, device=key.device)
    if not len(places):
        return total, seen
    for weights, bias in _row_chunks(query, key, row, places, mask, scaling, is_causal):
        total += weights.unflatten(0, (heads, -1)).sum(2).mean(1)
        seen += weights.shape[1] if bias is None else _shown(bias).sum(0)
    return total, seen


def keys_seen(
    query: Tensor, key: Tensor, row: int, place: Tensor, mask: Any = None, is_causal: bool = True
) -> int:
    """Count the keys that the query at `place` `[1]` of one batch row may see."""
    if not isinstance(mask, BlockMask) and mask is not None and len(mask) > 1:
        mask = mask[row : row + 1]
    one = slice(row, row + 1)
    bias = bias_of(mask, query[one], key[one], place, is_causal, row)
    return int(key.shape[2]) if bias is None else int(_shown(bias).sum())


def head_peak(
    query: Tensor, key: Tensor, scaling: float | None = None, mean: bool = False
) -> Tensor:
    """Largest attention `[Hkv, S]` float32 that keys receive from any query of one row.

    Of the queries `[1, H, L, d]` the last one sees all keys `[1, Hkv, S, d]`, each before it one
    less. Of the query heads that share a KV head the largest counts, or the `mean`.
    """
    places = torch.arange(query.shape[2], device=query.device)
    peak = torch.zeros(query.shape[1], key.shape[2], dtype=torch.float32, device=key.device)
    for weights, _ in _row_chunks(query, key, 0, places, None, scaling, True):
        peak = peak.maximum(weights.amax(1))
    shared = peak.unflatten(0, (key.shape[1], -1))
    found: Tensor = shared.mean(1) if mean else shared.amax(1)
    return found


def _shown(bias: Tensor) -> Tensor:
    """Keys that each query of one row sees in some head, `[c, S]`."""
    return (bias[0] > HIDDEN / 2).any(dim=0)


def _seen(bias: Tensor | None, size: int) -> Tensor | int:
    """Keys that each query sees, to be multiplied with weights `[H, c, S]`."""
    return size if bias is None else (bias[0] > HIDDEN / 2).sum(-1, keepdim=True)


def _row_chunks(
    query: Tensor,
    key: Tensor,
    row: int,
    places: Tensor,
    mask: Any,
    scaling: float | None,
    is_causal: bool,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Softmax rows `[H, c, S]` of one batch row a chunk at a time, and the bias they came with."""
    mine, keys = query[row : row + 1], key[row : row + 1]
    if not isinstance(mask, BlockMask) and mask is not None and len(mask) > 1:
        mask = mask[row : row + 1]
    for some in places.split(max(1, _CHUNK // max(1, query.shape[1] * key.shape[2]))):
        bias = bias_of(mask, mine, keys, some, is_causal, row)
        yield softmax_rows(mine.index_select(2, some), keys, bias, scaling)[0], bias


def received(
    query: Tensor,
    key: Tensor,
    scaling: float | None = None,
    is_causal: bool = False,
    mask: Any = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention `[B, S]` float32 every key receives, mean over queries and heads; rows sum to 1.

    Queries are taken in chunks, so memory does not grow with L x S. Those that may see no key at
    all (padding) do not count. Masks are as in `rows_of`; `lse` `[B, H, L]` is the log-sum-exp of
    every query, where the attention function gave it.
    """
    if not _direct(mask, query):
        return _received_by_rows(query, key, scaling, is_causal, mask)
    heads, length, size = query.shape[1], query.shape[2], key.shape[2]
    seen, causal = _visible(mask, size, is_causal)
    live, count = None, query.new_full((1, 1), min(length, size) if causal else length).float()
    if seen is not None:
        real = seen.amax(-1) > HIDDEN / 2 if seen.is_floating_point() else seen.any(-1)
        if mask.ndim == 2:  # a padding query is blind, so that it does not count in the mean
            real = seen[:, :, 0, size - length :]
        live = real.float().expand(-1, -1, length)
        count = live.mean(1).sum(1, keepdim=True)
    sums = attention_column_sums(
        query, key, lse, scale=scaling, causal=causal, mask=seen, weights=live
    )
    return sums.float() / heads / count.clamp_min(1)


def received_within(
    query: Tensor, key: Tensor, ends: Tensor, scaling: float | None = None
) -> Tensor:
    """`received` `[1, L]` of packed sequences between `ends` `[n + 1]`; each one sums to 1."""
    sizes = ends.diff().to(query.device, torch.int64)
    longest = int(sizes.max())
    sums = attention_column_sums(query, key, scale=scaling, cu_seqlens=ends, longest=longest)
    own = sizes.repeat_interleave(sizes, output_size=query.shape[2])
    return sums.float() / query.shape[1] / own


def _direct(mask: Any, query: Tensor) -> bool:
    """Return True if the sums over columns take this mask; the kernel of a GPU takes none."""
    return mask is None or (isinstance(mask, Tensor) and not query.is_cuda)


def _visible(mask: Tensor | None, size: int, is_causal: bool) -> tuple[Tensor | None, bool]:
    """The mask `[B or 1, 1 or H, L or 1, S]`, and whether the order of tokens counts besides."""
    if mask is None:
        return None, is_causal
    if mask.ndim == 4:
        return mask[..., :size], False
    return (mask[:, -size:] != 0)[:, None, None], is_causal


def _range(places: Tensor) -> tuple[int, int] | None:
    """The queries that ascending places span; a GPU is not waited for, it takes them all."""
    return None if places.is_cuda else (int(places[0]), int(places[-1]) + 1)


def _received_by_rows(
    query: Tensor, key: Tensor, scaling: float | None, is_causal: bool, mask: Any
) -> Tensor:
    batch, heads, length, _ = query.shape
    size = key.shape[2]
    step = max(1, _CHUNK // max(1, batch * heads * size))
    total = torch.zeros(batch, size, dtype=torch.float32, device=query.device)
    count = torch.zeros(batch, 1, dtype=torch.float32, device=query.device)
    for start in range(0, length, step):
        stop = min(start + step, length)
        places = torch.arange(start, stop, device=query.device)
        bias = bias_of(mask, query, key, places, is_causal)
        weights = softmax_rows(query[:, :, start:stop], key, bias, scaling)  # [B, H, c, S]
        if bias is None:
            count += stop - start
        else:
            live = (bias.amax(dim=-1, keepdim=True) > HIDDEN / 2).float()
            live = live.expand(-1, -1, stop - start, -1)  # [B or 1, 1 or H, c, 1]
            weights = weights * live
            count += live.mean(dim=1).sum(dim=1)  # [B or 1, 1]
        total += weights.sum(dim=2).mean(dim=1)
    return total / count.clamp_min(1)


class AttentionCalls(TorchFunctionMode):
    """Have `around(sdpa, query, key, value, …)` answer calls of sdpa in this thread."""

    def __init__(self, around: Callable[..., Any]) -> None:
        super().__init__()
        self._around = around

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Stand in the place of sdpa."""
        given = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        return self._around(func, *args, **given)


class Levels(AttentionCalls):
    """Makes sdpa leave its log-sum-exp here, in this thread; outputs are equal, bit for bit."""

    def __init__(self) -> None:
        super().__init__(self._attend)
        self._found: list[Tensor | None] = []

    def _attend(self, sdpa: Callable[..., Any], *args: Any, **given: Any) -> Any:
        if given.get("dropout_p") or len(args) != 3:
            return sdpa(*args, **given)
        query, key, value = args
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
            return sdpa(*args, **given)  # what sdpa keeps for its gradient must stay as it is
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        out, level = attend(query, key, value, mask, causal, given.get("scale"))
        self._found.append(level)
        return out

    def of(self, query: Tensor) -> Tensor | None:
        """`[B, H, L]` for queries `[B, H, L, d]`, or None where it is not known."""
        if len(self._found) != 1 or self._found[0] is None:
            return None
        return self._found[0] if self._found[0].shape == query.shape[:3] else None


# (module, q [B, H, L, d], k [B, Hkv, S, d], v, mask, scaling, is_causal): q and k are rotated and
# k, v hold the cached tokens too. With `levels` one more: the log-sum-exp [B, H, L] or None.
Hook = Callable[..., None]
# (next, module, q, k, v, mask, *args, **kwargs) -> what `next` returns; may change any argument.
Around = Callable[..., tuple[Tensor, Tensor | None]]
# (number, module, q, k, v, mask) -> k, v and mask in their place.
Change = Callable[[int, nn.Module, Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor, Any]]

_GATE, _CORE = "_mmfast_gate", "_mmfast_core"
_LOCK = WholeLock()
_restore: list[Callable[[], None]] = []
_active = 0


@contextmanager
def probing(hooks: Mapping[nn.Module, Hook], levels: bool = False) -> Iterator[None]:
    """Call a hook whenever one of these attention modules computes attention.

    Re-entrant and thread-safe; the attention functions are restored when the last probe leaves. A
    hook sees the queries `[B, H, L, d]`, the keys and values `[B, Hkv, S, d]` that are really
    attended, and the mask as the function got it. With `levels` it is called after the attention,
    with the log-sum-exp of every query as one argument more, None where the function returns none.
    ModelError where a module does not go through transformers' attention interface.
    """
    arounds = {module: partial(_observe, hook, levels) for module, hook in hooks.items()}
    with intercepting(arounds, innermost=True):
        yield


@contextmanager
def intercepting(arounds: Mapping[nn.Module, Around], innermost: bool = False) -> Iterator[None]:
    """Run `around(next, module, q, k, v, mask, …)` around the attention of these modules.

    The one that entered last is outermost; `innermost` stands inside all others, to see what is
    really computed. ModelError as in `probing`.
    """
    spaces = list({id(s): s for s in map(_namespace, arounds)}.values())
    with _LOCK:
        _enter(spaces)
        for module, around in arounds.items():
            gate = module.__dict__.get(_GATE, ())
            module.__dict__[_GATE] = (around, *gate) if innermost else (*gate, around)
    try:
        yield
    finally:
        with _LOCK:
            for module, around in arounds.items():
                _remove(module, around)
            _leave()


@contextmanager
def substituting(cores: Mapping[nn.Module, Around]) -> Iterator[None]:
    """Run `core(next, module, q, k, v, mask, …)` in the place of the attention of these modules.

    It stands inside everything that intercepts or probes, now or later, and may call `next`.
    """
    spaces = list({id(s): s for s in map(_namespace, cores)}.values())
    with _LOCK:
        _enter(spaces)
        for module, core in cores.items():
            module.__dict__[_CORE] = core
    try:
        yield
    finally:
        with _LOCK:
            for module in cores:
                module.__dict__.pop(_CORE, None)
            _leave()


@contextmanager
def replacing(modules: Mapping[int, nn.Module], change: Change) -> Iterator[None]:
    """Let `change` replace keys, values and mask of the attention of these modules, uncompiled."""
    around: Any = torch.compiler.disable(_replaced)
    with intercepting({module: partial(around, change, i) for i, module in modules.items()}):
        yield


def _replaced(
    change: Change,
    index: int,
    call: Around,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    seen = change(index, module, query, key, value, attention_mask)
    return call(module, query, *seen, *args, **kwargs)


def _remove(module: nn.Module, around: Around) -> None:
    gate = list(module.__dict__.get(_GATE, ()))
    last = next(i for i in reversed(range(len(gate))) if gate[i] is around)
    del gate[last]
    if gate:
        module.__dict__[_GATE] = tuple(gate)
    else:
        del module.__dict__[_GATE]


def _observe(
    hook: Hook, levels: bool, call: Around, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    query, key, value, mask = args[:4] if len(args) > 3 else (*args, kwargs.get("attention_mask"))
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    length = query.shape[2]
    if mask is None and causal and 1 < length < key.shape[2] and not _is_flash(module):
        # An empty static cache: sdpa reads only the slots that are filled, so show only those.
        hook_kv = (key[:, :, :length], value[:, :, :length])
    else:
        hook_kv = (key, value)
    seen = (module, query, *hook_kv, mask, kwargs.get("scaling"), causal)
    if not levels or torch.compiler.is_compiling():
        with torch.no_grad():  # a choice is not learned, and a layer may run again without hooks
            hook(*seen)
        return call(module, *args, **kwargs)
    with Levels() as found:
        output = call(module, *args, **kwargs)
    with torch.no_grad():
        hook(*seen, found.of(query) if kwargs.get("position_bias") is None else None)
    return output


def _is_flash(module: nn.Module) -> bool:
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return "flash" in str(name)


def _namespace(module: nn.Module) -> dict[str, Any]:
    """Globals of the file that defines the module's forward: where it finds its functions."""
    space: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    if not isinstance(space.get("ALL_ATTENTION_FUNCTIONS"), AttentionInterface):
        raise ModelError(
            f"{type(module).__name__} does not use transformers' attention interface, so its "
            "attention cannot be observed; give the attention module of a model that does"
        )
    return space


def _wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    def gated(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        core = module.__dict__.get(_CORE)
        call = function if core is None else partial(core, function)
        for around in module.__dict__.get(_GATE, ()):
            call = partial(around, call)
        return call(module, *args, **kwargs)

    gated.__dict__["_mmfast_wraps"] = function
    return gated


def _enter(spaces: list[dict[str, Any]]) -> None:
    """Wrap what is not wrapped yet: functions may have been registered since the last entry."""
    global _active
    _active += 1
    shared = AttentionInterface()
    for name in list(shared):
        _swap(partial(_lookup, shared, name), partial(AttentionInterface.register, name))
    for space in spaces:
        for name in [n for n in space if n.endswith("eager_attention_forward")]:
            _swap(partial(_lookup, space, name), partial(space.__setitem__, name))
        own = space["ALL_ATTENTION_FUNCTIONS"]  # may override a function for its file alone
        for name in [n for n in own if own[n] is not shared[n]]:
            _swap(partial(_lookup, own, name), partial(own.__setitem__, name))


def _lookup(table: Mapping[str, Any], name: str) -> Any:
    return table[name]


def _swap(get: Callable[[], Any], put: Callable[[Any], None]) -> None:
    function = get()
    if not callable(function) or hasattr(function, "_mmfast_wraps"):
        return
    wrapper = _wrap(function)
    put(wrapper)

    def restore() -> None:
        if get() is wrapper:  # else other code replaced it since, which stays
            put(function)

    _restore.append(restore)


def _leave() -> None:
    global _active
    _active -= 1
    if _active == 0:
        while _restore:
            _restore.pop()()
