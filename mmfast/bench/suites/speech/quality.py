"""Quality of speech models: word errors of spoken text, answers to spoken questions, the codec.

The recogniser is pocketsphinx with a grammar of every sentence and question of the domain.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchaudio.functional import edit_distance

from mmfast.bench.registry import Tick, benchmark, quiet
from mmfast.bench.results import Row
from mmfast.bench.suites.speech.overlap import overlap_rows
from mmfast.bench.suites.speech.replies import reply_rows
from mmfast.bench.timing import PROCESSOR_CLOCK, one_thread, timed
from mmfast.core.errors import MmfastError, SpecError, unknown
from mmfast.core.speech import Sound
from mmfast.decoding.drafting import parse_mode
from mmfast.frontends.codecs.embedded.codec import load_embedded
from mmfast.ops.audio import log_mel
from mmfast.pipelines.omni_chat import written
from mmfast.tiny.evaluate import interval
from mmfast.tiny.speech.recordings import EspeakVoice, say
from mmfast.tiny.speech.text import (
    MARKS,
    PITCHES,
    SPEEDS,
    VOICE_NAMES,
    groups,
    heard_voice,
    jsgf,
    sentence,
    split_of,
    spoken_variants,
)
from mmfast.tiny.suites import SuiteCase, suite_of

RATE = 16000
MARGIN = 0.15  # seconds of near silence around an utterance, for the recogniser's own statistics
Recognise = Callable[[Tensor], str]  # sound `[n]` at 16 kHz to text
Answer = Callable[[Sequence[SuiteCase]], list[str]]


@dataclass(frozen=True)
class WordErrors:
    """Substitutions, deletions and insertions, and the words of the reference."""

    errors: int = 0
    words: int = 0

    @property
    def rate(self) -> float:
        """Word error rate; may exceed 1."""
        return self.errors / self.words if self.words else 0.0

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(self.errors + other.errors, self.words + other.words)

    def row(self) -> Row:
        """Return the fields of a row; the score is the rate."""
        between = interval(min(self.errors, self.words), self.words)
        counts = {"errors": self.errors, "words": self.words}
        return {"score": self.rate, "wer": self.rate, "interval": between, **counts}


def spoken_words(text: str) -> list[str]:
    """Return the words of a text of the domain, without punctuation."""
    return [part for part in groups(text.lower()) if part not in MARKS]


def count_errors(reference: str, heard: str) -> WordErrors:
    """Count the errors of one utterance."""
    wanted = spoken_words(reference)
    return WordErrors(edit_distance(wanted, spoken_words(heard)), len(wanted))


class Recogniser:
    """Pocketsphinx with the domain's grammar; its words do not depend on earlier utterances."""

    def __init__(self) -> None:
        try:
            module: Any = importlib.import_module("pocketsphinx")
        except ImportError:
            raise MmfastError(
                'pocketsphinx is missing; it comes with: pip install "mmfast[speech-eval]"'
            ) from None
        # Means over the utterance alone, so that its words do not depend on the ones before.
        self.decoder: Any = module.Decoder(lm=None, cmn="batch", loglevel="FATAL")
        self.decoder.add_jsgf_string("domain", jsgf())
        self.decoder.activate_search("domain")

    def transcribe(self, pcm: Tensor, rate: int = RATE) -> str:
        """Return the likeliest words of the grammar for `[n]` float32 in -1..1, "" for none."""
        if rate != RATE:
            raise SpecError(
                f"rate={rate} is not {RATE}; resample with mmfast.frontends.audio.reader"
            )
        samples = np.nan_to_num(pcm.detach().cpu().numpy().astype(np.float32))
        rng = np.random.default_rng(0)
        pad = round(MARGIN * RATE)
        whole = rng.normal(0.0, 1e-4, len(samples) + 2 * pad)
        whole[pad : pad + len(samples)] += samples
        data = (whole.clip(-1, 1) * 32767).astype(np.int16).tobytes()
        self.decoder.start_utt()
        self.decoder.process_raw(data, full_utt=True)
        self.decoder.end_utt()
        found = self.decoder.hyp()
        return "" if found is None else str(found.hypstr)


_SPEAKING, _LISTENING = 77, 78  # separate these draws from others of the same seed

# Options of a `Speaker`: one token per pass, the modes, and drafts that nothing verifies.
MODES: dict[str, dict[str, str]] = {"vanilla": {"schedule": "vanilla"}}
MODES |= {name: {"mode": name} for name in ("exact", "fast", "turbo")}
MODES |= {f"raw {name}": {"schedule": name, "verify": "none"} for name in ("balance", "boost")}
MODES |= {"raw": {"verify": "none"}}


