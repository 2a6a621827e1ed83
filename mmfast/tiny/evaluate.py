"""Measure a model on questions about unseen clips, with all visual tokens and with fewer."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from mmfast.attach import attach
from mmfast.frontends.video import read_video
from mmfast.models.counts import token_counts
from mmfast.models.loading import load
from mmfast.models.prompt import Shot, build_inputs
from mmfast.models.timing import FirstToken
from mmfast.tiny.questions import KINDS, WORDINGS, facts
from mmfast.tiny.render import draw
from mmfast.tiny.scene import EVAL, SAMPLED, make_scene
from mmfast.tiny.table import make_table
from mmfast.tiny.video_io import encode

SUITE = "tiny-video"
BATCH = 20


@dataclass(frozen=True)
class Case:
    """One question about one clip."""

    clip: bytes  # an H.264 mp4 file
    question: str
    answer: str
    kind: str


def suite(n: int, seed: int) -> list[Case]:
    """Ask n questions about n clips, all kinds in turn; the same for the same seed.

    Clips come from another range of seeds than any training clip.
    """
    return [case for case, _ in zip(_cases(seed), range(n), strict=False)]


def _cases(seed: int) -> Iterator[Case]:
    clips = count()
    for number in count():
        kind = KINDS[number % len(KINDS)]
        for index in clips:
            scene = make_scene(EVAL, seed, index)
            drawing = draw(scene)
            known = [f for f in facts(make_table(scene, drawing), margin=True) if f.kind == kind]
            if not known:  # such as a number where none is on screen
                continue
            fact = known[(7 * number) % len(known)]
            wording = (number // len(KINDS)) % len(WORDINGS[kind])
            yield Case(encode(drawing.frames), fact.ask(wording), fact.answer, kind)
            break


class Subject:
    """A model under test with its processor.

    Args:
        model: A checkpoint directory or hub id, the embedded one by default.
        device: Where it runs.

    Raises:
        ModelError: It cannot be loaded.
    """

    def __init__(self, model: str | Path | None = None, device: str = "cpu") -> None:
        self.name = SUITE if model is None else str(model)
        self.model, self.processor = load(model, device, "auto")

    def inputs(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Processor output for a batch of cases, padded on the left."""
        clips = [read_video(case.clip, frames=SAMPLED) for case in cases]
        shots = [Shot("video", clip.frames, clip.metadata()) for clip in clips]
        return build_inputs(
            self.processor, shots, [case.question for case in cases], self.model.device
        )

    def answers(self, inputs: dict[str, Any]) -> list[str]:
        """Greedy answers as plain text."""
        return self.timed_answers(inputs)[0]

    @torch.inference_mode()
    def timed_answers(self, inputs: dict[str, Any]) -> tuple[list[str], float]:
        """Greedy answers, and the milliseconds to the batch's first token per question."""
        first, start = FirstToken(), time.perf_counter()
        prompt = inputs["input_ids"]
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=8, streamer=first)
        texts = self.processor.batch_decode(out[:, prompt.shape[1] :], skip_special_tokens=True)
        return [t.strip().lower() for t in texts], (first.at - start) * 1e3 / len(prompt)


def run_eval(
    specs: Sequence[str | None],
    n: int = 400,
    seed: int = 0,
    model: str | Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Accuracy with all tokens (always the first row) and under each reduction.

    Args:
        specs: reduction specs such as "divprune:0.25"; None stands for all tokens.
        n: questions.
        seed: which unseen clips.
        model: a checkpoint directory, the embedded one by default.
        progress: called with (spec, questions done, n).
        device: where the model runs.

    Returns:
        The document that `mmfast eval --json` prints: accuracy and by_kind are shares of exact
        answers, kept is the mean number of visual tokens a question, ttft_ms the median time to
        the first token a question (in batches).
    """
    wanted: list[str | None] = [None, *(spec for spec in specs if spec is not None)]
    subject = Subject(model, device)
    if progress is not None:
        progress("making clips", 0, n)
    cases = suite(n, seed)
    batches = [cases[i : i + BATCH] for i in range(0, n, BATCH)]
    prepared = [(batch, subject.inputs(batch)) for batch in batches]
    rows = [_row(subject, prepared, spec, progress) for spec in wanted]
    return {"suite": SUITE, "n": n, "seed": seed, "model": subject.name, "rows": rows}


def _row(
    subject: Subject,
    prepared: Sequence[tuple[Sequence[Case], dict[str, Any]]],
    spec: str | None,
    progress: Callable[[str, int, int], None] | None,
) -> dict[str, Any]:
    right: dict[str, list[bool]] = defaultdict(list)
    kept: list[int] = []
    times: list[float] = []
    total = sum(len(batch) for batch, _ in prepared)
    for batch, inputs in prepared:
        with attach(subject.model, spec) as trace:
            answers, ms = subject.timed_answers(inputs)
        times.append(ms)
        kept += [left for _, left in token_counts(subject.model, "video", inputs, trace)]
        for case, answer in zip(batch, answers, strict=True):
            right[case.kind].append(answer == case.answer)
        if progress is not None:
            progress(spec or "all tokens", sum(map(len, right.values())), total)
    marks = [mark for kind in right.values() for mark in kind]
    return {
        "reduce": spec,
        "accuracy": sum(marks) / len(marks),
        "by_kind": {kind: sum(right[kind]) / len(right[kind]) for kind in KINDS if right[kind]},
        "kept": sum(kept) / len(kept),
        "ttft_ms": sorted(times)[len(times) // 2],
    }
