"""Train the embedded document model from the video model: `python -m mmfast.tiny.document.train`.

Tower and projector stay as they are; the decoder learns to find things on a page of nine tiles and
to read the numbers beside them, in half an hour of one CPU core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmfast.models.loading import embedded_path, load
from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.document.pages import CELLS, PARTS, make_page, page_facts, page_labels
from mmfast.tiny.evaluate import run_eval
from mmfast.tiny.video.clips import INPUT
from mmfast.tiny.video.lessons import Lesson, PictureSampler, answer, answer_loss, choose, score
from mmfast.tiny.video.model import Readout
from mmfast.tiny.video.questions import Fact
from mmfast.tiny.video.scene import TRAIN
from mmfast.tiny.video.tower import scale_pixels, tower_features

GRIDS = [[INPUT, INPUT], [CELLS * INPUT, CELLS * INPUT]]  # a small picture, or nine tiles
KEEPS = (0.3, 0.2, 0.2, 0.15, 0.1)  # of a page's 1,475 tokens; all of them cost ten times more
HELD = 64  # pages that are never trained on
PAGE_LAYERS = (1, 3)  # visual states after these decoder layers predict what is beside them
Batch = tuple[list[int], Lesson, Tensor]


@dataclass(frozen=True)
class DrawnPage:
    """A page as the tower sees it, and the facts that can be asked."""

    pixels: NDArray[np.uint8]  # overview and tiles. `[1 + tiles, 3, INPUT, INPUT]`
    facts: list[Fact]
    labels: NDArray[np.int8]  # see `page_labels`. `[parts, tokens]`


def draw_page(image_processor: Any, seed: int, index: int) -> DrawnPage:
    """Draw page number `index` of a seed and cut it into tiles."""
    page = make_page(TRAIN, seed, index)
    pixels = image_processor(page.picture, return_tensors="pt")["pixel_values"][0]
    whole = ((pixels + 1) * 127.5).round().to(torch.uint8)  # they were bytes before
    labels = page_labels(page).to(torch.int8)
    return DrawnPage(whole.numpy(), list(page_facts(page)), labels.numpy())


@torch.no_grad()
def make_pages(
    model: Any, processor: Any, count: int, seed: int, counts: int = 2, workers: int = 0
) -> tuple[PictureSampler, Tensor]:
    """Pages as the image path encodes them, and their labels `[parts, n, tokens]`.

    How many things there are is learned last: asked `counts` times as often as other facts.
    """
    facts, tokens, labels = [], [], []
    draw = partial(draw_page, processor.image_processor, seed)
    one = (torch.set_num_threads, (1,))  # thread of each worker
    with get_context("spawn").Pool(workers, *one) if workers else nullcontext() as pool:
        drawn = map(draw, range(count)) if pool is None else pool.imap(draw, range(count), 8)
        for page in drawn:
            facts.append([*page.facts, *[page.facts[-1]] * (counts - 1)])
            pixels = scale_pixels(torch.from_numpy(page.pixels).to(model.device))
            tokens.append(model.model.multi_modal_projector(tower_features(model, pixels)).half())
            labels.append(torch.from_numpy(page.labels))
            training.progress("pages", len(facts), count)
    pages = PictureSampler(model, torch.stack(tokens), facts, processor.tokenizer, seed, 0.0)
    return pages, torch.stack(labels, 1).long().to(model.device)


class PageTask(training.Task):
    """Answers about pages, most steps with a part of the tokens only."""

    def __init__(
        self, model: Any, pages: PictureSampler, labels: Tensor, options: argparse.Namespace
    ) -> None:
        self.model, self.pages, self.labels, self.options = model.train(), pages, labels, options
        self.device = model.device
        self.rng = torch.Generator().manual_seed(options.seed)
        self.free = len(pages.facts) - HELD
        lm = model.model.language_model
        self.heads = [Readout(lm.config.hidden_size, PARTS).to(self.device) for _ in PAGE_LAYERS]
        free = [model.model.image_newline, *nn.ModuleList(self.heads).parameters()]
        self.optimiser = training.FastOptimiser.of(lm, free, options.rate)

    def batches(self, step: int, done: float) -> list[Batch]:
        """Random pages, and the tokens kept of them."""
        chosen = torch.randint(self.free, (self.options.batch,), generator=self.rng).tolist()
        lesson = self.pages.lesson(chosen, 10)
        return [(chosen, lesson, self._kept(lesson))]

    def _kept(self, lesson: Lesson) -> Tensor:
        """Indices `[B, M]` of the most diverse tokens, of random ones, or of all."""
        draw = float(torch.rand((), generator=self.rng))
        whole = self.options.whole
        if draw < whole:
            return lesson.every
        way, shares = ("random", (0.5, 0.35)) if draw < whole + 0.1 else ("diverse", KEEPS)
        share = shares[int(torch.randint(len(shares), (), generator=self.rng))]
        return choose(lesson.tokens, round(share * lesson.tokens.shape[2]), way, self.rng)

    def loss(self, batch: Batch) -> tuple[Tensor, training.Figures]:
        """Loss of the answers and of the read-outs."""
        with training.fast(self.device):
            return self._loss(*batch)

    def _loss(
        self, chosen: list[int], lesson: Lesson, kept: Tensor
    ) -> tuple[Tensor, training.Figures]:
        found = answer(self.model, lesson, kept)
        loss = answer_loss(self.model, found.states, lesson.packed.labels)
        labels = self.labels[:, chosen].gather(2, kept.expand(len(self.labels), -1, -1))
        named, dense = dict(zip(PARTS, labels, strict=True)), loss.new_zeros(())
        for head, layer in zip(self.heads, PAGE_LAYERS, strict=True):
            dense = dense + head.loss(found.layers[layer][:, 1 : kept.shape[1] + 1], named)
        figures = {"loss": loss.detach(), "dense": dense.detach(), "kept": kept.shape[1]}
        return loss + 0.3 * dense, figures

    def look(self) -> training.Figures:
        """Shares answered correctly by kind, with all tokens."""
        starts = range(self.free, self.free + HELD, 8)
        lessons = [self.pages.lesson(range(start, start + 8), 12) for start in starts]
        return score(self.model, lessons)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("tiny-document"), help="checkpoint folder")
    add("--start", default=None, help="video model to start from; the embedded one")
    add("--seed", type=int, default=0)
    add("--pages", type=int, default=1800)
    add("--minutes", type=float, default=30)
    add("--batch", type=int, default=12)
    add("--whole", type=float, default=0.05, help="share of steps with all tokens")
    add("--rate", type=float, default=1.2e-3)
    add("--questions", type=int, default=400, help="of the final evaluation")
    add("--counts", type=int, default=2, help="times that the number of things is asked")
    add("--watch", type=float, default=4.0, help="minutes between looks at held pages")
    add("--workers", type=int, default=0, help="processes that draw pages")
    training.device_option(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = _arguments(argv)
    log = training.Log(options.out)
    log.start(seed=options.seed, pages=options.pages)
    start = options.start or str(embedded_path("tiny-video"))
    model, processor = load(start, training.ready(options.device), "float32")
    processor.image_processor.image_grid_pinpoints = GRIDS
    model.config.image_grid_pinpoints = GRIDS
    processor.save_pretrained(options.out)
    drawn = options.pages, options.seed, options.counts, options.workers
    pages, labels = make_pages(model, processor, *drawn)
    task = PageTask(model, pages, labels, options)
    course = training.Course("pages", options.minutes, hold=0.3, watch=options.watch)
    steps = training.train(task, course, log, partial(training.save_model, model, options.out))
    log.end(steps=steps)
    found = run_eval(
        [], options.questions, 1000, options.out, device=str(options.device), name="document"
    )
    log({"stage": "evaluation", **found, "model": "this checkpoint"})
    write_card(options.out, "tiny-document")


if __name__ == "__main__":
    main()
