"""Measurement of the one-token scaling law: decoders of several sizes read few or many tokens.

The tower and the projector of the embedded video model stay as they are; features of the clips are
projected once. A cell of the grid is a decoder of one size, trained from nothing together with a
small `query_compressor` that reads no question and leaves it so many vectors a frame. Clips, their
order, questions, steps and rates are the same in all cells. A row holds the marks of each held-out
clip; `mmfast.bench.report.scaling` fits the law to the rows (arXiv 2411.03312).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from mmfast.bench import results
from mmfast.compressors.query_compressor import QueryCompressor
from mmfast.core.errors import ModelError
from mmfast.models.cost import prefill_flops
from mmfast.tiny import training
from mmfast.tiny.evaluate import interval
from mmfast.tiny.video import scene, tower
from mmfast.tiny.video.compressors import pupil
from mmfast.tiny.video.lessons import ClipSampler, Lesson, Weights, answer_from
from mmfast.tiny.video.questions import KINDS

SUITE = "scaling-law"
HEAD = 32  # width of an attention head, as in the embedded decoder
SIZES = ("32x2", "64x2", "96x3", "128x3")  # width x layers; the embedded decoder is 192x5
TOKENS = (1, 4, 9, 36)  # vectors a frame
TEXT = (0, 16, 128)  # tokens of text whose FLOPs are counted; 0: its keys and values are cached
STEPS, BATCH = 280, 8  # of a cell, and clips of a step
HELD, EACH, PART = 256, 8, 32  # clips at the end of the bank, questions about each, of a batch


def size_of(text: str) -> tuple[int, int]:
    """Width and layers of a decoder, "64x2"; ModelError for a size that cannot be built."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ModelError(f"size {text!r} is not WIDTHxLAYERS; give for example {SIZES[0]}")
    width, depth = map(int, parts)
    if width % HEAD:
        raise ModelError(f"width {width} of size {text!r} is no multiple of {HEAD}; give one")
    return width, depth


def config_of(base: Qwen2Config, width: int, depth: int) -> Qwen2Config:
    """Configuration of a decoder with the proportions of `base`, and another width and depth."""
    wide = base.intermediate_size * width // base.hidden_size
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), width // HEAD)
    changed = {"hidden_size": width, "intermediate_size": wide, "num_hidden_layers": depth}
    old = {name: value for name, value in base.to_dict().items() if name != "layer_types"}
    return Qwen2Config(**old | changed | heads)


def flops_of(config: Qwen2Config, lengths: Sequence[int]) -> list[int]:
    """FLOPs of a prefill of so many tokens each by a decoder, counted without making weights."""
    with torch.device("meta"):
        decoder = Qwen2ForCausalLM(config)
    return [prefill_flops(decoder, [n] * config.num_hidden_layers) for n in lengths]


class SizedReader(nn.Module):
    """A decoder of any size, and what makes few vectors a frame of projected features for it."""

    def __init__(self, config: Qwen2Config, features: int, tokens: int, side: int) -> None:
        super().__init__()
        self.compressor = QueryCompressor(
            features, tokens, (side, side), inner=48, heads=3, asks=False, depth=0
        )
        self.enter = nn.Linear(features, config.hidden_size)
        self.language_model = Qwen2Model(config)
        self.image_newline = nn.Parameter(0.02 * torch.randn(config.hidden_size))
        # As `answer_from` reads a model; no module of its own, so that no weight counts twice.
        self.shape = SimpleNamespace(model=self)

    @property
    def parameters_of_layers(self) -> int:
        """N of the law: weights of the decoder without embeddings."""
        return sum(each.numel() for each in self.language_model.layers.parameters())

    def forward(self, lesson: Lesson) -> Tensor:
        """Logits `[B, L, V]` at the packed questions of a lesson."""
        frames, patches = lesson.tokens.shape[1:3]
        out = self.compressor(lesson.tokens)
        at = (out.place + torch.arange(frames)[:, None] * patches).flatten(1)
        visual = self.enter(out.vectors).flatten(1, 2)
        found = answer_from(self.shape, lesson.packed, visual, at, frames * patches)
        return linear(found.states, self.language_model.embed_tokens.weight)


class SizedTask(training.Task):
    """A reader in training."""

    def __init__(
        self, reader: SizedReader, clips: ClipSampler, seed: int, options: argparse.Namespace
    ) -> None:
        self.reader, self.clips, self.options = reader, clips, options
        self.optimiser = training.Optimiser.by_layer(reader, options.rate)
        self.rng = torch.Generator().manual_seed(seed)
        clips.rng = np.random.default_rng(seed)  # equal questions in every cell
        self.count = len(clips.bank.tables) - options.held
        self.weights: Weights = dict.fromkeys(KINDS, 1.0)

    def batches(self, step: int, done: float) -> list[Lesson]:
        """Random clips and questions about them."""
        chosen = torch.randint(self.count, (self.options.batch,), generator=self.rng).tolist()
        return [self.clips.lesson(chosen, self.options.questions, self.weights)]

    def loss(self, batch: Lesson) -> tuple[Tensor, training.Figures]:
        """Cross-entropy of the answers."""
        with training.fast():
            loss = answers_loss(self.reader(batch), batch)
        return loss, {"loss": loss.item()}


def answers_loss(logits: Tensor, lesson: Lesson) -> Tensor:
    """Mean cross-entropy of the tokens of answers."""
    asked = lesson.packed.labels != scene.IGNORE
    return cross_entropy(logits[asked].float(), lesson.packed.labels[asked])


