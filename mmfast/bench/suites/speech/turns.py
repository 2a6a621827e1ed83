"""Ears judged on generated dialogues: turns that they cut inside, and the delay of their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import quantiles
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.models.speech.turn_end import Overheard
from mmfast.tiny.evaluate import interval
from mmfast.tiny.speech.turns import PlacedTurn, heard_before, spoken_turns, stream
from mmfast.voice.ear import RATE, Ear, ProsodyEar, SemanticEar, VoiceEar, overhear

DIALOGUES, TURNS, SEED = 60, 5, 0
GAP = 2.5  # seconds between two turns, in which a reply would sound
BLOCK = 512  # samples that an ear gets at once
Spoken = tuple[Tensor, list[PlacedTurn]]
Make = Callable[..., Ear]  # takes `activity`


def spoken_dialogues(count: int, turns: int, seed: int) -> list[Spoken]:
    """Streams of so many unseen turns each, of voices that no ear was trained on."""
    said = list(spoken_turns(count * turns, "eval", seed))
    rng = np.random.default_rng([seed, 97])
    return [stream(said[at : at + turns], rng, GAP) for at in range(0, len(said), turns)]


class HeardTurn(NamedTuple):
    """A turn as it was heard: seconds of its end's delay, kinds of pauses, those it was cut in.

    `cut` also counts ends within speech, as the kind "speech".
    """

    delay: float
    pauses: tuple[str, ...]
    cut: tuple[str, ...]


def heard_turns(ear: Ear, pcm: Tensor, placed: Sequence[PlacedTurn]) -> list[HeardTurn]:
    """Let an ear hear a stream; an end that it never finds comes when the next turn begins."""
    ends, at = list[int](), 0
    for block in pcm.split(BLOCK):
        at += len(block)
        ends += [at for event in ear.hear(block) if event.kind == "stopped"]
    found, behind = list[HeardTurn](), [turn.start for turn in placed[1:]]
    for turn, until in zip(placed, [*behind, len(pcm)], strict=True):
        early = [end for end in ends if turn.start <= end < turn.stop]
        late = next((end for end in ends if turn.stop <= end < until), until)
        kinds = tuple(pause.kind for pause in turn.turn.pauses)
        cut = tuple(_place(turn, end) for end in early)
        found.append(HeardTurn((late - turn.stop) / RATE, kinds, cut))
    return found


def _place(turn: PlacedTurn, end: int) -> str:
    for pause in turn.turn.pauses:
        if pause.start <= end - turn.start <= pause.stop + 0.1 * RATE:
            return pause.kind
    return "speech"


def ears(hears: Callable[[Tensor], Overheard] | None) -> dict[str, Make]:
    """Return the ears to judge; those of words where somebody writes speech down."""
    found: dict[str, Make] = {
        f"silence {ms} ms": partial(VoiceEar, silence_duration_ms=ms) for ms in (200, 500, 700)
    }
    if hears is not None:
        found["semantic"] = partial(SemanticEar, "auto", hears)
    found["prosody"] = partial(ProsodyEar, "auto")
    if hears is not None:
        found["prosody and words"] = partial(ProsodyEar, "auto", hears)
    return found


def turn_rows(spoken: Sequence[Spoken], makers: Mapping[str, Make], tick: Tick) -> list[Row]:
    """Judge ears on the same streams; all get the same probabilities of speech."""
    heard: dict[str, list[HeardTurn]] = {name: [] for name in makers}
    for number, (pcm, placed) in enumerate(spoken):
        tick("dialogues", number, len(spoken))
        activity = heard_before(pcm)
        for name, make in makers.items():
            heard[name] += heard_turns(make(activity=activity), pcm, placed)
    return [{"job": name, **turn_figures(turns)} for name, turns in heard.items()]


def turn_figures(turns: Sequence[HeardTurn]) -> Row:
    """Return the share of turns cut inside, and quantiles of the delay of all ends."""
    cuts = sum(bool(turn.cut) for turn in turns)
    pauses = Counter(kind for turn in turns for kind in turn.pauses)
    cut = Counter(kind for turn in turns for kind in set(turn.cut))
    delays = quantiles([1e3 * turn.delay for turn in turns], n=20, method="inclusive")
    return {
        "score": cuts / len(turns),
        "false_cuts": cuts / len(turns),
        "interval": interval(cuts, len(turns)),
        "delay_ms_p50": round(delays[9], 1),
        "delay_ms_p95": round(delays[18], 1),
        "pauses": dict(sorted(pauses.items())),
        "turns_cut_in": dict(sorted(cut.items())),
        "n": len(turns),
    }


@benchmark("speech", "turns")
def turns(tick: Tick) -> list[Row]:
    """Measure false cuts and the delay of ends for silence, words, prosody, and both."""
    from mmfast.models.speech.embedded import load_speech

    hears = partial(overhear, load_speech())
    rows = turn_rows(spoken_dialogues(DIALOGUES, TURNS, SEED), ears(hears), tick)
    shared: dict[str, Any] = {"seed": SEED, "device": "cpu"}
    return [{**row, **shared} for row in rows]
