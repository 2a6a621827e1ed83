"""A conversation: who speaks, who is cut off, and what of it stays in the context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tone_models import TONE, HumChatter, HumEar, HumSpeaker, hum, read
from torch import Tensor

from mmfast.core.errors import MediaError, MmfastError
from mmfast.core.speech import Sound, Turn
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.session import VoiceSession

ANSWER = "the red circle moves to the left."


def say_left(turns: Sequence[Turn]) -> str:
    return ANSWER


def quiet(seconds: float) -> Tensor:
    return torch.zeros(round(seconds * 16000))


def open_session(**options: Any) -> VoiceSession:
    return VoiceSession(HumChatter(say_left), HumEar(), **options)


def of(events: Sequence[VoiceEvent], kind: str) -> list[VoiceEvent]:
    return [event for event in events if event.kind == kind]


def sound_of(events: Sequence[VoiceEvent]) -> Tensor:
    return torch.cat([torch.zeros(0), *[e.pcm for e in of(events, "audio") if e.pcm is not None]])


def whole_words(pcm: Tensor, text: str) -> str:
    """The words whose last letter's tone was played to its end."""
    letters = len(read(pcm)) if len(pcm) else 0
    assert read(pcm) == text[:letters]
    if letters < len(text) and text[letters] != " ":
        letters = text.rfind(" ", 0, letters + 1) if " " in text[: letters + 1] else 0
    return text[: max(letters, 0)].rstrip()


def test_a_turn_is_heard_and_answered() -> None:
    chunks = [quiet(0.5), hum("which way?"), quiet(0.6)]
    events = list(open_session().run(chunks))
    kinds = [event.kind for event in events if event.kind not in ("text", "audio")]
    started = ["speech_started", "speech_stopped", "committed", "reply_started"]
    assert kinds == [*started, "heard", "done"]
    assert of(events, "heard")[0].text == "which way?"
    assert "".join(event.text for event in of(events, "text")) == ANSWER
    assert read(sound_of(events)) == ANSWER
    assert [event.number for event in events] == list(range(len(events)))
    assert of(events, "speech_started")[0].audio_ms == 400  # a tenth of padding
    assert of(events, "done")[0].status == "completed"


def test_the_context_is_what_was_heard_in_full() -> None:
    session = open_session()
    list(session.run([hum("which way?"), quiet(0.6)]))
    assert session.turns() == (Turn("user", "which way?"), Turn("assistant", ANSWER))


