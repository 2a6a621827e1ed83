"""Prefiller: from embeddings to keys and values, a chunk of several prompts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.adapter import Adapter, adapter_for
from mmfast.models.masks import FULL, kind_of
from mmfast.serve.engine.embed import BLOCK
from mmfast.serve.engine.parts import Embedded, Filled
from mmfast.serve.engine.slots import PackCache


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


class Job:
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
        jobs = [Job(prompt) for prompt in prompts]
        while any(job.left for job in jobs):
            self.step(jobs)
        return [self.result(job) for job in jobs]

    def cost(self, job: Job, tokens: int = 1) -> float:
        """Work on the next tokens of a job, in tokens that have nothing before them."""
        return tokens * (self._even + job.done) / self._even

    def plan(self, jobs: Sequence[Job], waited: bool = False) -> list[tuple[Job, int]]:
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
    def step(self, jobs: Sequence[Job]) -> list[Job]:
        """One pass over at most a chunk of tokens; the jobs that it ended."""
        return self.run(self.plan(jobs))

    @torch.inference_mode()
    def run(self, plan: Sequence[tuple[Job, int]]) -> list[Job]:
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

    def result(self, job: Job) -> Filled:
        """What became of a job that is through."""
        assert job.logits is not None
        prompt = job.prompt
        seen = None
        if self._penalty != 1 and prompt.whole is not None:
            seen = prompt.whole.unique()
        return Filled(tuple(job.kv), prompt.positions[:, -1] + 1, job.logits, job.reused, seen)

    def _advance(self, plan: Sequence[tuple[Job, int]], hidden: Tensor) -> list[Job]:
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


def _one(job: Job) -> float:
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
