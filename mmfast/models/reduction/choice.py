"""Choice of the tokens that the stages of a site keep of the items of one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.spec import Spec, wanted
from mmfast.core.tokens import Tokens, follow, follow_signals
from mmfast.core.trace import Row, Trace
from mmfast.models.reduction.decoder_signals import BEFORE, DRIFT, ROPE, angles, drift
from mmfast.models.reduction.sequence import MediaItem, Sequences
from mmfast.models.reduction.site import Chain, Site, run_part, run_site, run_stage


def left_of_row(
    site: Site, lengths: Sequence[int | None], entered: Sequence[MutableMapping[int, int]]
) -> list[int | None]:
    """Tokens a site leaves of each item of a prompt; None where only the whole is known."""
    left, total = list(lengths), _total(lengths)
    for spec in site.specs:
        if spec.method.scope != "prompt":
            pairs = zip(left, entered, strict=True)
            left = [None if n is None else wanted(spec, n, seen) for n, seen in pairs]
            total = _total(left)
            continue
        after = None if total is None else wanted(spec, total, entered[0])
        if after is None or after != total:
            left = [None] * len(left)
        total = after
    return left


def _total(lengths: Sequence[int | None]) -> int | None:
    known = [n for n in lengths if n is not None]
    return sum(known) if len(known) == len(lengths) else None


def run_row(
    site: Site, items: Sequence[Tokens | None], entered: Sequence[MutableMapping[int, int]]
) -> list[Chain]:
    """Run all stages of a site with a stage of scope `prompt` on the items of one prompt.

    A stage of scope `prompt` may leave nothing of an item (None), and later stages do not touch
    what is empty. ModelError where a signal is missing, or a stage merges across images; SpecError
    where a budget does not fit.
    """
    found: list[list[Reduction]] = [[] for _ in items]
    for spec in site.specs:
        alive = [(i, tokens) for i, tokens in enumerate(items) if tokens is not None]
        for i, one in _stage(spec, alive, entered):
            found[i].append(one)
        items = [
            None if tokens is None or found[i][-1].m == 0 else follow(tokens, found[i][-1])
            for i, tokens in enumerate(items)
        ]
    return [Chain(tuple(each)) for each in found]


def _stage(
    spec: Spec,
    alive: Sequence[tuple[int, Tokens]],
    entered: Sequence[MutableMapping[int, int]],
) -> list[tuple[int, Reduction]]:
    if spec.method.scope != "prompt":
        return [(i, run_stage(spec, tokens, entered[i])) for i, tokens in alive]
    if not alive:
        return []
    joined = run_stage(spec, join(alive), entered[alive[0][0]])
    parts = split(joined, [tokens.n for _, tokens in alive], str(spec))
    return [(i, part) for (i, _), part in zip(alive, parts, strict=True)]


def join(items: Sequence[tuple[int, Tokens]]) -> Tokens:
    """Join the `(number, tokens)` of one prompt, with numbers as the signal `image` `[N]`."""
    first = items[0][1]
    signals = {}
    for name in set.intersection(*(set(tokens.signals) for _, tokens in items)):
        values = [tokens.signals[name] for _, tokens in items]
        signals[name] = values[0] if name.startswith("text_") else torch.cat(values)
    numbers = [torch.full((tokens.n,), i, device=tokens.x.device) for i, tokens in items]
    attention = [tokens.attn for _, tokens in items if tokens.attn is not None]
    return Tokens(
        x=torch.cat([tokens.x for _, tokens in items]),
        attn=torch.cat(attention) if len(attention) == len(items) else None,
        query=first.query,
        grid=first.grid if len(items) == 1 else None,
        signals={**signals, "image": torch.cat(numbers)},
    )


def split(whole: Reduction, lengths: Sequence[int], name: str = "the stage") -> list[Reduction]:
    """A Reduction of joined items as one per item; ModelError where it merges tokens of several."""
    parts, start = [], 0
    for length in lengths:
        stop = start + length
        low, high = (int((whole.keep < end).sum()) for end in (start, stop))
        owner = whole.owner[start:stop]
        foreign = (owner >= 0) & ((owner < low) | (owner >= high))
        weight = None if whole.weight is None else whole.weight[start:stop]
        mix = None if whole.mix is None else _mix(whole.mix, (low, high), (start, stop))
        if bool(foreign.any()) or (mix is not None and bool((mix.source < 0).any())):
            raise ModelError(
                f"'{name}' merges tokens of different images, which have places of their own; "
                "use a method that prunes across images, or one of scope 'item'"
            )
        owner = (owner - low).masked_fill(owner < 0, -1)
        keep = whole.keep[low:high] - start
        parts.append(Reduction(keep, owner, weight, mix, pure=whole.pure))
        start = stop
    return parts


def _mix(mix: Mix, slots: tuple[int, int], sources: tuple[int, int]) -> Mix:
    mine = (mix.output >= slots[0]) & (mix.output < slots[1])
    source: Tensor = mix.source[mine]
    inside = (source >= sources[0]) & (source < sources[1])
    source = (source - sources[0]).masked_fill(~inside, -1)
    return Mix(mix.output[mine] - slots[0], source, mix.weight[mine])


# Which tokens of an item stay, and their features `[m, D]` as a function of all, where they change.
Kept = tuple[Tensor, Callable[[Tensor], Tensor] | None]
# Per decoder layer the signals of every item.
Inner = Mapping[int, Sequence[Mapping[str, Tensor]]]


class SiteRunner:
    """Runs sites on the items of one forward pass; `inner` are signals of decoder layers."""

    def __init__(self, sequences: Sequences, inner: Inner, trace: Trace) -> None:
        self._sequences = sequences
        self._inner = inner
        self._trace = trace
        self.noted: list[Chain] = []  # of the site that ran last
        self._first = 0  # number of the first item of that site
        self.entered: Tensor | None = None  # `[B, n, D]` what entered the layer before that site
        self.embeddings: Sequence[Tensor] = ()  # cosines and sines of the tokens at the next site
        # By number of the item: links of its chain so far, and its attention `[n]` by then.
        self.earlier: dict[int, tuple[int, Tensor]] = {}
        # Of the site that ran last: by row what each item adds to the text `[T, D]`.
        self.texts: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def run(self, site: Site, hidden: Tensor) -> list[Kept]:
        """The tokens that a site keeps of every item; `hidden` `[B, n, D]`, without gradients."""
        items = items_of(site, self._sequences)
        self._first = items[0].number if items else 0
        self.noted.clear()
        self.texts = {}
        if not site.joint:
            return [self._one(site, item, hidden) for item in items]
        rows: dict[int, list[MediaItem]] = {}
        for item in items:
            rows.setdefault(item.row, []).append(item)
        found = {
            id(item): kept
            for row in rows.values()
            for item, kept in zip(row, self._row(site, row, hidden), strict=True)
        }
        return [found[id(item)] for item in items]

    def _row(self, site: Site, row: Sequence[MediaItem], hidden: Tensor) -> list[Kept]:
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
        for item, chain in zip(row, chains, strict=True):
            if item.n == 0:
                kept.append((item.where, None))
                continue
            self._note(site, item, chain)
            item.chain.extend(chain.reductions)
            kept.append((chain.keep, None if chain.pure else chain.apply))
        return kept

    def _one(self, site: Site, item: MediaItem, hidden: Tensor) -> Kept:
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
        return chain.keep, None if chain.pure else chain.apply

    def _planned(self, site: Site, item: MediaItem, hidden: Tensor) -> Kept:
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
        return plan.keep.index_select(0, here) - start, None if merged is None else lambda _: merged

    def _decide(self, site: Site, item: MediaItem, tokens: Tokens) -> Chain:
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
        item.signals, item.raster = chain.follow(item.signals), chain.raster
        return chain

    def _tokens(self, site: Site, item: MediaItem, x: Tensor, hidden: Tensor) -> Tokens:
        """The input of the stages: `x` `[n, D]` and the signals of this site."""
        row, text = hidden[item.row], self._sequences.text_of_prompt(item.row)
        signals = {} if site.deep else {n: v.to(x.device) for n, v in item.signals.items()}
        if site.deep and site.layer - 1 in self._inner:
            known = self._inner[site.layer - 1][item.number - self._first]
            signals = {name: value.to(x.device) for name, value in known.items()}
            if ROPE in site.needs and self.embeddings:
                signals[ROPE] = angles(self.embeddings, item).to(x.device)
        if BEFORE in site.needs and item.number in self.earlier:
            links, value = self.earlier[item.number]
            early = {BEFORE: value.to(x.device)}
            for reduction in item.chain[links:]:
                early = follow_signals(early, reduction)
            signals |= early
        if DRIFT in site.needs and self.entered is not None:
            before = self.entered[item.row].to(x.device).index_select(0, item.where)
            signals[DRIFT] = drift(before, x)
        grid = item.grid
        if item.part is not None and item.record is not None and not site.deep:
            layout = item.record.layouts[item.index]
            grid = layout.grid if len(x) == len(layout.content()) else None
        query = row.index_select(0, text) if "query" in site.needs and len(text) else None
        attn = signals.pop("attn", None)
        return Tokens(x, attn=attn, query=query, grid=grid, signals=signals)

    def see(self, item: MediaItem) -> None:
        """Let the trace draw an item that nothing has reduced yet."""
        if not item.chain and item.source is None and item.record is not None:
            layout, source = item.record.layouts[item.index], (item.record.kind, item.index)
            tile = None if layout.tiles is None else torch.tensor(layout.tiles)
            self._trace.see(item.number, layout.place(), tile, source)

    def _note(self, site: Site, item: MediaItem, chain: Chain) -> None:
        self.see(item)
        for spec, reduction in zip(site.specs, chain.reductions, strict=False):
            self._trace.record(site.name, item.number, reduction)
            note = f"{spec.method.name}, item {item.number}: {reduction.note}"
            if reduction.note and note not in self._trace.notes:
                self._trace.notes.append(note)
        self.noted.append(chain)
        if site.fuses and (change := chain.text) is not None:
            self.texts.setdefault(item.row, []).append(change)

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


def acting(sites: Sequence[Site], sequences: Sequences, trace: Trace) -> list[Site]:
    """The sites that change anything: a share of 1.0 must leave the stock path alone."""
    items = sequences.items
    lengths: list[int | None] = [item.part[2] if item.part else item.n for item in items]
    # a forecast of its own: a raster that is made smaller may fall short of its budget
    entered = [dict(item.entered) for item in items]
    found: list[Site] = []
    for site in sites:
        if site.of_text:
            prompts = items_of(site, sequences)
            if any(shortens(site, item.n) for item in prompts):
                found.append(site)
            else:
                total = sum(item.n for item in prompts)
                trace.add(site.name, total, total, 0.0)
            continue
        if not items:
            continue
        after = _left(site, items, lengths, entered)
        if any(m is None or m != n for n, m in zip(lengths, after, strict=True)):
            found.append(site)
        else:
            total = sum(n for n in lengths if n is not None)
            trace.add(site.name, total, total, 0.0)
        lengths = after
    return found


def items_of(site: Site, sequences: Sequences) -> list[MediaItem]:
    """Return the items that the stages of a site reduce: images and videos, or whole prompts."""
    if site.of_text:
        return sequences.of_prompt(site.tokens, site.last)
    return sequences.items


def shortens(site: Site, n: int) -> bool:
    """A site drops something of a prompt of `n` tokens, or of what earlier sites leave of it."""
    whole = all(spec.whole for spec in site.specs)
    return n > 0 and not whole and site.left(n, {}) != n


def _left(
    site: Site,
    items: Sequence[MediaItem],
    lengths: Sequence[int | None],
    entered: Sequence[MutableMapping[int, int]],
) -> list[int | None]:
    """Tokens a site leaves of every item; None where that is not known beforehand."""
    if not site.joint:
        pairs = zip(lengths, entered, strict=True)
        return [None if n is None else site.left(n, seen) for n, seen in pairs]
    after: list[int | None] = list(lengths)
    for row in {item.row for item in items}:
        mine = [i for i, item in enumerate(items) if item.row == row]
        left = left_of_row(site, [lengths[i] for i in mine], [entered[i] for i in mine])
        for i, n in zip(mine, left, strict=True):
            after[i] = n
    return after
