"""Hours of conversation in simulated time: memory must not grow, the context must not drift.

Doubles of models turn letters into tones, so the samples a loudspeaker played can be read as text.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import resident_bytes
from mmfast.core.speech import Sound, Turn
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.ear import EarEvent
from mmfast.voice.history import History
from mmfast.voice.session import VoiceSession

RATE = 16000
LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789.,?!'-"
TONE = 320  # samples of a letter: 20 ms
LOWEST, STEP = 600.0, 50.0  # Hz: whole numbers of waves, so that tones stay apart
LOUD = 0.3


def hum(text: str) -> Tensor:
    """Return text as tones `[n]`; other signs sound like a space."""
    time = torch.arange(TONE, dtype=torch.float64) / RATE
    tones = [
        torch.sin(2 * math.pi * (LOWEST + STEP * max(LETTERS.find(letter), 0)) * time)
        for letter in text.lower()
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *tones]).float() * LOUD


def read(pcm: Tensor) -> str:
    """Return tones as text, without silence around them and without a partial letter."""
    loud = torch.nonzero(pcm.abs() > LOUD / 20)
    if not len(loud):
        return ""
    start = max(int(loud[0]) - 1, 0)  # a sine begins with a sample of silence
    whole = (len(pcm) - start) // TONE * TONE
    if not whole:
        return ""
    frames = pcm[start : start + whole].reshape(-1, TONE)
    power = torch.fft.rfft(frames).abs()  # [letters, TONE / 2 + 1], 50 Hz apart
    first = round(LOWEST / STEP)
    best = power[:, first : first + len(LETTERS)].max(-1)
    full = best.values > 0.9 * LOUD * TONE / 2
    found = [LETTERS[int(i)] if ok else "\n" for i, ok in zip(best.indices, full, strict=True)]
    return "".join(found).split("\n")[0]


class HumSpeaker:
    """A speaker that turns text into tones."""

    sample_rate = RATE

    def __init__(self, piece: int = 1600, each: Callable[[], Any] | None = None) -> None:
        self.piece, self.each = piece, each
        self.made = 0  # pieces so far

    def speak(self, text: str | Iterable[str], **_: Any) -> Iterator[Sound]:
        """Yield the tones word by word."""
        for word in _words([text] if isinstance(text, str) else text):
            for index, part in enumerate(hum(word).split(self.piece)):
                if self.each is not None:
                    self.each()
                self.made += 1
                yield Sound(
                    part, RATE, word if index == 0 else "", passes=1, tokens=len(part) // 80
                )


def _words(parts: Iterable[str]) -> Iterator[str]:
    held = ""
    for part in parts:
        held += part
        while (end := held.find(" ", 1)) > 0:
            yield held[:end]
            held = held[end:]
    if held:
        yield held


class HumEar:
    """A voice detector that finds tones by their loudness, 10 ms at a time."""

    def __init__(self, pause: float = 0.3, padding: float = 0.1) -> None:
        self._pause, self._padding = round(pause * 100), round(padding * 100)
        self._rest, self._blocks = torch.zeros(0), list[Tensor]()
        self._speaking, self._quiet, self._at = False, 0, 0

    def hear(self, pcm: Tensor) -> list[EarEvent]:
        """Process the next samples `[n]`."""
        held = torch.cat([self._rest, pcm])
        whole = len(held) // 160 * 160
        self._rest = held[whole:].clone()
        blocks = held[:whole].split(160) if whole else ()
        return [found for block in blocks for found in self._block(block)]

    def _block(self, block: Tensor) -> list[EarEvent]:
        loud = float(block.abs().max()) > LOUD / 3
        self._blocks.append(block)
        self._at += len(block)
        self._quiet = 0 if loud else self._quiet + 1
        if not self._speaking:
            del self._blocks[: -self._padding - 1]
            if not loud:
                return []
            self._speaking = True
            return [EarEvent("started", self._at - 160 * len(self._blocks))]
        return self.flush() if self._quiet >= self._pause else []

    def flush(self) -> list[EarEvent]:
        """End an open turn."""
        if not self._speaking:
            return []
        pcm = torch.cat(self._blocks)
        self.clear()
        return [EarEvent("stopped", self._at, pcm)]

    def clear(self) -> None:
        """Discard an open turn."""
        self._blocks, self._speaking, self._quiet = [], False, 0


class HumChatter:
    """A chatter that reads tones and answers in tones."""

    sample_rate = RATE

    def __init__(
        self,
        answer: Callable[[Sequence[Turn]], str | Iterable[str]],
        speaker: HumSpeaker | None = None,
    ) -> None:
        self._answer, self._speaker = answer, speaker or HumSpeaker()

    def reply(
        self, pcm: Tensor, rate: int = RATE, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Yield the answer to tones `[n]`."""
        heard = read(pcm).strip()
        if not heard:  # a cough
            yield Sound(torch.zeros(0), RATE, heard="")
            return
        first: str | None = heard
        for sound in self._speaker.speak(self._answer((*history, Turn("user", heard)))):
            yield Sound(sound.pcm, RATE, sound.text, heard=first, passes=1, tokens=sound.tokens)
            first = None


