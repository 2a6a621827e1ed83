"""Prefill of prompts in chunks, and the keys and values of prefixes for later prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.models.families.adapter import Adapter, adapter_for
from mmfast.models.wrappers import FULL, kind_of
from mmfast.ops.stream_cache import RowBuffer
from mmfast.serve.engine.encoder import BLOCK
from mmfast.serve.engine.media import ByteCache
from mmfast.serve.engine.slots import Embedded, Filled, prompts_cache, prompts_mask


def check_batches(model: Any) -> None:
    """Refuse a model whose rows cannot have different lengths in one pass.

    The `ModelError` names the reason.
    """
    decoder, name = model.get_decoder(), type(model).__name__
    kinds = {kind_of(decoder.config, i) for i in range(len(decoder.layers))} - {FULL}
    attention = str(decoder.config._attn_implementation)
    if kinds:
        raise ModelError(f"{name} has layers of kind {', '.join(sorted(kinds))}")
    if adapter_for(model).blocks is not Adapter.__dataclass_fields__["blocks"].default:
        raise ModelError(f"tokens of an image attend forward in {name}")
    if attention not in ("sdpa", "eager"):
        raise ModelError(f"{name} runs {attention!r} attention, which takes no masks of rows")


class PrefillJob:
    """A prompt during prefill."""

    def __init__(self, prompt: Embedded, prefix: tuple[KVBlock, int] | None = None):
        self.prompt = prompt
        self.layers: list[RowBuffer] = []  # keys and values `[2, H, m, d]`, filled up to `done`
        self.done = self.reused = 0  # tokens read so far, and those of them that were cached
        self.logits: Tensor | None = None  # `[V]` float32 at the last token; None until then
        if prefix is not None:
            held, self.reused = prefix
            self.done = self.reused
            for pair in zip(held.keys, held.values, strict=True):
                heads, _, width = pair[0].shape
                own = RowBuffer(data=pair[0].new_zeros(2, heads, prompt.length, width))
                own.write(*(each[:, : self.done] for each in pair), at=0)
                self.layers.append(own)

    @property
    def left(self) -> int:
        """Number of tokens still to read."""
        return self.prompt.length - self.done

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(each.nbytes for each in self.layers)


class Prefiller:
    """Computes the keys and values of prompts, at most `chunk` tokens in one pass.

    Raises `ModelError` if the rows of the model cannot have different lengths in one pass.
    """

    def __init__(self, model: Any, chunk: int = 256) -> None:
        check_batches(model)
        self.model, self.chunk = model, chunk
        self.decoder, self._output = model.get_decoder(), model.get_output_embeddings()
        layer, config = self.decoder.layers[0], self.decoder.config
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        # Number of earlier tokens whose attention costs as much as the weights of a layer.
        self._even: int = sum(each.numel() for each in layer.parameters()) // (
            2 * width * config.num_attention_heads
        )

    def fill(self, prompts: Sequence[Embedded]) -> list[Filled]:
        """Read whole prompts, as many as fit at a time."""
        jobs = [PrefillJob(prompt) for prompt in prompts]
        while any(job.left for job in jobs):
            self.step(jobs)
        return [self.result(job) for job in jobs]

    def cost(self, job: PrefillJob, tokens: int = 1) -> float:
        """Return the work on the next tokens of a job, in tokens without earlier tokens."""
        return tokens * (self._even + job.done) / self._even

    def plan(
        self, jobs: Sequence[PrefillJob], waited: bool = False
    ) -> list[tuple[PrefillJob, int]]:
        """Choose the tokens of the next pass.

        The first job gets at least half a chunk, short jobs that fit as a whole get the rest; what
        is left goes to the first, and after its end to the next in line. With `waited`, running
        answers wait for the pass: attention to earlier tokens then counts, so that a pass of a long
        prompt takes no longer than another.
        """
        price = self.cost if waited else _one
        waiting = [job for job in jobs if job.left]
        if not waiting:
            return []
        first, *others = waiting
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
        return list(plan.items())

    @torch.inference_mode()
    def step(self, jobs: Sequence[PrefillJob]) -> list[PrefillJob]:
        """Run one pass over at most a chunk of tokens; return the jobs that it ended."""
        return self.run(self.plan(jobs))

    @torch.inference_mode()
    def run(self, plan: Sequence[tuple[PrefillJob, int]]) -> list[PrefillJob]:
        """Run one pass over the next tokens of some jobs; return those that it ended."""
        if not plan:
            return []
        spans = [(job.done, job.done + n) for job, n in plan]
        parts = [(job.prompt, *span) for (job, _), span in zip(plan, spans, strict=True)]
        embeds = torch.cat([p.embeds[a:b] for p, a, b in parts])[None]
        positions = torch.cat([p.positions[:, a:b] for p, a, b in parts], 1)
        causal = len(spans) == 1 and spans[0][0] == 0
        mask = None if causal else prompts_mask(spans, embeds.dtype).to(embeds.device)
        buffers, room = [job.layers for job, _ in plan], [job.prompt.length for job, _ in plan]
        output = self.decoder(
            inputs_embeds=embeds,
            attention_mask=mask,
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            past_key_values=prompts_cache(len(self.decoder.layers), buffers, spans, room),
            use_cache=True,
            **_planes(parts),
        )
        return self._advance(plan, output.last_hidden_state[0])

    def result(self, job: PrefillJob) -> Filled:
        """Return the result of a job that has ended."""
        assert job.logits is not None
        prompt = job.prompt
        seen = None
        if prompt.whole is not None:
            seen = prompt.whole.unique()
        keys, values = (tuple(each.read(p, 0, job.done) for each in job.layers) for p in (0, 1))
        return Filled(
            KVBlock(keys, values), prompt.positions[:, -1] + 1, job.logits, job.reused, seen
        )

    def _advance(self, plan: Sequence[tuple[PrefillJob, int]], hidden: Tensor) -> list[PrefillJob]:
        ended, at, row = [], [], 0
        for job, n in plan:
            row += n
            if job.left == n:
                ended.append(job)
                at.append(row - 1)
        if ended:  # before the tokens count as read, for this may fail
            found = logits(self._output, self.decoder, hidden[at])
            for job, mine in zip(ended, found, strict=True):
                job.logits = mine
        for job, n in plan:
            job.done += n
        return ended


def _one(job: PrefillJob) -> float:
    return 1.0


def reusable(length: int) -> int:
    """Return the tokens of a prompt that a prefix may cover; its last token must be read."""
    return (length - 1) // BLOCK * BLOCK


def logits(output: Any, decoder: Any, hidden: Tensor) -> Tensor:
    """Return logits `[B, V]` float32 of last hidden states `[B, D]`."""
    found: Tensor = output(hidden).float()
    cap = getattr(decoder.config, "final_logit_softcapping", None)
    return found if cap is None else cap * torch.tanh(found / cap)


@torch.inference_mode()
def token_bytes(prefiller: Prefiller) -> int:
    """Measure the bytes of keys and values of one token."""
    embed = prefiller.decoder.get_input_embeddings()
    table = embed.weight
    wide = hasattr(getattr(prefiller.decoder, "rotary_emb", None), "mrope_section")
    places = torch.arange(2, device=table.device).expand(3 if wide else 1, -1)
    ids = torch.zeros(2, dtype=torch.int64, device=table.device)
    (filled,) = prefiller.fill([Embedded(embed(ids), places)])
    return filled.kv.nbytes // 2


def _planes(parts: Sequence[tuple[Embedded, int, int]]) -> dict[str, Any]:
    """Return the DeepStack arguments for the tokens of a pass."""
    count = max(len(prompt.planes) for prompt, _, _ in parts)
    if not count:
        return {}
    marks, planes = [], [[] for _ in range(count)]  # type: list[Tensor], list[list[Tensor]]
    for prompt, start, stop in parts:
        if prompt.visual is None:
            marks.append(torch.zeros(stop - start, dtype=torch.bool, device=prompt.embeds.device))
            continue
        marks.append(prompt.visual[start:stop])
        first = int(prompt.visual[:start].sum())
        last = first + int(prompt.visual[start:stop].sum())
        for own, plane in zip(planes, prompt.planes, strict=True):
            own.append(plane[first:last])
    visual = torch.cat(marks)
    if not bool(visual.any()):
        return {}
    joined = [torch.cat(plane) for plane in planes]
    return {"visual_pos_masks": visual[None], "deepstack_visual_embeds": joined}


_Name = tuple[str, bytes]


@dataclass(frozen=True, eq=False)
class _Entry:
    kv: KVBlock  # [H, m, d] per layer
    names: tuple[_Name, ...]


class Prefixes:
    """A cache of the keys and values of prompts, of bounded bytes, found by their prefixes.

    A name holds the tenant and a hash of the content and position of every token up to the end of a
    block: two prompts share their common prefix, and no tenant meets the prompts of another.
    """

    def __init__(self, limit: int) -> None:
        self.held: ByteCache[_Entry] = ByteCache(limit, lambda entry: entry.kv.nbytes, self._forget)
        self._where: dict[_Name, list[_Name]] = {}  # entries with this prefix, the newest last

    def find(self, tenant: str, blocks: Sequence[bytes], length: int) -> tuple[KVBlock, int] | None:
        """Return the longest known prefix: keys and values, and its number of tokens."""
        for count in range(reusable(length) // BLOCK, 0, -1):
            for place in reversed(self._where.get((tenant, blocks[count - 1]), ())):
                if (entry := self.held.get(place)) is not None:
                    return entry.kv, count * BLOCK
        self.held.misses += 1
        return None

    def put(self, tenant: str, blocks: Sequence[bytes], kv: KVBlock) -> None:
        """Keep the keys and values of a prompt; they must not change afterwards."""
        names = tuple((tenant, block) for block in blocks)
        entry = _Entry(kv, names)
        if not names or names[-1] in self._where or kv.nbytes > self.held.maxsize:
            return
        for name in names[:-1]:  # a prompt that is a prefix of this one would be held twice
            self.held.pop(name, None)
        for name in names:
            self._where.setdefault(name, []).append(names[-1])
        self.held.put(names[-1], entry)

    def shrink(self, limit: int) -> None:
        """Drop the oldest entries until no more than `limit` bytes are held."""
        self.held.shrink(max(0, limit))

    def _forget(self, key: object, entry: _Entry) -> None:
        for name in entry.names:
            self._where[name] = [each for each in self._where[name] if each != key]
            if not self._where[name]:
                del self._where[name]