@torch.no_grad()
def examine(reader: SizedReader, exam: Sequence[Lesson]) -> results.Row:
    """Marks of a reader: right answers and questions of each clip, by kind, and the loss."""
    right, asked, losses = list[int](), list[int](), list[float]()
    marks: list[tuple[str, bool]] = []
    for lesson in exam:
        logits = reader(lesson)
        losses.append(float(answers_loss(logits, lesson)))
        for kinds, row in zip(lesson.kinds, lesson.packed.correct(logits.argmax(-1)), strict=True):
            right.append(sum(row))
            asked.append(len(row))
            marks += zip(kinds, row, strict=True)
    n, score = sum(asked), sum(right) / sum(asked)
    found = {"n": n, "score": score, "interval": interval(sum(right), n)}
    found |= {"loss": sum(losses) / len(losses), "by_kind": training.shares(marks, KINDS)}
    return found | {"right": right, "asked": asked}


def cells(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Size, tokens a frame and seed of every cell, the cheapest first."""
    found = [(s, t, seed) for seed in options.seeds for s in options.sizes for t in options.tokens]

    def cost(cell: tuple[str, int, int]) -> tuple[int, int]:
        width, depth = size_of(cell[0])
        return cell[2], width * width * depth * (cell[1] * scene.SAMPLED + 100)

    return sorted(found, key=cost)


def measure(
    cell: tuple[str, int, int],
    options: argparse.Namespace,
    config: Qwen2Config,
    clips: ClipSampler,
    exam: Sequence[Lesson],
    log: training.Report,
) -> results.Row:
    """Train and examine the reader of one cell."""
    (size, tokens, seed), (frames, patches, features) = cell, clips.tokens.shape[1:]
    torch.manual_seed(seed)
    reader = SizedReader(config, features, tokens, round(patches**0.5))
    course = training.Course(f"{size}, {tokens}", steps=options.steps, hold=0.3, warm=0.05)
    training.train(SizedTask(reader, clips, seed, options), course, log)
    visual = frames * tokens
    counted = flops_of(config, [text + visual for text in TEXT])
    row = {"size": size, "tokens": tokens, "visual": visual}
    row |= {"parameters": reader.parameters_of_layers}
    return row | {"flops": dict(zip(map(str, TEXT), counted, strict=True)), **examine(reader, exam)}


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Measure every cell that the file of rows does not have yet."""
    names = ("steps", "batch", "clips", "held", "rate", "questions")
    shared = {"model": Path(options.model).name}  # no path in a row
    shared |= {name: getattr(options, name) for name in names}
    keys = {
        cell: "{} {} {} ".format(*cell) + " ".join(map(str, shared.values()))
        for cell in cells(options)
    }
    known = results.kept_rows(options.out, SUITE)
    left = [cell for cell in keys if keys[cell] not in known]
    if not left:
        log({"stage": "nothing left to measure", "cells": len(keys)})
        return
    results.append(options.out, [])  # or refuse before the work
    model, processor = pupil(options.model)
    base = model.config.text_config
    bank, features = tower.encoded_clips(model, options.clips, 0, log)
    clips = ClipSampler(bank, features, processor.tokenizer, 0)
    weights = dict.fromkeys(KINDS, 1.0)
    held = range(len(bank.tables) - options.held, len(bank.tables))
    exam = [clips.lesson(held[at : at + PART], EACH, weights) for at in range(0, len(held), PART)]
    for cell in left:
        row = measure(cell, options, config_of(base, *size_of(cell[0])), clips, exam, log)
        head = {"suite": SUITE, "key": keys[cell], "seed": cell[2], **shared}
        results.append(options.out, [head | results.environment() | row])


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, "python -m mmfast.bench.suites.law")
    add, most = parser.add_argument, scene.CELLS**2
    add("--model", default="tiny-video", help="embedded model or checkpoint folder")
    add("--sizes", nargs="+", default=SIZES, help="of the decoder, WIDTHxLAYERS")
    add("--tokens", type=int, nargs="+", default=TOKENS, help="vectors a frame")
    add("--seeds", type=int, nargs="+", default=[0], help="of weights and of the order of clips")
    add("--out", type=Path, default=Path("scaling-law.jsonl"), help="rows; a run goes on from it")
    add("--log", type=Path, default=Path("law"), help="folder of the training log")
    add("--steps", type=int, default=STEPS, help="of every cell")
    add("--batch", type=int, default=BATCH, help="clips of a step")
    add("--questions", type=int, default=10, help="about each of them")
    add("--rate", type="rate", default=3e-3, help="of learning, at its peak")
    add("--clips", type=int, default=1256, help="of the bank, held-out ones included")
    add("--held", type=int, default=HELD, help="clips at its end that are never trained on")
    options = parser.parse_args(argv)
    if options.clips < options.held + options.batch:
        parser.error(f"--clips {options.clips} must be at least {options.held + options.batch}")
    for name in ("steps", "batch", "questions", "held"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")
    for tokens in options.tokens:
        if not 1 <= tokens <= most:
            parser.error(f"--tokens {tokens} must be 1 to {most}, the patches of a frame")
    try:
        for size in options.sizes:
            size_of(size)
    except ModelError as error:
        parser.error(f"--sizes: {error}")
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Measure the grid; rows are written one by one."""
    options = arguments(argv)
    training.Log.record(options.log, run, options, "model", "sizes", "tokens", "seeds", "steps")


if __name__ == "__main__":
    main()
