"""Drafts in the batch: answers are those of stock generate, beside others without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scheduling import EMBEDDED, answers, ask, image, model_of, stock

from mmfast.serve.engine.base import Finish, Request
from mmfast.serve.engine.scheduler import Scheduler

SPECS = ["lookup?adapt=false", "recycle?adapt=false&most=3", "self:0.2?adapt=false&least=0&most=4"]
FAMILIES = ["llava_onevision", "qwen2_5_vl", "qwen3_vl", "gemma3", EMBEDDED]


@contextmanager
def engine(family: str, **options: Any) -> Iterator[Scheduler]:
    """A scheduler of small chunks, closed at the end."""
    made = Scheduler(model_of(family), **{"chunk": 48, "memory": "200MB", **options})
    try:
        yield made
    finally:
        made.close()


def mixed(tokens: int = 24) -> list[Request]:
    """Each spec, and none, on media and on text."""
    found = []
    for number, spec in enumerate([*SPECS, None, *SPECS, None]):
        parts: list[Any] = [image(number), "what? what? what?"]
        if number > 3:
            parts = ["a b c a b c " * 4]
        found.append(ask(f"{number}", *parts, tokens=tokens + number, decode=spec))
    return found


def drafts(end: Any) -> tuple[int, int] | None:
    """Drafts proposed and accepted."""
    assert isinstance(end, Finish), end
    rows = [row for row in end.trace["rows"] if row["stage"] == "draft"]
    return (rows[0]["tokens_in"], rows[0]["tokens_out"]) if rows else None


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_with_drafts_are_those_of_stock_generate(family: str) -> None:
    requests = mixed()
    with engine(family) as made:
        found = answers(made, requests)
        for request, (text, end) in zip(requests, found, strict=True):
            assert text == stock(model_of(family), request), request.options.decode
            counts = drafts(end)
            print(family, request.options.decode, counts)
            assert (counts is None) == (request.options.decode is None)
        assert made._runner.nbytes == 0
