"""Draft modules with attention, `mtp`, taught by what the speech model says itself.

Backbone and ear stay as they are. It says texts of the domain, greedily; the modules learn to
guess the tokens that it chose, for it is the backbone that accepts or refuses their drafts. The
chained modules, which have no attention, are taught in `speech_drafts` on the same texts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from mmfast.decoding.loop import BatchDecoder
from mmfast.heads.files import save_head
from mmfast.models.backbone import Backbone
from mmfast.models.backbone_heads import make_head
from mmfast.models.speech_guide import SpeechGuide
from mmfast.models.speech_layout import SpeechLayout
from mmfast.tiny.optim import Mixed, schedule
from mmfast.tiny.speech_bank import Said
from mmfast.tiny.speech_lessons import Style, said_lines
from mmfast.tiny.speech_net import Net
from mmfast.tiny.speech_packing import (
    AUDIO,
    Batch,
    Line,
    buckets,
    interleave,
    passes,
    stack,
    styled,
)

Report = Callable[[dict[str, Any]], None]
MODULES = {"mtp": 5}
INNER = 160  # width of a module's feed-forward part
FADE = 0.92  # weight of a module's loss beside the one before it
ASKED = 2  # one place in so many is asked
TOKENS = 900


@dataclass(frozen=True)
class HeadCourse:
    """How long, and how fast."""

    minutes: float = 8.0
    rate: float = 2e-3
    hold: float = 0.4
    tasks: tuple[str, ...] = ("mtp", "mtp")


def said_alone(
    backbone: Backbone, layout: SpeechLayout, texts: Sequence[str], ways: Sequence[Style]
) -> list[Said]:
    """What the model says, greedily, when it is given texts: several at once."""
    groups = [layout.groups(text) for text in texts]
    guides = [SpeechGuide(layout, iter(each)) for each in groups]
    blank = [Said(way, each, []) for way, each in zip(ways, groups, strict=True)]
    prompts = [
        [layout.id("<speak>"), *styled(layout, said), *guide.opening()]
        for said, guide in zip(blank, guides, strict=True)
    ]
    decoder = BatchDecoder(backbone, None, guides)
    decoder.feed(prompts)
    for _ in decoder:
        pass
    rows = zip(blank, decoder.rows, prompts, strict=True)
    return [sorted_out(layout, said, row.history[len(p) :]) for said, row, p in rows]


def sorted_out(layout: SpeechLayout, said: Said, ids: Sequence[int]) -> Said:
    """The sound of each group, out of all that was said."""
    sounds: list[list[int]] = [[]]
    for token in ids:
        if token >= layout.base:
            sounds[-1].append(token)
        elif token >= layout.texts:
            sounds.append([])
    sounds = (sounds + [[]] * len(said.groups))[: len(said.groups)]
    return Said(said.style, said.groups, [np.array(each, np.int64) for each in sounds])


def own_words(
    backbone: Backbone, layout: SpeechLayout, count: int, seed: int, batch: int = 48
) -> list[Said]:
    """The model's own sound of so many texts, none of them of its training."""
    lines, ways = said_lines(count, seed + 100)
    order = np.argsort([len(text) for text, _ in lines])
    found: list[Said] = []
    for start in range(0, count, batch):
        part = order[start : start + batch]
        texts = [lines[i][0] for i in part]
        found += said_alone(backbone, layout, texts, [ways[i] for i in part])
    return found


