"""Training of the adapter of an early exit (Kangaroo) on what its model itself says.

The frozen model goes on from texts once. Behind every token of them the adapter, which reads the
states of the first layers, learns the distribution of the whole model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.decoding.speculation import TRAINING
from mmfast.models.decoder.early_exit import ExitAdapter, ExitStates, new_adapter
from mmfast.models.text_chat import load_text
from mmfast.tiny import training
from mmfast.tiny.text.evaluate import NAME
from mmfast.tiny.text.haystack import FactCounts, make_document

HELD = 0.2  # share of the texts that are never trained on


@dataclass(frozen=True)
class ExitLesson:
    """A text as the first layers see it, and what the whole model makes of it.

    States behind the layer of the exit, and those that the head reads, each `[T, D]`.
    """

    states: Tensor
    last: Tensor


@torch.no_grad()
def observe(model: Any, inputs: Mapping[str, Any], layer: int, length: int) -> list[ExitLesson]:
    """Let a model go on from prompts without padding, at most `length` likeliest tokens.

    `inputs` are those of `generate`; media among them are seen as the model sees them. A text ends
    where the model ends it. Returns a lesson for each.
    """
    watch, heads = ExitStates(), list[Tensor]()
    ids, counts = written(model, inputs, length)
    given = {**inputs, "input_ids": ids}
    if "attention_mask" in inputs:
        given["attention_mask"] = torch.ones_like(ids)

    def note(_: Any, args: tuple[Tensor, ...]) -> None:
        heads.append(args[0].float())

    handle = model.get_output_embeddings().register_forward_pre_hook(note)
    try:
        with watch.watched(model, layer):
            model(**given)
            states = torch.cat([each for _, each in watch.found], dim=1).float()
    finally:
        handle.remove()
    pairs = zip(states, torch.cat(heads, dim=1), counts, strict=True)
    return [ExitLesson(early[:count], last[:count]) for early, last, count in pairs]


@torch.no_grad()
def written(model: Any, inputs: Mapping[str, Any], length: int) -> tuple[Tensor, list[int]]:
    """Prompts without padding with at most `length` likeliest tokens behind each.

    Returns ids `[B, T]`, and how many of each row there are up to where the model ends it.
    """
    start = inputs["input_ids"].shape[1]
    ids = model.generate(**inputs, max_new_tokens=length, do_sample=False)
    found = model.generation_config.eos_token_id
    ends = [] if found is None else found if isinstance(found, list) else [found]
    marks = torch.isin(ids[:, start:], torch.tensor(ends, device=ids.device))
    over = marks.long().cumsum(1).cumsum(1) > 1  # behind the first
    return ids, (start + (~over).sum(1)).tolist()


def divergence(adapter: ExitAdapter, head: Any, lesson: ExitLesson) -> tuple[Tensor, Tensor]:
    """Mean divergence of the exit from the model over a text, and the places where they agree.

    Cross-entropy with the model's probabilities, as in the paper, less what no draft can gain.
    """
    found, _ = adapter(lesson.states[None])
    q = head(found[0]).float().log_softmax(-1)
    with torch.no_grad():
        p = head(lesson.last).float().log_softmax(-1)
    loss = F.kl_div(q, p, reduction="batchmean", log_target=True)
    return loss, q.argmax(-1) == p.argmax(-1)


class ExitTask(training.Task):
    """An adapter in training under a frozen model."""

    def __init__(
        self,
        adapter: ExitAdapter,
        head: Any,
        lessons: Sequence[ExitLesson],
        *,
        rate: float,
        batch: int = 8,
        seed: int = 0,
    ) -> None:
        cut = len(lessons) - max(1, round(HELD * len(lessons)))
        if cut < 1:
            raise ModelError(f"{len(lessons)} texts leave none to train on; give 2 or more")
        self.adapter, self.head, self.batch = adapter.train(), head, batch
        self.lessons, self.exam = lessons[:cut], lessons[cut:]
        self.optimiser = training.Optimiser.by_layer(adapter, rate)
        self.rng = torch.Generator().manual_seed(seed)

    def batches(self, step: int, done: float) -> list[list[ExitLesson]]:
        """Random texts."""
        chosen = torch.randint(len(self.lessons), (self.batch,), generator=self.rng).tolist()
        return [[self.lessons[number] for number in chosen]]

    def loss(self, batch: Sequence[ExitLesson]) -> tuple[Tensor, training.Figures]:
        """Mean divergence, and the share of tokens that the exit drafts right."""
        parts = [divergence(self.adapter, self.head, each) for each in batch]
        total = torch.stack([loss for loss, _ in parts]).mean()
        right = torch.cat([agrees for _, agrees in parts]).float().mean()
        return total, {"loss": total.item(), "right": right.item()}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Both figures on held-out texts."""
        return self.loss(self.exam)[1]


