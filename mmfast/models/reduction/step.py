"""One forward pass under `attach`: reductions before decoder layers, their masks and positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction, gather_rows
from mmfast.core.trace import Trace
from mmfast.models.cache_name import cache_of
from mmfast.models.reduction.cache_layers import (
    LayerGroup,
    extend,
    held,
    is_short,
    join,
    layer_of_model_mask,
    padding_mask,
    shorten,
    window_first,
)
from mmfast.models.reduction.choice import Kept, SiteRunner, acting, items_of
from mmfast.models.reduction.decoder_signals import (
    BEFORE,
    DRIFT,
    INNER,
    ROPE,
    LayerAttention,
    inner_signals,
)
from mmfast.models.reduction.masks import stock_mask
from mmfast.models.reduction.revival import NOBODY, Leaving, keep_store
from mmfast.models.reduction.sequence import MediaItem, Sequences, take
from mmfast.models.reduction.site import Chain, Site
from mmfast.models.wrappers import (
    CONV,
    HYBRID,
    LINEAR,
    SLIDING,
    attention_at,
    kind_of,
    lender_of,
)

EXPERTS = "moe_mm_token_type_ids"  # by which layers of ERNIE 4.5 VL choose experts, `[B, n]`


@dataclass(frozen=True)
class SiteCut:
    """One site's change of hidden states: those at `order` `[B, m]` stay, some merged with others.

    A merge has its row, the places before and after the cut, and the function of the states. What
    is added to text `[T, D]` has its row and the places after the cut.
    """

    order: Tensor
    merges: list[tuple[int, Tensor, Tensor, Callable[[Tensor], Tensor]]]
    texts: Seq[tuple[int, Tensor, Tensor]] = ()

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[B, n, D]` to `[B, m, D]`, with gradients."""
        out = take(hidden, self.order)
        for row, before, after, merge in self.merges:
            out[row].index_copy_(0, after, merge(hidden[row].index_select(0, before)))
        for row, places, change in self.texts:
            out[row].index_add_(0, places.to(out.device), change.to(out))
        return out


