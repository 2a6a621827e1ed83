"""Policies of simultaneous translation: which words of a hypothesis are written before the end.

A hypothesis is what an offline model makes of the source read so far, behind what was written. What
has been written stays. The rules are wait-k (Ma et al. 2019, 1810.08398), local agreement (Liu et
al. 2020) and those of Dugan et al. 2023 (2306.01201): greedy, offline, confidence and consensus,
which is agreement over several hypotheses. A model that reads and writes in one sequence decides by
itself (Fu et al. 2025, 2504.09570); its policy is the latency that it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mmfast.core.errors import SpecError, unknown


@dataclass(frozen=True)
class Hypothesis:
    """Words that a model would write next, if the source ended here.

    Attributes:
        words: The words, without those written before.
        chances: Least probability of a token, for each word.
        ids: Tokens of each word.
        stays: Chance that each word stays when more of the source comes; () where nothing tells.
    """

    words: tuple[str, ...]
    chances: tuple[float, ...]
    ids: tuple[tuple[int, ...], ...]
    stays: tuple[float, ...] = ()


# (words of the newest hypotheses, which all begin with those written, oldest first; chances of the
# words behind those written; source words read; words written) -> words to write now
Rule = Callable[[Sequence[Sequence[str]], Sequence[float], int, int], int]


@dataclass(frozen=True)
class WritePolicy:
    """A rule by its name, such as "agreement:2".

    Attributes:
        name: As `write_policy` takes it.
        rule: How many words to write.
        past: How many hypotheses it compares.
        late: Words that a model which decides by itself reads beyond those needed; else None.
        joint: Whether such a model writes the transcript, too.
        learned: Whether the chances that it is given are those that words stay.
    """

    name: str
    rule: Rule
    past: int = 1
    late: int | None = None
    joint: bool = False
    learned: bool = False

    def count(
        self, found: Sequence[Sequence[str]], chances: Sequence[float], read: int, written: int
    ) -> int:
        """Return how many words to write now.

        Args:
            found: Words of the translation by the newest hypotheses, oldest first, from the first
                word of the sentence on.
            chances: Least probability of each word of the newest, behind those written.
            read: Words of the source.
            written: Words written before.
        """
        return self.rule(found, chances, read, written)


def _offline(_: Sequence[Sequence[str]], __: Sequence[float], ___: int, ____: int) -> int:
    return 0


def _greedy(_: Sequence[Sequence[str]], chances: Sequence[float], __: int, ___: int) -> int:
    return len(chances)


def _late(k: int, _: Any, chances: Sequence[float], read: int, written: int) -> int:
    return min(len(chances), max(0, read - k + 1 - written))


def _wait(k: float) -> WritePolicy:
    return WritePolicy(f"wait:{k:g}", partial(_late, int(k)))


def _sure(least: float, _: Any, chances: Sequence[float], __: int, ___: int) -> int:
    return next((i for i, chance in enumerate(chances) if chance < least), len(chances))


def _confidence(least: float) -> WritePolicy:
    return WritePolicy(f"confidence:{least:g}", partial(_sure, least))


def _learned(least: float) -> WritePolicy:
    return replace(_confidence(least), name=f"learned:{least:g}", learned=True)


def _agreed(most: int, found: Sequence[Sequence[str]], _: Any, __: int, written: int) -> int:
    if len(found) < most:
        return 0
    columns = enumerate(zip(*(words[written:] for words in found[-most:]), strict=False))
    shortest = min(len(words) - written for words in found[-most:])
    return next((i for i, words in columns if len(set(words)) > 1), max(0, shortest))


def _agreement(times: float) -> WritePolicy:
    return WritePolicy(f"agreement:{times:g}", partial(_agreed, int(times)), int(times))


def _interleaved(late: float) -> WritePolicy:
    return WritePolicy(f"interleaved:{late:g}", _offline, late=int(late))


def _joint(late: float) -> WritePolicy:
    return WritePolicy(f"joint:{late:g}", _offline, late=int(late), joint=True)


# By name: the numbers allowed from, to, whether whole, and the usual one.
NUMBERED: dict[str, tuple[Callable[[float], WritePolicy], float, float, bool, float]] = {
    "wait": (_wait, 1, 1000, True, 3),
    "confidence": (_confidence, 0, 1, False, 0.99),
    "agreement": (_agreement, 2, 1000, True, 2),
    "learned": (_learned, 0, 1, False, 0.9),
    "interleaved": (_interleaved, 0, 1000, True, 1),
    "joint": (_joint, 0, 1000, True, 1),
}
PLAIN = {"greedy": _greedy, "offline": _offline}


def write_policy(spec: str | WritePolicy) -> WritePolicy:
    """Return the policy of a spec.

    Args:
        spec: "wait:K" writes a word for every word read, K words late; "agreement:N" what the last
            N hypotheses agree on (consensus); "confidence:P" while tokens have a probability of P;
            "learned:P" while words stay with a chance of P, as a head on the decoder learned;
            "greedy" all at once; "offline" nothing before the end; "interleaved:N" what a model
            that reads and writes in one sequence decides, N words late, "joint:N" with its
            transcript. Without a number: 3, 2, 0.99, 0.9, 1, 1.

    Raises:
        SpecError: An unknown name, or a number that it does not have.
    """
    if isinstance(spec, WritePolicy):
        return spec
    name, colon, number = str(spec).partition(":")
    if name in PLAIN and not colon:
        return WritePolicy(name, PLAIN[name])
    if name not in NUMBERED:
        raise SpecError(unknown("policy", str(spec), [*PLAIN, *(f"{n}:N" for n in NUMBERED)]))
    make, least, most, whole, usual = NUMBERED[name]
    try:
        value = float(number) if colon else usual
    except ValueError:
        value = float("nan")
    if not least <= value <= most or (whole and value != int(value)):
        kind = "a whole number" if whole else "a number"
        raise SpecError(f"policy={spec!r}: give {kind} from {least:g} to {most:g} after {name}:")
    return make(value)


def average_lagging(delays: Sequence[float], source: float) -> float:
    """Return by how much a translation is behind an ideal one (Ma et al. 2019, equation 8).

    Args:
        delays: How much of the source was read when each word was written, in words or seconds.
        source: All of the source, in the same unit.

    Returns:
        The mean over the words up to the first that was written at the end of the source; 0
        without words. An offline translation has the whole `source`.
    """
    pace, total = source / max(1, len(delays)), 0.0
    for place, delay in enumerate(delays):
        total += delay - place * pace
        if delay >= source:
            return total / (place + 1)
    return total / max(1, len(delays))
