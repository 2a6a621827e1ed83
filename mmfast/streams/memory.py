"""The memory of a stream: live tokens in buffers, and the archive of blocks that left them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.kv import KVBlock
from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens
from mmfast.models.kv.queries import StreamQueries
from mmfast.ops.eviction import call, evict
from mmfast.ops.ranking import snap, stable_topk
from mmfast.ops.stream_cache import RowBuffer, Span
from mmfast.streams.archive.archive import Archive
from mmfast.streams.buffers import (
    RAW,
    ROTATED,
    VALUES,
    Cursor,
    LayerBuffer,
    LiveBlock,
    PackedBuffer,
    RecalledRows,
    Start,
    Turner,
    copy_of,
    highest,
    walk,
)
from mmfast.streams.rows import PLACE, LiveRows

# Tokens of a question and an answer that stand behind the window before a branch copies it.
ROOM = 256
_EXACT = "sink"  # may split a block; all other policies keep or drop whole ones


def held_by_score(plan: CachePlan | None) -> bool:
    """Tell whether a score policy bounds a stream: it counts tokens, and there is no window."""
    if plan is None or plan.score is None or not isinstance(plan.score.budget, int):
        return False
    return all(spec.method.name == _EXACT for spec in plan.position)


AUTO = "auto"
_LEAST, _ENOUGH, _MOST = 512, 4_096, 16_384  # tokens of a window
_PACKED = {"": 1.0, "+quant:8": 2.6, "+quant:4": 4.5}  # times less, against three planes of 16 bits


def auto_memory(free: int | None, token_bytes: int, positions: int) -> str:
    """Return the spec of a memory for so many free bytes, None where that is unknown.

    The window takes an eighth of them, up to half of the `positions` of the model; it is packed
    where 4,096 tokens would not fit. What leaves it can be retrieved.
    """
    room = (8 << 30 if free is None else free) / 8
    fits = {store: int(room * share / token_bytes) for store, share in _PACKED.items()}
    enough = min(_ENOUGH, positions // 2)
    store = next((store for store, tokens in fits.items() if tokens >= enough), "+quant:4")
    window = max(_LEAST, min(fits[store], _MOST, positions // 2)) // 64 * 64
    return f"sink:64+window:{window}+retrieve:{max(4, min(64, window // 64))}{store}"


def check_plan(plan: CachePlan | None) -> None:
    """Refuse (SpecError) what cannot bound a stream, or could not act in one."""
    if plan is None:
        return
    if plan.select is not None:
        raise SpecError(
            f"{plan.select.method.name!r} chooses anew at every decode step what is read, which a "
            "stream does not; choose by the question, for example 'window:4096+rekv:64'"
        )
    if plan.heads is not None:
        raise SpecError(
            f"{plan.heads.method.name!r} leaves unlike numbers of entries in the heads of a layer, "
            "which a stream does not; use it with generate(), or here 'window:4096+keynorm:1024'"
        )
    if plan.pruner() is not None:
        raise SpecError(
            f"'{plan.store}' reads the queries at the end of a prompt, which a stream has not; use "
            "it with generate(), or here 'window:4096+quant:4'"
        )
    if held_by_score(plan) and (plan.store is not None or plan.bits):
        raise SpecError(
            f"'{plan}' chooses single tokens, which packs of whole frames cannot let go; leave the "
            "bits out, or hold a window, for example 'window:4096+quant:4'"
        )
    if not plan.position and not held_by_score(plan):
        raise SpecError(
            f"'{plan}' bounds nothing: every frame stays in the cache of the stream; add a "
            f"window, for example 'window:4096+{plan}'"
        )
    for spec in plan.position:
        if not isinstance(spec.budget, int):
            raise SpecError(
                f"'{plan}' keeps a share by {spec.method.name!r}, of a stream that has no end; "
                f"write a number of tokens, for example '{spec.method.name}:4096'"
            )
    if not held_by_score(plan) and all(spec.method.name == _EXACT for spec in plan.position):
        raise SpecError(
            f"'{plan}' keeps sinks and nothing of what is new; add a window, for example "
            f"'{plan}+window:4096'"
        )


def budget(plan: CachePlan | None) -> int:
    """Tokens that the policies let live; 0 where there is no bound."""
    specs = list(plan.position) if plan is not None else []
    if plan is not None and plan.score is not None and held_by_score(plan):
        specs.append(plan.score)
    return sum(int(spec.budget or 0) for spec in specs)


def staying(
    plan: CachePlan, blocks: Sequence[LiveBlock], known: dict[tuple[bytes, ...], list[int]]
) -> list[int]:
    """Number of first tokens that each block keeps: all, none, or the sinks at its start."""
    sizes = [block.size for block in blocks]
    if sum(sizes) <= min(int(spec.budget or 0) for spec in plan.position):
        return sizes
    pattern = tuple(block.pattern for block in blocks)
    if pattern in known:
        return known[pattern]
    kinds = torch.cat([block.counted() for block in blocks])
    stands = plan.standing(kinds).split(sizes)
    sinks = tuple(spec for spec in plan.position if spec.method.name == _EXACT)
    exact = CachePlan(sinks).standing(kinds).split(sizes)
    whole = torch.stack([part.all() for part in stands]).tolist()
    firsts = torch.stack([part.sum() for part in exact]).tolist()
    stays = [n if all_ else int(s) for n, all_, s in zip(sizes, whole, firsts, strict=True)]
    if stays[-1] < sizes[-1]:
        raise MmfastError(
            f"a piece of {sizes[-1]} tokens does not fit into '{plan}'; give the window more "
            "tokens, or reduce frames and cut texts"
        )
    known.clear()
    known[pattern] = stays
    return stays


def cut(block: LiveBlock, size: int) -> LiveBlock:
    """The block with only its first `size` tokens held."""
    if size >= block.size:
        return block
    held = tuple(each[:size] for each in block.held) or (torch.arange(size),)
    return replace(block, held=held, whole=False)


def spans(blocks: Sequence[LiveBlock], stays: Sequence[int], layer: int) -> list[Span]:
    """Ranges of a layer's buffer that stay."""
    found, at = [], 0
    for block, size in zip(blocks, stays, strict=True):
        held = block.size_at(layer)
        found.append((at, at + (held if size >= block.size else min(size, held))))
        at += held
    return found