def way_of(name: str) -> Row:
    """Return the schedule and the rule of a name of MODES as fields of a row."""
    mode = parse_mode(**MODES[name])
    rule = mode.rule.kind
    schedule = ",".join(str(count) for pair in mode.schedule.pairs for count in pair)
    verify = f"{rule}:{mode.rule.epsilon:g}" if rule == "typical" else rule
    return {"schedule": schedule, "verify": verify, "confidence": mode.confidence}


class SpokenLine(NamedTuple):
    """A sentence and the voice that says it."""

    text: str
    voice: EspeakVoice

    @property
    def options(self) -> dict[str, Any]:
        """Options of a `Speaker` for this voice."""
        return {"voice": self.voice.name, "rate": self.voice.rate, "pitch": self.voice.pitch}


def unseen_lines(n: int, seed: int) -> list[SpokenLine]:
    """Return different sentences of the evaluation half of the domain, voices in turn."""
    rng, texts = np.random.default_rng([_SPEAKING, seed]), dict[str, None]()
    while len(texts) < n:
        texts[sentence(rng, "eval")] = None
    ways = [
        EspeakVoice(VOICE_NAMES[i % len(VOICE_NAMES)], SPEEDS[int(s)], PITCHES[int(p)])
        for i, (s, p) in enumerate(rng.integers(0, 3, (n, 2)))
    ]
    return [SpokenLine(text, way) for text, way in zip(texts, ways, strict=True)]


class CachedRecogniser:
    """A recogniser that transcribes equal sound once."""

    def __init__(self, recognise: Recognise) -> None:
        self.recognise, self._known = recognise, dict[str, str]()

    def __call__(self, pcm: Tensor) -> str:
        """Return the text of sound `[n]`."""
        key = hashlib.sha256(pcm.contiguous().numpy().tobytes()).hexdigest()
        if key not in self._known:
            self._known[key] = self.recognise(pcm)
        return self._known[key]


@dataclass
class SpeechTally:
    """Counts over the sentences of one mode."""

    errors: WordErrors = field(default_factory=WordErrors)
    voices: dict[str, WordErrors] = field(default_factory=lambda: defaultdict(WordErrors))
    seconds: float = 0.0
    passes: int = 0
    drafts: int = 0
    tokens: int = 0
    codes: list[Tensor | None] = field(default_factory=list)

    def add(self, line: SpokenLine, heard: str, pcm: Tensor) -> None:
        """Count a sentence."""
        found = count_errors(line.text, heard)
        self.errors += found
        self.voices[line.voice.name] += found
        self.seconds += len(pcm) / RATE

    def row(self, n: int) -> Row:
        """Return the figures of `n` sentences."""
        rate = {name: round(found.rate, 5) for name, found in sorted(self.voices.items())}
        sums = {"by_voice": rate, "sentences": n, "seconds": self.seconds}
        return {"task": "speaking", **self.errors.row(), **sums}


def speaking_rows(
    model: Any,
    lines: Sequence[SpokenLine],
    recognise: Recognise,
    modes: Sequence[str],
    progress: Tick,
) -> list[Row]:
    """Measure the word error rate of the recordings, of the codec alone, and of every mode."""
    recorded = [say(line.text, line.voice).pcm for line in lines]
    recogniser, total = CachedRecogniser(recognise), len(lines) * (len(modes) + 2)
    rows, done = list[Row](), 0
    for name in ("recordings", "codec"):
        tally = SpeechTally()
        for line, pcm in zip(lines, recorded, strict=True):
            sound = pcm if name == "recordings" else through_codec(model.codec, pcm)
            tally.add(line, recogniser(sound), sound)
            done += 1
            progress(name, done, total)
        rows.append({"mode": name, "verify": None, **tally.row(len(lines))})
    first: SpeechTally | None = None
    for name in modes:
        tally = SpeechTally()
        for line in lines:
            _speak(model, line, name, tally, recogniser)
            done += 1
            progress(name, done, total)
        first = tally if name == "vanilla" else first
        rows.append({**_mode_row(name, tally, len(lines)), **_identical(tally, first)})
    return rows


@torch.inference_mode()
def through_codec(codec: Any, pcm: Tensor) -> Tensor:
    """Encode and decode a recording `[n]`."""
    back: Tensor = codec.decode(codec.encode(pcm[None]))[0]
    return back[: len(pcm)]


def _speak(
    model: Any, line: SpokenLine, name: str, tally: SpeechTally, recogniser: Recognise
) -> None:
    pieces: list[Sound] = list(model.speak(line.text, **MODES[name], **line.options))
    codes = [piece.codes for piece in pieces if piece.codes is not None]
    pcm = torch.cat([piece.pcm for piece in pieces])
    tally.codes.append(torch.cat(codes, 1) if codes else None)
    tally.passes += sum(piece.passes for piece in pieces)
    tally.drafts += sum(piece.drafts for piece in pieces)
    tally.tokens += sum(piece.tokens for piece in pieces)
    tally.add(line, recogniser(pcm), pcm)


