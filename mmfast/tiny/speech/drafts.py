"""Chained draft modules without attention, taught on single places of what the model says.

With `window=1` a module sees a hidden state and the token before its guess, nothing else. So places
of many texts are mixed freely, and the backbone reads each text once for all of the training.

Draft modules with attention, `mtp`, taught by what the speech model says itself.

Backbone and ear stay as they are. It says texts of the domain, greedily; the modules learn to
guess the tokens that it chose, for it is the backbone that accepts or refuses their drafts. The
chained modules, which have no attention, are taught in `speech_drafts` on the same texts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from mmfast.decoding.loop import BatchDecoder
from mmfast.heads.base import save_head
from mmfast.models.decoder.backbone import Backbone, make_head
from mmfast.models.speech.layout import SpeechGuide, SpeechLayout
from mmfast.tiny.optim import Mixed, schedule
from mmfast.tiny.speech.bank import (
    AUDIO,
    LineBuilder,
    PaddedBatch,
    SpokenText,
    buckets,
    interleave,
    passes,
    stack,
    styled,
)
from mmfast.tiny.speech.lessons import Style, said_lines
from mmfast.tiny.speech.net import Net

MODULES, INNER = 10, 320  # of the head, and width of a module's feed-forward part
FADE = 0.88  # weight of a module's loss beside the one before it
BATCH, TOKENS = 1536, 1200
LATE = 0.5  # share of texts that are read once more, their words coming late
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class Places:
    """Places of sound, end to end.

    Attributes:
        hidden: `[N, D]` normed states of the backbone.
        ids: `[N]` tokens read there.
        chosen: `[N]` audio row that the backbone chooses next.
        run: `[N]` how many places from here on owe sound.
    """

    hidden: Tensor
    ids: Tensor
    chosen: Tensor
    run: Tensor


@torch.no_grad()
def places(net: Net, layout: SpeechLayout, said: Sequence[SpokenText], seed: int) -> Places:
    """What the backbone makes of texts and their sound."""
    rng = np.random.default_rng([seed, 61])
    lines = [_line(layout, each, repeat(1)) for each in said]
    late = [each for each in said if rng.random() < LATE]
    lines += [_line(layout, each, passes(rng)) for each in late]
    found: list[tuple[Tensor, ...]] = []
    for part in buckets([len(line.ids) for line in lines], TOKENS, rng):
        batch = stack([lines[int(i)] for i in part])
        normed, _ = net(net.embed[batch.ids])
        chosen = linear(normed, net.head[layout.texts :]).argmax(-1)
        for row, i in enumerate(part):
            n = len(lines[int(i)].ids)
            owes = batch.kind[row, :n] == AUDIO
            found.append((normed[row, :n], batch.ids[row, :n], chosen[row, :n], _runs(owes)))
    return Places(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _line(layout: SpeechLayout, said: SpokenText, runs: Iterator[int]) -> LineBuilder:
    line = LineBuilder([], [])
    line.add([layout.id("<speak>"), *styled(layout, said)])
    interleave(line, layout, said, runs)
    return line


def _runs(owes: Tensor) -> Tensor:
    """How many true places in a row begin at each."""
    found, many = [], 0
    for value in reversed(owes.tolist()):
        many = many + 1 if value else 0
        found.append(many)
    return torch.tensor(found[::-1])


class DraftTrainer:
    """Teaches an `mctp` head of a backbone; the backbone's weights, as `net`, stay as they are."""

    def __init__(self, net: Net, backbone: Backbone, layout: SpeechLayout, seed: int) -> None:
        self.net, self.first = net.requires_grad_(False), layout.texts
        torch.manual_seed(seed)
        self.head = make_head("mctp", backbone, modules=MODULES, ffn=INNER, window=1)
        unused = ("q_proj", "k_proj")  # of a place that sees itself alone
        named = dict(self.head.named_parameters())
        self.parameters = [p for name, p in named.items() if not any(u in name for u in unused)]
        self.rng = np.random.default_rng([seed, 62])
        self.index = np.zeros(0, np.int64)

    def batch(self, data: Places, size: int) -> Tensor:
        """Places in random order, each once before any comes again."""
        if len(self.index) < size:
            self.index = self.rng.permutation(np.flatnonzero(data.run.numpy() > 1))
        now, self.index = self.index[:size], self.index[size:]
        return torch.from_numpy(now)

    def loss(self, data: Places, at: Tensor) -> tuple[Tensor, list[float]]:
        """Weighted sum over modules, and the share that each guesses right."""
        head, trunk, norm = self.head, self.net.head[self.first :], self.head.trunk.final_norm
        hidden, total, right = data.hidden[at], torch.zeros(()), []
        for k in range(head.modules_count):
            keep = data.run[at] > k + 1
            at, hidden = at[keep], hidden[keep]
            pair = head.norms_e[k](self.net.embed[data.ids[at + k + 1]]), head.norms_h[k](hidden)
            hidden = norm(alone(head.layers[k], head.projs[k](torch.cat(pair, -1))))
            logits, labels = linear(hidden, trunk), data.chosen[at + k + 1]
            total = total + FADE**k * cross_entropy(logits, labels)
            right.append(float((logits.argmax(-1) == labels).float().mean()))
        return total, right

    def train(
        self, data: Places, held: Places, minutes: float, rate: float, report: Report
    ) -> None:
        """Teach it so long; `held` is what it is judged by at the end."""
        flat = [p for p in self.parameters if p.ndim < 2]
        optimiser = Mixed([p for p in self.parameters if p.ndim > 1], flat, rate)
        start, step, seen = time.monotonic(), 0, list[list[float]]()
        while (now := time.monotonic() - start) < 60 * minutes:
            total, right = self.loss(data, self.batch(data, BATCH))
            found = torch.autograd.grad(total, self.parameters)
            for parameter, gradient in zip(self.parameters, found, strict=True):
                parameter.grad = gradient
            optimiser.step(schedule(now / (60 * minutes), hold=0.3))
            seen.append(right)
            step += 1
            if step % 50 == 0:
                shares = np.mean(seen, 0).round(3).tolist()
                report({"stage": "drafts", "step": step, "seconds": round(now), "mctp": shares})
                seen.clear()
        report({"stage": "drafts", "held": True, "mctp": self.right(held)})

    @torch.no_grad()
    def right(self, data: Places) -> list[float]:
        """The share that each module guesses right."""
        found = self.loss(data, torch.arange(len(data.run))[data.run > 1])[1]
        return [round(share, 3) for share in found]

    def save(self, folder: Path) -> None:
        """Write the head, in float16."""
        path = folder / "heads" / "mctp.safetensors"
        save_head(self.head, path, torch.float16)
        path.chmod(0o644)


