"""Speed-up against kept tokens, with the line that FLOPs allow, as a small SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mmfast.bench.charts import RIGHT, TOP, WIDTH, curve, frame, line, picture, text, x_of, y_of
from mmfast.bench.results import Row, share
from mmfast.bench.sections import Points, label

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
