"""The clips, the picture and the page that come with mmfast, and what can be asked of them."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

CLIPS = Path(str(files("mmfast.assets").joinpath("clips")))
RESULTS = Path(str(files("mmfast.assets").joinpath("results")))
OWN, START = "my own file", "red-circle.mp4"
REAL = "llava-onevision-0.5b"  # the shape of a model of real size that was measured
_FIRST = {
    "red-circle.mp4": "Which way does the red circle move?",
    "fast-and-slow.mp4": "Which moves faster, the red circle or the white square?",
    "latecomer.mp4": "Which appears first, the purple cross or the yellow square?",
    "four-shapes.mp4": "How many objects are there?",
    "number.mp4": "What number is on the screen?",
    "behind-a-bar.mp4": "Where is the yellow triangle at the start?",
    "picture.jpg": "What colour is the square?",
    "receipt.jpg": "What is the weight of the nuts?",
}
PAGES = {"receipt.jpg": "tiny-document"}  # examples that an embedded model of their own reads


def measured_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file; only a new line ends one, whatever stands in its strings."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@cache
def listing() -> dict[str, dict[str, str]]:
    """Questions and their right answers, by file."""
    rows = json.loads((CLIPS / "clips.json").read_text(encoding="utf-8"))
    found = {name: {q["question"]: q["answer"] for q in asked} for name, asked in rows.items()}
    found["picture.jpg"] = {
        "What colour is the square?": "red",
        "How many objects are there?": "3",
        "What number is on the screen?": "88",
        "Where is the red square?": "bottom left",
    }
    found["receipt.jpg"] = {
        "What is the weight of the nuts?": "47",
        "Which item has the stock 28?": "grapes",
        "What is the title?": "receipt",
        "How many rows are there?": "5",
        "What comes after call?": "lend",
    }
    return found


def names(pages: bool = True) -> list[tuple[str, str]]:
    """Label and file of every example; `pages` counts those with print in."""
    there = [n for n in _FIRST if (CLIPS / n).is_file() and (pages or n not in PAGES)]
    return [(name.rsplit(".", 1)[0].replace("-", " "), name) for name in there]


def reader(media: Any) -> str | None:
    """The embedded model that reads an example, given by its path, where the default does not."""
    ours = isinstance(media, str) and Path(media).parent == CLIPS
    return PAGES.get(Path(media).name) if ours else None


def questions(name: str, most: int = 6) -> list[str]:
    """A few questions about an example, of different kinds, the one to begin with first."""
    asked = list(listing().get(name, {}))
    first = [_FIRST[name]] if name in _FIRST else []
    kinds: dict[str, str] = {}
    for question in asked:
        kinds.setdefault(" ".join(question.split()[:2]), question)
    return list(dict.fromkeys([*first, *kinds.values()]))[:most]


def right_answer(name: str, question: str) -> str | None:
    return listing().get(name, {}).get(question.strip())


@cache
def _measured() -> tuple[dict[str, Any], ...]:
    """Rows of the speed of `REAL`, each with the time of a further token, `decode_ms`."""
    rows = [row for row in measured_rows(RESULTS / "bench-cpu.jsonl") if row.get("preset") == REAL]
    after = {row["reduce"]: row["median_ms"] for row in rows if row["stage"] == "decode"}
    return tuple(
        {**row, "decode_ms": after[row["reduce"]], "share": row["kept"] / row["tokens"],
         "equal": abs(row["speedup"] - 1) <= row["noise"]}
        for row in rows if row["stage"] == "llm"
    )  # fmt: skip


def real_rows(share: float) -> list[dict[str, Any]]:
    """With all tokens, then by method at the measured share that is nearest to `share`."""
    whole = _measured()[0]
    rows = [row for row in _measured() if row["kept"] < row["tokens"]]
    shares = sorted({float(row["reduce"].partition(":")[2]) for row in rows})
    near = min(shares, key=lambda each: abs(math.log(each / share)))
    named = [row for row in rows if float(row["reduce"].partition(":")[2]) == near]
    return [{**whole, "share": near}, *named]