def _mode_row(name: str, tally: SpeechTally, n: int) -> Row:
    counts = {"tokens": tally.tokens, "passes": tally.passes, "draft_passes": tally.drafts}
    way = {"mode": name, **way_of(name)}
    return {**way, **tally.row(n), **counts, "tokens_per_pass": tally.tokens / max(1, tally.passes)}


def _identical(tally: SpeechTally, vanilla: SpeechTally | None) -> Row:
    """Return the share of sentences whose codes equal those of one token per pass."""
    if vanilla is None:
        return {}
    same = [
        a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(tally.codes, vanilla.codes, strict=True)
    ]
    return {"identical": sum(same) / len(same)}


BATCH, TRIES = 20, 40  # questions answered together; cases examined for one question


class SpokenQuestion(NamedTuple):
    """A question about a clip, its spoken text and voice."""

    case: SuiteCase
    text: str
    voice: EspeakVoice


def unseen_questions(n: int, seed: int) -> list[SpokenQuestion]:
    """Return questions whose spoken text is in the evaluation half, in random voices."""
    rng, found = np.random.default_rng([_LISTENING, seed]), list[SpokenQuestion]()
    for examined, case in enumerate(suite_of("video").cases(seed)):
        ways = [text for text in spoken_variants(case.question) if split_of(text) == "eval"]
        if ways:
            text = ways[int(rng.integers(len(ways)))]
            found.append(SpokenQuestion(case, text, heard_voice(rng)))
        if len(found) == n or examined >= TRIES * n:
            break
    return found


def listening_rows(
    model: Any, asked: Sequence[SpokenQuestion], answer: Answer, progress: Tick
) -> list[Row]:
    """Measure right answers to typed questions, and to the same questions spoken."""
    heard, errors, exact = list[SuiteCase](), WordErrors(), 0
    for i, each in enumerate(asked):
        text = model.transcribe(say(each.text, each.voice).pcm, 16000)
        found = count_errors(each.text, text)
        errors, exact = errors + found, exact + (found.errors == 0)
        heard.append(replace(each.case, question=written(text)))
        progress("listening", i + 1, len(asked))
    typed_row = _listening_row("typed", [each.case for each in asked], answer, progress)
    spoken_row = _listening_row("spoken", heard, answer, progress)
    base = typed_row["accuracy"]
    spoken_row["relative"] = spoken_row["accuracy"] / base if base else None
    return [typed_row, spoken_row | {"wer": errors.rate, "exact": exact / max(1, len(asked))}]


def _listening_row(mode: str, cases: Sequence[SuiteCase], answer: Answer, progress: Tick) -> Row:
    marks: dict[str, list[bool]] = defaultdict(list)
    for at in range(0, len(cases), BATCH):
        part = cases[at : at + BATCH]
        for case, text in zip(part, answer(part), strict=True):
            marks[case.kind].append(text == case.answer)
        progress(f"answers, {mode}", min(at + BATCH, len(cases)), len(cases))
    right = sum(sum(each) for each in marks.values())
    accuracy = right / max(1, len(cases))
    between = interval(right, len(cases)) if cases else [0.0, 1.0]
    kinds = {kind: sum(each) / len(each) for kind, each in sorted(marks.items())}
    found = {"task": "listening", "mode": mode, "score": accuracy, "accuracy": accuracy}
    return {**found, "interval": between, "by_kind": kinds, "questions": len(cases)}


TASKS = ("speaking", "listening", "replies", "overlap")


def run_speech_eval(
    n: int = 100,
    seed: int = 0,
    model: Any = None,
    modes: Sequence[str] = (),
    tasks: Sequence[str] = TASKS,
    progress: Tick | None = None,
    recognise: Recognise | None = None,
    answer: Answer | None = None,
) -> dict[str, Any]:
    """Measure word errors of a model's speech, and right answers to spoken questions.

    `n` unseen sentences, questions about clips, and questions with content are drawn. `model` is
    None (the embedded model), its folder, or an object that speaks, listens and replies; `modes`
    are of MODES, all by default.
    `recognise` turns sound into text (pocketsphinx with the grammar of the domain), `answer`
    answers questions about clips (the embedded video model). Returns `suite`, `n`, `seed`, `model`
    and `rows`; see `speaking_rows`, `listening_rows`, `reply_rows` and `overlap_rows`.
    """
    for what, asked, known in (("mode", modes, tuple(MODES)), ("task", tasks, TASKS)):
        for name in set(asked) - set(known):
            raise MmfastError(unknown(what, name, known))
    speech, name = _load(model)
    tick = progress or quiet
    rows: list[Row] = []
    if "speaking" in tasks:
        lines = unseen_lines(n, seed)
        recognise = recognise or Recogniser().transcribe
        rows += speaking_rows(speech, lines, recognise, modes or tuple(MODES), tick)
    if "listening" in tasks:
        tick("making clips", 0, n)
        if answer is None:
            from mmfast.tiny.evaluate import Subject

            subject = Subject()
            answer = lambda cases: subject.answers(subject.inputs(cases))
        rows += listening_rows(speech, unseen_questions(n, seed), answer, tick)
    if "replies" in tasks:
        rows += reply_rows(speech, n, seed, tick)
    if "overlap" in tasks:
        rows += overlap_rows(speech, model, n, seed, tick)
    return {"suite": "speech", "n": n, "seed": seed, "model": name, "rows": rows}


