"""A second reading of a prompt, for the attention that its entries receive in it.

Behind the prompt the language model reads it again, chunk by chunk, each behind a request to repeat
it (KVzip), or of each chunk the tokens alone whose keys differ most (KV-Squared), and with the
cache of the whole prompt in front. Nothing of that is stored: the passes have no
cache of their own, and layers of full attention are handed the entries of one row of the real one.
Layers of other kinds, which do not hold the whole prompt, read a pass alone.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmfast.caches.keydiff import keydiff
from mmfast.caches.layers.kvcompose import composite
from mmfast.core.kv import KVBlock
from mmfast.core.tokens import Tokens
from mmfast.core.trace import Trace
from mmfast.models.kv import notes
from mmfast.models.kv.eviction import hidden
from mmfast.models.reduction.call import Call, PassState, PromptPart
from mmfast.models.reduction.probe import head_peak, replacing
from mmfast.models.wrappers import decoder_of
from mmfast.ops.ranking import snap, stable_topk

# Before the first chunk; before each later one and the last tokens of the one before it; behind.
WORDS = ("\n\nRepeat the previous context", "\n\nRepeat the previous context starting with", ":\n")
_TAIL = 8


@dataclass(frozen=True, eq=False)
class PromptInput:
    """Tokens of a prompt as they entered the language model, without those that were cut before.

    `numbers` are their places in the prompt, -1 at padding and drafts; `count` tokens came, those
    that were cut among them. `planes` are what DeepStack adds to visual tokens behind its first
    layers, and `spots` say which of them, -1 for none.
    """

    states: Tensor  # [B, n, D]
    positions: Tensor  # [A, B, n]
    numbers: Tensor  # [B, n]
    spots: Tensor  # [B, n]
    planes: tuple[Tensor, ...]  # [V, D]
    count: int


@dataclass(frozen=True, eq=False)
class _RowEntries:
    """Entries of one row in one layer: where, in which heads, and their places in the prompt."""

    kv: KVBlock  # [1, H, n, d]
    where: Tensor  # [n]
    real: Tensor  # [1, 1 or H, 1, n]
    numbers: Tensor  # [n]

    def of(self, numbers: Tensor) -> Tensor:
        """Places among the entries of those of a chunk, whose places in the prompt are given."""
        inside = (self.numbers >= int(numbers[0])) & (self.numbers <= int(numbers[-1]))
        return inside.nonzero()[:, 0]


class Repetition:
    """Passes over the prompts of one attached model, in chunks of `chunk` tokens of a row.

    With `asks`, this share of a chunk is read, unasked. Where it `composes`, what an entry receives
    is a mean over query heads, and `pending` of each layer has a table of all layers for each row.

    `modules` are the attention modules of the layers that a policy acts on.
    """

    def __init__(
        self,
        model: Any,
        modules: Mapping[int, nn.Module],
        chunk: int,
        trace: Trace,
        state: PassState,
        asks: float | None = None,
        composes: bool = False,
    ) -> None:
        self._model, self._text, self._modules = model, decoder_of(model), modules
        self._asks, self._chunk, self._trace, self._state = asks, chunk, trace, state
        self._composes = composes
        self._first = min(modules)

    @torch.no_grad()
    def arrive(self, cache: Any, index: int, call: Call, part: PromptPart) -> None:
        """Note what a part of a prompt has brought to the model, and which entries it left."""
        layer, first, step = cache.layers[index], cache.layers[self._first], call.step
        assert step is not None
        parts: tuple[PromptInput, ...] = first.pending or ()
        if index == self._first:
            parts = () if part.first else parts
            parts = first.pending = (*parts, self._entered(call, part.drafts, _count(parts)))
        places = step.sequences.index
        if places is None:
            places = torch.arange(step.full, device=parts[-1].numbers.device)[None]
        notes.mark(layer, notes.NUMBER, places + _count(parts[:-1]))

    def _entered(self, call: Call, drafts: int, before: int) -> PromptInput:
        step, (_, given) = call.step, call.given
        assert step is not None
        states, positions = given.get("inputs_embeds"), given.get("position_ids")
        if states is None:
            states = self._text.get_input_embeddings()(given["input_ids"])
        batch, count = states.shape[:2]
        if positions is None:
            positions = torch.arange(call.past, call.past + count, device=states.device)[None]
        positions = positions if positions.ndim == 3 else positions[None]
        positions = positions[-3:].expand(-1, batch, -1)  # a fourth axis in front counts tokens
        places = torch.arange(count, device=states.device).expand(batch, -1)
        cuts, ok, counted = step.entered
        for cut in cuts:
            states, places = cut(states), places.gather(1, cut.order)
        visual = given.get("visual_pos_masks")
        spots = torch.full_like(places, -1)
        if visual is not None:
            ranks = visual.flatten().cumsum(0).view_as(visual) - 1
            spots = ranks.masked_fill(~visual, -1).gather(1, places)
        numbers = (places + before).masked_fill(places >= count - drafts, -1)
        if ok is not None:
            numbers = numbers.masked_fill(~ok.to(numbers.device), -1)
        counted = places if counted is None else counted
        positions = positions.gather(2, counted.expand(len(positions), -1, -1))
        planes = tuple(given.get("deepstack_visual_embeds") or ())
        return PromptInput(states, positions, numbers, spots, planes, count)

    @torch.no_grad()
    def run(self, cache: Any, drafts: int) -> None:
        """Read the prompt that has ended again, and note what its entries receive."""
        first = cache.layers[self._first]
        parts, first.pending = first.pending, None
        prompt, state = _joined(parts), self._state
        unread = max(_prepare(cache.layers[index]) for index in self._modules)
        notes.warn_of_unscored(self._trace, unread, "reads a prompt a second time")
        before = state.call, state.part, state.cache, state.active
        state.call, state.part, state.cache, state.active = None, None, None, False
        try:
            for row in range(len(prompt.numbers)):
                self._read_row(cache, row, prompt, drafts)
        finally:
            state.call, state.part, state.cache, state.active = before
        for index in self._modules:
            cache.layers[index].notes.pop(notes.NUMBER)
        if self._composes:
            tables = [self._table(cache, row, drafts) for row in range(len(prompt.numbers))]
            for index in self._modules:
                cache.layers[index].pending = tables

    def _table(self, cache: Any, row: int, drafts: int) -> Tensor:
        """Scores `[L, M]` of the composite tokens of a row, -1 where a layer has fewer."""
        found = []
        for index in self._modules:
            held = notes.fill(cache.layers[index])
            real = (held[notes.KIND][row] != notes.PADDING).any(0).nonzero()[:, 0]
            real = real[: len(real) - drafts]
            found.append(composite(held[notes.REPEATED][row].index_select(1, real)).cpu())
        return pad_sequence(found, batch_first=True, padding_value=-1)

    def _read_row(self, cache: Any, row: int, prompt: PromptInput, drafts: int) -> None:
        entries = {i: _of_row(cache.layers[i], row, drafts) for i in self._modules}
        some = (prompt.numbers[row] >= 0).nonzero()[:, 0]
        start = prompt.positions[:, row, some].max() + 1 if len(some) else 0
        tail = some[:0]
        for here in some.split(self._chunk):
            numbers = prompt.numbers[row, here]
            if self._asks is None:
                given = self._asked(prompt, row, here, tail, start)
            else:
                some = here
                if self._asks < 1:
                    some = here[_odd(entries, numbers, self._asks)]
                given = _unasked(prompt, row, some, start)
            note = partial(self._note, cache, row)
            thread = threading.get_ident()
            change = partial(_handed, thread, entries, numbers, note, self._composes)
            with replacing(dict(self._modules), change):
                self._pass(*given, prompt.planes)
            tail = here[-_TAIL:]

    def _asked(
        self, prompt: PromptInput, row: int, here: Tensor, tail: Tensor, start: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States, positions and spots of a chunk behind the request to repeat it."""
        embed, (opening, later, closing) = self._text.get_input_embeddings(), self._ids
        words = later if len(tail) else opening
        ids = [
            torch.tensor(each, dtype=torch.long, device=here.device) for each in (words, closing)
        ]
        lead = len(ids[0]) + len(tail) + len(ids[1])
        mine = prompt.states[row]
        states = torch.cat([embed(ids[0]), mine[tail], embed(ids[1]), mine[here]])
        own = prompt.positions[:, row, here]
        count = start + torch.arange(lead, device=here.device).expand(len(own), -1)
        positions = torch.cat([count, own - own.min() + start + lead], 1)
        none = [torch.full_like(each, -1) for each in ids]
        spots = torch.cat([none[0], prompt.spots[row, tail], none[1], prompt.spots[row, here]])
        return states[None], positions[:, None], spots

    def _pass(
        self, states: Tensor, positions: Tensor, spots: Tensor, planes: Sequence[Tensor]
    ) -> None:
        visual, more = spots >= 0, {}
        if planes and bool(visual.any()):
            rows = [plane[spots[visual].to(plane.device)] for plane in planes]
            more = {"visual_pos_masks": visual[None], "deepstack_visual_embeds": rows}
        whole = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        run = partial(
            self._text.forward,
            inputs_embeds=states,
            attention_mask=whole,
            position_ids=positions if len(positions) > 1 else positions[0],
            use_cache=False,
            **more,
        )
        contextvars.Context().run(run)  # so that nothing of this pass is recorded as an output

    @staticmethod
    def _note(cache: Any, row: int, index: int, where: Tensor, peak: Tensor) -> None:
        cache.layers[index].notes[notes.REPEATED][row].index_copy_(1, where, peak)

    @cached_property
    def _ids(self) -> Sequence[Sequence[int]]:
        found = request_ids(self._model)
        if found is None:
            self._trace.notes.append("no tokenizer beside the model: prompts are repeated unasked")
        return found or [()] * len(WORDS)


