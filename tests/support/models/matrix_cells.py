"""The method x family matrix: its cells, and the reasons why some of them are empty."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_models import ALL_FAMILIES, Tiny, facts, tiny

import mmfast
from mmfast.core.registry import Method

RESULTS = Path(__file__).resolve().parents[3] / "assets" / "results" / "matrix.jsonl"
SHARE = 0.5

# What an error says, and the footnote of the README that it becomes.
REASONS = {
    "has no blocks of attention": "the tower is convolutional and has no attention to read",
    "as in VGGT, which": "acts where all frames attend to each other, as in VGGT",
    "which pads images of different sizes": "no merging inside a tower that pads its images",
    "takes tiles of fixed size": "the tower takes tiles of fixed size, not fewer patches",
    "is not possible in": "its pictures all have one size and number of tokens",
    "puts tokens back into full attention": "revived tokens would be missing from other layers",
    "among the layers that add DeepStack": "revived tokens would miss DeepStack planes: name K",
    "compares the attention of two layers": "fewer than two layers of attention in front: name K",
    "needs full attention and a feed-forward": "layers with a window or a state keep all",
}


# Not an error: a prompt may hold pictures too.
SOUND = "sounds do not pass the vision tower"


class Cell(NamedTuple):
    """One method at one of its sites, on one kind of media of one family."""

    method: str
    site: str
    family: str
    kind: str

    @property
    def id(self) -> str:
        return "-".join(self)


def cells() -> Iterator[Cell]:
    """All of them, family by family, so that few models are alive at a time."""
    for family in ALL_FAMILIES:
        for kind in facts(family).kinds:
            for method in mmfast.methods("reducer"):
                for site in method.sites:
                    yield Cell(method.name, site, family, kind)


def spec_of(method: Method, site: str) -> str:
    """Half of the tokens; the default site goes without saying."""
    where = "" if site == method.sites[0] else "@llm2" if site == "llm" else f"@{site}"
    return f"{method.name}{where}:{SHARE}"


@functools.lru_cache(maxsize=8)
def prompt(family: str, kind: str, count: int) -> tuple[Tiny, dict[str, Any], torch.Tensor]:
    """A model, a prompt of `count` items for it, and its stock logits."""
    this = tiny(family)
    text = "on" + f" {{{kind}}}" * count + " what?"
    inputs = this.inputs([text], **this.media(kind, count))
    with torch.no_grad():
        return this, inputs, this.model(**inputs).logits


@functools.cache
def recorded() -> dict[Cell, str]:
    """What the checked-in results say: the reason of an empty cell, "" where it ran."""
    if not RESULTS.is_file():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {Cell(r["method"], r["site"], r["family"], r["kind"]): r["reason"] for r in rows}
