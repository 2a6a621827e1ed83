"""Prefiller: from embeddings to keys and values, a chunk of several prompts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import Adapter, adapter_for
from mmfast.models.layers import FULL, kind_of
from mmfast.serve.engine.encoder import BLOCK
from mmfast.serve.engine.media import Lru
from mmfast.serve.engine.slots import Embedded, Filled, PackCache


def check_batches(model: Any) -> None:
    """Refuse a model whose rows cannot be at different lengths in one pass.

    Raises:
        ModelError: Says why.
    """
    decoder, name = model.get_decoder(), type(model).__name__
    kinds = {kind_of(decoder.config, i) for i in range(len(decoder.layers))} - {FULL}
    attention = str(decoder.config._attn_implementation)
    if kinds:
        raise ModelError(f"{name} has layers of kind {', '.join(sorted(kinds))}")
    if adapter_for(model).blocks is not Adapter.__dataclass_fields__["blocks"].default:
        raise ModelError(f"tokens of an image see forward in {name}")
    if attention not in ("sdpa", "eager"):
        raise ModelError(f"{name} runs {attention!r} attention, which takes no masks of rows")


class PrefillJob:
    """A prompt on its way through prefill.

    Attributes:
        prompt: The prompt.
        kv: Keys and values per layer `[2, H, m, d]`, filled up to `done`.
        done: Tokens that are through.
        logits: `[V]` float32 behind the last token; None before.
        reused: Tokens that were there before.
    """

    def __init__(self, prompt: Embedded, prefix: tuple[tuple[Tensor, ...], int] | None = None):
        self.prompt = prompt
        self.kv: list[Tensor] = []
        self.done = self.reused = 0
        self.logits: Tensor | None = None
        if prefix is not None:
            held, self.reused = prefix
            self.done = self.reused
            for layer in held:
                own = layer.new_zeros(2, layer.shape[1], prompt.length, layer.shape[3])
                own[:, :, : self.done] = layer[:, :, : self.done]
                self.kv.append(own)

    @property
    def left(self) -> int:
        """Tokens still to read."""
        return self.prompt.length - self.done

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(each.nbytes for each in self.kv)


class Prefiller:
    """Reads prompts.

    Args:
        model: A stock model of full-attention layers.
        chunk: Most tokens of one pass, of prompts that begin with it.

    Raises:
        ModelError: Its rows cannot be at different lengths in one pass.
    """

    def __init__(self, model: Any, chunk: int = 256) -> None:
        check_batches(model)
        self.model, self.chunk = model, chunk
        self.decoder, self._output = model.get_decoder(), model.get_output_embeddings()
        layer, config = self.decoder.layers[0], self.decoder.config
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        # Tokens before it that cost a token's attention as much as the weights of a layer do.
        self._even: int = sum(each.numel() for each in layer.parameters()) // (
            2 * width * config.num_attention_heads
        )
        config = model.generation_config
        self._penalty = float(getattr(config, "repetition_penalty", None) or 1.0)

    def fill(self, prompts: Sequence[Embedded]) -> list[Filled]:
        """Read prompts to their ends, as many as fit at a time."""
        jobs = [PrefillJob(prompt) for prompt in prompts]
        while any(job.left for job in jobs):
            self.step(jobs)
        return [self.result(job) for job in jobs]

    def cost(self, job: PrefillJob, tokens: int = 1) -> float:
        """Work on the next tokens of a job, in tokens that have nothing before them."""
        return tokens * (self._even + job.done) / self._even

    def plan(
        self, jobs: Sequence[PrefillJob], waited: bool = False
    ) -> list[tuple[PrefillJob, int]]:
        """Which tokens go next.

        The first job gets half a chunk at least, short ones that fit as a whole the rest of it;
        what is left then goes to the first, and behind its end to the next in line.

        Args:
            jobs: In the order of their turns.
            waited: Somebody waits for the end of the pass: attention to what was read before
                takes its part of the chunk, so that no pass is longer because its prompt is.
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
        """One pass over at most a chunk of tokens; the jobs that it ended."""
        return self.run(self.plan(jobs))

    @torch.inference_mode()
    def run(self, plan: Sequence[tuple[PrefillJob, int]]) -> list[PrefillJob]:
        """One pass over the next tokens of some jobs; those that it ended."""
        if not plan:
            return []
        spans = [(job.done, job.done + n) for job, n in plan]
        parts = [(job.prompt, *span) for (job, _), span in zip(plan, spans, strict=True)]
        embeds = torch.cat([p.embeds[a:b] for p, a, b in parts])[None]
        positions = torch.cat([p.positions[:, a:b] for p, a, b in parts], 1)
        cache = PackCache(
            [job.kv for job, _ in plan],
            spans,
            [job.prompt.length for job, _ in plan],
            embeds.dtype,
            embeds.device,
        )
        output = self.decoder(
            inputs_embeds=embeds,
            attention_mask=cache.mask,
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            past_key_values=cache,
            use_cache=True,
            **_planes(parts),
        )
        return self._advance(plan, output.last_hidden_state[0])

    def result(self, job: PrefillJob) -> Filled:
        """What became of a job that is through."""
        assert job.logits is not None
        prompt = job.prompt
        seen = None
        if self._penalty != 1 and prompt.whole is not None:
            seen = prompt.whole.unique()
        return Filled(tuple(job.kv), prompt.positions[:, -1] + 1, job.logits, job.reused, seen)

    def _advance(self, plan: Sequence[tuple[PrefillJob, int]], hidden: Tensor) -> list[PrefillJob]:
        ended, at, row = [], [], 0
        for job, n in plan:
            row += n
            if job.left == n:
                ended.append(job)
                at.append(row - 1)
        if ended:  # before anything counts as read: it may fail
            found = logits(self._output, self.decoder, hidden[at])
            for job, mine in zip(ended, found, strict=True):
                job.logits = mine
        for job, n in plan:
            job.done += n
        return ended