def leaving(
    blocks: Sequence[LiveBlock], stays: Sequence[int], buffers: Sequence[LayerBuffer]
) -> list[KVBlock]:
    """Blocks that leave, with their keys before RoPE, in the order of time."""
    found = []
    ends = [0] * len(buffers)
    for block, size in zip(blocks, stays, strict=True):
        sizes = [block.size_at(layer) for layer in range(len(buffers))]
        if size < block.size:
            rows = [
                (end + min(size, held), end + held) for end, held in zip(ends, sizes, strict=True)
            ]
            found.append(_block(block, size, rows, buffers))
        ends = [end + held for end, held in zip(ends, sizes, strict=True)]
    return found


def _block(
    block: LiveBlock, first: int, rows: Sequence[Span], buffers: Sequence[LayerBuffer]
) -> KVBlock:
    kept: list[Tensor | None] = []
    for layer in range(len(buffers)):
        held = block.tokens(layer)
        if held is None and first:
            held = torch.arange(block.n)
        kept.append(None if held is None else held[first:])
    return KVBlock(
        tuple(b.read(RAW, *span).clone() for b, span in zip(buffers, rows, strict=True)),
        tuple(b.read(VALUES, *span).clone() for b, span in zip(buffers, rows, strict=True)),
        block.relative,
        torch.tensor(block.advance),
        tuple(kept) if any(each is not None for each in kept) else (),
        block.number,
        block.kind,
        block.time,
    )


def _over(lengths: Sequence[int], most: int) -> list[int]:
    """Return the layers that hold more than they may."""
    return [layer for layer, n in enumerate(lengths) if n > most]


