"""What the stages of a site do to the items of one call: which tokens stay, changed or not."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens
from mmfast.core.trace import Row, Trace
from mmfast.models.joint import left_of_row, run_row
from mmfast.models.sequence import Item, Sequences
from mmfast.models.stages import Chain, Site, run_part, run_site

# Which tokens of an item stay, and their features `[m, D]` where they changed.
Kept = tuple[Tensor, Tensor | None]
# Per decoder layer the signals of every item.
Inner = Mapping[int, Seq[Mapping[str, Tensor]]]


class Choice:
    """Runs sites on the items of one forward pass.

    Args:
        sequences: Where the items lie, as they stand.
        inner: Signals of decoder layers.
        trace: Gets every Reduction.
    """

    def __init__(self, sequences: Sequences, inner: Inner, trace: Trace) -> None:
        self._sequences = sequences
        self._inner = inner
        self._trace = trace
        self.noted: list[Chain] = []  # of the site that ran last

    def run(self, site: Site, hidden: Tensor) -> list[Kept]:
        """What a site keeps of every item; `hidden` `[B, n, D]`."""
        items = self._sequences.items
        self.noted.clear()
        if not site.joint:
            return [self._one(site, item, hidden) for item in items]
        rows: dict[int, list[Item]] = {}
        for item in items:
            rows.setdefault(item.row, []).append(item)
        found = {
            id(item): kept
            for row in rows.values()
            for item, kept in zip(row, self._row(site, row, hidden), strict=True)
        }
        return [found[id(item)] for item in items]

    def _row(self, site: Site, row: Seq[Item], hidden: Tensor) -> list[Kept]:
        """All items of a prompt together."""
        for item in row:
            if item.part is not None or (item.record is not None and item.record.ends):
                raise ModelError(
                    f"'{site.specs[0]}' looks at all images of a prompt at once, and chunked "
                    "prefill shows a part; leave out prefill_chunk_size, or use another method"
                )
        states = [hidden[item.row].index_select(0, item.where) for item in row]
        tokens = [
            self._tokens(site, item, x, hidden) if item.n else None
            for item, x in zip(row, states, strict=True)
        ]
        chains = run_row(site, tokens, [item.entered for item in row])
        kept: list[Kept] = []
        for item, x, chain in zip(row, states, chains, strict=True):
            if item.n == 0:
                kept.append((item.where, None))
                continue
            self._note(site, item, chain)
            item.chain.extend(chain.reductions)
            kept.append((chain.keep, None if chain.pure else chain.apply(x)))
        return kept

    def _one(self, site: Site, item: Item, hidden: Tensor) -> Kept:
        """One item by itself."""
        if item.n == 0:
            return item.where, None  # a chunk that ends in a separator
        if item.part is not None and not site.deep:
            return self._planned(site, item, hidden)
        x = hidden[item.row].index_select(0, item.where)
        tokens = self._tokens(site, item, x, hidden)
        if item.part is None:
            chain = self._decide(site, item, tokens)
        else:
            chain, item.part = run_part(site, tokens, item.part, item.entered)
        self._note(site, item, chain)
        item.chain.extend(chain.reductions)
        return chain.keep, None if chain.pure else chain.apply(x)

    def _planned(self, site: Site, item: Item, hidden: Tensor) -> Kept:
        """The part of a whole item's plan that belongs to this chunk of a chunked prefill."""
        assert item.record is not None and item.part is not None
        plans, whole = item.record.plans, item.record.features(item.index).to(hidden)
        before: tuple[Reduction, ...] = item.source[0].reductions if item.source else ()
        whole, key = Chain(before).apply(whole), (site.name, item.index)
        if key not in plans:
            plans[key] = self._decide(site, item, self._tokens(site, item, whole, hidden))
            self._note(site, item, plans[key])
        elif site.early:
            item.signals = plans[key].follow(item.signals)
        plan: Chain = plans[key]
        start, stop, _ = item.part
        here = ((plan.keep >= start) & (plan.keep < stop)).nonzero()[:, 0]
        first = int((plan.keep < start).sum())
        item.part = (first, first + len(here), len(plan.keep))
        item.source = (Chain(before + plan.reductions), here)
        merged = None if plan.pure else plan.apply(whole).index_select(0, here)
        return plan.keep.index_select(0, here) - start, merged

    def _decide(self, site: Site, item: Item, tokens: Tokens) -> Chain:
        """Run a site on a whole item; one before the tower has run already."""
        if not site.early:
            return run_site(site, tokens, item.entered)
        if item.record is not None and item.record.kind == "audio":
            return Chain((Reduction.identity(tokens.n, device=tokens.x.device),))
        if item.record is None or not item.record.dropped:
            raise ModelError(
                f"'{site.specs[0]}' runs before the vision tower; encode the media inside attach()"
            )
        chain: Chain = item.record.dropped[item.index]
        item.signals = chain.follow(item.signals)
        return chain

    def _tokens(self, site: Site, item: Item, x: Tensor, hidden: Tensor) -> Tokens:
        """What the stages may look at: `x` `[n, D]` and the signals of this site."""
        row, text = hidden[item.row], self._sequences.text[item.row]
        signals = {} if site.deep else {n: v.to(x.device) for n, v in item.signals.items()}
        if site.deep and site.layer - 1 in self._inner:
            known = self._inner[site.layer - 1][item.number]
            signals = {name: value.to(x.device) for name, value in known.items()}
        grid = item.grid
        if item.part is not None and item.record is not None and not site.deep:
            layout = item.record.layouts[item.index]
            grid = layout.grid if len(x) == len(layout.content()) else None
        query = row.index_select(0, text) if "query" in site.needs and len(text) else None
        attn = signals.pop("attn", None)
        return Tokens(x, attn=attn, query=query, grid=grid, signals=signals)

    def _note(self, site: Site, item: Item, chain: Chain) -> None:
        if not item.chain and item.source is None and item.record is not None:
            layout, source = item.record.layouts[item.index], (item.record.kind, item.index)
            tile = None if layout.tiles is None else torch.tensor(layout.tiles)
            self._trace.see(item.number, layout.place(), tile, source)
        for reduction in chain.reductions:
            self._trace.record(site.name, item.number, reduction)
        self.noted.append(chain)

    def parts(self, site: Site, row: Row) -> list[Row]:
        """The row of a site that just ran, by stage; the row itself where that is not known.

        A chunk of a chunked prefill runs no stage of its own, so its tokens do not add up.
        """
        chains, count = self.noted, len(site.specs)
        row.method = "+".join(spec.method.name for spec in site.specs)
        if any(len(chain.reductions) != count for chain in chains):
            return [row]
        sizes = [
            (sum(c.reductions[i].n for c in chains), sum(c.reductions[i].m for c in chains))
            for i in range(count)
        ]
        if count == 1 or (sizes[0][0], sizes[-1][1]) != (row.tokens_in, row.tokens_out):
            return [row]
        spent = [sum(c.ms[i] if c.ms else 1.0 for c in chains) for i in range(count)]
        return [
            Row(row.stage, n, m, row.ms * ms / sum(spent), row.peak_bytes, spec.method.name)
            for spec, (n, m), ms in zip(site.specs, sizes, spent, strict=True)
        ]


def acting(sites: Seq[Site], sequences: Sequences, trace: Trace) -> list[Site]:
    """The sites that change anything: a share of 1.0 must leave the stock path alone."""
    items = sequences.items
    lengths: list[int | None] = [item.part[2] if item.part else item.n for item in items]
    found: list[Site] = []
    for site in sites if lengths else ():
        after = _left(site, items, lengths)
        if any(m is None or m != n for n, m in zip(lengths, after, strict=True)):
            found.append(site)
        else:
            total = sum(n for n in lengths if n is not None)
            trace.add(site.name, total, total, 0.0)
        lengths = after
    return found


def _left(site: Site, items: Seq[Item], lengths: Seq[int | None]) -> list[int | None]:
    """Tokens a site leaves of every item; None where that is not known beforehand."""
    if not site.joint:
        pairs = zip(lengths, items, strict=True)
        return [None if n is None else site.left(n, item.entered) for n, item in pairs]
    after: list[int | None] = list(lengths)
    for row in {item.row for item in items}:
        mine = [i for i, item in enumerate(items) if item.row == row]
        entered = [items[i].entered for i in mine]
        left = left_of_row(site, [lengths[i] for i in mine], entered)
        for i, n in zip(mine, left, strict=True):
            after[i] = n
    return after
