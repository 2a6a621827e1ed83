"""Random sequences of events: no hang, no close, no leak; and faults that the rules must catch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from realtime_machine import sequences
from realtime_tools import HumService

from mmfast.serve.realtime.outbox import Outbox
from mmfast.serve.realtime.response import Response
from mmfast.serve.realtime.session import Session


def test_random_sequences(request: pytest.FixtureRequest) -> None:
    sequences(request.config.getoption("--realtime-sequences"))


def late(patch: pytest.MonkeyPatch) -> None:
    """Deltas that a cancel overtook come after all."""
    purge = Outbox.purge

    def leak(self: Outbox, response: str) -> None:
        lost = [each for each in self._letters if each.response == response]
        purge(self, response)
        events = [json.loads(each.text) for each in lost]
        for event in events:
            asyncio.get_running_loop().call_later(0.001, self.put, {**event, "event_id": "late"})

    patch.setattr(Outbox, "purge", leak)
    patch.setattr(Response, "_ready", lambda self, ahead: asyncio.sleep(0, not self.reply.limit))


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
    patch.setattr("mmfast.serve.realtime.session._cut", lambda item, ms: int(max(0, ms)))


def leak(patch: pytest.MonkeyPatch) -> None:
    """A session stays when its client has gone."""
    patch.setattr(HumService, "leave", lambda self, place: None)


def forget(patch: pytest.MonkeyPatch) -> None:
    """The model's generator is not closed."""
    patch.setattr("mmfast.streams.voice_run.Run.close", lambda self: KEPT.append(self))


KEPT: list[Any] = []


def talk_on(patch: pytest.MonkeyPatch) -> None:
    """Who speaks does not interrupt."""
    patch.setattr("mmfast.serve.realtime.responder.Responder.interrupt", lambda self: None)


def crash(patch: pytest.MonkeyPatch) -> None:
    """A wrong event ends the connection."""

    def fail(self: Session, error: BaseException, event_id: str | None) -> None:
        raise OSError from error

    patch.setattr(Session, "fail", fail)


@pytest.mark.parametrize(
    "plant",
    [
        late,
        drop("response.output_item.added", 0),
        drop("response.content_part.added", 0),
        drop("response.output_audio.delta", 0),
        drop("response.output_audio.delta", 2),
        drop("conversation.item.added", 0),
        drop("conversation.item.truncated", 0),
        drop("response.done", 0),
        deaf,
        leak,
        forget,
        talk_on,
        crash,
    ],
    ids=lambda plant: plant.__qualname__.split(".")[0],
)
def test_faults_are_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        sequences(60)
    KEPT.clear()