def split(pcm: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    at = 0
    while at < len(pcm):
        size = sizes[at % len(sizes)]
        yield pcm[at : at + size]
        at += size


def test_any_split_of_the_sound_gives_the_same_conversation() -> None:
    pcm = torch.cat([hum("which way?"), quiet(0.7), hum("stop"), quiet(0.5), hum("why?")])
    runs = []
    for sizes in ([len(pcm)], [160], [77, 1000, 3], [512]):
        session = open_session()
        events = [event.to_dict() for event in session.run(split(pcm, sizes))]
        for event in events:
            event.pop("stats", None)
        runs.append((events, session.turns()))
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("after", [0.02, 0.1, 0.3, 0.34, 0.5, 0.62])
def test_who_speaks_cuts_the_reply_off(after: float) -> None:
    """The oracle counts samples as a loudspeaker would, and reads them."""
    session = open_session()
    pcm = torch.cat([hum("which way?"), quiet(0.3 + after), hum("stop"), quiet(0.4)])
    played, queue, events = [torch.zeros(0)], torch.zeros(0), list[VoiceEvent]()
    cut: Tensor | None = None
    for chunk in pcm.split(160):
        played.append(queue[: len(chunk)])
        queue = queue[len(chunk) :]
        session.push(chunk)
        found = session.poll()
        while session.step():
            found += session.poll()
        events += found
        if of(found, "interrupted") and cut is None:
            cut, queue = torch.cat(played), torch.zeros(0)
        if cut is None:
            queue = torch.cat([queue, sound_of(found)])
    assert cut is not None
    first = of(events, "interrupted")[0]
    assert round(first.audio_ms * 16) == len(cut)
    assert first.text == whole_words(cut, ANSWER)
    kept = [turn.text for turn in session.turns() if turn.role == "assistant"]
    assert kept[: bool(first.text)] == [first.text] * bool(first.text)


def test_sound_stops_with_the_block_in_which_speech_is_found() -> None:
    session = open_session()
    list(drive(session, [hum("which way?"), quiet(0.5)]))
    session.push(quiet(0.01))
    session.push(hum("s")[:160])
    assert [event.kind for event in session.poll()] == ["speech_started", "interrupted"]


def drive(session: VoiceSession, chunks: Sequence[Tensor]) -> Iterator[VoiceEvent]:
    for chunk in chunks:
        session.push(chunk)
        yield from session.poll()
        while session.step():
            yield from session.poll()


def test_no_delta_after_a_cancel() -> None:
    session = open_session(ahead=60.0)
    session.push(torch.cat([hum("which way?"), quiet(0.4)]))
    assert session.step() and session.step() and session.step()
    reply = next(event.reply for event in session.poll() if event.kind == "reply_started")
    assert session.step()  # made, and waiting to be fetched
    assert session.cancel()
    assert not session.step()
    later = session.poll()
    assert [event.kind for event in later] == ["interrupted", "done"]
    assert {event.reply for event in later} == {reply}
    assert later[1].status == "cancelled"


class Slow:
    """Speaks when it is let, from another thread's point of view."""

    sample_rate = 16000

    def __init__(self, session: list[VoiceSession]) -> None:
        self.session, self.closed = session, False

    def reply(self, pcm: Tensor, rate: int = 0, history: Any = (), **_: Any) -> Iterator[Sound]:
        try:
            yield Sound(hum("one"), 16000, "one", heard="go")
            self.session[0].cancel()  # while the second piece is being made
            yield Sound(hum(" two"), 16000, " two")
            raise AssertionError("went on behind a cancel")
        finally:
            self.closed = True


def test_a_piece_that_is_made_while_it_is_cancelled_is_lost() -> None:
    holder: list[VoiceSession] = []
    chatter = Slow(holder)
    holder.append(VoiceSession(chatter, HumEar()))
    events = list(drive(holder[0], [torch.cat([hum("go"), quiet(0.4)])]))
    assert "".join(event.text for event in of(events, "text")) == "one"
    assert chatter.closed
    assert [event.status for event in of(events, "done")] == ["cancelled"]


def test_the_model_stops_working_when_it_is_cut_off() -> None:
    speaker = HumSpeaker(160)
    session = VoiceSession(HumChatter(lambda turns: "word " * 50, speaker), HumEar(), ahead=0.1)
    list(drive(session, [torch.cat([hum("go"), quiet(0.4)])]))
    made = speaker.made
    assert 10 <= made <= 12  # a tenth of a second ahead
    session.cancel()
    list(drive(session, [quiet(0.3)]))
    assert speaker.made == made


def test_a_client_says_what_it_played() -> None:
    session = open_session(ahead=60.0)
    events = list(drive(session, [torch.cat([hum("which way?"), quiet(0.4)])]))
    item = of(events, "reply_started")[0].item
    letter = 1e3 * TONE / 16000
    assert session.truncate(item, 7 * letter) == "the red"
    assert session.truncate(item, 6.9 * letter) == "the"
    assert session.truncate(item, -5) == ""
    assert session.truncate(item, 1e12) == ANSWER  # clamped
    assert session.truncate(item, float("inf")) == ANSWER
    assert session.truncate(item, 14 * letter) == "the red circle"
    assert session.turns()[-1] == Turn("assistant", "the red circle")
    last = of(session.poll(), "truncated")[-1]
    assert (last.text, last.item, round(last.audio_ms, 6)) == ("the red circle", item, 14 * letter)
    for wrong in ("item_77", events[0].item):
        with pytest.raises(MmfastError):
            session.truncate(wrong, 10)
    with pytest.raises(MmfastError, match="no time"):
        session.truncate(item, float("nan"))


def test_an_error_of_the_model_is_an_event() -> None:
    class Broken:
        sample_rate = 16000

        def reply(self, *_: Any, **__: Any) -> Iterator[Sound]:
            yield Sound(hum("oh"), 16000, "oh", heard="go")
            raise RuntimeError("out of\nmemory")

    session = VoiceSession(Broken(), HumEar())
    pcm = torch.cat([hum("go"), quiet(0.5)])
    events = list(session.run([pcm, pcm]))
    assert [event.text for event in of(events, "error")] == ["out of memory"] * 2
    assert [event.status for event in of(events, "done")] == ["failed"] * 2
    assert session.stats()["failed"] == 2


@pytest.mark.parametrize(
    ("pcm", "rate"),
    [
        (torch.tensor([0.0, float("nan")]), 16000),
        (torch.zeros(3, 4, 5), 16000),
        (torch.zeros(4, dtype=torch.int64), 16000),
        ("words", 16000),
        (None, 16000),
        (torch.zeros(10), 0),
        (torch.zeros(10), "fast"),
    ],
    ids=["nan", "axes", "int64", "text", "none", "rate 0", "no rate"],
)
def test_what_is_no_sound_is_refused_and_the_conversation_goes_on(pcm: Any, rate: Any) -> None:
    session = open_session()
    with pytest.raises(MediaError) as error:
        session.push(pcm, rate)
    assert "\n" not in str(error.value)
    events = list(session.run([hum("which way?"), quiet(0.5)]))
    assert read(sound_of(events)) == ANSWER


def test_bytes_may_be_cut_within_a_sample() -> None:
    data = (torch.cat([hum("hi"), quiet(0.5)]) * 32767).to(torch.int16).numpy().tobytes()
    session = open_session()
    events = list(session.run([data[:333], data[333:1001], data[1001:]]))
    assert of(events, "heard")[0].text == "hi"
