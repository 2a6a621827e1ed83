"""Train the embedded document model from the video model: `python -m mmfast.tiny.document.train`.

Tower and projector learn to read print, then the decoder to find things on a page of nine tiles and
to read the numbers beside them, tables and notes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmfast.models.loading import embedded_path, load
from mmfast.tiny import training
from mmfast.tiny.card import write_card
from mmfast.tiny.document import pages, prints
from mmfast.tiny.document.readout import PARTS, PageReadout, pointers, pointing_loss
from mmfast.tiny.document.tower import READ, PrintTower, ReadTiles
from mmfast.tiny.document.words import learn_words, turn_slowly
from mmfast.tiny.evaluate import run_eval
from mmfast.tiny.video.clips import INPUT
from mmfast.tiny.video.lessons import Lesson, PictureSampler, answer, answer_loss, choose, score
from mmfast.tiny.video.model import DecoderOutput
from mmfast.tiny.video.questions import Fact
from mmfast.tiny.video.scene import IGNORE, PATCHES, TRAIN
from mmfast.tiny.video.tower import scale_pixels, tower_features

GRIDS = [[INPUT, INPUT], [pages.CELLS * INPUT, pages.CELLS * INPUT]]  # small, or nine tiles
# Parts of a page's 1,475 tokens, the most diverse ones; all of them cost ten times more
KEEPS = (0.4, 0.3, 0.2, 0.15)
AROUND = (40, 340)  # tokens that say nothing, beside all those that say something
QUESTIONS = 24  # asked about a page at once
HELD = 64  # pages of each sort that are never trained on
PAGE_LAYERS = (1, 3)  # visual states after these decoder layers predict what is beside them
SAYING = tuple(name for name in PARTS if name.startswith("own") or name == "begun")
Batch = tuple[list[int], Lesson, Tensor]


@dataclass(frozen=True)
class DrawnPage:
    """A page as the tower sees it, and the facts that can be asked."""

    pixels: NDArray[np.uint8]  # overview and tiles. `[1 + tiles, 3, INPUT, INPUT]`
    facts: list[Fact]
    labels: NDArray[np.int8]  # those of PARTS. `[parts, tokens]`


def draw_page(image_processor: Any, seed: int, things: int, index: int) -> DrawnPage:
    """Draw page number `index` of a seed and cut it into tiles; `things` come before print."""
    if index < things:
        page = pages.make_page(TRAIN, seed, index)
        facts, own = list(pages.page_facts(page)), pages.PARTS
        picture, labels = page.picture, pages.page_labels(page)
    else:
        sheet = prints.make_print(TRAIN, seed, index)
        facts, own = list(prints.print_facts(sheet)), prints.PARTS
        picture, labels = sheet.picture, prints.print_labels(sheet, prints.print_owners(sheet))
    pixels = image_processor(picture, return_tensors="pt")["pixel_values"][0]
    whole = ((pixels + 1) * 127.5).round().to(torch.uint8)  # they were bytes before
    every = np.full((len(PARTS), labels.shape[1]), IGNORE, np.int8)
    every[[[*PARTS].index(name) for name in own]] = labels
    return DrawnPage(whole.numpy(), facts, every)


def draw_pages(
    image_processor: Any, things: int, printed: int, seed: int, workers: int = 0
) -> list[DrawnPage]:
    """Pages with things, then printed ones."""
    found = list[DrawnPage]()
    draw = partial(draw_page, image_processor, seed, things)
    one = (torch.set_num_threads, (1,))  # thread of each worker
    total = things + printed
    with get_context("spawn").Pool(workers, *one) if workers else nullcontext() as pool:
        for page in map(draw, range(total)) if pool is None else pool.imap(draw, range(total), 8):
            found.append(page)
            training.progress("pages", len(found), total)
    return found


@torch.no_grad()
def encode_pages(
    model: Any, processor: Any, drawn: Sequence[DrawnPage], seed: int, counts: int = 2
) -> tuple[PictureSampler, Tensor]:
    """Pages as the image path encodes them, and their labels `[parts, n, tokens]`.

    How many there are of things or rows is learned last: asked `counts` times as often as others.
    """
    times = dict.fromkeys(("count", "rows"), counts)
    facts = [[f for f in page.facts for _ in range(times.get(f.kind, 1))] for page in drawn]
    tokens = []
    for page in drawn:
        pixels = scale_pixels(torch.from_numpy(page.pixels).to(model.device))
        tokens.append(model.model.multi_modal_projector(tower_features(model, pixels)).half())
        training.progress("encoded", len(tokens), len(drawn))
    shown = model, torch.stack(tokens), facts, processor.tokenizer
    sampler = PictureSampler(*shown, seed, 0.0, prints.PAGE_WORDINGS)
    labels = torch.from_numpy(np.stack([page.labels for page in drawn], 1))
    return sampler, labels.to(model.device)


def read_tiles(drawn: Sequence[DrawnPage], every: bool = False) -> ReadTiles:
    """Tiles that say something, and what; with `every` all others and overviews, too."""
    parts = [[*PARTS].index(name) for name in READ]
    tiles, labels = [], []
    side, rows = pages.CELLS, pages.CELLS * PATCHES
    for page in drawn:
        own = page.labels[parts][:, PATCHES**2 :]
        grid = np.concatenate([own, np.full((len(own), 1), IGNORE, np.int8)], 1)
        grid = grid.reshape(len(own), rows, rows + 1)[:, :, :-1]  # without newlines
        cut = grid.reshape(len(own), side, PATCHES, side, PATCHES).transpose(1, 3, 0, 2, 4)
        said = cut.reshape(side**2, len(own), -1)
        said = np.concatenate([np.full_like(said[:1], IGNORE), said])  # nothing in the overview
        for tile, label in zip(page.pixels, said, strict=True):
            if every or (label != IGNORE).any():
                tiles.append(tile)
                labels.append(label)
    return torch.from_numpy(np.stack(tiles)), torch.from_numpy(np.stack(labels, 1))


class PageTask(training.Task):
    """Answers about pages, most steps with a part of the tokens only."""

    parallel = True

    def __init__(
        self,
        model: Any,
        known: PictureSampler,
        labels: Tensor,
        options: argparse.Namespace,
    ) -> None:
        self.model, self.pages, self.labels, self.options = model.train(), known, labels, options
        self.device = model.device
        self.rng = torch.Generator().manual_seed(options.seed)
        held = {*range(HELD), *range(options.pages, options.pages + HELD)}
        self.held, total = sorted(held), range(len(known.facts))
        free = [page for page in total if page not in held and known.facts[page]]
        sorts = ([p for p in free if (p < options.pages) == things] for things in (True, False))
        self.free = [torch.tensor(sort) for sort in sorts]
        says = [[*PARTS].index(name) for name in SAYING]
        self.saying = (labels[says] != IGNORE).any(0)  # [n, tokens]
        lm = model.model.language_model
        width = lm.config.hidden_size
        self.heads = [PageReadout(width, known.tokenizer).to(self.device) for _ in PAGE_LAYERS]
        rest = [model.model.image_newline, *nn.ModuleList(self.heads).parameters()]
        self.optimiser = training.FastOptimiser.of(lm, rest, options.rate)

    def batches(self, step: int, done: float) -> list[Batch]:
        """Random pages, and the tokens kept of them, for each thread."""
        return [self._batch() for _ in range(training.side_by_side(self.device))]

    def _batch(self) -> Batch:
        things = round(self.options.things * self.options.batch)
        parts = zip(self.free, (things, self.options.batch - things), strict=True)
        chosen = torch.cat([s[torch.randint(len(s), (n,), generator=self.rng)] for s, n in parts])
        lesson = self.pages.lesson(chosen.tolist(), QUESTIONS)
        return chosen.tolist(), lesson, self._kept(lesson, chosen)

    def _kept(self, lesson: Lesson, chosen: Tensor) -> Tensor:
        """Indices `[B, M]` of tokens: all, all that say something, diverse or random ones."""
        draw = float(torch.rand((), generator=self.rng)) - self.options.whole
        if draw < 0:
            return lesson.every
        total = lesson.tokens.shape[2]
        if draw < 0.1:
            return choose(lesson.tokens, total // 2, "random", self.rng)
        if draw < 0.4:
            share = KEEPS[int(torch.randint(len(KEEPS), (), generator=self.rng))]
            return choose(lesson.tokens, round(share * total), "diverse", self.rng)
        says = self.saying[chosen].float()
        urge = says + 0.5 * torch.rand(says.shape, generator=self.rng).to(says.device)
        around = int(torch.randint(*AROUND, (), generator=self.rng))
        many = min(int(says.sum(1).max()) + around, total)
        return urge.topk(many).indices.sort(-1).values

    def _pointed(
        self, chosen: list[int], lesson: Lesson, kept: Tensor, found: DecoderOutput
    ) -> Tensor:
        """Loss of attending to the tokens of the word or number that answers."""
        packed = lesson.packed
        starts = packed.labels != IGNORE
        starts[:, 1:] &= ~starts[:, :-1]  # of each answer, in order
        lines, columns = starts.nonzero(as_tuple=True)
        rows = zip(chosen, lesson.facts, strict=True)
        told = [pointers(self.labels[:, page], fact) for page, facts in rows for fact in facts]
        wanted = torch.stack(told).gather(1, kept[lines])  # [questions, M]
        some = wanted.any(1)
        if not some.any():
            return found.states.new_zeros(())
        places = lesson.every.shape[1] + 2 + packed.within[lines, columns]
        asked = lines[some], columns[some], places[some]
        lm = self.model.model.language_model
        return pointing_loss(lm, found, kept, wanted[some], asked)

    def loss(self, batch: Batch) -> tuple[Tensor, training.Figures]:
        """Loss of the answers and of the read-outs."""
        with training.fast(self.device):
            return self._loss(*batch)

    def _loss(
        self, chosen: list[int], lesson: Lesson, kept: Tensor
    ) -> tuple[Tensor, training.Figures]:
        found = answer(self.model, lesson, kept)
        loss = answer_loss(self.model, found.states, lesson.packed.labels)
        labels = self.labels[:, chosen].long().gather(2, kept.expand(len(self.labels), -1, -1))
        named, dense = dict(zip(PARTS, labels, strict=True)), loss.new_zeros(())
        for head, layer in zip(self.heads, PAGE_LAYERS, strict=True):
            states = found.layers[layer][:, 1 : kept.shape[1] + 1]
            dense = dense + head.loss(states, named, self.model.lm_head.weight)
        pointed = self._pointed(chosen, lesson, kept, found)
        figures = {"loss": loss.detach(), "dense": dense.detach(), "pointed": pointed.detach()}
        return loss + 0.3 * dense + 0.3 * pointed, {**figures, "kept": kept.shape[1]}

    def look(self) -> training.Figures:
        """Shares answered correctly by kind, with all tokens."""
        starts = range(0, len(self.held), 8)
        lessons = [self.pages.lesson(self.held[start : start + 8], 12) for start in starts]
        return score(self.model, lessons)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = training.recipe_parser(__doc__, "tiny-document")
    add = parser.add_argument
    add("--start", default=str(embedded_path("tiny-video")), help="model to start from")
    add("--pages", type=int, default=1800, help="with things on them")
    add("--prints", type=int, default=2600, help="printed pages")
    add("--tower-minutes", type=float, default=20, help="of learning to read")
    add("--minutes", type=float, default=60, help="of the decoder")
    add("--batch", type="count", default=8, help="of each thread, or of a device")
    add("--things", type=float, default=0.5, help="share of pages with things in a batch")
    add("--whole", type=float, default=0.15, help="share of steps with all tokens")
    add("--tower-rate", type=float, default=1e-3)
    add("--rate", type="rate", default=1.2e-3)
    add("--questions", type="count", default=400, help="of each final evaluation")
    add("--counts", type="count", default=5, help="times that a number of things or rows is asked")
    add("--watch", type=float, default=4.0, help="minutes between looks at held pages")
    add("--workers", type=int, default=0, help="processes that draw pages")
    training.device_option(parser)
    options = parser.parse_args(argv)
    if min(options.pages, options.prints) <= HELD:
        parser.error(f"{HELD} pages of each sort are held out: give more --pages and --prints")
    return options


def learn_to_read(
    model: Any,
    drawn: Sequence[DrawnPage],
    options: argparse.Namespace,
    log: training.Log,
    save: Callable[[], None],
) -> None:
    """Train tower and projector on the tiles of pages."""
    things, printed = drawn[: options.pages], drawn[options.pages :]
    others, seen = read_tiles(things, every=True)
    unread = torch.from_numpy(np.stack([page.pixels[0] for page in printed]))  # overviews
    nothing = seen.new_full((len(seen), len(unread), seen.shape[2]), IGNORE)
    others, seen = torch.cat([others, unread]), torch.cat([seen, nothing], 1)
    task = PrintTower(model, read_tiles(printed), (others, seen), options.seed, options.tower_rate)
    course = training.Course("print", options.tower_minutes, hold=0.3, watch=options.watch)
    training.train(task, course, log, save, options.out / "tower.pt")


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = _arguments(argv)
    log = training.Log(options.out, fresh=False)
    drawn_as: Mapping[str, Any] = {key: getattr(options, key) for key in ("pages", "prints")}
    log.start(seed=options.seed, **drawn_as)
    model, processor = load(options.start, training.ready(options.device), "float32")
    learn_words(model, processor)
    turn_slowly(model)
    processor.image_processor.image_grid_pinpoints = GRIDS
    model.config.image_grid_pinpoints = GRIDS
    processor.save_pretrained(options.out)
    save = partial(training.save_model, model, options.out)
    drawn = draw_pages(
        processor.image_processor, options.pages, options.prints, options.seed, options.workers
    )
    learn_to_read(model, drawn, options, log, save)
    known = encode_pages(model, processor, drawn, options.seed, options.counts)
    task = PageTask(model, *known, options)
    course = training.Course("pages", options.minutes, hold=0.3, watch=options.watch)
    steps = training.train(task, course, log, save, options.out / "pages.pt")
    log.end(steps=steps)
    for name in ("document", "table"):
        found = run_eval(
            [], options.questions, 1000, options.out, device=str(options.device), name=name
        )
        log({"stage": "evaluation", **found, "model": "this checkpoint"})
    write_card(options.out, "tiny-document")


if __name__ == "__main__":
    main()
