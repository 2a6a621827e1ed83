"""Mistakes of a first hour get one line that says what is accepted; no model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

import mmfast
from mmfast.core.errors import ModelError, an
from mmfast.models.text_stream import stripped


@pytest.mark.parametrize("given", [None, "Qwen/Qwen2.5-VL-7B-Instruct", 3])
@pytest.mark.parametrize("spec", [None, "evs:0.5"])
def test_attach_takes_a_loaded_model_alone(given: Any, spec: str | None) -> None:
    with pytest.raises(ModelError) as caught:
        mmfast.attach(given, spec)
    line = str(caught.value)
    assert repr(given) in line and "from_pretrained" in line and "\n" not in line


@pytest.mark.parametrize(
    "pieces",
    [["  ", " "], [" a", " b ", "", " ", "c  ", "\n"], ["a"], [], ["", "\n\n x", " "]],
)
def test_a_stream_is_the_answer_without_space_around_it(pieces: list[str]) -> None:
    found = list(stripped(iter(pieces)))
    assert "".join(found) == "".join(pieces).strip() and all(found)


def test_leaving_a_stream_ends_what_writes_it() -> None:
    ended = []

    def write() -> Any:
        try:
            yield from ["a", "b", "c"]
        finally:
            ended.append(True)

    pieces: Any = stripped(write())
    assert next(pieces) == "a" and not ended
    pieces.close()
    assert ended


def test_an_article_fits_its_noun() -> None:
    assert [an("int"), an("list"), an("Object")] == ["an int", "a list", "an Object"]
