"""Train the embedded stream model: `python -m mmfast.tiny.stream.train --out DIR`.

Starts from the video model. Tower and projector stay as they are and are run once over moments of
endless worlds; the decoder learns to answer about the present and about facts long gone, with an
unbounded cache and in the bounded layout of a session, and to make the frames of a fact easy to
find. Two CPU cores do it in under an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mmfast.models.loading import embedded_path, load
from mmfast.tiny.card_stream import write_card
from mmfast.tiny.optim import Mixed, schedule, split_parameters
from mmfast.tiny.stream.decoder import DecoderOutput, StreamLayout, run_stream
from mmfast.tiny.stream.lessons import (
    NEWLINE,
    Clips,
    StreamLesson,
    StreamSchool,
    bounded,
    make_clips,
    unbounded,
)
from mmfast.tiny.stream.needles import Setting, run_needles
from mmfast.tiny.stream.readouts import FactHead, found, retrieval_loss
from mmfast.tiny.video.build import USER
from mmfast.tiny.video.lessons import IGNORE

Report = Callable[[dict[str, Any]], None]
DEEP = (0, 1, 2, 3)  # layers after which a fact's last tokens must know all of it
# Slow rotations turn a full circle in 4,000 positions, two minutes of video. Those slower than
# 400 are stretched until they stand still for hours, so that a match counts the same at any age.
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4096.0,
    "low_freq_factor": 3.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1200,
}
POSITIONS = 1 << 20


def stretched(model: Any) -> Any:
    """The model with rotations for long streams."""
    text = model.config.text_config
    text.rope_parameters = dict(ROPE)
    text.max_position_embeddings = POSITIONS
    lm = model.model.language_model
    lm.rotary_emb = type(lm.rotary_emb)(text)
    return model


def run(model: Any, lesson: StreamLesson, layout: StreamLayout) -> DecoderOutput:
    """Embed a lesson and run the decoder on it."""
    lm, ids = model.model.language_model, lesson.packed.ids
    batch = len(ids)
    prefix = torch.cat([lm.embed_tokens(torch.full((batch, 1), USER)), lesson.tokens], 1)
    newline = (ids == NEWLINE)[..., None]
    text = torch.where(newline, model.model.image_newline, lm.embed_tokens(ids))
    return run_stream(lm, prefix, text, layout)


class StreamTrainer:
    """The loop, its losses and its looks at unseen streams."""

    def __init__(self, model: Any, school: StreamSchool, exam: StreamSchool, options: Any) -> None:
        self.model, self.school, self.exam, self.options = model, school, exam, options
        lm = model.model.language_model
        self.layers = len(lm.layers)
        width = lm.config.hidden_size
        self.heads = [FactHead(width) for _ in DEEP]
        matrices, rest = split_parameters(lm)
        free = [*rest, model.model.image_newline, *nn.ModuleList(self.heads).parameters()]
        self.optimiser = Mixed(matrices, free, options.rate)
        self.counts = (options.past, options.now)
        self.rng = np.random.default_rng([options.seed, 41])

    def train(self, report: Report, save: Callable[[], None]) -> int:
        """Train for the given minutes; returns the steps."""
        start = looked = time.monotonic()
        step, limit = 0, 60 * self.options.minutes
        while (spent := time.monotonic() - start) < limit:
            figures = self.step(spent / limit)
            step += 1
            if step % 20 == 1:
                report({"stage": "stream", "step": step, "seconds": spent, **figures})
            if time.monotonic() - looked > 60 * self.options.watch:
                looked = time.monotonic()
                report({"stage": "held-out", "step": step, **self.look()})
                save()
        report({"stage": "held-out", "step": step, **self.look()})
        save()
        return step

    def step(self, done: float) -> dict[str, Any]:
        """One update; returns its figures."""
        lesson = self.school.lesson(self.options.batch, self.rng.random() < 0.7, self.counts)
        layout, answerable = self._layout(lesson, self.rng.random() < 0.5, self.rng)
        outcome = run(self.model, lesson, layout)
        labels = lesson.packed.labels
        if answerable is not None:
            block = lesson.packed.block.clamp(min=0)
            labels = labels.masked_fill(~answerable.gather(1, block), IGNORE)
        asked = labels != IGNORE
        answer = cross_entropy(self.model.lm_head(outcome.states[asked]), labels[asked])
        match, hits = retrieval_loss(outcome, lesson)
        dense = sum(
            (h.loss(outcome.layers[i], lesson) for h, i in zip(self.heads, DEEP, strict=True)),
            answer.new_zeros(()),
        )
        (answer + self.options.match * match + 0.1 * dense).backward()
        self.optimiser.step(schedule(done, hold=self.options.hold))
        mode = "unbounded" if answerable is None else "bounded"
        return {
            "mode": mode,
            "loss": answer.item(),
            "match": match.item(),
            "dense": dense.item(),
            "top1": [round(h, 2) for h in hits],
        }

    def _layout(
        self, lesson: StreamLesson, free: bool, rng: np.random.Generator
    ) -> tuple[StreamLayout, Tensor | None]:
        if free:
            return unbounded(lesson, self.layers, rng), None
        return bounded(lesson, self.layers, rng)

    @torch.no_grad()
    def look(self) -> dict[str, Any]:
        """Shares of questions right on clips never trained on, and of facts found by keys."""
        scores: dict[str, Any] = {}
        for free in (True, False):
            rng, right = np.random.default_rng(7), defaultdict(list)
            self.exam.rng = np.random.default_rng(8)
            hits = []
            for thin in (True, False):
                lesson = self.exam.lesson(self.options.batch, thin, (12, 5))
                layout, answerable = self._layout(lesson, free, rng)
                outcome = run(self.model, lesson, layout)
                hits.append(found(outcome, lesson, 4))
                marks = lesson.packed.correct(self.model.lm_head(outcome.states).argmax(-1))
                for row, (kinds, mine) in enumerate(zip(lesson.kinds, marks, strict=True)):
                    for q, (kind, mark) in enumerate(zip(kinds, mine, strict=True)):
                        if answerable is None or bool(answerable[row, q]):
                            right[kind].append(mark)
            name = "unbounded" if free else "bounded"
            scores[name] = {k: round(sum(v) / len(v), 3) for k, v in sorted(right.items())}
            scores[f"found4 {name}"] = np.mean(hits, 0).round(3).tolist()
        return scores


def train(options: argparse.Namespace, report: Report) -> None:
    """Make the clips, train, and leave a loadable checkpoint."""
    model, processor = load(options.start or str(embedded_path("tiny-video")), "cpu", "float32")
    stretched(model)
    facts, scenes = _bank(model, options, report)
    held = min(len(facts), len(scenes)) // 8
    school = StreamSchool(facts.part(held), scenes.part(held), processor.tokenizer, options.seed)
    exam = StreamSchool(facts.part(-held), scenes.part(-held), processor.tokenizer, 1)
    processor.save_pretrained(options.out)

    def save() -> None:
        model.save_pretrained(options.out)
        (options.out / "model.safetensors").chmod(0o644)

    start = time.monotonic()
    trainer = StreamTrainer(model.train(), school, exam, options)
    steps = trainer.train(report, save)
    report({"stage": "end", "steps": steps, "seconds": time.monotonic() - start})
    if options.evaluate:
        setting = Setting(options.seconds)
        result = run_needles(n=options.evaluate, seed=9, model=options.out, setting=setting)
        report({"stage": "evaluation", **result, "model": "this checkpoint"})
    write_card(options.out)


def _bank(model: Any, options: argparse.Namespace, report: Report) -> tuple[Clips, Clips]:
    """Clips of facts and of scenes; making them takes minutes."""
    start, made = time.monotonic(), []
    for facts, count in ((True, options.facts), (False, options.scenes)):
        made.append(make_clips(model, facts, count, options.seed, options.cache))
    report({"stage": "bank", "seconds": time.monotonic() - start})
    return made[0], made[1]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tiny-stream"), help="checkpoint folder")
    parser.add_argument("--start", help="model to start from; the embedded video model")
    parser.add_argument("--cache", type=Path, help="folder that keeps encoded clips between runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--facts", type=int, default=4000, help="clips of facts")
    parser.add_argument("--scenes", type=int, default=2000, help="clips of ordinary scenes")
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--watch", type=float, default=4, help="minutes between looks")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--hold", type=float, default=0.4)
    parser.add_argument("--evaluate", type=int, default=400, help="questions at the end")
    parser.add_argument("--seconds", type=float, default=960, help="length of those streams")
    parser.add_argument("--past", type=int, default=10, help="questions a stream about facts")
    parser.add_argument("--now", type=int, default=4, help="questions a stream about the present")
    parser.add_argument("--match", type=float, default=0.2, help="weight of the key loss")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = _arguments(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "training.jsonl"
    log.unlink(missing_ok=True)

    def report(row: dict[str, Any]) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)

    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    names = ("seed", "facts", "scenes", "minutes", "batch", "rate", "match")
    settings = {name: getattr(options, name) for name in names}
    report({"stage": "start", "machine": machine, "torch": torch.__version__, **settings})
    torch.manual_seed(options.seed)
    train(options, report)


if __name__ == "__main__":
    main()
