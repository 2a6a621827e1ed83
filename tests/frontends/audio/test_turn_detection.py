"""Turns in a stream of sound: when they begin and end, what they hold, and for any split."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.core.errors import SpecError
from mmfast.frontends.audio.activity import VoiceActivity
from mmfast.frontends.audio.turns import TurnCutter, TurnEvent
from mmfast.tiny.speech import recordings

SAID = ("which way does the red circle move", "hello there, how are you?", "stop")


class Script(VoiceActivity):
    """A detector that hears speech where samples are above a tenth: exact, and quick."""

    def __init__(self) -> None:
        self.engine = "script"
        self._engine = self

    def start(self, batch: int = 1) -> Any:
        return None

    def step(self, state: Any, chunk: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return None, (chunk.mean(dim=1, keepdim=True) > 0.1).float()


def scene(*parts: tuple[float, int]) -> torch.Tensor:
    """Stretches of (level, windows), every sample different."""
    pcm = torch.cat([torch.full((512 * windows,), level) for level, windows in parts])
    return pcm + torch.arange(len(pcm)) * 1e-9


def run(turns: TurnCutter, pcm: torch.Tensor, size: Callable[[], int]) -> list[TurnEvent]:
    state, events, at = turns.start(), [], 0
    while at < len(pcm):
        step = size()
        state, new = turns.step(state, pcm[at : at + step])
        events += new
        at += step
    return events + turns.finish(state)


def kinds(events: Sequence[TurnEvent]) -> list[str]:
    return [event.kind for event in events]


def same(ours: Sequence[TurnEvent], theirs: Sequence[TurnEvent]) -> bool:
    return list(ours) == list(theirs) and all(
        (a.pcm is None) == (b.pcm is None) and (a.pcm is None or torch.equal(a.pcm, b.pcm))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture(scope="module")
def talk() -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Three sentences with a second between, and the samples where each is heard."""
    parts, spans, at = [torch.zeros(12_000)], [], 12_000
    for text in SAID:
        pcm = recordings.say(text, recordings.EspeakVoice()).pcm
        loud = (pcm.abs() > 0.01).nonzero()[:, 0]
        spans.append((at + int(loud[0]), at + int(loud[-1])))
        parts += [pcm, torch.zeros(16_000)]
        at += len(pcm) + 16_000
    noise = 5e-4 * torch.randn(at, generator=torch.Generator().manual_seed(0))
    return torch.cat(parts) + noise, spans


def test_sentences_are_turns(talk: Any) -> None:
    pcm, spans = talk
    events = run(TurnCutter(), pcm, lambda: 160)
    assert kinds(events) == ["speech_started", "speech_stopped", "turn"] * 3
    for (first, last), start, stop, turn in zip(
        spans, events[::3], events[1::3], events[2::3], strict=True
    ):
        limit = 100 if first != spans[2][0] else 132  # "stop" begins with a hiss
        assert start.at_ms - first // 16 <= limit  # speech_started comes at once
        assert start.start_ms <= first // 16  # and its sound is from before that
        assert abs(stop.speech_ms - last // 16) <= 150
        assert 500 <= stop.at_ms - stop.speech_ms <= 532
        assert turn.start_ms == start.start_ms
        assert turn.stop_ms == stop.speech_ms + 100
        assert turn.pcm is not None
        assert torch.equal(turn.pcm, pcm[turn.start_ms * 16 : turn.stop_ms * 16])


def test_any_split_of_speech_gives_the_same_events(talk: Any) -> None:
    pcm = talk[0]
    whole = run(TurnCutter(idle_timeout_ms=400, sound=True), pcm, lambda: len(pcm))
    assert kinds(whole).count("timeout") == 4
    draw = random.Random(0)
    for sizes in ([1, 100, 512, 700], [5000, 31]):
        ours = run(TurnCutter(idle_timeout_ms=400, sound=True), pcm, lambda s=sizes: draw.choice(s))
        assert same(ours, whole)


def test_noise_and_silence_are_no_turns() -> None:
    noise = 0.05 * torch.randn(48_000, generator=torch.Generator().manual_seed(1))
    for pcm in (noise, torch.zeros(48_000), torch.full((48_000,), torch.nan), noise + 0.4):
        assert run(TurnCutter(), pcm, lambda: 4000) == []


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5]), st.integers(1, 30)), min_size=1, max_size=7),
    st.lists(st.sampled_from([1, 300, 512, 513, 2000]), min_size=1, max_size=4),
    st.sampled_from([{}, {"max_turn_ms": 300}, {"idle_timeout_ms": 200}, {"detect": False}]),
    st.booleans(),
)
def test_any_split_gives_the_same_events(
    parts: list[tuple[float, int]], sizes: list[int], options: dict[str, Any], sound: bool
) -> None:
    turns = TurnCutter(activity=Script(), sound=sound, **options)
    pcm = scene(*parts)[:-100]
    draw = random.Random(0)
    whole = run(turns, pcm, lambda: len(pcm))
    assert same(run(turns, pcm, lambda: draw.choice([*sizes, 1500])), whole)
    ends = 0  # turns never overlap, and are cut from the stream
    for event in whole:
        if event.kind == "turn":
            assert event.pcm is not None
            assert event.start_ms >= ends
            ends = event.stop_ms
            at = int((event.pcm[0].double() % 0.5 / 1e-9).round()) if len(event.pcm) else 0
            assert event.start_ms == at * 1000 // 16000 or float(event.pcm[0]) > 0.4


