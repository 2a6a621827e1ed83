"""Nothing grows: a short run of the benchmark with what Python holds, and the long one."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from stream_tools import answer_logits, pipe_of, shared_pipe, watcher

from mmfast.bench.suites.stream import bounded_row, bytes_of, noise_frames
from mmfast.core.errors import MmfastError
from mmfast.streams.memory import auto_memory

MEMORY = "sink:16+window:160+retrieve:2"
FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_grows(family: str) -> None:
    """What Python and the session hold, while frames, questions and answers come and go."""
    pipe = pipe_of(family, reduce="dtd:0.5")
    side = watcher(family).size[0]
    held, traced = [], []
    options = {"host_bytes": "200kB", "history": "100kB"}  # both are full by frame 100
    with pipe.open(MEMORY, **options) as session:
        for i, frame in enumerate(noise_frames(side)):
            session.push(frame, i / 2)
            if i % 10 == 9:
                session.ask("what?", max_new_tokens=2).read()
            if i == 99:
                tracemalloc.start()
            if i % 20 == 19 and i >= 119:
                gc.collect()
                held.append(bytes_of(session))
                traced.append(tracemalloc.get_traced_memory()[0])
            if i == 299:
                break
        stats = session.stats()["memory"]
    tracemalloc.stop()
    assert len(held) == 10 and max(held[4:]) <= 1.01 * max(held[:4])
    # Counted from zero at frame 100, so it fills up with what replaces older things, and then
    # stays: sixty frames of this size alone would be more.
    assert traced[-1] - traced[-4] < 40_000, traced
    assert stats["evicted_blocks"] > 50 and stats["archive"]["dropped"] > 0


@pytest.mark.slow
def test_four_thousand_frames() -> None:
    # `mmfast bench --stream bounded` watches 20,000, which takes minutes.
    row = bounded_row(pipe_of("llava_onevision"), frames=4_000, early=1_500, part=500, side=24)
    assert row["held_growth"] < 0.01 and row["growth"] < 0.01, row


@pytest.mark.slow
def test_a_frame_costs_the_same_after_thousands() -> None:
    """An old session and a young one in turn, so that whatever else runs slows both."""
    pipe, frames = pipe_of("llava_onevision"), noise_frames(24)
    with pipe.open(MEMORY, host_bytes="200kB") as old, pipe.open(MEMORY, host_bytes="200kB") as new:
        for session, age in ((old, 3_000), (new, 300)):
            for i, frame in enumerate(itertools.islice(frames, age)):
                session.push(frame, float(i))
        spent: dict[int, list[float]] = {0: [], 1: []}
        for i, frame in enumerate(itertools.islice(frames, 600)):
            for which, session in enumerate((old, new)):
                start = time.process_time()
                session.push(frame, 3_000.0 + i)
                spent[which].append(time.process_time() - start)
        for session in (old, new):
            assert session.stats()["memory"]["archive"]["dropped"] > 0
    assert abs(statistics.median(spent[0]) / statistics.median(spent[1]) - 1) < 0.10


@pytest.mark.parametrize(
    ("free", "spec"),
    [
        (None, "sink:64+window:12480+retrieve:64"),
        (80 << 30, "sink:64+window:16384+retrieve:64"),
        (4 << 30, "sink:64+window:6208+retrieve:64"),
        (2 << 30, "sink:64+window:8064+retrieve:64+quant:8"),
        (500 << 20, "sink:64+window:3392+retrieve:53+quant:4"),
        (1 << 20, "sink:64+window:512+retrieve:8+quant:4"),
    ],
)
def test_auto_chooses_by_the_free_bytes(free: int | None, spec: str) -> None:
    """A token of Qwen2.5-VL 7B in bfloat16 has 86,016 bytes in three planes."""
    assert auto_memory(free, 28 * 3 * 4 * 128 * 2, 128_000) == spec
    assert auto_memory(free, 10**4, 1_000).startswith("sink:64+window:")


def test_a_session_tells_what_auto_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmfast.streams.stream.free_bytes", lambda device: 1 << 20)
    with pipe_of("llava_onevision").open("auto") as session:
        for i, frame in enumerate(itertools.islice(noise_frames(24), 12)):
            session.push(frame, float(i))
        spec = session.stats()["memory"]["spec"]
        assert spec == session.stream.spec == "sink:64+window:768+retrieve:12+quant:4"


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(
    "store",
    [
        "window:160+retrieve:2+quant:4?residual=8",
        "snapkv:160+retrieve:2",
        "livevlm:160?window=9+retrieve:2",
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_scored_sessions_are_asked_saved_and_go_on(
    family: str, store: str, tmp_path: Path
) -> None:
    pipe, side = pipe_of(family), watcher(family).size[0]
    frames = list(itertools.islice(noise_frames(side), 30))
    with pipe.open(f"sink:16+{store}") as session:
        for i, frame in enumerate(frames[:20]):
            session.push(frame, float(i))
            if i == 12:
                reply = session.ask("What is it?", remember=True, max_new_tokens=6)
                next(reply, "")
        reply.read()
        session.save(tmp_path)
        with pipe.restore(tmp_path) as twin:
            for i, frame in enumerate(frames[20:], 20):
                session.push(frame, float(i))
                twin.push(frame, float(i))
            assert torch.equal(*(answer_logits(each, "What is it?") for each in (session, twin)))
            figures = session.stats()["memory"]
            assert figures["live_tokens"] <= 176 and sum(figures["archive"]["blocks"].values())


@pytest.mark.rest_is_slow(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy", ["tova:160", "sink:16+h2o:150", "livevlm:160?window=9", "expected_attention:160"]
)
def test_an_exchange_is_remembered_where_attention_decides_what_stays(
    policy: str, family: str
) -> None:
    """Its tokens are asked for and ask, as those of text that is written by hand."""
    pipe, side = shared_pipe(family), watcher(family).size[0]
    frames, question = list(itertools.islice(noise_frames(side), 24)), "What is it?"
    with pipe.open(policy) as session, pipe.open(policy) as other:
        for each in (session, other):
            for i, frame in enumerate(frames[:20]):
                each.push(frame, float(i))
        for _ in range(2):
            reply = session.ask(question, remember=True, max_new_tokens=6)
            reply.read()
            stream, script = other.stream, pipe.stream_model.script
            for piece in [*script.question(stream.written, question), script.text(reply.ids)]:
                pipe.stream_model.engine.append(stream.memory, piece)
            stream.written = script.answered(stream.written)
            for each in (session, other):
                for i, frame in enumerate(frames[20:], int(each.stats()["seconds"]) + 1):
                    each.push(frame, float(i))
            assert session.stats()["memory"]["live_tokens"] <= 166
            with pytest.raises(MmfastError, match=r"reads the attention of new tokens"):
                session.stream.branch(question)[0].keep()
            assert torch.equal(*(answer_logits(each, question) for each in (session, other)))
