"""Does a speech model understand spoken questions? What a video model answers to what it heard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.word_errors import Errors, count_errors
from mmfast.pipelines.omni_chat import written
from mmfast.tiny.evaluate import interval
from mmfast.tiny.speech.recordings import EspeakVoice, say
from mmfast.tiny.speech.text import heard_voice, split_of, spoken_variants
from mmfast.tiny.suites import SuiteCase, suite_of

Answer = Callable[[Sequence[SuiteCase]], list[str]]
BATCH, LOOKS = 20, 40  # questions answered together; cases looked at for one that fits


@dataclass(frozen=True)
class Asked:
    """A question about a clip, and how it is spoken."""

    case: SuiteCase
    text: str
    voice: EspeakVoice


def unseen_questions(n: int, seed: int) -> list[Asked]:
    """Questions whose spoken text belongs to the evaluation half, in voices drawn at random."""
    rng, found = np.random.default_rng([78, seed]), list[Asked]()
    for looked, case in enumerate(suite_of("video").cases(seed)):
        ways = [text for text in spoken_variants(case.question) if split_of(text) == "eval"]
        if ways:
            text = ways[int(rng.integers(len(ways)))]
            found.append(Asked(case, text, heard_voice(rng)))
        if len(found) == n or looked >= LOOKS * n:
            break
    return found


def listening_rows(model: Any, asked: Sequence[Asked], answer: Answer, progress: Tick) -> list[Row]:
    """Right answers to questions typed, and to the same ones spoken.

    Args:
        model: A `Listener`.
        asked: Questions, see `unseen_questions`.
        answer: Answers of a video model to cases.
        progress: Called with a label, questions done and questions in all.
    """
    heard, errors, exact = list[SuiteCase](), Errors(), 0
    for i, each in enumerate(asked):
        text = model.transcribe(say(each.text, each.voice).pcm, 16000)
        found = count_errors(each.text, text)
        errors, exact = errors + found, exact + (found.errors == 0)
        heard.append(replace(each.case, question=written(text)))
        progress("listening", i + 1, len(asked))
    typed_row = _row("typed", [each.case for each in asked], answer, progress)
    spoken_row = _row("spoken", heard, answer, progress)
    base = typed_row["accuracy"]
    return [
        typed_row,
        {
            **spoken_row,
            "relative": spoken_row["accuracy"] / base if base else None,
            "wer": errors.rate,
            "exact": exact / max(1, len(asked)),
        },
    ]


def _row(mode: str, cases: Sequence[SuiteCase], answer: Answer, progress: Tick) -> Row:
    marks: dict[str, list[bool]] = defaultdict(list)
    for at in range(0, len(cases), BATCH):
        part = cases[at : at + BATCH]
        for case, text in zip(part, answer(part), strict=True):
            marks[case.kind].append(text == case.answer)
        progress(f"answers, {mode}", min(at + BATCH, len(cases)), len(cases))
    right = sum(sum(each) for each in marks.values())
    accuracy = right / max(1, len(cases))
    return {
        "task": "listening",
        "mode": mode,
        "score": accuracy,
        "accuracy": accuracy,
        "interval": interval(right, len(cases)) if cases else [0.0, 1.0],
        "by_kind": {kind: sum(each) / len(each) for kind, each in sorted(marks.items())},
        "questions": len(cases),
    }
