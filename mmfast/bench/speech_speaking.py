"""Is what a speech model says intelligible? Word errors of a recogniser, mode by mode."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.word_errors import Errors, count_errors
from mmfast.core.speech import Sound
from mmfast.tiny.evaluate import interval
from mmfast.tiny.speech.recordings import EspeakVoice, say
from mmfast.tiny.speech.text import PITCHES, SPEEDS, VOICE_NAMES, sentence

Hear = Callable[[Tensor], str]
EVAL = 77  # keeps these sentences apart from other draws of the same seed

# How a sentence is said: the schedule of draft modules, and what is done with drafts.
MODES: dict[str, tuple[str, str]] = {
    "vanilla": ("vanilla", "none"),
    "balance": ("balance", "none"),
    "boost": ("boost", "none"),
    "turbo": ("turbo", "none"),
    "exact": ("turbo", "exact"),
    "typical": ("turbo", "typical:0.3"),
}


@dataclass(frozen=True)
class SpokenLine:
    """A sentence and how it is to be said."""

    text: str
    voice: EspeakVoice

    @property
    def options(self) -> dict[str, Any]:
        """What a `Speaker` takes to say it so."""
        return {"voice": self.voice.name, "rate": self.voice.rate, "pitch": self.voice.pitch}


def unseen_lines(n: int, seed: int) -> list[SpokenLine]:
    """Different sentences of the evaluation half of the domain, voices in turn."""
    rng, texts = np.random.default_rng([EVAL, seed]), dict[str, None]()
    while len(texts) < n:
        texts[sentence(rng, "eval")] = None
    ways = [
        EspeakVoice(VOICE_NAMES[i % len(VOICE_NAMES)], SPEEDS[int(s)], PITCHES[int(p)])
        for i, (s, p) in enumerate(rng.integers(0, 3, (n, 2)))
    ]
    return [SpokenLine(text, way) for text, way in zip(texts, ways, strict=True)]


class CachedRecogniser:
    """A recogniser that hears equal sound once."""

    def __init__(self, hear: Hear) -> None:
        self.hear, self._known = hear, dict[str, str]()

    def __call__(self, pcm: Tensor) -> str:
        """Sound `[n]` to text."""
        key = hashlib.sha256(pcm.contiguous().numpy().tobytes()).hexdigest()
        if key not in self._known:
            self._known[key] = self.hear(pcm)
        return self._known[key]


@dataclass
class Tally:
    """What was counted over the sentences of one mode."""

    errors: Errors = field(default_factory=Errors)
    voices: dict[str, Errors] = field(default_factory=lambda: defaultdict(Errors))
    seconds: float = 0.0
    passes: int = 0
    drafts: int = 0
    tokens: int = 0
    same: int = 0
    codes: list[Tensor | None] = field(default_factory=list)

    def add(self, line: SpokenLine, heard: str, pcm: Tensor) -> None:
        """Count a sentence."""
        found = count_errors(line.text, heard)
        self.errors += found
        self.voices[line.voice.name] += found
        self.seconds += len(pcm) / 16000

    def row(self, n: int) -> Row:
        """Its figures."""
        rate = {name: round(found.rate, 5) for name, found in sorted(self.voices.items())}
        errors, words = self.errors.errors, self.errors.words
        return {
            "task": "speaking",
            "score": self.errors.rate,
            "wer": self.errors.rate,
            "interval": interval(min(errors, words), words),
            "errors": errors,
            "words": words,
            "by_voice": rate,
            "sentences": n,
            "seconds": self.seconds,
        }


def speaking_rows(
    model: Any, lines: Sequence[SpokenLine], hear: Hear, modes: Sequence[str], progress: Tick
) -> list[Row]:
    """Word error rate of the recordings, of the codec alone, and of every mode.

    Args:
        model: A `Speaker` with `codec`; see `mmfast.models.speech.embedded.load_speech`.
        lines: What is said.
        hear: Sound `[n]` at 16 kHz to text.
        modes: Of MODES.
        progress: Called with a label, sentences done and sentences in all.
    """
    recorded = [say(line.text, line.voice).pcm for line in lines]
    ear, total = CachedRecogniser(hear), len(lines) * (len(modes) + 2)
    rows, done = list[Row](), 0
    for name in ("recordings", "codec"):
        tally = Tally()
        for line, pcm in zip(lines, recorded, strict=True):
            sound = pcm if name == "recordings" else through(model.codec, pcm)
            tally.add(line, ear(sound), sound)
            done += 1
            progress(name, done, total)
        rows.append({"mode": name, "verify": None, **tally.row(len(lines))})
    first: Tally | None = None
    for name in modes:
        tally = Tally()
        for line in lines:
            _speak(model, line, name, tally, ear)
            done += 1
            progress(name, done, total)
        first = tally if name == "vanilla" else first
        rows.append({**_mode_row(name, tally, len(lines)), **_alike(tally, first)})
    return rows


@torch.inference_mode()
def through(codec: Any, pcm: Tensor) -> Tensor:
    """A recording `[n]` as the codec gives it back."""
    back: Tensor = codec.decode(codec.encode(pcm[None]))[0]
    return back[: len(pcm)]


def joined(pieces: Sequence[Sound]) -> tuple[Tensor, Tensor | None]:
    """The sound `[n]` and the codes `[Q, T]` of all pieces."""
    codes = [piece.codes for piece in pieces if piece.codes is not None]
    return torch.cat([piece.pcm for piece in pieces]), torch.cat(codes, 1) if codes else None


def _speak(model: Any, line: SpokenLine, name: str, tally: Tally, ear: CachedRecogniser) -> None:
    mode, verify = MODES[name]
    pieces = list(model.speak(line.text, mode=mode, verify=verify, **line.options))
    pcm, codes = joined(pieces)
    tally.codes.append(codes)
    tally.passes += sum(piece.passes for piece in pieces)
    tally.drafts += sum(piece.drafts for piece in pieces)
    tally.tokens += sum(piece.tokens for piece in pieces)
    tally.add(line, ear(pcm), pcm)


def _mode_row(name: str, tally: Tally, n: int) -> Row:
    mode, verify = MODES[name]
    return {
        "mode": name,
        "schedule": mode,
        "verify": verify,
        **tally.row(n),
        "tokens": tally.tokens,
        "passes": tally.passes,
        "draft_passes": tally.drafts,
        "tokens_per_pass": tally.tokens / max(1, tally.passes),
    }


def _alike(tally: Tally, vanilla: Tally | None) -> Row:
    """Share of sentences whose codes are those of one token per pass."""
    if vanilla is None:
        return {}
    same = [
        a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(tally.codes, vanilla.codes, strict=True)
    ]
    return {"identical": sum(same) / len(same)}
