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
from mmfast.voice.interpreter import InterleavedWriter, SentenceWriter, place_of

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
        ("learned", "learned:0.9"), ("interleaved", "interleaved:1"), ("joint:3", "joint:3"),
    ],
)  # fmt: skip
def test_usual_numbers(spec: str, words: str) -> None:
    assert write_policy(spec).name == words
    assert write_policy(write_policy(spec)).name == words


@pytest.mark.parametrize(
    "spec",
    ["", "waits:3", "wait:0", "wait:1.5", "wait:x", "wait:-2", "wait:", "agreement:1",
     "confidence:1.1", "confidence:nan", "greedy:1", "offline:", "learned:2", "interleaved:-1",
     "interleaved:0.5", "joint:x"],
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


POLICIES = ["greedy", "offline", "wait:2", "agreement:2", "confidence:0.4", "learned:0.4"]


class WaveringTranslator:
    """Makes a new sentence for each source, but for what was written; tokens are its words."""

    head = model = object()

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def hypothesis(self, source: str, written: Sequence[int] = ()) -> Hypothesis:
        self.asked.append((source, tuple(written)))
        ids = [int(i) for i in self.rng.integers(2, size=int(self.rng.integers(5)))]
        chances = tuple(float(c) for c in self.rng.random(len(ids)))
        words, stays = tuple(f"w{i}" for i in ids), tuple(1 - chance for chance in chances)
        return Hypothesis(words, chances, tuple((i,) for i in ids), stays)

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


@pytest.mark.parametrize("policy", POLICIES)
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


def test_learned_words_are_those_that_stay() -> None:
    """The rule is that of confidence, over what the head tells and not over the chances."""
    found: dict[str, list[int]] = {}
    for policy in ("confidence:0.6", "learned:0.6"):
        translator = WaveringTranslator(5)
        found[policy] = []
        for _ in range(40):
            writer = SentenceWriter(translator, write_policy(policy))  # type: ignore[arg-type]
            _, words = writer.read(["a"])
            found[policy].append(words)
    again, wanted = WaveringTranslator(5), []
    for _ in range(40):
        chances = again.hypothesis("a").chances
        wanted.append(next((i for i, c in enumerate(chances) if 1 - c < 0.6), len(chances)))
    assert found["learned:0.6"] == wanted != found["confidence:0.6"]


WORDS = st.lists(st.sampled_from("abc"), max_size=6)


@given(WORDS, WORDS)
def test_the_place_of_what_was_read_by_trying_all(read: list[str], words: list[str]) -> None:
    def edits(one: Sequence[str], other: Sequence[str]) -> int:
        if not one or not other:
            return len(one) + len(other)
        least = edits(one[1:], other[1:]) + (one[0] != other[0])
        return min(least, 1 + edits(one[1:], other), 1 + edits(one, other[1:]))

    costs = [edits(read, words[:place]) for place in range(len(words) + 1)]
    found = place_of(read, words)
    assert costs[found] == min(costs)
    assert all(
        abs(found - len(read)) <= abs(place - len(read))
        for place, cost in enumerate(costs)
        if cost == min(costs)
    )


class Parrot:
    """A sequence that writes each word it reads, in capitals."""

    passes = 0

    def open(self, late: int, joint: bool) -> Parrot:
        return self

    def read(self, words: Sequence[str]) -> list[str]:
        return [word.upper() for word in words]

    def finish(self) -> list[str]:
        return ["END"]

    def text(self, ids: Sequence[str]) -> str:
        return " ".join(ids)


def test_what_is_heard_must_be_heard_twice() -> None:
    writer = InterleavedWriter(Parrot(), write_policy("interleaved:1"), settle=True)  # type: ignore[arg-type]
    assert writer.read(["the", "bread"]) == ("", 0)
    assert writer.read(["the", "red", "circle"]) == ("THE", 1)
    assert writer.read(["the", "red", "circle"]) == (" RED CIRCLE", 2)
    assert writer.read(["the", "rat", "circle", "is"]) == ("", 0)  # what is read stays
    assert writer.read(["a", "the", "red", "circle", "is", "big"], over=True) == (" IS BIG END", 3)
    silent = InterleavedWriter(Parrot(), write_policy("interleaved"))  # type: ignore[arg-type]
    assert silent.read([], over=True) == ("", 0)
