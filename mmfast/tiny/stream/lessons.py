"""Training batches of the stream model: short streams put together from clips, with questions.

A batch is laid out as one of two kinds of session see a stream: an unbounded cache, or sinks,
retrieved frames and a window.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.tiny.stream.world import (
    NAMES,
    NOW,
    EndlessScene,
    fact_place,
    now_text,
    ordinary_place,
    past_text,
    present_facts,
    show,
)
from mmfast.tiny.video.clips import encode
from mmfast.tiny.video.lessons import PackedQuestions, pack
from mmfast.tiny.video.model import VIDEO, DecoderLayout
from mmfast.tiny.video.questions import Fact
from mmfast.tiny.video.scene import IGNORE, TRAIN, Bytes
from mmfast.tiny.video.tower import pooled_tokens, scale_pixels, tower_features

FACT_FRAMES, SCENE_FRAMES = 2, 4  # one second apart


@dataclass(frozen=True)
class StreamClips:
    """Short clips of one kind.

    Attributes:
        tokens: Visual tokens, float16 `[n, F, P, D]`.
        names: Numbers of the names (in NAMES) in each clip; a fact's own is the first.
        now: For each clip and frame the facts that can be asked while it is on screen.
        number, corner: Those of each clip's fact; -1 and "" where it is an ordinary scene.
    """

    tokens: Tensor
    names: list[list[int]]
    now: list[list[list[Fact]]]
    number: list[int]
    corner: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def part(self, held: int) -> StreamClips:
        """All but the last `held` clips, or, where it is negative, those alone."""
        cut = slice(len(self) - held) if held > 0 else slice(len(self) + held, None)
        lists = (self.names[cut], self.now[cut], self.number[cut], self.corner[cut])
        return StreamClips(self.tokens[cut], *lists)


@torch.no_grad()
def encode_frames(model: Any, frames: Sequence[Bytes]) -> Tensor:
    """Pooled visual tokens of pictures [96, 96, 3]: float16 [n, P, D]."""
    parts = []
    for at in range(0, len(frames), 64):
        pixels = torch.from_numpy(np.stack(frames[at : at + 64])).permute(0, 3, 1, 2)
        parts.append(pooled_tokens(model, tower_features(model, scale_pixels(pixels))).half())
    return torch.cat(parts)


def make_clips(
    model: Any, facts: bool, count: int, seed: int, folder: Path | None = None
) -> StreamClips:
    """Clips 0 to count - 1 of a seed; every other one has been through a video file.

    Args:
        model: Its tower and projector encode them.
        facts: StreamClips of facts, or of ordinary scenes.
        count: How many.
        seed: Of everything drawn.
        folder: Keeps their tokens between runs.
    """
    kept = (
        None if folder is None else folder / f"{'facts' if facts else 'scenes'}-{seed}-{count}.pt"
    )
    known = kept is not None and kept.exists()
    tokens, names, now, numbers, corners = [], [], [], [], []
    for index in range(count):
        rng = np.random.default_rng([TRAIN, seed, 30 + facts, index])
        place, mine, number, corner = _fact(rng) if facts else _scene(rng)
        start = float(rng.uniform(0, 1 if facts else 40))
        moments = [show(place, start + i) for i in range(FACT_FRAMES if facts else SCENE_FRAMES)]
        frames = [moment.frame for moment in moments]
        if not known:
            tokens.append(encode_frames(model, _through_file(frames) if index % 2 else frames))
        names.append(mine)
        now.append([present_facts(moment) for moment in moments])
        numbers.append(number)
        corners.append(corner)
    encoded = torch.load(kept) if kept is not None and known else torch.stack(tokens)
    if kept is not None and not known:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(encoded, kept)
    return StreamClips(encoded, names, now, numbers, corners)


def _fact(rng: np.random.Generator) -> tuple[EndlessScene, list[int], int, str]:
    mine = rng.choice(len(NAMES), 2, replace=False).tolist()
    mine = mine if rng.random() < 0.4 else mine[:1]
    other = NAMES[mine[1]] if len(mine) == 2 else None
    number = int(rng.integers(10, 100))
    place, corner = fact_place(rng, NAMES[mine[0]], number, other, 0.0)
    return place, mine, number, corner


def _scene(rng: np.random.Generator) -> tuple[EndlessScene, list[int], int, str]:
    mine = rng.choice(len(NAMES), int(rng.integers(1, 4)), replace=False).tolist()
    return ordinary_place(rng, [NAMES[i] for i in mine], 0.0), mine, -1, ""


def _through_file(frames: Sequence[Bytes]) -> list[Bytes]:
    with av.open(io.BytesIO(encode(frames, 1)), "r") as box:
        return [np.asarray(f.to_ndarray(format="rgb24"), np.uint8) for f in box.decode(video=0)]


NEWLINE = VIDEO  # stands for the model's newline embedding in packed questions
SEGMENTS = ((8, 5), (5, 3))  # facts and scenes of a stream whose frames are thinned, or whole
THIN = (18, 10)  # tokens of a thinned frame of a fact, of a scene


@dataclass(frozen=True)
class StreamSlots:
    """How the streams of a batch are laid out; the same for all of them.

    Attributes:
        fact: Whether each frame shows a fact. `[T]`
        clip: Number of the segment that each frame belongs to. `[T]`
        keep: Tokens kept of each frame. `[T]`
    """

    fact: list[bool]
    clip: list[int]
    keep: list[int]


@dataclass(frozen=True)
class StreamLesson:
    """One batch.

    Attributes:
        tokens: Kept visual tokens of all frames. `[B, N, D]`
        spot: Place of each token in its frame. `[B, N]`
        frame: The frame of each token. `[N]`
        slots: Layout of the streams.
        packed: The questions.
        kinds: Kind of each question.
        target: For each question 1 + the segment of its fact, 0 for the present. `[B, Q]`
        facts: Labels FACT_LABELS of each fact segment, IGNORE elsewhere. `[B, S, 4]`
    """

    tokens: Tensor
    spot: Tensor
    frame: Tensor
    slots: StreamSlots
    packed: PackedQuestions
    kinds: list[list[str]]
    target: Tensor
    facts: Tensor


CORNERS = ("top left", "top right", "bottom left", "bottom right")
FACT_LABELS = {"name": len(NAMES), "tens": 10, "ones": 10, "corner": len(CORNERS)}


class StreamSampler:
    """Draws batches of streams.

    Args:
        facts, scenes: What they are put together from.
        tokenizer: The checkpoint's.
        seed: Of everything drawn.
    """

    def __init__(self, facts: StreamClips, scenes: StreamClips, tokenizer: Any, seed: int) -> None:
        self.facts, self.scenes, self.tokenizer = facts, scenes, tokenizer
        self.rng = np.random.default_rng([seed, 40])
        self.texts: dict[str, list[int]] = {}

    def lesson(self, batch: int, thin: bool, questions: tuple[int, int]) -> StreamLesson:
        """A batch of streams with about so many questions on facts, and on the present."""
        facts, scenes = SEGMENTS[not thin]
        order = self._order(facts, scenes)
        slots = _slots(order, thin)
        rows: list[list[tuple[list[int], list[int]]]] = []
        kinds, targets, shown, labels = [], [], [], []
        for _ in range(batch):
            clips = self._draw(order)
            asked = self._ask(order, clips, questions)
            rows.append([(self._ids(q, True), self._ids(a)) for _, q, a, _ in asked])
            kinds.append([kind for kind, *_ in asked])
            targets.append(torch.tensor([about for *_, about in asked]))
            parts = [
                (self.facts if f else self.scenes).tokens[c]
                for f, c in zip(order, clips, strict=True)
            ]
            shown.append(torch.cat(parts).float())  # [T, P, D]
            labels.append(
                torch.tensor([self._labels(f, c) for f, c in zip(order, clips, strict=True)])
            )
        tokens, spot, frame = _thin(torch.stack(shown), slots.keep)
        target = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True)
        return StreamLesson(
            tokens, spot, frame, slots, pack(rows), kinds, target, torch.stack(labels)
        )

    def _order(self, facts: int, scenes: int) -> list[bool]:
        """Which segments show a fact; the last one, which is the present, mostly does not."""
        order = [True] * facts + [False] * scenes
        self.rng.shuffle(order)
        if order[-1] and self.rng.random() < 0.6:
            at = order.index(False)
            order[at], order[-1] = True, False
        return order

    def _draw(self, order: list[bool]) -> list[int]:
        """Clips in which the name of a fact appears in that fact alone."""
        for _ in range(1000):
            scenes = [int(self.rng.integers(len(self.scenes))) for is_fact in order if not is_fact]
            common = {name for clip in scenes for name in self.scenes.names[clip]}
            facts = self._facts(sum(order), common)
            if facts is not None:
                return [facts.pop() if is_fact else scenes.pop() for is_fact in order]
        raise MmfastError("too few clips to make a stream of; give more --facts and --scenes")

    def _facts(self, count: int, common: set[int]) -> list[int] | None:
        reserved: set[int] = set()
        facts: list[int] = []
        for _ in range(40 * count):
            clip = int(self.rng.integers(len(self.facts)))
            first, *rest = self.facts.names[clip]
            if first in common | reserved or set(rest) & reserved:
                continue
            facts.append(clip)
            if len(facts) == count:
                return facts
            reserved.add(first)
            common |= set(rest)
        return None

    def _ask(
        self, order: list[bool], clips: list[int], questions: tuple[int, int]
    ) -> list[tuple[str, str, str, int]]:
        """Kind, question, answer, and 1 + the segment asked about or 0."""
        asked = []
        for at in np.flatnonzero(order):
            clip = clips[at]
            name = " ".join(NAMES[self.facts.names[clip][0]])
            for kind, answer in (
                ("entry", str(self.facts.number[clip])),
                ("corner", self.facts.corner[clip]),
            ):
                asked.append((kind, past_text(kind, name, self._any()), answer, int(at) + 1))
        chosen = [asked[i] for i in self.rng.permutation(len(asked))[: questions[0]]]
        now = (self.facts if order[-1] else self.scenes).now[clips[-1]][-1]
        # One count and one number a moment, but many colours: the former would be rarely asked.
        urge = [self.rng.random() + 0.7 * (fact.kind in ("count", "number")) for fact in now]
        for i in np.argsort(urge)[::-1][: questions[1]]:
            text = now_text(now[i], self._any())
            chosen.append((NOW[now[i].kind], text, now[i].answer, 0))
        return chosen

    def _labels(self, is_fact: bool, clip: int) -> list[int]:
        if not is_fact:
            return [IGNORE] * len(FACT_LABELS)
        digits = divmod(self.facts.number[clip], 10)
        return [self.facts.names[clip][0], *digits, CORNERS.index(self.facts.corner[clip])]

    def _ids(self, text: str, asks: bool = False) -> list[int]:
        if text not in self.texts:
            self.texts[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return [NEWLINE, *self.texts[text]] if asks else self.texts[text]

    def _any(self) -> int:
        return int(self.rng.integers(1 << 16))


def _slots(order: list[bool], thin: bool) -> StreamSlots:
    fact, clip, keep = [], [], []
    for number, is_fact in enumerate(order):
        for _ in range(FACT_FRAMES if is_fact else SCENE_FRAMES):
            fact.append(is_fact)
            clip.append(number)
            keep.append(THIN[not is_fact] if thin else 36)
    keep[-1] = 36  # the present is whole
    return StreamSlots(fact, clip, keep)


def _thin(shown: Tensor, keep: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that differ most from the mean of their frame: [B, T, P, D] to [B, N, D]."""
    batch, _, patches, width = shown.shape
    score = (shown - shown.mean(2, keepdim=True)).norm(dim=-1)  # [B, T, P]
    score = score / score.mean(-1, keepdim=True) + 0.15 * torch.randn_like(score)
    order = score.argsort(-1, descending=True)
    tokens, spots = [], []
    for frame, count in enumerate(keep):
        spot = (
            order[:, frame, :count].sort(-1).values
            if count < patches
            else torch.arange(patches).expand(batch, -1)
        )
        tokens.append(shown[:, frame].gather(1, spot[..., None].expand(-1, -1, width)))
        spots.append(spot)
    frames = torch.repeat_interleave(torch.arange(len(keep)), torch.tensor(keep))
    return torch.cat(tokens, 1), torch.cat(spots, 1), frames


