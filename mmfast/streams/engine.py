"""Forward passes of stream pieces through the text model of a stock checkpoint.

The engine belongs to a model and holds no state of a stream. Memories and branches hold their own
tokens, so any number of them may use one engine, from any thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.kv import KVBlock
from mmfast.core.reduction import Reduction
from mmfast.core.registry import Method, methods
from mmfast.core.spec import Spec
from mmfast.core.tokens import Tokens
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.rotary import Raw, RawCapture, Rotary, check_rotation
from mmfast.models.kv.queries import Expectation, StreamQueries
from mmfast.models.reduction.cache_layers import Pair, cache_over
from mmfast.models.reduction.masks import stock_mask
from mmfast.models.reduction.probe import intercepting
from mmfast.models.wrappers import FULL, kind_of
from mmfast.ops.eviction import evict
from mmfast.streams.archive.archive import Archive, Found
from mmfast.streams.archive.tiers import TierQuotas
from mmfast.streams.buffers import (
    RAW,
    ROTATED,
    VALUES,
    VISUAL,
    Cursor,
    LayerBuffer,
    LiveBlock,
    RecalledRows,
    Start,
    Turner,
    highest,
    live,
)
from mmfast.streams.memory import ROOM, Memory, held_by_score, recall
from mmfast.streams.script import Piece


class Branch:
    """Live tokens of a stream at one moment, with a question and an answer behind them.

    Their tensors are those of the stream until one of both goes on; see `RowBuffer`. `found` has
    per layer the archive's numbers of the stored blocks that are read now, `frames` the times of
    the frames that were read since the question, and `readers` the layers that read them, by
    number. While an answer is written every layer chooses again after `every` tokens, 0 never:
    `choices` counts the layers that did, `changes` those whose choice was another one.
    """

    def __init__(self, engine: Engine, memory: Memory) -> None:
        self._engine = engine
        self._memory = memory
        self._shared = len(memory.blocks)
        self._newest = memory.stored  # what is archived later is live here
        self._kept = 0
        self._spots: list[list[int]] = []  # where each block of its own is, per layer
        self._token: LiveBlock | None = None  # the answer so far, where one is being written
        self._broken = False
        self._recalled: dict[int, RecalledRows] = {}
        self._said = 0  # tokens of the answer
        # the cursor in front of a pass over drafts, and its tokens, until `stand`
        self._ahead: tuple[Cursor, Tensor] | None = None
        self.every = 0 if memory.plan is None else memory.plan.rechoice
        self.choices = self.changes = 0
        self.blocks = list(memory.blocks)
        self._cursor = replace(memory.cursor)
        self.buffers = [buffer.fork(ROOM) for buffer in memory.buffers]
        self.found: dict[int, list[int]] = {}
        self.frames: dict[int, float | None] = {}
        self.readers: dict[int, set[int]] = {}

    def extend(self, piece: Piece, *, retrieve: bool = True) -> Tensor:
        """Prefill a piece behind the branch.

        Stored blocks are read for it where `retrieve` is set, and only the first time that there
        are any. MmfastError: the piece is malformed, or the branch failed before.
        """
        self._token, self._said = None, 0
        with torch.no_grad():
            return self._run(piece, retrieve and not self.found and self._stored())

    def token(self, token: int) -> Tensor:
        """Write one token of the answer, for which stored blocks may be chosen anew."""
        ids = torch.tensor([token])
        axes, said = self._engine.turner.axes, self._said + 1
        with torch.no_grad():
            piece = self._text(ids, axes)
            logits = self._run(piece, bool(self.every and self.found) and said % self.every == 0)
            self._join()
        self._said = said
        return logits

    @property
    def room(self) -> int:
        """Tokens that one pass may read before stored blocks are chosen anew."""
        return self.every - self._said % self.every - 1 if self.every and self.found else ROOM

    def tokens(self, tokens: Sequence[int]) -> Tensor:
        """Read the newest token of the answer and drafts behind it, `room` at most.

        Returns their logits `[n, V]`; `stand` must follow.
        """
        ids, axes = torch.tensor(tokens), self._engine.turner.axes
        self._ahead = (replace(self._cursor), ids)
        with torch.no_grad():
            hidden = self._run_all(self._text(ids, axes), False)
            return self._engine.logits(hidden)

    def stand(self, count: int) -> None:
        """Keep the first tokens of the pass of `tokens`; the others were not said."""
        assert self._ahead is not None
        (cursor, ids), self._ahead = self._ahead, None
        fresh, start = self.blocks[-1].fresh, self.blocks[-1].start
        alone = all(buffer.alone for buffer in self.buffers)
        with nullcontext() if alone else self._memory.lock:
            for buffer in self.buffers:
                buffer.length -= len(ids) - count
        piece = replace(self._text(ids[:count], len(start)), fresh=fresh)
        self.blocks[-1], self._cursor = live(piece, -1, start), cursor
        self._cursor.place(self.blocks[-1])
        self._join()
        self._said += count

    def _text(self, ids: Tensor, axes: int) -> Piece:
        """Tokens `[n]` of the answer as a piece, one position each."""
        n = len(ids)
        return Piece(
            self._engine.embed(ids),
            torch.arange(n).expand(axes, n).clone(),
            torch.full((axes,), n, dtype=torch.int64),
            "text",
            fresh=not self._own or self._own[-1].kind == "frame",
            ids=ids,
        )

    def keep(self) -> None:
        """Append what was said on this branch to the stream, at its present end.

        It was computed with everything that the branch could see. A second call appends what came
        since the first. MmfastError: a block does not fit into the memory (those before it are
        kept), or attention decides what stays there, which a branch does not note.
        """
        memory = self._memory
        if attended(memory.plan):
            raise MmfastError(
                f"'{memory.plan}' reads the attention of new tokens, which a branch does not keep; "
                "append question and answer to the stream as pieces"
            )
        with memory.lock, torch.no_grad():
            own = list(zip(self._own, self._spots, strict=True))
            for block, spots in own[self._kept :]:
                placed = replace(block, number=memory.number, start=memory.cursor.start(block))
                for layer, (buffer, at) in enumerate(zip(self.buffers, spots, strict=True)):
                    raw, values = (buffer.read(p, at, at + block.n).clone() for p in (RAW, VALUES))
                    turned = memory.turner.rotate(layer, raw, placed.positions(layer))
                    memory.buffers[layer].write(raw, turned, values)
                memory.admit(placed)
                self._kept += 1
            self._token = None

    @property
    def _own(self) -> list[LiveBlock]:
        return self.blocks[self._shared :]

    def _run(self, piece: Piece, reading: bool) -> Tensor:
        return self._engine.logits(self._run_all(piece, reading)[-1])

    def _run_all(self, piece: Piece, reading: bool) -> Tensor:
        """Write a piece; returns the last hidden states `[n, D]`."""
        if self._broken:
            raise MmfastError("this branch failed in the middle of a step; open another one")
        block = live(piece, -1, self._cursor.start(piece))
        # While the stream has the same tensors they take turns, step by step.
        alone = all(buffer.alone for buffer in self.buffers)
        with nullcontext() if alone else self._memory.lock:
            return self._write(piece, block, reading)

    def _write(self, piece: Piece, block: LiveBlock, reading: bool) -> Tensor:
        before = partial(self._before, block) if reading else None
        hidden = self._engine._forward(piece, block.start, self.buffers, before)
        self._broken = False
        self._spots.append([buffer.length for buffer in self.buffers])
        for buffer in self.buffers:
            buffer.length += block.n
        self.blocks.append(block)
        self._cursor.place(block)
        return hidden

    def _stored(self) -> bool:
        archive = self._memory.archive
        if archive is None:
            return False
        with self._memory.lock:
            return any(number <= self._newest for number in archive.numbers())

    def _before(self, block: LiveBlock, raw: Raw) -> Callable[[int], None]:
        before = tuple(self.blocks)

        def read(layer: int) -> None:
            archive, rows = self._memory.archive, self._recalled.get(layer)
            assert archive is not None
            rows = rows or RecalledRows(block, before, before, self.buffers[layer].length)
            with self._memory.lock:
                found = archive.choose(layer, raw.queries[layer][0], self._newest)
                if held_by_score(self._memory.plan):
                    found = _missing(found, rows.live, layer)
                if layer in self._recalled:
                    self.choices += 1
                    if rows.hold(found):
                        return
                    self.changes += 1
                parts = archive.read(layer, found)
            self._note(layer, parts)
            if parts or rows.n:
                self._broken = True  # until all layers have the step behind them
                self._recall(layer, rows, parts)
            rows.found, self._recalled[layer] = found, rows

        return read

    def _note(self, layer: int, parts: Sequence[KVBlock]) -> None:
        self.found[layer] = [part.number for part in parts]
        for part in parts:
            if part.kind == "frame":
                self.frames[part.number] = part.time
                self.readers.setdefault(part.number, set()).add(layer)

    def _recall(self, layer: int, rows: RecalledRows, parts: Sequence[KVBlock]) -> None:
        by = recall(self._engine.turner, layer, self.buffers[layer], rows, parts)
        for spots in self._spots:
            spots[layer] += by if spots[layer] >= rows.at else 0

    def _join(self) -> None:
        last = self.blocks[-1]
        if self._token is None:
            self._token = last
            return
        head = self._token
        offset = torch.tensor(last.start) - torch.tensor(head.start)
        relative = torch.cat([head.relative, last.relative + offset[:, None]], 1)
        advance = tuple(int(o) + a for o, a in zip(offset, last.advance, strict=True))
        kinds = torch.cat([head.kinds, last.kinds])
        top = highest(relative, advance)
        self._token = replace(head, relative=relative, advance=advance, highest=top, kinds=kinds)
        self.blocks[-2:] = [self._token]
        self._spots.pop()


def _missing(found: Sequence[Found], blocks: Sequence[LiveBlock], layer: int) -> list[Found]:
    """Return what is found without tokens that are live in the layer."""
    known, left = {block.number: block for block in blocks}, []
    for each in found:
        block = known.get(each.number)
        if block is not None:
            held = block.tokens(layer)
            rest = torch.ones(block.n, dtype=torch.bool)
            rest[slice(None) if held is None else held] = False
            wanted = torch.arange(block.n) if each.tokens is None else each.tokens.cpu()
            each = replace(each, tokens=wanted[rest[wanted]])
        if each.tokens is None or len(each.tokens):
            left.append(each)
    return left


@contextmanager
def fitting(
    config: Any, attentions: Sequence[nn.Module], embeds: Tensor, cache: Any
) -> Iterator[None]:
    """Give every layer that this thread runs the stock mask of its own length.

    How much a layer holds is known only when it attends: it may have read stored tokens a moment
    before. Positions are kept from flash attention, which takes gaps for packed sequences.
    """
    thread = threading.get_ident()
    masks: dict[tuple[int, torch.device], Any] = {}
    numbers = {module: layer for layer, module in enumerate(attentions)}

    def around(call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        layer, query = numbers[module], args[0]
        key = (cache.get_seq_length(layer), query.device)
        if key not in masks:
            masks[key] = stock_mask(config, embeds.to(query.device), None, cache, layer)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = None
        if len(args) > 3:
            return call(module, *args[:3], masks[key], *args[4:], **kwargs)
        return call(module, *args, **{**kwargs, "attention_mask": masks[key]})

    with intercepting(dict.fromkeys(attentions, around)):
        yield


_KNOWN = {"x", "values", "kind", "layer", "layers"}
_ATTENTION = {"attn_sum", "attn_window", "attn_vision"}
_FUTURE = {"query_mean", "query_cov"}
_HELD = _KNOWN | _ATTENTION | _FUTURE | {"frame", "spot"}  # where there is no window


def score_policies() -> list[str]:
    """Return the names of the score policies that can bound a stream without a window."""
    known = (method for method in methods("cache") if method.role == "score")
    return sorted(
        method.name
        for method in known
        if _unfit(method) is None and not CachePlan(score=Spec(method, "kv", None, 8)).bits
    )


def _unfit(method: Method) -> str | None:
    """Return what of a score policy does not fit into a stream without a window."""
    if method.uneven:
        return "keeps more in one layer than in another"
    missing = ", ".join(sorted(set(method.needs) - _HELD))
    return f"needs {missing}, which a stream does not have" if missing else None


def check_score(plan: CachePlan | None) -> None:
    """Refuse (SpecError) a score policy that needs what a stream does not have."""
    spec = None if plan is None else plan.score
    if spec is not None and held_by_score(plan) and (why := _unfit(spec.method)) is not None:
        raise SpecError(f"{spec.method.name!r} {why}; choices: {', '.join(score_policies())}")
    if spec is not None and not held_by_score(plan) and not set(spec.method.needs) <= _KNOWN:
        missing = ", ".join(sorted(set(spec.method.needs) - _KNOWN))
        raise SpecError(
            f"{spec.method.name!r} needs {missing}, which frames of a stream do not have before "
            f"a question comes; use 'keynorm', or '{spec.method.name}:1024' without a window"
        )
    if plan is not None and plan.every:
        raise SpecError(
            f"knob every={plan.every} does nothing in a stream, where a policy chooses at every "
            "frame; leave it out"
        )


def attended(plan: CachePlan | None) -> bool:
    """Tell whether a score policy of a stream reads the queries of new tokens."""
    needs = plan.needs if plan is not None and held_by_score(plan) else ()
    return bool((_ATTENTION | _FUTURE) & set(needs))


def score(memory: Memory, block: LiveBlock) -> LiveBlock:
    """Let the policy choose among the visual tokens of a new frame, in every layer for itself."""
    spec = None if memory.plan is None or held_by_score(memory.plan) else memory.plan.score
    visual = (block.kinds == VISUAL).nonzero()[:, 0]
    if spec is None or not len(visual):
        return block
    markers = (block.kinds != VISUAL).nonzero()[:, 0]
    held = []
    for layer, buffer in enumerate(memory.buffers):
        tail = (buffer.read(p, buffer.length, buffer.length + block.n) for p in (RAW, VALUES))
        rows = [each.index_select(1, visual.to(each.device)) for each in tail]  # [H, m, d] each
        reduction = _choose(spec, rows, layer, len(memory.buffers))
        chosen = visual[reduction.keep.cpu()]
        held.append(torch.cat([markers, chosen]).sort().values)
        buffer.select(held[-1], block.n)
    return replace(block, held=tuple(held))


def _choose(spec: Spec, rows: Sequence[Tensor], layer: int, layers: int) -> Reduction:
    """All heads of a layer keep the same tokens: heads side by side are one long key."""
    keys, values = (rearrange(each, "h m d -> m (h d)") for each in rows)
    signals = {
        "values": values,
        "kind": torch.full(keys.shape[:1], VISUAL, device=keys.device),
        "layer": torch.tensor(layer),
        "layers": torch.tensor(layers),
    }
    reduction = evict(spec, Tokens(keys, signals=signals))
    if not reduction.pure:
        raise SpecError(
            f"{spec.method.name!r} merges keys, which frames of a stream do not do; use 'keynorm' "
            "in a stream"
        )
    return reduction


class Engine:
    """Prefills streams and answers on branches of them.

    `model` is a transformers model with a text model of full-attention layers
    (`model.get_decoder()`); it stays as it is, with hooks that do nothing for others. ModelError:
    its layers are of another kind, or its keys cannot be read or moved.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = model.get_decoder()
        capture = RawCapture(self.decoder)
        self._close = weakref.finalize(self, capture.remove)
        self.capture = capture
        try:
            _check_layers(self.decoder, capture)
            rotary = Rotary(self.decoder)
            check_rotation(self.decoder, capture, rotary)
        except BaseException:
            self.close()
            raise
        self.attentions = [capture.attentions[i] for i in range(len(capture.attentions))]
        self.turner = Turner(rotary, self.attentions)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._close()

    def memory(
        self,
        plan: CachePlan | None = None,
        *,
        tiers: TierQuotas | None = None,
        archive: Archive | None = None,
        slack: float = 0.25,
    ) -> Memory:
        """Make an empty memory.

        `plan` says what stays and how it is found again, None keeps everything; `tiers` are byte
        quotas of the archive that a plan with `retrieve` gets, `archive` is another one to use.
        Positions may run further than a prompt of the live tokens by a share `slack` of it before
        all are re-based; 0 re-bases whenever something leaves. SpecError: the plan cannot bound a
        stream, or scores by what streams do not have.
        """
        check_score(plan)
        if archive is None and plan is not None and plan.retrieve is not None:
            device = self.turner.device(0)
            retriever, store = plan.retriever(), plan.quantiser()
            archive = Archive(retriever, self.turner.layers, device, tiers, store)
        queries = None
        if plan is not None and plan.future is not None and held_by_score(plan):
            queries = StreamQueries(Expectation(self.decoder, *plan.future), self.attentions)
        return Memory(self.turner, plan, archive, slack, queries)

    def append(self, memory: Memory, piece: Piece) -> None:
        """Prefill a piece at a stream's end, then drop what no longer fits.

        MmfastError: the piece is malformed or does not fit; the memory is as it was.
        """
        with memory.lock, torch.no_grad():
            block = live(piece, memory.number, memory.cursor.start(piece))
            masses = [dict[str, Tensor]() for _ in memory.buffers]
            after = partial(self._attend, memory, block, masses) if attended(memory.plan) else None
            self._forward(piece, block.start, memory.buffers, after=after)
            if after is not None:
                for layer, found in enumerate(masses):
                    memory.heed(layer, found)
            memory.admit(score(memory, block))

    def _attend(
        self,
        memory: Memory,
        block: LiveBlock,
        masses: list[dict[str, Tensor]],
        layer: int,
        queries: Tensor,
    ) -> None:
        """Note what the queries `[Hq, n, d]` of a new block, before RoPE, look at in a layer."""
        assert memory.plan is not None
        buffer, n = memory.buffers[layer], block.n
        module: Any = self.attentions[layer]
        needs = memory.plan.needs
        if memory.queries is not None:
            memory.queries.arrive(layer, queries, block.positions(layer))
        if not _ATTENTION & set(needs):
            return
        total, vision = "attn_sum" in needs, "attn_vision" in needs
        last = n if total or vision else min(n, memory.plan.window)
        turned = self.turner.rotate(layer, queries, block.positions(layer))[:, n - last :]
        keys = buffer.read(ROTATED, 0, buffer.length + n)
        grouped = rearrange(turned, "(h g) q d -> h (g q) d", h=len(keys))
        scores = (grouped @ keys.transpose(1, 2)).float() * module.scaling
        scores = rearrange(scores, "h (g q) m -> h g q m", q=last)
        own = torch.ones(last, keys.shape[1], dtype=torch.bool, device=keys.device)
        scores.masked_fill_(~own.tril(keys.shape[1] - last), -torch.inf)
        shares = scores.softmax(-1).mean((0, 1))  # [q, m]
        if total:
            masses[layer]["attn_sum"] = shares.sum(0)
        if "attn_window" in needs:
            masses[layer]["attn_window"] = shares[-memory.plan.window :].mean(0)
        if vision:
            asks = (block.kinds == VISUAL).nonzero()[-memory.plan.vision :, 0].to(shares.device)
            before = memory.masses[layer].get("attn_vision", shares[0, :0])[: buffer.length]
            old = F.pad(before, (0, keys.shape[1] - len(before)))  # text asks nothing
            masses[layer]["attn_vision"] = shares[asks].mean(0) if len(asks) else old

    def branch(self, memory: Memory) -> Branch:
        """A view of the live tokens on which a question is answered; the stream goes on."""
        with memory.lock, torch.no_grad():
            return Branch(self, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[.., V]`, float32, of last hidden states `[.., D]`."""
        found: Tensor = self.model.get_output_embeddings()(hidden)
        found = found.float()
        cap = getattr(self.decoder.config, "final_logit_softcapping", None)
        return found if cap is None else cap * torch.tanh(found / cap)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings `[n, D]` of token ids `[n]`."""
        table = self.decoder.get_input_embeddings()
        embeds: Tensor = table(ids.to(table.weight.device))
        return embeds

    def _forward(
        self,
        piece: Piece,
        start: Start,
        buffers: Sequence[LayerBuffer],
        recall: Callable[[Raw], Callable[[int], None]] | None = None,
        after: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Run a piece behind the tokens of the buffers; they hold its tokens, not counted in.

        Returns the last hidden states `[n, D]`.
        """
        weight = self.decoder.get_input_embeddings().weight
        embeds = piece.embeds.to(weight.device, weight.dtype)[None]  # [1, n, D]
        places = (
            piece.relative.to(weight.device) + torch.tensor(start, device=weight.device)[:, None]
        )
        with self.capture.recording() as raw:
            before = None if recall is None else recall(raw)

            def write(layer: int, keys: Tensor, values: Tensor) -> Pair:
                if before is not None:
                    before(layer)
                buffer, stop = buffers[layer], buffers[layer].length + keys.shape[2]
                buffer.write(raw.keys.pop(layer)[0], keys[0], values[0])
                if after is not None:
                    after(layer, raw.queries.pop(layer)[0])
                return buffer.read(ROTATED, 0, stop)[None], buffer.read(VALUES, 0, stop)[None]

            cache = cache_over(len(buffers), write, lambda layer: buffers[layer].length)
            # one mask serves all layers only where they hold equally many tokens
            uneven = before is not None or len({buffer.length for buffer in buffers}) > 1
            flash = "flash" in str(self.decoder.config._attn_implementation)
            fit = fitting(self.decoder.config, self.attentions, embeds, cache)
            with fit if uneven or flash else nullcontext():
                output = self.decoder(
                    inputs_embeds=embeds,
                    position_ids=places[:, None] if self.turner.axes > 1 else places,
                    **{CACHE: cache},
                    use_cache=True,
                    **_planes(piece, weight),
                )
        last: Tensor = output.last_hidden_state[0]
        return last


def _check_layers(decoder: Any, capture: RawCapture) -> None:
    layers = len(decoder.layers)
    kinds = {kind_of(decoder.config, i) for i in range(layers)}
    if len(capture.attentions) < layers or kinds != {FULL}:
        odd = ", ".join(sorted(kinds - {FULL})) or "other than attention"
        raise ModelError(
            f"{type(decoder).__name__} has layers of kind {odd}, which endless streams cannot "
            "keep; use a model of full-attention layers, such as LLaVA-OneVision, Qwen2.5-VL or "
            "Qwen3-VL"
        )


def _planes(piece: Piece, weight: Tensor) -> dict[str, Any]:
    if not piece.planes or piece.visual is None:
        return {}
    return {
        "visual_pos_masks": piece.visual.to(weight.device)[None],
        "deepstack_visual_embeds": [plane.to(weight.device) for plane in piece.planes],
    }
