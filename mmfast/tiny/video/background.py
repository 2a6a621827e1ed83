"""Training of `bavit`: which tokens of the embedded video model's clips show a thing or a digit.

Clips are drawn, so who owns each patch is known, as it is from segmentation maps elsewhere. Their
features are projected once; the model stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from mmfast.models.loading import load, located
from mmfast.rankers import file_of
from mmfast.rankers.bavit import BackgroundVit
from mmfast.tiny import training
from mmfast.tiny.video import tower

FRAMES, HELD = 64, 0.2  # of a step, and share of the clips that are never trained on


class BackgroundTask(training.Task):
    """A classifier of tokens in training."""

    def __init__(
        self, judge: BackgroundVit, features: Tensor, shown: Tensor, seed: int, rate: float
    ) -> None:
        """Learn from features `[n, T, P, D]` and what they show `[n, T, P]`, 0 for background."""
        self.judge = judge.train()
        self.optimiser = training.Optimiser.by_layer(judge, rate)
        self.rng = torch.Generator().manual_seed(seed)
        side = round(features.shape[-2] ** 0.5)
        self.grid = (side, side)
        cut = len(features) - max(1, round(HELD * len(features)))
        truth = (shown > 0).float()
        self.features, self.truth = features[:cut].flatten(0, 1), truth[:cut].flatten(0, 1)
        self.exam, self.exam_truth = features[cut:].flatten(0, 1), truth[cut:].flatten(0, 1)

    def batches(self, step: int, done: float) -> list[Tensor]:
        """Random frames."""
        return [torch.randint(len(self.features), (FRAMES,), generator=self.rng)]

    def loss(self, batch: Tensor) -> tuple[Tensor, training.Figures]:
        """Cross-entropy in which foreground and background count as much."""
        score, truth = self.judge(self.features[batch].float(), self.grid), self.truth[batch]
        part = truth.mean().clamp(0.01, 0.99)
        weight = torch.where(truth > 0, 0.5 / part, 0.5 / (1 - part))
        total = binary_cross_entropy_with_logits(score, truth, weight)
        return total, {"loss": total.item()}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Shares of tokens right, of foreground found, and of tokens taken for foreground."""
        found = self.judge(self.exam.float(), self.grid) > 0
        truth = self.exam_truth > 0
        return {
            "right": float((found == truth).float().mean()),
            "found": float(found[truth].float().mean()),
            "kept": float(found.float().mean()),
            "shown": float(truth.float().mean()),
        }


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Make clips and train on them."""
    model, _ = load(located(options.model), "cpu", "float32")
    bank, features = tower.encoded_clips(model, options.clips, options.seed, log)
    train_one(options, log, features, bank.cells)


def train_one(
    options: argparse.Namespace, log: training.Log, features: Tensor, shown: Tensor
) -> None:
    """Train and write the weights."""
    torch.manual_seed(options.seed)
    judge = BackgroundVit(features.shape[-1])
    task = BackgroundTask(judge, features, shown, options.seed, options.rate)
    log({"stage": "untrained", **task.look()})
    training.teach(task, log, options, file_of(options.out, "bavit"), judge, watch=1.0)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, "python -m mmfast.rankers.train")
    add = parser.add_argument
    add("--ranker", default="bavit", choices=["bavit"], help="name of the ranking")
    add("--model", default="tiny-video", help="embedded model or checkpoint folder")
    add("--out", type=Path, default=Path("ranked"), help="folder that gets rankers/")
    training.teach_options(parser, rate=1e-3, steps=300)
    add("--clips", type=int, default=400, help="of the bank, held-out ones included")
    return parser.parse_args(argv)


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights and the log."""
    options = arguments(argv)
    fields = ("model", "seed", "minutes", "steps", "clips", "rate")
    training.Log.record(options.out / "rankers", run, options, *fields)