PATCHES = 36  # positions of a frame, whatever is kept of it
FAR = float("-inf")


def unbounded(lesson: StreamLesson, rng: np.random.Generator) -> DecoderLayout:
    """Layout where everything is seen; gaps and weights stand for hours that are left out.

    Segments lie up to some hundred frames apart, and each token of an older ordinary frame counts
    as up to 64 tokens like it, as it would among so many more frames.
    """
    slots, frame = lesson.slots, lesson.frame
    gaps = np.zeros(len(slots.clip), int)
    if rng.random() < 0.7:
        top = math.log(rng.choice([4, 40, 400]))
        cuts = np.flatnonzero(np.diff(slots.clip)) + 1
        gaps[cuts] = np.exp(rng.uniform(0, top, len(cuts))).astype(int) - 1
    start = torch.from_numpy(np.arange(len(gaps)) + np.cumsum(gaps))
    at = _with_opening(start[frame] * PATCHES + lesson.spot)  # [B, P]
    older = torch.tensor(slots.clip) < slots.clip[-1]
    heavy = (torch.tensor([not fact for fact in slots.fact]) & older)[frame].float()
    weight = math.log(rng.choice([1, 4, 16, 64])) * torch.cat([torch.zeros(1), heavy])
    ages = torch.cat([torch.tensor([-1]), frame])
    near = ages[:, None] - ages[None, :] <= 2  # frames so near are not more than they are
    size = len(ages)
    own = torch.where(near, torch.zeros(()), weight.expand(size, size))
    own = own.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), FAR)
    text_at = int(start[-1]) * PATCHES + PATCHES + 1 + lesson.packed.within
    return DecoderLayout(at, text_at, [lesson.packed.bias(weight.expand(len(at), -1))], own)