def _unasked(
    prompt: PromptInput, row: int, some: Tensor, start: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """States, positions and spots of some tokens, which follow the prompt one behind the other."""
    count = start + torch.arange(len(some), device=some.device)
    positions = count.expand(len(prompt.positions), 1, -1)
    return prompt.states[row, some][None], positions, prompt.spots[row, some]


def _odd(entries: Mapping[int, _RowEntries], numbers: Tensor, share: float) -> Tensor:
    """Ascending indices among `numbers` of a chunk of those whose keys differ most.

    The cosine with the mean direction of the chunk's keys is a mean over heads and layers.
    """
    score = torch.zeros(len(numbers), dtype=torch.float64, device=numbers.device)
    held = torch.zeros_like(score)
    for mine in entries.values():
        places = mine.of(numbers)
        if not len(places):  # a cut in front of this layer has dropped the whole chunk
            continue
        keys = mine.kv.keys[0][0].index_select(1, places)  # [H, c, d]
        where = torch.searchsorted(numbers, mine.numbers[places])
        found = keydiff(Tokens(keys), len(places)).mean(0).to(score.device)
        score.index_add_(0, where, found)
        held.index_add_(0, where, torch.ones_like(found))
    score = (score / held.clamp_min(1)).masked_fill(held == 0, -torch.inf)
    return stable_topk(snap(score), max(int(len(numbers) * share), 1)).sort().values


def request_ids(model: Any) -> Sequence[Sequence[int]] | None:
    """Return token ids of `WORDS` by the tokenizer in the folder of a model; None without one."""
    home = str(getattr(model, "name_or_path", "") or "")
    return _ids_by(home) if home else None


@lru_cache(maxsize=16)  # a pipeline attaches at every call
def _ids_by(home: str) -> Sequence[Sequence[int]] | None:
    from transformers import AutoTokenizer

    try:
        encode = AutoTokenizer.from_pretrained(home, local_files_only=True).encode
    except (OSError, ValueError):
        return None
    return [encode(each, add_special_tokens=False) for each in WORDS]


def _handed(
    thread: int,
    entries: Mapping[int, _RowEntries],
    numbers: Tensor,
    note: Any,
    mean: bool,
    index: int,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
) -> tuple[Tensor, Tensor, Any]:
    """Put the entries of a row before keys and values of a pass, and note what its chunk gets."""
    if threading.get_ident() != thread:
        return key, value, mask
    mine, count = entries[index], query.shape[2]
    places = mine.of(numbers)
    (keys,), (values,) = mine.kv.keys, mine.kv.values
    near = torch.cat([keys.index_select(2, places), key], 2)
    peak = head_peak(query, near, getattr(module, "scaling", None), mean)[:, : len(places)]
    note(index, mine.where[places], peak)
    new = torch.ones(count, count, dtype=torch.bool, device=key.device).tril()
    heads = mine.real.shape[1]
    seen = torch.cat(
        [mine.real.expand(-1, -1, count, -1), new.expand(1, heads, -1, -1)], -1
    )  # [1, 1 or H, L, n + L]
    stock = None if isinstance(mask, Tensor) else mask
    keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
    return keys, values, hidden(module, query, stock, seen)


def _count(parts: Sequence[PromptInput]) -> int:
    return sum(part.count for part in parts)


def _joined(parts: Sequence[PromptInput]) -> PromptInput:
    """Parts of one prompt, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    spots, rows = [], 0
    for part in parts:
        spots.append(part.spots + rows * (part.spots >= 0))
        rows += len(part.planes[0]) if part.planes else 0
    planes = [part.planes for part in parts if part.planes]
    return PromptInput(
        torch.cat([part.states for part in parts], 1),
        torch.cat([part.positions for part in parts], 2),
        torch.cat([part.numbers for part in parts], 1),
        torch.cat(spots, 1),
        tuple(map(torch.cat, zip(*planes, strict=True))),
        _count(parts),
    )


def _prepare(layer: Any) -> int:
    """Give every entry of a layer a note of what it receives, which passes fill in.

    Returns how many entries of all rows came before and have never had one.
    """
    (batch, heads), held = layer.keys.shape[:2], notes.fill(layer)
    old, unread = held.get(notes.REPEATED), 0
    if old is None:
        old = torch.ones(batch, heads, held[notes.KIND].shape[-1], device=layer.keys.device)
        unread = int(((held[notes.NUMBER] < 0) & (held[notes.KIND] != notes.PADDING)).any(1).sum())
    layer.notes = {**held, notes.REPEATED: old.clone()}
    return unread


def _of_row(layer: Any, row: int, drafts: int) -> _RowEntries:
    whole = layer.whole() if layer.in_packs else (layer.keys, layer.values)
    held = notes.fill(layer)
    real = held[notes.KIND][row] != notes.PADDING  # [1 or H, n]
    real = real[:, : real.shape[1] - drafts]
    where = real.any(0).nonzero()[:, 0]
    keys, values = (x[row : row + 1].index_select(2, where) for x in whole)
    real = real.index_select(1, where)
    real = real[:1] if bool(real.all()) else real
    numbers = held[notes.NUMBER][row, 0].index_select(0, where)
    return _RowEntries(KVBlock((keys,), (values,)), where, real[None, :, None], numbers)
