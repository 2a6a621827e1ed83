"""Training batches of the stream model: clips as a bounded or unbounded session sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.tiny.stream import world
from mmfast.tiny.training import progress
from mmfast.tiny.video.clips import decode, encode
from mmfast.tiny.video.lessons import PackedQuestions, pack
from mmfast.tiny.video.model import VIDEO, DecoderLayout
from mmfast.tiny.video.questions import Fact, Wordings
from mmfast.tiny.video.scene import IGNORE, TRAIN, Bytes
from mmfast.tiny.video.tower import pooled_tokens, scale_pixels, tower_features

FACT_FRAMES, SCENE_FRAMES = 2, 4  # one second apart
PATCHES = 36  # positions of a frame, whatever is kept of it
FAR = float("-inf")
NEWLINE = VIDEO  # stands for the model's newline embedding in packed questions
SEGMENTS = ((8, 5), (5, 3))  # facts and scenes of a stream whose frames are thinned, or whole
THIN = (18, 10)  # tokens of a thinned frame of a fact, of a scene
CORNERS = ("top left", "top right", "bottom left", "bottom right")
FACT_LABELS = {"name": len(world.NAMES), "tens": 10, "ones": 10, "corner": len(CORNERS)}


@dataclass(frozen=True)
class StreamClip:
    """A short clip of a fact or of an ordinary scene."""

    tokens: Tensor  # visual tokens, float16. `[F, P, D]`
    names: list[int]  # numbers of the names (in NAMES) in it; a fact's own is the first
    now: list[Fact]  # facts that can be asked while its last frame is on screen
    number: int  # of its fact; -1 in an ordinary scene
    corner: str  # of its fact; "" in an ordinary scene

    @property
    def labels(self) -> list[int]:
        """FACT_LABELS of its fact, IGNORE in an ordinary scene."""
        if self.number < 0:
            return [IGNORE] * len(FACT_LABELS)
        return [self.names[0], *divmod(self.number, 10), CORNERS.index(self.corner)]


@torch.no_grad()
def encode_frames(model: Any, frames: Sequence[Bytes]) -> Tensor:
    """Pooled visual tokens of pictures `[96, 96, 3]`: float16 `[n, P, D]`."""
    pixels = torch.from_numpy(rearrange(list(frames), "t h w c -> t c h w"))
    return pooled_tokens(model, tower_features(model, scale_pixels(pixels))).half()


def make_clips(
    model: Any, facts: bool, count: int, seed: int, folder: Path | None = None
) -> list[StreamClip]:
    """Make clips 0 to count - 1, half of them through a video file; `folder` caches frames."""
    name = "facts" if facts else "scenes"
    kept = None if folder is None else folder / f"{name}-{seed}-{count}.pt"
    known = torch.load(kept) if kept is not None and kept.exists() else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    made = []
    for index in range(count):
        rng = np.random.default_rng([TRAIN, seed, 30 + facts, index])
        moments, names, number, corner = _fact(rng) if facts else _scene(rng)
        if known is None:
            frames = [moment.frame for moment in moments]
            if index % 2:
                frames = list(decode(encode(frames, 1), len(frames)))
            tokens = encode_frames(model, frames)
        else:
            tokens = known[index]
        made.append(StreamClip(tokens, names, world.present_facts(moments[-1]), number, corner))
        progress(name, index + 1, count)
    if kept is not None and known is None:
        torch.save(torch.stack([clip.tokens for clip in made]), kept)
    return made


def _fact(rng: np.random.Generator) -> tuple[list[world.Moment], list[int], int, str]:
    names = rng.choice(len(world.NAMES), 2, replace=False).tolist()
    names = names if rng.random() < 0.4 else names[:1]
    other = world.NAMES[names[1]] if len(names) == 2 else None
    number = int(rng.integers(10, 100))
    place, corner = world.fact_place(rng, world.NAMES[names[0]], number, other, 0.0)
    start = float(rng.uniform(0, 1))
    return [world.show(place, start + i) for i in range(FACT_FRAMES)], names, number, corner


def _scene(rng: np.random.Generator) -> tuple[list[world.Moment], list[int], int, str]:
    names = rng.choice(len(world.NAMES), int(rng.integers(1, 4)), replace=False).tolist()
    place = world.ordinary_place(rng, [world.NAMES[i] for i in names], 0.0)
    start = float(rng.uniform(0, 40))
    return [world.show(place, start + i) for i in range(SCENE_FRAMES)], names, -1, ""


@dataclass(frozen=True)
class StreamSlots:
    """Layout of the streams of a batch, the same for all of them."""

    fact: list[bool]  # whether each frame shows a fact. `[T]`
    clip: list[int]  # number of the segment that each frame belongs to. `[T]`
    keep: list[int]  # tokens kept of each frame. `[T]`

    @classmethod
    def of(cls, order: Sequence[bool], thin: bool) -> StreamSlots:
        """Layout of segments in an order of facts and scenes; the present is whole."""
        sizes = [(n, fact, FACT_FRAMES if fact else SCENE_FRAMES) for n, fact in enumerate(order)]
        frames = [(n, fact) for n, fact, size in sizes for _ in range(size)]
        keep = [THIN[not fact] if thin else PATCHES for _, fact in frames]
        keep[-1] = PATCHES
        return cls([fact for _, fact in frames], [n for n, _ in frames], keep)


@dataclass(frozen=True)
class StreamLesson:
    """One batch."""

    tokens: Tensor  # kept visual tokens of all frames. `[B, N, D]`
    spot: Tensor  # place of each token in its frame. `[B, N]`
    frame: Tensor  # the frame of each token. `[N]`
    slots: StreamSlots  # layout of the streams
    packed: PackedQuestions  # the questions
    kinds: list[list[str]]  # kind of each question
    target: Tensor  # for each question 1 + the segment of its fact, 0 for the present. `[B, Q]`
    facts: Tensor  # labels of each segment. `[B, S, 4]`


class StreamSampler:
    """Batches of streams put together from clips of facts and of ordinary scenes."""

    def __init__(
        self, facts: Sequence[StreamClip], scenes: Sequence[StreamClip], tokenizer: Any, seed: int
    ) -> None:
        self.facts, self.scenes, self.tokenizer = facts, scenes, tokenizer
        self.rng = np.random.default_rng([seed, 40])
        self.texts: dict[str, list[int]] = {}

    def lesson(self, batch: int, thin: bool, questions: tuple[int, int]) -> StreamLesson:
        """A batch of streams with about so many questions on facts, and on the present."""
        order = self.order(*SEGMENTS[not thin])
        slots = StreamSlots.of(order, thin)
        streams = [self.draw(order) for _ in range(batch)]
        asked = [self._ask(clips, questions) for clips in streams]
        rows = [[(self._ids(q, True), self._ids(a)) for _, q, a, _ in row] for row in asked]
        targets = [torch.tensor([about for *_, about in row]) for row in asked]
        whole = torch.stack([torch.cat([clip.tokens for clip in clips]) for clips in streams])
        return StreamLesson(
            *_thin(whole.float(), slots.keep),
            slots,
            pack(rows),
            [[kind for kind, *_ in row] for row in asked],
            torch.nn.utils.rnn.pad_sequence(targets, batch_first=True),
            torch.tensor([[clip.labels for clip in clips] for clips in streams]),
        )

    def order(self, facts: int, scenes: int) -> list[bool]:
        """Segments that show a fact; the last one, which is the present, mostly does not."""
        order = [True] * facts + [False] * scenes
        self.rng.shuffle(order)
        if order[-1] and self.rng.random() < 0.6:
            at = order.index(False)
            order[at], order[-1] = True, False
        return order

    def draw(self, order: Sequence[bool]) -> list[StreamClip]:
        """Clips in which the name of a fact appears in that fact alone."""
        count = sum(order)
        for _ in range(1000):
            scenes = [self._any(self.scenes) for is_fact in order if not is_fact]
            facts = self._facts(count, set(chain.from_iterable(clip.names for clip in scenes)))
            if len(facts) == count:
                return [facts.pop() if is_fact else scenes.pop() for is_fact in order]
        raise MmfastError("too few clips to make a stream of; give more --facts and --scenes")

    def _facts(self, count: int, common: set[int]) -> list[StreamClip]:
        """Facts of different names that appear nowhere else, `count` or, in vain, fewer."""
        reserved, facts = set[int](), list[StreamClip]()
        for _ in range(40 * count):
            clip = self._any(self.facts)
            first, *rest = clip.names
            if first not in common | reserved and not set(rest) & reserved:
                facts.append(clip)
                reserved.add(first)
                common |= set(rest)
            if len(facts) == count:
                break
        return facts

    def _ask(
        self, clips: Sequence[StreamClip], questions: tuple[int, int]
    ) -> list[tuple[str, str, str, int]]:
        """Kind, question, answer, and 1 + the segment asked about or 0."""
        asked = []
        for at, clip in enumerate(clips, start=1):
            if clip.number >= 0:
                name = " ".join(world.NAMES[clip.names[0]])
                known = world.event_facts(name, clip.number, clip.corner)
                asked += [self._worded(f, world.PAST_WORDINGS, f.kind, at) for f in known]
        chosen = [asked[i] for i in self.rng.permutation(len(asked))[: questions[0]]]
        now = clips[-1].now
        # One count and one number a moment, but many colours: the former would be rarely asked.
        urge = [self.rng.random() + 0.7 * (fact.kind in ("count", "number")) for fact in now]
        for i in np.argsort(urge)[::-1][: questions[1]]:
            kind = world.NOW[now[i].kind]
            chosen.append(self._worded(now[i], world.NOW_WORDINGS, kind, 0))
        return chosen

    def _worded(
        self, fact: Fact, table: Wordings, kind: str, about: int
    ) -> tuple[str, str, str, int]:
        return kind, fact.ask(int(self.rng.integers(1 << 16)), table), fact.answer, about

    def _ids(self, text: str, asks: bool = False) -> list[int]:
        if text not in self.texts:
            self.texts[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return [NEWLINE, *self.texts[text]] if asks else self.texts[text]

    def _any(self, clips: Sequence[StreamClip]) -> StreamClip:
        return clips[int(self.rng.integers(len(clips)))]


def _thin(shown: Tensor, keep: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens least like their frame's mean, `[B, N, D]`, their places `[B, N]` and frames `[N]`."""
    score = (shown - shown.mean(2, keepdim=True)).norm(dim=-1)  # [B, T, P]
    score = score / score.mean(-1, keepdim=True) + 0.15 * torch.randn_like(score)
    order = score.argsort(-1, descending=True)
    spot = torch.cat([order[:, t, :count].sort(-1).values for t, count in enumerate(keep)], 1)
    frame = torch.repeat_interleave(torch.arange(len(keep)), torch.tensor(keep))
    rows = torch.arange(len(shown))[:, None]
    return shown[rows, frame, spot], spot, frame


def unbounded(lesson: StreamLesson, rng: np.random.Generator) -> DecoderLayout:
    """Layout where everything is seen; gaps and weights stand for hours that are left out.

    Segments lie far apart, and each token of an older ordinary frame counts as up to 64 like it.
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

    Each layer reads other retrieved frames, mostly the facts among them. The second result `[B, Q]`
    marks questions that can be answered: some layer reads their fact.
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