def _one(job: PrefillJob) -> float:
    return 1.0


def reusable(length: int) -> int:
    """How much of a prompt of that length can be there before: its last token must be read."""
    return (length - 1) // BLOCK * BLOCK


def logits(output: Any, decoder: Any, hidden: Tensor) -> Tensor:
    """Logits `[B, V]` float32 of last hidden states `[B, D]`."""
    found: Tensor = output(hidden).float()
    cap = getattr(decoder.config, "final_logit_softcapping", None)
    return found if cap is None else cap * torch.tanh(found / cap)


@torch.inference_mode()
def token_bytes(prefiller: Prefiller) -> int:
    """Bytes of keys and values of one token, measured."""
    embed = prefiller.decoder.get_input_embeddings()
    table = embed.weight
    wide = hasattr(getattr(prefiller.decoder, "rotary_emb", None), "mrope_section")
    places = torch.arange(2, device=table.device).expand(3 if wide else 1, -1)
    ids = torch.zeros(2, dtype=torch.int64, device=table.device)
    (filled,) = prefiller.fill([Embedded(embed(ids), places)])
    return filled.nbytes // 2


def _planes(parts: Sequence[tuple[Embedded, int, int]]) -> dict[str, Any]:
    """DeepStack features of the tokens of a pass."""
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
    kv: tuple[Tensor, ...]  # [2, H, m, d] per layer
    names: tuple[_Name, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.kv)


class Prefixes:
    """Keys and values by what the tokens before and at their end are.

    A name holds the tenant and a hash of every token, its content and its position up to there:
    two prompts share what they begin alike with, and no tenant ever meets another's.

    Args:
        limit: Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.held: Lru[_Entry] = Lru(limit, lambda entry: entry.nbytes)
        self._where: dict[_Name, list[_Name]] = {}  # entries that begin so, the newest last

    def find(
        self, tenant: str, blocks: Sequence[bytes], length: int
    ) -> tuple[tuple[Tensor, ...], int] | None:
        """The longest known beginning of a prompt: keys and values, and how many tokens count."""
        for count in range(reusable(length) // BLOCK, 0, -1):
            for place in reversed(self._where.get((tenant, blocks[count - 1]), ())):
                if (entry := self.held.get(place)) is not None:
                    return entry.kv, count * BLOCK
        self.held.misses += 1
        return None

    def put(self, tenant: str, blocks: Sequence[bytes], kv: Sequence[Tensor]) -> None:
        """Keep what a prompt left; it is not changed afterwards."""
        names = tuple((tenant, block) for block in blocks)
        entry = _Entry(tuple(kv), names)
        if not names or names[-1] in self._where or entry.nbytes > self.held.limit:
            return
        for name in names[:-1]:  # whose whole is a beginning of this one is held twice
            self._forget(self.held.drop(name))
        for name in names:
            self._where.setdefault(name, []).append(names[-1])
        self._forget(self.held.put(names[-1], entry))

    def shrink(self, limit: int) -> None:
        """Keep no more than `limit` bytes."""
        self._forget(self.held.shrink(max(0, limit)))

    def _forget(self, gone: Sequence[tuple[object, _Entry]]) -> None:
        for key, entry in gone:
            for name in entry.names:
                self._where[name] = [each for each in self._where[name] if each != key]
                if not self._where[name]:
                    del self._where[name]
