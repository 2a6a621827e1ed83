"""Accuracy against kept tokens as a small SVG, drawn without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from mmfast.bench.report.tables import Points, label
from mmfast.bench.results import Row, share

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 200, 20, 50
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00",
    "#56b4e9", "#6a3d9a", "#8c510a", "#666666", "#b2182b",
)  # fmt: skip
TICKS = (0.05, 0.1, 0.25, 0.5, 1.0)


def accuracy_svg(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw one line a method; "" where there is nothing to draw.

    Args:
        series: `(kept share, accuracy)` ascending by method; "all tokens" is the dashed level.
    """
    lines = {name: list(pts) for name, pts in series.items() if name != "all tokens" and pts}
    if not lines:
        return ""
    level = dict(series.get("all tokens", [])).get(1.0)
    values = [y for pts in lines.values() for _, y in pts] + [level or 1.0]
    low = math.floor(10 * min(values)) / 10 if min(values) < 1 else 0.9
    parts = [_frame(low)]
    if level is not None:
        y = y_of(level, low)
        parts.append(line([(LEFT, y), (WIDTH - RIGHT, y)], "#000000", ' stroke-dasharray="4 4"'))
        parts.append(text(WIDTH - RIGHT + 10, y - 2, "all tokens", "#000000"))
    for index, (name, pts) in enumerate(lines.items()):
        parts.append(curve(index, name, pts, low))
    return picture("Accuracy against kept visual tokens", parts)


def picture(label: str, parts: Sequence[str]) -> str:
    """A whole SVG document."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{label}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
        f"{body}\n</svg>\n"
    )


def x_of(share: float) -> float:
    """Place of a kept share, in logarithmic steps."""
    span = math.log(TICKS[-1] / TICKS[0])
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(max(share, 0.03) / TICKS[0]) / span


def y_of(value: float, low: float, high: float = 1.0) -> float:
    """Place of a value between the lowest and the highest."""
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


def _frame(low: float) -> str:
    steps = round((1.0 - low) / 0.1)
    values = [low + (1.0 - low) * step / steps for step in range(steps + 1)]
    return frame([(y_of(value, low), f"{value:.0%}") for value in values])


def frame(levels: Sequence[tuple[float, str]]) -> str:
    """The grid: shares below, and levels `(place, text)` at the left."""
    parts = []
    for tick in TICKS:
        parts.append(line([(x_of(tick), TOP), (x_of(tick), HEIGHT - BOTTOM)], "#e5e5e5"))
        parts.append(text(x_of(tick), HEIGHT - BOTTOM + 18, f"{tick:.0%}", "#333333", "middle"))
    for y, name in levels:
        parts.append(line([(LEFT, y), (WIDTH - RIGHT, y)], "#e5e5e5"))
        parts.append(text(LEFT - 8, y + 4, name, "#333333", "end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text(middle, HEIGHT - 12, "visual tokens kept", "#333333", "middle"))
    return "\n".join(parts)


def curve(
    index: int,
    name: str,
    pts: Sequence[tuple[float, float]],
    low: float,
    high: float = 1.0,
) -> str:
    """A line with dots and its name at the right, in row `index`."""
    colour = COLOURS[index % len(COLOURS)]
    dash = ' stroke-dasharray="6 3"' if index >= len(COLOURS) else ""
    place = [(x_of(share), y_of(value, low, high)) for share, value in pts]
    dots = "\n".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in place)
    row = TOP + 40 + 18 * index
    key = line([(WIDTH - RIGHT + 10, row), (WIDTH - RIGHT + 30, row)], colour, dash)
    return "\n".join(
        [line(place, colour, dash), dots, key, text(WIDTH - RIGHT + 36, row + 4, name, colour)]
    )


def line(place: Sequence[tuple[float, float]], colour: str, extra: str = "") -> str:
    """A polyline."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"{extra}/>'


def text(x: float, y: float, words: str, colour: str, anchor: str = "start") -> str:
    """A line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(words)}</text>'


DASHED = ' stroke-dasharray="4 4"'
PRESET, DEVICE, STAGE = "llava-onevision-0.5b", "cpu", "llm"


def speeds(rows: Sequence[Row]) -> tuple[Points, list[tuple[float, float]]]:
    """(kept share, speed-up) by method of the latest rows, and the ideal of removing at `pre`.

    The rows are those of the 0.5B shape's prefill on a CPU, of one run: the latest commit's.
    """
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
    """Draw one line a method and the ideal, dashed; "" where there is nothing to draw.

    Args:
        series: `(kept share, speed-up)` ascending, by method.
        ideal: The same of what FLOPs allow.
    """
    if not series:
        return ""
    top = math.ceil(max(y for points in (ideal, *series.values()) for _, y in points))
    step = max(1, math.ceil(top / 10))
    top = step * math.ceil(top / step)
    levels = [0, 1, *range(step if step > 1 else 2, top + 1, step)]
    parts = [frame([(y_of(level, 0, top), f"{level}x") for level in levels])]
    place = [(x_of(kept), y_of(value, 0, top)) for kept, value in ideal]
    parts.append(line(place, "#000000", DASHED))
    key = [(WIDTH - RIGHT + 10, TOP + 14), (WIDTH - RIGHT + 30, TOP + 14)]
    parts.append(line(key, "#000000", DASHED))
    parts.append(text(WIDTH - RIGHT + 36, TOP + 18, "what FLOPs allow", "#000000"))
    parts += [curve(i, name, points, 0, top) for i, (name, points) in enumerate(series.items())]
    return picture("Speed-up against kept visual tokens", parts)
