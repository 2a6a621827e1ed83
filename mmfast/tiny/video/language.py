"""Stage 2: teach the decoder to answer, from visual tokens computed once.

A lean forward pass of the stock decoder for training: same weights, same numbers, less work.

The prefix is plainly causal and the question blocks only look at it and at themselves; running
the two apart needs no big mask, and the last layer computes the questions alone.
tests/tiny/test_tiny.py compares it with the stock forward.

Read-outs inside the decoder that make it learn motion in minutes; thrown away after training.

One answer a question says little about 288 visual tokens. A label for each of them says a lot.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, cat, nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu
from transformers import LlavaOnevisionForConditionalGeneration

from mmfast.tiny.optim import Mixed, schedule, split_parameters
from mmfast.tiny.video.build import USER
from mmfast.tiny.video.lessons import (
    WAYS,
    Gallery,
    Lesson,
    LessonSampler,
    Weights,
    choose,
    even_weights,
)
from mmfast.tiny.video.questions import KINDS
from mmfast.tiny.video.scene import IGNORE, MOTION, NAMED, SAMPLED


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _layer(
    layer: Any, x: Tensor, turn: tuple[Tensor, Tensor], bias: Tensor, split: int, start: int
) -> Tensor:
    """One decoder layer; only positions from `start` (0 or `split`) on come out."""
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
    h = rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    heads = (h.shape[0], -1, attention.config.num_attention_heads, attention.head_dim)
    cos, sin = turn
    q = attention.q_proj(h[:, start:]).view(heads)
    q = _rotate(q, cos[:, start:], sin[:, start:]).transpose(1, 2)
    k = _rotate(attention.k_proj(h).view(heads), cos, sin).transpose(1, 2)
    v = attention.v_proj(h).view(heads).transpose(1, 2)
    parts = [scaled_dot_product_attention(q[:, :, split - start :], k, v, attn_mask=bias)]
    if start < split:
        q1, k1, v1 = (t[:, :, :split] for t in (q, k, v))
        parts.insert(0, scaled_dot_product_attention(q1, k1, v1, is_causal=True))
    mixed = torch.cat(parts, 2).transpose(1, 2).flatten(2)
    x = x[:, start:] + attention.o_proj(mixed)
    norm = layer.post_attention_layernorm
    h = rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    change: Tensor = mlp.down_proj(silu(mlp.gate_proj(h)) * mlp.up_proj(h))
    return x + change


def run_decoder(
    lm: Any, prefix: Tensor, prefix_at: Tensor, text: Tensor, text_at: Tensor, mask: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Run all layers on a prefix and the questions packed behind it.

    Args:
        lm: a Qwen2Model with as many key heads as query heads.
        prefix: embeddings of the beginning, in which each token sees the earlier ones. # [B, P, D]
        prefix_at: its position ids. # [B, P]
        text: embeddings of the packed questions. # [B, L, D]
        text_at: their position ids. # [B, L]
        mask: what the questions may look at. # bool [B, 1, L, P + L]

    Returns:
        Normalised last states of the questions [B, L, D], and the states [B, P + L, D] of all
        after each layer but the last.
    """
    split, x = prefix.shape[1], torch.cat([prefix, text], 1)
    cos, sin = lm.rotary_emb(x, torch.cat([prefix_at, text_at], 1))
    turn = (cos[:, :, None], sin[:, :, None])  # [B, P + L, 1, D / heads]
    bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    states = []
    for layer in lm.layers[:-1]:
        x = _layer(layer, x, turn, bias, split, 0)
        states.append(x)
    x = _layer(lm.layers[-1], x, turn, bias, split, split)
    return lm.norm(x), states


class MotionHead(nn.Module):
    """What a visual token's state must say: its frame, and how the thing in it moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = [SAMPLED, *MOTION.values(), 5]
        self.read = nn.Linear(width, sum(self.parts))

    def loss(self, x: Tensor, lesson: Lesson, kept: Tensor) -> Tensor:
        """Loss on states of the kept tokens and the newline behind them: x [B, M + 1, D]."""
        outs = self.read(x).split(self.parts, -1)
        batch, patches = len(x), lesson.tokens.shape[2]
        frame = kept // patches  # [B, M]
        total = 0.2 * cross_entropy(outs[0][:, :-1].flatten(0, 1), frame.flatten())
        for out, name in zip(outs[1:-1], MOTION, strict=True):
            label = lesson.motion[name].flatten(1).gather(1, kept)
            if (label != IGNORE).any():
                total = total + cross_entropy(out[:, :-1].flatten(0, 1), label.flatten())
        # A token may not have seen the rest of its own frame: it owes the count up to the last.
        before = cat([lesson.count.new_zeros(batch, 1), lesson.count], 1)
        owed = cat([before.gather(1, frame), lesson.count[:, -1:]], 1)
        total = total + 0.3 * cross_entropy(outs[-1].flatten(0, 1), owed.flatten())
        return total + 0.5 * cross_entropy(outs[-1][:, -1], owed[:, -1])


class NameHead(nn.Module):
    """What the state at a name in a question must say: how the thing of that name moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, sum(NAMED.values()))

    def loss(self, x: Tensor, lesson: Lesson) -> Tensor:
        """Loss on the states of the packed questions: x [B, L, D]."""
        total = x.new_zeros(())
        named = lesson.packed.named
        for out, name in zip(self.read(x).split(list(NAMED.values()), -1), NAMED, strict=True):
            label = lesson.things[name].gather(1, named)
            if (label != IGNORE).any():
                total = total + cross_entropy(out.flatten(0, 1), label.flatten())
        return total


