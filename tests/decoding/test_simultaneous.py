"""Policies of simultaneous translation against plain definitions, and sentences that grow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfast.core.errors import SpecError
from mmfast.decoding.simultaneous import Hypothesis, average_lagging, write_policy
from mmfast.voice.interpreter import SentenceWriter

WORDS = st.lists(st.sampled_from("abc"), max_size=6)


@given(WORDS, st.lists(WORDS, min_size=1, max_size=5), st.integers(2, 4))
def test_agreement_is_the_common_prefix_of_the_newest(
    written: list[str], ends: list[list[str]], times: int
) -> None:
    found = [[*written, *end] for end in ends]
    same = [*takewhile(lambda column: len(set(column)) == 1, zip(*found[-times:], strict=False))]
    expected = len(same) - len(written) if len(found) >= times else 0
    chances = [1.0] * len(ends[-1])
    assert write_policy(f"agreement:{times}").count(found, chances, 9, len(written)) == expected


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_wait_is_k_words_late(read: int, k: int, written: int, left: int) -> None:
    words = ["w"] * (written + left)
    count = write_policy(f"wait:{k}").count([words], [1.0] * left, read, written)
    allowed = {n for n in range(left + 1) if n == 0 or written + n <= read - k + 1}
    assert count == max(allowed)


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0, 1))
def test_confidence_stops_at_the_first_doubt(chances: list[float], least: float) -> None:
    policy = write_policy(f"confidence:{least!r}")
    count = policy.count([["w"] * len(chances)], chances, 5, 0)
    assert all(chance >= least for chance in chances[:count])
    assert count == len(chances) or chances[count] < least


def test_greedy_writes_all_and_offline_nothing() -> None:
    assert write_policy("greedy").count([["a", "b", "c"]], [0.1, 0.1], 1, 1) == 2
    assert write_policy("offline").count([["a", "b", "c"]], [1.0, 1.0], 1, 1) == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("wait", "wait:3"), ("agreement", "agreement:2"), ("confidence", "confidence:0.99"),
    ],
)  # fmt: skip
def test_usual_numbers(spec: str, words: str) -> None:
    assert write_policy(spec).name == words
    assert write_policy(write_policy(spec)).name == words


@pytest.mark.parametrize(
    "spec",
    ["", "waits:3", "wait:0", "wait:1.5", "wait:x", "wait:-2", "wait:", "agreement:1",
     "confidence:1.1", "confidence:nan", "greedy:1", "offline:"],
)  # fmt: skip
def test_other_policies_are_refused_in_one_line(spec: str) -> None:
    with pytest.raises(SpecError) as caught:
        write_policy(spec)
    assert spec in str(caught.value) and "\n" not in str(caught.value)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 12))
def test_average_lagging_by_its_definition(steps: list[int], length: int) -> None:
    """g(t) is the source read for word t; tau is the first word with all of it (equation 8)."""
    g = sorted(min(step, length) for step in steps)
    tau = next((t for t, read in enumerate(g, 1) if read == length), len(g))
    ratio = len(g) / length
    expected = sum(g[t - 1] - (t - 1) / ratio for t in range(1, tau + 1)) / tau
    assert average_lagging(g, length) == pytest.approx(expected)


def test_lagging_of_waiting_is_k() -> None:
    """As many words in both: wait-k lags k words, and an offline translation all of them."""
    for k in (1, 3, 7):
        delays = [min(k + t, 20) for t in range(20)]
        assert average_lagging(delays, 20) == pytest.approx(k)
    assert average_lagging([20] * 20, 20) == 20
    assert average_lagging([], 20) == 0


class WaveringTranslator:
    """Makes a new sentence for each source, but for what was written; tokens are its words."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def hypothesis(self, source: str, written: Sequence[int] = ()) -> Hypothesis:
        self.asked.append((source, tuple(written)))
        ids = [int(i) for i in self.rng.integers(2, size=int(self.rng.integers(5)))]
        chances = tuple(float(c) for c in self.rng.random(len(ids)))
        return Hypothesis(tuple(f"w{i}" for i in ids), chances, tuple((i,) for i in ids))

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


@pytest.mark.parametrize("policy", ["greedy", "offline", "wait:2", "agreement:2", "confidence:0.4"])
def test_what_is_written_stays(policy: str) -> None:
    for seed in range(20):
        translator = WaveringTranslator(seed)
        writer = SentenceWriter(translator, write_policy(policy))  # type: ignore[arg-type]
        text, count = "", 0
        source = [f"s{n}" for n in range(8)]
        for read in range(1, 9):
            more, words = writer.read(source[:read])
            assert len(more.split()) == words
            text, count = text + more, count + words
            assert len(text.split()) == count
        more, words = writer.read(source, over=True)
        told = [list(written) for _, written in translator.asked]
        for earlier, later in pairwise(told):
            assert later[: len(earlier)] == earlier  # each was asked to go on behind the last
        assert [f"w{i}" for i in told[-1]] == text.split()
        assert len((text + more).split()) == count + words
        assert (policy != "offline") or not count


def test_nothing_heard_asks_nobody() -> None:
    translator = WaveringTranslator(0)
    writer = SentenceWriter(translator, write_policy("greedy"))  # type: ignore[arg-type]
    assert writer.read([]) == ("", 0) == writer.read([], over=True)
    assert not translator.asked and not writer.calls