def alone(layer: Any, x: Tensor) -> Tensor:
    """A Llama-like layer where every place sees itself alone."""
    attention: nn.Module = layer.self_attn
    values = attention.v_proj(layer.input_layernorm(x))  # type: ignore[operator]
    x = x + attention.o_proj(values)  # type: ignore[operator]
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


HEAD_MODULES = {"mtp": 5}
HEAD_INNER = 160  # width of a module's feed-forward part
HEAD_FADE = 0.92  # weight of a module's loss beside the one before it
ASKED = 2  # one place in so many is asked
HEAD_TOKENS = 900


@dataclass(frozen=True)
class HeadCourse:
    """How long, and how fast."""

    minutes: float = 8.0
    rate: float = 2e-3
    hold: float = 0.4
    tasks: tuple[str, ...] = ("mtp", "mtp")


def said_alone(
    backbone: Backbone, layout: SpeechLayout, texts: Sequence[str], ways: Sequence[Style]
) -> list[SpokenText]:
    """What the model says, greedily, when it is given texts: several at once."""
    groups = [layout.groups(text) for text in texts]
    guides = [SpeechGuide(layout, iter(each)) for each in groups]
    blank = [SpokenText(way, each, []) for way, each in zip(ways, groups, strict=True)]
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


def sorted_out(layout: SpeechLayout, said: SpokenText, ids: Sequence[int]) -> SpokenText:
    """The sound of each group, out of all that was said."""
    sounds: list[list[int]] = [[]]
    for token in ids:
        if token >= layout.base:
            sounds[-1].append(token)
        elif token >= layout.texts:
            sounds.append([])
    sounds = (sounds + [[]] * len(said.groups))[: len(said.groups)]
    return SpokenText(said.style, said.groups, [np.array(each, np.int64) for each in sounds])


def own_words(
    backbone: Backbone, layout: SpeechLayout, count: int, seed: int, batch: int = 48
) -> list[SpokenText]:
    """The model's own sound of so many texts, none of them of its training."""
    lines, ways = said_lines(count, seed + 100)
    order = np.argsort([len(text) for text, _ in lines])
    found: list[SpokenText] = []
    for start in range(0, count, batch):
        part = order[start : start + batch]
        texts = [lines[i][0] for i in part]
        found += said_alone(backbone, layout, texts, [ways[i] for i in part])
    return found


class HeadTrainer:
    """Teaches all heads side by side, on what the model says."""

    def __init__(
        self, net: Net, backbone: Backbone, layout: SpeechLayout, said: list[SpokenText], seed: int
    ) -> None:
        self.net, self.layout, self.said = net.eval(), layout, said
        torch.manual_seed(seed)
        self.heads = {
            name: make_head(name, backbone, modules=many, ffn=HEAD_INNER)
            for name, many in HEAD_MODULES.items()
        }
        self.parameters = {
            name: list(dict(head.named_parameters()).values()) for name, head in self.heads.items()
        }
        self.rng = np.random.default_rng([seed, 51])
        self.queue: list[Any] = []
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(2)

    def batch(self) -> PaddedBatch:
        """The next lessons."""
        if not self.queue:
            self.queue = buckets([each.length for each in self.said], HEAD_TOKENS, self.rng)
        return stack([self.line(self.said[int(i)]) for i in self.queue.pop()])

    def line(self, said: SpokenText) -> LineBuilder:
        """One of them, its text at once or late."""
        line = LineBuilder([], [])
        line.add([self.layout.id("<speak>"), *styled(self.layout, said)])
        interleave(line, self.layout, said, passes(self.rng))
        return line

    def loss(self, name: str, batch: PaddedBatch) -> tuple[Tensor, list[float]]:
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
            total = total + HEAD_FADE**k * cross_entropy(logits, labels)
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

    def _gradients(
        self, name: str, batch: PaddedBatch
    ) -> tuple[tuple[Tensor | None, ...], list[float]]:
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