def speech_eval_rows(document: dict[str, Any], environ: Row) -> list[Row]:
    """Return rows for assets/results, with the environment that repeats them."""
    shared = {key: document[key] for key in ("suite", "n", "seed", "model")}
    return [{**shared, **environ, "method": None, "knobs": {}, **row} for row in document["rows"]]


def _load(model: Any) -> tuple[Any, str]:
    if model is not None and not isinstance(model, str | Path):
        return model, str(getattr(model, "name", type(model).__name__))
    from mmfast.models.speech.embedded import load_speech

    return load_speech(model), "tiny-speech" if model is None else Path(model).name


SENTENCES, SEED = 60, 0
DECIBELS = 10 / math.log(10)


@benchmark("speech", "codec")
def codec(tick: Tick) -> list[Row]:
    """Measure recordings and their way through the embedded codec: words, quality and speed."""
    return codec_rows(load_embedded(), unseen_lines(SENTENCES, SEED), Recogniser().transcribe, tick)


def codec_rows(
    codec: Any, lines: Sequence[SpokenLine], recognise: Recognise, tick: Tick
) -> list[Row]:
    """Measure a codec at 16 kHz on sentences."""
    recorded = [say(line.text, line.voice).pcm for line in lines]
    coded, encoding, decoding = _through(codec, recorded)
    found: list[Row] = []
    for job, sounds in (("recordings", recorded), ("codec", coded)):
        errors = WordErrors()
        for i, (line, pcm) in enumerate(zip(lines, sounds, strict=True)):
            errors += count_errors(line.text, recognise(pcm))
            tick(job, i + 1, len(lines))
        found.append({"job": job, **errors.row(), "n": len(lines)})
    found[1].update(quality(recorded, coded))
    seconds = sum(len(pcm) for pcm in recorded) / RATE
    speed = {"encode_rtf": encoding / seconds, "decode_rtf": decoding / seconds, "threads": 1}
    bits = codec.frame_rate * codec.codebooks * math.log2(codec.size)
    shape = {"frame_rate": codec.frame_rate, "codebooks": codec.codebooks, "size": codec.size}
    found[1].update({**speed, **shape, "bits_per_second": round(bits)})
    shared = {"seed": SEED, "seconds": seconds, "clock": PROCESSOR_CLOCK}
    return [{**row, **shared} for row in found]


def _through(codec: Any, recorded: Sequence[Tensor]) -> tuple[list[Tensor], float, float]:
    coded, encoding, decoding = [], 0.0, 0.0
    with torch.inference_mode(), one_thread():
        codec.decode(codec.encode(recorded[0][None]))  # warm-up
        for pcm in recorded:
            codes, there = timed(partial(codec.encode, pcm[None]), time.process_time)
            sound, back = timed(partial(codec.decode, codes), time.process_time)
            coded.append(sound[0, : len(pcm)])
            encoding, decoding = encoding + there / 1e3, decoding + back / 1e3
    return coded, encoding, decoding


def quality(reference: Sequence[Tensor], coded: Sequence[Tensor]) -> Row:
    """Return medians of wide-band PESQ (ITU-T P.862.2), STOI, and log-mel distance in dB."""
    try:
        pesq: Any = importlib.import_module("pesq").pesq
        stoi: Any = importlib.import_module("pystoi").stoi
    except ImportError as error:
        raise MmfastError(
            f'{error.name} is missing; it comes with: pip install "mmfast[speech-eval]"'
        ) from None
    pairs = [(a.numpy(), b.numpy()) for a, b in zip(reference, coded, strict=True)]
    distances = [mel_distance(a, b) for a, b in zip(reference, coded, strict=True)]
    return {
        "pesq": statistics.median(float(pesq(RATE, a, b, "wb")) for a, b in pairs),
        "stoi": statistics.median(float(stoi(a, b, RATE)) for a, b in pairs),
        "mel_db": statistics.median(distances),
    }


def mel_distance(reference: Tensor, coded: Tensor) -> float:
    """Return the mean absolute difference of log-mel frames, in decibels of power."""
    frames = [log_mel(pcm, torch.float32) for pcm in (reference, coded)]
    return float((frames[0] - frames[1]).abs().mean()) * DECIBELS