class HaltedTokens:
    """States `[B, L, D]` of tokens that run no further, by their places before any cut.

    A token that was fused has the state of the one that it joined. Tokens that had gone before the
    first of them halted stay away.
    """

    def __init__(self, hidden: Tensor, sequences: Sequences, length: int) -> None:
        self.states = hidden.new_zeros(len(hidden), length, hidden.shape[-1])
        self._known = torch.zeros(self.states.shape[:2], dtype=torch.bool, device=hidden.device)
        rows, _, places = _running(hidden, sequences)
        # `[B, L]`: the place whose state a token has at the end, -1 without any.
        self._path = torch.full_like(self._known, -1, dtype=torch.int64)
        self._path[rows, places] = places

    def cut(
        self, items: Seq[MediaItem], chains: Seq[Chain], hidden: Tensor, sequences: Sequences
    ) -> None:
        """Note what leaves `[B, n, D]` at a cut, before it is made."""
        self._to(hidden.device)
        for item, chain in zip([item for item in items if item.n], chains, strict=True):
            row, where, owner = item.row, item.where, chain.owner
            places = where if sequences.index is None else sequences.index[row, where]
            halts, path = owner < 0, self._path[row]
            self.states[row, places[halts]] = hidden[row, where[halts]]
            self._known[row, places[halts]] = True
            joined = torch.arange(len(path), device=hidden.device)
            joined[places[~halts]] = places[chain.keep][owner[~halts]]
            self._path[row] = joined[path.clamp_min(0)].masked_fill(path < 0, -1)

    def finish(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """Complete the states by those that ran to the end; `[B, L]` tells which are there."""
        self._to(hidden.device)
        rows, at, places = _running(hidden, sequences)
        self.states[rows, places], self._known[rows, places] = hidden[rows, at], True
        path = self._path.clamp_min(0)
        self.states = gather_rows(self.states, path)
        return self._known.gather(1, path) & (self._path >= 0)

    def _to(self, device: torch.device) -> None:
        self.states, self._path = self.states.to(device), self._path.to(device)
        self._known = self._known.to(device)


def _running(hidden: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, places and places before any cut of the tokens of `[B, n, D]`, without padding."""
    ok = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    rows, at = (ok if sequences.ok is None else sequences.ok.to(ok)).nonzero(as_tuple=True)
    index = sequences.index
    return rows, at, at if index is None else index.to(at.device)[rows, at]


class ForwardStep:
    """State of one forward pass, in one thread, that brings more than one token.

    Of the sites those count that change anything; `sequences` are the new tokens as they stand.
    `past` `[B, P]` is False at padding among the tokens of earlier calls; `blocks` `[B, n]` numbers
    the block inside which a new token sees forward, -1 outside; `inner` are the signals of every
    item, of the decoder layers that were watched.
    """

    rebuild = False  # make every mask anew
    # Cuts before layer 0, and of what they left the padding, and the places that it counts from.
    entered: tuple[list[SiteCut], Tensor | None, Tensor | None] = ([], None, None)
    turns = True  # positions are rotary, along one axis
    fused = False  # embeddings of text have changed
    restores = False  # tokens that halt come back behind the last layer
    halted: HaltedTokens | None = None
    # By layer of a cut that compares two layers, the earlier of them; see `before_of`.
    before: Mapping[int, int] = MappingProxyType({})

    def __init__(
        self,
        sites: Seq[Site],
        sequences: Sequences,
        past: Tensor | None,
        trace: Trace,
        blocks: Tensor | None = None,
    ) -> None:
        self.sequences = sequences
        self.full = sequences.length
        self.past = past
        self.trace = trace
        self.blocks = blocks
        self.inner: dict[int, list[dict[str, Tensor]]] = {}
        self._segments = sorted({site.layer for site in sites})
        self.sites = acting(sites, sequences, trace)
        self._choice = SiteRunner(sequences, self.inner, trace)
        self._groups: dict[tuple[int, int, str], LayerGroup] = {}
        self._embeddings: dict[str, tuple[Tensor, ...]] = {}
        self._counted: Tensor | None = None  # `[B, n]` places whose positions the tokens have
        self._whole = sequences.ok
        self.shrunk: Tensor | None = None  # positions that are saved, by row, `[B, 1]`
        self._masks: dict[tuple[int, str], Any] = {}
        self._plane = 0  # DeepStack planes added so far
        self.reviving = {site.layer for site in sites if site.revives}
        self._revives = False  # something may come back to the layers from here on
        # Of the tokens `[B, n]`, and of every item, before the first cut that revives; see `_mark`.
        self._times: Tensor | None = None
        self._origins: dict[int, Tensor] = {}
        self._earlier = 0
        self.cuts: list[SiteCut] = []  # before the current layer
        self._all_cuts: list[SiteCut] = []
        self._lent: dict[str, Any] = {}  # masks of the latest layer of each kind
        # Places of the tokens of the output and its padding, where halted ones are among them.
        self._output: tuple[Tensor | None, Tensor | None] | None = None
        # `[B, n]` True at tokens that pass feed-forward layers by, from here on and by layer.
        self._skips: Tensor | None = None
        self.skipped: dict[int, Tensor] = {}

    def reads(self, layer: int) -> set[str]:
        """Signals that a site which acts reads from the attention of this decoder layer."""
        after = [site for site in self.sites if site.deep and site.layer == layer + 1]
        return {need for site in after for need in site.needs} & INNER

    def reads_early(self, layer: int) -> bool:
        """Return True if a site compares a later layer's attention with this one's."""
        return any(BEFORE in s.needs and self.before.get(s.layer) == layer for s in self.sites)

    def observe(self, layer: int, seen: LayerAttention) -> None:
        """Take the signals for the sites before the next layers from this one's attention."""
        if needs := self.reads(layer):
            site = next(site for site in self.sites if site.deep and site.layer == layer + 1)
            items = items_of(site, self.sequences)
            self.inner[layer] = inner_signals(needs, self.sequences, seen, items)
        if self.reads_early(layer):
            found = inner_signals({"attn"}, self.sequences, seen)
            for item, signals in zip(self.sequences.items, found, strict=True):
                self._choice.earlier[item.number] = len(item.chain), signals["attn"]

    def enter(self, layer: int, hidden: Tensor) -> None:
        """Remember what enters a layer, `[B, n, D]`, where the next cut reads what it changes."""
        reads = any(s.deep and s.layer == layer + 1 and DRIFT in s.needs for s in self.sites)
        self._choice.entered = hidden if reads else None

    def before_layer(
        self,
        layer: int,
        hidden: Tensor,
        kwargs: dict[str, Any],
        config: Any,
        ahead: Callable[[Site, Tensor], list[dict[str, Tensor]]] | None = None,
    ) -> Tensor:
        """Reduce `[B, n, D]` to `[B, m, D]` where a site stands; `kwargs` are made to fit.

        These are positions, mask, cache and what chooses experts. `ahead` gives the signals of a
        site that looks ahead, from the input as it stands.
        """
        cache, kind = cache_of(kwargs), kind_of(config, layer)
        length, left, self.cuts = self.sequences.length, None, []
        if layer in self.reviving and cache is not None:
            self._mark(layer, cache, len(hidden))
        for site in self.sites:
            if site.layer == layer:
                if site.revives and cache is not None:
                    left = self._leaving(site, hidden, self._places(kwargs, kind))
                if ROPE in site.needs and "position_embeddings" in kwargs:
                    self._choice.embeddings = self._places(kwargs, kind)
                hidden = self.reduce(site, hidden, ahead)
                if site.renumbers(self.turns):
                    self._count_anew()
        if self._skips is not None:
            self.skipped[layer] = self._skips
        if layer == 0:
            self.entered = self.cuts, self.sequences.ok, self._counted
        self._all_cuts += self.cuts
        if lender_of(config, layer) != layer:
            self._borrow(layer, hidden, kwargs, config)
            return hidden
        if self.sequences.index is not None:
            if "position_embeddings" in kwargs:
                kwargs["position_embeddings"] = self._places(kwargs, kind)
            if kwargs.get(EXPERTS) is not None:
                kwargs[EXPERTS] = kwargs[EXPERTS].gather(1, self.sequences.index)
        elif not self.rebuild and not _short_at(cache, layer):
            return hidden
        kwargs["position_ids"] = None  # flash attention takes a gap for the end of a sequence
        kwargs["attention_mask"] = self._lent[kind] = self._mask(layer, hidden, cache, config)
        if kind == HYBRID:
            kwargs["mamba_attention_mask"] = self._recurrent(layer, cache)
        if layer in self.reviving and cache is not None:
            assert self._times is not None
            keep_store(cache, layer, left, self._times, self._earlier, length)
            self._revives = self._revives or left is not None
        return hidden

    def _borrow(self, layer: int, hidden: Tensor, kwargs: dict[str, Any], config: Any) -> None:
        """Arguments of a layer that reads the keys of an earlier one.

        The stock model lets only the last tokens enter such layers, those whose logits are asked.
        """
        kind, rows = kind_of(config, layer), hidden.shape[1]
        if self.sequences.index is not None and rows == self.sequences.length:
            kwargs["position_embeddings"] = self._places(kwargs, kind)
        if kind not in self._lent:  # the lender has the stock mask, too
            return
        mask = self._lent[kind]
        if mask is None and 1 < rows < self.sequences.length:
            raise ModelError(
                f"logits of the last {rows} tokens alone are asked for, and layers that read keys "
                "of others would see too few of them; ask for the last one, or for all"
            )
        kwargs["attention_mask"] = mask if mask is None else mask[..., -rows:, :]

    @property
    def merged(self) -> bool:
        """Some tokens have been averaged."""
        return any(cut.merges for cut in (*self.cuts, *self._all_cuts))

    def beside(self, values: Any) -> Any:
        """Values `[B, L, D]` that a layer gets beside its states, cut as they were."""
        if isinstance(values, Tensor) and values.ndim == 3 and values.shape[1] == self.full:
            for cut in self._all_cuts:
                values = replace(cut, texts=())(values)
        return values

    def _mark(self, layer: int, cache: Any, rows: int) -> None:
        """Give the tokens their times: places among the keys before the first cut that revives."""
        if self._times is not None:
            return
        sequences, ok = self.sequences, self.sequences.ok
        self._earlier = held(cache.layers[layer - 1]) - sequences.length
        times = torch.arange(sequences.length) + self._earlier
        device = sequences.fixed[0].device if sequences.fixed else None
        times = times.to(device if ok is None else ok.device).expand(rows, -1)
        if self.past is not None:
            ok = None  # refused where a store is kept
        self._times = times if ok is None else times.masked_fill(~ok, NOBODY)

    def _leaving(self, site: Site, hidden: Tensor, places: tuple[Tensor, ...]) -> Leaving:
        items, times = items_of(site, self.sequences), self._times
        assert times is not None
        for item in items:
            self._origins.setdefault(item.number, times[item.row, item.where])
        origins = [self._origins[item.number] for item in items]
        return Leaving(items, hidden, places, times, origins)

    def _places(self, kwargs: dict[str, Any], kind: str) -> tuple[Tensor, ...]:
        given: tuple[Tensor, ...] = kwargs["position_embeddings"]
        if self.sequences.index is None or given is None:
            return given
        if kind not in self._embeddings:
            places = self.sequences.index if self._counted is None else self._counted
            self._embeddings[kind] = tuple(take(each, places) for each in given)
        return self._embeddings[kind]

    def _mask(self, layer: int, hidden: Tensor, cache: Any, config: Any) -> Any:
        """The stock mask for this layer's tokens, and the cache layer's bookkeeping."""
        ok, kind = self.sequences.ok, kind_of(config, layer)
        if kind == CONV:
            if cache is not None:
                join(cache, layer, ok)
            return ok
        if kind == LINEAR:
            return self._recurrent(layer, cache)
        segment = sum(start <= layer for start in self._segments)
        if cache is None:
            if (segment, kind) not in self._masks:
                mask = stock_mask(config, hidden, ok, None, layer, self._blocks())
                self._masks[segment, kind] = mask
            return self._masks[segment, kind]
        held = shorten(cache, layer)
        group = self._groups.setdefault((id(held.group), segment, kind), LayerGroup(layer))
        extend(held, self.past, ok)
        if kind == SLIDING:
            held = window_first(cache, layer, ok)
        held.group = group
        if group.leader == layer:
            seen = padding_mask(held, hidden.shape[1])
            group.mask = stock_mask(config, hidden, seen, cache, layer, self._blocks())
        held.dropped += self.full - self.sequences.length
        model = layer_of_model_mask(cache, held.is_sliding)
        held.uneven = held.valid is not None or held.dropped != getattr(model, "dropped", 0)
        return group.mask

    def _recurrent(self, layer: int, cache: Any) -> Tensor | None:
        """The mask of a recurrence; ModelError for padding between two parts of a sequence."""
        ok = self.sequences.ok
        held = cache.layers[layer] if cache is not None and layer < len(cache.layers) else None
        known = getattr(held, "has_previous_state", {})
        if ok is not None and any(known[index] for index in range(len(known))):
            raise ModelError(
                f"decoder layer {layer} remembers a state, which padding before new tokens would "
                "change, and the rows of this batch are left with different numbers of tokens; "
                "continue them one by one"
            )
        return ok

    def _blocks(self) -> Tensor | None:
        index = self.sequences.index
        if self.blocks is None or index is None:
            return self.blocks
        return self.blocks.to(index.device).gather(1, index)

    def reduce(
        self,
        site: Site,
        hidden: Tensor,
        ahead: Callable[[Site, Tensor], list[dict[str, Tensor]]] | None = None,
    ) -> Tensor:
        """Run a site on every item; `hidden` `[B, n, D]` to `[B, m, D]`, left-padded."""
        self.sequences.to(hidden.device)
        items = items_of(site, self.sequences)
        with self.trace.stage(site.name, sum(item.n for item in items)) as row:
            if (site.ahead or site.concepts) and ahead is not None:
                self.inner[site.layer - 1] = ahead(site, hidden)
            before = [(len(item.chain), item.part) for item in items]
            kept = self._choice.run(site, hidden)
            if site.halts and self.restores:
                if self.halted is None:
                    self.halted = HaltedTokens(hidden, self.sequences, self.full)
                self.halted.cut(items, self._choice.noted, hidden, self.sequences)
            row.tokens_out = sum(len(keep) for keep, _ in kept)
            if site.bypasses:
                for item, (links, part) in zip(items, before, strict=True):  # nothing goes yet
                    del item.chain[links:]
                    item.part = part
                self._skips = _others(hidden, items, kept)
            elif any(
                len(k) != item.n or f is not None for item, (k, f) in zip(items, kept, strict=True)
            ):
                hidden = (self._drop if site.of_text else self._shorten)(hidden, kept, site)
        self.trace.split(row, self._choice.parts(site, row))
        return hidden

    @property
    def left(self) -> tuple[Tensor, Tensor | None] | None:
        """Places `[B, m]` of the tokens of the output, and False at padding; None for all."""
        index, ok = self._output or (self.sequences.index, self.sequences.ok)
        return None if index is None else (index, ok)

    def rest(self, hidden: Tensor) -> Tensor:
        """Put the tokens that halted back behind the last layer, `[B, m, D]` to `[B, M, D]`."""
        if self.halted is None:
            return hidden
        there = self.halted.finish(hidden, self.sequences)
        whole = torch.ones_like(there) if self._whole is None else self._whole.to(there.device)
        if there.equal(whole):
            self._output = None, None
            return self.halted.states
        rows = [row.nonzero()[:, 0] for row in there]
        gaps = [max(map(len, rows)) - len(row) for row in rows]
        index = torch.stack([F.pad(row, (gap, 0)) for row, gap in zip(rows, gaps, strict=True)])
        ok = torch.stack([torch.arange(index.shape[1]) >= gap for gap in gaps]).to(index.device)
        self._output = index, ok
        return take(self.halted.states, index)

    def _count_anew(self) -> None:
        """Give what is left the positions of the first tokens of its row."""
        index, ok, before = self.sequences.index, self.sequences.ok, self._whole
        if index is None:
            return
        first = index.new_zeros(len(index), 1)
        whole = torch.full_like(first, self.full)
        if before is not None:
            before = before.to(index.device)
            first, whole = before.int().argmax(1, keepdim=True), before.sum(1, keepdim=True)
        left = torch.full_like(first, index.shape[1]) if ok is None else ok.sum(1, keepdim=True)
        gap = index.shape[1] - left
        rank = torch.arange(index.shape[1], device=index.device)[None] - gap
        self._counted = (first + rank).clamp_min(0)
        self._embeddings, self.shrunk = {}, whole - left

    def _drop(self, hidden: Tensor, kept: Seq[Kept], site: Site) -> Tensor:
        """Rows without what a site dropped of their prompts, text and media alike."""
        prompts, gone = items_of(site, self.sequences), []
        for item, (keep, _) in zip(prompts, kept, strict=True):
            left = torch.ones(item.n, dtype=torch.bool, device=item.where.device)
            left[keep] = False
            gone.append(item.where[left])
        before = [item.n for item in self.sequences.items]
        places = [item.where for item in prompts]
        order, keeps = self.sequences.drop(gone)
        self._follow(order)
        for item, n, keep in zip(self.sequences.items, before, keeps, strict=True):
            if len(keep) < n:
                self._choice.see(item)
                item.chain.append(Reduction.prune(keep, n))
                self.trace.record(site.name, item.number, item.chain[-1])
        return self._change(hidden, order, prompts, places, kept)

    def _follow(self, order: Tensor) -> None:
        """Take note that the tokens at `order` `[B, m]` stay."""
        self._embeddings = {}
        if self._skips is not None:
            self._skips = self._skips.to(order.device).gather(1, order)
        if self._counted is not None:
            self._counted = self._counted.to(order.device).gather(1, order)
        if self._times is not None:
            ok = self.sequences.ok
            self._times = self._times.to(order.device).gather(1, order)
            if ok is not None:
                self._times = self._times.masked_fill(~ok.to(order.device), NOBODY)

    def _shorten(self, hidden: Tensor, kept: Seq[Kept], site: Site) -> Tensor:
        """Rows without the tokens that went, and with the features that changed."""
        items = self.sequences.items
        before = [item.where for item in items]
        order = self.sequences.compact([keep for keep, _ in kept])
        self._follow(order)
        return self._change(hidden, order, items, before, kept)

    def _change(
        self,
        hidden: Tensor,
        order: Tensor,
        items: Seq[MediaItem],
        before: Seq[Tensor],
        kept: Seq[Kept],
    ) -> Tensor:
        """Take the tokens at `order`; `before` are the places of the items before the cut."""
        merges = [
            (item.row, places, item.where, merge)
            for item, places, (_, merge) in zip(items, before, kept, strict=True)
            if merge is not None
        ]
        texts = [
            (row, self.sequences.text_of_prompt(row), torch.stack(each).mean(0))
            for row, each in self._choice.texts.items()
        ]
        self.fused = self.fused or bool(texts)
        self.cuts.append(SiteCut(order, merges, texts))
        return self.cuts[-1](hidden)

    def add_planes(self, hidden: Tensor, planes: Tensor) -> Tensor:
        """Add DeepStack features `[visual tokens, D]`, reduced like the tokens they belong to."""
        if self._revives:
            raise ModelError(
                "lazyllm cuts among the layers that add DeepStack planes, which a token that comes "
                "back would miss; choose llm<K> with a larger K"
            )
        hidden = hidden.clone()
        self._plane += 1
        for item in self.sequences.items:
            rows = planes.index_select(0, item.planes)
            if item.source is not None and item.record is not None:
                plan, here = item.source
                whole = item.record.features(item.index, self._plane).to(planes)
                rows = plan.apply(whole).index_select(0, here)
            for reduction in item.chain:
                rows = reduction.apply(rows)
            target = hidden[item.row]
            target.index_copy_(0, item.where, target.index_select(0, item.where) + rows)
        return hidden


def before_of(sites: Seq[Site], text: Any) -> dict[int, int]:
    """By layer of a site that reads `attn_before`, the layer with attention before that of `attn`.

    Sites that no two layers with attention precede are left out.
    """
    found = {}
    for site in sites:
        able = [i for i in range(site.layer) if attention_at(text, i) is not None]
        if site.deep and BEFORE in site.needs and len(able) > 1:
            found[site.layer] = able[-2]
    return found


def _others(hidden: Tensor, items: Seq[MediaItem], kept: Seq[Kept]) -> Tensor:
    """Tokens of items that a site did not keep, `[B, n]`."""
    found = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    for item, (keep, _) in zip(items, kept, strict=True):
        left = torch.ones(item.n, dtype=torch.bool, device=hidden.device)
        left[keep] = False
        found[item.row, item.where] = left
    return found


def _short_at(cache: Any, layer: int) -> bool:
    return cache is not None and len(cache.layers) > layer and is_short(cache.layers[layer])
