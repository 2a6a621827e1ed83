"""The one-token scaling law: its fit to rows of `python -m mmfast.bench.suites.law`, and tables.

The law of arXiv 2411.03312 says that the share of wrong answers of a decoder with N weights that
reads V visual tokens is A / N^alpha / V^beta + D. Where a prompt has Q tokens of text, its FLOPs
grow with N (Q + V); under fixed FLOPs the law is then least at V = Q beta / (alpha - beta) if alpha
is greater than beta, so at the fewest tokens where the text costs nothing, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mmfast.bench.report.table import Cell, ReportTable, Rows, at, pivot, score, stamp
from mmfast.bench.results import Row
from mmfast.core.errors import MmfastError

SUITE = "scaling-law"
PAPER = {"alpha": 0.077, "beta": 0.015}
DRAWS = 200  # of the bootstrap
UNIT = 1e6  # N is counted in millions
BUDGETS = [round(5 * 2 ** (step / 2)) for step in range(17)]  # million FLOPs of a prefill
SPARE = 2  # times what the largest decoder costs at the fewest tokens; above, no size can use it
LOW, HIGH, STEPS = -1.0, 3.0, 17  # exponents that are searched, and points of a side of the grid
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ScalingLaw:
    """Share of wrong answers by the weights of a decoder and the visual tokens of a prompt."""

    scale: float
    alpha: float
    beta: float
    floor: float

    def __call__(self, weights: Floats, visual: Floats) -> Floats:
        """Wrong share at `weights` and `visual` of one shape."""
        return self.scale * (weights / UNIT) ** -self.alpha * visual**-self.beta + self.floor

    def best(self, text: float) -> float:
        """Visual tokens with the fewest errors at fixed FLOPs beside so many tokens of text."""
        gap = self.alpha - self.beta
        return max(1.0, text * self.beta / gap) if gap > 0 else math.inf


def fit(weights: Sequence[float], visual: Sequence[float], wrong: Sequence[float]) -> ScalingLaw:
    """Least squares: a grid of both exponents that closes in; scale and floor are none below 0."""
    if len({*weights}) < 2 or len({*visual}) < 2 or len(wrong) < 5:
        raise MmfastError(
            f"the law has four numbers, and {len(wrong)} cells of {len({*weights})} sizes and "
            f"{len({*visual})} token counts cannot tell them; measure at least 5, of 2 and 2"
        )
    x, v, y = (np.asarray(each, dtype=float) for each in (weights, visual, wrong))
    logs = np.log(x / UNIT), np.log(v)
    middle, half = np.full(2, (LOW + HIGH) / 2), (HIGH - LOW) / 2
    law, least = ScalingLaw(0.0, 0.0, 0.0, 0.0), math.inf
    while half > 1e-4:
        sides = [np.linspace(-half, half, STEPS) + each for each in middle]
        alphas, betas = (each.ravel() for each in np.meshgrid(*sides, indexing="ij"))
        powers = np.exp(-alphas[:, None] * logs[0] - betas[:, None] * logs[1])  # [g, n]
        scale, floor = _line(powers, y)
        loss = ((scale[:, None] * powers + floor[:, None] - y) ** 2).sum(-1)
        place = int(loss.argmin())
        if loss[place] < least:
            least = float(loss[place])
            numbers = scale[place], alphas[place], betas[place], floor[place]
            law = ScalingLaw(*map(float, numbers))
        middle, half = np.array([law.alpha, law.beta]), half / 2
    return law


def _line(powers: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Best scale and floor of every row of `powers` `[g, n]`, neither below 0."""
    mean, gap = powers.mean(-1), powers - powers.mean(-1, keepdims=True)
    spread = np.maximum((gap**2).sum(-1), 1e-300)
    scale = gap @ y / spread
    floor = y.mean() - scale * mean
    through = powers @ y / (powers**2).sum(-1)  # where the floor would be below 0
    scale, floor = np.where(floor < 0, through, scale), np.maximum(floor, 0.0)
    return np.where(scale < 0, 0.0, scale), np.where(scale < 0, y.mean(), floor)


@dataclass(frozen=True)
class FittedLaw:
    """The law of some rows, the root mean square of what it misses, and laws of other draws."""

    law: ScalingLaw
    missed: float
    draws: tuple[ScalingLaw, ...]

    def interval(self, name: str) -> list[float]:
        """Bounds of 95 % of the draws of a number of the law."""
        return _middle([getattr(each, name) for each in self.draws])


