"""Training of a draft model (FastDraft): `python -m mmfast.tiny.text.drafts --out DIR`.

A small model of the same class and vocabulary first learns to go on with texts, then to say what
the large one says behind prompts (sequence-level distillation, arXiv 2411.11055).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from mmfast.core.errors import ModelError
from mmfast.models.text_chat import load_text
from mmfast.tiny import training
from mmfast.tiny.text.exits import HELD, prompts, text_options, texts, written

IGNORE = -100


@dataclass(frozen=True)
class DraftLesson:
    """Tokens `[T]`, of which those behind the first `given` are learned."""

    ids: Tensor
    given: int = 1


def draft_config(config: Any, layers: int, width: int) -> Any:
    """Configuration of a model with fewer layers and heads; heads are as wide as before.

    Raises:
        ModelError: The width is not that of whole heads, or there are not so many layers.
    """
    part = config.hidden_size // config.num_attention_heads
    if width % part or not part <= width <= config.hidden_size:
        raise ModelError(f"width {width} is no multiple of {part} up to {config.hidden_size}")
    if not 1 <= layers <= config.num_hidden_layers:
        raise ModelError(f"{layers} layers; choose 1 to {config.num_hidden_layers}")
    small, heads = copy.deepcopy(config), width // part
    if getattr(config, "intermediate_size", None):
        small.intermediate_size = config.intermediate_size * width // config.hidden_size
    if known := getattr(config, "num_key_value_heads", None):
        small.num_key_value_heads = max(n for n in range(1, known + 1) if heads % n == 0)
    if getattr(config, "layer_types", None):
        small.layer_types = config.layer_types[:layers]
    small.num_hidden_layers, small.num_attention_heads, small.hidden_size = layers, heads, width
    return small


class DraftTask(training.Task):
    """A draft model in training, beside what its model said on held-out texts."""

    def __init__(
        self,
        draft: Any,
        lessons: Sequence[DraftLesson],
        exam: Sequence[DraftLesson],
        options: argparse.Namespace,
    ) -> None:
        self.draft, self.lessons, self.exam = draft.train(), lessons, exam
        self.device, self.batch = draft.device, options.batch
        self.optimiser = training.Optimiser.by_layer(draft, options.rate)
        self.rng = torch.Generator().manual_seed(options.seed)

    def batches(self, step: int, done: float) -> list[list[DraftLesson]]:
        """Random texts."""
        chosen = torch.randint(len(self.lessons), (self.batch,), generator=self.rng).tolist()
        return [[self.lessons[number] for number in chosen]]

    def loss(self, batch: Sequence[DraftLesson]) -> tuple[Tensor, training.Figures]:
        """Cross-entropy of the tokens that are learned, and the share drafted right."""
        ids = pad_sequence([each.ids for each in batch], batch_first=True).to(self.device)
        places = torch.arange(1, ids.shape[1])
        first = torch.tensor([[each.given] for each in batch])
        behind = torch.tensor([[len(each.ids)] for each in batch])
        learned = ((places >= first) & (places < behind)).to(self.device)
        truth = ids[:, 1:].masked_fill(~learned, IGNORE)
        found = self.draft(input_ids=ids, use_cache=False).logits[:, :-1].float()
        total = cross_entropy(found.flatten(0, 1), truth.flatten(), ignore_index=IGNORE)
        right = (found.argmax(-1) == truth)[learned].float().mean()
        return total, {"loss": total.item(), "right": right.item()}

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Both figures on what the model said on held-out texts."""
        return self.loss(self.exam)[1]


def blocks(words: Any, options: argparse.Namespace) -> list[DraftLesson]:
    """Texts one behind the other, cut into `--blocks` pieces as long as prompt and answer."""
    size, ids = options.context + options.length, list[int]()
    for text in texts(options, (1,)):
        ids += words(text).input_ids
        if len(ids) >= size * options.blocks:
            break
    found = [DraftLesson(torch.tensor(ids[at : at + size])) for at in range(0, len(ids), size)]
    return found[: options.blocks]


def answers(model: Any, words: Any, options: argparse.Namespace) -> list[DraftLesson]:
    """Prompts with what the model says behind them; ModelError where too few are long enough."""
    found, parts = list[DraftLesson](), prompts(words, options)
    for part in parts:
        given = {"input_ids": part.to(model.device)}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        ids, counts = written(model, given, options.length)
        rows = zip(ids.cpu(), counts, strict=True)
        found += [DraftLesson(row[:count], part.shape[1]) for row, count in rows]
        training.progress("texts", len(found), sum(map(len, parts)))
    return found


def run(options: argparse.Namespace, log: training.Log) -> None:
    """Train one draft model in two stages."""
    model, words = load_text(options.model, options.device, "float32")
    config = draft_config(model.config, options.layers, options.width)
    with log.stage("texts", prompts=options.prompts):
        said = answers(model, words, options)
    held = max(1, round(HELD * len(said)))
    torch.manual_seed(options.seed)
    draft = type(model)(config).to(model.device)
    draft.generation_config = copy.deepcopy(model.generation_config)

    def save() -> None:
        training.save_whole(draft, options.out)
        words.save_pretrained(options.out)

    for name, lessons in (("texts alone", blocks(words, options)), ("answers", said[:-held])):
        task = DraftTask(draft, lessons, said[-held:], options)
        course = training.Course(name, options.minutes, options.steps, hold=0.3, watch=1.0)
        training.train(task, course, log, save)
    size = sum(each.numel() for each in draft.parameters())
    log({"stage": "saved", "parameters": size, "of": model.num_parameters()})


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = training.RecipeParser(__doc__)
    add = parser.add_argument
    add("--layers", type="count", default=1, help="decoder layers of the draft model")
    add("--width", type="count", default=64, help="of it: whole heads of the model")
    add("--out", type=Path, default=Path("draft"), help="folder of the draft model")
    add("--blocks", type="count", default=400, help="texts of the first stage")
    text_options(parser, rate=3e-3)
    return parser.parse_args(argv)


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the draft model and the log."""
    options = arguments(argv)
    fields = ("model", "layers", "width", "seed", "minutes", "steps", "prompts", "blocks")
    training.Log.record(options.out, run, options, *fields)


if __name__ == "__main__":
    main()
