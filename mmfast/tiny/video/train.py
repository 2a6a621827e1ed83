"""Train the embedded video model: `python -m mmfast.tiny.video.train --out DIR`.

First tower and projector learn the content of every patch, then the decoder learns to answer about
clips, at last also about pictures. Two CPU cores need less than three hours.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, cat, nn
from torch.nn.functional import cross_entropy

from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.evaluate import run_eval
from mmfast.tiny.video import tower
from mmfast.tiny.video.clips import Bank, make_bank
from mmfast.tiny.video.lessons import (
    SUBSETS,
    ClipSampler,
    Lesson,
    PictureSampler,
    answer,
    answer_loss,
    choose,
    score,
)
from mmfast.tiny.video.model import Readout, make_model, make_processor
from mmfast.tiny.video.questions import KINDS, still_facts
from mmfast.tiny.video.scene import MOTION, NAMED, SAMPLED

MOTION_LAYERS = (1, 2)  # visual states after these layers predict how things move
NAME_LAYERS = (2, 3)  # and here the names in a question how the things named move
KEEPS = (0.6, 0.4, 0.25, 0.15, 0.08)  # shares of the tokens, where some are dropped


class MotionReadout(Readout):
    """Read-outs of a visual token's state: its frame, and how the thing in it moves."""

    def __init__(self, width: int) -> None:
        super().__init__(width, {"frame": SAMPLED, **MOTION, "count": 5})

    def lesson_loss(self, x: Tensor, lesson: Lesson, kept: Tensor) -> Tensor:
        """Loss on states of the kept tokens and the newline behind them: `[B, M + 1, D]`."""
        frame, visual = kept // lesson.tokens.shape[2], x[:, :-1]  # [B, M]
        total = 0.2 * self.loss(visual, {"frame": frame})
        labels = {name: lesson.motion[name].flatten(1).gather(1, kept) for name in MOTION}
        total = total + self.loss(visual, labels)
        # A token may not have seen the rest of its own frame: it predicts the count before it.
        count = lesson.motion["count"]
        before = cat([count.new_zeros(len(x), 1), count], 1)
        counted = cat([before.gather(1, frame), count[:, -1:]], 1)
        guess = self(x)["count"]
        total = total + 0.3 * cross_entropy(guess.flatten(0, 1), counted.flatten())
        return total + 0.5 * cross_entropy(guess[:, -1], counted[:, -1])


@dataclass(frozen=True)
class StagePlan:
    """Length and make-up of a stage of the decoder."""

    name: str = "language"  # in the log
    steps: int = 1290  # its length
    minutes: float | None = None  # its length instead of `steps`
    batch: int = 24  # clips of a step
    questions: int = 10  # questions about each
    rate: float = 2e-3  # peak learning rate
    hold: float = 0.5  # share of the stage after which the rate falls
    dense: float = 0.3  # weight of the read-outs inside the decoder
    stills: float = 0.0  # share of batches that are single pictures
    names: bool = False  # whether names in questions predict how the things named move
    whole: float = 0.5  # share of batches with all tokens
    warm: int = 150  # steps before tokens are dropped
    held: int = 256  # clips at the end of the bank that are never trained on

    @property
    def course(self) -> training.Course:
        """Length and pace of the stage."""
        return training.Course(self.name, self.minutes, self.steps, hold=self.hold)


POLISH = StagePlan(
    "polish", 450, rate=1.2e-3, hold=0.2, dense=0.15, stills=0.15, names=True, warm=0
)


class LanguageTask(training.Task):
    """The decoder's answers; a stage with another plan continues where the one before ended."""

    def __init__(
        self, model: Any, clips: ClipSampler, plan: StagePlan, seed: int, pictures: PictureSampler
    ) -> None:
        self.model, self.clips, self.plan, self.pictures = model.train(), clips, plan, pictures
        lm = model.model.language_model
        width = lm.config.hidden_size
        self.motion = [MotionReadout(width) for _ in MOTION_LAYERS]
        self.names = [Readout(width, NAMED) for _ in NAME_LAYERS if plan.names]
        heads = nn.ModuleList([*self.motion, *self.names])
        free = [model.model.image_newline, *heads.parameters()]
        self.optimiser = training.Optimiser.of(lm, free, plan.rate)
        self.rng = torch.Generator().manual_seed(seed)
        self.count = len(clips.bank.tables) - plan.held
        self.order = torch.empty(0, dtype=torch.long)
        self.weights = dict.fromkeys(KINDS, 1.0)
        self.exam = [
            clips.lesson(range(i, min(i + 32, self.count + plan.held)), 12, self.weights)
            for i in range(self.count, self.count + plan.held, 32)
        ]
        if plan.warm == 0:  # the model can answer already: weigh the kinds from the start
            self.look()

    def batches(self, step: int, done: float) -> list[tuple[Lesson, Tensor]]:
        """Clips, or now and then pictures, and the tokens kept of them."""
        size = self.plan.batch
        if self._chance() < self.plan.stills:
            lesson = self.pictures.lesson(self.pictures.draw(size), 6)
        else:
            if len(self.order) < size:
                self.order = torch.randperm(self.count, generator=self.rng)
            chosen, self.order = self.order[:size].tolist(), self.order[size:]
            lesson = self.clips.lesson(chosen, self.plan.questions, self.weights)
        whole = lesson.every
        if step < self.plan.warm or self._chance() < self.plan.whole:
            return [(lesson, whole)]
        share = KEEPS[int(torch.randint(len(KEEPS), (), generator=self.rng))]
        way = SUBSETS[int(torch.randint(len(SUBSETS), (), generator=self.rng))]
        kept = choose(lesson.tokens, round(share * whole.shape[1]), way, self.rng)
        return [(lesson, kept)]

    def loss(self, batch: tuple[Lesson, Tensor]) -> tuple[Tensor, training.Figures]:
        """Loss of the answers, and of the read-outs where the batch is of clips."""
        lesson, kept = batch
        found = answer(self.model, lesson, kept)
        loss = answer_loss(self.model, found.states, lesson.packed.labels)
        dense, split = loss.new_zeros(()), kept.shape[1] + 2
        if lesson.motion:
            for head, layer in zip(self.motion, MOTION_LAYERS, strict=True):
                dense = dense + head.lesson_loss(found.layers[layer][:, 1:split], lesson, kept)
            labels = {name: lesson.things[name].gather(1, lesson.packed.named) for name in NAMED}
            for names, layer in zip(self.names, NAME_LAYERS, strict=False):
                dense = dense + names.loss(found.layers[layer][:, split:], labels)
        figures = {"loss": loss.item(), "dense": dense.item(), "kept": kept.shape[1]}
        return loss + self.plan.dense * dense, figures

    def look(self) -> training.Figures:
        """Shares answered correctly; kinds that lag are asked more from now on."""
        scores = score(self.model, self.exam)
        self.weights = {kind: 0.4 + 4 * min(1 - scores.get(kind, 0.0), 0.4) for kind in KINDS}
        quarter = score(self.model, self.exam, 0.25, "diverse")
        return {"mean": sum(scores.values()) / len(scores), "kinds": scores, "quarter": quarter}

    def _chance(self) -> float:
        return float(torch.rand((), generator=self.rng))


