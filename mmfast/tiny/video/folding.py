"""Training of a vision tower that loses attention in some blocks, for the embedded video model.

The student begins with the weights of the stock tower, and with an affine map in place of
attention in the chosen blocks (`models.vision.folding`). It learns from the stock tower alone, no
labels: what each attention gave (module imitation), the states behind every block, the likeness
of the patches of a frame, and the answers of the frozen decoder (soft distillation). All weights
of its blocks learn; embeddings, projector and decoder stay. At the end the maps are folded away.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, mse_loss, normalize

from mmfast.models.cost import tower_flops
from mmfast.models.families.adapter import tower_of
from mmfast.models.families.tower import attention_of
from mmfast.models.loading import load, located
from mmfast.models.vision.folding import file_of, fold, without_attention
from mmfast.tiny import training
from mmfast.tiny.video import scene, tower
from mmfast.tiny.video.clips import Bank
from mmfast.tiny.video.lessons import ClipSampler, Lesson, Weights, answer
from mmfast.tiny.video.questions import KINDS

CLIPS, HELD = 4, 64  # of a step, and at the end of the bank, which are never trained on


@dataclass
class TowerPass:
    """One pass of a tower: outputs of its attentions and blocks by number, `[n, P, D]` each."""

    mixed: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    tokens: Tensor = field(default_factory=lambda: torch.empty(0))  # pooled, `[n, P / 4, H]`


def observe(model: Any, pixels: Tensor) -> TowerPass:
    """Run the tower of a model on frames `[n, 3, S, S]`."""
    found = TowerPass()

    def note(where: dict[int, Tensor], number: int, *call: Any) -> None:
        out = call[-1]
        where[number] = out[0] if isinstance(out, tuple) else out

    with ExitStack() as stack:
        for number, block in enumerate(tower_of(model).blocks):
            for module, where in ((attention_of(block), found.mixed), (block, found.states)):
                handle = module.register_forward_hook(partial(note, where, number))
                stack.callback(handle.remove)
        found.tokens = tower.pooled_tokens(model, tower.tower_features(model, pixels))
    return found


def gap(mine: Tensor, theirs: Tensor) -> Tensor:
    """Mean squared difference as a share of the mean square of `theirs`."""
    return mse_loss(mine, theirs) / theirs.pow(2).mean().clamp(min=1e-12)


def relations(x: Tensor) -> Tensor:
    """Cosines between the patches of each frame, `[n, P, D]` to `[n, P, P]`."""
    unit = normalize(x, dim=-1)
    return unit @ unit.mT


class FoldTask(training.Task):
    """A tower without some of its attention in training, beside the stock one."""

    def __init__(
        self,
        model: Any,
        blocks: Sequence[int],
        clips: ClipSampler,
        seed: int,
        *,
        held: int = HELD,
        rate: float = 1e-3,
        questions: int = 8,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.student = without_attention(model, blocks)
        self.blocks, self.clips, self.questions = sorted(blocks), clips, questions
        learning = tower_of(self.student).blocks.requires_grad_(True)
        weights = list(learning.parameters())
        matrices = [each for each in weights if each.ndim == 2]
        rest = [each for each in weights if each.ndim != 2]
        self.optimiser = training.Optimiser(matrices, rest, rate)
        self.rng = torch.Generator().manual_seed(seed)
        self.count = len(clips.bank.tables) - held
        self.weights: Weights = dict.fromkeys(KINDS, 1.0)
        self.exam_clips = range(self.count, self.count + held)
        parts = [self.exam_clips[at : at + CLIPS] for at in range(0, held, CLIPS)]
        self.exam = [(part, clips.lesson(part, 4, self.weights)) for part in parts]

    def batches(self, step: int, done: float) -> list[tuple[list[int], Lesson]]:
        """Random clips and questions about them."""
        chosen = torch.randint(self.count, (CLIPS,), generator=self.rng).tolist()
        return [(chosen, self.clips.lesson(chosen, self.questions, self.weights))]

    def loss(self, batch: tuple[list[int], Lesson]) -> tuple[Tensor, training.Figures]:
        """Imitation of attention, states and their relations, and of the decoder's answers."""
        with training.fast():
            return self._loss(*batch)

    def _loss(self, chosen: Sequence[int], lesson: Lesson) -> tuple[Tensor, training.Figures]:
        pixels = tower.scale_pixels(self.clips.bank.frames[list(chosen)].flatten(0, 1))
        with torch.no_grad():
            right = observe(self.model, pixels)
            taught = self._answers(chosen, lesson, right.tokens)
        mine = observe(self.student, pixels)
        last = max(mine.states)
        parts = {
            "imitate": sum(gap(mine.mixed[n], right.mixed[n]) for n in self.blocks),
            "states": sum(gap(mine.states[n], right.states[n]) for n in mine.states),
            "relate": mse_loss(relations(mine.states[last]), relations(right.states[last])),
            "tokens": gap(mine.tokens, right.tokens),
            "soft": kl_div(
                self._answers(chosen, lesson, mine.tokens).log_softmax(-1),
                taught.softmax(-1),
                reduction="batchmean",
            ),
        }
        total = torch.stack([torch.as_tensor(part) for part in parts.values()]).sum()
        return total, {name: float(torch.as_tensor(part).detach()) for name, part in parts.items()}

    def _states(self, chosen: Sequence[int], lesson: Lesson, tokens: Tensor) -> Tensor:
        """States of a lesson's questions where the decoder sees these tokens, `[B T, P, H]`.

        Some clips of a lesson run backwards.
        """
        shown = tokens.unflatten(0, lesson.tokens.shape[:2])
        stored = (self.clips.tokens[clip].float() for clip in chosen)
        same = [torch.equal(a, b) for a, b in zip(lesson.tokens, stored, strict=True)]
        shown = torch.stack([x if on else x.flip(0) for x, on in zip(shown, same, strict=True)])
        return answer(self.model, replace(lesson, tokens=shown), lesson.every).states

    def _answers(self, chosen: Sequence[int], lesson: Lesson, tokens: Tensor) -> Tensor:
        """Logits at the tokens of answers, `[n, V]`."""
        states = self._states(chosen, lesson, tokens)
        logits: Tensor = self.model.lm_head(states[lesson.packed.labels != scene.IGNORE])
        return logits.float()

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Shares answered correctly with the student's tower."""
        return self.score(self.student)

    @torch.no_grad()
    def score(self, model: Any) -> training.Figures:
        """Shares of the held-out questions that are answered correctly with a model's tower."""
        bank = self.clips.bank
        frames = bank.frames[self.exam_clips.start :]
        mine = tower.encode_bank(model, Bank(frames, bank.patches, bank.cells, bank.tables))
        marks: list[tuple[str, bool]] = []
        for part, lesson in self.exam:
            shown = mine[[clip - self.count for clip in part]].float().flatten(0, 1)
            states = self._states(part, lesson, shown)
            right = lesson.packed.correct(self.model.lm_head(states).argmax(-1))
            marks += zip(
                (kind for row in lesson.kinds for kind in row),
                (mark for row in right for mark in row),
                strict=True,
            )
        mean = sum(mark for _, mark in marks) / len(marks)
        return {"mean": mean, "asked": len(marks), "kinds": training.shares(marks, KINDS)}


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Train one tower."""
    model, processor = load(located(options.model), "cpu", "float32")
    without_attention(model, options.blocks)  # refuses what it does not have
    bank, features = tower.encoded_clips(model, options.clips, options.seed, log)
    train_one(options, log, model, ClipSampler(bank, features, processor.tokenizer, options.seed))


def train_one(
    options: argparse.Namespace, log: training.Log, model: Any, clips: ClipSampler
) -> None:
    """Train on a bank; the log begins with the stock tower, and with attention merely dropped."""
    torch.manual_seed(options.seed)
    task = FoldTask(
        model, options.blocks, clips, options.seed, held=options.held, rate=options.rate
    )
    vision = model.config.vision_config
    grid = (1, *[vision.image_size // vision.patch_size] * 2)
    whole = [math.prod(grid)] * len(tower_of(model).blocks)
    cost = [tower_flops(model, grid, whole, whole, gone) for gone in ((), task.blocks)]
    log({"stage": "full", "flops": cost[0], **task.score(model)})
    log({"stage": "dropped", "blocks": task.blocks, "flops": cost[1], **task.look()})
    path = file_of(options.out, len(task.blocks))
    training.teach(task, log, options, path, task.student, watch=3.0, finish=fold)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, "python -m mmfast.tiny.video.folding")
    add = parser.add_argument
    add("--model", default="tiny-video", help="embedded model or checkpoint folder")
    add("--blocks", type=int, nargs="+", default=[1, 2], help="numbers of those without attention")
    add("--out", type=Path, default=Path("folded"), help="folder that gets towers/")
    training.teach_options(parser, rate=1e-3, steps=1000)
    add("--clips", type=int, default=2064, help="of the bank, held-out ones included")
    add("--held", type="count", default=HELD, help="clips at its end that are never trained on")
    options = parser.parse_args(argv)
    if options.clips < options.held + CLIPS:
        parser.error(f"--clips {options.clips} must be at least {options.held + CLIPS}")
    options.blocks = sorted(set(options.blocks))
    return options


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights and the log."""
    options = arguments(argv)
    fields = ("model", "blocks", "seed", "minutes", "steps", "clips", "held", "rate")
    training.Log.record(options.out / "towers", run, options, *fields)


if __name__ == "__main__":
    main()
