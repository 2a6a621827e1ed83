"""What end-to-end speed should reach on real shapes, beside the rows that say what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmfast.bench.named_tables import markdown
from mmfast.bench.results import Row, share
from mmfast.bench.sections import NOT_MEASURED, label

_SMALL, _BIG = "llava-onevision-0.5b", "llava-onevision-7b"
BEFORE = ("uniform", "evs", "divprune", "holitom")  # reduce before the language model


@dataclass(frozen=True)
class Goal:
    """One line of the table of goals.

    Attributes:
        what: For people.
        bound: What is asked for, for people.
        fits: Whether a row of suite `bench` says something about it.
        value: What it says.
        met: Whether a value is good enough.
        told: A value as text.
    """

    what: str
    bound: str
    fits: Callable[[Row], bool]
    value: Callable[[Row], float | None]
    met: Callable[[float], bool]
    told: Callable[[float], str]


def _gain(preset: str, device: str, stage: str, kept: float, least: float) -> Goal:
    name = {"llm": "prefill", "ttft": "tower and prefill"}[stage]

    def fits(row: Row) -> bool:
        return (
            (row["preset"], row["device"], row["stage"]) == (preset, device, stage)
            and label(row["reduce"]) in BEFORE
            and share(row["reduce"], row["kept"], row["tokens"]) == kept
        )

    what = f"{preset}, {device.upper()}, {name}, {100 * kept:.0f} % kept before the language model"
    return Goal(what, f"{least}x", fits, lambda r: r["speedup"], lambda v: v >= least, _times)


def _in_tower(preset: str, least: float) -> Goal:
    def fits(row: Row) -> bool:
        return (
            (row["preset"], row["device"], row["stage"]) == (preset, "cuda", "ttft")
            and "@vit" in (row["reduce"] or "")
            and str(row["reduce"]).endswith(":0.1")
        )

    what = f"{preset}, CUDA, tower and prefill, merged in the tower too, 10 % kept"
    return Goal(what, f"{least}x", fits, lambda r: r["speedup"], lambda v: v >= least, _times)


def _oracle(names: tuple[str, ...], least: float) -> Goal:
    def fits(row: Row) -> bool:
        found = (row["preset"], row["device"], row["stage"]) == (_BIG, "cuda", "ttft")
        return found and label(row["reduce"]) in names

    what = f"{_BIG}, CUDA, first token with fixed indices / with {' or '.join(names)}"
    return Goal(
        what, f"{least}", fits, lambda r: r["of_oracle"], lambda v: v >= least, lambda v: f"{v:.2f}"
    )


def _at_most(what: str, stage: str, key: str, most: float) -> Goal:
    def fits(row: Row) -> bool:
        return (row["preset"], row["device"], row["stage"]) == (_BIG, "cuda", stage)

    return Goal(
        f"{_BIG}, CUDA, {what}",
        f"at most {100 * most:.0f} %",
        fits,
        lambda r: r.get(key),
        lambda v: v <= most,
        lambda v: f"{100 * v:.1f} %",
    )


def _times(value: float) -> str:
    return f"{value:.2f}x"


GOALS = (
    _gain(_SMALL, "cpu", "llm", 0.25, 3.4),
    _gain(_SMALL, "cpu", "llm", 0.1, 7.0),
    _gain(_BIG, "cuda", "llm", 0.25, 3.7),
    _gain(_BIG, "cuda", "llm", 0.1, 7.5),
    _gain(_BIG, "cuda", "ttft", 0.25, 2.1),
    _gain(_BIG, "cuda", "ttft", 0.1, 2.6),
    _in_tower(_BIG, 3.2),
    _at_most("choosing and compacting, of the time to first token", "selection", "share", 0.03),
    _oracle(("evs", "fastv"), 0.97),
    _oracle(("divprune", "holitom"), 0.93),
    _at_most(
        "peak memory of layers whose attention is read, over SDPA", "ttft", "scoring_over", 0.02
    ),
)


def goals(rows: Sequence[Row]) -> list[str]:
    """Every goal with the least and the best of the latest rows that speak about it."""
    latest = list({_key(row): row for row in rows}.values())
    lines = [(goal.what, goal.bound, *_found(goal, latest)) for goal in GOALS]
    return markdown(("what", "at least", "measured", "met"), lines)


def _key(row: Row) -> tuple[object, ...]:
    keys = ("preset", "processor", "dtype", "threads", "frames", "stage", "reduce")
    return tuple(row[key] for key in keys)


def _found(goal: Goal, rows: Sequence[Row]) -> tuple[str, str]:
    """What was measured and whether all of it is good enough."""
    values = [(v, row) for row in rows if goal.fits(row) and (v := goal.value(row)) is not None]
    if not values:
        return NOT_MEASURED, ""
    low, high = (pick(values, key=lambda pair: pair[0]) for pick in (min, max))
    told = [f"{goal.told(v)} (`{row['reduce']}`)" for v, row in (low, high)]
    return " to ".join(dict.fromkeys(told)), "yes" if all(goal.met(v) for v, _ in values) else "no"
