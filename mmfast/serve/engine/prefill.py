"""Prefill of prompts in chunks.

A pass takes tokens of several prompts, and each of them runs through the layers that it needs: a
prompt that is cut before layer K runs through the layers before K in chunks, is cut, and what is
left of it runs through the others in later passes.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.kv import KVBlock
from mmfast.core.trace import Trace
from mmfast.models.decoder.rotary import RawCapture
from mmfast.models.reduction.call import PromptPart
from mmfast.models.reduction.sequence import Sequences
from mmfast.models.wrappers import CONV, SLIDING, position_axes
from mmfast.ops.stream_cache import RowBuffer
from mmfast.serve.engine.adapters import using
from mmfast.serve.engine.decode import DecodeBatch
from mmfast.serve.engine.kv.early import EarlyPrompt
from mmfast.serve.engine.lane import Attend, AttentionCall, Lane, passing
from mmfast.serve.engine.policies import PromptPolicy, PromptRecipe
from mmfast.serve.engine.slots import Embedded, Filled

CHUNKS = 256, 2048  # tokens of a chunk that nobody set, least and most
PAUSE = 0.04  # seconds that such a chunk takes at most, if it is not the least


class PrefillJob:
    """A prompt during prefill.

    It runs through the layers from `low` on, before `high`, where it is cut; None is the end of the
    model. `hidden` `[n, D]` is what enters `low`.
    """

    def __init__(self, prompt: Embedded, prefix: tuple[KVBlock, int] | None = None):
        self.prompt = prompt
        self.hidden, self.positions = prompt.embeds, prompt.positions
        self.visual, self.planes, self.blocks = prompt.visual, prompt.planes, prompt.images
        self.low, self.high = 0, None  # type: int, int | None
        # keys and values `[2, H, m, d]` by layer, filled up to `done`; convolutions by layer
        self.layers: dict[int, RowBuffer] = {}
        self.states: dict[int, Any] = {}
        self.last: RowBuffer | None = None  # of the layer whose attention a cut reads
        self.carry: list[Tensor] = []  # what enters `high`, of the passes so far
        self.error: Exception | None = None  # a reducer failed, and the prompt cannot go on
        self.policy: PromptPolicy | None = None
        self.peeks = False  # it is read up to `high` for the attention there, then from the start
        self.done = self.reused = 0  # tokens read so far, and those of them that were cached
        self.logits: Tensor | None = None  # `[V]` float32 at the last token; None until then
        self.early: EarlyPrompt | None = None  # what an early exit keeps of it
        self.shared = False  # later prompts may begin with its keys and values
        self.ended: list[RowBuffer] = []  # layers on which a policy has acted, if it is shared
        if prefix is not None:
            held, self.reused = prefix
            self.done = self.reused
            for index, pair in enumerate(zip(held.keys, held.values, strict=True)):
                heads, _, width = pair[0].shape
                own = RowBuffer(data=pair[0].new_zeros(2, heads, prompt.length, width))
                own.write(*(each[:, : self.done] for each in pair), at=0)
                self.layers[index] = own

    @property
    def left(self) -> int:
        """Number of tokens still to read in the layers at hand; 0 at the end of all."""
        return len(self.hidden) - self.done

    @property
    def waits(self) -> bool:
        """It has been read up to the layer before which it is to be cut."""
        return self.high is not None and not self.left and self.error is None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        ended = 0 if self.policy is None else self.policy.nbytes
        ended += 0 if self.early is None else self.early.nbytes
        return ended + sum(each.nbytes for each in [*self.layers.values(), *self.ended])

    def prefix(self) -> KVBlock | None:
        """Return all keys and values of a job that has ended, as no policy has changed them."""
        if not self.shared:
            return None
        layers = [*self.ended, *(self.layers[i] for i in sorted(self.layers))]
        keys, values = (tuple(each.read(p, 0, self.done) for each in layers) for p in (0, 1))
        return KVBlock(keys, values)

    def fitting(self, n: int) -> int:
        """Return how many tokens to read for `n`: an image that attends forward is not parted."""
        stop, blocks = self.done + n, self.blocks
        if blocks is None or stop >= len(blocks) or blocks[stop] < 0:
            return n
        same = (blocks[stop:] != blocks[stop - 1]).nonzero()
        return n + (int(same[0]) if len(same) else len(blocks) - stop)


@dataclass(eq=False)
class _Part:
    """The tokens of one prompt in one pass: its `start` to `stop`, rows `first` to `last`."""

    job: PrefillJob
    start: int
    stop: int
    first: int
    carry: Tensor | None = None  # `[n, D]` that enters the layer before which the prompt is cut
    seen: dict[int, Any] = field(default_factory=dict)  # of the attention, by layer
    raw: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: dict[bool, Tensor | None] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        """Rows of the pass."""
        return slice(self.first, self.first + self.stop - self.start)

    def runs(self, layer: int) -> bool:
        """Return True if the part runs through a layer."""
        high = self.job.high
        return self.job.low <= layer and (high is None or layer < high)


class _OverError(Exception):
    """No part of a pass runs through the layers to come."""


class _Pass:
    """One pass over parts of prompts."""

    def __init__(
        self,
        lane: Lane,
        parts: Sequence[_Part],
        raw: Any,
        others: slice = slice(0, 0),  # rows of running answers
        attend_others: Attend | None = None,
    ) -> None:
        self.lane, self.parts, self._raw = lane, parts, raw
        self._thread = threading.get_ident()
        self._active: Sequence[_Part] = parts
        self._others, self._attend_others = others, attend_others

    def attend(
        self, index: int, attention: AttentionCall, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Store keys and values of every part, and attend to what its prompt has in this layer."""
        found, row = [], 0
        for part in self._active:
            new = slice(row, row + part.stop - part.start)
            row = new.stop
            job, start = part.job, 0
            own = job.layers.get(index)
            if own is None:
                heads, width = key.shape[1], key.shape[3]
                own = RowBuffer(data=key.new_zeros(2, heads, len(job.hidden), width))
                job.layers[index] = own
            own.write(key[0, :, new], value[0, :, new], at=part.start)
            sliding = self.lane.kinds[index] == SLIDING
            if sliding:
                start = max(0, part.start - self.lane.window + 1)
            keys, values = (own.read(p, start, part.stop)[None] for p in (0, 1))
            if sliding not in part.masks:
                part.masks[sliding] = self._mask(part, start, sliding)
            mask = part.masks[sliding]
            queries = query[:, :, new]
            found.append(attention(queries, keys, values, mask))
            if job.policy is not None and job.policy.reads(index):
                seen = queries, keys, values, mask
                last = len(job.hidden) - part.stop
                section = PromptPart(0, last, part.start == 0)
                part.seen[index] = job.policy.look(index, attention, section, *seen)
            if job.policy is not None and job.policy.retrieves:
                raw = self._raw.keys[index][:, :, new], self._raw.queries[index][:, :, new]
                part.raw[index] = raw
        if self._attend_others is not None:
            tail = (each[:, :, row:] for each in (query, key, value))
            found.append(self._attend_others(index, attention, *tail))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def layer(self, index: int, stock: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the parts `[1, n, D]` through a layer that go through it; the others stay."""
        if threading.get_ident() != self._thread:
            return stock(hidden, *args, **kwargs)
        for part in self.parts:
            if part.job.high == index:
                part.carry = hidden[0, part.rows].clone()
            elif part.job.low == index and index:
                hidden = hidden.clone()
                hidden[0, part.rows] = part.job.hidden[part.start : part.stop]
        self._active = [part for part in self.parts if part.runs(index)]
        if len(self._active) == len(self.parts):
            return stock(hidden, *args, **kwargs)
        if not self._active and self._attend_others is None:
            if all(part.job.low < index for part in self.parts):
                raise _OverError
            return hidden
        numbers = range(hidden.shape[1])
        running = [i for rows in self._running for i in numbers[rows]]
        rows = torch.tensor(running, device=hidden.device)
        turned = tuple(each.index_select(-2, rows) for each in kwargs["position_embeddings"])
        kwargs = {**kwargs, "position_embeddings": turned}
        if "position_ids" in kwargs:
            kwargs["position_ids"] = None
        with using(rows=running):
            return hidden.index_copy(1, rows, stock(hidden[:, rows], *args, **kwargs))

    @property
    def _running(self) -> list[slice]:
        """Rows that run through the layer at hand."""
        return [*(part.rows for part in self._active), self._others]

    def _mask(self, part: _Part, first: int, sliding: bool) -> Tensor | None:
        """Return what the tokens of a part see of the keys from `first` on, `[1, 1, n, keys]`."""
        blocks, window = part.job.blocks, self.lane.window
        sliding = sliding and part.stop > window
        whole = part.start == first == 0 and self.lane.name != "eager"
        flash = "flash" in self.lane.name  # counts from the end, and knows windows
        if blocks is None and (flash or (whole and not sliding)):
            return None
        device = part.job.hidden.device
        key = torch.arange(first, part.stop, device=device)
        query = torch.arange(part.start, part.stop, device=device)[:, None]
        seen = key <= query
        if blocks is not None:
            mine = blocks[part.start : part.stop, None]
            seen |= (mine >= 0) & (mine == blocks[first : part.stop])
        if sliding:
            seen &= key > query - window
        return seen[None, None]


class Prefiller:
    """Computes the keys and values of prompts, at most `chunk` tokens in one pass.

    None chooses the chunk by the time that it takes.

    Raises `ModelError` if the rows of the model cannot be told apart in one pass.
    """

    def __init__(self, model: Any, chunk: int | None = None, lane: Lane | None = None) -> None:
        self.lane = lane or Lane(model)
        self.model, self.chunk, self._fits = model, chunk or CHUNKS[0], chunk is None
        self.decoder = self.lane.decoder
        self.slice: float | None = None  # seconds that policies may act in one unit of work
        self._alone = CONV in self.lane.kinds  # a convolution would run from prompt to prompt
        config = self.decoder.config
        attending = next(iter(self.lane.modules))
        layer = self.decoder.layers[attending]
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        # Number of earlier tokens whose attention costs as much as the weights of a layer.
        self._even: int = sum(each.numel() for each in layer.parameters()) // (
            2 * width * config.num_attention_heads
        )

    @property
    def keeps_prefixes(self) -> bool:
        """The keys and values of a prefix are all that a prompt needs of it."""
        return not self._alone

    def rereads(self, prompt: Embedded) -> int | None:
        """Return how many last tokens of a prompt to read behind a known prefix; None for all."""
        if not self.keeps_prefixes:
            return None
        return 1 if prompt.recipe is None else prompt.recipe.rereads

    def job(
        self, prompt: Embedded, most: int, prefix: tuple[KVBlock, int] | None = None
    ) -> PrefillJob:
        """Return the job of a prompt that becomes `most` tokens with its answer."""
        if prefix is not None and prompt.images is not None:
            blocks, n = prompt.images, prefix[1]
            while n and blocks[n] >= 0 and blocks[n] == blocks[n - 1]:
                n -= 1
            prefix = (prefix[0], n) if n else None
        job = PrefillJob(prompt, prefix)
        recipe = prompt.recipe
        job.shared = self.rereads(prompt) is not None
        if recipe is None and self._alone:
            recipe = PromptRecipe((), None, Sequences(prompt.length, [], [], []), Trace())
        if recipe is not None:
            job.policy = PromptPolicy(self.model, self.lane, recipe, most, prompt.positions[:, -1:])
            job.high = next(iter(job.policy.cuts), None)
            if job.policy.ahead is not None:
                job.high, job.peeks = job.policy.ahead + 1, True
            elif job.high == 0:
                self._try(job)
        return job

    def fill(self, prompts: Sequence[Embedded]) -> list[Filled]:
        """Read whole prompts, as many as fit at a time."""
        jobs = [self.job(prompt, prompt.length) for prompt in prompts]
        while any(job.logits is None and job.error is None for job in jobs):
            self.step(jobs)
        return [self.result(job) for job in jobs]

    def cost(self, job: PrefillJob, tokens: int = 1) -> float:
        """Return the work on the next tokens of a job, in tokens behind at most a chunk.

        A token that runs through a part of the layers counts in part.
        """
        layers = len(self.lane.kinds)
        part = ((layers if job.high is None else job.high) - job.low) / layers
        return part * tokens * max(1.0, (self._even + job.done) / (self._even + self.chunk))

    def fit(self, seconds: float) -> float:
        """Double or halve a chunk that takes so long, if none was given; return the factor.

        A pass of a few milliseconds is mostly overhead; one of PAUSE nobody notices.
        """
        low, high = CHUNKS
        if self._fits and seconds < PAUSE / 2 and self.chunk < high:
            self.chunk *= 2
            return 2.0
        if self._fits and seconds > PAUSE and self.chunk > low:
            self.chunk //= 2
            return 0.5
        return 1.0

    def plan(
        self, jobs: Sequence[PrefillJob], waited: bool = False
    ) -> list[tuple[PrefillJob, int]]:
        """Choose the tokens of the next pass.

        The first job gets at least half a chunk, short jobs that fit as a whole get the rest; what
        is left goes to the first, and after its end to the next in line. With `waited`, running
        answers wait for the pass: attention to earlier tokens then counts, so that a pass of a long
        prompt takes no longer than another.
        """
        price = self.cost if waited else lambda _: 1.0
        if (read := next((job for job in jobs if job.waits), None)) is not None:
            if self._settled(read, self.slice):
                self._try(read)
            return []
        waiting = [job for job in jobs if job.left]
        if not waiting:
            return []
        first, *others = waiting[:1] if self._alone else waiting
        plan = {first: min(first.left, max(1, int(self.chunk // 2 / price(first))))}
        room = self.chunk - plan[first] * price(first)
        for job in sorted(others, key=lambda job: job.left):
            if job.left * price(job) <= room:
                plan[job] = job.left
                room -= job.left * price(job)
        more = min(first.left - plan[first], int(max(room, 0) / price(first)))
        plan[first] += more
        room -= more * price(first)
        following = next((job for job in others if job not in plan), None)
        if following is not None and room >= price(following):
            plan[following] = min(following.left, int(room / price(following)))
        return [(job, job.fitting(n)) for job, n in plan.items()]

    @torch.inference_mode()
    def step(self, jobs: Sequence[PrefillJob]) -> list[PrefillJob]:
        """Run one pass over at most a chunk of tokens; return the jobs that it ended."""
        return self.run(self.plan(jobs))

    @torch.inference_mode()
    def run(self, plan: Sequence[tuple[PrefillJob, int]]) -> list[PrefillJob]:
        """Run one pass over the next tokens of some jobs; return those that it ended."""
        return self._run(plan, None)[0] if plan else []

    @torch.inference_mode()
    def run_with(self, plan: Sequence[tuple[PrefillJob, int]], decoder: DecodeBatch) -> Tensor:
        """Run one pass over the next tokens of some jobs and a step of all running answers.

        Returns the logits of the answers, `[B, V]`, for `DecodeBatch.end` (SARATHI, 2308.16369).
        """
        return self._run(plan, decoder)[1]

    def _run(
        self, plan: Sequence[tuple[PrefillJob, int]], decoder: DecodeBatch | None
    ) -> tuple[list[PrefillJob], Tensor]:
        parts, row = list[_Part](), 0
        for job, n in plan:
            parts.append(_Part(job, job.done, job.done + n, row))
            row += n
        embeds = torch.cat([p.job.hidden[p.start : p.stop] for p in parts])[None]
        positions = torch.cat([p.job.positions[:, p.start : p.stop] for p in parts], 1)
        names = [p.job.prompt.adapter for p in parts for _ in range(p.start, p.stop)]
        others, attend_others = slice(row, row), None
        if decoder is not None:
            names += decoder.adapters
            new, places = decoder.begin()
            embeds, positions = torch.cat([embeds, new[None]], 1), torch.cat([positions, places], 1)
            others, attend_others = slice(row, row + len(new)), decoder.store.attend_flat
        states = self._states(parts)
        watched = any(p.job.policy is not None and p.job.policy.retrieves for p in parts)
        with ExitStack() as stack:
            stack.enter_context(using(names))
            raw = None
            if watched:
                capture = RawCapture(self.decoder)
                stack.callback(capture.remove)
                raw = stack.enter_context(capture.recording())
            running = _Pass(self.lane, parts, raw, others, attend_others)
            cuts = any(p.job.low or p.job.high is not None for p in parts)
            around = running.layer if cuts else None
            cache = passing([states.get(i) for i in range(len(self.lane.kinds))])
            more = _planes([(p.job, p.start, p.stop) for p in parts], embeds.shape[1])
            try:
                given = running.attend, cache, embeds, positions[:, None], around
                hidden = self.lane.run(*given, **more)
            except _OverError:
                hidden = None
        ended = [p for p in parts if p.stop == len(p.job.hidden) and p.job.high is None]
        logits = torch.empty(0)
        if ended or decoder is not None:  # before the tokens count as read, for this may fail
            assert hidden is not None
            numbers = [*(p.rows.stop - 1 for p in ended), *range(others.start, others.stop)]
            with using(names, numbers):
                logits = self.lane.logits(hidden[0, numbers])
        for part in parts:
            if part.job.early is not None:
                part.job.early.keep(part.start, part.rows)
        for part, mine in zip(ended, logits, strict=False):
            part.job.logits = mine
        self._advance(parts, states)
        return [part.job for part in ended], logits[len(ended) :]

    @torch.inference_mode()
    def result(self, job: PrefillJob) -> Filled:
        """Return the result of a job that has ended."""
        assert job.logits is not None
        prompt = job.prompt
        position = prompt.positions[:, -1] + 1
        if job.policy is not None:
            while not self.settled(job):
                pass
            made = 0, prompt.whole, job.policy.row(), prompt.adapter, job.policy.view()
            return Filled(KVBlock(), position, job.logits, *made)
        kv, view = job.prefix(), None if job.early is None else job.early.row(job.done)
        assert kv is not None
        more = job.reused, prompt.whole, None, prompt.adapter, view
        return Filled(kv, position, job.logits, *more)

    def _states(self, parts: Sequence[_Part]) -> dict[int, Any]:
        """Return copies of the convolutions of the one prompt of a pass, which may fail."""
        if not self._alone:
            return {}
        (part,) = parts
        if not part.job.states:
            from transformers import DynamicCache

            made = DynamicCache(config=self.decoder.config).layers
            return {i: made[i] for i, kind in enumerate(self.lane.kinds) if kind == CONV}
        return copy.deepcopy(part.job.states)

    def _advance(self, parts: Sequence[_Part], states: dict[int, Any]) -> None:
        for part in parts:
            job = part.job
            job.done, job.states = part.stop, states
            if job.policy is not None:
                for index in {*part.seen, *part.raw}:
                    seen = part.seen.get(index, (None, {}))
                    job.policy.keep(index, seen, part.raw.get(index))
            if part.carry is not None:
                job.carry.append(part.carry)
                if job.waits and job.done <= self.chunk:  # else a unit of work of its own
                    self._try(job)

    def settled(self, job: PrefillJob) -> bool:
        """Let the policies of a job that has ended act on some layers; True if that is all."""
        try:
            return job.policy is None or self._settled(job, self.slice)
        except Exception as error:
            raise _fitting(error) from error

    def _try(self, job: PrefillJob) -> None:
        try:
            with using((job.prompt.adapter,)):
                self._cut(job)
        except Exception as error:  # of this prompt alone: the pass went well
            job.error = _fitting(error)

    @torch.inference_mode()
    def _settled(self, job: PrefillJob, budget: float | None) -> bool:
        """Let policies act on layers that have read all of a prompt, for so many seconds.

        True if that is all of them; the attention before a cut is kept until then.
        """
        policy, start = job.policy, time.perf_counter()
        assert policy is not None
        if job.peeks:
            return True
        high = len(self.lane.kinds) if job.high is None else job.high
        # As many layers at a time as hold the entries of a chunk: a small part of its time, and
        # of the memory of a long prompt, of which a policy on several layers makes copies.
        most = max(1, self.chunk * len(self.lane.kinds) // len(job.hidden))
        while (index := policy.ended) < high:
            if budget is not None and time.perf_counter() - start > budget:
                return False
            mine = range(index, min(high, index + most))
            if mine[-1] + 1 == job.high:
                job.last = job.layers.get(mine[-1])
            ending = [(job.layers.pop(i, None), job.states.get(i)) for i in mine]
            job.ended += [own for own, _ in ending if own is not None and job.shared]
            policy.end(ending)
        return True

    @torch.inference_mode()
    def _cut(self, job: PrefillJob) -> None:
        """Reduce a prompt that has been read up to the layer before which it is cut."""
        policy = job.policy
        assert policy is not None and job.high is not None
        layer, read = job.high, job.high - 1
        # The entries of the layers read so far have the places from before the cut.
        self._settled(job, None)
        hidden = torch.cat(job.carry) if job.carry else job.hidden
        if job.peeks:
            layer, hidden, job.last = 0, job.hidden, job.layers[read]
            job.layers, job.states = {}, {}
        scaling, keys, mask = None, None, None
        if job.peeks or (read in self.lane.modules and policy.step.reads(read)):
            scaling = getattr(self.lane.modules[read], "scaling", None)
            assert job.last is not None
            keys = job.last.read(0, 0, job.done)[None]
            part = _Part(job, 0, job.done, 0)
            sliding = self.lane.kinds[read] == SLIDING
            mask = _Pass(self.lane, (), None)._mask(part, 0, sliding)
        entered = job.hidden[None] if job.low == layer - 1 else None
        seen = hidden[None], keys, scaling, mask, entered
        cuts = policy.cut(layer, *seen)
        canvas = _canvas(job)
        for cut in cuts:
            hidden = cut(hidden[None])[0]
            order = cut.order[0]
            job.positions = job.positions[:, order.to(job.positions.device)]
            if job.blocks is not None:
                job.blocks = job.blocks[order]
            if job.visual is not None:
                job.visual = job.visual[order]
                canvas = [cut(plane[None])[0] for plane in canvas]
        if job.visual is not None:
            job.planes = tuple(plane[job.visual] for plane in canvas)
        job.hidden, job.carry, job.done, job.low = hidden, [], 0, layer
        job.last, job.peeks = None, False
        job.high = next((each for each in policy.cuts if each > layer), None)


def _canvas(job: PrefillJob) -> list[Tensor]:
    """DeepStack features in the places of all tokens, `[n, D]` each."""
    made = []
    for plane in job.planes:
        assert job.visual is not None
        made.append(plane.new_zeros(len(job.visual), plane.shape[1]))
        made[-1][job.visual] = plane
    return made


def _fitting(error: Exception) -> Exception:
    """Return the error of a spec that does not fit this model or prompt, as the user's own."""
    return SpecError(str(error)) if isinstance(error, ModelError) else error


@torch.inference_mode()
def token_bytes(prefiller: Prefiller) -> int:
    """Measure the bytes of keys and values of one token."""
    embed = prefiller.decoder.get_input_embeddings()
    table = embed.weight
    places = torch.arange(2, device=table.device).expand(position_axes(prefiller.decoder), -1)
    ids = torch.zeros(2, dtype=torch.int64, device=table.device)
    job = PrefillJob(Embedded(embed(ids), places))
    prefiller.step([job])
    return job.nbytes // 2


def _planes(parts: Sequence[tuple[PrefillJob, int, int]], length: int) -> dict[str, Any]:
    """Return the DeepStack arguments for the tokens of a pass, of which the last have none."""
    count = max(len(job.planes) for job, _, _ in parts)
    if not count:
        return {}
    marks, planes = [], [[] for _ in range(count)]  # type: list[Tensor], list[list[Tensor]]
    for job, start, stop in parts:
        if job.visual is None:
            marks.append(torch.zeros(stop - start, dtype=torch.bool, device=job.hidden.device))
            continue
        marks.append(job.visual[start:stop])
        first = int(job.visual[:start].sum())
        last = first + int(job.visual[start:stop].sum())
        for own, plane in zip(planes, job.planes, strict=True):
            own.append(plane[first:last])
    visual = torch.cat(marks)
    visual = F.pad(visual, (0, length - len(visual)))
    if not bool(visual.any()):
        return {}
    joined = [torch.cat(plane) for plane in planes]
    return {"visual_pos_masks": visual[None], "deepstack_visual_embeds": joined}
