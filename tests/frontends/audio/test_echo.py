"""Our own voice in the microphone: taken out, and who speaks over it is still heard."""

from __future__ import annotations

import math
import sys
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.speech import Sound
from mmfast.frontends.audio.echo import EchoCanceller
from mmfast.streams.stream import FakeClock
from mmfast.voice.playback import Playback, PlayedSound

RATE = 16000


@lru_cache
def speech(text: str, voice: str) -> Tensor:
    pytest.importorskip("espeakng_loader")
    from mmfast.tiny.speech.recordings import EspeakVoice, say

    return say(text, EspeakVoice(voice)).pcm


def reply() -> Tensor:
    texts = "the red circle moves to the left, and the blue square goes up.", "it is green."
    return torch.cat([speech(text, "en-us") for text in texts] * 2)


def room(pcm: Tensor, delay: float) -> Tensor:
    """A loudspeaker's sound as a microphone a metre away has it, in a room that echoes."""
    rng = np.random.default_rng(0)
    response = rng.standard_normal(3200) * np.exp(-np.arange(3200) / 600)
    response = 0.4 * (response / np.sqrt((response**2).sum()) + np.eye(1, 3200)[0])
    late = np.concatenate([np.zeros(round(delay * RATE)), pcm.numpy()])
    return torch.from_numpy(np.convolve(late, response)[: len(pcm)]).float()


def decibels(pcm: Tensor) -> float:
    return 10 * math.log10(float(pcm.double().square().mean()) + 1e-12)


def cleaned(near: Tensor, far: Tensor, size: int = 512) -> Tensor:
    canceller = EchoCanceller()
    pieces = zip(near.split(size), far.split(size), strict=True)
    return torch.cat([canceller.cancel(*piece) for piece in pieces])


def turns(pcm: Tensor) -> list[int]:
    """Places at which the detector of speech finds the beginning of a turn."""
    pytest.importorskip("silero_vad")
    from mmfast.voice.ear import VoiceEar

    ear = VoiceEar()
    return [event.at for block in pcm.split(512) for event in ear.hear(block)][:1]


@pytest.mark.parametrize("delay", [0.02, 0.12])
def test_an_echo_is_no_speech_and_what_is_said_over_it_is(delay: float) -> None:
    pytest.importorskip("livekit")
    far = reply()
    echo = room(far, delay)
    assert turns(echo)  # without a canceller our own voice interrupts us
    alone = cleaned(echo, far)
    assert decibels(echo[: len(alone)]) - decibels(alone) > 20  # from the first sample on
    assert not turns(alone)
    near, at = speech("no, stop, i meant the green one.", "en-us+f2"), len(far) // 2
    both = echo.clone()
    both[at : at + len(near)] += near
    over = cleaned(both, far)
    (begun,) = turns(over)
    assert abs(begun - at) < 0.6 * RATE
    kept = decibels(over[at : at + len(near)]) - decibels(near)
    assert kept > -9  # double talk costs some of it, not most


def test_the_wrong_reference_takes_out_nothing() -> None:
    """The plant: a canceller that would silence everything passes for one that works."""
    pytest.importorskip("livekit")
    far = reply()
    echo = room(far, 0.05)
    silent = cleaned(echo, torch.zeros_like(far))
    assert abs(decibels(silent) - decibels(echo[: len(silent)])) < 1
    assert turns(silent)


def test_any_split_gives_the_same_samples() -> None:
    pytest.importorskip("livekit")
    far = reply()[: 2 * RATE]
    echo = room(far, 0.05)
    whole = cleaned(echo, far, len(far))
    for size in (100, 160, 777):
        assert torch.equal(cleaned(echo, far, size), whole)


def test_without_the_library_it_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "livekit.rtc.apm", None)
    with pytest.raises(ModelError, match=r"mmfast\[echo\]"):
        EchoCanceller()


@pytest.mark.parametrize("rate", [16000, 24000])
def test_what_is_played_stands_beside_what_is_heard(rate: int) -> None:
    """The reference of a chunk is the sound of the reply in its time, late by the slack alone."""
    clock = FakeClock()
    playback, played = Playback(clock, rate), PlayedSound()
    time = torch.arange(2 * rate) / rate
    sound = torch.sin(2 * math.pi * 300 * time)
    taken = [played.take(None, 512)]
    for piece in sound.split(3000):
        played.add(playback, piece)
    clock.advance(0.01)
    playback.add(len(sound))
    for size in (512, 160, 1000) * 10:
        clock.advance(size / RATE)
        taken.append(played.take(playback, size))
    found = torch.cat(taken)
    assert not found[:512].any()
    at = int(found.abs().gt(0.05).nonzero()[0])
    true = torch.sin(2 * math.pi * 300 * torch.arange(len(found)) / RATE)
    best = min(
        float(
            (found[at + 600 : at + 9000] - true[at + 600 - shift : at + 9000 - shift]).abs().max()
        )
        for shift in range(500, 660)
    )
    assert best < 0.02  # one shift fits all of it
    reply_ended = played.take(None, 512)
    assert len(reply_ended) == 512 and not played.take(None, 512).any()


def test_a_session_takes_its_own_voice_out() -> None:
    """In a room where the microphone hears the loudspeaker, only the option keeps the floor."""
    pytest.importorskip("livekit")
    pytest.importorskip("silero_vad")
    from tone_models import HumModel

    from mmfast.voice.ear import VoiceEar
    from mmfast.voice.session import VoiceSession

    voice = reply()

    class Talker(HumModel):
        def reply(self, *args: object, **options: object):  # type: ignore[no-untyped-def]
            for piece in voice.split(4000):
                yield Sound(piece, RATE, heard="why")

    def talk(echo: bool) -> list[str]:
        session = VoiceSession(Talker(), VoiceEar(silence_duration_ms=300), echo=echo)
        question = torch.cat([speech("which way?", "en-us+f2"), torch.zeros(12000)])
        loud, found = torch.zeros(0), list[str]()
        late = torch.zeros(800)
        for block in [*question.split(512), *torch.zeros(6 * RATE).split(512)]:
            arrived = late[: len(block)]
            late = late[len(block) :]
            session.push(
                block + 0.3 * torch.nn.functional.pad(arrived, (0, len(block) - len(arrived)))
            )
            events = session.poll()
            while session.step():
                events += session.poll()
            for event in events:
                found.append(event.kind)
                if event.pcm is not None:
                    loud = torch.cat([loud, event.pcm])
            playing = torch.zeros(len(block))
            playing[: len(loud[: len(block)])] = loud[: len(block)]
            loud = loud[len(block) :]
            late = torch.cat([late, playing])
        return found

    talked = talk(False)
    assert "interrupted" in talked
    kept = talk(True)
    assert "interrupted" not in kept and kept.count("speech_started") == 1
    assert kept.count("audio") > talked.count("audio") > 0
