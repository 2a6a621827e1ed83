"""Charts of the README and of `mmfast eval --report`, by matplotlib: equal rows, equal bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mmfast.bench.report.accuracy import ALL, Points, label
from mmfast.bench.results import Row, share

TICKS = (0.05, 0.1, 0.25, 0.5, 1.0)
PRESET, DEVICE, STAGE = "llava-onevision-0.5b", "cpu", "llm"
_STYLE: Any = {
    "svg.hashsalt": "mmfast",
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
}


def accuracy_svg(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw a line of (kept share, accuracy) a method, "all tokens" dashed; "" without points."""
    lines = {name: list(pts) for name, pts in series.items() if name != ALL and pts}
    if not lines:
        return ""
    level = dict(series.get(ALL, [])).get(1.0)
    dashed = [] if level is None else [(TICKS[0], level), (1.0, level)]
    return _draw("right answers", lines, (ALL, dashed), "{:.0%}")


def speeds(rows: Sequence[Row]) -> tuple[Points, list[tuple[float, float]]]:
    """Latest (kept share, speed-up) by method of the 0.5B prefill on a CPU, and the ideal."""
    mine = [r for r in rows if (r["preset"], r["device"], r["stage"]) == (PRESET, DEVICE, STAGE)]
    mine = [row for row in mine if row["frames"] == mine[-1]["frames"]]
    found: dict[str, dict[float, float]] = {}
    ideal = {1.0: 1.0}
    for row in mine:
        kept = share(row["reduce"], row["kept"], row["tokens"])
        if kept is None or not row["reduce"]:
            continue
        found.setdefault(label(row["reduce"]), {1.0: 1.0})[kept] = row["speedup"]
        ideal[kept] = max(row["ideal"], ideal.get(kept, 0.0))
    return {name: sorted(points.items()) for name, points in found.items()}, sorted(ideal.items())


def speed_svg(
    series: Mapping[str, Sequence[tuple[float, float]]], ideal: Sequence[tuple[float, float]]
) -> str:
    """Draw (kept share, speed-up) by method, and the ideal by FLOPs dashed; "" without points."""
    return _draw("speed-up", series, ("ideal by FLOPs", ideal), "{:g}x") if series else ""


def _draw(
    what: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    level: tuple[str, Sequence[tuple[float, float]]],
    form: str,
) -> str:
    def paint(axes: Any) -> None:
        if level[1]:
            axes.plot(*zip(*level[1], strict=True), color="black", linestyle="--", label=level[0])
        for index, (name, pts) in enumerate(series.items()):
            line = "-" if index < 10 else ":"
            axes.plot(*zip(*pts, strict=True), line, marker="o", markersize=4, label=name)
        axes.set_xscale("log")
        axes.set_xticks(TICKS, [f"{tick:.0%}" for tick in TICKS])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: form.format(value))

    return _svg(4.2, paint, "visual tokens kept", what)


def trade_svg(points: Sequence[tuple[str, float, float, Sequence[float]]], across: str) -> str:
    """Draw a point for each (name, place on the axis `across`, accuracy, its interval)."""

    def paint(axes: Any) -> None:
        for name, x, y, (low, high) in points:
            bars = [[max(0.0, y - low)], [max(0.0, high - y)]]  # a bound may round beyond y
            axes.errorbar(x, y, bars, fmt="o", capsize=3, label=name)

    return _svg(3.6, paint, across, "accuracy")


def delays(rows: Sequence[Row]) -> Points:
    """Latest (average lagging as a share of the source, right words) by kind of policy."""
    mine = [r for r in rows if r.get("bench") == "translation" and r["source"] == "text, words"]
    found: dict[str, list[tuple[float, float]]] = {}
    for row in {row["policy"]: row for row in mine}.values():
        kind = row["policy"].partition(":")[0]
        found.setdefault(kind, []).append((row["lag_share"], row["score"]))
    return {kind: sorted(points) for kind, points in found.items()}


def delay_svg(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw a line of (delay, right words) a kind of policy; "" without points."""
    if not series:
        return ""

    def paint(axes: Any) -> None:
        for name, pts in series.items():
            axes.plot(*zip(*pts, strict=True), marker="o", markersize=4, label=name)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return _svg(4.2, paint, "average lagging, of the source", "right words")


def scaling_svg(
    measured: Mapping[str, Sequence[Sequence[float]]],
    told: Mapping[str, Sequence[tuple[float, float]]],
) -> str:
    """Draw (FLOPs, wrong, its bounds) by size of a decoder, the law dashed; "" without points."""
    if not measured:
        return ""

    def paint(axes: Any) -> None:
        for index, (name, points) in enumerate(measured.items()):
            x, y, low, high = (np.array(each) for each in zip(*points, strict=True))
            style = {"color": f"C{index}", "label": name}
            axes.errorbar(x, y, [y - low, high - y], fmt="o", capsize=3, markersize=4, **style)
            if name in told:
                axes.plot(*zip(*told[name], strict=True), "--", color=f"C{index}")
        axes.set_xscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return _svg(
        4.2,
        paint,
        "FLOPs of the visual tokens in a prefill; dashed: the law without the smallest",
        "wrong",
    )


def _svg(height: float, paint: Callable[[Any], None], across: str, up: str) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(8, height), layout="constrained")
        axes: Any = figure.subplots()
        paint(axes)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE)