@torch.no_grad()
def stills(model: Any, bank: Bank, count: int, tokenizer: Any, seed: int) -> PictureSampler:
    """One frame of each of the first clips of a bank as a picture."""
    times = np.random.default_rng([seed, 1]).integers(bank.frames.shape[1], size=count)
    known = [
        still_facts(table, int(time))
        for table, time in zip(bank.tables[:count], times, strict=True)
    ]
    frames = bank.frames[torch.arange(count), torch.from_numpy(times)]
    pixels = (tower.scale_pixels(part) for part in frames.split(128))
    project = model.model.multi_modal_projector
    parts = [project(tower.tower_features(model, part)) for part in pixels]
    return PictureSampler(model, cat(parts).half()[:, None], known, tokenizer, seed)


def run(out: Path, options: argparse.Namespace, log: training.Log) -> None:
    """Run all stages and leave a loadable checkpoint in `out`, also during the training."""
    seed, processor = options.seed, make_processor()
    tokenizer = processor.tokenizer
    model = make_model(len(tokenizer), seed)
    with log.stage("bank", clips=options.clips):
        show = partial(training.progress, "clips", total=options.clips)
        bank = make_bank(options.clips, seed, os.cpu_count() or 1, show)
    course = training.Course("tower", steps=options.tower_steps)
    training.train(tower.TowerTask(model, bank, seed), course, log)
    tower.scale_projector(model, bank, 0.5)
    bank = bank.first(options.decoder_clips)
    with log.stage("encode", clips=options.decoder_clips):
        tokens = tower.encode_bank(model, bank)
    pictures = stills(model, bank, min(len(bank.tables), 4000), tokenizer, seed)

    def save() -> None:
        training.save_model(model, out)
        processor.save_pretrained(out)

    for number, plan in enumerate(plans(options)):
        clips = ClipSampler(bank, tokens, tokenizer, seed + number)
        task = LanguageTask(model, clips, plan, seed + number, pictures)
        training.train(task, plan.course, log, save)


def plans(options: argparse.Namespace) -> list[StagePlan]:
    """The decoder's two stages: clips, then clips and pictures at a lower rate."""
    whole = options.steps + options.polish
    stages = ((StagePlan(), options.steps), (POLISH, options.polish))
    given = options.minutes
    return [
        replace(plan, steps=steps, minutes=None if given is None else given * steps / whole)
        for plan, steps in stages
    ]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = training.recipe_parser(__doc__, "tiny-video")
    add = parser.add_argument
    add("--clips", type=int, default=10000, help="clips that the tower learns from")
    add("--decoder-clips", type=int, default=6000, help="of them for the decoder")
    add("--tower-steps", type=int, default=520)
    add("--steps", type=int, default=StagePlan.steps, help="decoder steps on clips")
    add("--polish", type=int, default=POLISH.steps, help="with pictures, after that")
    add("--minutes", type=float, help="fit the decoder's stages into this time instead")
    add("--questions", type="count", default=400, help="of the final evaluation")
    options = parser.parse_args(argv)
    least = StagePlan.held + StagePlan.batch
    if not least <= options.decoder_clips <= options.clips:
        parser.error(
            f"--decoder-clips {options.decoder_clips} must be {least} to --clips {options.clips}"
        )
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> training.Figures:
    """Command line; returns the evaluation that the card shows."""
    options = _arguments(argv)
    log = training.Log(options.out)
    # Matrices this small gain nothing from more threads.
    torch.set_num_threads(min(os.cpu_count() or 1, 8))
    log.start(seed=options.seed)
    run(options.out, options, log)
    result = run_eval([], options.questions, options.seed, options.out)
    log({"stage": "evaluation", **result, "model": "this checkpoint"})
    log.end()
    write_card(options.out, "tiny-video")
    return result


if __name__ == "__main__":
    main()
