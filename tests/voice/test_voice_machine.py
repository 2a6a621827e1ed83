"""Whatever a client does, in whatever order: what it is told makes sense."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tone_models import HumEar, HumModel, hum

from mmfast.core.errors import MmfastError
from mmfast.core.speech import Turn
from mmfast.streams.stream import Clock
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.history import History
from mmfast.voice.models import Cascade
from mmfast.voice.session import VoiceSession

SOUNDS = {
    "word": hum("hello"),
    "cough": hum("-")[:100],
    "pause": torch.zeros(5600),
    "breath": torch.zeros(900),
    "nothing": torch.zeros(0),
}


def chat(turns: Sequence[Turn]) -> list[str]:
    return [f"{len(turns)} words ", "of an answer ", "to ", turns[-1].text]


def open_session(**options: Any) -> VoiceSession:
    model = HumModel(piece=700)
    return VoiceSession(Cascade(model, chat, model), HumEar(), history=History(turns=6), **options)


class Listener:
    """Checks events as they come, and keeps what it was told of every reply."""

    def __init__(self) -> None:
        self.number = -1
        self.open: set[str] = set()
        self.begun: set[str] = set()
        self.over: set[str] = set()
        self.text: dict[str, str] = {}
        self.ms: dict[str, float] = {}
        self.items: dict[str, str] = {}

    def take(self, events: Sequence[VoiceEvent]) -> None:
        for event in events:
            assert event.number > self.number
            self.number = event.number
            if event.kind == "text":
                self.delta(event)
                self.text[event.reply] += event.text
            else:
                getattr(self, event.kind, lambda event: None)(event)

    def reply_started(self, event: VoiceEvent) -> None:
        assert event.reply not in self.begun
        assert self.open <= self.over, "two replies at once"
        self.begun.add(event.reply)
        self.open = {event.reply}
        self.text[event.reply], self.ms[event.reply] = "", 0.0
        self.items[event.reply] = event.item

    def delta(self, event: VoiceEvent) -> None:
        assert event.reply in self.open and event.reply not in self.over, "behind the end"
        assert event.item == self.items[event.reply]

    def audio(self, event: VoiceEvent) -> None:
        self.delta(event)
        assert event.pcm is not None
        assert abs(event.audio_ms - self.ms[event.reply]) < 1e-6, "a piece is missing"
        self.ms[event.reply] += 1e3 * len(event.pcm) / event.rate

    def done(self, event: VoiceEvent) -> None:
        assert event.reply in self.open and event.reply not in self.over
        self.over.add(event.reply)

    def interrupted(self, event: VoiceEvent) -> None:
        assert event.reply in self.open
        assert self.text[event.reply].startswith(event.text), "more than was told"
        assert event.audio_ms <= self.ms[event.reply] + 1e-6, "more than arrived"

    def truncated(self, event: VoiceEvent) -> None:
        reply = next(reply for reply, item in self.items.items() if item == event.item)
        assert self.text[reply].startswith(event.text)
        assert 0 <= event.audio_ms <= self.ms[reply] + 1e-6


def actions(session: VoiceSession, pick: Callable[[int], int]) -> dict[str, Callable[[], Any]]:
    """What a client may do; `pick(n)` chooses below n."""

    def some_item() -> str:
        names = [*session.history.items, "item_0"]
        return names[pick(len(names))]

    return {
        **{name: lambda pcm=pcm: session.push(pcm) for name, pcm in SOUNDS.items()},
        "step": session.step,
        "steps": lambda: [session.step() for _ in range(5)],
        "cancel": session.cancel,
        "commit": session.commit,
        "clear": session.clear,
        "respond": session.respond,
        "say": lambda: session.say("good day to you"),
        "add": lambda: session.add("typed"),
        "truncate": lambda: session.truncate(some_item(), pick(900) - 50.0),
        "delete": lambda: session.delete(some_item()),
        "save": lambda: session.restore(session.save()),
    }


NAMES = [*actions(open_session(), lambda n: 0), "poll", "poll", "step", "word", "pause"]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(NAMES), max_size=40), st.randoms(use_true_random=False))
def test_any_sequence_of_calls(names: list[str], chance: random.Random) -> None:
    session, listener = open_session(ahead=0.4), Listener()
    possible = actions(session, chance.randrange)
    for name in names:
        if name == "poll":
            listener.take(session.poll())
            continue
        try:
            possible[name]()
        except MmfastError as error:
            assert name in ("commit", "respond", "truncate", "delete"), (name, error)
    listener.take(list(session.finish()))
    listener.take(session.poll())
    assert listener.begun == listener.over
    assert len(session.history.items) <= 6
    session.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_threads_that_do_what_they_like(seed: int) -> None:
    session, listener = open_session(clock=Clock(), ahead=0.3), Listener()
    session.start()
    chance, failures = random.Random(seed), list[BaseException]()

    def act() -> None:
        mine = random.Random(chance.random())
        possible = actions(session, mine.randrange)
        del possible["step"], possible["steps"]
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                possible[mine.choice([*possible])]()
            except MmfastError:
                pass
            except BaseException as error:
                failures.append(error)
            time.sleep(mine.random() * 0.01)

    def fetch() -> None:
        try:
            for event in session.events():
                listener.take([event])
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=fetch)
    reader.start()
    threads = [threading.Thread(target=act) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.close()
    reader.join(20)
    assert not failures and not reader.is_alive()
    assert listener.begun == listener.over and len(listener.begun) > 3
