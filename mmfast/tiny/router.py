"""Training of `route`: which questions keep their answer when fewer tokens are read.

Labels come without annotation: a way is right for a question if the model answers what it answers
on all tokens. The head then reads questions alone, so an exam about other clips tells what it
learned of questions, not of pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import Method
from mmfast.core.spec import Spec
from mmfast.core.tokens import Tokens
from mmfast.models.families.adapter import token_counts
from mmfast.rankers import file_of
from mmfast.rankers.route import ALL, BudgetRouter, load, way_of
from mmfast.tiny import training
from mmfast.tiny.evaluate import BATCH, QuestionBatch, Subject, interval
from mmfast.tiny.suites import SuiteCase, suite, suite_of

ITEMS, HELD = 64, 0.2  # of a step, and share of the questions that are never trained on
LESSONS = 77_000  # added to the seed: exams ask with seeds up to some thousands
WAYS = ("divprune:8", "divprune:32", "all")
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)
RESAMPLES = 2000  # of the questions, for an interval


@dataclass(frozen=True)
class RouteLessons:
    """n questions and what became of their answers under K ways.

    Attributes:
        question: Mean embedding of the text of the prompt, `[n, D]`.
        same: The answer was the one on all tokens, `[n, K]`.
        right: The answer was the right one, `[n, K]`.
        full: The answer on all tokens was, `[n]`.
        tokens: Visual tokens that were left, `[n, K]`.
    """

    question: Tensor
    same: Tensor
    right: Tensor
    full: Tensor
    tokens: Tensor

    def part(self, start: int, stop: int) -> RouteLessons:
        """Questions `start` to `stop`."""
        return RouteLessons(*(each[start:stop] for each in vars(self).values()))


@torch.no_grad()
def observe(subject: Subject, cases: Sequence[SuiteCase], ways: Sequence[str]) -> RouteLessons:
    """Ask questions on all tokens and under every way."""
    means: list[Tensor] = []

    def look(tokens: Tokens, budget: int | None, **_: Any) -> Reduction:
        means.append(tokens.need("query").float().mean(-2))
        return Reduction.identity(tokens.n, device=tokens.x.device)

    method = Method("watch", "reducer", "", ("x", "query"), "", look, adaptive=True)
    batch = QuestionBatch(subject, cases, {"x", "grid", "query"})
    with attach(subject.model, [Spec(method, "pre", None, None)]):
        answers = subject.answers(batch.encoded)
    if len(means) != len(cases):
        raise ModelError(f"{len(means)} media for {len(cases)} questions; take a suite of one each")
    same, right, tokens = (torch.zeros(len(cases), len(ways), dtype=torch.int64) for _ in range(3))
    for number, way in enumerate(ways):
        with attach(subject.model, None if way == ALL else way) as trace:
            replies = answers if way == ALL else subject.answers(batch.encoded)
        counts = token_counts(subject.model, subject.asked.media, batch.inputs, trace)
        for row, (reply, answer, case) in enumerate(zip(replies, answers, cases, strict=True)):
            same[row, number], right[row, number] = reply == answer, reply == case.answer
            tokens[row, number] = counts[row][1]
    full = torch.tensor([a == c.answer for a, c in zip(answers, cases, strict=True)])
    return RouteLessons(torch.stack(means).cpu(), same > 0, right > 0, full, tokens)


def gather(
    subject: Subject, n: int, seed: int, ways: Sequence[str], name: str, stage: str
) -> RouteLessons:
    """Ask n questions of a suite."""
    cases, parts = suite(n, seed, name), list[RouteLessons]()
    for at in range(0, n, BATCH):
        training.progress(stage, at, n)
        parts.append(observe(subject, cases[at : at + BATCH], ways))
    return RouteLessons(
        *(torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0]))
    )


def taken(way: Tensor, values: Tensor) -> Tensor:
    """Values `[n, K]` of the way `[n]` of each question, `[n]` float32."""
    return values.gather(-1, way[:, None])[:, 0].float()


def gain(way: Tensor, right: Tensor) -> Tensor:
    """Points that each question wins over a way drawn with the same frequencies, `[n]`.

    The expectation of the draw is taken, so it has no noise of its own; its mean number of tokens
    is that of the router.
    """
    often = torch.bincount(way, minlength=right.shape[-1]) / len(way)
    return taken(way, right) - right.float() @ often


def gain_interval(way: Tensor, right: Tensor, seed: int = 0) -> tuple[float, float]:
    """Bounds (95 %) of the mean gain, by drawing the questions anew."""
    rng, n = torch.Generator().manual_seed(seed), len(way)
    drawn = torch.randint(n, (RESAMPLES, n), generator=rng)
    share = torch.zeros(RESAMPLES, n).scatter_add_(1, drawn, torch.full((), 1 / n).expand_as(drawn))
    often = share @ one_hot(way, right.shape[-1]).float()  # [R, K]
    means = share @ taken(way, right) - (often * (share @ right.float())).sum(-1)
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


@torch.no_grad()
def examine(judge: BudgetRouter, exam: RouteLessons) -> list[training.Figures]:
    """Figures of all tokens, of every way alone, and of the router at several thresholds.

    `right` are shares of right answers with their 95 % interval, `same` of those that all tokens
    give, `tokens` means; a router also has what it gains over chance at the same mean.
    """
    n, rows = len(exam.question), list[training.Figures]()

    def row(name: str, right: Tensor, **more: Any) -> None:
        share, bounds = float(right.float().mean()), interval(int(right.sum()), n)
        rows.append({"stage": "exam", "way": name, "right": share, "interval": bounds, **more})

    row("all tokens", exam.full)
    for number, way in enumerate(judge.config["ways"]):
        same, left = exam.same[:, number], exam.tokens[:, number]
        figures = {"same": float(same.float().mean()), "tokens": float(left.float().mean())}
        row(f"always {way}", exam.right[:, number], **figures)
    for sure in THRESHOLDS:
        way, _ = judge.choose(exam.question, sure)
        gained, bounds = float(gain(way, exam.right).mean()), gain_interval(way, exam.right)
        row(
            f"route?sure={sure}",
            taken(way, exam.right),
            same=float(taken(way, exam.same).mean()),
            tokens=float(taken(way, exam.tokens).mean()),
            taken=torch.bincount(way, minlength=exam.right.shape[-1]).tolist(),
            gain=gained,
            gain_interval=list(bounds),
        )
    return rows


class RouteTask(training.Task):
    """A router in training."""

    def __init__(
        self, judge: BudgetRouter, lessons: RouteLessons, held: RouteLessons, seed: int, rate: float
    ) -> None:
        self.judge, self.lessons, self.exam = judge.train(), lessons, held
        self.optimiser = training.Optimiser((), judge.parameters(), rate)
        self.rng = torch.Generator().manual_seed(seed)

    def batches(self, step: int, done: float) -> list[RouteLessons]:
        """Random questions."""
        chosen = torch.randint(len(self.lessons.question), (ITEMS,), generator=self.rng)
        return [RouteLessons(*(each[chosen] for each in vars(self.lessons).values()))]

    def loss(self, batch: RouteLessons) -> tuple[Tensor, training.Figures]:
        """Cross-entropy of what keeps its answer, the mean over ways."""
        total = _entropy(self.judge, batch)
        return total, {"loss": total.item()}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Cross-entropy on held-out questions, and that of the shares of all questions alone."""
        share = self.lessons.same[:, :-1].float().mean(0).clamp(0.01, 0.99)
        blind = torch.logit(share).expand(len(self.exam.question), -1)
        truth = self.exam.same[:, :-1].float()
        known = float(binary_cross_entropy_with_logits(blind, truth))
        return {"loss": float(_entropy(self.judge, self.exam)), "blind": known}


