"""Training of a student: a LoRA under a reduction, taught by the model that reads more.

MARC (arXiv 2510.07915) retrieves the clips that a question needs, compresses them, and distils a
student that reads the few tokens which are left from a teacher that reads more. Here any spec of
`attach` may be what the student reads, and what the teacher reads. The student is the model with a
LoRA in its decoder; the teacher is the model without it. Lessons are questions of a suite.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.core.spec import parse
from mmfast.models.adapters import save_lora, with_lora
from mmfast.models.prompt import build_inputs
from mmfast.models.reduction.inputs import encoded
from mmfast.models.reduction.training import IGNORE
from mmfast.tiny import training
from mmfast.tiny.evaluate import Inputs, Subject, in_tower
from mmfast.tiny.suites import SUITES, suite_of
from mmfast.tiny.video.questions import Fact

LESSONS = 77_000  # added to a seed, so that no evaluation asks about the same media
BATCH, SETS = 16, 8  # media that are read together, and questions about each


def answered(prompt: Inputs, answers: Sequence[Sequence[int]], pad: int) -> tuple[Inputs, Tensor]:
    """Put the tokens of answers behind left-padded prompts `[B, L]`, which stay left-padded.

    Returns the inputs, and labels `[B, W]` of the last W tokens of each row, IGNORE where they
    belong to the prompt.
    """
    width = max(map(len, answers))
    gaps = [width - len(ids) for ids in answers]
    told = torch.tensor([[*ids, *[pad] * gap] for ids, gap in zip(answers, gaps, strict=True)])
    told = told.to(prompt["input_ids"])
    inside = torch.arange(width) < width - torch.tensor(gaps)[:, None]
    behind = {"input_ids": told, "attention_mask": inside.to(prompt["attention_mask"])}

    def rolled(values: Tensor) -> Tensor:
        rows = zip(values, gaps, strict=True)
        return torch.stack([row.roll(gap) for row, gap in rows])  # what pads goes to the front

    found = dict(prompt)
    for name, value in prompt.items():
        if isinstance(value, Tensor) and value.shape == prompt["input_ids"].shape:
            found[name] = rolled(torch.cat([value, behind.get(name, torch.zeros_like(told))], 1))
    return found, rolled(told.masked_fill(~inside.to(told.device), IGNORE))


@dataclass(frozen=True)
class StudentLesson:
    """A question about each of some media, with its answer."""

    inputs: Inputs
    labels: Tensor  # of the last tokens of each row, see `answered`. `[B, W]`
    kinds: list[str]
    taught: list[Tensor] = field(default_factory=list)  # of the teacher, once it has answered

    def logits(self, model: Any) -> Tensor:
        """Logits of a model at the tokens of the answers, row by row: `[n, V]`."""
        width = self.labels.shape[1]
        out = model(**self.inputs, logits_to_keep=width + 1, use_cache=False).logits
        found: Tensor = out[:, -width - 1 : -1][self.labels != IGNORE]
        return found


class StudentSchool:
    """Lessons of a suite: groups of media, encoded once, with several questions about each."""

    def __init__(self, subject: Subject, specs: Sequence[str | None], seed: int) -> None:
        self.subject, self.rng = subject, np.random.default_rng([LESSONS, seed])
        stages = [stage for spec in specs for stage in parse(spec)]
        self.needs = {need for stage in stages for need in stage.method.needs}
        self.encodes = not in_tower(stages)
        self.media = subject.asked.source(LESSONS + seed)

    def group(self, sets: int) -> list[StudentLesson]:
        """Make `sets` lessons about the next media."""
        media, facts = zip(*islice((each for each in self.media if each[1]), BATCH), strict=True)
        shots = [[self.subject.shot(file) for file in files()] for files in media]
        found, features = list[StudentLesson](), dict[str, Any]()
        asked = [self._asked(known, sets) for known in facts]
        for chosen in zip(*asked, strict=True):
            lesson = self._lesson(shots, chosen, features)
            along = lesson.inputs["input_ids"].shape
            shown = lesson.inputs.items()  # media are held once
            features = {k: v for k, v in shown if getattr(v, "shape", None) != along}
            found.append(lesson)
        return found

    def _asked(self, known: Sequence[Fact], sets: int) -> list[Fact]:
        """Choose facts of kinds in turn, each kind as often as another."""
        kinds = [kind for kind in self.subject.asked.kinds if any(f.kind == kind for f in known)]
        turns = self.rng.permutation(len(kinds))
        found = []
        for turn in range(sets):
            kind = kinds[turns[turn % len(kinds)]]
            mine = [fact for fact in known if fact.kind == kind]
            found.append(mine[int(self.rng.integers(len(mine)))])
        return found

    def _lesson(self, shots: Any, facts: Sequence[Fact], features: Inputs) -> StudentLesson:
        subject = self.subject
        words, tokenizer = subject.asked.wordings, subject.processor.tokenizer
        questions = [
            fact.ask(int(self.rng.integers(len(words[fact.kind]))), words) for fact in facts
        ]
        prompt = build_inputs(subject.processor, shots, questions, subject.model.device)
        prompt |= features
        if self.encodes:
            prompt = encoded(subject.model, prompt, self.needs)
        end = tokenizer.eos_token_id
        answers = [
            [*tokenizer.encode(fact.answer, add_special_tokens=False), end] for fact in facts
        ]
        pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        inputs, labels = answered(prompt, answers, pad)
        return StudentLesson(inputs, labels, [fact.kind for fact in facts])


class StudentTask(training.Task):
    """A LoRA in training under a reduction."""

    def __init__(
        self,
        learner: Any,
        specs: tuple[str, str | None],
        lessons: Sequence[StudentLesson],
        exam: Sequence[StudentLesson],
        *,
        rate: float,
        seed: int = 0,
    ) -> None:
        self.learner, self.lessons, self.exam = learner.eval(), lessons, exam
        self.spec, self.teacher = specs
        learned = [each for each in learner.parameters() if each.requires_grad]
        self.optimiser = training.Optimiser((), learned, rate)
        self.rng = np.random.default_rng(seed)
        self.order = list[int]()

    def batches(self, step: int, done: float) -> list[StudentLesson]:
        """One lesson; all of them before any comes again."""
        self.order = self.order or self.rng.permutation(len(self.lessons)).tolist()
        return [self.lessons[self.order.pop()]]

    def read(self, lesson: StudentLesson) -> Tensor:
        """Logits of the student at the answers, `[n, V]`."""
        with attach(self.learner, self.spec):
            return lesson.logits(self.learner)

    @torch.no_grad()
    def teach(self, lesson: StudentLesson) -> Tensor:
        """Logits of the teacher at the answers, `[n, V]`, which stay with the lesson."""
        if not lesson.taught:
            with self.learner.disable_adapter(), attach(self.learner, self.teacher):
                lesson.taught.append(lesson.logits(self.learner).half())
        return lesson.taught[0].float()

    def loss(self, batch: StudentLesson) -> tuple[Tensor, training.Figures]:
        """Loss of the right answers, and of the teacher's distribution of them."""
        with training.fast(batch.labels.device):
            taught, logits = self.teach(batch), self.read(batch).float()
        right = cross_entropy(logits, batch.labels[batch.labels != IGNORE])
        like = kl_div(logits.log_softmax(-1), taught.softmax(-1), reduction="batchmean")
        return right + like, {"loss": right.item(), "like": like.item()}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Shares of held-out questions that are answered correctly, of the teacher's, too."""
        marks, taught = list[tuple[str, bool]](), list[tuple[str, bool]]()
        for lesson in self.exam:
            for logits, found in ((self.read(lesson), marks), (self.teach(lesson), taught)):
                guesses = torch.full_like(lesson.labels, IGNORE)
                guesses[lesson.labels != IGNORE] = logits.argmax(-1)
                right = (guesses == lesson.labels).all(-1).tolist()
                found += zip(lesson.kinds, right, strict=True)
        figures = {"kinds": training.shares(marks), "teacher": _mean(taught)}
        return {"mean": _mean(marks), **figures}


