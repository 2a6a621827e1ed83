"""Random sequences of events: no hang, no close, no leak; and faults that the rules must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from realtime_machine import sequences
from realtime_tools import HumService

from mmfast.serve.realtime.queues import Outbox
from mmfast.serve.realtime.session import RealtimeSession
from mmfast.voice.dialogue import SpokenReply
from mmfast.voice.history import HistoryTurn


def test_random_sequences(request: pytest.FixtureRequest) -> None:
    sequences(request.config.getoption("--realtime-sequences"))


def late(patch: pytest.MonkeyPatch) -> None:
    """A piece that comes after the cancel is told."""
    take = RealtimeSession.take

    def wrong(self: RealtimeSession, reply: Any, sound: Any) -> None:
        if reply.over and sound is not None and sound.text:
            self.emit("text", reply, text=sound.text)
        else:
            take(self, reply, sound)

    patch.setattr(RealtimeSession, "take", wrong)


def drop(kind: str, times: int = 1) -> Callable[[pytest.MonkeyPatch], None]:
    """Events of a kind are not sent, or twice."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        put = Outbox.put

        def wrong(self: Outbox, event: Any, *more: Any) -> None:
            for _ in range(times if event["type"] == kind else 1):
                put(self, event, *more)

        patch.setattr(Outbox, "put", wrong)

    return plant


def deaf(patch: pytest.MonkeyPatch) -> None:
    """Truncating does nothing."""
    patch.setattr(HistoryTurn, "truncate", lambda item, ms: max(0, ms))


def leak(patch: pytest.MonkeyPatch) -> None:
    """A session stays when its client has gone."""
    patch.setattr(HumService, "leave", lambda self, place: None)


def forget(patch: pytest.MonkeyPatch) -> None:
    """The model's generator is not closed."""
    patch.setattr(SpokenReply, "close", lambda self: KEPT.append(self))


KEPT: list[Any] = []


def crash(patch: pytest.MonkeyPatch) -> None:
    """A wrong event ends the connection."""

    def fail(self: RealtimeSession, error: BaseException, event_id: str | None) -> None:
        raise OSError from error

    patch.setattr(RealtimeSession, "fail", fail)


FAULTS = {
    "delta after the end": (late, "after response.done"),
    "no output_item.added": (drop("response.output_item.added", 0), "lacks the item|not announced"),
    "no content_part.added": (drop("response.content_part.added", 0), "not announced"),
    "sound is missing": (drop("response.output_audio.delta", 0), "what sounds"),
    "sound comes twice": (drop("response.output_audio.delta", 2), "what sounds"),
    "no item.added": (drop("conversation.item.added", 0), "never added"),
    "no truncated": (drop("conversation.item.truncated", 0), "0 conversation.item.truncated"),
    "no end": (drop("response.done", 0), None),
    "truncate does nothing": (deaf, "is kept"),
    "session leaks": (leak, "a session is left"),
    "model leaks": (forget, "a model still answers"),
    "errors close": (crash, None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, said = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError), match=said):
        sequences(60)
    KEPT.clear()
