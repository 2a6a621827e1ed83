"""The grid of the leaderboard: methods, suites, budgets and seeds, and the cells they make."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmfast.core.errors import MmfastError, unknown
from mmfast.core.registry import Method, methods
from mmfast.core.source import code_of, digest
from mmfast.tiny.names import SUITES, check_suite

STOCK, BASELINE = "all tokens", "downsample"  # what every method is compared with
ANSWERS, SPEED = "answers", "speed"
PROTOCOL = 1  # part of every key: cells of another protocol are measured again
GRIDS: dict[str, dict[str, Any]] = {
    "reduced": {"budgets": (0.25, 0.1), "n": 40, "kinds": ("reducer",), "speed": ("video",)},
    "full": {
        "budgets": (0.5, 0.25, 0.1, 0.05),
        "n": 200,
        "kinds": ("reducer", "cache"),
        "speed": SUITES,
    },
}
SEEDS = (1000, 1001, 1002)


@dataclass(frozen=True)
class Entrant:
    """A method that takes part, or the stock model without one."""

    name: str  # as in the registry; of a KV policy `cache/name`
    method: Method | None = None  # None is the stock model

    def way(self, budget: float, seed: int) -> tuple[str | None, str | None]:
        """Specs `(reduce, cache)` at a budget; a method that draws takes the seed of its cell."""
        if self.method is None:
            return None, None
        drawn = f"?seed={seed}" if "seed" in self.method.knobs else ""
        spec = f"{self.method.name}:{budget}{drawn}"
        return (None, spec) if self.method.kind == "cache" else (spec, None)


@dataclass(frozen=True)
class BoardCell:
    """One measurement: answers to the questions of a seed, or times to the first token."""

    job: str  # `answers` or `speed`
    suite: str
    entrant: Entrant
    budget: float  # share of the visual tokens that is kept
    seed: int
    n: int  # questions; of a speed cell, rounds

    @property
    def way(self) -> tuple[str | None, str | None]:
        """Specs `(reduce, cache)`."""
        return self.entrant.way(self.budget, self.seed)

    @property
    def label(self) -> str:
        """Name for a progress bar."""
        share = "" if self.entrant.method is None else f" {100 * self.budget:g} %"
        return f"{self.suite} {self.entrant.name}{share} {self.job}"

    @property
    def key(self) -> str:
        """Digest of all that the result depends on."""
        from mmfast.tiny.suites import suite_of  # imports torch

        model = checkpoint(suite_of(self.suite).model)
        entrant, code = self.entrant.name, code_of(self.entrant.method)
        known = [PROTOCOL, self.job, self.suite, model, entrant, code]
        text = json.dumps([*known, *self.way, self.seed, self.n])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class BoardGrid:
    """All cells of a run."""

    entrants: tuple[Entrant, ...]  # without the stock model
    suites: tuple[str, ...]
    budgets: tuple[float, ...]
    seeds: tuple[int, ...]
    n: int  # questions of a seed
    speed: tuple[str, ...] = ()  # suites on which times are measured
    rounds: int = 3  # of a speed cell

    def groups(self) -> Iterator[tuple[BoardCell, ...]]:
        """Yield cells that share their questions; a seed is complete before the next begins.

        The stock model and downsampling come first: every other cell is read beside theirs.
        """
        for seed in self.seeds:
            for suite in self.suites:
                yield tuple(
                    BoardCell(ANSWERS, suite, entrant, budget, seed, self.n)
                    for entrant, budget in self._ways()
                )
            if seed == self.seeds[0]:
                for suite in self.speed:
                    yield tuple(
                        BoardCell(SPEED, suite, entrant, budget, seed, self.rounds)
                        for entrant, budget in self._ways()
                        if entrant.method is not None
                    )

    def _ways(self) -> Iterator[tuple[Entrant, float]]:
        yield Entrant(STOCK), 1.0
        for entrant in sorted(self.entrants, key=lambda each: each.name != BASELINE):
            for budget in self.budgets:
                yield entrant, budget

    @property
    def cells(self) -> tuple[BoardCell, ...]:
        """All cells in the order in which they are measured."""
        return tuple(cell for group in self.groups() for cell in group)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON document."""
        names = [entrant.name for entrant in self.entrants]
        shown = {"methods": names, "suites": [*self.suites], "budgets": [*self.budgets]}
        return {**shown, "seeds": [*self.seeds], "n": self.n, "speed": [*self.speed]}


def make_grid(
    grid: str = "reduced",
    names: Sequence[str] = (),
    suites: Sequence[str] = (),
    budgets: Sequence[str] = (),
    seeds: Sequence[str] = (),
    n: int | None = None,
    speed: bool = True,
) -> BoardGrid:
    """Return a grid by name with the parts that are given in place of its own.

    `names` are methods of the registry, those of other packages included; `cache/NAME` is a KV
    policy. Downsampling always takes part. MmfastError names a wrong value and the choices.
    """
    if grid not in GRIDS:
        raise MmfastError(unknown("--grid", grid, GRIDS))
    usual, asked = GRIDS[grid], n if n is not None else GRIDS[grid]["n"]
    if asked < 1:
        raise MmfastError(f"--n {asked} asks nothing; give at least 1")
    for suite in suites:
        check_suite(suite)
    found = tuple(dict.fromkeys(suites)) or SUITES
    timed = tuple(suite for suite in found if suites or suite in usual["speed"])
    shares, drawn = _budgets(budgets) or usual["budgets"], _seeds(seeds) or SEEDS
    entrants = _entrants(names, usual["kinds"])  # imports torch: behind all that may be wrong
    return BoardGrid(entrants, found, shares, drawn, asked, timed if speed else ())


def known_entrants(kinds: Sequence[str] = ("reducer", "cache")) -> dict[str, Entrant]:
    """Return by name all methods that keep a share of the tokens of the embedded models."""
    found = {}
    for kind in kinds:
        for method in methods(kind):
            name = method.name if kind == "reducer" else f"cache/{method.name}"
            if _keeps_a_share(method):
                found[name] = Entrant(name, method)
    return found


def _keeps_a_share(method: Method) -> bool:
    """Dropping at `pixel` needs a tower that packs patches, which the embedded models lack."""
    if method.kind == "cache":
        return method.role in ("position", "score")
    return method.sites[0] != "pixel" or method.resizes


def _entrants(names: Sequence[str], kinds: Sequence[str]) -> tuple[Entrant, ...]:
    known = known_entrants()
    for name in names:
        if name not in known:
            raise MmfastError(unknown("method", name, known))
    found = known_entrants(kinds) if not names else {name: known[name] for name in names}
    return tuple({BASELINE: known[BASELINE], **found}.values())


def _budgets(texts: Sequence[str]) -> tuple[float, ...]:
    found = []
    for text in texts:
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0.0 < share < 1.0:
            raise MmfastError(f"--budgets {text!r} is no share between 0 and 1; write 0.25,0.1")
        found.append(share)
    return tuple(sorted(dict.fromkeys(found), reverse=True))


def _seeds(texts: Sequence[str]) -> tuple[int, ...]:
    for text in texts:
        if not text.isdecimal():
            raise MmfastError(f"--seeds {text!r} is no whole number; write 1000,1001,1002")
    return tuple(dict.fromkeys(map(int, texts)))


@cache
def checkpoint(model: str) -> str:
    """Digest of the weights and the configuration of an embedded model."""
    from mmfast.models.loading import embedded_path  # imports torch

    folder = embedded_path(model)
    return digest(tuple(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])))