TEXT = "a red blue circle square moves left right up down fast slow it is at 7 12 no"
WORDS = TEXT.split()
WARM = 0.1  # share of the time after which memory must be constant


class Loudspeaker:
    """A loudspeaker that plays sample by sample and records the samples of the last reply."""

    def __init__(self) -> None:
        self._queue, self._reply, self.arrived = torch.zeros(0), "", 0
        self._parts: list[Tensor] = []

    def play(self, samples: int) -> None:
        """Play some samples."""
        self._parts.append(self._queue[:samples])
        self._queue = self._queue[samples:]

    def take(self, event: VoiceEvent) -> None:
        """Queue the sound of an event, or stop."""
        if event.kind == "reply_started":
            self._queue, self._parts, self._reply = torch.zeros(0), [], event.reply
            self.arrived = 0
        elif event.kind == "interrupted":
            self._queue = torch.zeros(0)
        elif event.pcm is not None:
            assert event.reply == self._reply, "a delta of a reply that is over"
            self._queue = torch.cat([self._queue, event.pcm])
            self.arrived += len(event.pcm)

    def letters(self) -> int:
        """Count the letters played to their ends."""
        return len(read(torch.cat([torch.zeros(0), *self._parts])))


def whole_words(text: str, letters: int) -> str:
    """Return the words of a text that end within its first letters."""
    if letters < len(text) and text[letters] != " ":
        letters = text.rfind(" ", 0, letters + 1)
    return text[: max(letters, 0)].strip()