def _middle(values: Sequence[float]) -> list[float]:
    """Bounds of 95 % of values, some of which may be infinite."""
    return [float(bound) for bound in np.quantile(values, (0.025, 0.975), method="nearest")]


def fitted(rows: Rows, draws: int = DRAWS) -> FittedLaw:
    """Fit the law to rows, and to draws of the bootstrap: other clips, other residuals.

    The clips of a draw are the same for all cells, as they were asked about the same. Residuals
    hold what the law misses, and what another order of training would have changed.
    """
    if not rows:
        raise MmfastError("no rows of the law; measure some: python -m mmfast.bench.suites.law")
    return _fitted(
        tuple(
            (row["parameters"], row["visual"], tuple(row["right"]), tuple(row["asked"]))
            for row in rows
        ),
        draws,
    )


_Cell = tuple[int, int, tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=4)
def _fitted(cells: tuple[_Cell, ...], draws: int) -> FittedLaw:
    weights, visual, right, asked = zip(*cells, strict=True)
    if len({*map(len, right)}) > 1:
        raise MmfastError("rows of the law differ in their held-out clips; fit those of one --held")
    marks, counts = np.array(right, dtype=float), np.array(asked, dtype=float)
    wrong = 1 - marks.sum(-1) / counts.sum(-1)
    law = fit(weights, visual, wrong.tolist())
    expected = law(np.array(weights, dtype=float), np.array(visual, dtype=float))
    rest = wrong - expected
    wide = (rest - rest.mean()) * math.sqrt(len(rest) / max(1, len(rest) - 4))
    rng, found = np.random.default_rng(0), list[ScalingLaw]()
    for _ in range(draws):
        clips = rng.integers(marks.shape[1], size=marks.shape[1])
        other = 1 - marks[:, clips].sum(-1) / counts[:, clips].sum(-1)
        drawn = expected + (other - wrong) + rng.choice(wide, len(wide))
        found.append(fit(weights, visual, np.clip(drawn, 0.0, 1.0).tolist()))
    return FittedLaw(law, float(np.sqrt((rest**2).mean())), tuple(found))


def curves(rows: Rows) -> tuple[dict[str, list[tuple[float, ...]]], dict[str, Points]]:
    """By size of the decoder: (FLOPs, wrong, its bounds) where text is cached, and the law."""
    measured: dict[str, list[tuple[float, ...]]] = {}
    told: dict[str, Points] = {}
    mine = sorted(_latest(rows), key=lambda row: (row["parameters"], row["visual"]))
    for row in mine:
        low, high = row["interval"]
        point = (row["flops"]["0"], 1 - row["score"], 1 - high, 1 - low)
        measured.setdefault(_size(row), []).append(point)
    law = _law(_learned(mine))
    for row in mine if law else ():
        assert law is not None
        wrong = law.law(np.array(float(row["parameters"])), np.array(float(row["visual"])))
        told.setdefault(_size(row), []).append((row["flops"]["0"], float(wrong)))
    return measured, told


Points = list[tuple[float, float]]


def _latest(rows: Rows) -> list[Row]:
    return list({(row["size"], row["tokens"], row["seed"]): row for row in rows}.values())


def _learned(rows: Rows) -> list[Row]:
    """Rows without those of the smallest decoder, which may have learned next to nothing."""
    smallest = min((row["parameters"] for row in rows), default=0)
    return [row for row in rows if row["parameters"] > smallest]


def _law(rows: Rows) -> FittedLaw | None:
    """The law of rows, None where there are too few of them yet."""
    try:
        return fitted(rows)
    except MmfastError:
        return None


def _size(row: Row) -> str:
    seed = f", seed {row['seed']}" if row["seed"] else ""
    return f"{row['parameters'] / UNIT:.2f} million ({row['size']}){seed}"


def _wrong(row: Row) -> str:
    low, high = row["interval"]
    return score({"score": 1 - row["score"], "interval": [1 - high, 1 - low]})


def _columns(rows: Rows) -> dict[str, Cell]:
    counts = sorted({row["tokens"] for row in rows})
    return {"weights of the decoder": "{name}"} | {f"{n} a frame": at(n, _wrong) for n in counts}


def _below(rows: Rows) -> str:
    row = rows[-1]
    return (
        f"Wrong answers in per cent, in brackets the 95 % interval. {row['n']:,} questions about "
        f"{row['held']} unseen clips; {row['steps']} steps of {row['batch']} clips with "
        f"{row['questions']} questions each, of {row['clips'] - row['held']:,}; {stamp(*rows)}."
    )


