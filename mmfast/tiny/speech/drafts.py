"""Training of the draft modules on the tokens that the frozen backbone itself chooses."""

from __future__ import annotations

from collections.abc import Sequence
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
from mmfast.tiny.speech.bank import (
    AUDIO,
    PaddedBatch,
    SpokenText,
    Style,
    buckets,
    passes,
    said_lines,
    speaking_line,
    stack,
    styled,
)
from mmfast.tiny.speech.model import run_backbone, sounding
from mmfast.tiny.training import Figures, Optimiser, Task

CHAINED, CHAINED_INNER = 10, 320  # chained modules, and width of their feed-forward parts
REPEATS = 4  # times that the last chained module runs again
CHAINED_FADE = 0.88  # weight of a module's loss relative to the one before it
CHAINED_BATCH, CHAINED_TOKENS = 1536, 1200
LATE = 0.25  # share of texts that are read once more, their words coming late
PARALLEL, PARALLEL_INNER = 5, 160  # the same of the independent modules
PARALLEL_FADE = 0.92
PARALLEL_TOKENS = 900
PARALLEL_EVERY = 2  # one place in so many is trained on


def say_alone(
    backbone: Backbone, layout: SpeechLayout, texts: Sequence[str], styles: Sequence[Style]
) -> list[SpokenText]:
    """Sound that the model says greedily for several texts at once."""
    groups = [layout.groups(text) for text in texts]
    guides = [SpeechGuide(layout, iter(each)) for each in groups]
    silent = [SpokenText(style, each, []) for style, each in zip(styles, groups, strict=True)]
    prompts = [
        [layout.id("<speak>"), *styled(layout, said), *guide.opening()]
        for said, guide in zip(silent, guides, strict=True)
    ]
    decoder = BatchDecoder(backbone, None, guides)
    decoder.feed(prompts)
    for _ in decoder:
        pass
    rows = zip(silent, decoder.rows, prompts, strict=True)
    return [split_sounds(layout, said, row.history[len(p) :]) for said, row, p in rows]


def split_sounds(layout: SpeechLayout, said: SpokenText, ids: Sequence[int]) -> SpokenText:
    """Assign the codes of an utterance to the groups of its text."""
    sounds: list[list[int]] = [[]]
    for token in ids:
        if token >= layout.base:
            sounds[-1].append(token)
        elif token >= layout.texts:
            sounds.append([])
    sounds = (sounds + [[]] * len(said.groups))[: len(said.groups)]
    return SpokenText(said.style, said.groups, [np.array(each, np.int64) for each in sounds])


def own_words(backbone: Backbone, layout: SpeechLayout, count: int, seed: int) -> list[SpokenText]:
    """The model's own sound of so many texts, none of them of its training."""
    lines, styles = said_lines(count, seed + 100)
    order = np.argsort([len(text) for text, _ in lines])
    found: list[SpokenText] = []
    for start in range(0, count, 48):
        part = order[start : start + 48]
        texts = [lines[i][0] for i in part]
        found += say_alone(backbone, layout, texts, [styles[i] for i in part])
    return found


@dataclass(frozen=True, eq=False)
class SoundPlaces:
    """Places of many sequences, end to end."""

    hidden: Tensor  # normed states of the backbone. `[N, D]`
    ids: Tensor  # tokens read there. `[N]`
    chosen: Tensor  # audio row that the backbone chooses next. `[N]`
    run: Tensor  # number of places from here on that predict sound. `[N]`


