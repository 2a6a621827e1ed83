"""Predicted against measured time to first token as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from mmfast.bench.results import Row

_STAGES = {"llm": "behind the encoder", "ttft": "with the encoder", "generate": "`generate`"}


def plan(rows: Sequence[Row]) -> list[str]:
    """One line a shape, stage and spec, the latest row of each; how far off in the median."""
    if not rows:
        return ["Predicted against measured: not measured."]
    latest = {(r["preset"], r["stage"], r["frames"], r["reduce"]): r for r in rows}.values()
    one, off = rows[-1], [abs(row["ratio"] - 1) for row in latest]
    lines = [
        f"Median error {100 * median(off):.0f} %, largest {100 * max(off):.0f} %, over "
        f"{len(off)} predictions; {one['processor']}, {one['threads']} threads, torch "
        f"{one['versions']['torch']}, {one['date']}, commit `{one['commit'] or 'none'}`.",
        "",
        "| model shape | what | reduce | kept | predicted ms | measured ms | ratio |",
        "|---|" + "---|" * 6,
    ]
    for row in latest:
        layers = f", {row['layers']} layers" if row["layers"] else ""
        cells = [
            f"{row['preset']}{layers}, {row['frames']} frames",
            _STAGES[row["stage"]],
            f"`{row['reduce']}`" if row["reduce"] else "all tokens",
            str(row["kept"]),
            f"{row['predicted_ms']:.0f}",
            f"{row['measured_ms']:.0f}",
            f"{row['ratio']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
