"""Chained draft modules without attention, taught on single places of what the model says.

With `window=1` a module sees a hidden state and the token before its guess, nothing else. So places
of many texts are mixed freely, and the backbone reads each text once for all of the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from mmfast.heads.files import save_head
from mmfast.models.backbone import Backbone
from mmfast.models.backbone_heads import make_head
from mmfast.models.speech_layout import SpeechLayout
from mmfast.tiny.optim import Mixed, schedule
from mmfast.tiny.speech_bank import Said
from mmfast.tiny.speech_net import Net
from mmfast.tiny.speech_packing import AUDIO, Line, buckets, interleave, passes, stack, styled

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
def places(net: Net, layout: SpeechLayout, said: Sequence[Said], seed: int) -> Places:
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


def _line(layout: SpeechLayout, said: Said, runs: Iterator[int]) -> Line:
    line = Line([], [])
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
