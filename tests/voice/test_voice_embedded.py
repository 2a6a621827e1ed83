"""The embedded speech model in conversation, with its own ear."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmfast
from mmfast.cli import main
from mmfast.core.errors import MmfastError
from mmfast.frontends.audio.reader import load_audio
from mmfast.frontends.audio.wav import write_wav
from mmfast.models.speech.embedded import SpeechModel, load_speech
from mmfast.tiny.speech.recordings import say
from mmfast.voice.channel import VoiceEvent

QUESTION = "which way does the red circle move?"
SENTENCE = "The red circle moves to the left."
PAUSE = torch.zeros(16000)


@pytest.fixture(scope="module")
def model() -> SpeechModel:
    return load_speech()


@pytest.fixture(scope="module")
def question() -> Tensor:
    return say(QUESTION).pcm


def of(events: Sequence[VoiceEvent], kind: str) -> list[VoiceEvent]:
    return [event for event in events if event.kind == kind]


def same_sound(one: Tensor, two: Tensor) -> None:
    """How many drafts a pass makes follows the clock: codes do not, nor sound but for rounding."""
    torch.testing.assert_close(one, two, atol=2e-5, rtol=0)


def test_it_says_the_text_that_it_was_given(model: SpeechModel) -> None:
    pipe = mmfast.pipeline("text-to-speech", model)
    spoken = pipe(SENTENCE)
    assert spoken.text == SENTENCE.lower()
    assert 1.0 < spoken.seconds < 6.0 and float(spoken.pcm.abs().max()) > 0.05
    assert spoken.stats["tokens_per_pass"] > 1.5
    same_sound(pipe(SENTENCE).pcm, spoken.pcm)
    pieces = list(pipe.stream(iter(SENTENCE.replace(" ", " |").split("|"))))
    assert "".join(piece.text for piece in pieces) == spoken.text


def test_a_spoken_question_is_heard_and_answered(model: SpeechModel, question: Tensor) -> None:
    pipe = mmfast.pipeline("speech-chat", model)
    events = list(pipe.run([torch.cat([PAUSE, question, PAUSE])]))
    started, stopped = of(events, "speech_started")[0], of(events, "speech_stopped")[0]
    assert 600 <= started.audio_ms <= 1100
    assert abs(stopped.audio_ms - 1000 - 62.5 * len(question) / 1000) < 500
    assert of(events, "heard")[0].text
    done = of(events, "done")[0]
    assert done.status == "completed" and done.stats["first_audio_ms"] > 0
    assert sum(len(event.pcm) for event in of(events, "audio") if event.pcm is not None) > 1600
    assert "".join(event.text for event in of(events, "text")).strip()


def test_exact_mode_says_which_drafts_stood(model: SpeechModel) -> None:
    pipe = mmfast.pipeline("text-to-speech", model, mode="exact")
    stats = pipe("A blue square.").stats
    assert len(stats["acceptance"]) == model.layout.books
    assert all(0 <= share <= 1 for share in stats["acceptance"])
    same_sound(pipe("A blue square.").pcm, pipe("A blue square.", schedule="vanilla").pcm)


def test_who_interrupts_leaves_what_was_heard(model: SpeechModel, question: Tensor) -> None:
    pipe = mmfast.pipeline("speech-chat", model, chat=lambda turns: SENTENCE + " " + SENTENCE)
    session = pipe.open(ahead=0.5)
    events = list(drive(session, torch.cat([question, torch.zeros(20000), question[:8000]])))
    cut = of(events, "interrupted")[0]
    assert 0 < cut.audio_ms < 3000
    said = "".join(event.text for event in of(events, "text"))
    assert said.startswith(cut.text) and len(cut.text) < len(said)
    assert [turn.text for turn in session.turns()][1:2] == [cut.text][: bool(cut.text)]


def drive(session: Any, pcm: Tensor) -> Any:
    for chunk in pcm.split(512):
        session.push(chunk)
        yield from session.poll()
        while session.step():
            yield from session.poll()


def test_conversations_in_threads_are_those_one_after_another(
    model: SpeechModel, question: Tensor
) -> None:
    pipe = mmfast.pipeline("speech-chat", model)
    sounds = [question, say("how many objects are there?").pcm]

    def converse(pcm: Tensor) -> Tensor:
        events = pipe.run([torch.cat([pcm, PAUSE])])
        return torch.cat([e.pcm for e in events if e.pcm is not None])

    alone = [converse(pcm) for pcm in sounds]
    found: dict[int, Tensor] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: converse(sounds[i])}))  # type: ignore[misc]
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        same_sound(found[i], alone[i])


def test_say_and_talk(tmp_path: Path, question: Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as left:
            main([*args, "--json"])
        assert not left.value.code
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    out = tmp_path / "out.wav"
    found = run("say", "a red dot", "-o", str(out), "--mode", "turbo", "--rate", "165")
    assert found["seconds"] == pytest.approx(len(load_audio(out)) / 16000, abs=1e-3)
    assert found["tokens_per_pass"] > 1 and found["rtf"] > 0 and found["first_audio_ms"] > 0
    write_wav(tmp_path / "in.wav", torch.cat([PAUSE, question, PAUSE]), 16000)
    found = run("talk", str(tmp_path / "in.wav"), "-o", str(out))
    assert found["text"] and found["heard"] and len(found["turns"]) == 1
    assert found["seconds"] == pytest.approx(len(load_audio(out)) / 16000, abs=1e-3)


@pytest.mark.parametrize(
    "wrong", [{"voice": "nobody"}, {"mode": "warp"}, {"verify": "maybe"}, {"rate": 9000}]
)
def test_options_that_it_does_not_know(model: SpeechModel, wrong: dict[str, Any]) -> None:
    with pytest.raises(MmfastError) as error:
        mmfast.pipeline("text-to-speech", model)("a red dot", **wrong)
    assert "\n" not in str(error.value)
