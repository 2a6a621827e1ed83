"""Training of the detector of made-up words: `python -m mmfast.tiny.scenes.doubts --out DIR`.

The embedded model describes clips and pictures whose facts the generator knows, on all of its
visual tokens and on a tenth of them, where it makes up more. A token that states a count, a
background, a thing, a movement, a time, a place or a number that is not so is labelled; the model
stays as it is. The order of things is not judged.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from mmfast.attach import attach
from mmfast.models.doubt import AnswerSteps, StepRecorder, TokenDoubt, file_of, load, pieces
from mmfast.models.loading import load as load_model
from mmfast.models.prompt import chat_inputs
from mmfast.tiny import training
from mmfast.tiny.scenes.evaluate import BATCH, TOKENS, SceneCase, scene_cases
from mmfast.tiny.scenes.scoring import facts_of
from mmfast.tiny.video.scene import COLOURS, SHAPES

LESSONS = 78_000  # added to the seed: exams ask with seeds up to some thousands
ITEMS, HELD = 512, 0.2  # tokens of a step, and share of the descriptions that are held out
FEWER = "random:0.1"  # of the visual tokens: the same scenes once more, with more made up
RESAMPLES = 1000  # of the descriptions, for an interval
_NAME = re.compile(f"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})")
_DETAILS = (r"moves (\w+)", r"(from the start|appears at second \d)",
            r"(until the end|leaves at second \d)", r"is in the (\w+(?: \w+)?)")  # fmt: skip
_NUMBER = re.compile(r"number (\d+) (?:appears at second (\d+)|is shown)")
Claim = tuple[tuple[str, ...], int, int]  # a fact, and where its words begin and end


def claims(text: str) -> Iterator[Claim]:
    """Facts that a description states, but for the order of things, with their places in it."""
    for match in re.finditer(r"(one|no|\d) objects?", text):
        yield ("count", match[1]), *match.span(1)
    for match in re.finditer(r"on an? (\w+) background", text):
        yield ("background", match[1]), *match.span(1)
    for sentence in re.finditer(r"[^.]+", text):
        name = _NAME.search(sentence[0])
        if name is None:
            continue
        start = sentence.start()
        yield ("there", name[0]), start + name.start(), start + name.end()
        for detail in _DETAILS:
            for match in re.compile(detail).finditer(sentence[0], name.end()):
                yield (name[0], match[1]), start + match.start(1), start + match.end(1)
    for match in _NUMBER.finditer(text):
        yield ("number", match[1]), *match.span(1)
        if match[2] is not None:
            yield ("number from", match[2]), *match.span(2)
    for match in re.finditer("no number", text):
        yield ("number", "none"), *match.span()


def labels(answer: str, said: Sequence[str]) -> tuple[list[bool], list[bool]]:
    """For the pieces of a description: whether each is part of a claim, and of a wrong one."""
    truth, found = facts_of(answer), list(claims("".join(said).lower()))
    stated, wrong, start = list[bool](), list[bool](), 0
    for piece in said:
        end = start + len(piece)
        touched = [fact for fact, a, b in found if a < end and start < b]
        stated.append(bool(touched))
        wrong.append(any(fact not in truth for fact in touched))
        start = end
    return stated, wrong


class Described:
    """Tokens of descriptions: n of them, from `row` `[n]` different ones."""

    def __init__(
        self, steps: AnswerSteps, word: Tensor, stated: Tensor, wrong: Tensor, row: Tensor
    ) -> None:
        self.steps, self.word = steps, word
        self.stated, self.wrong, self.row = stated, wrong, row

    def take(self, chosen: Tensor) -> Described:
        """The tokens at these places, or where a mask is True."""
        steps = AnswerSteps(*(each[chosen] for each in vars(self.steps).values()))
        word, row = self.word[chosen], self.row[chosen]
        return Described(steps, word, self.stated[chosen], self.wrong[chosen], row)

    @classmethod
    def join(cls, parts: Sequence[Described]) -> Described:
        """All tokens of several sets, whose rows are counted on."""
        first, rows = 0, list[Tensor]()
        for part in parts:
            rows.append(part.row + first)
            first += int(part.row.max()) + 1
        steps = zip(*(vars(part.steps).values() for part in parts), strict=True)
        word, stated, wrong = (
            torch.cat([vars(part)[name] for part in parts]) for name in ("word", "stated", "wrong")
        )
        return cls(AnswerSteps(*map(torch.cat, steps)), word, stated, wrong, torch.cat(rows))


@torch.inference_mode()
def describe(pair: tuple[Any, Any], cases: Sequence[SceneCase], spec: str | None) -> Described:
    """Let a model describe cases of one kind of media under a reduction; what its tokens were."""
    model, processor = pair
    inputs = chat_inputs(processor, [case.chat(case.shot()) for case in cases], model.device)
    with attach(model, spec), StepRecorder().on(model) as recorder:
        out = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    ids = out[:, inputs["input_ids"].shape[1] :]
    steps, embed = recorder.steps(ids), model.get_input_embeddings()(ids).float()
    parts = [pieces(processor.tokenizer, row) for row in ids.tolist()]
    marks = [labels(case.answer, said) for case, said in zip(cases, parts, strict=True)]
    stated, wrong = (torch.tensor([mark[k] for mark in marks]) for k in (0, 1))
    real = torch.tensor([[bool(piece) for piece in said] for said in parts])
    row = torch.arange(len(cases))[:, None].expand_as(real)
    flat = AnswerSteps(*(each[real].clone() for each in vars(steps).values()))
    return Described(flat, embed[real].clone(), stated[real], wrong[real], row[real])


def gather(pair: tuple[Any, Any], n: int, seed: int, specs: Sequence[str | None]) -> Described:
    """Descriptions of n scenes under every reduction, all those of a scene held out together."""
    cases, parts = list(islice(scene_cases(seed, ("describe",)), n)), list[Described]()
    for media in ("video", "image"):
        mine = [case for case in cases if case.media == media]
        for at in range(0, len(mine), BATCH):
            training.progress(media, at, len(mine))
            some = mine[at : at + BATCH]
            joined, *others = [describe(pair, some, spec) for spec in specs]
            for other in others:
                joined = _beside(joined, other)
            parts.append(joined)
    return Described.join(parts)


def _beside(one: Described, two: Described) -> Described:
    """Tokens of two sets about the same scenes."""
    joined = Described.join([one, two])
    joined.row = torch.cat([one.row, two.row])
    return joined


def auroc(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: probability that a positive scores above a negative, ties half."""
    _, place, counts = score.double().unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    rank = (ends - (counts.double() - 1) / 2)[place]  # mean rank of ties, from 1
    n = int(positive.sum())
    if n in (0, len(positive)):
        return float("nan")
    low = n * (n + 1) / 2
    return float((rank[positive].sum() - low) / (n * (len(positive) - n)))