DEEP = (1, 2)  # decoder layers whose visual states must know how things move
NAMES = (2, 3)  # layers in which a question knows how the things that it names move
KEEPS = (0.6, 0.4, 0.25, 0.15, 0.08)


@dataclass(frozen=True)
class StagePlan:
    """Length and make-up of the stage."""

    name: str = "language"
    steps: int = 1290
    minutes: float | None = None  # instead of steps: as many as fit
    batch: int = 24
    questions: int = 10
    lr: float = 2e-3
    hold: float = 0.5  # share of the stage after which the rate falls
    dense: float = 0.3  # weight of the read-outs inside the decoder
    stills: float = 0.0  # share of batches that are single pictures
    names: bool = False  # whether questions owe how the things that they name move
    whole: float = 0.5  # share of batches that see all tokens
    warm: int = 150  # steps before tokens are dropped
    held: int = 256  # clips at the end of the bank that are never trained on
    watch: float = 4.0  # minutes between looks at those

    def done(self, step: int, seconds: float) -> float:
        """Share of the stage that is over."""
        return step / self.steps if self.minutes is None else seconds / (60 * self.minutes)


POLISH = StagePlan("polish", 450, lr=1.2e-3, hold=0.2, dense=0.15, stills=0.15, names=True, warm=0)


