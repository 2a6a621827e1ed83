"""Published systems: what mmfast offers for each, and its figure beside ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmfast.bench.results import Row
from mmfast.bench.sections import NOT_MEASURED, points
from mmfast.core.registry import methods
from mmfast.models.adapter import families

SYSTEMS = Path(__file__).resolve().parents[2] / "assets" / "systems.json"


def systems() -> list[dict[str, Any]]:
    """All rows: system, what is offered (methods or families), its own figure, what is missing."""
    found: list[dict[str, Any]] = json.loads(SYSTEMS.read_text(encoding="utf-8"))
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """One line a system of which something is registered, as Markdown.

    Args:
        rows: Evaluation rows; the accuracy of the row's share is put beside the claim.
    """
    known = {m.name for m in methods("reducer")}
    found = points(rows)
    whole = dict(found.get("all tokens", [])).get(1.0)
    lines = [
        "| system | offered here | its own figure, and where | here, on the embedded model |",
        "|---|---|---|---|",
    ]
    count = 0
    for system in systems():
        names = [name for name in system.get("offers", ()) if name in known]
        models = [name for name in system.get("families", ()) if name in families()]
        if not names and not models:
            continue
        count += 1
        offered = " ".join(f"`{name}`" for name in names) or f"adapter `{models[0]}`"
        if "missing" in system:
            offered += f"; not here: {system['missing']}"
        claim = f"{system['claim']} ({system['on']})"
        ours = _ours(names, system.get("share"), found, whole) if names else "adapter tests"
        lines.append(f"| {system['system']} | {offered} | {claim} | {ours} |")
    return [
        *lines,
        "",
        f"{count} systems; their figures are their authors' claims, not re-measured.",
    ]


def _ours(
    names: Sequence[str],
    share: float | None,
    found: Mapping[str, Sequence[tuple[float, float]]],
    whole: float | None,
) -> str:
    """Accuracy of each method at a share, relative to all tokens."""
    if share is None or not whole:
        return NOT_MEASURED
    cells = []
    for name in names:
        value = dict(found.get(name, ())).get(share)
        cells.append(NOT_MEASURED if value is None else f"{100 * value / whole:.1f} %")
    same = " / ".join(dict.fromkeys(cells)) if set(cells) == {NOT_MEASURED} else " / ".join(cells)
    return same if same == NOT_MEASURED else f"{same} of the accuracy at {100 * share:.0f} %"