@torch.no_grad()
def make_places(
    lm: Any, layout: SpeechLayout, said: Sequence[SpokenText], seed: int
) -> SoundPlaces:
    """Run the backbone over texts and their sound."""
    rng = np.random.default_rng([seed, 61])
    lines = [speaking_line(layout, each, repeat(1)) for each in said]
    late = [each for each in said if rng.random() < LATE]
    lines += [speaking_line(layout, each, passes(rng)) for each in late]
    embed, head = lm.model.embed_tokens.weight, lm.lm_head.weight[layout.texts :]
    found: list[tuple[Tensor, ...]] = []
    for part in buckets([len(line.ids) for line in lines], CHAINED_TOKENS, rng):
        batch = stack([lines[int(i)] for i in part])
        normed, _ = run_backbone(lm, embed[batch.ids])
        chosen = linear(normed, head).argmax(-1)
        for row, i in enumerate(part):
            n = len(lines[int(i)].ids)
            runs = _runs(batch.kind[row, :n] == AUDIO)
            found.append((normed[row, :n], batch.ids[row, :n], chosen[row, :n], runs))
    return SoundPlaces(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _runs(true: Tensor) -> Tensor:
    found, many = [], 0
    for value in reversed(true.tolist()):
        many = many + 1 if value else 0
        found.append(many)
    return torch.tensor(found[::-1])


class _HeadTask(Task):
    name: str

    def __init__(self, backbone: Backbone, layout: SpeechLayout, seed: int, **options: Any) -> None:
        self.lm, self.layout = backbone.model.requires_grad_(False), layout
        self.embed = self.lm.model.embed_tokens.weight
        self.rows = self.lm.lm_head.weight[layout.texts :]
        torch.manual_seed(seed)
        self.head = make_head(self.name, backbone, **options)

    def _optimise(self, rate: float, unused: Sequence[str] = ()) -> None:
        named = dict(self.head.named_parameters())
        used = [p for name, p in named.items() if not any(part in name for part in unused)]
        matrices = [p for p in used if p.ndim > 1]
        self.optimiser = Optimiser(matrices, [p for p in used if p.ndim < 2], rate)

    def save(self, folder: Path) -> None:
        path = folder / "heads" / f"{self.name}.safetensors"
        save_head(self.head, path, torch.float16)
        path.chmod(0o644)


class ChainedTask(_HeadTask):
    """An `mctp` head without attention, trained on single places of many texts.

    Of a `head` that is trained already only the last module is, for the places from its own on.
    """

    name = "mctp"

    def __init__(
        self,
        backbone: Backbone,
        layout: SpeechLayout,
        data: SoundPlaces,
        held: SoundPlaces,
        seed: int,
        rate: float = 2e-3,
        head: Any = None,
    ) -> None:
        options = {"modules": CHAINED, "repeats": REPEATS, "ffn": CHAINED_INNER, "window": 1}
        super().__init__(backbone, layout, seed, **options)
        frozen: list[str] = []
        if head is not None:
            self.head.load_state_dict(head.state_dict())
            frozen = [f".{k}." for k in range(CHAINED - 1)]
        self.first = len(frozen)  # module that is trained
        self.figure = "again" if frozen else self.name
        # The projections are unused where a place sees itself alone.
        self._optimise(rate, ("q_proj", "k_proj", *frozen))
        self.data, self.held = data, held
        self.rng = np.random.default_rng([seed, 62])
        self.index = np.zeros(0, np.int64)

    def batches(self, step: int, done: float) -> list[Tensor]:
        """Places in random order, each once before any is repeated."""
        if len(self.index) < CHAINED_BATCH:
            longer = self.data.run.numpy() > self.first + 1
            self.index = self.rng.permutation(np.flatnonzero(longer))
        now, self.index = self.index[:CHAINED_BATCH], self.index[CHAINED_BATCH:]
        return [torch.from_numpy(now)]

    def loss(self, batch: Tensor) -> tuple[Tensor, Figures]:
        """Weighted sum over modules, and the share that each predicts correctly."""
        total, right = self.judge(self.data, batch)
        return total, {self.figure: right}

    def judge(self, data: SoundPlaces, at: Tensor) -> tuple[Tensor, list[float]]:
        """Loss and shares on places of the given data."""
        head, norm = self.head, self.head.trunk.final_norm
        hidden, total, right = data.hidden[at], torch.zeros(()), []
        for k in range(head.modules_count):
            keep, part = data.run[at] > k + 1, min(k, len(head.layers) - 1)
            at, hidden = at[keep], hidden[keep]
            with torch.set_grad_enabled(torch.is_grad_enabled() and k >= self.first):
                embeds = self.embed[data.ids[at + k + 1]]
                pair = head.norms_e[part](embeds), head.norms_h[part](hidden)
                hidden = norm(alone(head.layers[part], head.projs[part](torch.cat(pair, -1))))
            if k < self.first or not len(at):
                right += [0.0] * (k >= self.first)
                continue
            logits, labels = linear(hidden, self.rows), data.chosen[at + k + 1]
            total = total + CHAINED_FADE**k * cross_entropy(logits, labels)
            right.append(float((logits.argmax(-1) == labels).float().mean()))
        return total, right

    @torch.no_grad()
    def look(self) -> Figures:
        """Share that each module predicts correctly on held-out texts."""
        places = torch.arange(len(self.held.run))[self.held.run > self.first + 1]
        return {self.figure: [round(share, 3) for share in self.judge(self.held, places)[1]]}


def alone(layer: Any, x: Tensor) -> Tensor:
    """Run a Llama-like layer where every place sees itself alone."""
    attention: nn.Module = layer.self_attn
    values = attention.v_proj(layer.input_layernorm(x))  # type: ignore[operator]
    x = x + attention.o_proj(values)  # type: ignore[operator]
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


class ParallelTask(_HeadTask):
    """An `mtp` head of independent modules with attention, trained on whole texts."""

    name = "mtp"
    parallel = True

    def __init__(
        self,
        backbone: Backbone,
        layout: SpeechLayout,
        said: Sequence[SpokenText],
        seed: int,
        rate: float = 2e-3,
    ) -> None:
        super().__init__(backbone, layout, seed, modules=PARALLEL, ffn=PARALLEL_INNER)
        self._optimise(rate)
        self.said, self.rng = said, np.random.default_rng([seed, 51])
        self.queue: list[Any] = []

    def batches(self, step: int, done: float) -> list[PaddedBatch]:
        """The next texts, in two batches."""
        return [self._batch() for _ in range(2)]

    def _batch(self) -> PaddedBatch:
        if not self.queue:
            self.queue = buckets([each.length for each in self.said], PARALLEL_TOKENS, self.rng)
        chosen = (self.said[int(i)] for i in self.queue.pop())
        return stack([speaking_line(self.layout, said, passes(self.rng)) for said in chosen])

    def loss(self, batch: PaddedBatch) -> tuple[Tensor, Figures]:
        """Weighted sum over modules, and the share that each predicts correctly."""
        with torch.no_grad():
            embeds = self.embed[batch.ids]
            normed, raw = run_backbone(self.lm, embeds, len(self.lm.model.layers) - 1)
            chosen = linear(normed, self.rows).argmax(-1)  # [B, L] for the next token
        hidden = normed if self.head.reads == "normed" else raw
        total, right = hidden.new_zeros(()), []
        for k, states in enumerate(self.head(hidden, embeds)):
            whole = sounding(batch.kind, k + 1, k, PARALLEL_EVERY)
            if not whole.any():
                right.append(0.0)
                continue
            n = whole.shape[1]
            logits = linear(states[:, :n][whole], self.rows)
            labels = chosen[:, k + 1 : k + 1 + n][whole]
            total = total + PARALLEL_FADE**k * cross_entropy(logits, labels)
            right.append(float((logits.argmax(-1) == labels).float().mean()))
        return total / 2, {self.name: right}