def test_the_times_of_a_turn() -> None:
    pcm = scene((0, 20), (0.5, 10), (0, 40))
    turns = TurnCutter(activity=Script(), prefix_padding_ms=64, padding_ms=96, sound=True)
    events = run(turns, pcm, lambda: 512)
    start, stop, turn = events[0], events[-2], events[-1]
    assert (start.at_ms, start.start_ms, start.stop_ms) == (672, 576, 672)
    assert (stop.at_ms, stop.speech_ms, stop.stop_ms) == (1472, 960, 1472)
    assert (turn.at_ms, turn.start_ms, turn.stop_ms) == (1472, 576, 1056)
    assert (turn.kind, turn.reason) == ("turn", "silence")
    assert torch.equal(turn.pcm, pcm[18 * 512 : 33 * 512])  # type: ignore[arg-type]
    live = torch.cat([e.pcm for e in events if e.kind in ("speech_started", "sound")])  # type: ignore[misc]
    assert torch.equal(live, pcm[18 * 512 : 45 * 512])


def test_a_pause_does_not_end_a_turn_and_one_begins_behind_the_last() -> None:
    pcm = scene((0.5, 5), (0, 15), (0.5, 5), (0, 16), (0.5, 3), (0, 30))
    events = run(TurnCutter(activity=Script(), padding_ms=0), pcm, lambda: 1000)
    assert kinds(events) == ["speech_started", "speech_stopped", "turn"] * 2
    assert events[0].start_ms == 0  # nothing lies before the session
    assert events[2].stop_ms == 25 * 32
    assert events[3].start_ms == 41 * 32 - 300


def test_speech_must_last() -> None:
    pcm = scene((0, 5), (0.5, 2), (0, 5), (0.5, 3), (0, 20))
    events = run(TurnCutter(activity=Script(), speech_ms=96), pcm, lambda: 512)
    assert events[0].kind == "speech_started"
    assert events[0].at_ms == 15 * 32
    assert events[0].start_ms == 12 * 32 - 300  # the window that began it, and the padding


def test_a_long_turn_is_handed_over_in_parts() -> None:
    pcm = scene((0.5, 100), (0, 20))
    events = run(TurnCutter(activity=Script(), max_turn_ms=1000), pcm, lambda: 777)
    turns = [event for event in events if event.kind == "turn"]
    assert [event.reason for event in turns] == ["length"] * 3 + ["silence"]
    assert [event.start_ms for event in turns[1:]] == [event.stop_ms for event in turns[:-1]]
    parts = [event.pcm for event in turns if event.pcm is not None]
    assert torch.equal(torch.cat(parts), pcm[: 100 * 512 + 1600])


