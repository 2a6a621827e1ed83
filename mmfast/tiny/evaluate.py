"""Measure a model on questions about unseen clips, with all visual tokens and with fewer."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from mmfast.frontends.video import read_video
from mmfast.tiny.questions import KINDS, WORDINGS, facts
from mmfast.tiny.render import draw
from mmfast.tiny.scene import EVAL, SAMPLED, make_scene
from mmfast.tiny.table import make_table
from mmfast.tiny.video_io import encode

SUITE = "tiny-video"
HOME = Path(__file__).resolve().parents[2] / "assets" / "models" / "tiny-video"
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
    """A model under test with its processor."""

    def __init__(self, model: str | Path | None = None, device: str = "cpu") -> None:
        from transformers import AutoProcessor, LlavaOnevisionForConditionalGeneration

        self.name = SUITE if model is None else str(model)
        path = str(HOME if model is None else model)
        self.model = LlavaOnevisionForConditionalGeneration.from_pretrained(path).to(device).eval()
        self.processor = AutoProcessor.from_pretrained(path)
        self.device = device

    def inputs(self, cases: Sequence[Case]) -> Any:
        """Processor output for a batch of cases, padded on the left."""
        videos = [list(read_video(case.clip, frames=SAMPLED).frames) for case in cases]
        texts = [
            self.processor.apply_chat_template(
                [
                    {
                        "role": "user",
                        "content": [{"type": "video"}, {"type": "text", "text": case.question}],
                    }
                ],
                add_generation_prompt=True,
            )
            for case in cases
        ]
        batch = self.processor(text=texts, videos=videos, return_tensors="pt", padding=True)
        return batch.to(self.device)

    @torch.inference_mode()
    def answers(self, inputs: Any) -> list[str]:
        """Greedy answers as plain text."""
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=8)
        new = out[:, inputs["input_ids"].shape[1] :]
        return [
            t.strip().lower() for t in self.processor.batch_decode(new, skip_special_tokens=True)
        ]

    @torch.inference_mode()
    def first_token_ms(self, inputs: Any) -> float:
        """Wall time of one batch's prefill and first token, per question."""
        start = time.perf_counter()
        self.model.generate(**inputs, do_sample=False, max_new_tokens=1)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / len(inputs["input_ids"])


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
    cases = suite(n, seed)
    batches = [cases[i : i + BATCH] for i in range(0, n, BATCH)]
    prepared = [(batch, subject.inputs(batch)) for batch in batches]
    rows = [_row(subject, prepared, spec, progress) for spec in wanted]
    return {"suite": SUITE, "n": n, "seed": seed, "model": subject.name, "rows": rows}


def _row(
    subject: Subject,
    prepared: Sequence[tuple[Sequence[Case], Any]],
    spec: str | None,
    progress: Callable[[str, int, int], None] | None,
) -> dict[str, Any]:
    right: dict[str, list[bool]] = defaultdict(list)
    kept: list[float] = []
    times: list[float] = []
    total = sum(len(batch) for batch, _ in prepared)
    for batch, inputs in prepared:
        with _attached(subject.model, spec) as trace:
            answers = subject.answers(inputs)
            kept.append(_visual_tokens(subject, inputs, trace))
        with _attached(subject.model, spec):
            times.append(subject.first_token_ms(inputs))
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


def _attached(model: Any, spec: str | None) -> Any:
    if spec is None:
        return nullcontext()
    from mmfast.attach import attach

    return attach(model, reduce=spec)


def _visual_tokens(subject: Subject, inputs: Any, trace: Any) -> float:
    """Visual tokens a question that the last reduction left."""
    visual = int((inputs["input_ids"] == subject.model.config.video_token_id).sum())
    size = len(inputs["input_ids"])
    if trace is None or not trace.reductions:
        return visual / size - 1  # the newline token is no picture
    last = trace.reductions[-1][0]
    left = [int(r.keep.shape[-1]) for site, _, r in trace.reductions if site == last]
    return sum(left) / size
