"""Ends of turns by prosody, and backchannels that leave a reply alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tone_models import HumEar, HumModel, hum, read
from torch import Tensor

from mmfast.core.errors import MmfastError, SpecError
from mmfast.models.speech.turn_end import (
    SILENCES,
    Overheard,
    ProsodyNet,
    TurnEnd,
    finished,
    is_backchannel,
    known_facts,
    prosody,
)
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.dialogue import BRIEF, LULL
from mmfast.voice.ear import CERTAINTY, RATE, MurmurEar, ProsodyEar, VoiceEar
from mmfast.voice.session import VoiceSession


class Loud:
    """Takes for speech what is louder than silence."""

    def start(self) -> Any:
        return None

    def step(self, state: Any, window: Tensor) -> tuple[Any, Tensor]:
        return state, (window.abs().amax(-1, keepdim=True) > 0.01).float()


class Known(TurnEnd):
    """Networks that give known scores, one list a silence, and keep what they were asked."""

    def __init__(self, *answers: Sequence[float], murmur: float = 0.0) -> None:
        self.answers, self.asked, self.loudness = list(answers), list[Any](), murmur

    def scores(self, pcm: Tensor, said: tuple[str, float] | None = None) -> list[float]:
        self.asked.append((len(pcm), said))
        return list(self.answers[min(len(self.asked), len(self.answers)) - 1])

    def murmur(self, pcm: Tensor) -> float:
        return self.loudness


def rising(at: int, score: float = 0.999) -> list[float]:
    """Scores that are sure from the silence of so many milliseconds on."""
    return [score if ms >= at else 0.2 for ms in SILENCES]


def sound(*seconds: float) -> Tensor:
    """Speech and silence in turn."""
    parts = [torch.full((round(s * RATE),), 0.5 * (n % 2 == 0)) for n, s in enumerate(seconds)]
    return torch.cat(parts)


def heard(ear: VoiceEar, pcm: Tensor, size: int = 512) -> list[tuple[str, float]]:
    found, at = [], 0
    for chunk in pcm.split(size):
        at += len(chunk)
        found += [(event.kind, at / RATE) for event in ear.hear(chunk)]
    return found


@pytest.mark.parametrize("at", [SILENCES[0], SILENCES[3], SILENCES[-1]])
def test_a_turn_ends_when_its_score_is_reached(at: int) -> None:
    for size in (512, 100, 5000):
        ear = ProsodyEar("auto", ends=Known(rising(at)), activity=Loud())
        kind, stopped = heard(ear, sound(1.0, 3.0), size)[-1]
        assert kind == "stopped" and at / 1e3 <= stopped - 1.0 < at / 1e3 + 0.04 + size / RATE


@pytest.mark.parametrize("eagerness", CERTAINTY)
def test_a_score_that_is_never_reached_waits_as_long_as_the_eagerness(eagerness: str) -> None:
    score, later, most = CERTAINTY[eagerness]
    under = [score - 0.01] + [later - 0.01] * (len(SILENCES) - 1)
    ear = ProsodyEar(eagerness, ends=Known(under), activity=Loud())
    kind, stopped = heard(ear, sound(1.0, 9.0))[-1]
    assert kind == "stopped" and most / 1e3 <= stopped - 1.0 < most / 1e3 + 0.07
    sure = ProsodyEar(eagerness, ends=Known(rising(0, score)), activity=Loud())
    assert heard(sure, sound(1.0, 9.0))[-1][1] - 1.0 < 0.2
    with pytest.raises(SpecError, match=r"eagerness 'hgih'.*high"):
        ProsodyEar("hgih", ends=Known())


def test_an_end_that_is_not_evident_at_once_must_be_surer_later() -> None:
    score, later, _ = CERTAINTY["auto"]
    between = (score + later) / 2
    for scores, ends in ((rising(0, between), 0.128), ([0.2, *rising(0, between)[1:]], 2.0)):
        ear = ProsodyEar("auto", ends=Known(scores), activity=Loud())
        assert heard(ear, sound(1.0, 3.0))[-1][1] - 1.0 == pytest.approx(ends, abs=0.07)


WORDS = ("what colour is", "what colour is the circle")


def test_a_pause_is_sat_out_and_each_silence_is_judged_once_with_its_words() -> None:
    texts = iter([(text, 1.0) for text in WORDS])
    ends = Known(rising(1000), rising(128))
    ear = ProsodyEar("auto", lambda pcm: next(texts), ends, activity=Loud())
    events = heard(ear, sound(1.0, 0.8, 1.0, 3.0))
    assert [kind for kind, _ in events] == ["started", "stopped"]
    assert 0.128 <= events[1][1] - 2.8 < 0.2
    assert [said for _, said in ends.asked] == [(text, 1.0) for text in WORDS]
    assert ends.asked[0][0] < 1.2 * RATE < 2.8 * RATE < ends.asked[1][0]
    silent = Known(rising(128))
    heard(ProsodyEar("auto", ends=silent, activity=Loud()), sound(1.0, 3.0))
    assert [said for _, said in silent.asked] == [None]


def tone(start: float, stop: float, seconds: float = 1.6) -> Tensor:
    """Pulses of a voice whose pitch goes from one frequency to another."""
    steps = torch.linspace(start, stop, round(seconds * RATE)) / RATE
    phase = 2 * math.pi * steps.double().cumsum(0)
    waves = [torch.sin(k * phase) / k for k in range(1, 8)]
    return (0.1 * sum(waves, torch.zeros(()))).float()


def test_prosody_is_pitch_without_voice_and_level() -> None:
    """The pitch channel follows known glides, and is the same an octave and 12 dB away."""
    fall, rise = prosody(tone(220, 110)[None])[0, 21], prosody(tone(110, 220)[None])[0, 21]
    assert fall[:20].mean() > 0.4 > -0.4 > fall[-20:-3].mean()
    assert rise[:20].mean() < -0.4 < 0.4 < rise[-20:-3].mean()
    true = 1.5 * torch.linspace(220, 110, 160).log2()
    true -= true.median()
    assert (fall[4:-4] - true[4:-4]).abs().max() < 0.2
    low = prosody(tone(300, 150)[None])[0, 21]
    assert (low - fall)[4:-4].abs().max() < 0.2
    noise = torch.randn(1, 25600, generator=torch.Generator().manual_seed(0))
    room = tone(220, 110)[None] + 0.01 * noise
    assert (prosody(0.25 * room) - prosody(room)).abs().mean() < 0.05
    voiced = prosody(tone(220, 110)[None])[0, 22].mean()
    assert prosody(0.1 * noise)[0, 22].mean() < 0.3 < 0.8 < voiced


def test_energy_falls_where_the_sound_does_and_short_sounds_begin_in_silence() -> None:
    faded = tone(150, 150) * torch.linspace(1, 0.01, 25600)
    energy = prosody(faded[None])[0, 20]
    assert energy[10] > energy[80] > energy[150]
    short = prosody(tone(150, 150, 0.5)[None])[0]
    assert short.shape == (23, 160) and short[20, :100].max() < short[20, 115:155].min()
    assert torch.isfinite(prosody(torch.zeros(1, 0))).all()


def test_a_network_reads_what_comes_last() -> None:
    torch.manual_seed(0)
    ends = TurnEnd(ProsodyNet(len(SILENCES)), ProsodyNet(1))
    pcm = tone(220, 110, 2.5)
    first = ends.scores(pcm)
    assert len(first) == len(SILENCES) and ends.scores(pcm) == first
    whole, broken = (ends.scores(pcm, Overheard(text)) for text in reversed(WORDS))
    assert whole != broken != first != whole
    other = torch.cat([tone(110, 330, 0.5), pcm[RATE // 2 :]])  # changed before the last 1.6 s
    assert ends.scores(other) == first
    assert 0 <= ends.murmur(pcm) <= 1


@pytest.mark.parametrize("text", ["mhm", "Uh-huh.", "okay", "yes, right", "oh, I see"])
def test_words_of_a_backchannel(text: str) -> None:
    assert is_backchannel(text)


@pytest.mark.parametrize("text", ["", "stop", "yes but", "no", "okay the red one", "right " * 5])
def test_words_that_want_the_floor(text: str) -> None:
    assert not is_backchannel(text)


def test_words_and_sound_agree_on_a_backchannel() -> None:
    pcm = torch.zeros(8000)
    words = {"yes": ("yes", 1.0), "stop": ("stop", 1.0)}
    for score, word, found in (
        (0.95, None, ""), (0.3, None, None), (0.5, "yes", "yes"), (0.5, "stop", None),
        (0.1, "yes", None),
    ):  # fmt: skip
        hears = None if word is None else lambda pcm, word=word: Overheard(*words[word])
        assert MurmurEar(hears, Known(murmur=score))(pcm) == found, (score, word)


ANSWER = "the red circle moves to the left of the blue square and then on to the top"


def talking(model: HumModel | None = None, **options: Any) -> VoiceSession:
    """A conversation in which the answer begins to sound."""
    ear = VoiceEar(activity=Loud(), silence_duration_ms=300)
    session = VoiceSession(model or HumModel(lambda turns: ANSWER), ear, **options)
    if session.murmur is not None:
        session.murmur = lambda pcm: text if is_backchannel(text := read(pcm).strip()) else None
    session.push(torch.cat([hum("which way?"), torch.zeros(8000)]))
    while session.step():
        session.poll()
    assert "reply_started" not in kinds(session.poll()) and session.reply is not None
    return session


def kinds(events: Sequence[VoiceEvent]) -> list[str]:
    return [event.kind for event in events]


def pushed(session: VoiceSession, pcm: Tensor, size: int = 512) -> list[VoiceEvent]:
    found = []
    for chunk in pcm.split(size):
        session.push(chunk)
        found += session.poll()
    return found


@pytest.mark.parametrize("size", [160, 512, 3000, 16000])
def test_a_backchannel_interrupts_nothing_and_makes_no_turn(size: int) -> None:
    session = talking(backchannels=True)
    before = len(session.history.items)
    events = pushed(session, torch.cat([hum("uh huh"), torch.zeros(4800)]), size)
    (event,) = events
    assert event.kind == "backchannel" and event.text == "uh huh"
    assert session.reply is not None and len(session.history.items) == before
    assert session.stats()["backchannels"] == 1 and session.stats()["interrupted"] == 0
    assert abs(event.audio_ms - 700 + 300) < 40  # the padding of the beginning is counted


def test_without_the_option_the_same_sound_interrupts() -> None:
    session = talking()
    events = pushed(session, torch.cat([hum("uh huh"), torch.zeros(8000)]))
    assert kinds(events)[:2] == ["speech_started", "interrupted"]
    assert session.stats()["turns"] == 2


def test_another_short_word_interrupts_where_it_ends_and_is_a_turn() -> None:
    session = talking(backchannels=True)
    began = session.clock.now()
    events = pushed(session, torch.cat([hum("stop now"), torch.zeros(8000)]))
    assert kinds(events)[:4] == ["speech_started", "interrupted", "speech_stopped", "committed"]
    late = events[1].time_ms / 1e3 - began
    assert 0.16 + LULL <= late < 0.16 + LULL + 0.07
    assert "heard" in kinds(list(session.finish()))


def test_what_is_longer_than_a_backchannel_interrupts_at_once() -> None:
    session = talking(backchannels=True)
    began = session.clock.now()
    long = hum("mm " * 40)  # words of a backchannel, for 2.4 s
    events = pushed(session, torch.cat([long, torch.zeros(8000)]))
    assert kinds(events)[:2] == ["speech_started", "interrupted"]
    assert BRIEF <= events[1].time_ms / 1e3 - began < BRIEF + 0.07
    assert kinds(events).count("speech_stopped") == 1


def test_a_sound_under_no_reply_is_a_turn() -> None:
    ear = VoiceEar(activity=Loud(), silence_duration_ms=300)
    session = VoiceSession(HumModel(), ear, backchannels=True)
    session.murmur = lambda pcm: "okay"
    events = pushed(session, torch.cat([hum("okay"), torch.zeros(8000)]))
    assert kinds(events)[:3] == ["speech_started", "speech_stopped", "committed"]


def test_a_reply_that_ends_under_a_sound_leaves_it_the_floor() -> None:
    session = talking(HumModel(lambda turns: "no"), backchannels=True)
    pushed(session, hum("aha ok"))  # the reply of 40 ms is over before
    assert session.held is None
    events = pushed(session, torch.zeros(8000))
    assert "speech_stopped" in kinds(events) and "backchannel" not in kinds(events)


def test_clear_and_commit_of_what_is_held() -> None:
    session = talking(backchannels=True)
    pushed(session, hum("okay"))
    assert session.held is not None
    session.clear()
    assert session.held is None and kinds(session.poll()) == ["cleared"]
    pushed(session, torch.cat([torch.zeros(512), hum("stop")]))
    session.commit()  # the turn is taken, though it was not decided
    assert {"speech_started", "interrupted", "committed"} <= set(kinds(session.poll()))


def test_backchannels_want_an_ear_that_finds_speech() -> None:
    with pytest.raises(MmfastError, match=r"HumEar.*ear='voice'"):
        VoiceSession(HumModel(), HumEar(), backchannels=True)


def test_facts_of_words() -> None:
    """Same last words, same facts; where nobody hears, none."""
    unheard, broken, whole = (known_facts(RATE, said) for said in (None, *map(Overheard, WORDS)))
    assert unheard[:4] == [1, 0, 0, 0] and unheard[-2:] == [0, 0]
    assert whole[1] == broken[3] == 1 and finished(WORDS[0]) is False
    assert known_facts(RATE, Overheard("Where is the circle?"))[-2:] == whole[-2:] != broken[-2:]


def test_how_likely_an_end_is_counts_where_it_is_known() -> None:
    def ending(chance: float | None) -> list[float]:
        return known_facts(RATE, Overheard(WORDS[1], 1.0, chance))[5:7]

    assert ending(None) == [0, 0] and ending(0.5) == [1, 0]
    assert -1.8 < ending(0.0)[1] < ending(0.1)[1] < ending(0.9)[1] < ending(1.0)[1] < 1.8


def test_the_embedded_voice_knows_what_people_ask() -> None:
    from mmfast.models.speech.embedded import load_speech

    model = load_speech()
    for text in ("what is the opposite of left", "what comes after monday", "my name is emma"):
        *begun, _ = text.split()
        assert model.ending(text) > 0.8 > 0.2 > model.ending(" ".join(begun))
