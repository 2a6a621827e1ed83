"""Training of learned rankings for any supported model, whose weights stay frozen.

Prompts run through the stock model once. Of each image or video the hidden states before the given
layers are kept, and the attention that its tokens receive in the final layer from the last query.
A head then learns that order by LambdaRank (Burges et al. 2006, in the form of Wang et al. 2018):
pairs in the wrong order cost what their exchange changes in the normalised discounted cumulative
gain, so that the tokens at the top count most. Items of different sizes, families and layouts are
alike to it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mmfast.attach import attach
from mmfast.core.reduction import Reduction
from mmfast.core.registry import Method
from mmfast.core.spec import Spec
from mmfast.core.tokens import Tokens
from mmfast.models.reduction.decoder_signals import AHEAD
from mmfast.models.wrappers import decoder_of, layers_of
from mmfast.rankers import file_of
from mmfast.rankers.top import RankHead
from mmfast.tiny import training
from mmfast.tiny.evaluate import Subject
from mmfast.tiny.suites import suite, suite_of

ITEMS, HELD = 8, 0.2  # of a step, and share of the prompts that are never trained on
PROMPTS = 8  # run together
LESSONS = 77_000  # added to the seed: exams ask with seeds up to some thousands


@dataclass(frozen=True)
class RankLesson:
    """One image or video as a layer sees it, and what the final layer makes of it."""

    x: Tensor  # hidden states before the layer. `[N, D]`
    last: Tensor  # that of the last text token. `[D]`
    target: Tensor  # attention from the last query in the final layer. `[N]`


def _watch(note: Callable[[Tokens], None], needs: tuple[str, ...], site: str, **where: Any) -> Spec:
    """A stage that keeps all tokens and notes them."""

    def look(tokens: Tokens, budget: int | None, **_: Any) -> Reduction:
        note(tokens)
        return Reduction.identity(tokens.n, device=tokens.x.device)

    method = Method("watch", "reducer", "", needs, "", look, sites=(site,), adaptive=True)
    return Spec(method, site, where.get("layer"), None, where.get("knobs", {}))


@torch.no_grad()
def observe(model: Any, inputs: Any, layers: Sequence[int]) -> dict[int, list[RankLesson]]:
    """Run prompts; the lessons of each layer, one for each image or video in reading order.

    `inputs` are those of `forward`. ModelError for a layer that the model does not have, or a
    prompt without text.
    """
    targets: list[Tensor] = []
    states: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    final = {"layer": len(layers_of(decoder_of(model))) - 1}
    specs = [_watch(lambda t: targets.append(t.need("mass_ahead")), (AHEAD,), "pre", knobs=final)]
    for layer, found in states.items():

        def note(tokens: Tokens, found: list[tuple[Tensor, Tensor]] = found) -> None:
            found.append((tokens.x, tokens.need("query")[-1]))

        specs.append(_watch(note, ("x", "query"), "llm", layer=layer))
    with attach(model, specs):
        model(**inputs)
    return {
        layer: [
            RankLesson(x.float(), last.float(), target.float())
            for (x, last), target in zip(found, targets, strict=True)
        ]
        for layer, found in states.items()
    }


def lambda_loss(score: Tensor, target: Tensor) -> Tensor:
    """LambdaRank loss of scores `[N]` of tokens whose order is that of `target` `[N]`, at least 0.

    The gain of a token is its share of the attention. Weights of the pairs are those at the present
    order and have no gradient.
    """
    with torch.no_grad():
        gain = target / target.sum().clamp(min=1e-20)
        place = score.argsort(descending=True, stable=True).argsort().to(gain)
        discount = 1 / torch.log2(place + 2)
        best = gain.sort(descending=True).values @ discount.sort(descending=True).values
        change = (gain[:, None] - gain).abs() * (discount[:, None] - discount).abs()
        weight = (change / best.clamp(min=1e-20)).masked_fill(gain[:, None] <= gain, 0.0)
    return (weight * softplus(score - score[:, None])).sum()


def correlation(score: Tensor, target: Tensor) -> float:
    """Spearman's rank correlation of `[N]` and `[N]`; equal values are ordered by place."""
    ranks = [each.argsort(stable=True).argsort().double() for each in (score, target)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def captured(score: Tensor, target: Tensor, share: float) -> float:
    """Attention of the `share` of tokens with the greatest score, over the most possible."""
    count = max(1, round(share * len(score)))
    return float(target[score.topk(count).indices].sum() / target.topk(count).values.sum())


class RankTask(training.Task):
    """A head in training."""

    def __init__(
        self,
        head: RankHead,
        lessons: Sequence[RankLesson],
        held: Sequence[RankLesson],
        seed: int,
        rate: float,
    ) -> None:
        self.head, self.lessons, self.exam = head.train(), lessons, held
        self.optimiser = training.Optimiser.by_layer(head, rate)
        self.rng = torch.Generator().manual_seed(seed)

    def batches(self, step: int, done: float) -> list[Sequence[RankLesson]]:
        """Random items."""
        chosen = torch.randint(len(self.lessons), (ITEMS,), generator=self.rng).tolist()
        return [[self.lessons[number] for number in chosen]]

    def loss(self, batch: Sequence[RankLesson]) -> tuple[Tensor, training.Figures]:
        """Mean loss of the items."""
        parts = [lambda_loss(self.head(each.x, each.last), each.target) for each in batch]
        total = torch.stack(parts).mean()
        return total, {"loss": total.item()}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Agreement with the final layer on held-out items."""
        return training.mean_figures([figures(self.head, each) for each in self.exam])


@torch.no_grad()
def figures(head: RankHead, lesson: RankLesson) -> training.Figures:
    """Loss, rank correlation, and attention captured by a quarter and a tenth of the tokens."""
    score = head(lesson.x, lesson.last)
    found = {"loss": float(lambda_loss(score, lesson.target))}
    found["correlation"] = correlation(score, lesson.target)
    for share in (0.25, 0.1):
        found[f"captured@{share:g}"] = captured(score, lesson.target, share)
    return found


def gather(
    model: Any, batches: Iterable[Any], layers: Sequence[int]
) -> dict[int, list[RankLesson]]:
    """Lessons of all batches of inputs by layer."""
    found: dict[int, list[RankLesson]] = {layer: [] for layer in layers}
    for inputs in batches:
        for layer, lessons in observe(model, inputs, layers).items():
            found[layer] += lessons
    return found


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Train a head for every layer on the same prompts."""
    asked = suite_of(options.suite)
    subject = Subject(options.model, "cpu", asked)
    cases = suite(options.prompts, LESSONS + options.seed, options.suite)
    parts = [cases[at : at + PROMPTS] for at in range(0, len(cases), PROMPTS)]

    def inputs() -> Iterable[Any]:
        for number, part in enumerate(parts):
            training.progress("prompts", number + 1, len(parts))
            yield subject.inputs(part)

    with log.stage("prompts", prompts=len(cases)):
        lessons = gather(subject.model, inputs(), options.layers)
    for layer, mine in lessons.items():
        train_head(options, log, layer, mine)


def train_head(
    options: argparse.Namespace, log: training.Log, layer: int, lessons: Sequence[RankLesson]
) -> None:
    """Train and write the head of one layer; the last lessons are held out."""
    torch.manual_seed(options.seed)
    head = RankHead(lessons[0].x.shape[-1], layer)
    cut = len(lessons) - max(1, round(HELD * len(lessons)))
    task = RankTask(head, lessons[:cut], lessons[cut:], options.seed, options.rate)
    path = file_of(options.out, "top", layer)
    log({"stage": "untrained", "layer": layer, **task.look()})
    training.teach(task, log, options, path, head, watch=1.0)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, "python -m mmfast.rankers.train")
    add = parser.add_argument
    add("--ranker", default="top", choices=["top"], help="name of the ranking")
    add("--model", default="tiny-video", help="embedded model or checkpoint folder")
    add("--suite", default="video", help="whose questions are asked")
    add("--layers", type="count", nargs="+", default=[2], help="decoder layers to rank before")
    add("--out", type=Path, default=Path("ranked"), help="folder that gets rankers/")
    training.teach_options(parser, rate=1e-3, steps=600)
    add("--prompts", type="count", default=400, help="held-out ones included")
    options = parser.parse_args(argv)
    if options.prompts < 2:
        parser.error(f"--prompts {options.prompts} must be at least 2: one is held out")
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights and the log."""
    options = arguments(argv)
    fields = ("model", "suite", "layers", "seed", "minutes", "steps", "prompts")
    training.Log.record(options.out / "rankers", run, options, *fields)
