"""Recordings for training and tests: text to 16 kHz sound, with the time of every word.

espeak-ng keeps its state in globals, such as the phase of the voice, so the library is loaded anew
for every text (a millisecond): the sound of a text does not depend on earlier texts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.errors import MediaError, MmfastError, SpecError

RATE = 16000
TAIL = 0.12  # seconds of silence left at the end
QUIET = 0.004  # below this, sound is a pause
PIECES = re.compile(r"[^\s,.?!:;]+|[,.?!:;]+")
FLAGS, SYNCHRONOUS, DONT_EXIT, CHARS = 1 | 0x1000, 2, 0x8000, 1
SENTENCE = re.compile(r"(^|[.?!]\s+)([a-z])")
WORD = 1  # kind of event
RATE_OF = 1  # parameters follow in the order rate, volume, pitch, range
_lock = Lock()

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class EspeakVoice:
    """A way of speaking."""

    name: str = "en-us"  # a voice of espeak-ng, with a variant behind a plus sign: "en-us+f2"
    rate: int = 165  # words per minute, 80 to 450
    pitch: int = 50  # 0 to 99
    spread: int = 50  # range of the pitch, 0 to 99
    volume: int = 90  # 0 to 200 percent


Line = tuple[str, EspeakVoice]  # a text and its voice


@dataclass(frozen=True)
class WordTime:
    """A word or a punctuation mark (its pause) and its samples `[start, stop)` at 16 kHz."""

    text: str
    start: int
    stop: int


@dataclass(frozen=True)
class Speech:
    """A recording; `words` cover it from the first sample to the last without a gap."""

    pcm: Tensor  # [n] float32
    words: tuple[WordTime, ...]


class _Event(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("unique", ctypes.c_uint),
        ("position", ctypes.c_int),  # in characters, from 1
        ("length", ctypes.c_int),
        ("milliseconds", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class _Library:
    def __init__(self) -> None:
        try:
            loader: Any = importlib.import_module("espeakng_loader")
        except ImportError:
            raise MmfastError(
                'espeak-ng is missing; it comes with: pip install "mmfast[speech-eval]"'
            ) from None
        try:
            self.library: Any = ctypes.CDLL(loader.get_library_path())
        except OSError as error:
            raise MmfastError(f"espeak-ng does not load: {str(error).splitlines()[0]}") from None
        self.sound: list[NDArray[np.int16]] = []
        self.events: list[tuple[int, int]] = []  # character, sample
        self.callback = _Callback(self._collect)  # kept: the library holds a bare pointer to it
        data = str(loader.get_data_path()).encode()
        self.rate = int(self.library.espeak_Initialize(SYNCHRONOUS, 0, data, DONT_EXIT))
        if self.rate <= 0:
            raise MmfastError(f"espeak-ng does not start with the data in {data.decode()}")
        self.library.espeak_SetSynthCallback(self.callback)

    def close(self) -> None:
        self.library.espeak_Terminate()
        system: Any = importlib.import_module("_ctypes")
        unload = getattr(system, "dlclose", None) or system.FreeLibrary
        unload(self.library._handle)

    def _collect(self, wave: Any, count: int, events: Any) -> int:
        if wave and count:
            self.sound.append(np.ctypeslib.as_array(wave, (count,)).copy())
        at = 0
        while events[at].kind:
            if events[at].kind == WORD:
                self.events.append((events[at].position - 1, events[at].sample))
            at += 1
        return 0

    def run(self, text: str, voice: EspeakVoice) -> tuple[Samples, list[tuple[int, int]]]:
        """Samples at the library's own rate, and starts of words: character, sample."""
        self.sound, self.events = [], []
        if self.library.espeak_SetVoiceByName(voice.name.encode()):
            raise SpecError(f"voice={voice.name!r} is none of espeak-ng's; try en-us or en-us+f2")
        values = (voice.rate, voice.volume, voice.pitch, voice.spread)
        for what, value in enumerate(values, start=RATE_OF):
            self.library.espeak_SetParameter(what, value, 0)
        self.library.espeak_ng_SetRandSeed(1)  # the breath of a voice is drawn
        data = text.encode() + b"\0"
        code = self.library.espeak_Synth(data, len(data), 0, CHARS, 0, FLAGS, None, None)
        if code:
            raise MmfastError(f"espeak-ng cannot say {text[:60]!r}: error {code}")
        found = self.sound or [np.zeros(0, np.int16)]
        whole: Samples = np.concatenate(found).astype(np.float32) / np.float32(32768)
        return whole, self.events


