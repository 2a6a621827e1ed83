"""Places of images and videos in the sequences of a batch, before and after reductions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import ALL
from mmfast.models.families.adapter import Adapter, Layout, placeholder
from mmfast.models.families.prompt_ids import placeholders_in
from mmfast.models.reduction.record import Record, features_given, flat, record_of


@dataclass
class MediaItem:
    """The tokens of one image or video in the sequence of one batch row.

    Attributes:
        number: Counts the images and videos of the batch in reading order.
        where: Current places in the row of the tokens a method may reduce, `[n]` ascending.
        planes: Places of the same tokens, unreduced, among all visual tokens of the batch.
        grid: `(t, h, w)` while nothing was removed and the tokens are a full raster.
        raster: The grid that the tokens are to have after the next cut, where they have one.
        record: Source of the features; the item is number `index` there.
        part: Under chunked prefill: this chunk holds tokens `part[0]:part[1]` of `part[2]`.
        source: Under chunked prefill: the plan for the whole item, and the outputs that are here.
        entered: Tokens of the whole item that entered each schedule (`core.spec.wanted`).
    """

    row: int
    number: int
    where: Tensor
    planes: Tensor
    grid: tuple[int, int, int] | None
    signals: dict[str, Tensor] = field(default_factory=dict)
    chain: list[Reduction] = field(default_factory=list)
    record: Record | None = None
    index: int = 0
    part: tuple[int, int, int] | None = None
    source: tuple[Any, Tensor] | None = None
    entered: dict[int, int] = field(default_factory=dict)
    raster: tuple[int, int, int] | None = None

    @property
    def n(self) -> int:
        """Tokens left."""
        return len(self.where)


@dataclass
class Sequences:
    """The rows of a batch, `length` tokens each, padding included: untouched tokens, and the items.

    Per row `fixed` `[F]` are the places of text and separators and `text` `[T]` those of text,
    ascending. `ok` `[B, length]` is False at padding; `index` `[B, length]` is the original place
    of each token, None while nothing was removed. The last `drafts` tokens stand behind the prompt.
    `prompts` are the rows as items of their own, see `of_prompt`.
    """

    length: int
    fixed: list[Tensor]
    text: list[Tensor]
    items: list[MediaItem]
    ok: Tensor | None = None
    index: Tensor | None = None
    drafts: int = 0
    prompts: dict[tuple[str, int], list[MediaItem]] = field(default_factory=dict)

    def of_prompt(self, tokens: str, last: int) -> list[MediaItem]:
        """One item per row, of the tokens of its prompt that may be dropped together.

        They are its `text`, or `all` of it, media too; the `last` tokens of a prompt stay, and so
        do separators.
        """
        if (tokens, last) not in self.prompts:
            first = len(self.items)
            self.prompts[tokens, last] = [
                MediaItem(b, first + b, where, where[:0], None)
                for b, where in enumerate(self._droppable(tokens, last))
            ]
        return self.prompts[tokens, last]

    def _droppable(self, tokens: str, last: int) -> Iterator[Tensor]:
        for b, text in enumerate(self.text):
            media = [item.where for item in self.items if item.row == b and tokens == ALL]
            places = torch.cat([text, *media]).sort().values
            end = self.real(b)[-last:]
            yield places[places < (end[0] if len(end) else 0)]

    def real(self, row: int) -> Tensor:
        """Places of a row's tokens, `[n]` ascending, without padding and drafts."""
        if self.ok is None:
            return torch.arange(self.length - self.drafts)
        places = self.ok[row].nonzero()[:, 0]
        return places[: len(places) - self.drafts]

    def text_of_prompt(self, row: int) -> Tensor:
        """Places of the text of a row, `[T]` ascending, without drafts."""
        text = self.text[row]
        return text[: len(text) - self.drafts]

    def compact(self, keep: Seq[Tensor]) -> Tensor:
        """Keep `keep[i]` `[m]` of item i; rows of unequal length get left padding.

        Earlier padding goes. Returns `[B, new length]`, the previous place of every token.
        """
        kept = [item.where[k] for item, k in zip(self.items, keep, strict=True)]
        rows = []
        for b, fixed in enumerate(self.fixed):
            mine = [k for item, k in zip(self.items, kept, strict=True) if item.row == b]
            rows.append(torch.cat([fixed, *mine]).sort().values)
        return self._compact(rows, kept)

    def drop(self, gone: Seq[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Drop the places `gone[b]` of row b; returns what `compact` does, and `keep` of each item.

        Text and media go alike.
        """
        rows = []
        for b, fixed in enumerate(self.fixed):
            mine = [item.where for item in self.items if item.row == b]
            places = torch.cat([fixed, *mine]).sort().values
            rows.append(places[~torch.isin(places, gone[b])])
        keep = [(~torch.isin(item.where, gone[item.row])).nonzero()[:, 0] for item in self.items]
        for group in (self.fixed, self.text):
            group[:] = [
                mine[~torch.isin(mine, left)] for mine, left in zip(group, gone, strict=True)
            ]
        kept = [item.where[k] for item, k in zip(self.items, keep, strict=True)]
        return self._compact(rows, kept), keep

    def _compact(self, rows: list[Tensor], kept: list[Tensor]) -> Tensor:
        """Keep the places `rows[b]` of row b, of which `kept[i]` belong to item i."""
        # A chunk of which nothing is left becomes one padding token: layers refuse empty input.
        self.length = max(1, *(len(row) for row in rows))
        gaps = [self.length - len(row) for row in rows]
        for item, places in zip(self.items, kept, strict=True):
            item.grid = item.grid if len(places) == item.n else item.raster
            item.raster = None
            item.where = torch.searchsorted(rows[item.row], places) + gaps[item.row]
        for prompt in (each for prompts in self.prompts.values() for each in prompts):
            row = rows[prompt.row]
            left = prompt.where[torch.isin(prompt.where, row)]
            prompt.where = torch.searchsorted(row, left) + gaps[prompt.row]
        for group in (self.fixed, self.text):
            group[:] = [
                torch.searchsorted(row, places) + gap
                for row, places, gap in zip(rows, group, gaps, strict=True)
            ]
        self._pad(gaps, rows[0].device)
        order = torch.stack([F.pad(row, (gap, 0)) for row, gap in zip(rows, gaps, strict=True)])
        self.index = order if self.index is None else self.index.gather(1, order)
        return order

    def to(self, device: torch.device) -> None:
        """Follow a model whose layers lie on several devices."""
        for item in (*self.items, *(each for mine in self.prompts.values() for each in mine)):
            item.where, item.planes = item.where.to(device), item.planes.to(device)
        for group in (self.fixed, self.text):
            group[:] = [places.to(device) for places in group]
        self.ok = None if self.ok is None else self.ok.to(device)
        self.index = None if self.index is None else self.index.to(device)

    def _pad(self, gaps: list[int], device: torch.device) -> None:
        self.ok = None
        if any(gaps):
            start = torch.tensor(gaps, device=device)[:, None]
            self.ok = torch.arange(self.length, device=device) >= start


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` `[B, n]` of `x` `[B or 1, L, C]`, as `[B, n, C]`, without an expanded gather."""
    index = index.to(x.device)
    if len(index) == 1:
        return x[0].index_select(0, index[0])[None]
    batch, length, width = len(index), *x.shape[1:]
    base = torch.arange(batch, device=index.device)[:, None] * (length if len(x) > 1 else 0)
    flat = x.reshape(-1, width).index_select(0, (index + base).flatten())
    return flat.view(batch, -1, width)


# (item of the record, first and last + 1 of its tokens), in the order of the placeholders.
Piece = tuple[int, int, int]


def whole_pieces(record: Record, counts: list[int]) -> list[Piece]:
    """All features of a record, row by row; beams repeat the items of a sample.

    ModelError where they do not fit the placeholders per row; stock models check images and clips
    only.
    """
    lengths = [each.length for each in record.layouts]
    times = max(1, sum(counts) // max(1, sum(lengths)))
    found, index, wrong = [], 0, False
    for row in range(0, len(counts), times):
        start, left = index, counts[row]
        while left > 0 and index < len(lengths):
            left -= lengths[index]
            index += 1
        found += [(i, 0, lengths[i]) for i in range(start, index)] * times
        wrong = wrong or left != 0
    if wrong or index < len(lengths):
        raise ModelError(
            f"{sum(lengths)} features of kind {record.kind!r} do not fit {sum(counts)} "
            "placeholders; give the ids and media of one call of the processor"
        )
    return found


def chunk_pieces(record: Record, counts: list[int], features: Tensor) -> list[Piece] | None:
    """The part of a record that a chunk of a chunked prefill brings; None if it is not there.

    Stock code cuts the features `[sum(counts), D]` without saying where, and batch rows may hold
    any number of items, so the place is found by comparing.
    """
    whole = record.flat()
    if whole is None or whole.shape[1:] != features.shape[1:]:
        return None
    bounds = [0, *accumulate(each.length for each in record.layouts)]
    ends, found = dict(record.ends), []
    for row, mine in enumerate(features.split(counts)):
        if not len(mine):
            continue
        starts = [ends.get(row, 0), *bounds[:-1]]  # on from the last chunk, or a new prompt
        fits = (s for s in starts if torch.equal(whole[s : s + len(mine)], mine))
        start = next(fits, None)
        if start is None:
            return None
        if start != ends.get(row):
            record.plans.clear()
        ends[row] = start + len(mine)
        found += _piece_items(bounds, start, ends[row])
    record.ends = ends
    return found


def _piece_items(bounds: list[int], start: int, stop: int) -> list[Piece]:
    return [
        (i, max(start, low) - low, min(stop, high) - low)
        for i, (low, high) in enumerate(pairwise(bounds))
        if max(start, low) < min(stop, high)
    ]


def locate(
    base: Any,
    adapter: Adapter,
    kwargs: Mapping[str, Any],
    last: Mapping[str, Record],
    ok: Tensor | None,
    strict: bool = True,
) -> Sequences:
    """Items, text and separators of the new tokens of one call.

    `last` are records of what was encoded inside this call, or before its earlier chunks, by kind.
    A placeholder id counts only where features of its kind came with the call, so one that was
    generated by chance is text. If `strict`, an unknown layout is a ModelError; else such features
    (shortened by the caller, for example) are taken for runs of tokens without separators.
    """
    given = features_given(kwargs)
    if not given:
        return of_text(kwargs, ok)
    ids = _token_ids(base, kwargs).cpu()
    token = {kind: ids == placeholder(base.config, kind) for kind in given}
    visual = torch.zeros_like(ids, dtype=torch.bool)
    for mask in token.values():
        visual |= mask
    rank = visual.flatten().cumsum(0).view_as(ids) - 1  # place among all visual tokens
    items: list[MediaItem] = []
    separators = torch.zeros_like(visual)
    for kind, output in given.items():
        try:
            before = last.get(kind)
            record, pieces = _known(base, adapter, kind, output, kwargs, token[kind], before)
        except ModelError:
            if strict:
                raise
            items += _runs(token[kind], rank)
            continue
        for item, marks in _items(record, pieces, token[kind], rank):
            items.append(item)
            separators[item.row, marks] = True
    items.sort(key=lambda item: (item.row, int(item.where[0]) if item.n else 0))
    return _sequences(items, visual, separators, ok, kwargs)


def of_text(kwargs: Mapping[str, Any], ok: Tensor | None) -> Sequences:
    """The new tokens of a call without media, all of them text."""
    ids = kwargs.get("input_ids")
    shape = (kwargs["inputs_embeds"] if ids is None else ids).shape[:2]
    nothing = torch.zeros(shape, dtype=torch.bool)
    return _sequences([], nothing, nothing, ok, kwargs)


def _sequences(
    items: list[MediaItem],
    visual: Tensor,
    separators: Tensor,
    ok: Tensor | None,
    kwargs: Mapping[str, Any],
) -> Sequences:
    valid = torch.ones_like(visual) if ok is None else ok.cpu()
    source = kwargs.get("input_ids")
    device = (kwargs["inputs_embeds"] if source is None else source).device
    for number, item in enumerate(items):
        item.number = number
        item.where, item.planes = item.where.to(device), item.planes.to(device)
    text, fixed = valid & ~visual, valid & (~visual | separators)
    return Sequences(
        visual.shape[1],
        [row.nonzero()[:, 0].to(device) for row in fixed],
        [row.nonzero()[:, 0].to(device) for row in text],
        items,
        ok,
    )


def _token_ids(base: Any, kwargs: Mapping[str, Any]) -> Tensor:
    ids: Tensor | None = kwargs.get("input_ids")
    if ids is not None:
        return ids
    return placeholders_in(base, kwargs["inputs_embeds"])  # the stock models compare them, too


def _items(
    record: Record, pieces: list[Piece], mask: Tensor, rank: Tensor
) -> Iterator[tuple[MediaItem, Tensor]]:
    """Every item, or part of one, with the places of its separators."""
    places = mask.nonzero()  # [n, 2] in reading order
    at = 0
    for index, start, stop in pieces:
        layout = record.layouts[index]
        here = places[at : at + stop - start]
        at += stop - start
        content = layout.content()
        inside = (content >= start) & (content < stop)
        local = content[inside] - start
        whole = stop - start == layout.length
        first = int((content < start).sum())
        part = None if whole else (first, first + int(inside.sum()), len(content))
        row = int(here[0, 0])
        where = here[local, 1]
        item = MediaItem(
            row,
            0,
            where,
            rank[row, where],
            layout.grid if whole else None,
            record.signals[index],
            record=record,
            index=index,
            part=part,
        )
        rest = torch.ones(len(here), dtype=torch.bool)
        rest[local] = False
        yield item, here[rest, 1]


def _runs(mask: Tensor, rank: Tensor) -> Iterator[MediaItem]:
    """An item for every run of neighbouring placeholders `mask` `[B, L]`."""
    for row, mine in enumerate(mask):
        places = mine.nonzero()[:, 0]
        cuts = [0, *((places.diff() > 1).nonzero()[:, 0] + 1).tolist(), len(places)]
        for number, (start, stop) in enumerate(pairwise(cuts)):
            where = places[start:stop]
            yield MediaItem(row, 0, where, rank[row, where], None, index=number)


def _known(
    base: Any,
    adapter: Adapter,
    kind: str,
    output: Any,
    kwargs: Mapping[str, Any],
    mask: Tensor,
    last: Record | None,
) -> tuple[Record, list[Piece]]:
    counts = mask.sum(1).tolist()
    record = last if output is None else record_of(output)  # None: encoded inside this very call
    if record is None and last is not None:
        chunk = chunk_pieces(last, counts, flat(output.pooler_output))
        if chunk is not None:
            return last, chunk
    if record is None:
        layouts = _recover(base, adapter, kind, output, kwargs, mask)
        record = Record(kind, layouts, [{} for _ in layouts])
    record.planes = []
    return record, whole_pieces(record, counts)


def _recover(
    base: Any, adapter: Adapter, kind: str, output: Any, kwargs: Mapping[str, Any], mask: Tensor
) -> list[Layout]:
    features = list(output.pooler_output)
    positions = kwargs.get("position_ids")
    columns = None
    if positions is not None and positions.ndim == 3:
        columns = positions[-3:].cpu()[:, mask].split([len(f) for f in features], dim=1)
    layouts = []
    for i, rows in enumerate(features):
        layout = adapter.recover(base, kind, rows, None if columns is None else columns[i])
        layout = layout or Layout(len(rows), None)
        parts = layout if isinstance(layout, list) else [layout]
        if sum(part.length for part in parts) != len(rows):
            raise ModelError(
                f"{len(rows)} features of kind {kind!r} fit no {kind} of {adapter.family!r}; "
                "encode inside attach(), or switch prefill_chunk_size off"
            )
        layouts += parts
    return layouts