def _mean(marks: Sequence[tuple[str, bool]]) -> float:
    return sum(mark for _, mark in marks) / len(marks)


def check(spec: str, teacher: str | None) -> None:
    """Refuse a reduction that leaves nothing to learn, or no place for answers (SpecError)."""
    stages = parse(spec)
    if all(stage.whole for stage in stages):
        raise SpecError(
            f"{spec!r} keeps every token, so a student under it has nothing to learn; give a "
            "smaller budget, such as 'key_clip:0.125'"
        )
    for stage in (*stages, *parse(teacher)):
        if stage.knobs.get("tokens") in ("text", "all"):
            raise SpecError(
                f"'{stage}' drops text, answers included, which a lesson needs; leave out tokens="
            )


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Train a student, and write it as an adapter of peft."""
    check(options.reduce, options.teacher)
    torch.manual_seed(options.seed)
    subject = Subject(options.model, str(options.device), suite_of(options.suite))
    learner = with_lora(subject.model, options.lora)
    school = StudentSchool(subject, (options.reduce, options.teacher), options.seed)
    groups = -(-options.clips // BATCH)
    with log.stage("lessons", clips=groups * BATCH):
        lessons = list[list[StudentLesson]]()
        for number in range(groups):
            lessons.append(school.group(SETS))
            training.progress("groups of clips", number + 1, groups)
    held = max(1, groups // 10)
    exam = [lesson for group in lessons[-held:] for lesson in group[:2]]
    taught = [lesson for group in lessons[:-held] for lesson in group]
    specs = (options.reduce, options.teacher)
    task = StudentTask(learner, specs, taught, exam, rate=options.rate, seed=options.seed)
    log({"stage": "held-out", "step": 0, **task.look()})
    course = training.Course("student", options.minutes, options.steps, hold=0.3, watch=5.0)
    steps = training.train(
        task, course, log, lambda: save_lora(learner, options.out, options.model)
    )
    size = sum(each.numel() for each in task.optimiser.parameters)
    log({"stage": "saved", "step": steps, "parameters": size})


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, "python -m mmfast.compressors.train --reduce SPEC")
    add = parser.add_argument
    add("--reduce", required=True, help="what the student reads, such as key_clip:0.125")
    add("--teacher", help="what the teacher reads; all tokens by default")
    add("--model", default="tiny-video", help="embedded model or checkpoint folder")
    suites = [name for name, each in SUITES.items() if each.model == "tiny-video"]
    add("--suite", default="video", choices=suites, help="whose media and questions are learned")
    add("--lora", type=int, default=16, help="rank")
    add("--clips", type="count", default=480, help="or pictures; a tenth is never trained on")
    add("--out", type=Path, default=Path("student"), help="folder that gets the adapter")
    training.teach_options(parser, rate=2e-3, steps=600)
    training.device_option(parser)
    options = parser.parse_args(argv)
    if options.clips <= BATCH:
        parser.error(f"--clips {options.clips} must be above {BATCH}, some are held out")
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the adapter and the log."""
    options = arguments(argv)
    fields = ("model", "reduce", "teacher", "suite", "lora", "rate", "seed", "minutes", "steps")
    training.Log.record(options.out, run, options, *fields)
