"""The one-token scaling law: exponents that were planted are found, and tables tell the best."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mmfast.bench.report import charts, scaling
from mmfast.bench.report.docs import write_table
from mmfast.bench.report.scaling import ScalingLaw, fit, fitted
from mmfast.core.errors import MmfastError

SIZES = {"64x2": 90_624, "96x3": 305_568, "160x4": 1_128_960, "192x5": 2_032_320}
GRID = [(n, 8.0 * k) for n in SIZES.values() for k in (1, 4, 9, 36)]
PLANTED = [
    (0.4, 0.077, 0.015, 0.05),  # the exponents of the paper
    (0.5, 0.3, 0.1, 0.1),
    (0.3, 0.2, -0.1, 0.0),  # more tokens do harm
    (1.0, 0.1, 0.6, 0.2),  # tokens matter more than weights
]


def _value(law: tuple[float, float, float, float], n: float, v: float) -> float:
    a, alpha, beta, d = law
    return float(a / (n / 1e6) ** alpha / v**beta + d)


def _rows(law: tuple[float, float, float, float], clips: int = 200) -> list[dict[str, Any]]:
    """Rows of a grid whose clips are answered by chance as the law says, eight questions each."""
    rng, rows = np.random.default_rng(1), []
    for size, n in SIZES.items():
        for tokens in (1, 4, 9, 36):
            right = rng.binomial(8, 1 - _value(law, n, 8 * tokens), clips).tolist()
            score = sum(right) / (8 * clips)
            flops = {str(text): 2 * n * (text + 8 * tokens) for text in (0, 16, 128)}
            rows.append(
                {"size": size, "parameters": n, "tokens": tokens, "visual": 8 * tokens, "seed": 0}
                | {"right": right, "asked": [8] * clips, "score": score, "flops": flops}
                | {"interval": [score - 0.02, score + 0.02], "n": 8 * clips, "held": clips}
                | {"steps": 9, "batch": 2, "questions": 3, "clips": 2 * clips}
                | {"date": "2026-01-01", "commit": "abc"}
            )
    return rows


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_exponents_are_found(planted: tuple[float, float, float, float]) -> None:
    wrong = [_value(planted, n, v) for n, v in GRID]
    law = fit(*zip(*GRID, strict=True), wrong)
    found = (law.scale, law.alpha, law.beta, law.floor)
    assert found == pytest.approx(planted, abs=2e-3)
    assert law(*np.array(GRID).T) == pytest.approx(wrong, abs=1e-4)


def test_intervals_hold_the_planted_exponents_and_narrow_with_more_clips() -> None:
    planted = (0.5, 0.25, 0.08, 0.0)
    few, many = (fitted(_rows(planted, clips), draws=24) for clips in (40, 640))
    for name, value in (("alpha", 0.25), ("beta", 0.08)):
        low, high = many.interval(name)
        assert low - 0.02 <= value <= high + 0.02
        assert high - low < 0.7 * (few.interval(name)[1] - few.interval(name)[0])
    assert 0 < many.missed < few.missed < 0.1
    assert many == fitted(_rows(planted, 640), draws=24)  # drawn alike every time


def test_clips_that_differ_widen_the_intervals() -> None:
    rows = _rows((0.5, 0.25, 0.08, 0.0))
    wide = dict[bool, float]()
    for together in (False, True):
        for row in rows:  # as many right answers, on few clips or on all of them
            total, n = sum(row["right"]), len(row["right"])
            share, more = divmod(total, n)
            row["right"] = [share + 1] * more + [share] * (n - more)
            if together:
                whole = total // 8
                row["right"] = [8] * whole + [total % 8] + [0] * (n - whole - 1)
        low, high = fitted(rows, draws=24).interval("beta")
        wide[together] = high - low
    assert wide[True] > 1.5 * wide[False] > 0


def test_the_best_number_of_tokens_is_the_least_error_at_fixed_work() -> None:
    law = ScalingLaw(0.5, 0.3, 0.1, 0.1)
    counts = np.arange(1, 400.0)
    for text in (10, 64):
        errors = law(1e9 / (text + counts), counts)
        assert law.best(text) == pytest.approx(counts[errors.argmin()], abs=1)
    assert law.best(0) == 1  # cached text: one token and the largest decoder
    assert ScalingLaw(0.5, 0.1, 0.3, 0.1).best(0) == math.inf  # tokens matter more
    assert ScalingLaw(0.5, 0.077, 0.015, 0.0).best(50) == pytest.approx(12.1, abs=0.1)


def test_tables_tell_the_best_cell_within_a_budget() -> None:
    rows = _rows((0.5, 0.3, 0.05, 0.0))
    lines = write_table("scaling_law", rows)
    assert lines[0] == "| weights of the decoder | 1 a frame | 4 a frame | 9 a frame | 36 a frame |"
    first = 100 - 100 * rows[0]["score"]
    assert lines[2].startswith(f"| 0.09 million (64x2) | {first:.1f} (")
    by = {(row["size"], row["tokens"]): 100 - 100 * row["score"] for row in rows}
    # 20 MFLOP without text: 2 N V lets 160x4 read 8 tokens, 96x3 read 32 and 64x2 read 72.
    line = next(line for line in lines if line.startswith("| 0 | 20 |"))
    cells = [f"**{by['160x4', 1]:.1f}** `160x4`", f"{by['96x3', 4]:.1f} `96x3`"]
    assert line == "| 0 | 20 | " + " | ".join(
        [*cells, f"{by['64x2', 9]:.1f} `64x2`", "none fits |"]
    )
    # The largest decoder costs 32.5 MFLOP at 8 tokens: what is beyond 65 is not compared.
    assert not any(line.startswith("| 0 | 80 |") for line in lines)
    assert any(line.startswith("| 128 | 640 |") for line in lines)
    assert any("| 0.077 | 0.015 |" in line for line in lines)


def test_a_chart_has_every_cell_and_the_law() -> None:
    rows = _rows((0.5, 0.3, 0.05, 0.0))
    measured, told = scaling.curves(rows)
    assert {name: len(points) for name, points in measured.items()} == dict.fromkeys(told, 4)
    assert measured["0.09 million (64x2)"][0][:2] == (2 * 90_624 * 8, 1 - rows[0]["score"])
    text = charts.scaling_svg(measured, told)
    assert "2.03 million (192x5)" in text and text == charts.scaling_svg(*scaling.curves(rows))
    assert charts.scaling_svg({}, {}) == ""


def test_too_few_cells_are_told_in_one_line() -> None:
    rows = _rows((0.5, 0.3, 0.05, 0.0))[:4]  # one size
    with pytest.raises(MmfastError, match=r"4 cells of 1 sizes and 4 token counts .* at least 5"):
        fitted(rows)
    assert not any("the paper" in line for line in write_table("scaling_law", rows))
    mixed = [*_rows((0.5, 0.3, 0.05, 0.0)), {**rows[0], "right": [1], "asked": [2]}]
    with pytest.raises(MmfastError, match="differ in their held-out clips; fit those of one"):
        fitted(mixed)