class HeadTrainer:
    """Teaches all heads side by side, on what the model says."""

    def __init__(
        self, net: Net, backbone: Backbone, layout: SpeechLayout, said: list[Said], seed: int
    ) -> None:
        self.net, self.layout, self.said = net.eval(), layout, said
        torch.manual_seed(seed)
        self.heads = {
            name: make_head(name, backbone, modules=many, ffn=INNER)
            for name, many in MODULES.items()
        }
        self.parameters = {
            name: list(dict(head.named_parameters()).values()) for name, head in self.heads.items()
        }
        self.rng = np.random.default_rng([seed, 51])
        self.queue: list[Any] = []
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(2)

    def batch(self) -> Batch:
        """The next lessons."""
        if not self.queue:
            self.queue = buckets([each.length for each in self.said], TOKENS, self.rng)
        return stack([self.line(self.said[int(i)]) for i in self.queue.pop()])

    def line(self, said: Said) -> Line:
        """One of them, its text at once or late."""
        line = Line([], [])
        line.add([self.layout.id("<speak>"), *styled(self.layout, said)])
        interleave(line, self.layout, said, passes(self.rng))
        return line

    def loss(self, name: str, batch: Batch) -> tuple[Tensor, list[float]]:
        """Weighted sum over modules, and the share that each guesses right."""
        head, first = self.heads[name], self.layout.texts
        with torch.no_grad():
            embeds = self.net.embed[batch.ids]
            normed, raw = self.net(embeds, self.net.shape.layers - 1)
            chosen = linear(normed, self.net.head[first:]).argmax(-1)  # [B, L] about the next
        hidden = normed if head.reads == "normed" else raw
        owed = batch.kind == AUDIO
        total, right = hidden.new_zeros(()), []
        for k, states in enumerate(head(hidden, embeds)):
            n = batch.ids.shape[1] - 2 - k
            whole = torch.stack([owed[:, i : i + n] for i in range(k + 2)]).all(0)
            rows, places = torch.arange(len(whole))[:, None], torch.arange(n)
            whole &= (5 * rows + places + k) % ASKED == 0
            if not whole.any():
                right.append(0.0)
                continue
            logits = linear(states[:, :n][whole], self.net.head[first:])
            labels = chosen[:, k + 1 : k + 1 + n][whole]
            total = total + FADE**k * cross_entropy(logits, labels)
            right.append(float((logits.argmax(-1) == labels).float().mean()))
        return total, right

    def train(self, course: HeadCourse, report: Report, save: Callable[[], None]) -> None:
        """Teach them as long as the course says."""
        turning = {name: self._optimiser(name, course.rate) for name in self.heads}
        start = saved = time.monotonic()
        step, seen = 0, defaultdict[str, list[list[float]]](list)
        while (now := time.monotonic() - start) < 60 * course.minutes:
            batches = [self.batch() for _ in course.tasks]
            found = list(self.pool.map(self._gradients, course.tasks, batches))
            factor = schedule(now / (60 * course.minutes), hold=course.hold)
            for name, optimiser in turning.items():
                mine = [g for task, (g, _) in zip(course.tasks, found, strict=True) if task == name]
                for parameter, *parts in zip(self.parameters[name], *mine, strict=True):
                    known = [part for part in parts if part is not None]
                    parameter.grad = sum(known[1:], known[0]) / len(mine) if known else None
                optimiser.step(factor, over=self.pool.map)
            for task, (_, right) in zip(course.tasks, found, strict=True):
                seen[task].append(right)
            step += 1
            if step % 20 == 0:
                shares = {k: np.mean(v, 0).round(3).tolist() for k, v in seen.items()}
                report({"stage": "heads", "step": step, "seconds": round(now), **shares})
                seen.clear()
            if time.monotonic() - saved > 120:
                saved = time.monotonic()
                save()
        save()

    def _gradients(self, name: str, batch: Batch) -> tuple[tuple[Tensor | None, ...], list[float]]:
        total, right = self.loss(name, batch)
        return torch.autograd.grad(total, self.parameters[name], allow_unused=True), right

    def _optimiser(self, name: str, rate: float) -> Mixed:
        flat = [p for p in self.parameters[name] if p.ndim < 2]
        return Mixed([p for p in self.parameters[name] if p.ndim > 1], flat, rate)

    def save(self, folder: Path) -> None:
        """Write all heads, in float16."""
        for name, head in self.heads.items():
            path = folder / "heads" / f"{name}.safetensors"
            save_head(head, path, torch.float16)
            path.chmod(0o644)
