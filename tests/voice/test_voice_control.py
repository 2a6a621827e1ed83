"""What a client can do to a conversation besides speaking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tone_models import HumEar, HumModel, hum, read

from mmfast.bench.suites.speech.soak import Soak, soak
from mmfast.core.errors import MmfastError
from mmfast.core.speech import Turn
from mmfast.voice import history
from mmfast.voice.channel import Outlet, VoiceEvent
from mmfast.voice.ear import ManualEar, VoiceEar
from mmfast.voice.history import History
from mmfast.voice.models import Cascade
from mmfast.voice.session import VoiceSession

PAUSE = torch.zeros(6400)


def said(events: Sequence[VoiceEvent]) -> str:
    return read(torch.cat([torch.zeros(0), *[e.pcm for e in events if e.pcm is not None]]))


def work(session: VoiceSession) -> list[VoiceEvent]:
    found = session.poll()
    while session.step():
        found += session.poll()
    return found


def test_push_to_talk() -> None:
    session = VoiceSession(HumModel(), ManualEar())
    with pytest.raises(MmfastError, match="no speech"):
        session.commit()
    session.push(torch.cat([hum("hel"), PAUSE]))
    session.clear()
    session.push(hum("yes"))
    session.commit()
    assert said(work(session)) == "yes"


def test_a_turn_that_nobody_has_understood_is_part_of_the_next() -> None:
    session = VoiceSession(HumModel(), HumEar(padding=0.0))
    session.push(torch.cat([hum("which way "), PAUSE]))  # too long a pause; nothing is made yet
    session.push(torch.cat([hum("does it move?"), PAUSE]))
    events = work(session)
    assert [event.item for event in events if event.kind == "deleted"] == ["item_1"]
    users = [item for item in session.history.items.values() if item.role == "user"]
    assert [item.id for item in users] == ["item_3"]
    assert users[0].seconds == pytest.approx(1.06, abs=0.03)  # both, and the pauses behind them
    session.push(torch.cat([hum("yes"), PAUSE]))  # that one has been understood
    assert "deleted" not in [event.kind for event in work(session)]


def test_a_turn_is_answered_when_it_is_asked_for() -> None:
    session = VoiceSession(HumModel(), HumEar(), answer=False)
    session.push(torch.cat([hum("yes"), PAUSE]))
    assert not [event for event in work(session) if event.kind == "reply_started"]
    assert session.respond() == "reply_1"
    assert said(work(session)) == "yes"
    with pytest.raises(MmfastError, match="nothing to answer"):
        session.respond()


def test_text_goes_into_a_cascade_too() -> None:
    def chat(turns: Sequence[Turn]) -> Iterator[str]:
        yield from (f"{turns[-1].text} ", "indeed ", str(len(turns)))

    model = HumModel()
    session = VoiceSession(Cascade(model, chat, model), HumEar())
    session.add("well")
    session.respond()
    assert said(work(session)) == "well indeed 1"
    session.cancel()
    session.push(torch.cat([hum("yes"), PAUSE]))
    events = work(session)
    assert said(events) == "yes indeed 2"  # what was not heard of the first answer is not there
    assert [event.text for event in events if event.kind == "heard"] == ["yes"]
    for wrong in ("", "  ", None, 3):
        with pytest.raises(MmfastError, match="no turn"):
            session.add(wrong)  # type: ignore[arg-type]


def test_a_cascade_may_answer_in_text_alone() -> None:
    session = VoiceSession(Cascade(HumModel(), lambda turns: "as text", None), HumEar())
    session.push(torch.cat([hum("yes"), PAUSE]))
    assert "".join(event.text for event in work(session) if event.kind == "text") == "as text"
    assert session.turns() == (Turn("user", "yes"), Turn("assistant", "as text"))


def test_a_greeting() -> None:
    session = VoiceSession(HumModel(), HumEar())
    session.say("hello there")
    assert said(work(session)) == "hello there"
    with pytest.raises(MmfastError, match="read out"):
        VoiceSession(object(), HumEar()).say("hello")  # type: ignore[arg-type]


def test_what_is_deleted_is_not_said_any_more() -> None:
    session = VoiceSession(HumModel(), HumEar())
    session.say("hello there")
    events = work(session)
    item = next(event.item for event in events if event.kind == "reply_started")
    session.delete(item)
    assert [event.kind for event in session.poll()] == ["interrupted", "deleted"]
    assert session.turns() == ()
    with pytest.raises(MmfastError, match="unknown item"):
        session.delete(item)


def test_a_saved_conversation_goes_on() -> None:
    session = VoiceSession(HumModel(), HumEar())
    list(session.run([hum("yes"), PAUSE]))
    other = VoiceSession(HumModel(), HumEar())
    other.restore(session.save())
    assert other.turns() == session.turns()
    events = list(other.run([hum("no"), PAUSE]))
    assert {event.item for event in events if event.item} == {"item_3", "item_4"}
    for wrong in ({}, None, {"items": [], "next": 3}, {"items": [1], "next": {}}):
        with pytest.raises(MmfastError, match="save"):
            other.restore(wrong)  # type: ignore[arg-type]


def test_a_deleted_question_is_answered_by_nobody() -> None:
    session = VoiceSession(HumModel(), HumEar(padding=0.0), answer=False)
    session.push(torch.cat([hum("hello"), PAUSE]))
    (item,) = [event.item for event in session.poll() if event.kind == "committed"]
    session.delete(item)
    with pytest.raises(MmfastError, match=r"nothing to answer"):
        session.respond()


def test_a_restored_conversation_knows_nothing_of_the_one_before() -> None:
    first = VoiceSession(HumModel(), HumEar(padding=0.0))
    first.push(torch.cat([hum("hello"), PAUSE]))
    work(first)
    saved = first.save()
    session = VoiceSession(HumModel(), HumEar(padding=0.0), answer=False)
    session.push(torch.cat([hum("secret"), PAUSE]))
    session.restore(saved)
    with pytest.raises(MmfastError, match=r"nothing to answer"):  # that question is not in it
        session.respond()
    session.push(hum("oth"))  # is being said when another conversation takes its place
    session.restore(saved)
    assert session.save()["items"] == saved["items"]
    session.push(torch.cat([hum("yes"), PAUSE]))
    session.respond()
    assert said(work(session)) == "yes"
    assert session.save()["items"][: len(saved["items"])] == saved["items"]


def test_a_conversation_restored_into_a_cut_off_turn_loses_no_item() -> None:
    first = VoiceSession(HumModel(), HumEar(padding=0.0))
    for text in ("hello", "again"):
        first.push(torch.cat([hum(text), PAUSE]))
        work(first)
    saved = first.save()
    session = VoiceSession(HumModel(), HumEar(padding=0.0))
    session.push(torch.cat([hum("which way "), PAUSE]))  # nobody has understood it
    session.push(hum("does"))
    session.restore(saved)
    session.push(torch.cat([hum("yes"), PAUSE]))
    assert said(work(session)) == "yes"
    assert session.save()["items"][: len(saved["items"])] == saved["items"]


def test_speech_may_leave_a_reply_alone() -> None:
    session = VoiceSession(HumModel(lambda turns: "on and on"), HumEar(), interrupt=False)
    session.push(torch.cat([hum("yes"), PAUSE]))
    work(session)
    session.push(hum("aha"))
    assert [event.kind for event in session.poll()] == ["speech_started"]
    session.push(PAUSE)  # a turn that is over is answered all the same
    assert "reply_started" in [event.kind for event in session.poll()]


@pytest.mark.parametrize("wrong", [{"ahead": 0}, {"ahead": -1}, {"delay": float("inf")}])
def test_times_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(MmfastError, match="no time"):
        VoiceSession(HumModel(), HumEar(), **wrong)


def test_a_turn_that_is_too_long_is_taken_as_it_is() -> None:
    ear = ManualEar(longest=2.0)
    found = [heard.kind for _ in range(5) for heard in ear.hear(torch.zeros(16000))]
    assert found == ["started", "stopped", "started", "stopped", "started"]


def test_an_ear_with_a_detector_tells_when_nobody_speaks() -> None:
    from mmfast.frontends.audio.activity import VoiceActivity

    activity = VoiceActivity("energy")
    ear = VoiceEar(activity=activity, idle_timeout_ms=500, silence_duration_ms=300)
    session = VoiceSession(HumModel(), ear)
    events = list(session.run([torch.zeros(9600), hum("hello"), torch.zeros(9600)]))
    assert [event.kind for event in events][:2] == ["timeout", "speech_started"]
    assert said(events) == "hello"


def test_two_minutes_of_conversation() -> None:
    found = soak(120.0, seed=3)
    assert found["ok"], found["faults"]
    assert found["checks"] > 40 and found["cut_off"] > 10 and found["items"] <= 16


class Eager(History):
    """A context that keeps what was made, heard or not."""

    def turns(self) -> tuple[Turn, ...]:
        whole = (
            Turn(item.role, item.said if item.words is None else item.words.text)
            for item in self.items.values()
        )
        return tuple(turn for turn in whole if turn.text)


def test_the_soak_finds_a_context_that_keeps_what_nobody_heard() -> None:
    run = Soak(3)
    run.session.history = Eager()
    assert [*run.run(40.0)] and run.faults


def test_the_soak_finds_words_that_count_when_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    real = history.Alignment.heard
    ahead = 1600  # samples
    monkeypatch.setattr(
        history.Alignment, "heard", lambda self, n: real(self, n + ahead if n else 0)
    )
    run = Soak(3)
    assert [*run.run(60.0)] and run.faults


def deltas_behind_a_cancel() -> list[str]:
    session = VoiceSession(HumModel(), HumEar())
    session.say("one two three")
    session.step()
    session.cancel()
    return [event.kind for event in session.poll() if event.kind in ("text", "audio")]


def test_no_delta_behind_a_cancel_unless_nobody_takes_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not deltas_behind_a_cancel()
    monkeypatch.setattr(Outlet, "purge", lambda self, reply: None)
    assert deltas_behind_a_cancel()
