"""Calls of functions in a model's text, which chats and realtime sessions read alike."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmfast.serve.calls import CLOSE, OPEN, before_call, read_calls, without_calls

INSIDE = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = f"{OPEN}{INSIDE}{CLOSE}"


@given(st.text("a<tol_ca/>", max_size=40), st.integers(1, 5), st.booleans())
def test_text_without_calls_is_the_text_around_them(text: str, size: int, called: bool) -> None:
    assume(OPEN not in text + text)
    written = text + CALL * called + text
    calls = list[str]()
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    found = "".join(without_calls(pieces, calls))
    assert found == text + text
    assert calls == [INSIDE] * called


def test_a_call_may_be_left_open() -> None:
    for pieces in ([f"so {OPEN}1{OPEN}2"], list(f"so {OPEN}1{OPEN}2")):
        calls = list[str]()
        assert "".join(without_calls(pieces, calls)) == "so " and calls == ["1", "2"]


@given(st.text("a<tol_c>", max_size=30), st.text("a<tol_c>", max_size=30))
def test_what_stands_before_a_call_stays_there(text: str, later: str) -> None:
    sure = before_call(text)
    assert before_call(text + later) >= sure
    assert (text + CALL).index(OPEN) >= sure
    assert OPEN in text or sure > len(text) - len(OPEN)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (INSIDE, [("weather", '{"city": "Paris"}')]),
        (f"[{INSIDE}, {{}}, 3]", [("weather", '{"city": "Paris"}')]),
        ('{"name": "weather", "parameters": {"a": 1}}', [("weather", '{"a": 1}')]),
        ('{"name": "weather", "arguments": "{}"}', [("weather", "{}")]),
        ('{"name": "weather"}', [("weather", "{}")]),
        *((wrong, []) for wrong in ("", "{", "[]", "3", "null", '{"name": "other"}')),
        *((wrong, []) for wrong in ('{"name": ["weather"]}', '{"name": {}}', "[" * 100_000)),
        (json.dumps({"name": None, "arguments": {}}), []),
    ],
)
def test_calls_of_named_functions_are_read(text: str, found: list[tuple[str, str]]) -> None:
    for names in (["weather"], {"weather"}):
        assert read_calls(text, names) == found
