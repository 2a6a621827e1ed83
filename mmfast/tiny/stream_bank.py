"""Moments of endless worlds as visual tokens: what training streams are put together from."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from mmfast.tiny.questions import Fact
from mmfast.tiny.render import Bytes
from mmfast.tiny.scene import TRAIN
from mmfast.tiny.tower import pooled_tokens, scale_pixels, tower_features
from mmfast.tiny.video_io import encode
from mmfast.tiny.world import NAMES
from mmfast.tiny.world_scene import Place, fact_place, ordinary_place, present_facts, show

FACT_FRAMES, SCENE_FRAMES = 2, 4  # one second apart


@dataclass(frozen=True)
class Clips:
    """Short clips of one kind.

    Attributes:
        tokens: Visual tokens, float16 `[n, F, P, D]`.
        names: Per clip the numbers of the names (in NAMES) in it; a fact's own is the first.
        now: Per clip and frame what can be asked while it is on screen.
        number, corner: Per clip those of its fact; -1 and "" where it is an ordinary scene.
    """

    tokens: Tensor
    names: list[list[int]]
    now: list[list[list[Fact]]]
    number: list[int]
    corner: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def part(self, held: int) -> Clips:
        """All but the last `held` clips, or, where it is negative, those alone."""
        cut = slice(len(self) - held) if held > 0 else slice(len(self) + held, None)
        lists = (self.names[cut], self.now[cut], self.number[cut], self.corner[cut])
        return Clips(self.tokens[cut], *lists)


@torch.no_grad()
def encode_frames(model: Any, frames: Sequence[Bytes]) -> Tensor:
    """Pooled visual tokens of pictures [96, 96, 3]: float16 [n, P, D]."""
    parts = []
    for at in range(0, len(frames), 64):
        pixels = torch.from_numpy(np.stack(frames[at : at + 64])).permute(0, 3, 1, 2)
        parts.append(pooled_tokens(model, tower_features(model, scale_pixels(pixels))).half())
    return torch.cat(parts)


def make_clips(model: Any, facts: bool, count: int, seed: int, folder: Path | None = None) -> Clips:
    """Clips 0 to count - 1 of a seed; every other one has been through a video file.

    Args:
        model: Its tower and projector encode them.
        facts: Clips of facts, or of ordinary scenes.
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
    return Clips(encoded, names, now, numbers, corners)


def _fact(rng: np.random.Generator) -> tuple[Place, list[int], int, str]:
    mine = rng.choice(len(NAMES), 2, replace=False).tolist()
    mine = mine if rng.random() < 0.4 else mine[:1]
    other = NAMES[mine[1]] if len(mine) == 2 else None
    number = int(rng.integers(10, 100))
    place, corner = fact_place(rng, NAMES[mine[0]], number, other, 0.0)
    return place, mine, number, corner


def _scene(rng: np.random.Generator) -> tuple[Place, list[int], int, str]:
    mine = rng.choice(len(NAMES), int(rng.integers(1, 4)), replace=False).tolist()
    return ordinary_place(rng, [NAMES[i] for i in mine], 0.0), mine, -1, ""


def _through_file(frames: Sequence[Bytes]) -> list[Bytes]:
    with av.open(io.BytesIO(encode(frames, 1)), "r") as box:
        return [np.asarray(f.to_ndarray(format="rgb24"), np.uint8) for f in box.decode(video=0)]