def say(text: str, voice: EspeakVoice | None = None) -> Speech:
    """Say a text; the same text and voice (None: en-us) give the same samples."""
    voice = voice or EspeakVoice()
    _check(text, voice)
    # A full stop ends a sentence for the library where a capital letter follows it.
    capitals = SENTENCE.sub(lambda found: found[1] + found[2].upper(), text)
    with _lock:
        engine = _Library()
        try:
            raw, events = engine.run(capitals, voice)
        finally:
            engine.close()
    pcm = _resample(raw, engine.rate)
    starts = [(at, round(sample * RATE / engine.rate)) for at, sample in events]
    words = tuple(_words(text, starts, pcm))
    if not words:
        raise MmfastError(f"text={text[:60]!r} has no word that can be said")
    words, pcm = _cut(words, pcm)
    return Speech(torch.from_numpy(pcm), words)


def _check(text: str, voice: EspeakVoice) -> None:
    if not text.strip() or "\0" in text:
        raise MmfastError(f"text={text[:60]!r} is nothing that can be said; give words")
    limits = {"rate": (80, 450), "pitch": (0, 99), "spread": (0, 99), "volume": (0, 200)}
    for name, (low, high) in limits.items():
        value = getattr(voice, name)
        if not low <= value <= high:
            raise SpecError(f"{name}={value} is not in {low} to {high}")