def forward(
    model: LlavaOnevisionForConditionalGeneration, lesson: Lesson, kept: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Last states of the questions and all states after each layer: kept [B, M]."""
    lm, packed = model.model.language_model, lesson.packed
    shown = lesson.tokens.flatten(1, 2)  # [B, N, D]
    batch, total, width = shown.shape
    visual = shown.gather(1, kept[..., None].expand(-1, -1, width))
    user = lm.embed_tokens(torch.full((batch, 1), USER))
    newline = model.model.image_newline.expand(batch, 1, width)
    prefix = torch.cat([user, visual, newline], 1)
    ends = torch.tensor([0, total + 1]).expand(batch, 2)
    prefix_at = torch.cat([ends[:, :1], kept + 1, ends[:, 1:]], 1)
    text_at = total + 2 + packed.within
    mask = packed.mask(prefix.shape[1])
    return run_decoder(lm, prefix, prefix_at, lm.embed_tokens(packed.ids), text_at, mask)


def answer_loss(
    model: LlavaOnevisionForConditionalGeneration, states: Tensor, labels: Tensor
) -> Tensor:
    """Mean over answer tokens: states [B, L, D], labels [B, L]."""
    asked = labels != IGNORE
    return cross_entropy(model.lm_head(states[asked]), labels[asked])


def every_token(lesson: Lesson) -> Tensor:
    """Indices that keep all visual tokens: [B, N]."""
    return torch.arange(lesson.tokens[0, ..., 0].numel()).expand(len(lesson.tokens), -1)


@torch.no_grad()
def score(
    model: LlavaOnevisionForConditionalGeneration, lessons: list[Lesson], keep: float, way: str
) -> dict[str, float]:
    """Share of questions right per kind, every answer token counted."""
    right: dict[str, list[bool]] = defaultdict(list)
    rng = torch.Generator().manual_seed(0)
    for lesson in lessons:
        kept = every_token(lesson)
        if keep < 1:
            kept = choose(lesson.tokens, round(keep * kept.shape[1]), way, rng)
        states, _ = forward(model, lesson, kept)
        guesses = model.lm_head(states).argmax(-1)
        for kinds, marks in zip(lesson.kinds, lesson.packed.correct(guesses), strict=True):
            for kind, mark in zip(kinds, marks, strict=True):
                right[kind].append(mark)
    return {kind: sum(right[kind]) / len(right[kind]) for kind in KINDS if right[kind]}


class LanguageTrainer:
    """The stage's loop; a second one with another plan continues where the first ended."""

    def __init__(
        self,
        model: LlavaOnevisionForConditionalGeneration,
        school: LessonSampler,
        plan: StagePlan,
        seed: int,
        gallery: Gallery | None = None,
    ) -> None:
        self.model, self.school, self.plan, self.gallery = model, school, plan, gallery
        lm = model.model.language_model
        self.heads = [MotionHead(lm.config.hidden_size) for _ in DEEP]
        self.names = [NameHead(lm.config.hidden_size) for _ in NAMES if plan.names]
        matrices, rest = split_parameters(lm)
        rest = [
            *rest,
            model.model.image_newline,
            *nn.ModuleList([*self.heads, *self.names]).parameters(),
        ]
        self.optimiser = Mixed(matrices, rest, plan.lr)
        self.rng = torch.Generator().manual_seed(seed)
        self.clips = len(school.bank.tables) - plan.held
        self.order = torch.empty(0, dtype=torch.long)
        self.weights = even_weights()

    def train(self, report: Callable[[dict[str, object]], None], save: Callable[[], None]) -> None:
        """Train as long as the plan says, looking at held-out clips now and then."""
        exam = self._exam()
        if self.plan.warm == 0:  # not a beginner
            self.weights = _weigh(_look(self.model, exam, 0, report))
        start = looked = time.monotonic()
        step = 0
        while (done := self.plan.done(step, time.monotonic() - start)) < 1:
            row = self.step(step, done)
            step += 1
            if step % 20 == 0 or step == 1:
                report({**row, "step": step, "seconds": time.monotonic() - start})
            if time.monotonic() - looked > 60 * self.plan.watch:
                looked = time.monotonic()
                self.weights = _weigh(_look(self.model, exam, step, report))
                save()
        save()
        _look(self.model, exam, step, report)

    def step(self, step: int, done: float) -> dict[str, object]:
        """One update; returns its figures."""
        still = self.gallery is not None and self._chance() < self.plan.stills
        lesson = self._next(still)
        kept = _keep(lesson, self.plan, step, self.rng)
        states, layers = forward(self.model, lesson, kept)
        loss = answer_loss(self.model, states, lesson.packed.labels)
        dense = loss.new_zeros(())
        if not still:
            for head, layer in zip(self.heads, DEEP, strict=True):
                dense = dense + head.loss(layers[layer][:, 1 : kept.shape[1] + 2], lesson, kept)
            for name_head, layer in zip(self.names, NAMES, strict=False):
                dense = dense + name_head.loss(layers[layer][:, kept.shape[1] + 2 :], lesson)
        (loss + self.plan.dense * dense).backward()
        self.optimiser.step(schedule(done, hold=self.plan.hold))
        figures = {"loss": loss.item(), "dense": dense.item(), "kept": kept.shape[1]}
        return {"stage": self.plan.name, **figures}

    def _next(self, still: bool) -> Lesson:
        size = self.plan.batch
        if still and self.gallery is not None:
            return self.gallery.lesson(size, 6)
        if len(self.order) < size:
            self.order = torch.randperm(self.clips, generator=self.rng)
        clips, self.order = self.order[:size].tolist(), self.order[size:]
        return self.school.lesson(clips, self.plan.questions, self.weights)

    def _chance(self) -> float:
        return float(torch.rand((), generator=self.rng))

    def _exam(self) -> list[Lesson]:
        """Lessons about the clips that are never trained on."""
        starts = range(self.clips, self.clips + self.plan.held, 32)
        return [self.school.lesson(list(range(i, i + 32)), 12, even_weights()) for i in starts]


def _keep(lesson: Lesson, plan: StagePlan, step: int, rng: torch.Generator) -> Tensor:
    whole = every_token(lesson)
    if step < plan.warm or float(torch.rand((), generator=rng)) < plan.whole:
        return whole
    share = KEEPS[int(torch.randint(len(KEEPS), (), generator=rng))]
    way = WAYS[int(torch.randint(len(WAYS), (), generator=rng))]
    return choose(lesson.tokens, round(share * whole.shape[1]), way, rng)


def _look(
    model: LlavaOnevisionForConditionalGeneration,
    exam: list[Lesson],
    step: int,
    report: Callable[[dict[str, object]], None],
) -> dict[str, float]:
    scores = score(model, exam, 1.0, "")
    part = score(model, exam, 0.25, "diverse")
    mean = sum(scores.values()) / len(scores)
    report({"stage": "held-out", "step": step, "mean": mean, "kinds": scores, "quarter": part})
    return scores


def _weigh(scores: dict[str, float]) -> Weights:
    """More questions of the kinds that lag."""
    return {kind: 0.4 + 4 * min(1 - scores.get(kind, 0.0), 0.4) for kind in KINDS}
