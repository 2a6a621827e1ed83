"""What the tests of models that draft in a batch share: the models, requests and an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from scheduling import ask, clip, image, model_of
from tiny_models import build
from transformers import Qwen2Config, Qwen2ForCausalLM

from mmfast.serve.engine.base import Finish, Request
from mmfast.serve.engine.drafts import BatchDrafts
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.second_model import SecondModel

ONEVISION, FIXED = "llava_onevision", "adapt=false&least=0&most=3"


@cache
def folder(family: str) -> Path:
    """Draft models: the model itself, one that is near it, one of text, two of other words."""
    home = Path(mkdtemp(prefix="mmfast-second-"))
    model_of(family)[0].save_pretrained(home / "same")
    near, noise = build(family).model, torch.Generator().manual_seed(0)
    for parameter in near.parameters():  # words that are right more often than not
        parameter.data += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=noise)
    near.save_pretrained(home / "near")
    words = near.config.get_text_config().vocab_size
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    for name, count in (("text", words), ("few", words - 60), ("many", words + 9)):
        text = Qwen2ForCausalLM(Qwen2Config(vocab_size=count, **sizes))
        for parameter in text.parameters():  # words that differ
            parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
        text.save_pretrained(home / name)
    return home


def spec_of(name: str, family: str = ONEVISION) -> str:
    """A spec of fixed drafts, with the knobs of `name`."""
    name, _, knobs = name.partition("?")
    return f"draft:{folder(family)}/{name}?{FIXED}" + (f"&{knobs}" if knobs else "")


@contextmanager
def engine(decode: str, family: str = ONEVISION, **options: Any) -> Iterator[Scheduler]:
    options = {"chunk": 96, "memory": "200MB", "decode": decode, **options}
    made = Scheduler(model_of(family), **options)
    try:
        yield made
    finally:
        made.close()


def second(made: Scheduler) -> SecondModel:
    (found,) = made._runner.seconds.values()
    return found


def mixed(decode: str | None, tokens: int = 40) -> list[Request]:
    """Media and text, most with drafts of the second model, one with none, one with others."""
    parts = [(image(1), "what?"), ("a b c a b c " * 5,), (clip(1), "and?"), ("why?",)]
    specs = [decode, decode, decode, "none", "recycle?adapt=false"]
    pairs = zip([*parts, (image(2), "who? who?")], specs, strict=True)
    return [
        ask(f"{i}", *mine, tokens=tokens - 5 * i, decode=spec)
        for i, (mine, spec) in enumerate(pairs)
    ]


def counts(end: Any) -> tuple[int, int] | None:
    """Drafts proposed and accepted."""
    assert isinstance(end, Finish), end
    rows = [row for row in end.trace["rows"] if row["stage"] == "draft"]
    return (rows[0]["tokens_in"], rows[0]["tokens_out"]) if rows else None


def empty(made: Scheduler) -> bool:
    """Nothing is held of any request."""
    own = second(made)
    return not (own.rows or own.store.rows or own._coming or own.reader.answers or own.nbytes)


def reads(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    """Let prompts of drafts be read when their answers have said so much, whatever the clock."""
    begin, propose, waiting = SecondModel.begin, BatchDrafts.propose, list[tuple[Any, Any]]()
    monkeypatch.setattr(SecondModel, "begin", lambda *both: waiting.append(both))

    def proposing(self: BatchDrafts, rows: Any) -> None:
        for model, row in [*waiting]:
            if row in rows and len(row.own.said) > after:
                waiting.remove((model, row))
                begin(model, row)
                while model._coming:
                    model.reader.unit(False)
        propose(self, rows)

    monkeypatch.setattr(BatchDrafts, "propose", proposing)


def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """What was said and what was drafted behind it, at each step of a batch."""
    found: list[tuple[list[int], list[int]]] = []
    propose = BatchDrafts.propose

    def noted(self: BatchDrafts, rows: Any) -> None:
        propose(self, rows)
        drafting = [row.own for row in rows if row.drafts is not None and row.own.tokens]
        found.extend(([*own.said], [*own.tokens]) for own in drafting)

    monkeypatch.setattr(BatchDrafts, "propose", noted)
    return found
