"""Accuracy against kept tokens as a small SVG, drawn without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

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
        y = _y(level, low)
        parts.append(_line([(LEFT, y), (WIDTH - RIGHT, y)], "#000000", ' stroke-dasharray="4 4"'))
        parts.append(_text(WIDTH - RIGHT + 10, y - 2, "all tokens", "#000000"))
    for index, (name, pts) in enumerate(lines.items()):
        parts.append(_series(index, name, pts, low))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Accuracy against kept visual tokens" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
        f"{body}\n</svg>\n"
    )


def _x(share: float) -> float:
    span = math.log(TICKS[-1] / TICKS[0])
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(max(share, 0.03) / TICKS[0]) / span


def _y(value: float, low: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (1.0 - low)


def _frame(low: float) -> str:
    parts = []
    for share in TICKS:
        parts.append(_line([(_x(share), TOP), (_x(share), HEIGHT - BOTTOM)], "#e5e5e5"))
        parts.append(_text(_x(share), HEIGHT - BOTTOM + 18, f"{share:.0%}", "#333333", "middle"))
    steps = round((1.0 - low) / 0.1)
    for step in range(steps + 1):
        value = low + (1.0 - low) * step / steps
        y = _y(value, low)
        parts.append(_line([(LEFT, y), (WIDTH - RIGHT, y)], "#e5e5e5"))
        parts.append(_text(LEFT - 8, y + 4, f"{value:.0%}", "#333333", "end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 12, "visual tokens kept", "#333333", "middle"))
    return "\n".join(parts)


def _series(index: int, name: str, pts: Sequence[tuple[float, float]], low: float) -> str:
    colour = COLOURS[index % len(COLOURS)]
    dash = ' stroke-dasharray="6 3"' if index >= len(COLOURS) else ""
    place = [(_x(share), _y(value, low)) for share, value in pts]
    dots = "\n".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in place)
    row = TOP + 40 + 18 * index
    key = _line([(WIDTH - RIGHT + 10, row), (WIDTH - RIGHT + 30, row)], colour, dash)
    return "\n".join(
        [_line(place, colour, dash), dots, key, _text(WIDTH - RIGHT + 36, row + 4, name, colour)]
    )


def _line(place: Sequence[tuple[float, float]], colour: str, extra: str = "") -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"{extra}/>'


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'
