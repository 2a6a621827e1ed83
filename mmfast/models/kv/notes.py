"""Notes of a cache layer on its entries: their kind, their place, the attention they receive.

Notes are tensors with the batch first and the entries last. They lie on the layer itself, so they
follow it through beams, crops and copies.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import ModelError
from mmfast.core.trace import Trace
from mmfast.models.reduction.call import PassState, PromptPart
from mmfast.models.reduction.probe import head_mass, keys_seen, probe_mass, probing, softmax_rows
from mmfast.models.reduction.sequence import Sequences

PADDING, TEXT, VISUAL, MARK = -1, 0, 1, 2

# `[B, 1 or H, n]`: the kind of an entry, and its number among the tokens that the layer got.
KIND, PLACE = "kind", "place"
# `[B, 1 or H, n]` bool: kept by a policy that acts behind a prompt only.
PINNED = "pinned"
# `[B, H, n]` float32: attention received, of the last queries of a prompt and of all, and of the
# last ones times the number of entries that each of them sees.
WINDOW, TOTAL, COUNTED = "window", "total", "counted"
# `[B, H, n]` float32: attention that the tokens of a chunk of the prompt give to each other.
MUTUAL = "mutual"
# `[B, H, n]` float32: mean attention of the last visual tokens of the last prompt that has some.
VISION = "vision"
# `[B, H, n]` float32: attention received from probes, and `[B, 1, n]` how many of them see it.
PROBED, PROBES = "probed", "probes"
# `[B, H, n]` float32: the largest attention received while the prompt was repeated, 1 where it was
# not; and `[B, 1 or H, n]` the number of a token among those of the prompt, until it ends.
REPEATED, NUMBER = "repeated", "number"
# `[B, H, n]` float32: how much the gate of the layer says that heads will need an entry, 1 where it
# was not asked.
GATED = "gated"
# No note, but the queries `[B, Hq, n, d]` of a part of a prompt, for `MUTUAL` or `VISION`.
QUERIES = "queries"
# Neither: the squares `[B, H, d]` of the last queries, by which `think` leaves out channels.
POWER = "power"
# `[B, 1 or H, n]`, the same throughout a row: its tokens when its last prompt ended.
BASIS = "basis"
# `[B, 1, n]`: the cluster that finds an entry again, -1 at what is always read; the frame it came
# with, until the prompt ends; and whether it is read.
CLUSTER, FRAME, READ = "cluster", "frame", "read"
# `[B, 1 or H, n]`: twice the number of its sentence, frame or picture in the row, and one more at a
# token that ends a sentence; -1 where it is not known.
SENTENCE = "sentence"
# `[B, 1 or H, n]`: the place of an entry in its frame, -1 where it has none.
SPOT = "spot"
_FILL = {
    KIND: TEXT,
    PINNED: False,
    WINDOW: 0.0,
    TOTAL: 0.0,
    COUNTED: 0.0,
    MUTUAL: 0.0,
    VISION: 0.0,
    PROBED: 0.0,
    PROBES: 0.0,
    REPEATED: 1.0,
    GATED: 1.0,
    NUMBER: -1,
    CLUSTER: -1,
    FRAME: -1,
    SPOT: -1,
    SENTENCE: -1,
    READ: True,
}


def kinds_of(sequences: Sequences) -> Tensor:
    """Kinds of the tokens of a call, `[B, n]` int8: text, visual, separators, or padding."""
    items, ok, n = sequences.items, sequences.ok, sequences.length
    device = sequences.fixed[0].device if sequences.fixed else None
    device = ok.device if ok is not None else device
    rows, width = len(sequences.fixed) or 1, n if items else 1
    kinds = torch.zeros(rows, width, dtype=torch.int8, device=device).expand(rows, n)
    if items:
        kinds[:] = MARK
        for row, text in enumerate(sequences.text):
            kinds[row, text] = TEXT
        for item in items:
            kinds[item.row, item.where] = VISUAL
    if ok is None:
        return kinds
    return kinds.expand(len(ok), n).masked_fill(~ok, PADDING)


def entries(layer: Any) -> int:
    """Entries that a cache layer holds per row and head, padding included."""
    if not layer.is_initialized or layer.keys is None:
        return 0
    return int(layer.keys.shape[-2]) + int(getattr(layer, "extra", 0))


def fill(layer: Any) -> dict[str, Tensor]:
    """Notes for what came since they were last written: generated tokens."""
    notes: dict[str, Tensor] = layer.notes
    n = entries(layer)
    missing = n - notes[KIND].shape[-1]
    if missing > 0:
        start = layer.gone + n - missing
        layer.notes = notes = {k: _longer(k, v, start, missing) for k, v in notes.items()}
    return notes


def _longer(name: str, note: Tensor, start: int, missing: int) -> Tensor:
    if name in _FILL:
        return F.pad(note, (0, missing), value=_FILL[name])
    if name == BASIS:
        new = note[..., -1:].expand(*note.shape[:-1], missing)
    else:
        places = torch.arange(start, start + missing, device=note.device)
        new = places.expand(*note.shape[:-1], missing)
    return torch.cat([note, new], -1)


def begin(layer: Any, before: int, past: Tensor | None, batch: int) -> None:
    """Start the notes of a layer with `before` entries of calls without hooks, which count as text.

    `past` `[B, before]` is False at padding among them.
    """
    device = layer.keys.device
    kinds = torch.zeros(batch, 1, before, dtype=torch.int8, device=device)
    if past is not None:
        kinds = kinds.masked_fill(~past[:, None, -before:].to(device), PADDING)
    places = torch.arange(before, device=device).expand(batch, 1, before)
    layer.notes = {KIND: kinds, PLACE: places}


class _Looked(threading.local):
    """Kinds that were looked at last, and where they are no padding."""

    kinds: Any = staticmethod(lambda: None)
    where: tuple[Tensor, ...] = ()
    held: Tensor | None = None


_LOOKED = _Looked()


def open_notes(layer: Any, sequences: Sequences) -> dict[str, Tensor]:
    """Notes on a layer that holds no more than the tokens of the call at hand."""
    batch, n, device = len(layer.keys), sequences.length, layer.keys.device
    places = torch.arange(n, device=device)
    kinds = kinds_of(sequences)[:, None].to(device).expand(batch, 1, n)
    if sequences.ok is None:
        held = torch.full((batch, 1, 1), n, device=device).expand(batch, 1, n)
        _look(kinds, (places,) * batch, held)
    return {KIND: kinds, PLACE: places.expand(batch, 1, n)}


# Notes on a layer that held nothing before a call, and what they follow from.
FreshNotes = tuple[tuple[Any, ...], dict[str, Tensor]]


def note_part(
    layer: Any, sequences: Sequences, past: Tensor | None, fresh: FreshNotes | None
) -> FreshNotes | None:
    """Note the kinds and places of what has come; new layers of a call share notes.

    `fresh` is what this returned for a layer before, `past` as of `begin`.
    """
    before = entries(layer) - sequences.length
    if layer.notes is not None or before:
        if layer.notes is None:
            begin(layer, before, past, len(layer.keys))
        arrive(layer, kinds_of(sequences))
        return fresh
    # Tokens that leave between layers change these in place.
    now = sequences, sequences.ok, sequences.index
    facts = sequences.length, layer.keys.shape[0], layer.keys.device
    if fresh is None or fresh[0][3] != facts or any(map(is_not, fresh[0], now)):
        fresh = (*now, facts), open_notes(layer, sequences)
    layer.notes = dict(fresh[1])
    return fresh


def arrive(layer: Any, kinds: Tensor) -> None:
    """Note the kinds `[B, n]` of the n entries that a call has just stored."""
    notes = fill(layer)
    count = kinds.shape[-1]
    old = notes[KIND]
    new = kinds[:, None].to(old).expand(*old.shape[:-1], count)
    layer.notes = {**notes, KIND: torch.cat([old[..., : old.shape[-1] - count], new], -1)}


def mark(layer: Any, name: str, numbers: Tensor) -> None:
    """Note `numbers` `[B or 1, n]` of the n entries that a call has just stored.

    They go to the device of the kinds: a policy puts the two together.
    """
    notes, n = fill(layer), numbers.shape[-1]
    kinds = notes[KIND]
    old = notes.get(name)
    if old is None:
        old = torch.full((len(kinds), 1, kinds.shape[2]), _FILL[name], device=kinds.device)
    new = numbers[:, None].to(old.device).expand(*old.shape[:-1], n)
    layer.notes = {**notes, name: torch.cat([old[..., : old.shape[-1] - n].to(new), new], -1)}


def score_new(layer: Any, name: str, scores: Tensor) -> int:
    """Note `scores` `[B, H, n]` of the n entries that a call has just stored.

    Returns how many entries of all rows came before and have never had one.
    """
    notes, n, unscored = fill(layer), scores.shape[-1], 0
    old, before = notes.get(name), notes[KIND].shape[-1] - n
    if old is None:
        shape = (*scores.shape[:2], before + n)
        old = torch.full(shape, _FILL[name], dtype=torch.float32, device=scores.device)
        unscored = int((notes[KIND][..., :before] != PADDING).any(1).sum()) if before else 0
    layer.notes = {**notes, name: torch.cat([old[..., : old.shape[-1] - n], scores], -1)}
    return unscored


def warn_of_unscored(
    trace: Trace, count: int, reads: str, fate: str = "they stay before all others"
) -> None:
    """Warn of `count` entries that came before a policy; `reads` says what it does to score."""
    if count:
        trace.warn(
            f"{count} entries of this cache came before its policy, which {reads}: nothing is "
            f"known of them, and {fate}; read the whole prompt under attach(cache=)"
        )


def remember_basis(layer: Any, drafts: int = 0) -> None:
    """Note how many tokens each row holds, without drafts, before a policy acts on them."""
    notes = fill(layer)
    kinds = notes[KIND]
    held = _LOOKED.held if _LOOKED.kinds() is kinds else None
    if held is None:
        held = (kinds[:, :1] != PADDING).sum(-1, keepdim=True)  # waits for no device
        held = held.expand(kinds.shape)
        if _LOOKED.kinds() is kinds:
            _LOOKED.held = held
    if drafts:
        held = (held[..., :1] - drafts).expand(kinds.shape)
    layer.notes = {**notes, BASIS: held}


def real_entries(kinds: Tensor) -> tuple[Tensor, ...]:
    """Places `[n_b]` of each row of kinds `[B, 1 or H, n]` that are no padding.

    The layers of a call share their kinds, which nobody writes to, so one search does for all.
    """
    if _LOOKED.kinds() is not kinds:
        real = kinds[:, 0] != PADDING  # the same in all heads
        _look(kinds, tuple(row.nonzero()[:, 0] for row in real))
    return _LOOKED.where


def _look(kinds: Tensor, where: tuple[Tensor, ...], held: Tensor | None = None) -> None:
    _LOOKED.kinds, _LOOKED.where, _LOOKED.held = weakref.ref(kinds), where, held


def add_masses(layer: Any, masses: Mapping[str, Tensor]) -> None:
    """Add attention `[B, H, n]` that all entries received, by the name of the note."""
    notes = fill(layer)
    added = {
        name: F.pad(notes[name], (0, mass.shape[-1] - notes[name].shape[-1])) + mass
        if name in notes
        else mass
        for name, mass in masses.items()
    }
    layer.notes = {**notes, **added}


def note_mutual(layer: Any, chunk: int, sink: int, recent: int, drafts: int = 0) -> int:
    """Note what the tokens of the prompt that has ended receive from all tokens of their chunk.

    A chunk has `chunk` tokens of a row. The first `sink` tokens of the cache and the last `recent`
    ones neither give nor receive, nor do the `drafts` behind the prompt. Logits are plain products,
    not divided by the root of the width. The queries of the prompt are `layer.pending`
    `[B, Hq, n, d]`, which is then None. Returns how many entries of all rows came before and have
    no note.
    """
    queries, layer.pending = layer.pending, None
    batch, heads = layer.keys.shape[:2]
    total, count = entries(layer), int(queries.shape[2])
    start = total - drafts - count  # the first entry of this prompt
    keys = layer.keys[:, :, layer.keys.shape[2] - drafts - count :]
    notes = fill(layer)
    real = notes[KIND][:, 0, : total - drafts] != PADDING
    unscored = int(real[:, :start].sum()) if start and MUTUAL not in notes else 0
    mass = torch.zeros(batch, heads, total, dtype=torch.float32, device=keys.device)
    for row, mine in enumerate(real):
        where = mine.nonzero()[:, 0]
        some = where[sink : max(sink, len(where) - recent)]
        for places in some[some >= start].split(chunk):
            query, key = (x[row : row + 1].index_select(2, places - start) for x in (queries, keys))
            rows = softmax_rows(query, key, None, 1.0)[0]  # [Hq, c, c]
            mass[row, :].index_copy_(1, places, rows.unflatten(0, (heads, -1)).sum(2).mean(1))
    add_masses(layer, {MUTUAL: mass})
    return unscored


def note_vision(layer: Any, keys: Tensor, window: int, drafts: int = 0) -> None:
    """Note what the last visual tokens of the prompt that has ended look at, in the mean.

    They are `window` of each row at most, and see what stands before them and themselves. Where a
    prompt has none, the note of an earlier one stays. `keys` `[B, H, n, d]` are all of the layer;
    the queries of the prompt, scaled, are `layer.pending` `[B, Hq, n, d]`, which is then None.
    """
    queries, layer.pending = layer.pending, None
    heads, total = keys.shape[1:3]
    start = total - drafts - int(queries.shape[2])  # the first entry of this prompt
    notes, keys = fill(layer), keys[:, :, : total - drafts]
    kinds = notes[KIND][:, 0, : total - drafts]
    mass = notes.get(VISION)
    if mass is None:
        mass = torch.zeros(*keys.shape[:2], total, dtype=torch.float32, device=keys.device)
    mass = mass.clone()
    place = torch.arange(total - drafts, device=keys.device)
    for row, mine in enumerate(kinds):
        asks = (mine[start:] == VISUAL).nonzero()[-window:, 0]
        if len(asks):
            query = queries[row : row + 1].index_select(2, asks)
            hidden = (place > (asks + start)[:, None]) | (mine == PADDING)  # [c, n]
            bias = torch.zeros(hidden.shape, device=keys.device).masked_fill(hidden, -torch.inf)
            rows = softmax_rows(query, keys[row : row + 1], bias, 1.0)[0]  # [Hq, c, n]
            mass[row] = F.pad(rows.unflatten(0, (heads, -1)).mean((1, 2)), (0, drafts))
    layer.notes = {**notes, VISION: mass}


def saliency(notes: Mapping[str, Tensor]) -> Tensor:
    """Mean attention `[.., H, n]` from the probes that see an entry; 0 where none does."""
    return notes[PROBED] / notes[PROBES].clamp_min(1)


class Attention:
    """Sums the attention that the entries of a cache receive; with `steps` in decode steps, too."""

    def __init__(self, plan: CachePlan, steps: bool, state: PassState) -> None:
        self._window = plan.window
        self._total = "attn_sum" in plan.needs
        self._queries, self._scaled = plan.mutual is not None or plan.vision > 0, plan.vision > 0
        of_window = (("attn_window", WINDOW, False), ("attn_counted", COUNTED, True))
        self._sums = {note: counted for need, note, counted in of_window if need in plan.needs}
        pruner = plan.pruner()
        self._power = 0 if pruner is None else pruner.window
        self._probes = plan.probes
        self._steps, self._state = steps, state
        self._local = threading.local()

    @property
    def reads(self) -> bool:
        """The plan reads attention."""
        sums = self._total or self._queries or self._probes is not None
        return bool(self._window or self._power) or sums

    @contextmanager
    def watching(self, modules: Mapping[int, nn.Module]) -> Iterator[None]:
        """Watch attention modules, by decoder layer."""
        look: Any = torch.compiler.disable(self.look)
        hooks = {module: partial(look, index) for index, module in modules.items()}
        with probing(hooks, levels=self._total):
            yield

    def take(self, index: int) -> dict[str, Tensor]:
        """Notes `[B, H, n]` to add, from the call that this thread is in, of one layer."""
        found: dict[str, Tensor] = self._local.__dict__.pop(str(index), {})
        return found

    def look(
        self,
        index: int,
        _: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None,
        causal: bool,
        lse: Tensor | None = None,
        *,
        layer: Any = None,
    ) -> None:
        """Sum the attention of one layer in the call at hand, for `take`.

        `layer` is that of the cache, in a decode step outside of the model's own call.
        """
        part, ok = self._state.part, self._state.padding
        if not self._state.active or (part is None and not self._steps):
            return
        new = query.shape[2] - (part.drafts if part else 0)
        if layer is None and part is None and self._state.cache is not None:
            layer = self._state.cache.layers[index]
        found: dict[str, list[Tensor]] = {}
        places_of = list[Tensor]()
        for row in range(len(query)):
            places = torch.arange(new, device=query.device)
            if ok is not None:
                places = places[ok[row, :new].to(query.device)]
            if self._total:
                mine = head_mass(query, key, row, places, mask, scaling, causal, lse)
                found.setdefault(TOTAL, []).append(mine)
            if self._probes is not None:
                places_of.append(places)
            rest = self._rest(index, row, part, len(places))
            if part is not None and rest < self._power:
                recent = places[max(0, len(places) - self._power + rest) :]
                squares = query[row].index_select(1, recent).float().square().sum(1)  # [Hq, d]
                mine = squares.unflatten(0, (key.shape[1], -1)).mean(1)
                found.setdefault(POWER, []).append(mine)
            if rest < self._window:
                recent = places[max(0, len(places) - max(0, self._window - rest)) :]
                for note, counted in self._sums.items():
                    mine = head_mass(
                        query, key, row, recent, mask, scaling, causal, counted=counted
                    )
                    found.setdefault(note, []).append(mine)
        if self._probes is not None:
            seen = partial(keys_seen, query, key, mask=mask, is_causal=causal)
            asks = [self._asking(part, layer, seen, b, p) for b, p in enumerate(places_of)]
            if part is not None or any(map(len, asks)):
                found |= _probed(query, key, asks, mask, scaling, causal)
        self._local.__dict__[str(index)] = {name: torch.stack(rows) for name, rows in found.items()}
        if self._queries:
            queries = query[:, :, :new]
            if self._scaled:  # as this module divides its logits
                queries = queries * (query.shape[-1] ** -0.5 if scaling is None else scaling)
            self._local.__dict__[str(index)][QUERIES] = queries

    def _rest(self, index: int, row: int, part: PromptPart | None, count: int) -> int:
        """Tokens of a prompt that later chunks bring, behind the `count` of this one.

        ModelError for chunks whose queries were taken for others, since later ones were cut.
        """
        if part is None or (part.first and part.last):
            return 0
        if self._window or self._power or self._probes is not None:
            self._check_part(index, row, part, count)
        return part.rest

    def _check_part(self, index: int, row: int, part: PromptPart, count: int) -> None:
        parts = self._local.__dict__.setdefault("parts", {})
        mine = parts.setdefault((index, row), [])
        if part.first:
            mine.clear()
        mine.append((part.rest, count))
        if not part.last:
            return
        behind, window = 0, max(self._window, self._power)
        for told, brought in reversed(mine):
            taken, due = (min(brought, max(0, window - n)) for n in (told, behind))
            if taken != due or (brought and told != behind and self._probes is not None):
                other = f", or give a size that leaves {window} tokens of the last chunk"
                raise ModelError(
                    "the cache policy asks the last queries of a prompt, and chunks of it tell too "
                    "late how many of them reduce= leaves; leave out prefill_chunk_size"
                    + (other if self._probes is None else "")
                )
            behind += brought

    def _asking(
        self,
        part: PromptPart | None,
        layer: Any,
        seen: Callable[[int, Tensor], int],
        row: int,
        places: Tensor,
    ) -> Tensor:
        """Choose the probes `[p]` among the last queries of a row, at `places` `[c]`.

        `seen(row, place)` counts the keys that the query at `place` `[1]` may see.
        """
        probes: Any = self._probes
        order = torch.arange(len(places), device=places.device) - len(places)
        if part is not None:
            end = seen(row, places[-1:]) if len(places) else 0
            return places[probes.of_prompt(end + order, end + part.rest)]
        rows = getattr(layer, "rows", ())  # without any it never was packed
        if not rows:
            return places[:0]
        recent = layer.keys.shape[2] - layer.front[row] + order
        return places[probes.of_answer(rows[row].packed + recent, recent)]


def _probed(
    query: Tensor, key: Tensor, asks: list[Tensor], mask: Any, scaling: float | None, causal: bool
) -> dict[str, list[Tensor]]:
    """Notes on what the queries at places `asks` of each row give."""
    given = [probe_mass(query, key, b, p, mask, scaling, causal) for b, p in enumerate(asks)]
    return {PROBED: [mass for mass, _ in given], PROBES: [seen[None] for _, seen in given]}
