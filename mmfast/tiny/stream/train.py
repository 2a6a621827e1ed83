"""Train the embedded stream model: `python -m mmfast.tiny.stream.train --out DIR`.

Starts from the video model; the decoder learns to answer about the present and about facts long
gone, with an unbounded cache and in the bounded layout of a session, and to make the frames of a
fact easy to find. Two CPU cores need less than an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from mmfast.models.loading import embedded_path, load
from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.stream.lessons import (
    FACT_LABELS,
    NEWLINE,
    StreamLesson,
    StreamSampler,
    bounded,
    make_clips,
    unbounded,
)
from mmfast.tiny.stream.needles import Setting, run_needles
from mmfast.tiny.video.lessons import answer_loss
from mmfast.tiny.video.model import (
    ASSISTANT,
    USER,
    DecoderLayout,
    DecoderOutput,
    Readout,
    run_decoder,
)
from mmfast.tiny.video.scene import IGNORE

FACT_LAYERS = (0, 1, 2, 3)  # after these layers a fact's last tokens predict all of it
SUMMARY = 24  # from this patch on (the last two rows of six) a token has seen its frame
# Slow rotations turn a full circle in 4,000 positions, two minutes of video. Those slower than
# 400 are stretched until they stand still for hours, so that a match counts the same at any age.
ROPE = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4096.0, "low_freq_factor": 3.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 1200,
}  # fmt: skip
POSITIONS = 1 << 20
Batch = tuple[StreamLesson, DecoderLayout, Tensor]


def stretch_rope(model: Any) -> None:
    """Give a model rotations for long streams."""
    text = model.config.text_config
    text.rope_parameters = dict(ROPE)
    text.max_position_embeddings = POSITIONS
    lm = model.model.language_model
    lm.rotary_emb = type(lm.rotary_emb)(text)


def run_lesson(model: Any, lesson: StreamLesson, layout: DecoderLayout) -> DecoderOutput:
    """Embed a batch and run the decoder on it."""
    lm, ids = model.model.language_model, lesson.packed.ids
    prefix = torch.cat([lm.embed_tokens(torch.full((len(ids), 1), USER)), lesson.tokens], 1)
    newline = (ids == NEWLINE)[..., None]
    text = torch.where(newline, model.model.image_newline, lm.embed_tokens(ids))
    return run_decoder(lm, prefix, text, layout)


def fact_labels(lesson: StreamLesson) -> dict[str, Tensor]:
    """Labels of the last tokens of a fact's frames: `[B, N]` each, IGNORE elsewhere."""
    clip = torch.tensor(lesson.slots.clip)[lesson.frame]  # [N]
    early = lesson.spot < SUMMARY
    labels = lesson.facts[:, clip].masked_fill(early[..., None], IGNORE)
    return dict(zip(FACT_LABELS, labels.unbind(-1), strict=True))


def frame_scores(outcome: DecoderOutput, lesson: StreamLesson) -> list[Tensor]:
    """Scores of the questions' mean queries on the frames' mean keys: `[B, Q, T]` a layer."""
    member = one_hot(lesson.frame).float()  # [N, T]
    share, packed = member / member.sum(0), lesson.packed
    asks = packed.block[..., None] == torch.arange(lesson.target.shape[1])  # [B, L, Q]
    # A session looks for frames when the answer is not there yet.
    marks = (packed.ids == ASSISTANT)[..., None] & asks
    ends = (marks * packed.within[..., None]).amax(1, keepdim=True)  # [B, 1, Q]
    asks = asks & (packed.within[..., None] <= ends)
    weight = asks.float() / asks.sum(1, keepdim=True).clamp(min=1)
    scores = []
    for keys, queries in zip(outcome.keys, outcome.queries, strict=True):
        frames = share.T @ keys[:, 1:]  # [B, T, D]
        scores.append(weight.mT @ queries @ frames.mT * (32**-0.5))
    return scores


def fact_frames(lesson: StreamLesson) -> tuple[Tensor, Tensor]:
    """Frames that answer each question `[B, Q, T]`, and whether it asks about a fact `[B, Q]`."""
    return lesson.target[..., None] - 1 == torch.tensor(lesson.slots.clip), lesson.target > 0


def recall(scores: Sequence[Tensor], lesson: StreamLesson, count: int) -> list[float]:
    """Share of questions with a right frame among the best `count`, for each layer."""
    right, asks = fact_frames(lesson)
    best = (score[asks].topk(count, -1).indices for score in scores)
    return [round(float(right[asks].gather(1, b).any(-1).float().mean()), 3) for b in best]


def retrieval_loss(scores: Sequence[Tensor], lesson: StreamLesson) -> Tensor:
    """Mean over layers: of all frames, those of the fact asked about must match best."""
    right, asks = fact_frames(lesson)
    logs = (score.log_softmax(-1).masked_fill(~right, float("-inf"))[asks] for score in scores)
    return torch.stack([-log.logsumexp(-1).mean() for log in logs]).mean()