def _merged(combine: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    merged = combine(rearrange(rows, "h m d -> m (h d)"))
    return rearrange(merged, "m (h d) -> h m d", h=len(rows))


class Memory:
    """Live tokens of one stream within the budget of its plan; made by `Engine.memory`.

    Positions are those of a prompt made of the live blocks. When blocks leave, those behind them
    stay where they are until the hole is larger than `slack` of that prompt; then all that is
    behind it is rotated anew from the keys before RoPE, so that no error can add up.

    `plan` None keeps everything; `archive` takes blocks that leave, None drops them. `cursor` is
    the end of the stream; `lock` is held while the memory changes.
    """

    def __init__(
        self,
        turner: Turner,
        plan: CachePlan | None,
        archive: Archive | None,
        slack: float,
        queries: StreamQueries | None = None,
    ) -> None:
        check_plan(plan)
        self.plan = plan
        self.archive = archive
        self.slack = slack
        self.turner = turner
        self.lock = threading.RLock()
        # Where single tokens leave, tables stand in for the blocks; see `LiveRows`.
        self.rows = LiveRows(turner.layers, turner.axes) if held_by_score(plan) else None
        self._blocks: list[LiveBlock] = []
        self.cursor = Cursor.behind([], turner.axes)
        self.buffers = [_buffer(plan, turner, layer) for layer in range(turner.layers)]
        self.number = 0  # of the next block
        self.stored = -1  # newest number in the archive
        self.queries = queries  # of a policy that expects those to come
        self.masses: list[dict[str, Tensor]] = [{} for _ in self.buffers]  # attention, by signal
        self._known: dict[tuple[bytes, ...], list[int]] = {}
        self.counts = {"evicted_blocks": 0, "evicted_tokens": 0, "rebases": 0}

    @property
    def blocks(self) -> list[LiveBlock]:
        """Live blocks, in the order of time."""
        return self._blocks if self.rows is None else self.rows.blocks()

    @blocks.setter
    def blocks(self, blocks: list[LiveBlock]) -> None:
        if self.rows is None:
            self._blocks = blocks
        else:
            self.rows = LiveRows.of(blocks, self.turner.layers, self.turner.axes)

    @property
    def next_start(self) -> Start:
        """Start of the next piece on each axis, unless it is fresh."""
        return self.cursor.next

    def admit(self, block: LiveBlock) -> None:
        """Count in a block whose tokens stand behind the last ones, and let others leave.

        MmfastError, and nothing has changed, if it does not fit or the archive refuses what leaves.
        """
        if self.plan is None:
            return self._add(block)
        if self.rows is not None:
            return self._hold(block, self.rows)
        blocks = [*self.blocks, block]
        stays = staying(self.plan, blocks, self._known)
        gone = [(old, size) for old, size in zip(blocks, stays, strict=True) if size < old.size]
        if gone and self.archive is not None:
            self._put(leaving(blocks, stays, self.buffers))
        self.number = max(self.number, block.number + 1)
        uneven, left = not all(old.even for old in blocks), list[Span]()
        for layer, buffer in enumerate(self.buffers):
            buffer.length += block.size_at(layer)
            if gone:
                left = spans(blocks, stays, layer) if uneven or not layer else left
                buffer.keep(left)
        self.blocks = [cut(old, size) for old, size in zip(blocks, stays, strict=True) if size > 0]
        self.cursor.place(block)
        if gone:
            self.counts["evicted_blocks"] += sum(size == 0 for _, size in gone)
            self.counts["evicted_tokens"] += sum(old.size - size for old, size in gone)
            self._close_up()
            self.cursor = Cursor.behind(self.blocks, self.turner.axes)
        if self.plan.store is not None:
            self._pack()

    def _pack(self) -> None:
        for layer, buffer in enumerate(self.buffers):
            if isinstance(buffer, PackedBuffer):
                buffer.pack(layer, self.blocks)

    def _add(self, block: LiveBlock) -> None:
        self.number = max(self.number, block.number + 1)
        for layer, buffer in enumerate(self.buffers):
            buffer.length += block.size_at(layer)
        self.blocks.append(block)
        self.cursor.place(block)

    def _hold(self, block: LiveBlock, rows: LiveRows) -> None:
        """Count in a block, and let the score policy choose anew among all tokens but sinks."""
        assert self.plan is not None and self.plan.score is not None
        most = budget(self.plan)
        first = most - int(self.plan.score.budget or 0)  # tokens of sinks
        old = [buffer.length for buffer in self.buffers]
        new = [length + block.size_at(layer) for layer, length in enumerate(old)]
        chosen = {i: self._choose(i, rows.joined(i, block), first) for i in _over(new, most)}
        if self.archive is not None:
            self._put([_block(block, 0, list(zip(old, new, strict=True)), self.buffers)])
        self.number = max(self.number, block.number + 1)
        rows.add(block)
        self.cursor.place(block)
        kept: dict[int, Tensor] = {}
        for layer, n in enumerate(new):
            if layer in chosen:
                keep = first + chosen[layer].keep.cpu()
                kept[layer] = torch.cat([torch.arange(first), keep])
                self._thin(layer, rows, first, chosen[layer], n)
            else:
                self.buffers[layer].length = n
        if chosen:
            blocks, tokens = rows.keep(kept)
            self.counts["evicted_blocks"] += blocks
            self.counts["evicted_tokens"] += tokens
            self.counts["rebases"] += rows.close_up(self.turner, self.buffers, self.slack)
            self.cursor = rows.cursor()

    def _choose(self, layer: int, rows: Tensor, first: int) -> Reduction:
        """Choice among the `rows` `[4 + A, N]` behind `first` of a layer.

        Its heads hold the same tokens, side by side.
        """
        assert self.plan is not None and self.plan.score is not None
        if self.queries is not None:
            return self._expect(layer, self.queries, rows.shape[1], first)
        planes = (self.buffers[layer].read(plane, first, rows.shape[1]) for plane in (RAW, VALUES))
        keys, values = (rearrange(each, "h m d -> m (h d)") for each in planes)
        number, _, kinds, spots = rows[:PLACE, first:].to(keys.device)
        signals = {
            "values": values,
            "kind": kinds,
            # The separators of a frame are of it here: text is never let go, and they come
            # without end.
            "frame": torch.where(spots < 0, spots, number),
            "spot": spots,
            "layer": torch.tensor(layer),
            "layers": torch.tensor(len(self.buffers)),
            **{name: mass[first:] for name, mass in self.masses[layer].items()},
        }
        return evict(self.plan.score, Tokens(keys, signals=signals))

    def _expect(self, layer: int, queries: StreamQueries, n: int, first: int) -> Reduction:
        """Choice by what is expected to be looked at, of which the heads of a layer have a sum.

        Keys are those at the places where the tokens stand now, which queries to come will see.
        """
        assert self.plan is not None and self.plan.score is not None
        spec, buffer = self.plan.score, self.buffers[layer]
        keys, values = (buffer.read(plane, first, n) for plane in (ROTATED, VALUES))
        signals = {"values": values, **queries.expected(layer, len(keys))}
        scores: Tensor = call(spec, Tokens(keys, signals=signals), int(spec.budget or 0))
        return Reduction.prune(
            stable_topk(snap(scores.logsumexp(0)), int(spec.budget or 0)), n - first
        )

    def _thin(self, layer: int, rows: LiveRows, first: int, chosen: Reduction, n: int) -> None:
        buffer = self.buffers[layer]
        assert isinstance(buffer, RowBuffer)
        keep = chosen.keep
        if not chosen.pure:  # merged keys are those of the tokens that they are merged into
            places = rows.positions(layer)[:, first:]
            pairs = ((chosen.apply_keys, RAW), (chosen.apply, VALUES))
            raw, values = (_merged(each, buffer.read(p, first, n)) for each, p in pairs)
            turned = self.turner.rotate(layer, raw, places.index_select(1, keep.cpu()))
        index = torch.cat([torch.arange(first, device=keep.device), keep + first])
        buffer.pick(index)
        if not chosen.pure:
            buffer.write(raw, turned, values, at=first)
        masses = self.masses[layer]
        self.masses[layer] = {name: mass.index_select(0, index) for name, mass in masses.items()}

    def heed(self, layer: int, masses: dict[str, Tensor]) -> None:
        """Take the attention `[N]` that the newest tokens pay, their own included.

        `attn_sum` adds up over all that came; the others are of the latest alone.
        """
        before = self.masses[layer].get("attn_sum")
        if before is not None and "attn_sum" in masses:
            before = before[: self.buffers[layer].length]  # a block may not have been admitted
            masses["attn_sum"][: len(before)] += before
        self.masses[layer] = masses

    def _put(self, blocks: Sequence[KVBlock]) -> None:
        assert self.archive is not None
        done = []
        try:
            for block in blocks:
                # Text may outlive frames that came after it; the archive counts upwards.
                self.stored = max(self.stored + 1, block.number)
                self.archive.put(replace(block, number=self.stored))
                done.append(self.stored)
        except BaseException:
            for number in done:
                self.archive.forget(number)
            raise

    def _close_up(self) -> None:
        """Rotate anew what stands too far behind the blocks before it."""
        blocks = self.blocks
        tight = walk(blocks, self.turner.axes)
        if not tight:
            return
        last = self.blocks[-1]
        gap = max(abs(a - b) for a, b in zip(last.start, tight[-1], strict=True))
        if gap > self.slack * (last.top(tight[-1]) + 1):
            self.blocks = self.turner.move(self.buffers, blocks, tight)
            self.counts["rebases"] += 1

    def tokens(self) -> int:
        """Live tokens, in the layer that holds most."""
        return max(buffer.length for buffer in self.buffers)

    def stats(self) -> dict[str, Any]:
        """Figures: live tokens, blocks, bytes, evictions, re-bases, positions, the archive's."""
        with self.lock:
            figures: dict[str, Any] = {
                "spec": None if self.plan is None else str(self.plan),
                "live_tokens": self.tokens(),
                "live_blocks": len(self._blocks if self.rows is None else self.rows),
                "blocks": self.number,
                "bytes": sum(buffer.nbytes for buffer in self.buffers),
                "position": max(self.next_start),
                **self.counts,
            }
            if self.archive is not None:
                figures["archive"] = self.archive.stats()
            return figures

    def snapshot(self) -> dict[str, Any]:
        """Return all state as a tree for `snapshots.save`; keys and values are copies."""
        with self.lock, torch.no_grad():
            return {
                "plan": str(self.plan) if self.plan is not None else None,
                "blocks": list(self.blocks),
                "layers": [copy_of(buffer) for buffer in self.buffers],
                "masses": [dict(masses) for masses in self.masses],
                "queries": None if self.queries is None else self.queries.snapshot(),
                "number": self.number,
                "stored": self.stored,
                "counts": dict(self.counts),
                "archive": None if self.archive is None else self.archive.snapshot(),
            }

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot of a stream of the same model and plan; it goes on bit for bit."""
        plan = str(self.plan) if self.plan is not None else None
        if tree["plan"] != plan or (tree["archive"] is None) != (self.archive is None):
            raise MmfastError(
                f"a stream saved with memory {tree['plan']!r} cannot go on with {plan!r}; "
                "open it with the memory it was saved with"
            )
        if len(tree["layers"]) != len(self.buffers):
            raise MmfastError(
                f"a stream saved from a model of {len(tree['layers'])} layers cannot go on with "
                f"one of {len(self.buffers)}; load the model it was saved with"
            )
        with self.lock, torch.no_grad():
            self.blocks = list(tree["blocks"])
            for layer, saved in enumerate(tree["layers"]):
                if saved is not None:
                    self._fill(layer, saved)
            self.cursor = Cursor.behind(self.blocks, self.turner.axes)
            for layer, masses in enumerate(tree.get("masses", ())):
                device = self.turner.device(layer)
                self.masses[layer] = {name: mass.to(device) for name, mass in masses.items()}
            if self.queries is not None and tree.get("queries") is not None:
                self.queries.restore(tree["queries"])
            self.number, self.stored = tree["number"], tree["stored"]
            self.counts = dict(tree["counts"])
            if self.archive is not None:
                self.archive.restore(tree["archive"])

    def _fill(self, layer: int, saved: Any) -> None:
        device, buffer = self.turner.device(layer), self.buffers[layer]
        blocks: Sequence[LiveBlock] = self.blocks
        if isinstance(buffer, PackedBuffer):
            blocks = buffer.restore(layer, saved, blocks, device)
            saved, buffer = saved["latest"], buffer.latest
        if saved is None:
            return
        raw, values = (each.to(device) for each in saved)
        buffer.length = 0
        if blocks:
            where = torch.cat([block.positions(layer) for block in blocks], 1)
            buffer.write(raw, self.turner.rotate(layer, raw, where), values)
        buffer.length = raw.shape[1]


def _buffer(plan: CachePlan | None, turner: Turner, layer: int) -> LayerBuffer:
    quantiser = None if plan is None else plan.quantiser()
    room = budget(plan) if quantiser is None else quantiser.residual
    rows = RowBuffer(room and room + ROOM, bounded=room > 0)
    return (
        rows if quantiser is None else PackedBuffer(quantiser, partial(turner.rotate, layer), rows)
    )


def recall(
    turner: Turner, layer: int, buffer: LayerBuffer, rows: RecalledRows, parts: Sequence[KVBlock]
) -> int:
    """Put stored tokens into the buffer of one layer, and what is older to its new place.

    Places are those of a prompt of sinks, stored blocks, window and question. All layers share
    the places of the question, and layers may read different amounts, so the prompt is laid out
    from its end: sinks move away from the window, and the window stays where it is. Attention
    only sees distances. Tokens recalled before make room; returns by how many rows those behind
    them move in the buffer.
    """
    live, at = rows.live, _opening(rows.live)
    starts = [block.start for block in live]
    if parts:
        stored, question = _as_blocks(parts), rows.question
        places = walk([*_sinks(live[:at], parts), *stored, *live[at:], question], turner.axes)
        shift = tuple(a - b for a, b in zip(question.start, places[-1], strict=True))
        places = [tuple(a + b for a, b in zip(start, shift, strict=True)) for start in places]
        starts = [*places[:at], *places[at + len(parts) : -1]]
    turner.move_layer(layer, buffer, rows.moved, starts)
    pairs = zip(live, starts, strict=True)  # of hundreds of blocks few move
    rows.moved = [b if b.start == start else replace(b, start=start) for b, start in pairs]
    if not parts:
        return rows.swap(buffer, ())
    between = zip(stored, places[at : at + len(parts)], strict=True)
    where = torch.cat([block.positions(layer, start) for block, start in between], 1)
    assert buffer.data is not None
    both, like = zip(*((part.keys[0], part.values[0]) for part in parts), strict=True), buffer.data
    keys, values = (torch.cat([x.to(like.device, like.dtype) for x in each], 1) for each in both)
    return rows.swap(buffer, (keys, turner.rotate(layer, keys, where), values))


def _opening(blocks: Sequence[LiveBlock]) -> int:
    for i, block in enumerate(blocks):
        if block.number != i:
            return i
        if not block.whole:
            return i + 1
    return len(blocks)


def _sinks(blocks: Sequence[LiveBlock], parts: Sequence[KVBlock]) -> list[LiveBlock]:
    """Sinks for the walk: the rest of one that was cut stands where it stood, not behind it."""
    sinks = list(blocks)
    if sinks and not sinks[-1].whole and sinks[-1].number == parts[0].number:
        sinks[-1] = replace(sinks[-1], advance=(0,) * len(sinks[-1].advance))
    return sinks


def _as_blocks(parts: Sequence[KVBlock]) -> list[LiveBlock]:
    sizes = [part.relative.shape[1] for part in parts]
    relatives = torch.cat([part.relative for part in parts], 1).cpu().split(sizes, 1)
    advances = torch.stack([part.advance for part in parts]).tolist()  # one wait for the device
    rows = zip(parts, relatives, advances, strict=True)
    return [_as_block(part.number, relative, tuple(advance)) for part, relative, advance in rows]


def _as_block(number: int, relative: Tensor, advance: Start) -> LiveBlock:
    axes, n = relative.shape
    # Text counts on all axes alike, so it starts on all of them at the same position.
    level = axes > 1 and len(set(advance)) == 1 and bool((relative == relative[:1]).all())
    top, kinds = highest(relative, advance), torch.zeros(n, dtype=torch.int64)
    return LiveBlock(number, "text", None, relative, advance, False, level, top, kinds, (0,) * axes)