def auroc_interval(
    score: Tensor, positive: Tensor, row: Tensor, seed: int = 0
) -> tuple[float, float]:
    """Bounds (95 %) of the area, by drawing whole descriptions anew: tokens of one are alike."""
    rng = torch.Generator().manual_seed(seed)
    places = [(row == number).nonzero()[:, 0] for number in row.unique().tolist()]
    found = []
    for _ in range(RESAMPLES):
        drawn = torch.randint(len(places), (len(places),), generator=rng).tolist()
        at = torch.cat([places[number] for number in drawn])
        found.append(auroc(score[at], positive[at]))
    known = torch.tensor(found)
    low, high = known[~known.isnan()].quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


@torch.no_grad()
def examine(judge: TokenDoubt, exam: Described, name: str) -> training.Figures:
    """Areas of the detector and of plain surprise, among words that state something and all."""
    score = judge.eval()(exam.steps, exam.word)
    figures: training.Figures = {"stage": "exam", "tokens": name, "n": len(exam.row.unique())}
    for words, mask in (("stated", exam.stated), ("all", torch.ones_like(exam.stated))):
        truth, rows = exam.wrong[mask], exam.row[mask]
        for what, values in (("auroc", score[mask]), ("surprise", exam.steps.surprise[mask])):
            area = auroc(values, truth)
            figures[f"{what} {words}"] = [area, *auroc_interval(values, truth, rows)]
        figures[f"wrong {words}"] = [int(truth.sum()), len(truth)]
    return figures