class StreamTask(training.Task):
    """Answers about short streams, in the layouts of an unbounded and of a bounded session."""

    def __init__(
        self, model: Any, train: StreamSampler, exam: StreamSampler, options: argparse.Namespace
    ) -> None:
        self.model, self.train, self.exam, self.options = model.train(), train, exam, options
        lm = model.model.language_model
        self.layers = len(lm.layers)
        self.heads = [Readout(lm.config.hidden_size, FACT_LABELS) for _ in FACT_LAYERS]
        free = [model.model.image_newline, *nn.ModuleList(self.heads).parameters()]
        self.optimiser = training.Optimiser.of(lm, free, options.rate)
        self.rng = np.random.default_rng([options.seed, 41])

    def batches(self, step: int, done: float) -> list[Batch]:
        """Streams, mostly thinned, half of them in each layout."""
        counts = (self.options.past, self.options.now)
        lesson = self.train.lesson(self.options.batch, self.rng.random() < 0.7, counts)
        return [self._batch(lesson, self.rng.random() < 0.5, self.rng)]

    def _batch(self, lesson: StreamLesson, free: bool, rng: np.random.Generator) -> Batch:
        if free:
            return lesson, unbounded(lesson, rng), torch.ones_like(lesson.target, dtype=torch.bool)
        return (lesson, *bounded(lesson, self.layers, rng))

    def loss(self, batch: Batch) -> tuple[Tensor, training.Figures]:
        """Loss of the answers, of the facts' labels, and of finding the right frames by keys."""
        lesson, layout, answerable = batch
        outcome = run_lesson(self.model, lesson, layout)
        block = lesson.packed.block.clamp(min=0)
        labels = lesson.packed.labels.masked_fill(~answerable.gather(1, block), IGNORE)
        answer = answer_loss(self.model, outcome.states, labels)
        scores = frame_scores(outcome, lesson)
        match, facts = retrieval_loss(scores, lesson), fact_labels(lesson)
        dense, size = answer.new_zeros(()), lesson.tokens.shape[1]
        for head, layer in zip(self.heads, FACT_LAYERS, strict=True):
            dense = dense + head.loss(outcome.layers[layer][:, 1 : size + 1], facts)
        figures = {"loss": answer.item(), "match": match.item(), "dense": dense.item()}
        total = answer + self.options.match * match + 0.1 * dense
        return total, {**figures, "top1": recall(scores, lesson, 1)}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Shares of questions right on clips never trained on, and of facts found by keys."""
        figures: training.Figures = {}
        for name in ("unbounded", "bounded"):
            rng, marks, hits = np.random.default_rng(7), list[tuple[str, bool]](), []
            self.exam.rng = np.random.default_rng(8)
            for thin in (True, False):
                lesson = self.exam.lesson(self.options.batch, thin, (12, 5))
                lesson, layout, answerable = self._batch(lesson, name == "unbounded", rng)
                outcome = run_lesson(self.model, lesson, layout)
                hits.append(recall(frame_scores(outcome, lesson), lesson, 4))
                right = lesson.packed.correct(self.model.lm_head(outcome.states).argmax(-1))
                for kinds, row, asked in zip(lesson.kinds, right, answerable.tolist(), strict=True):
                    answers = zip(kinds, row, asked, strict=False)
                    marks += [(kind, mark) for kind, mark, ask in answers if ask]
            figures[name] = {
                kind: round(share, 3) for kind, share in training.shares(marks).items()
            }
            figures[f"found4 {name}"] = np.mean(hits, 0).round(3).tolist()
        return figures


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Make the clips, train, and leave a loadable checkpoint."""
    model, processor = load(options.start or str(embedded_path("tiny-video")), "cpu", "float32")
    stretch_rope(model)
    with log.stage("bank"):
        made = {"seed": options.seed, "folder": options.cache}
        facts = make_clips(model, True, options.facts, **made)
        scenes = make_clips(model, False, options.scenes, **made)
    held, words = min(len(facts), len(scenes)) // 8, processor.tokenizer
    streams = StreamSampler(facts[:-held], scenes[:-held], words, options.seed)
    exam = StreamSampler(facts[-held:], scenes[-held:], words, 1)
    processor.save_pretrained(options.out)
    course = training.Course("stream", options.minutes, hold=options.hold, watch=options.watch)
    task = StreamTask(model, streams, exam, options)
    steps = training.train(task, course, log, partial(training.save_model, model, options.out))
    log.end(steps=steps)
    if options.evaluate:
        setting = Setting(options.seconds)
        result = run_needles(n=options.evaluate, seed=9, model=options.out, setting=setting)
        log({"stage": "evaluation", **result, "model": "this checkpoint"})
    write_card(options.out, "tiny-stream")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = training.recipe_parser(__doc__, "tiny-stream")
    add = parser.add_argument
    add("--start", help="model to start from; the embedded video model")
    add("--cache", type=Path, help="folder that keeps encoded clips between runs")
    add("--facts", type="count", default=4000, help="clips of facts")
    add("--scenes", type="count", default=2000, help="clips of ordinary scenes")
    add("--minutes", type=float, default=45)
    add("--watch", type=float, default=4, help="minutes between looks")
    add("--batch", type="count", default=8)
    add("--rate", type="rate", default=1.5e-3)
    add("--hold", type=float, default=0.4)
    add("--evaluate", type="count", default=400, help="questions at the end")
    add("--seconds", type=float, default=960, help="length of those streams")
    add("--past", type="count", default=10, help="questions a stream about facts")
    add("--now", type="count", default=4, help="questions a stream about the present")
    add("--match", type=float, default=0.2, help="weight of the key loss")
    return parser.parse_args(argv)


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = _arguments(argv)
    log = training.Log(options.out)
    names = ("seed", "facts", "scenes", "minutes", "batch", "rate", "match")
    log.start(**{name: getattr(options, name) for name in names})
    torch.manual_seed(options.seed)
    run(options, log)


if __name__ == "__main__":
    main()