def texts(options: argparse.Namespace, part: Sequence[int] = ()) -> Iterator[str]:
    """Lines of `--data`, or endless documents, which another `part` has others of."""
    if options.data is not None:
        with options.data.open(encoding="utf-8") as lines:
            yield from (line.strip() for line in lines if line.strip())
        return
    rng = np.random.default_rng([options.seed, 71, *part])
    while True:
        yield make_document(4 * options.context, rng, FactCounts(2, 1, 1)).text


def prompts(words: Any, options: argparse.Namespace) -> list[Tensor]:
    """Texts cut to `context` tokens, `[B, context]` each; ModelError where too few are as long."""
    lines = list[list[int]]()
    for text in texts(options):
        ids = words(text).input_ids[: options.context]
        if len(ids) == options.context:
            lines.append(ids)
        if len(lines) == options.prompts:
            break
    if len(lines) < 2:
        raise ModelError(
            f"{len(lines)} of the texts have {options.context} tokens; lower --context, or give "
            "longer lines in --data"
        )
    return list(torch.tensor(lines).split(options.batch))


def gather(model: Any, words: Any, options: argparse.Namespace) -> list[ExitLesson]:
    """Lessons of prompts; ModelError where too few texts are long enough."""
    found, parts = list[ExitLesson](), prompts(words, options)
    for part in parts:
        ids = part.to(model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found += observe(model, inputs, options.layer, options.length)
        training.progress("texts", len(found), sum(map(len, parts)))
    return found


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Train one adapter."""
    model, words = load_text(options.model, options.device, "float32")
    model.requires_grad_(False)
    torch.manual_seed(options.seed)
    adapter = new_adapter(model, options.layer)
    with log.stage("texts", prompts=options.prompts):
        lessons = gather(model, words, options)
    adapter.to(model.device)
    head = model.get_output_embeddings()
    how = {"rate": options.rate, "batch": options.batch, "seed": options.seed}
    task = ExitTask(adapter, head, lessons, **how)
    log({"stage": "untrained", "layer": options.layer, **task.look()})
    training.teach(task, log, options, options.out, adapter, watch=1.0)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__, TRAINING)
    add = parser.add_argument
    add("--layer", type="count", default=1, help="decoder layers in front of the exit")
    add("--out", type=Path, default=Path("exit.safetensors"), help="file of the adapter")
    text_options(parser, rate=1e-2)
    return parser.parse_args(argv)


def text_options(parser: argparse.ArgumentParser, rate: float) -> None:
    """Add the options of a model, of the texts that it goes on from, and of training on them."""
    add = parser.add_argument
    add("--model", default=NAME, help="embedded model or folder of a causal language model")
    add("--data", type="present", help="texts to go on from, one a line; else documents")
    add("--prompts", type="count", default=200, help="texts that the model goes on from")
    add("--context", type="count", default=64, help="tokens of each")
    add("--length", type="count", default=48, help="tokens that it adds to each, at most")
    add("--batch", type="count", default=8, help="texts of a step")
    training.teach_options(parser, rate=rate, steps=1000)
    add("--device", default="cpu")


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the weights and the log."""
    options = arguments(argv)
    fields = ("model", "layer", "seed", "minutes", "steps", "prompts", "context", "length")
    training.Log.record(options.out.parent, run, options, *fields)
