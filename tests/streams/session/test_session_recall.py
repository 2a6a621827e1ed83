"""Sessions whose layers choose again what they read while an answer is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stream_tools import seconds, shared_pipe, watcher

FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")
MEMORY = "sink:8+window:64+retrieve:2"
WAYS = {"max_new_tokens": 9, "temperature": 1.0, "seed": 3}


def watched(family: str, memory: str) -> Any:
    session = shared_pipe(family).open(memory)
    session.push(watcher(family).clip(16), seconds(16))
    return session


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_tells_how_often_layers_chose_and_changed(family: str) -> None:
    with watched(family, MEMORY) as plain, watched(family, f"{MEMORY}?every=3") as session:
        whole, reply = plain.ask("what?", **WAYS), session.ask("what?", **WAYS)
        assert reply.recalled == whole.recalled  # the question chooses as ever
        first, texts = {(f.number, f.layers) for f in reply.recalled}, (reply.read(), whole.read())
        rows = {row.stage: row for row in reply.trace.rows}
        assert list(rows) == ["question", "recall", "generate"]
        assert [row.stage for row in whole.trace.rows] == ["question", "generate"]
        layers = len(session.stream.memory.buffers)
        row = rows["recall"]
        fed = len(reply.ids) - (reply.finished == "length")
        assert row.tokens_in == fed // 3 * layers and 0 < row.tokens_out <= row.tokens_in
        assert row.method == "every=3" and reply.branch is None
        after = {f.number: f.layers for f in reply.recalled}
        assert all(after[number] >= n for number, n in first) and after != dict(first)
        assert texts[0][:2] == texts[1][:2]


@pytest.mark.parametrize("every", [1, 2])
def test_who_asks_makes_no_difference(every: int, tmp_path: Path) -> None:
    """Answers of events, of a saved session and of one that remembers are those of `ask`."""
    family, memory = FAMILIES[0], f"{MEMORY}?every={every}"
    clip = watcher(family).clip(18)
    with watched(family, memory) as session:
        session.save(tmp_path)
        session.push(clip[16], 20.0)
        text = session.ask("what?", max_new_tokens=8).read()
        told = session.ask("what?", max_new_tokens=8, remember=True)
        assert told.read() == text and dict(_rows(told))["recall"] > 0
        live = session.stats()["memory"]["live_tokens"]
        assert live <= 72
    with shared_pipe(family).restore(tmp_path) as session:
        events = session.subscribe("a", reply="what?", threshold=1e-6, max_new_tokens=8)
        session.push(clip[16], 20.0)
        assert [event.text for event in events.waiting()] == [text]


def _rows(reply: Any) -> list[tuple[str, int]]:
    return [(row.stage, row.tokens_in) for row in reply.trace.rows]
