"""Whatever times a source gives, those that come out rise, and every frame is accounted for."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.frontends.live.source import SteadyTimes, at_rate, fit, natural_key, steady

DOT = np.zeros((2, 2, 3), np.uint8)
TIMES = st.lists(
    st.one_of(
        st.none(),
        st.floats(-1e12, 1e12),
        st.floats(0, 3),
        st.integers(0, 40).map(lambda n: n / 10),
        st.sampled_from([float("nan"), float("inf"), 0.0, -0.0, 1e10, -1e9]),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(TIMES)
def test_times_rise_and_nothing_is_lost_from_the_count(times: list[float | None]) -> None:
    events: Counter[str] = Counter()
    items = [(DOT, 0.0), *((DOT, time) for time in times)]
    broken = 0
    out = []
    try:
        for _, at in steady(items, lambda raw: raw, "x", events, 24.0):
            out.append(at)
    except ValueError as error:
        assert "30 broken frames in a row" in str(error)
        broken = 1
    assert all(a < b for a, b in pairwise(out))
    lost = events["repeated"] + events["late"] + events["broken"]
    assert broken or len(out) + lost == len(items)


@settings(max_examples=100)
@given(st.lists(st.floats(0.001, 2), max_size=40))
def test_rising_times_are_left_alone(gaps: list[float]) -> None:
    times = np.cumsum([5.0, *gaps]).tolist()
    line = SteadyTimes("x", events := Counter(), 24.0)
    assert [line.place(time) for time in times] == times and not events


@settings(max_examples=100)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 100))
def test_sampling_takes_no_more_than_the_rate_and_misses_nothing(rate: int, fps: int, n: int):
    pairs = [(DOT, i / rate) for i in range(n)]
    got = [time for _, time in at_rate(pairs, float(fps))]
    assert got[0] == 0 and len(got) <= (n - 1) / rate * fps + 1 + 1e-6
    if fps >= rate:
        assert len(got) == n
    # For every instant passed, the first frame at or behind it was taken.
    for k in range(int((n - 1) / rate * fps + 1e-6) + 1):
        assert next(t for _, t in pairs if t >= k / fps - 1e-6 / fps) in got


@pytest.mark.parametrize("size", [(10, 10), (10, 40), (40, 10), (1, 1), (200, 3)])
def test_a_picture_is_fitted_without_changing_its_shape(size: tuple[int, int]) -> None:
    width, height = size
    frame = np.full((height, width, 3), 255, np.uint8)
    out = fit(frame, 40, 20)
    assert out.shape == (20, 40, 3)
    rows, columns = np.flatnonzero(out.any((1, 2))), np.flatnonzero(out.any((0, 2)))
    inner = (len(columns), len(rows))
    share = min(40 / width, 20 / height)
    assert inner == (max(1, round(width * share)), max(1, round(height * share)))
    assert abs((columns[0] + columns[-1]) / 2 - 19.5) <= 1 and abs(rows.mean() - 9.5) <= 1


def test_names_sort_as_people_count() -> None:
    names = ["a1.png", "a02.png", "a2.png", "a10.png", "B1.png", "10.png", "9.png", "٣.png"]
    assert sorted(names, key=natural_key)[:2] == ["9.png", "10.png"]
    rest = [n for n in sorted(names, key=natural_key) if n[0] == "a"]
    assert rest == ["a1.png", "a2.png", "a02.png", "a10.png"]