class DoubtTask(training.Task):
    """A detector in training."""

    def __init__(
        self, judge: TokenDoubt, lessons: Described, held: Described, seed: int, rate: float
    ) -> None:
        self.judge, self.lessons, self.exam = judge.train(), lessons, held
        self.optimiser = training.Optimiser((), judge.parameters(), rate)
        self.rng = torch.Generator().manual_seed(seed)
        share = float(lessons.wrong.float().mean())
        self.weight = torch.tensor(min(1 / max(share, 1e-3) - 1, 10.0))  # of a wrong token

    def batches(self, step: int, done: float) -> list[Described]:
        """Random tokens."""
        chosen = torch.randint(len(self.lessons.row), (ITEMS,), generator=self.rng)
        return [self.lessons.take(chosen)]

    def loss(self, batch: Described) -> tuple[Tensor, training.Figures]:
        """Cross-entropy, in which a wrong token counts several times."""
        score, truth = self.judge(batch.steps, batch.word), batch.wrong.float()
        total = binary_cross_entropy_with_logits(score, truth, pos_weight=self.weight)
        return total, {"loss": total.item()}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Area among the words of held-out descriptions that state something."""
        exam = self.exam.take(self.exam.stated)
        return {"auroc": auroc(self.judge(exam.steps, exam.word), exam.wrong)}


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Describe, learn, and judge descriptions of other scenes."""
    pair = load_model(options.model, "cpu", "float32")
    seed = LESSONS + 2 * options.seed
    with log.stage("descriptions", scenes=options.scenes):
        lessons = gather(pair, options.scenes, seed, (None, FEWER))
    judge = train_one(options, log, lessons)
    for name, spec in (("all", None), (FEWER, FEWER)):
        log(examine(judge, gather(pair, options.exam, seed + 1, (spec,)), name))


def train_one(options: argparse.Namespace, log: training.Report, lessons: Described) -> TokenDoubt:
    """Train and write the weights; the last scenes are held out."""
    torch.manual_seed(options.seed)
    judge = TokenDoubt(lessons.word.shape[-1])
    cut = round((1 - HELD) * (int(lessons.row.max()) + 1))
    parts = lessons.take(lessons.row < cut), lessons.take(lessons.row >= cut)
    task = DoubtTask(judge, *parts, options.seed, options.rate)
    log({"stage": "untrained", **task.look()})
    path = file_of(options.out)
    training.teach(task, log, options, path, judge, watch=1.0)
    return load(path)  # what was written, rounded


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, "python -m mmfast.tiny.scenes.doubts")
    add = parser.add_argument
    add("--model", default="tiny-scenes", help="embedded model or checkpoint folder")
    add("--out", type=Path, default=Path("doubted"), help="folder that gets detectors/")
    training.teach_options(parser, rate=1e-3, steps=600)
    add("--scenes", type=int, default=240, help="to describe, held-out ones included")
    add("--exam", type=int, default=120, help="scenes of another seed")
    options = parser.parse_args(argv)
    if min(options.scenes, options.exam) < 5:
        parser.error("--scenes and --exam must be at least 5")
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights and the log."""
    options = arguments(argv)
    fields = ("model", "seed", "minutes", "steps", "scenes", "exam", "rate")
    training.Log.record(options.out / "detectors", run, options, *fields)


if __name__ == "__main__":
    main()
