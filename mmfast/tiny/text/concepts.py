"""Training of `compllm` for a causal language model of text, whose weights stay frozen.

A step reads contexts with questions and answers behind them twice: as they are, and with the
embeddings that the compressor makes of the segments of the context. What the model computes where
it answers is to be the same (`models.decoder.concepts.distillation`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.compressors.base import file_of
from mmfast.compressors.compllm import CompLLM
from mmfast.core.errors import ModelError
from mmfast.models.decoder.concepts import AnsweredText, distillation, new_compressor
from mmfast.models.text_chat import load_text
from mmfast.tiny import training
from mmfast.tiny.text.evaluate import NAME
from mmfast.tiny.text.haystack import FactCounts, make_document

HELD = 4  # examples that the figures on held-out data are of
MOST = (6, 2, 2)  # facts of a kind in a document, at most


def example(
    words: Any, context: str, asked: Sequence[tuple[str, str]], device: Any
) -> AnsweredText:
    """Tokens of a context, and of questions with their answers behind it, one after the other."""
    rest, writes = list[int](), list[bool]()
    for question, answer in asked:
        told, found = (
            words(text, add_special_tokens=False).input_ids for text in (question, answer)
        )
        rest += [*told, *found]
        writes += [False] * (len(told) - 1) + [True] * len(found) + [False]
    parts = (words(context).input_ids, rest, writes)
    read, asks, marks = (torch.tensor(each, device=device) for each in parts)
    return AnsweredText(read, asks, marks)


class DocumentExamples:
    """Endless documents of the training split with a question about every fact."""

    def __init__(self, words: Any, device: Any, seed: int, length: int) -> None:
        self.words, self.device, self.length = words, device, length
        self.rng = np.random.default_rng([seed, 67])

    def draw(self, many: int) -> list[AnsweredText]:
        """Return so many examples."""
        return [self._one() for _ in range(many)]

    def _one(self) -> AnsweredText:
        facts = FactCounts(*(int(self.rng.integers(1, 1 + limit)) for limit in MOST))
        paper = make_document(self.length, self.rng, facts)
        asked = [(f"{q.text} {q.lead}", f"{q.answer}.") for q in paper.questions]
        return example(self.words, paper.text, asked, self.device)


class FileExamples:
    """Lines of JSON with `context`, `question` and `answer`; ModelError where there are few."""

    def __init__(self, words: Any, device: Any, seed: int, path: Path) -> None:
        self.rng = np.random.default_rng([seed, 68])
        with path.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
        if len(rows) <= HELD or any({"context", "question", "answer"} - set(r) for r in rows):
            raise ModelError(
                f"{str(path)!r} has {len(rows)} examples; give over {HELD} lines of JSON, each "
                "with 'context', 'question' and 'answer'"
            )
        self.rows = [
            example(words, row["context"], [(row["question"], row["answer"])], device)
            for row in rows
        ]
        self._held = True

    def draw(self, many: int) -> list[AnsweredText]:
        """Return so many examples; the first call has the held-out ones."""
        if self._held:
            self._held = False
            held, self.rows = self.rows[:many], self.rows[many:]
            return held
        return [self.rows[i] for i in self.rng.integers(len(self.rows), size=many)]


class ConceptTask(training.Task):
    """A compressor of text in training under a frozen model."""

    def __init__(
        self, model: Any, compressor: CompLLM, source: Any, *, rate: float, batch: int = 4
    ) -> None:
        self.model, self.source, self.batch = model.eval().requires_grad_(False), source, batch
        self.compressor = compressor.train()
        matrices = [each for each in compressor.parameters() if each.ndim == 2]
        rest = [each for each in compressor.parameters() if each.ndim != 2]
        self.optimiser = training.Optimiser(matrices, rest, rate)
        self.exam = source.draw(HELD)

    def batches(self, step: int, done: float) -> list[list[AnsweredText]]:
        """One batch of examples."""
        return [self.source.draw(self.batch)]

    def loss(self, batch: list[AnsweredText]) -> tuple[Tensor, training.Figures]:
        """Loss of distillation, and the share of words of answers that come first."""
        loss, states = distillation(self.model, self.compressor, batch)
        ends = [text.writes.roll(1) for text in batch]  # the last one writes nothing
        right = torch.cat([text.rest[end] for text, end in zip(batch, ends, strict=True)])
        with torch.no_grad():
            head = self.model.get_output_embeddings()
            found = head(states.to(head.weight.dtype)).argmax(-1)
        return loss, {"loss": loss.item(), "right": float((found == right).float().mean())}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Both figures on held-out examples."""
        return self.loss(self.exam)[1]


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Train one compressor for every rate."""
    model, words = load_text(options.model, options.device, "float32")
    for rate in options.tokens:
        torch.manual_seed(options.seed)
        here = (words, model.device, options.seed)
        source: Any = (
            FileExamples(*here, options.data)
            if options.data is not None
            else DocumentExamples(*here, options.length)
        )
        knobs = {"segment": options.segment, "rank": options.rank, "alpha": 2.0 * options.rank}
        compressor = new_compressor(model, rate, **knobs)
        path = file_of(options.out, "compllm", rate)
        task = ConceptTask(model, compressor, source, rate=options.rate, batch=options.batch)
        training.teach(task, log, options, path, compressor, watch=2.0)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(
        __doc__, "python -m mmfast.compressors.train --compressor compllm"
    )
    add = parser.add_argument
    add("--compressor", default="compllm", choices=["compllm"])
    add("--model", default=NAME, help="embedded model or folder of a causal language model")
    add("--data", type="present", help="lines of JSON: context, question, answer; else documents")
    add("--tokens", type="count", nargs="+", default=[2], help="rates; several train each")
    add("--out", type=Path, default=Path("compressed"), help="folder that gets compressors/")
    add("--segment", type="count", default=20, help="tokens of a segment")
    add("--rank", type="count", default=16, help="of the LoRA")
    add("--length", type="count", default=256, help="tokens of a document")
    add("--batch", type="count", default=4, help="examples of a step")
    training.teach_options(parser, rate=2e-3, steps=1000)
    add("--device", default="cpu")
    return parser.parse_args(argv)


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights and the log."""
    options = arguments(argv)
    fields = ("compressor", "model", "tokens", "segment", "rank", "seed", "minutes", "steps")
    training.Log.record(options.out / "compressors", run, options, *fields)