def bounded(
    lesson: StreamLesson, layers: int, rng: np.random.Generator
) -> tuple[DecoderLayout, Tensor]:
    """Layout of a session's memory: opening, sinks, retrieved frames, window, question.

    Frames saw a window only. Each layer reads other retrieved frames, mostly the facts among
    them, at contiguous positions behind the sinks. Facts that no layer reads are not in memory.

    Returns:
        The layout, and whether each question can be answered. `[B, Q]`
    """
    slots, frame = lesson.slots, lesson.frame
    total, batch = len(slots.clip), len(lesson.tokens)
    window = int(rng.integers(1, total // 3))
    sinks = int(rng.integers(0, 2))
    ages = torch.cat([torch.tensor([0]), frame])
    opening = torch.cat([torch.ones(1, dtype=torch.bool), frame < sinks])
    size = len(ages)
    late = torch.ones(size, size, dtype=torch.bool).triu(1)
    seen_by_frames = (ages[:, None] - ages[None, :] < window) | opening[None, :]
    own = torch.zeros(size, size).masked_fill(late | ~seen_by_frames, FAR)
    at = _with_opening(frame * PATCHES + lesson.spot)
    clip, fact = np.array(slots.clip), np.array(slots.fact)
    stored = np.arange(sinks, total - window)
    keep = max(1, round(len(stored) * rng.uniform(0.3, 1.0))) if len(stored) else 0
    lost = set(clip[fact][rng.random(fact.sum()) < 0.15].tolist())
    moved, seen, held = [], [], []
    for layer in range(layers):
        urge = np.array([_urge(clip[t], fact[t], lost, layer, rng) for t in stored])
        chosen = np.sort(stored[np.argsort(-urge, kind="stable")[:keep]]) if keep else stored[:0]
        place = torch.full((total,), -1)
        order = [*range(sinks), *chosen.tolist(), *range(total - window, total)]
        place[torch.tensor(order)] = torch.arange(len(order))
        here = place[frame]
        moved.append(_with_opening(here.clamp(min=0) * PATCHES + lesson.spot))
        weight = torch.zeros(batch, size)
        weight[:, 1:] = torch.where(here < 0, FAR, 0.0)
        seen.append(lesson.packed.bias(weight))
        held.append({int(clip[t]) for t in order})
    common = set.intersection(*held[1:])
    answerable = torch.tensor(
        [[int(t) == 0 or int(t) - 1 in common for t in row] for row in lesson.target]
    )
    end = (sinks + keep + window) * PATCHES + 1
    return DecoderLayout(at, end + lesson.packed.within, seen, own, moved), answerable


def _urge(clip: int, fact: bool, lost: set[int], layer: int, rng: np.random.Generator) -> float:
    """Rank of a stored frame in a layer: facts first, some of them missed by some layers."""
    if clip in lost:
        return -1.0
    missed = rng.random() < (0.3 if layer == 0 else 0.05)
    return float(rng.random() + (1.0 if fact and not missed else 0.0))


def _with_opening(at: Tensor) -> Tensor:
    """Put the opening text's one token in front: `[B, N]` to `[B, 1 + N]`."""
    return torch.cat([at.new_zeros(len(at), 1), at + 1], 1)
