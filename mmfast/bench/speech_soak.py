"""Hours of conversation in simulated time: does memory grow, does the context drift?

Both sides hum, so what was heard is known from the samples alone: a loudspeaker counts what it
played until it was told to stop, and reads it. The conversation must say the same.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.bench.speech_hum import RATE, TONE, HumChatter, HumEar, HumSpeaker, hum, read
from mmfast.core.speech import Turn
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.history import History
from mmfast.voice.session import VoiceSession

TEXT = "a red blue circle square moves left right up down fast slow it is at 7 12 no"
WORDS = TEXT.split()
WARM = 0.1  # share of the time after which memory is to stand still


class Loudspeaker:
    """Plays what arrives, sample by sample, and notes which samples of which reply it played."""

    def __init__(self) -> None:
        self._queue, self._reply, self.arrived = torch.zeros(0), "", 0
        self._parts: list[Tensor] = []

    def play(self, samples: int) -> None:
        """So much time passes."""
        self._parts.append(self._queue[:samples])
        self._queue = self._queue[samples:]

    def take(self, event: VoiceEvent) -> None:
        """Sound arrives, or is to stop."""
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
        """So many letters it has played to their ends."""
        return len(read(torch.cat([torch.zeros(0), *self._parts])))


def whole_words(text: str, letters: int) -> str:
    """The words of a text that lie within its first letters."""
    if letters < len(text) and text[letters] != " ":
        letters = text.rfind(" ", 0, letters + 1)
    return text[: max(letters, 0)].strip()


class Soak:
    """A conversation, the user in it, and the one who checks.

    Args:
        seed: Of what both say, and when.
        speaker: Hums the answers.
    """

    def __init__(self, seed: int = 0, speaker: HumSpeaker | None = None) -> None:
        self.random = np.random.default_rng(seed)
        chatter = HumChatter(self._answer, speaker)
        self.session = VoiceSession(chatter, HumEar(), ahead=1.0, history=History(turns=16))
        self.loudspeaker, self.answer = Loudspeaker(), ""
        self.expected: dict[str, str] = {}  # item -> text, as far as the oracle knows
        self.item, self.made, self.faults = "", False, list[str]()
        self.checks = self.seconds = 0.0

    def _answer(self, turns: Sequence[Turn]) -> str:
        self.answer = self._text(1, 24)
        return self.answer

    def _text(self, least: int, most: int) -> str:
        return " ".join(self.random.choice(WORDS, self.random.integers(least, most)))

    def _chunks(self) -> Iterator[Tensor]:
        """What the user's microphone gives without end: turns, pauses short and long, coughs."""
        while True:
            pause = self.random.choice([0.35, 0.5, 0.8, 1.5, 4.0]) + self.random.random()
            said = hum(self._text(1, 5)) if self.random.random() < 0.95 else hum("-")[:100]
            pcm = torch.cat([said, torch.zeros(int(pause * RATE))])
            size = int(self.random.choice([160, 320, 480, 512, 640, 1000]))
            yield from pcm.split(size)

    def run(self, seconds: float) -> Iterator[float]:
        """Converse; yields the seconds so far fifty times and at the end."""
        due = 0.0
        for chunk in self._chunks():
            self.loudspeaker.play(len(chunk))
            self.session.push(chunk)
            self._take(self.session.poll())
            while self.session.step():
                self._take(self.session.poll())
            if self.random.random() < 2e-3:
                self._meddle()
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
                # of a reply that was not made to its end, the last word might have gone on
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

    def _meddle(self) -> None:
        """A client cancels, or says what it played."""
        if self.random.random() < 0.5:
            self.session.cancel()
        elif self.item in self.session.history.items:
            ms = float(self.random.uniform(-100, 3000))
            self.session.truncate(self.item, ms)
        self._take(self.session.poll())

    def _check(self) -> None:
        """All that is in the context is what was heard."""
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
    """Converse for so many simulated seconds with random interruptions.

    Args:
        seconds: Of conversation.
        seed: Of what is said, and when.

    Returns:
        `ok`; `faults`, the first ten; `checks` of what was heard against the samples played;
        memory after a tenth of the time and at the end; and the figures of the conversation.
    """
    run, started, marks = Soak(seed), time.perf_counter(), list[tuple[float, int]]()
    for at in run.run(seconds):
        if (at >= WARM * seconds and not marks) or at >= seconds:
            gc.collect()
            marks.append((_resident(), len(gc.get_objects())))
    stats = run.session.stats()
    run.session.close()
    first, last = marks[0], marks[-1]
    names = ("turns", "replies", "interrupted", "cancelled", "cut_off", "failed", "forgotten")
    return {
        "ok": not run.faults,
        "faults": run.faults[:10],
        "checks": int(run.checks),
        "seconds": round(run.seconds, 3),
        "wall_seconds": round(time.perf_counter() - started, 3),
        "rss_mb": [round(first[0], 2), round(last[0], 2)],
        "growth_mb": round(last[0] - first[0], 3),
        "objects": [first[1], last[1]],
        "items": stats["items"],
        **{name: stats[name] for name in names},
    }


def rows(progress: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """`mmfast bench --speech soak`: the hour, and one with other choices."""
    found = []
    for seed in range(2):
        progress("an hour of conversation", seed, 2)
        document = soak(seed=seed)
        document["faults"] = len(document["faults"])
        document["rss_mb"] = document["rss_mb"][-1]
        del document["objects"]
        score = document["checks"] - document["faults"]
        found.append({"job": "soak", "score": score, "n": document["checks"], "seed": seed,
                      "device": "cpu", **document})  # fmt: skip
    return found


def _resident() -> float:
    """Megabytes of main memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6
