"""Lessons about single pictures, so that the model also answers through its image path.

A picture takes another way through LLaVA-OneVision than a frame: its patches are not pooled, they
come twice (the whole picture and its only tile), and every row of the tile ends with a newline.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from mmfast.tiny.bank import Bank
from mmfast.tiny.lessons import Lesson
from mmfast.tiny.packing import pack
from mmfast.tiny.questions import WORDINGS, Fact
from mmfast.tiny.scene import COLOURS, SHAPES
from mmfast.tiny.table import Table
from mmfast.tiny.tower import scale_pixels, tower_features

# Words that a video model's vocabulary knows already: it is fixed by the questions about clips.
PLACES = ("Where is the {0}?", "In which corner is the {0}?")
COUNTS = ("How many objects are there?", "How many shapes can you see?")
NUMBERS = ("What number is on the screen?", "Which number is shown?")


def still_facts(table: Table, frame: int) -> list[tuple[Fact, tuple[str, ...]]]:
    """What can be asked about one frame, with the wordings for it."""
    there = [i for i in range(table.count) if table.alive[i, frame]]
    clear = [i for i in there if table.seen[i, frame] >= 0.6]
    found: list[tuple[Fact, tuple[str, ...]]] = []
    for i in clear:
        shape, colour = SHAPES[table.shape[i]], tuple(COLOURS)[table.colour[i]]
        if sum(table.shape[j] == table.shape[i] for j in there) == 1:
            found.append((Fact("colour", (shape,), colour), WORDINGS["colour"]))
        if sum(table.colour[j] == table.colour[i] for j in there) == 1:
            found.append((Fact("shape", (colour,), shape), WORDINGS["shape"]))
        x, y = table.place[i, frame] - 48
        if min(abs(x), abs(y)) >= 7:
            corner = f"{'top' if y < 0 else 'bottom'} {'left' if x < 0 else 'right'}"
            found.append((Fact("position", (table.name(i),), corner), PLACES))
    if there and len(clear) == len(there):
        found.append((Fact("count", (), str(len(there))), COUNTS))
    if table.shown[frame]:
        found.append((Fact("number", (), str(table.number)), NUMBERS))
    return found


class Gallery:
    """One frame of each of the first clips of a bank, as the image path encodes it."""

    def __init__(
        self,
        model: LlavaOnevisionForConditionalGeneration,
        bank: Bank,
        size: int,
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.rng = np.random.default_rng([seed, 1])
        self.times = self.rng.integers(bank.frames.shape[1], size=size)
        self.facts = [
            still_facts(t, int(f)) for t, f in zip(bank.tables[:size], self.times, strict=True)
        ]
        self.useful = [i for i, known in enumerate(self.facts) if known]
        self.tokens = self._encode(bank.frames[torch.arange(size), torch.from_numpy(self.times)])

    @torch.no_grad()
    def _encode(self, frames: Tensor) -> Tensor:
        project = self.model.model.multi_modal_projector
        parts = [
            project(tower_features(self.model, scale_pixels(part))) for part in frames.split(128)
        ]
        return torch.cat(parts).half()  # [n, P, H]

    def lesson(self, size: int, questions: int) -> Lesson:
        """A batch of pictures; the newline that ends it is added by the forward pass."""
        self.last = chosen = self.rng.choice(self.useful, size, replace=False)
        rows, kinds = [], []
        for picture in chosen:
            known = self.facts[picture]
            asked = [known[i] for i in self.rng.permutation(len(known))[:questions]]
            kinds.append([fact.kind for fact, _ in asked])
            rows.append([self._ids(fact, wordings) for fact, wordings in asked])
        base = self.tokens[torch.from_numpy(chosen)].float()  # [B, P, H]
        side = round(base.shape[1] ** 0.5)
        newline = self.model.model.image_newline.detach().expand(size, side, 1, -1)
        tile = torch.cat([base.unflatten(1, (side, side)), newline], 2).flatten(1, 2)
        shown = torch.cat([base, tile[:, :-1]], 1)[
            :, None
        ]  # [B, 1, P + rows * (columns + 1) - 1, H]
        return Lesson(shown, pack(rows), kinds, {}, torch.zeros(size, 1, dtype=torch.long), {})

    def _ids(self, fact: Fact, wordings: tuple[str, ...]) -> tuple[list[int], list[int]]:
        text = wordings[self.rng.integers(len(wordings))].format(*fact.slots)
        if self.rng.random() < 0.15:
            text = text.rstrip("?")
        return self.tokenizer.encode(text), self.tokenizer.encode(fact.answer)
