"""Conversations in threads: beside each other, interrupted from outside, in real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tone_models import HumChatter, HumEar, HumModel, HumSpeaker, hum, read
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.speech import Sound, Turn
from mmfast.streams.stream import Clock, FakeClock
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.session import VoiceSession

PAUSE = torch.zeros(12800)


def sound_of(events: Sequence[VoiceEvent]) -> Tensor:
    return torch.cat([torch.zeros(0), *[event.pcm for event in events if event.pcm is not None]])


def kinds(events: Sequence[VoiceEvent]) -> list[str]:
    return [event.kind for event in events if event.kind not in ("text", "audio")]


def test_conversations_on_one_model_do_not_touch_each_other() -> None:
    model, found = HumModel(), dict[str, list[VoiceEvent]]()
    sessions = {name: VoiceSession(model, HumEar()) for name in ("one", "two", "three", "four")}

    def converse(name: str) -> None:
        said = [hum(f"{name} {turn}") for turn in range(6)]
        pcm = torch.cat([part for turn in said for part in (turn, PAUSE)])
        found[name] = list(sessions[name].run(pcm.split(700)))

    threads = [threading.Thread(target=converse, args=(name,)) for name in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, session in sessions.items():
        turns = [turn.text for turn in session.turns()]
        assert turns == [f"{name} {turn // 2}" for turn in range(12)]
        assert read(sound_of(found[name][:30])).startswith(f"{name} 0")
        assert session.stats()["interrupted"] == 0


def test_a_thread_makes_replies_while_others_push_and_fetch() -> None:
    session, events = VoiceSession(HumModel(piece=320), HumEar(), clock=Clock()), []
    session.start()
    reader = threading.Thread(target=lambda: events.extend(session.events(timeout=20)))
    reader.start()
    for chunk in torch.cat([hum("hello you"), PAUSE]).split(320):
        session.push(chunk)
    deadline = time.monotonic() + 20
    while not any(event.kind == "done" for event in events) and time.monotonic() < deadline:
        time.sleep(0.01)
    session.close()
    reader.join()
    assert read(sound_of(events)) == "hello you"
    assert [event.number for event in events] == list(range(len(events)))
    with pytest.raises(MmfastError, match="closed"):
        session.push(PAUSE)
    session.close()  # twice does no harm


def test_run_in_the_time_of_a_clock_plays_to_the_end() -> None:
    clock = Clock()
    session = VoiceSession(HumModel(), HumEar(), clock=clock)
    start = clock.now()
    events = list(session.run([hum("hello you"), PAUSE]))
    assert clock.now() - start >= 0.18  # of sound
    assert kinds(events)[-1] == "done"
    assert session.turns()[-1] == Turn("assistant", "hello you")
    session.close()


class Gate:
    """Makes its second piece when it is let."""

    sample_rate = 16000

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.closed = threading.Event()

    def reply(self, *_: Any, **__: Any) -> Iterator[Sound]:
        try:
            yield Sound(hum("one"), 16000, "one", heard="go")
            self.begun.set()
            self.go.wait(20)
            yield Sound(hum(" two"), 16000, " two")
        finally:
            self.closed.set()


def test_who_speaks_does_not_wait_for_the_model() -> None:
    gate = Gate()
    session = VoiceSession(gate, HumEar(), clock=Clock())
    session.start()
    session.push(torch.cat([hum("go"), PAUSE]))
    assert gate.begun.wait(20)
    session.poll()
    session.push(hum("stop"))  # the model still works on its second piece
    found = session.poll()
    assert kinds(found) == ["speech_started", "interrupted", "done"]
    assert found[-1].status == "interrupted"
    gate.go.set()
    assert gate.closed.wait(20)  # closed by the thread that had it
    session.close()
    assert not [event for event in session.poll() if event.kind in ("text", "audio")]


def test_gaps_are_those_of_a_model_that_is_too_slow() -> None:
    clock = FakeClock()
    speaker = HumSpeaker(piece=1600, each=lambda: clock.advance(0.15))
    chatter = HumChatter(lambda turns: "abcdefghijklmno", speaker)  # three pieces of 0.1 s
    session = VoiceSession(chatter, HumEar(), clock=clock, ahead=9.0)
    session.push(torch.cat([hum("go"), PAUSE]))
    while session.step():
        session.poll()
    stats = session.stats()
    assert (stats["gaps"], stats["gap_ms"]) == (2, 100.0)
    assert stats["played_seconds"] == 0.2  # the third has just arrived


def test_a_model_that_is_quick_enough_leaves_none() -> None:
    clock = FakeClock()
    speaker = HumSpeaker(piece=1600, each=lambda: clock.advance(0.08))
    chatter = HumChatter(lambda turns: "abcdefghijklmnopqrst", speaker)
    session = VoiceSession(chatter, HumEar(), clock=clock, ahead=9.0)
    session.push(torch.cat([hum("go"), PAUSE]))
    while session.step():
        session.poll()
    assert session.stats()["gaps"] == 0


def test_nobody_fetches_so_nobody_makes() -> None:
    speaker = HumSpeaker(piece=320)
    chatter = HumChatter(lambda turns: "word " * 500, speaker)
    session = VoiceSession(chatter, HumEar(), clock=Clock(), ahead=0.5)
    session.start()
    session.push(torch.cat([hum("go"), PAUSE]))
    time.sleep(0.3)
    assert speaker.made <= 27 and session.stats()["waiting_events"] <= 60
    session.close()