def _exponents(rows: Rows) -> list[Row]:
    mine = _latest(rows)
    parts = {"all sizes": mine, "without the smallest": _learned(mine)}
    laws = {name: (len(part), _law(part)) for name, part in parts.items()}
    lines = [_line_of(f"{name}, {n} cells", law) for name, (n, law) in laws.items() if law]
    paper = ScalingLaw(1.0, **PAPER, floor=0.0)
    theirs = {"name": "the paper, 0.5 to 7 billion weights", **PAPER}
    theirs |= {f"best{text}": _many(paper.best(text)) for text in (16, 128)}
    return [*lines, theirs] if lines else []


def _line_of(name: str, found: FittedLaw) -> Row:
    law, draws = found.law, found.draws

    def told(name: str) -> str:
        low, high = found.interval(name)
        return f"{getattr(law, name):.3f} ({low:.3f} to {high:.3f})"

    def best(text: int) -> str:
        low, high = _middle([each.best(text) for each in draws])
        return f"{_many(law.best(text))} ({_many(low)} to {_many(high)})"

    sure = sum(each.alpha > each.beta for each in draws) / len(draws)
    line = {"name": name, **{name: told(name) for name in ("alpha", "beta", "floor")}}
    line |= {"missed": f"{100 * found.missed:.1f}", "sure": f"{100 * sure:.0f} %"}
    return line | {f"best{text}": best(text) for text in (16, 128)}


def _many(tokens: float) -> str:
    return "all" if math.isinf(tokens) else f"{tokens:.0f}"


def _budgets(rows: Rows) -> list[Row]:
    """For each number of text tokens and each budget the best cell of every token count in it."""
    mine, lines = _latest(rows), list[Row]()
    for text in mine[0]["flops"] if mine else ():
        last: dict[int, Row] = {}
        large = min(mine, key=lambda row: (-row["parameters"], row["tokens"]))
        for budget in (each for each in BUDGETS if each * 1e6 <= SPARE * large["flops"][text]):
            within = [row for row in mine if row["flops"][text] <= budget * 1e6]
            best: dict[int, Row] = {}
            for row in sorted(within, key=lambda row: float(row["score"])):
                best[row["tokens"]] = row
            if len(best) < 2 or best == last:  # nothing to choose, or nothing that is new
                continue
            last = best
            top = max(float(row["score"]) for row in best.values())
            shown = {
                count: {**row, "mark": "**" if row["score"] == top else ""}
                for count, row in best.items()
            }
            lines.append({"text": text, "budget": budget, "at": shown})
    return lines


def _within(rows: Rows) -> dict[str, Cell]:
    def cell(row: Row) -> str:
        return f"{row['mark']}{100 - 100 * row['score']:.1f}{row['mark']} `{row['size']}`"

    counts = sorted({row["tokens"] for row in rows})
    head: dict[str, Cell] = {"text tokens": "{text}", "million FLOPs": "{budget:,}"}
    return head | {f"{n} a frame": lambda line, n=n: _at(line, n, cell) for n in counts}


def _at(line: Row, count: int, cell: Callable[[Row], str]) -> str:
    return cell(line["at"][count]) if count in line["at"] else "none fits"


TABLES: dict[str, tuple[ReportTable, ...]] = {
    "scaling_law": (
        ReportTable(
            SUITE,
            _columns,
            keys=("size", "tokens", "seed"),
            lines=lambda rows: pivot(
                sorted(rows, key=lambda row: int(row["parameters"])), _size, lambda r: r["tokens"]
            ),
            after=_below,
        ),
        ReportTable(
            SUITE,
            "law of: {name} | alpha: {alpha} | beta: {beta} | D: {floor} | misses, points (root "
            "mean square): {missed} | draws with alpha > beta: {sure} | best V at 16 tokens "
            "of text: {best16} | at 128: {best128}",
            lines=_exponents,
        ),
        ReportTable(
            SUITE,
            _within,
            lines=_budgets,
            after=lambda rows: (
                "Wrong answers in per cent of the best decoder within the FLOPs of a prefill; text "
                "0: its keys and values are cached. Bold: the best of a line. Left out are budgets "
                "that change nothing, and those that only more tokens can spend: above "
                f"{SPARE} times what the largest decoder costs at the fewest tokens."
            ),
        ),
    ),
}