def _entropy(judge: BudgetRouter, lessons: RouteLessons) -> Tensor:
    return binary_cross_entropy_with_logits(judge(lessons.question), lessons.same[:, :-1].float())


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Ask, learn, and ask about other clips."""
    subject = Subject(options.model, "cpu", suite_of(options.suite))
    ask = (options.ways, options.suite)
    with log.stage("questions", questions=options.questions):
        seed = LESSONS + 2 * options.seed
        lessons = gather(subject, options.questions, seed, *ask, "questions")
    judge = train_one(options, log, lessons)
    with log.stage("exam questions", questions=options.exam):
        exam = gather(subject, options.exam, seed + 1, *ask, "exam")
    for row in examine(judge, exam):
        log(row)


def train_one(
    options: argparse.Namespace, log: training.Report, lessons: RouteLessons
) -> BudgetRouter:
    """Train and write the weights; the last questions are held out."""
    torch.manual_seed(options.seed)
    judge = BudgetRouter(lessons.question.shape[-1], options.ways)
    n = len(lessons.question)
    cut = n - max(1, round(HELD * n))
    task = RouteTask(judge, lessons.part(0, cut), lessons.part(cut, n), options.seed, options.rate)
    log({"stage": "untrained", **task.look()})
    path = file_of(options.out, "route")
    training.teach(task, log, options, path, judge, watch=1.0)
    return load(path)  # what was written, rounded


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, "python -m mmfast.rankers.train")
    add = parser.add_argument
    add("--ranker", default="route", choices=["route"], help="name of the ranking")
    add("--model", default="tiny-video", help="embedded model or checkpoint folder")
    add("--suite", default="video", help="whose questions are asked")
    add("--ways", nargs="+", default=list(WAYS), help="from cheap to dear; `all` keeps all tokens")
    add("--out", type=Path, default=Path("ranked"), help="folder that gets rankers/")
    training.teach_options(parser, rate=1e-3, steps=600)
    add("--questions", type=int, default=640, help="to learn from, held-out ones included")
    add("--exam", type=int, default=400, help="questions about clips of another seed")
    options = parser.parse_args(argv)
    if min(options.questions, options.exam) < 2:
        parser.error("--questions and --exam must be at least 2")
    if len(options.ways) < 2:
        parser.error("--ways needs two ways or more, such as divprune:8 all")
    try:
        for way in options.ways:
            way_of(way)
    except SpecError as error:
        parser.error(str(error))
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights and the log."""
    options = arguments(argv)
    fields = ("model", "suite", "ways", "seed", "minutes", "steps", "questions", "exam")
    training.Log.record(options.out / "rankers", run, options, *fields)