def _resample(raw: Samples, rate: int) -> Samples:
    try:
        signal: Any = importlib.import_module("scipy.signal")
    except ImportError:
        raise MmfastError(
            'scipy is missing; install it with: pip install "mmfast[speech-eval]"'
        ) from None
    common = int(np.gcd(RATE, rate))
    pcm = signal.resample_poly(raw, RATE // common, rate // common)
    limited: Samples = np.clip(pcm, -1.0, 1.0).astype(np.float32)
    return limited


def _words(text: str, starts: list[tuple[int, int]], pcm: Samples) -> Iterator[WordTime]:
    """Pieces of the text with their samples; the library joins some words ("of the") into one."""
    pieces = list(PIECES.finditer(text))
    spoken = [i for i, piece in enumerate(pieces) if piece[0][0] not in ",.?!:;"]
    at: dict[int, int] = {}
    for character, sample in starts:
        owner = next((i for i in reversed(spoken) if pieces[i].start() <= character), None)
        if owner is not None:
            at.setdefault(owner, sample)
    known = [i for i in spoken if i in at]
    if not known:
        return
    begins = [(i, at[i]) for i in known] + [(len(pieces), len(pcm))]
    begins[0] = (0, 0)
    for (first, start), (after, stop) in pairwise(begins):
        yield from _share([piece[0] for piece in pieces[first:after]], start, stop, pcm)


def _share(pieces: list[str], start: int, stop: int, pcm: Samples) -> Iterator[WordTime]:
    """Share the sound among words by their letters; marks behind them get the final silence."""
    marks = [piece for piece in pieces if piece[0] in ",.?!:;"]
    loud = np.flatnonzero(np.abs(pcm[start:stop]) > QUIET)
    voiced = start + int(loud[-1]) + 1 if len(loud) else start
    end = voiced if marks and pieces[-1] == marks[-1] else stop
    letters = sum(len(piece) for piece in pieces if piece[0] not in ",.?!:;")
    now, said = start, 0
    for i, piece in enumerate(pieces):
        if piece[0] in ",.?!:;":
            until = stop if i == len(pieces) - 1 else now
        else:
            said += len(piece)
            until = start + round((end - start) * said / letters)
        yield WordTime(piece, now, until)
        now = until


def _cut(words: tuple[WordTime, ...], pcm: Samples) -> tuple[tuple[WordTime, ...], Samples]:
    loud = np.flatnonzero(np.abs(pcm) > QUIET)
    end = min(len(pcm), (int(loud[-1]) + 1 if len(loud) else 0) + round(TAIL * RATE))
    kept = tuple(WordTime(w.text, min(w.start, end), min(w.stop, end)) for w in words)
    return kept, np.ascontiguousarray(pcm[:end])


def worsen(pcm: Samples, rng: np.random.Generator) -> tuple[Samples, int]:
    """Degrade seven of eight recordings; return sound, and the samples of silence in front."""
    before, after = int(rng.integers(0, 8000)), int(rng.integers(800, 6000))
    sound = np.concatenate([np.zeros(before), pcm, np.zeros(after)])
    if rng.random() < 0.125:
        return sound.astype(np.float32), before
    if rng.random() < 0.25:
        sound = band(sound, float(rng.uniform(60, 320)), float(rng.uniform(3300, 4000)))
    level = float(np.sqrt(np.mean(pcm**2))) + 1e-6
    if rng.random() < 0.6:
        shape = noise(len(sound), float(rng.choice([0.0, 0.5, 1.0])), rng)
        sound = sound + shape * level * 10 ** (-rng.uniform(8, 40) / 20)
    sound = sound * 10 ** (rng.uniform(-24, 6) / 20)
    if rng.random() < 0.2:
        sound = sound + rng.uniform(-0.1, 0.1)
    return np.clip(sound, -1, 1).astype(np.float32), before


def band(sound: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Band-pass a sound as a narrow line does, with edges a few hundred hertz wide."""
    spectrum = np.fft.rfft(sound)
    hertz = np.fft.rfftfreq(len(sound), 1 / RATE)
    gain = 1 / (1 + (low / np.maximum(hertz, 1)) ** 8) / (1 + (hertz / high) ** 24)
    return np.fft.irfft(spectrum * gain, len(sound))


def noise(count: int, tilt: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Noise of mean square 1 whose amplitude falls with frequency to the power `tilt`."""
    spectrum = np.fft.rfft(rng.standard_normal(count))
    hertz = np.maximum(np.fft.rfftfreq(count, 1 / RATE), 40)
    sound = np.fft.irfft(spectrum / hertz**tilt, count)
    even: NDArray[np.float64] = sound / np.sqrt(np.mean(sound**2) + 1e-12)
    return even


SHARD = 500  # recordings in a file


@dataclass(frozen=True)
class Recording:
    """A text, its voice, and its place in a file."""

    text: str
    voice: EspeakVoice
    shard: int
    start: int
    stop: int
    words: tuple[WordTime, ...]


class Corpus:
    """A folder of recordings as int16; sound is read from the disk on demand."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = sorted(self.folder.glob("*.json"))
        if not files:
            raise MediaError(f"{self.folder} holds no recordings; make some with build_corpus")
        self.sound = [np.load(file.with_suffix(".npy"), mmap_mode="r") for file in files]
        self.recordings = [row for i, file in enumerate(files) for row in _read(file, i)]

    def __len__(self) -> int:
        return len(self.recordings)

    def samples(self, index: int) -> NDArray[np.int16]:
        """A recording's samples `[n]`, int16."""
        row = self.recordings[index]
        return np.asarray(self.sound[row.shard][row.start : row.stop])

    def __getitem__(self, index: int) -> Speech:
        pcm = torch.from_numpy(self.samples(index).astype(np.float32) / 32767)
        return Speech(pcm, self.recordings[index].words)

    @property
    def seconds(self) -> float:
        """Length of all recordings."""
        return sum(row.stop - row.start for row in self.recordings) / 16000


def build_corpus(
    folder: str | Path,
    said: Sequence[Line],
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus:
    """Say all lines, in several processes, in place of the recordings of a folder."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    for old in (*home.glob("*.json"), *home.glob("*.npy")):
        old.unlink()
    done = 0
    with get_context("spawn").Pool(workers) as pool:
        spoken = pool.imap(_say, said, chunksize=16)
        for shard, start in enumerate(range(0, len(said), SHARD)):
            part = said[start : start + SHARD]
            _write(home / f"{shard:04d}", part, islice(spoken, len(part)))
            done += len(part)
            if progress is not None:
                progress(done, len(said))
    return Corpus(home)


def _say(line: Line) -> tuple[NDArray[np.int16], tuple[WordTime, ...]]:
    spoken = say(*line)
    return (spoken.pcm.numpy() * 32767).round().astype(np.int16), spoken.words


def _write(
    stem: Path,
    said: Sequence[Line],
    spoken: Iterator[tuple[NDArray[np.int16], tuple[WordTime, ...]]],
) -> None:
    rows: list[dict[str, Any]] = []
    parts, at = [], 0
    for (text, voice), (pcm, words) in zip(said, spoken, strict=True):
        times = [[word.text, word.start, word.stop] for word in words]
        row = {"text": text, "voice": asdict(voice), "start": at, "stop": at + len(pcm)}
        rows.append({**row, "words": times})
        parts.append(pcm)
        at += len(pcm)
    np.save(stem.with_suffix(".npy"), np.concatenate(parts))
    stem.with_suffix(".json").write_text(json.dumps(rows))


def _read(file: Path, shard: int) -> list[Recording]:
    found = []
    for row in json.loads(file.read_text()):
        words = tuple(WordTime(*word) for word in row["words"])
        voice = EspeakVoice(**row["voice"])
        found.append(Recording(row["text"], voice, shard, row["start"], row["stop"], words))
    return found
