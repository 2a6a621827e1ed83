"""The judge of ears: cuts and delays that are known beforehand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmfast.bench.suites.speech.turns import HeardTurn, heard_turns, turn_figures
from mmfast.tiny.speech.turns import Pause, PlacedTurn, SpokenTurn
from mmfast.voice.ear import RATE, EarEvent, ProsodyEar


class Clockwork:
    """An ear that ends turns at given samples."""

    def __init__(self, *ends: int) -> None:
        self.ends, self.at = list(ends), 0

    def hear(self, pcm: Tensor) -> list[EarEvent]:
        self.at += len(pcm)
        found = [end for end in self.ends if end <= self.at]
        self.ends = [end for end in self.ends if end > self.at]
        return [EarEvent("stopped", end, pcm) for end in found]

    def flush(self) -> list[EarEvent]:
        return []

    def clear(self) -> None:
        pass


def placed(start: float, seconds: float, *pauses: tuple[float, float, Any]) -> PlacedTurn:
    made = tuple(Pause(round(a * RATE), round(b * RATE), kind) for a, b, kind in pauses)
    turn = SpokenTurn(np.zeros(round(seconds * RATE), np.float32), "a b", (), made)
    return PlacedTurn(round(start * RATE), turn)


def test_a_cut_is_an_end_inside_and_a_delay_counts_from_the_last_sound() -> None:
    turns = [placed(0.5, 2.0, (1.0, 1.5, "comma")), placed(5.0, 1.0), placed(9.0, 1.0)]
    pcm = torch.zeros(12 * RATE)
    right = Clockwork(*(round(s * RATE) for s in (2.7, 6.3)))
    found = heard_turns(right, pcm, turns)
    assert [turn.cut for turn in found] == [(), (), ()]
    assert [round(turn.delay, 1) for turn in found] == [0.2, 0.3, 2.0]  # the last is never found
    early = heard_turns(Clockwork(round(1.8 * RATE), round(2.7 * RATE)), pcm, turns)
    assert early[0].cut == ("comma",) and early[0].delay == pytest.approx(0.2, abs=0.04)
    inside = heard_turns(Clockwork(round(1.0 * RATE), round(5.2 * RATE)), pcm, turns)
    assert inside[0].cut == ("speech",) == inside[1].cut


def test_figures_count_turns_not_cuts() -> None:
    heard = [HeardTurn(0.2, ("word",), ()) for _ in range(9)]
    heard.append(HeardTurn(1.0, ("word", "comma"), ("word", "word", "comma")))
    row = turn_figures(heard)
    assert row["false_cuts"] == 0.1 and row["n"] == 10 and row["interval"][0] < 0.1
    assert row["delay_ms_p50"] == 200 and 200 < row["delay_ms_p95"] <= 1000
    assert row["pauses"] == {"comma": 1, "word": 10}
    assert row["turns_cut_in"] == {"comma": 1, "word": 1}


@pytest.mark.slow
def test_the_embedded_ear_is_sooner_and_cuts_less_than_silence() -> None:
    pytest.importorskip("silero_vad")
    pytest.importorskip("espeakng_loader")
    from mmfast.bench.registry import quiet
    from mmfast.bench.suites.speech.turns import ears, spoken_dialogues, turn_rows

    judged = {"silence": ears(None)["silence 700 ms"], "prosody": partial(ProsodyEar, "high")}
    rows = turn_rows(spoken_dialogues(30, 4, 7), judged, quiet)
    silence, ear = ({row["job"]: row for row in rows}[name] for name in judged)
    assert silence["false_cuts"] > 0.3 and ear["false_cuts"] < 0.5 * silence["false_cuts"]
    assert ear["delay_ms_p50"] < silence["delay_ms_p50"]
