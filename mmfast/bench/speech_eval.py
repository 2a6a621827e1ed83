"""The evaluation of a speech model: is it understood, and does it understand?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.speech_listening import Answer, listening_rows, unseen_questions
from mmfast.bench.speech_speaking import MODES, Hear, speaking_rows, unseen_lines
from mmfast.core.errors import MmfastError, unknown

TASKS = ("speaking", "listening")


def run_speech_eval(
    n: int = 100,
    seed: int = 0,
    model: Any = None,
    modes: Sequence[str] = (),
    tasks: Sequence[str] = TASKS,
    progress: Tick | None = None,
    hear: Hear | None = None,
    answer: Answer | None = None,
) -> dict[str, Any]:
    """Word errors of what a model says, and right answers to what it hears.

    Args:
        n: Unseen sentences, and as many unseen questions.
        seed: Which ones.
        model: None (the embedded model), its folder, or an object that speaks and listens.
        modes: Of MODES; all of them unless told.
        tasks: Of TASKS.
        progress: Called with a label, what is done and how much there is.
        hear: Sound to text; pocketsphinx with the grammar of the domain unless told.
        answer: Answers to questions about clips; the embedded video model's unless told.

    Returns:
        `suite`, `n`, `seed`, `model` and `rows`; see `speaking_rows` and `listening_rows`.

    Raises:
        MmfastError: An unknown mode or task, or something that has to be installed.
    """
    for what, given, known in (("mode", modes, tuple(MODES)), ("task", tasks, TASKS)):
        for name in given:
            if name not in known:
                raise MmfastError(unknown(what, name, known))
    speech, name = _load(model)
    tick = progress or (lambda label, done, total: None)
    rows: list[Row] = []
    if "speaking" in tasks:
        lines = unseen_lines(n, seed)
        rows += speaking_rows(speech, lines, hear or _recogniser(), modes or tuple(MODES), tick)
    if "listening" in tasks:
        tick("making clips", 0, n)
        rows += listening_rows(speech, unseen_questions(n, seed), answer or _answers(), tick)
    return {"suite": "speech", "n": n, "seed": seed, "model": name, "rows": rows}


def speech_eval_rows(document: dict[str, Any], environ: Row) -> list[Row]:
    """Rows for assets/results: what was measured beside what is needed to repeat it."""
    shared = {key: document[key] for key in ("suite", "n", "seed", "model")}
    return [{**shared, **environ, "method": None, "knobs": {}, **row} for row in document["rows"]]


def _load(model: Any) -> tuple[Any, str]:
    if model is not None and not isinstance(model, str | Path):
        return model, str(getattr(model, "name", type(model).__name__))
    from mmfast.models.speech.embedded import load_speech

    return load_speech(model), "tiny-speech" if model is None else Path(model).name


def _recogniser() -> Hear:
    from mmfast.bench.word_errors import Recogniser

    return Recogniser().transcribe


def _answers() -> Answer:
    from mmfast.tiny.evaluate import Subject

    subject = Subject()
    return lambda cases: subject.answers(subject.inputs(cases))
