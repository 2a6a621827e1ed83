"""`omni-chat`: a clip or a stream, asked and answered by voice, says what it says in writing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tone_models import HumEar, HumModel, hum, read

import mmfast
from mmfast.core.errors import MediaError, MmfastError
from mmfast.frontends.video.reader import read_video
from mmfast.pipelines.omni_chat import OmniChat, written
from mmfast.voice.channel import VoiceEvent

CLIP = Path(__file__).parents[2] / "assets" / "clips" / "red-circle.mp4"
QUESTION = "which way does the red circle move?"
PAUSE = torch.zeros(16000)


@pytest.fixture(scope="module")
def omni() -> OmniChat:
    return mmfast.pipeline("omni-chat", speech=HumModel())  # type: ignore[no-any-return]


def said(events: Sequence[VoiceEvent]) -> str:
    return read(torch.cat([torch.zeros(0), *[e.pcm for e in events if e.pcm is not None]]))


def test_a_clip_and_a_spoken_question(omni: OmniChat) -> None:
    typed = mmfast.pipeline("video-qa")(CLIP, written(QUESTION)).text
    spoken = omni(CLIP, hum(QUESTION))
    assert (spoken.heard, spoken.text, read(spoken.pcm)) == (QUESTION, typed, typed)
    assert typed == "left"
    assert [each.text for each in omni(CLIP, [hum(QUESTION)] * 2)] == [typed] * 2
    assert omni(CLIP, written(QUESTION)).text == typed  # a question may be typed, too
    with pytest.raises(MediaError):
        omni("nowhere.mp4", hum(QUESTION))
    with pytest.raises(MediaError):
        omni(CLIP, "nowhere.wav")
    with pytest.raises(MmfastError, match="one question per clip"):
        omni([CLIP, CLIP], [hum(QUESTION)])
    assert [each.text for each in omni([CLIP, CLIP], hum(QUESTION))] == [typed] * 2
    frames = list(read_video(str(CLIP), frames=8).frames)  # of one clip, asked twice
    assert [each.text for each in omni(frames, [hum(QUESTION)] * 2)] == [typed] * 2


def test_nothing_asked_is_nothing_answered() -> None:
    omni = mmfast.pipeline("omni-chat", speech=HumModel())
    assert omni([], QUESTION) == omni([], []) == omni(CLIP, []) == []
    assert omni._clips is None  # no model of clips was loaded
    for wrong in (([], [hum(QUESTION)]), ([CLIP], [])):
        with pytest.raises(MmfastError, match="one question per clip"):
            omni(*wrong)


def test_the_trace_of_a_spoken_answer_has_the_stages_of_its_clip() -> None:
    omni = mmfast.pipeline("omni-chat", speech=HumModel(), reduce="evs:0.25")
    asked = mmfast.pipeline("video-qa", reduce="evs:0.25")(CLIP, written(QUESTION))
    spoken = omni(CLIP, hum(QUESTION))
    assert spoken.answer.kept_tokens == asked.kept_tokens < asked.visual_tokens
    stages = [row.stage for row in asked.trace.rows]
    assert [row.stage for row in spoken.trace.rows] == ["listen", *stages, "speak"]
    assert len(spoken.trace.reductions) == len(asked.trace.reductions) > 0
    assert spoken.trace.notes == asked.trace.notes
    assert omni(CLIP, PAUSE).answer is None  # nothing was asked


def test_options_of_the_pipeline_act_in_its_streams() -> None:
    """An answer is as long and as random as the pipeline says; of what cannot act, it is told."""
    options = {"max_new_tokens": 1, "temperature": 3.0, "top_p": 0.9, "seed": 7}
    omni = mmfast.pipeline("omni-chat", speech=HumModel(), cache="snapkv:64", **options)
    frames, asked = list(read_video(str(CLIP), frames=8).frames), "what is on the screen?"

    def answers(**more: int) -> tuple[str, str]:
        with (
            pytest.warns(UserWarning, match="omni-chat: cache of the pipeline act on clips"),
            omni.open(ear=HumEar(), **more) as session,
        ):
            session.video.push(frames, [float(i) for i in range(len(frames))])
            events = list(session.run([PAUSE, hum(asked), PAUSE]))
            direct = session.video.ask(written(asked), **{**options, **more}).read()
        told = "".join(event.text for event in events if event.kind == "text")
        return told.strip(), direct.strip()

    assert len({*answers()}) == 1
    long = answers(max_new_tokens=9)
    assert len({*long}) == 1 and len(long[0]) > len(answers()[0])


@pytest.mark.parametrize("wrong", [[b"x"], [("0", b"x")], [(0.0, b"x", 1)]])
def test_frames_of_a_conversation_are_pairs(omni: OmniChat, wrong: object) -> None:
    with omni.open(ear=HumEar()) as session, pytest.raises(MmfastError, match="pairs of seconds"):
        list(session.run([PAUSE], frames=wrong))  # type: ignore[arg-type]


def test_a_stream_is_asked_by_voice(omni: OmniChat) -> None:
    frames = list(read_video(str(CLIP), frames=8).frames)
    with omni.open(ear=HumEar()) as session:
        sound = [torch.zeros(16000 * 9), hum(QUESTION), PAUSE]
        events = list(session.run(sound, frames=enumerate(frames)))
        stats = session.stats()
        answer = session.video.ask(written(QUESTION)).read()
    assert said(events) == answer.lower() and answer
    assert stats["video"]["frames"] == 8
    assert stats["voice"]["turns"] == 1


def test_a_question_before_the_first_frame_is_answered_in_words(omni: OmniChat) -> None:
    with omni.open(ear=HumEar()) as session:
        events = list(session.run([hum(QUESTION), PAUSE]))
    assert said(events) == "i can not see a video."


def test_frames_are_seen_when_the_sound_has_come_so_far(omni: OmniChat) -> None:
    frames = list(read_video(str(CLIP), frames=6).frames)
    with omni.open(ear=HumEar()) as session:
        sound = [PAUSE, PAUSE, hum("what?"), PAUSE, PAUSE, PAUSE]
        events = session.run(sound, frames=enumerate(frames))
        seen = [session.video.stats()["frames"] for event in events if event.kind == "heard"]
        assert seen == [3]  # at 0, 1 and 2 seconds
        assert session.video.stats()["frames"] == 6


def test_who_speaks_stops_the_answer_being_written(omni: OmniChat) -> None:
    with omni.open(ear=HumEar(), ahead=0.05) as session:
        session.push_frame(read_video(str(CLIP), frames=1).frames[0])
        voice = session.voice
        voice.push(torch.cat([hum("what?"), PAUSE[:6400]]))
        assert voice.step()  # what was heard; the answer is not asked for yet
        voice.push(hum("stop"))
        assert not voice.step()
        assert [e.kind for e in voice.poll()][-3:] == ["speech_started", "interrupted", "done"]
        assert voice.turns()[0].text == "what?"


@pytest.mark.parametrize(
    ("heard", "wanted"),
    [
        ("which way does the red circle move", "Which way does the red circle move?"),
        ("please tell me, what colour is it?", "What colour is it?"),
        ("okay so where is the dot", "Where is the dot?"),
        (
            "which is faster the red dot or the blue one",
            "Which is faster, the red dot or the blue one?",
        ),
        (
            "which appears first the ring or the dot",
            "Which appears first, the ring or the dot?",
        ),
        ("in which corner is the dot at the end.", "In which corner is the dot at the end?"),
        ("describe the scene", "Describe the scene?"),
        ("Stop!", "Stop!"),
    ],
)
def test_heard_questions_as_they_are_written(heard: str, wanted: str) -> None:
    assert written(heard) == wanted