class Soak:
    """A conversation with a simulated user, checked against the loudspeaker."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        chatter = HumChatter(self._answer)
        self.session = VoiceSession(chatter, HumEar(), ahead=1.0, history=History(turns=16))
        self.loudspeaker, self.answer = Loudspeaker(), ""
        self.expected: dict[str, str] = {}  # text by item, from the loudspeaker
        self.item, self.made, self.faults = "", False, list[str]()
        self.checks = self.seconds = 0.0

    def _answer(self, turns: Sequence[Turn]) -> str:
        self.answer = self._text(1, 24)
        return self.answer

    def _text(self, least: int, most: int) -> str:
        return " ".join(self.random.choice(WORDS, self.random.integers(least, most)))

    def _chunks(self) -> Iterator[Tensor]:
        """Yield the microphone's sound without end: turns, pauses short and long, coughs."""
        while True:
            pause = self.random.choice([0.35, 0.5, 0.8, 1.5, 4.0]) + self.random.random()
            said = hum(self._text(1, 5)) if self.random.random() < 0.95 else hum("-")[:100]
            pcm = torch.cat([said, torch.zeros(int(pause * RATE))])
            size = int(self.random.choice([160, 320, 480, 512, 640, 1000]))
            yield from pcm.split(size)

    def run(self, seconds: float) -> Iterator[float]:
        """Converse; yield the seconds so far fifty times and at the end."""
        due = 0.0
        for chunk in self._chunks():
            self.loudspeaker.play(len(chunk))
            self.session.push(chunk)
            self._take(self.session.poll())
            while self.session.step():
                self._take(self.session.poll())
            if self.random.random() < 2e-3:
                self._interfere()
            self.seconds += len(chunk) / RATE
            if self.seconds >= min(due, seconds):
                yield self.seconds
                due += seconds / 50
            if self.seconds >= seconds:
                return

    def _take(self, events: Sequence[VoiceEvent]) -> None:
        for event in events:
            if event.kind == "speech_started":
                self._check()
            self.loudspeaker.take(event)
            if event.kind == "reply_started":
                self.item, self.made = event.item, False
            elif event.kind == "interrupted":
                self._expect(event.item, event.text, "interrupted")
            elif event.kind == "truncated":
                letters = int(event.audio_ms * RATE / 1e3 + 0.5) // TONE
                # the last word of an incomplete reply may be partial
                letters = min(letters, self.loudspeaker.arrived // TONE - (not self.made))
                self._expect(event.item, event.text, "truncated", whole_words(self.answer, letters))
            elif event.kind == "done":
                self.made = event.status == "completed"
            elif event.kind == "error":
                self.faults.append(event.text)

    def _expect(self, item: str, found: str, why: str, wanted: str | None = None) -> None:
        if wanted is None:
            wanted = whole_words(self.answer, self.loudspeaker.letters())
        self.expected[item] = wanted
        self.checks += 1
        if wanted != found:
            self.faults.append(f"{self.seconds:.2f} s, {why} {item}: {found!r}, heard {wanted!r}")

    def _interfere(self) -> None:
        if self.random.random() < 0.5:
            self.session.cancel()
        elif self.item in self.session.history.items:
            ms = float(self.random.uniform(-100, 3000))
            self.session.truncate(self.item, ms)
        self._take(self.session.poll())

    def _check(self) -> None:
        items = self.session.history.items
        if self.item in items and self.item not in self.expected:
            self._expect(self.item, items[self.item].text, "played")
        self.expected = {id: text for id, text in self.expected.items() if id in items}
        for id, text in self.expected.items():
            if items[id].text != text:
                self.faults.append(f"{self.seconds:.2f} s, {id}: {items[id].text!r} was {text!r}")
        turns = [turn.text for turn in self.session.turns()]
        if turns != [item.text for item in items.values() if item.text]:
            self.faults.append(f"{self.seconds:.2f} s: the context is not what the items say")


def soak(seconds: float = 3600.0, seed: int = 0) -> dict[str, Any]:
    """Converse for simulated seconds with random interruptions; return figures and ten faults."""
    run, started, marks = Soak(seed), time.perf_counter(), list[tuple[float, int]]()
    for at in run.run(seconds):
        if (at >= WARM * seconds and not marks) or at >= seconds:
            gc.collect()
            marks.append((resident_bytes() / 1e6, len(gc.get_objects())))
    stats = run.session.stats()
    run.session.close()
    first, last = marks[0], marks[-1]
    names = ("turns", "replies", "interrupted", "cancelled", "cut_off", "failed", "forgotten")
    found = {"ok": not run.faults, "faults": run.faults[:10], "checks": int(run.checks)}
    found |= {"seconds": round(run.seconds, 3), "objects": [first[1], last[1]]}
    found |= {"wall_seconds": round(time.perf_counter() - started, 3)}
    found |= {"rss_mb": [round(first[0], 2), round(last[0], 2)], "items": stats["items"]}
    found["growth_mb"] = round(last[0] - first[0], 3)
    return found | {name: stats[name] for name in names}


@benchmark("speech", "soak")
def soak_rows(tick: Tick) -> list[Row]:
    """Run two hours of conversation with different seeds."""
    found = []
    for seed in range(2):
        tick("an hour of conversation", seed, 2)
        document = soak(seed=seed)
        document["faults"] = len(document["faults"])
        document["rss_mb"] = document["rss_mb"][-1]
        del document["objects"]
        score = document["checks"] - document["faults"]
        shared = {"job": "soak", "score": score, "n": document["checks"], "seed": seed}
        found.append({**shared, "device": "cpu", **document})
    return found