def test_a_long_turn_that_pauses_where_it_is_cut_is_over() -> None:
    """Whoever is told that somebody speaks is told that he stopped, with a turn."""
    for loud in (28, 32, 36):
        pcm = scene((0.5, loud), (0, 20))
        events = run(TurnCutter(activity=Script(), max_turn_ms=1024), pcm, lambda: 512)
        assert kinds(events)[-2:] == ["speech_stopped", "turn"]
        parts = [e.pcm for e in events if e.kind == "turn" and e.pcm is not None]
        assert torch.equal(torch.cat(parts), pcm[: 512 * loud + 1600])
        assert kinds(events).count("turn") == (1 if loud < 32 else 2)


def test_memory_is_bounded() -> None:
    for detect, level in ((True, 0.0), (True, 0.5), (False, 0.5)):
        turns = TurnCutter(activity=Script(), detect=detect, max_turn_ms=2000)
        state = turns.start()
        for _ in range(300):
            state, _ = turns.step(state, scene((level, 1)))
            assert sum(map(len, state.kept)) <= 33_000
            assert len(state.kept) <= 66


def test_commit() -> None:
    turns = TurnCutter(activity=Script(), prefix_padding_ms=0)
    pcm = scene((0, 4), (0.5, 10), (0, 20))
    state, _ = turns.step(turns.start(), pcm[:1000])
    assert turns.commit(state)[1] == []  # nobody speaks
    state, _ = turns.step(turns.start(), pcm[: 512 * 8 + 77])
    state, (turn,) = turns.commit(state)
    assert (turn.kind, turn.reason, turn.stop_ms) == ("turn", "commit", (512 * 8 + 77) // 16)
    assert torch.equal(turn.pcm, pcm[512 * 4 : 512 * 8 + 77])  # type: ignore[arg-type]
    assert turns.commit(state)[1] == []
    state, events = turns.step(state, pcm[512 * 8 + 77 :])
    assert kinds(events) == ["speech_started", "speech_stopped", "turn"]  # the rest is another
    assert events[0].start_ms == turn.stop_ms


def test_without_detection_the_caller_decides() -> None:
    turns = TurnCutter(detect=False)
    pcm = scene((0, 10), (0.5, 3))
    state, events = turns.step(turns.start(), pcm[:3000])
    assert events == []
    state, (turn,) = turns.commit(state)
    assert torch.equal(turn.pcm, pcm[:3000])  # type: ignore[arg-type]
    state, _ = turns.step(state, pcm[3000:])
    (last,) = turns.finish(state)
    assert last.reason == "end"
    assert torch.equal(last.pcm, pcm[3000:])  # type: ignore[arg-type]
    assert turns.finish(turns.start()) == []


def test_the_end_of_the_stream_ends_a_turn() -> None:
    turns = TurnCutter(activity=Script(), padding_ms=32)
    state, _ = turns.step(turns.start(), scene((0, 10), (0.5, 5), (0, 3))[:-50])
    stopped, turn = turns.finish(state)
    assert (stopped.kind, stopped.speech_ms) == ("speech_stopped", 15 * 32)
    assert (turn.reason, turn.stop_ms) == ("end", 16 * 32)
    state, _ = turns.step(turns.start(), scene((0, 10), (0.5, 5))[:-50])
    assert turns.finish(state)[1].stop_ms == (15 * 512 - 50) // 16


def test_waiting_times_out_once_until_asked_again() -> None:
    turns = TurnCutter(activity=Script(), idle_timeout_ms=320)
    quiet = scene((0, 40))
    state, events = turns.step(turns.start(), quiet)
    assert [(e.kind, e.at_ms, e.start_ms) for e in events] == [("timeout", 320, 0)]
    state = turns.wait(state)
    state, events = turns.step(state, quiet)
    assert [(e.at_ms, e.start_ms) for e in events] == [(1600, 1280)]
    state, events = turns.step(state, scene((0.5, 30), (0, 30)))
    assert kinds(events) == ["speech_started", "speech_stopped", "turn", "timeout"]


@pytest.mark.parametrize(
    "options",
    [
        {"silence_duration_ms": -1},
        {"prefix_padding_ms": 0.5},
        {"max_turn_ms": 0},
        {"idle_timeout_ms": 0},
        {"threshold": 0.0},
        {"exit": 0.9},
        {"speech_ms": True},
    ],
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="give"):
        TurnCutter(activity=Script(), **options)
