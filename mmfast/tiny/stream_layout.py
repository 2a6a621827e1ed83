"""Positions and masks of training streams: an unbounded cache, or a session's bounded one."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from mmfast.tiny.stream_decoder import Layout
from mmfast.tiny.stream_lessons import StreamLesson

PATCHES = 36  # positions of a frame, whatever is kept of it
FAR = float("-inf")


def unbounded(lesson: StreamLesson, layers: int, rng: np.random.Generator) -> Layout:
    """Everything is seen. Gaps and weights stand for hours that are not there.

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
    heavy = torch.tensor([not fact for fact in slots.fact]) & (
        torch.tensor(slots.clip) < slots.clip[-1]
    )
    weight = math.log(rng.choice([1, 4, 16, 64])) * torch.cat(
        [torch.zeros(1), heavy[frame].float()]
    )
    ages = torch.cat([torch.tensor([-1]), frame])
    near = ages[:, None] - ages[None, :] <= 2  # frames so near are not more than they are
    size = len(ages)
    own = torch.where(near, torch.zeros(()), weight.expand(size, size))
    own = own.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), FAR)
    text_at = int(start[-1]) * PATCHES + PATCHES + 1 + lesson.packed.within
    seen = _seen(lesson, weight.expand(len(lesson.tokens), -1))
    return Layout(at, own, [at] * layers, text_at, [seen] * layers)


def bounded(lesson: StreamLesson, layers: int, rng: np.random.Generator) -> tuple[Layout, Tensor]:
    """What a session's memory holds: opening, sinks, retrieved frames, window, question.

    Frames saw a window only. Each layer reads other retrieved frames, mostly the facts among
    them, at contiguous positions behind the sinks. Facts that no layer reads are not in memory.

    Returns:
        The layout, and per stream and question whether it can be answered. `[B, Q]`
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
        wish = np.array([_wish(clip[t], fact[t], lost, layer, rng) for t in stored])
        chosen = np.sort(stored[np.argsort(-wish, kind="stable")[:keep]]) if keep else stored[:0]
        place = torch.full((total,), -1)
        order = [*range(sinks), *chosen.tolist(), *range(total - window, total)]
        place[torch.tensor(order)] = torch.arange(len(order))
        here = place[frame]
        moved.append(_with_opening(here.clamp(min=0) * PATCHES + lesson.spot))
        weight = torch.zeros(batch, size)
        weight[:, 1:] = torch.where(here < 0, FAR, 0.0)
        seen.append(_seen(lesson, weight))
        held.append({int(clip[t]) for t in order})
    common = set.intersection(*held[1:])
    answerable = torch.tensor(
        [[int(t) == 0 or int(t) - 1 in common for t in row] for row in lesson.target]
    )
    end = (sinks + keep + window) * PATCHES + 1
    return Layout(at, own, moved, end + lesson.packed.within, seen), answerable


def _wish(clip: int, fact: bool, lost: set[int], layer: int, rng: np.random.Generator) -> float:
    """How much a layer wants a stored frame: facts first, some of them missed by some layers."""
    if clip in lost:
        return -1.0
    missed = rng.random() < (0.3 if layer == 0 else 0.05)
    return float(rng.random() + (1.0 if fact and not missed else 0.0))


def _with_opening(at: Tensor) -> Tensor:
    """The opening text's one token in front: [B, N] to [B, 1 + N]."""
    return torch.cat([at.new_zeros(len(at), 1), at + 1], 1)


def _seen(lesson: StreamLesson, weight: Tensor) -> Tensor:
    """Bias of the questions on prefix `[B, P]` and themselves: `[B, 1, L, P + L]`."""
    prefix = weight.shape[1]
    mask = lesson.packed.mask(prefix)
    bias = torch.zeros(mask.shape)
    bias[..., :prefix] = weight[:, None, None]
    return bias.masked_fill(~mask, FAR)
