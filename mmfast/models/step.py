"""One forward pass under `attach`: reductions before decoder layers, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from mmfast.core.tokens import Tokens
from mmfast.core.trace import Trace
from mmfast.models.inner import INNER, Seen, inner_signals
from mmfast.models.lengths import Group, extend, is_short, padding_mask, shorten
from mmfast.models.masks import stock_mask
from mmfast.models.sequence import Item, Sequences, take
from mmfast.models.stages import Chain, Site, run_part, run_site


class Step:
    """State of one forward pass, in one thread, that brings more than one token.

    Args:
        sites: Where stages run, in layer order.
        sequences: The new tokens; without items nothing is reduced.
        past: `[B, P]` False at padding among the tokens of earlier calls, or None.
        trace: Gets a row per site and every Reduction.

    Attributes:
        sites: Those that change anything.
        sequences: The new tokens as they stand.
        inner: Signals of every item, of the decoder layers that were watched.
    """

    def __init__(
        self, sites: Seq[Site], sequences: Sequences, past: Tensor | None, trace: Trace
    ) -> None:
        self.sequences = sequences
        self.full = sequences.length
        self.past = past
        self.trace = trace
        self.inner: dict[int, list[dict[str, Tensor]]] = {}
        self._segments = sorted({site.layer for site in sites})
        self.sites = _acting(sites, sequences, trace)
        self._groups: dict[tuple[int, int], Group] = {}
        self._embeddings: tuple[Tensor, ...] | None = None
        self._masks: dict[int, Any] = {}
        self._plane = 0  # DeepStack planes added so far

    def reads(self, layer: int) -> set[str]:
        """Signals that a site which acts reads from the attention of this decoder layer."""
        after = [site for site in self.sites if site.deep and site.layer == layer + 1]
        return {need for site in after for need in site.needs} & INNER

    def observe(self, layer: int, seen: Seen) -> None:
        """Take the signals for the sites before the next layer from this one's attention."""
        self.inner[layer] = inner_signals(self.reads(layer), self.sequences, seen)

    def before_layer(
        self, layer: int, hidden: Tensor, kwargs: dict[str, Any], config: Any
    ) -> Tensor:
        """Reduce where a site stands; give the layer positions, mask and cache that fit.

        Args:
            layer: Decoder layer.
            hidden: Its input `[B, n, D]`.
            kwargs: Its keyword arguments, changed in place.
            config: Config of the text model.

        Returns:
            The input, reduced `[B, m, D]`.
        """
        for site in self.sites:
            if site.layer == layer:
                hidden = self.reduce(site, hidden)
        cache = kwargs.get("past_key_values")
        if self.sequences.index is not None:
            if self._embeddings is None:
                given = kwargs["position_embeddings"]
                self._embeddings = tuple(take(each, self.sequences.index) for each in given)
            kwargs["position_embeddings"] = self._embeddings
        elif cache is None or len(cache.layers) <= layer or not is_short(cache.layers[layer]):
            return hidden
        kwargs["position_ids"] = None  # flash attention takes a gap for the end of a sequence
        kwargs["attention_mask"] = self._mask(layer, hidden, cache, config)
        return hidden

    def _mask(self, layer: int, hidden: Tensor, cache: Any, config: Any) -> Any:
        """The stock mask for this layer's tokens, and the cache layer's bookkeeping."""
        segment = sum(start <= layer for start in self._segments)
        if cache is None:
            if segment not in self._masks:
                self._masks[segment] = stock_mask(config, hidden, self.sequences.ok, None, layer)
            return self._masks[segment]
        held = shorten(cache, layer)
        group = self._groups.setdefault((id(held.group), segment), Group(layer))
        extend(held, self.past, self.sequences.ok)
        held.group = group
        if group.leader == layer:
            seen = padding_mask(held, hidden.shape[1])
            group.mask = stock_mask(config, hidden, seen, cache, layer)
        held.dropped += self.full - self.sequences.length
        first = getattr(cache.layers[0], "dropped", 0)
        held.uneven = held.valid is not None or held.dropped != first
        return group.mask

    def reduce(self, site: Site, hidden: Tensor) -> Tensor:
        """Run a site on every item; `hidden` `[B, n, D]` to `[B, m, D]`, left-padded."""
        self.sequences.to(hidden.device)
        items = self.sequences.items
        with self.trace.stage(site.name, sum(item.n for item in items)) as row:
            kept = [self._run(site, item, hidden) for item in items]
            row.tokens_out = sum(len(keep) for keep, _ in kept)
            same = [
                len(k) == item.n and x is None for item, (k, x) in zip(items, kept, strict=True)
            ]
            if all(same):
                return hidden
            order = self.sequences.compact([keep for keep, _ in kept])
            self._embeddings = None
            hidden = take(hidden, order)
            for item, (_, merged) in zip(items, kept, strict=True):
                if merged is not None:
                    hidden[item.row].index_copy_(0, item.where, merged)
            return hidden

    def add_planes(self, hidden: Tensor, planes: Tensor) -> Tensor:
        """Add DeepStack features `[visual tokens, D]`, reduced like the tokens they belong to."""
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

    def _run(self, site: Site, item: Item, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which tokens of an item a site keeps, and their features where it merges."""
        if item.n == 0:
            return item.where, None  # a chunk that ends in a separator
        if item.part is not None and not site.deep:
            return self._run_planned(site, item, hidden)
        x = hidden[item.row].index_select(0, item.where)
        tokens = self._tokens(site, item, x, hidden)
        if item.part is None:
            chain = run_site(site, tokens)
        else:
            chain, item.part = run_part(site, tokens, item.part)
        self._note(site, item, chain)
        item.chain.extend(chain.reductions)
        return chain.keep, None if chain.pure else chain.apply(x)

    def _run_planned(self, site: Site, item: Item, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The part of a whole item's plan that belongs to this chunk of a chunked prefill."""
        assert item.record is not None and item.part is not None
        plans, whole = item.record.plans, item.record.features(item.index).to(hidden)
        if item.index not in plans:
            tokens = self._tokens(site, item, whole, hidden)
            plans[item.index] = run_site(site, tokens)
            self._note(site, item, plans[item.index])
        plan: Chain = plans[item.index]
        start, stop, _ = item.part
        here = ((plan.keep >= start) & (plan.keep < stop)).nonzero()[:, 0]
        first = int((plan.keep < start).sum())
        item.part, item.source = (first, first + len(here), len(plan.keep)), (plan, here)
        merged = None if plan.pure else plan.apply(whole).index_select(0, here)
        return plan.keep.index_select(0, here) - start, merged

    def _tokens(self, site: Site, item: Item, x: Tensor, hidden: Tensor) -> Tokens:
        """What the stages may look at: `x` `[n, D]` and the signals of this site."""
        row, text = hidden[item.row], self.sequences.text[item.row]
        signals = {} if site.deep else {n: v.to(x.device) for n, v in item.signals.items()}
        if site.deep and site.layer - 1 in self.inner:
            known = self.inner[site.layer - 1][item.number]
            signals = {name: value.to(x.device) for name, value in known.items()}
        grid = item.grid
        if item.part is not None and item.record is not None and not site.deep:
            grid = item.record.layouts[item.index].grid
        query = row.index_select(0, text) if "query" in site.needs and len(text) else None
        attn = signals.pop("attn", None)
        return Tokens(x, attn=attn, query=query, grid=grid, signals=signals)

    def _note(self, site: Site, item: Item, chain: Chain) -> None:
        for reduction in chain.reductions:
            self.trace.record(site.name, item.number, reduction)


def _acting(sites: Seq[Site], sequences: Sequences, trace: Trace) -> list[Site]:
    """The sites that change anything: a share of 1.0 must leave the stock path alone."""
    lengths: list[int | None] = [item.part[2] if item.part else item.n for item in sequences.items]
    acting: list[Site] = []
    for site in sites if lengths else ():
        after = [None if n is None else site.left(n) for n in lengths]
        if any(m is None or m != n for n, m in zip(lengths, after, strict=True)):
            acting.append(site)
        else:
            total = sum(n for n in lengths if n is not None)
            trace.add(site.name, total, total, 0.0)
        lengths = after
    return acting
