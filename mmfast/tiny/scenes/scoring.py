"""Scores of answers about the larger world: facts, overlap of boxes, yes and no as in POPE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from mmfast.tiny.scenes.outside import REFUSAL
from mmfast.tiny.video.scene import COLOURS, SHAPES

_NAME = f"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_NUMBER = re.compile(r"number (\d+) (?:appears at second (\d+)|is shown)")
OVERLAP, FOUND = 0.5, 0.9  # from where on a box or a description counts as right


def facts_of(text: str) -> set[tuple[str, ...]]:
    """Single facts that a description states, in any order of its sentences but that of things."""
    text = " ".join(text.lower().split())
    found = set[tuple[str, ...]]()
    found |= {("count", many) for many in re.findall(r"(one|no|\d) objects?", text)}
    found |= {("background", kind) for kind in re.findall(r"on an? (\w+) background", text)}
    names = []
    for sentence in text.split("."):
        match = re.search(_NAME, sentence)
        if match is None:
            continue
        name = match[0]
        names.append(name)
        found.add(("there", name))
        rest = sentence[match.end() :]
        details = (r"moves (\w+)", r"(from the start|appears at second \d)",
                   r"(until the end|leaves at second \d)", r"is in the (\w+(?: \w+)?)")  # fmt: skip
        found |= {(name, told) for detail in details for told in re.findall(detail, rest)}
    found |= {("order", one, two) for one, two in pairwise(names)}
    for number, second in _NUMBER.findall(text):
        found |= {("number", number), ("number from", second)} - {("number from", "")}
    return found | ({("number", "none")} if "no number" in text else set())


def facts_found(answer: str, text: str) -> float:
    """Share of the facts of the right description that a text states, less what it makes up.

    An invented fact costs as much as a missing one: the F1 score of both sets.
    """
    wanted, told = facts_of(answer), facts_of(text)
    return 2 * len(wanted & told) / (len(wanted) + len(told))


def made_up(answer: str, text: str) -> float:
    """Share of the facts a text states that the right description does not."""
    told = facts_of(text)
    return len(told - facts_of(answer)) / max(len(told), 1)


def parse_box(text: str) -> tuple[int, ...] | None:
    """The four edges of a box, None where the text is not one."""
    match = re.fullmatch(r"\D*(\d+)\D+(\d+)\D+(\d+)\D+(\d+)\D*", text)
    return None if match is None else tuple(map(int, match.groups()))


def overlap(answer: str, text: str) -> float:
    """Intersection over union of two boxes, cells of the grid counted whole."""
    one, two = parse_box(answer), parse_box(text)
    if one is None or two is None:
        return 0.0
    across, down = (max(0, min(one[i + 2], two[i + 2]) - max(one[i], two[i]) + 1) for i in (0, 1))
    areas = [max(0, b[2] - b[0] + 1) * max(0, b[3] - b[1] + 1) for b in (one, two)]
    return across * down / (sum(areas) - across * down)


def same(answer: str, text: str) -> bool:
    """Return whether a short answer is right, capitals aside."""
    return answer.strip().lower() == text.strip().lower()


def refused(text: str) -> bool:
    """Return whether a text is the answer to what lies outside the world."""
    return same(REFUSAL, text)


def score(kind: str, answer: str, text: str) -> float:
    """Score of an answer in 0 to 1: overlap, share of facts, or right and wrong."""
    if kind == "where":
        return overlap(answer, text)
    return facts_found(answer, text) if kind == "describe" else float(same(answer, text))


def is_right(kind: str, value: float) -> bool:
    """Return whether an answer of such a score counts as right."""
    return value >= {"where": OVERLAP, "describe": FOUND}.get(kind, 1.0)


def calibration(marks: Sequence[tuple[float, bool]]) -> float:
    """Expected calibration error of (confidence, right) over tenths (Guo et al. 2017)."""
    bins = [list[tuple[float, bool]]() for _ in range(10)]
    for sure, right in marks:
        bins[min(int(sure * 10), 9)].append((sure, right))
    gaps = [abs(sum(sure - right for sure, right in part)) for part in bins]
    return sum(gaps) / max(len(marks), 1)


def pope(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Accuracy, precision, recall, F1 and share of "yes" of (right answer, answer) pairs."""
    known = [(answer == "yes", text.strip().lower()) for answer, text in pairs]
    hits = sum(true and text == "yes" for true, text in known)
    said, there = sum(text == "yes" for _, text in known), sum(true for true, _ in known)
    right = hits + sum(not true and text == "no" for true, text in known)
    precision, recall = hits / max(said, 1), hits / max(there, 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-9)
    many = max(len(known), 1)
    return {"accuracy": right / many, "precision": precision, "recall": recall, "f1": f1,
            "yes": said / many}  # fmt: skip
