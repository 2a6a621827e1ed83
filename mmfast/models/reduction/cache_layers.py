"""Cache layers that hold fewer tokens than the conversation had, or hold them elsewhere.

A shortened layer reports the logical length, as if nothing had been dropped, so that positions,
crops, chunked prefill and later turns come out right in stock code. Masks get the physical sizes.

Rows of a batch that are left with different numbers of tokens get padding in front of the new ones.
At the start of a prompt layers expect that. Later it would part the new tokens from those that a
layer of a short convolution remembers, and take places in a sliding window, so there the padding is
moved in front of what the layer holds.
"""

# ruff: noqa: D102 (methods of transformers are documented there)
from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer, StaticLayer

from mmfast.core.errors import ModelError

Pair = tuple[Tensor, Tensor]


@dataclass(eq=False)
class LayerGroup:
    """Layers of one cache that hold the same tokens, and the mask in this decode step."""

    leader: int
    mask: Any = None


class Shorter:
    """Mixed into the class of the layers of one cache; other caches never see it.

    Attributes:
        dropped: Logical minus physical length.
        extra: Entries of a row that lie elsewhere than in `keys`: in packs, or in a store.
        valid: `[B, n]` False at padding among the first n tokens; None where there is none.
        uneven: The mask that the model makes, for its first layer, does not fit this layer.
        store: Of each row the tokens that may come back (`reduction.revival`).
        notes: Facts about the entries, batch first and entries last (`kv.notes`).
        gone: Those of `dropped` that a KV policy evicted.
        per_row: Further state of a KV policy, by name, one of each row.
        pending: State of a KV policy that it keeps until a prompt ends.
        power: Squares `[B, H, d]` of the last queries of a prompt, until it ends.
        skipped: `[B, n]` True at entries that leave when the prompt ends (`reduction.bypass`).
        chosen: Entries, those that have gone among them, when a KV policy last chose.
        gapped: Heads hold different numbers of entries, and padding in front of them.
        in_packs: It is a `PackedLayer` (`kv.packs`); to ask for the class takes longer.
    """

    store: Any = None
    notes: dict[str, Tensor] | None = None
    gone = 0
    per_row: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    pending: Any = None
    power: Tensor | None = None
    chosen = 0
    skipped: Tensor | None = None
    dropped = 0
    extra = 0
    valid: Tensor | None = None
    uneven = False
    group: LayerGroup | None = None
    gapped = False
    in_packs = False

    def get_seq_length(self) -> Any:
        return super().get_seq_length() + self.extra + self.dropped  # type: ignore[misc]

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        # Dynamo takes no bare `super()` from Python 3.12 on.
        if isinstance(self, StaticLayer) or self.is_sliding:  # type: ignore[attr-defined]
            length, offset = super().get_mask_sizes(query_length)  # type: ignore[misc]
            return length, offset + self.dropped
        length = super().get_seq_length()  # type: ignore[misc]
        return length + self.extra + query_length, self.dropped

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.dropped, self.valid, self.uneven, self.group = 0, None, False, None
        self.store, self.notes, self.gone = None, None, 0
        self.per_row, self.pending, self.power, self.chosen = {}, None, None, 0
        self.skipped, self.gapped = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._batch(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._batch(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._batch(lambda rows: rows[indices.to(rows.device)])

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        length = held(self)
        self._rows(lambda rows: rows[..., :length])

    def _batch(self, change: Any) -> None:
        self._rows(change)
        if self.store is not None:
            self.store = [self.store[b] for b in change(torch.arange(len(self.store))).tolist()]
        self.per_row = {
            name: tuple(each[b] for b in change(torch.arange(len(each))).tolist())
            for name, each in self.per_row.items()
        }

    def _rows(self, change: Any) -> None:
        if self.valid is not None:
            self.valid = change(self.valid)
        if self.skipped is not None:
            self.skipped = change(self.skipped)
        if self.notes is not None:
            self.notes = {name: change(note) for name, note in self.notes.items()}


class StoreLayer(Shorter, DynamicLayer):  # type: ignore[misc]
    """One layer over a store that holds the entries itself, for as many calls as its owner likes.

    `write(keys, values)` stores new ones `[B, H, n, d]` and returns all that attention reads;
    `past()` counts those from before the call, where masks are made of it.
    """

    _layer_type = None

    def __init__(
        self, write: Callable[[Tensor, Tensor], Pair], past: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__()
        self._write, self._past = write, past

    @property
    def extra(self) -> int:  # type: ignore[override]
        return self._past()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> Pair:
        return self._write(key_states, value_states)


def cache_over(
    layers: int, write: Callable[[int, Tensor, Tensor], Pair], past: Callable[[int], int]
) -> Cache:
    """A cache of transformers over a store; both functions get the number of the layer first."""
    each = (StoreLayer(partial(write, i), partial(past, i)) for i in range(layers))
    return Cache(layers=list(each))


_CLASSES: dict[tuple[type, type], type] = {}


def shorten(cache: Any, index: int) -> Any:
    """Layer `index`, made able to be shorter than its logical length, or a ModelError."""
    while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, Shorter):
        return layer
    kind = type(layer)
    if not isinstance(layer, (DynamicLayer, StaticLayer)):
        raise ModelError(
            f"cache layer {index} is a {kind.__name__}, which cannot hold reduced tokens; "
            "use a cache of attention layers, such as the default DynamicCache"
        )
    return adopt(cache, index, Shorter)


def adopt(cache: Any, index: int, mixin: type) -> Any:
    """Layer `index` of `cache` with the methods of `mixin` before its own."""
    layer = cache.layers[index]
    adopted = _blank(type(layer), mixin)
    adopted.__dict__ = layer.__dict__  # the same tensors, now and later
    cache.layers[index] = adopted
    return adopted


def _blank(kind: type, *mixins: type) -> Any:
    """A layer without state, of a class made of a kind and one mixin after the other."""
    for mixin in mixins:
        if (mixin, kind) not in _CLASSES:
            # `_layer_type` = None: a subclass must not register itself with transformers.
            inside = {"_layer_type": None, "_made_of": (mixin, kind), "__reduce_ex__": _saved}
            name = f"{mixin.__name__}{kind.__name__}"
            _CLASSES[mixin, kind] = type(name, (mixin, kind), inside)
        kind = _CLASSES[mixin, kind]
    return object.__new__(kind)


def _saved(layer: Any, protocol: Any) -> tuple[Any, ...]:
    """Tell `pickle` and `torch.save` of the parts of a class that no module has by its name."""
    kind, mixins = type(layer), list[type]()
    while "_made_of" in vars(kind):
        mixin, kind = vars(kind)["_made_of"]
        mixins.append(mixin)
    return _blank, (kind, *reversed(mixins)), layer.__getstate__()


def plain_kind(layer: Any) -> type:
    """The class of transformers that a cache layer is of, whatever has adopted it."""
    return next(c for c in type(layer).__mro__ if c.__module__.startswith("transformers"))


def is_short(layer: Any) -> bool:
    """This cache layer was adopted by `shorten`."""
    return isinstance(layer, Shorter)


class OrphanLayer:
    """Mixed into the layers of a cache whose attachment has ended, with the masks that it needs.

    `needed_from` are the new tokens of a call from which on masks are needed; None where they are
    there again.
    """

    needed_from: int | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """ModelError before a stock model reads padding, or has no fitting mask."""
        if self.needed_from is not None and key_states.shape[-2] >= self.needed_from:
            raise ModelError(
                "this cache was filled under attach(), with different numbers of entries in its "
                "rows, heads or layers, and the model alone has no masks for that; go on inside "
                "attach(…) with the same specs"
            )
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]


def release(cache: Any) -> None:
    """Let a cache, as its attachment ends, refuse calls that cannot do without it."""
    needs = [need for layer in cache.layers if (need := _needs(layer)) is not None]
    for index, layer in enumerate(cache.layers if needs else ()):
        if isinstance(layer, (DynamicLayer, StaticLayer)):  # the first one speaks for all
            orphan = layer if isinstance(layer, OrphanLayer) else adopt(cache, index, OrphanLayer)
            orphan.needed_from = min(needs)


def claim(cache: Any) -> None:
    """Take back what `release` did: masks are there again."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, OrphanLayer):
            layer.needed_from = None
            mixin, kind = vars(type(layer))["_made_of"]
            if mixin is OrphanLayer:  # nothing has adopted it since
                cache.layers[index] = _blank(kind)
                cache.layers[index].__dict__ = layer.__dict__


class CacheSet:
    """Caches that one attachment has met, and copies of them, which no hook sees at first."""

    def __init__(self) -> None:
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self.key = uuid.uuid4().hex
        _SETS[self.key] = self

    def meet(self, cache: Any) -> None:
        """Take in the cache of a call, if it has one."""
        if cache is not None and cache not in self.caches:
            claim(cache)
            cache.__dict__[_MEMBER] = _Member(cache, self)

    def release(self) -> None:
        """Release all of them, as the attachment ends."""
        _SETS.pop(self.key, None)
        for cache in list(self.caches):
            cache.__dict__.pop(_MEMBER, None)
            release(cache)


class _Member:
    """Takes a copy of its cache into the same set; stands behind the layers, copied before it."""

    def __init__(self, cache: Any, caches: CacheSet) -> None:
        self._cache, self._set = weakref.ref(cache), caches
        caches.caches.add(cache)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _Member | None:
        copied = memo.get(id(self._cache()))
        return None if copied is None else _Member(copied, self._set)

    def __reduce__(self) -> tuple[Any, ...]:
        cache: Any = self._cache()
        return _unpickled, (cache, cache.layers, self._set.key)


_SETS: weakref.WeakValueDictionary[str, CacheSet] = weakref.WeakValueDictionary()
_MEMBER = "_mmfast_member"


def _unpickled(cache: Any, layers: list[Any], key: str) -> _Member | None:
    """Take in a cache that is not whole yet, or release it where its attachment is gone."""
    caches = _SETS.get(key)
    if caches is not None:
        return _Member(cache, caches)
    cache.layers = layers
    release(cache)
    return None


def _needs(layer: Any) -> int | None:
    """Tokens of a call from which on a layer needs a mask of its own; None for never."""
    if not is_short(layer):
        return None
    if layer.valid is not None or layer.gapped:
        return 1
    return (1 if isinstance(layer, StaticLayer) else 2) if layer.uneven else None


def layer_of_model_mask(cache: Any, sliding: bool = False) -> Any:
    """The cache layer by which the model itself makes the mask of all layers of its kind."""
    attention = (layer for layer in cache.layers if hasattr(layer, "get_mask_sizes"))
    first = next(attention)
    if first.is_sliding == sliding:
        return first
    return next((each for each in attention if each.is_sliding == sliding), first)


def held(layer: Any) -> int:
    """Tokens that went into a layer; a sliding window holds the last of them."""
    return int(layer.get_seq_length()) - getattr(layer, "dropped", 0)


def extend(layer: Any, past: Tensor | None, new: Tensor | None) -> None:
    """Note the padding among `new` tokens `[B, n]` before they are stored.

    `past` `[B, held]` is that of tokens held, where the layer was not shortened before.
    """
    before = past if layer.group is None else layer.valid
    if before is None and new is None:
        return
    length = held(layer)
    if before is None:
        assert new is not None
        before = torch.ones(len(new), length, dtype=torch.bool, device=new.device)
    before = F.pad(before, (0, length - before.shape[1]), value=True)
    layer.valid = before if new is None else torch.cat([before, new], dim=1)


class PaddingFirst:
    """Mixed into the class of layers of a window; `gaps` `[B]` is padding before new tokens."""

    gaps: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        gaps, self.gaps = self.gaps, None
        if gaps is not None:
            key_states = self._window_last("keys", key_states, gaps)
            value_states = self._window_last("values", value_states, gaps)
        more = key_states, value_states, *args
        pair: Pair = super().update(*more, **kwargs)  # type: ignore[misc]
        return pair

    def _window_last(self, name: str, new: Tensor, gaps: Tensor) -> Tensor:
        """Put padding of new states `[B, H, n, d]` in front of those held; returns the others."""
        kept, stored = getattr(self, name), _stored(self)
        whole = torch.cat([kept[:, :, :stored], new], dim=2)
        order = _padding_first(whole.shape[2], stored, gaps.to(whole.device))
        whole = whole.gather(2, order[:, None, :, None].expand_as(whole))
        if isinstance(self, StaticLayer):  # which must keep its addresses
            kept[:, :, :stored].copy_(whole[:, :, :stored])
        else:
            setattr(self, name, whole[:, :, :stored])
        return whole[:, :, stored:]


def window_first(cache: Any, index: int, new: Tensor | None) -> Any:
    """Layer `index`, extended by `new`, whose padding in front goes in front of what it holds."""
    layer = cache.layers[index]
    stored = _stored(layer)
    if new is None or not stored or bool(new[:, 0].all()):
        return layer
    if not isinstance(layer, PaddingFirst):
        layer = adopt(cache, index, PaddingFirst)
    layer.gaps = (new.cumsum(1) == 0).sum(1)
    seen = stored + new.shape[1]
    far, near = layer.valid.split([layer.valid.shape[1] - seen, seen], dim=1)
    order = _padding_first(seen, stored, layer.gaps)
    layer.valid = torch.cat([far, near.gather(1, order)], dim=1)
    return layer


def _stored(layer: Any) -> int:
    """Entries that lie in the tensors of a layer."""
    return min(held(layer), layer.keys.shape[-2]) if layer.is_initialized else 0


def padding_mask(layer: Any, queries: int) -> Tensor | None:
    """The 2-D mask that makes the stock mask functions see this layer's padding."""
    if layer.valid is None:
        return None
    length, offset = layer.get_mask_sizes(queries)
    end = length + offset - layer.dropped
    valid = F.pad(layer.valid, (0, max(0, end - layer.valid.shape[1])), value=True)
    return F.pad(valid, (layer.dropped, 0), value=False)


def regroup(cache: Any, index: int) -> None:
    """Give a layer that has lost entries the mask it needs: the model's, or one that it shares."""
    layer = cache.layers[index]
    layer.group = LayerGroup(index)
    mine = layer.is_sliding, layer.dropped, held(layer)
    for other in cache.layers[:index]:
        group = getattr(other, "group", None)
        if group is None or (other.is_sliding, other.dropped, held(other)) != mine:
            continue
        if _equal(other.valid, layer.valid):
            layer.group = group
            break
    model = layer_of_model_mask(cache, layer.is_sliding)
    layer.uneven = layer.valid is not None or layer.dropped != getattr(model, "dropped", 0)


def alike(one: Any, other: Any, more: int = 0) -> bool:
    """Return True if two shortened layers hold the same tokens, but for the `more` last of `other`.

    Layers lose tokens in the order of depth, so that as many real ones are the same ones; tokens
    that come back (`store`) may lie in another order.
    """
    stores = one.store is not None or other.store is not None
    if stores or one.keys.shape[2] + more != other.keys.shape[2]:
        return False
    return one.group is other.group or _equal(one.valid, other.valid)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or (one.shape == other.shape and torch.equal(one, other))


class Joined:
    """Mixed into the class of convolution layers; `gaps` `[B]` is padding before new tokens."""

    gaps: Tensor | None = None

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        gaps, self.gaps = self.gaps, None
        joins = gaps is not None and self.has_previous_state[state_idx]  # type: ignore[attr-defined]
        given = conv_states, state_idx
        states: Tensor = super().update_conv_state(*given, **kwargs)  # type: ignore[misc]
        if not joins:  # [B, D, S + n]
            return states
        assert gaps is not None
        order = _padding_first(states.shape[-1], states.shape[-1] - conv_states.shape[-1], gaps)
        states = states.gather(-1, order.to(states.device)[:, None].expand_as(states))
        self._store(states, state_idx)
        return states

    def _store(self, states: Tensor, state_idx: int) -> None:
        layer: Any = self
        if layer.record_past:
            layer.conv_states[state_idx] = states
        else:  # copied, because a static cache must keep its addresses
            kernel = layer.conv_kernel_size[state_idx]
            layer.conv_states[state_idx].copy_(states[..., -kernel:])


def join(cache: Any, index: int, ok: Tensor | None) -> None:
    """Let convolution layer `index` step over padding in front of the next tokens, False in `ok`.

    ModelError where the cache has no convolution layer there.
    """
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not isinstance(layer, LinearAttentionLayer):
        raise ModelError(
            f"cache layer {index} is a {type(layer).__name__}, but the model's layer is a "
            "convolution; pass DynamicCache(config=model.config), or no cache"
        )
    if ok is None:
        return
    if not isinstance(layer, Joined):
        layer = adopt(cache, index, Joined)
    layer.gaps = (~ok).sum(1)


def _padding_first(length: int, held: int, gaps: Tensor) -> Tensor:
    """Places `[B, length]` by which each row's `held` entries and the padding behind them swap."""
    places, gaps = torch.arange(length, device=gaps.device)[None], gaps[:, None]
    moved = torch.where(places < gaps + held, places - gaps, places)
    return torch.where(places < gaps, held + places, moved)
