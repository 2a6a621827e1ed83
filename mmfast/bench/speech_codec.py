"""What the embedded speech codec does to sound and to words, and how long it takes."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.speech_speaking import SpokenLine, unseen_lines
from mmfast.bench.timing import one_thread
from mmfast.bench.word_errors import Errors, Recogniser, count_errors
from mmfast.core.errors import MmfastError
from mmfast.frontends.codecs.embedded.codec import load_embedded
from mmfast.ops.audio import log_mel
from mmfast.tiny.evaluate import interval
from mmfast.tiny.speech.recordings import say

RATE, N, SEED = 16000, 60, 0
DECIBELS = 10 / math.log(10)
Hear = Callable[[Tensor], str]


def rows(progress: Tick) -> list[Row]:
    """The recordings themselves, and what the codec makes of them."""
    return measure(load_embedded(), unseen_lines(N, SEED), Recogniser().transcribe, progress)


def measure(codec: Any, lines: Sequence[SpokenLine], hear: Hear, progress: Tick) -> list[Row]:
    """The same for another codec at 16 kHz, sentences and recogniser."""
    recorded = [say(line.text, line.voice).pcm for line in lines]
    coded, encoding, decoding = _through(codec, recorded)
    found: list[Row] = []
    for job, sounds in (("recordings", recorded), ("codec", coded)):
        errors = Errors()
        for i, (line, pcm) in enumerate(zip(lines, sounds, strict=True)):
            errors += count_errors(line.text, hear(pcm))
            progress(job, i + 1, len(lines))
        same = (errors.rate, interval(min(errors.errors, errors.words), errors.words))
        row: Row = {"job": job, "score": same[0], "wer": same[0], "interval": same[1]}
        found.append({**row, "errors": errors.errors, "words": errors.words, "n": len(lines)})
    found[1].update(quality(recorded, coded))
    seconds = sum(len(pcm) for pcm in recorded) / RATE
    speed = {"encode_rtf": encoding / seconds, "decode_rtf": decoding / seconds, "threads": 1}
    bits = codec.frame_rate * codec.codebooks * math.log2(codec.size)
    shape = {"frame_rate": codec.frame_rate, "codebooks": codec.codebooks, "size": codec.size}
    found[1].update({**speed, **shape, "bits_per_second": round(bits)})
    shared = {"seed": SEED, "seconds": seconds, "clock": "processor time of the process"}
    return [{**row, **shared} for row in found]


def _through(codec: Any, recorded: Sequence[Tensor]) -> tuple[list[Tensor], float, float]:
    """Sound there and back, and processor seconds of both ways."""
    coded, encoding, decoding = [], 0.0, 0.0
    with torch.inference_mode(), one_thread():
        codec.decode(codec.encode(recorded[0][None]))  # once before the clock starts
        for pcm in recorded:
            start = time.process_time()
            codes = codec.encode(pcm[None])
            between = time.process_time()
            sound = codec.decode(codes)[0, : len(pcm)]
            decoding += time.process_time() - between
            encoding += between - start
            coded.append(sound)
    return coded, encoding, decoding


def quality(reference: Sequence[Tensor], coded: Sequence[Tensor]) -> Row:
    """Medians of wide-band PESQ (ITU-T P.862.2), STOI, and the distance of log-mel frames in dB.

    Args:
        reference: Sounds `[n]` at 16 kHz.
        coded: The same, of the same lengths.

    Raises:
        MmfastError: `pesq` or `pystoi` is missing.
    """
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
    """Mean absolute difference of log-mel frames, in decibels of power."""
    frames = [log_mel(pcm, torch.float32) for pcm in (reference, coded)]
    return float((frames[0] - frames[1]).abs().mean()) * DECIBELS
