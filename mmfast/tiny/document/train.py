"""Train the embedded document model from the video model: `python -m mmfast.tiny.document.train`.

Tower and projector stay as they are; the decoder learns to find things on a page of nine tiles
and to read the numbers beside them. One CPU core does it in half an hour. Figures go to
OUT/training.jsonl, and the model card is written from them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmfast.models.loading import embedded_path, load
from mmfast.tiny.card_document import write_card
from mmfast.tiny.document.pages import (
    CELLS,
    PAGE_WORDINGS,
    Page,
    PageHead,
    ask,
    make_page,
    page_facts,
    page_labels,
)
from mmfast.tiny.evaluate import run_eval
from mmfast.tiny.optim import Mixed, schedule, split_parameters
from mmfast.tiny.video.clips import INPUT
from mmfast.tiny.video.language import answer_loss, forward
from mmfast.tiny.video.lessons import Lesson, choose, pack
from mmfast.tiny.video.scene import TRAIN
from mmfast.tiny.video.tower import tower_features

Report = Callable[[dict[str, Any]], None]
GRIDS = [[INPUT, INPUT], [CELLS * INPUT, CELLS * INPUT]]  # a small picture, or nine tiles
KEEPS = (0.3, 0.2, 0.2, 0.15, 0.1)  # of a page's 1,475 tokens; all of them cost ten times more
HELD = 64
DEEP = (1, 3)  # decoder layers whose visual states must know what is beside them


class Pages:
    """Pages as the image path encodes them, and questions about them."""

    def __init__(self, model: Any, processor: Any, count: int, seed: int) -> None:
        self.model, self.tokenizer = model, processor.tokenizer
        self.rng = np.random.default_rng([seed, 2])
        self.facts, parts, labels = [], [], []
        for index in range(count):
            page = make_page(TRAIN, seed, index)
            self.facts.append(page_facts(page))
            parts.append(self._encode(processor, page))
            labels.append(page_labels(page))
            if index % 50 == 0:
                print(f"\rpages {index}/{count}", end="", file=sys.stderr, flush=True)
        self.tokens = torch.stack(parts)  # [n, 1 + tiles, P, H]
        self.labels = torch.stack(labels, 1)  # [parts, n, tokens]

    @torch.no_grad()
    def _encode(self, processor: Any, page: Page) -> Tensor:
        pixels = processor.image_processor(page.picture, return_tensors="pt")["pixel_values"][0]
        features = tower_features(self.model, pixels)
        tokens: Tensor = self.model.model.multi_modal_projector(features)
        return tokens.half()

    def lesson(self, chosen: Sequence[int], questions: int) -> Lesson:
        """A batch of pages, laid out as the stock model packs overview, tiles and newlines."""
        rows, kinds = [], []
        for page in chosen:
            known = self.facts[page]
            asked = [known[i] for i in self.rng.permutation(len(known))[:questions]]
            kinds.append([fact.kind for fact in asked])
            rows.append([self._ids(fact) for fact in asked])
        encoded = self.tokens[list(chosen)].float()  # [B, 1 + tiles, P, H]
        side = round(encoded.shape[2] ** 0.5)
        tiles = encoded[:, 1:].unflatten(1, (CELLS, CELLS)).unflatten(3, (side, side))
        mosaic = tiles.transpose(2, 3).flatten(1, 2).flatten(2, 3)  # [B, rows, columns, H]
        newline = self.model.model.image_newline.expand(len(rows), CELLS * side, 1, -1)
        lines = torch.cat([mosaic, newline], 2).flatten(1, 2)
        shown = torch.cat([encoded[:, 0], lines[:, :-1]], 1)[:, None]  # forward adds the last one
        return Lesson(shown, pack(rows), kinds, {}, torch.zeros(len(rows), 1).long(), {})

    def _ids(self, fact: Any) -> tuple[list[int], list[int]]:
        text = ask(fact, int(self.rng.integers(2)))
        return self.tokenizer.encode(text), self.tokenizer.encode(fact.answer)


def kept(lesson: Lesson, whole: float, rng: torch.Generator) -> Tensor:
    """Tokens of this step, `[B, M]` ascending: the most diverse, a random part, or all of them.

    A random part loses digits, so most steps keep what differs from the rest of the page.
    """
    batch, total = len(lesson.tokens), lesson.tokens.shape[2]
    draw = float(torch.rand((), generator=rng))
    if draw < whole:
        return torch.arange(total).expand(batch, -1)
    way, shares = ("random", (0.5, 0.35)) if draw < whole + 0.1 else ("diverse", KEEPS)
    share = shares[int(torch.randint(len(shares), (), generator=rng))]
    return choose(lesson.tokens, round(share * total), way, rng)


@torch.no_grad()
def score(model: Any, pages: Pages, chosen: Sequence[int]) -> dict[str, float]:
    """Share of questions right by kind, all tokens, on pages that are not trained on."""
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(chosen), 8):
        lesson = pages.lesson(chosen[start : start + 8], 12)
        total = lesson.tokens.shape[2]
        states, _ = forward(model, lesson, torch.arange(total).expand(len(lesson.tokens), -1))
        marks = lesson.packed.correct(model.lm_head(states).argmax(-1))
        for kinds, row in zip(lesson.kinds, marks, strict=True):
            for kind, mark in zip(kinds, row, strict=True):
                right[kind].append(mark)
    return {kind: sum(right[kind]) / len(right[kind]) for kind in PAGE_WORDINGS}


def train(model: Any, pages: Pages, options: argparse.Namespace, report: Report) -> int:
    """Train the decoder for the given minutes; returns the steps."""
    text, rng = model.model.language_model, torch.Generator().manual_seed(options.seed)
    matrices, rest = split_parameters(text)
    heads = [PageHead(text.config.hidden_size) for _ in DEEP]
    free_parts = [*rest, model.model.image_newline, *nn.ModuleList(heads).parameters()]
    optimiser = Mixed(matrices, free_parts, options.rate)
    free = len(pages.facts) - HELD
    start, step, looked = time.monotonic(), 0, 0.0
    while (spent := time.monotonic() - start) < 60 * options.minutes:
        chosen = torch.randint(free, (options.batch,), generator=rng).tolist()
        lesson = pages.lesson(chosen, 10)
        part = kept(lesson, options.whole, rng)
        states, layers = forward(model, lesson, part)
        loss = answer_loss(model, states, lesson.packed.labels)
        labels = pages.labels[:, chosen].gather(2, part.expand(len(pages.labels), -1, -1))
        dense = loss.new_zeros(())
        for head, layer in zip(heads, DEEP, strict=True):
            dense = dense + head.loss(layers[layer][:, 1 : part.shape[1] + 1], labels)
        (loss + 0.3 * dense).backward()
        optimiser.step(schedule(spent / (60 * options.minutes), hold=0.3))
        step += 1
        if step % 20 == 1:
            row = {"step": step, "seconds": spent, "loss": loss.item(), "dense": dense.item()}
            report({"stage": "pages", **row, "kept": part.shape[1]})
        if spent - looked > 240:
            looked = spent
            report(
                {"stage": "held-out", "step": step, **score(model, pages, range(free, free + HELD))}
            )
            model.save_pretrained(options.out)
    report({"stage": "held-out", "step": step, **score(model, pages, range(free, free + HELD))})
    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tiny-document"), help="checkpoint folder")
    parser.add_argument("--start", default=None, help="video model to start from; the embedded one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pages", type=int, default=1800)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--whole", type=float, default=0.05, help="share of steps with all tokens")
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--questions", type=int, default=400, help="of the final evaluation")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "training.jsonl"
    log.unlink(missing_ok=True)

    def report(row: dict[str, Any]) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, file=sys.stderr, flush=True)

    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    facts = {"machine": machine, "torch": torch.__version__, "pages": options.pages}
    report({"stage": "start", "seed": options.seed, **facts})
    start = time.monotonic()
    model, processor = load(options.start or str(embedded_path()), "cpu", "float32")
    processor.image_processor.image_grid_pinpoints = GRIDS
    model.config.image_grid_pinpoints = GRIDS
    processor.save_pretrained(options.out)
    pages = Pages(model, processor, options.pages, options.seed)
    steps = train(model.train(), pages, options, report)
    model.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)
    report({"stage": "end", "steps": steps, "seconds": time.monotonic() - start})
    found = run_eval([], options.questions, 1000, options.out, name="document")
    report({"stage": "evaluation", **found, "model": "this checkpoint"})
    write_card(options.out)


if __name__ == "__main__":
    main()
