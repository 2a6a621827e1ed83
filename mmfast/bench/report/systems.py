"""Published systems: what mmfast offers for each, and its figure beside ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmfast.bench.report.models import latest, relative
from mmfast.bench.report.tables import NOT_MEASURED, points
from mmfast.bench.results import Row
from mmfast.core.registry import methods
from mmfast.models.families.adapter import families

SYSTEMS = Path(__file__).resolve().parents[3] / "assets" / "systems.json"


def systems() -> list[dict[str, Any]]:
    """All rows: system, what is offered (by name or in words), its figure, what is missing."""
    found: list[dict[str, Any]] = json.loads(SYSTEMS.read_text(encoding="utf-8"))
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """One line a system of which something is registered, as Markdown.

    Args:
        rows: Evaluation rows; the accuracy of the row's share is put beside the claim.
    """
    known = {kind: {m.name for m in methods(kind)} for kind in ("reducer", "cache")}
    found, cached = points([row for row in rows if "cache" not in row]), latest(rows)
    lines = [
        "| system | offered here | its own figure, and where | here, on the embedded model |",
        "|---|---|---|---|",
    ]
    for system in systems():
        names = [name for name in system.get("offers", ()) if name in known["reducer"]]
        kept = [name for name in system.get("caches", ()) if name in known["cache"]]
        models = [name for name in system.get("families", ()) if name in families()]
        if not (names or kept or models):
            continue
        shown = [f"`{name}`" for name in names] + [f"cache `{name}`" for name in kept]
        offered = " ".join(shown) or f"adapter `{models[0]}`"
        if "also" in system:
            offered += f"; {system['also']}"
        if "missing" in system:
            offered += f"; not here: {system['missing']}"
        claim = f"{system['claim']} ({system['on']})"
        share = system.get("share", 0.0)
        ours = [_relative(name, share, found) for name in names]
        ours += [relative(name, share, cached) for name in kept]
        cell = _ours(ours, share) if shown else "adapter tests"
        lines.append(f"| {system['system']} | {offered} | {claim} | {cell} |")
    return [
        *lines,
        "",
        f"{len(lines) - 2} systems; their figures are their authors' claims, not re-measured.",
    ]


def _relative(
    name: str, share: float, found: Mapping[str, Sequence[tuple[float, float]]]
) -> float | None:
    """Accuracy of a reducer at a share, relative to all tokens."""
    whole = dict(found.get("all tokens", ())).get(1.0)
    value = dict(found.get(name, ())).get(share)
    return value / whole if whole and value is not None else None


def _ours(ratios: Sequence[float | None], share: float) -> str:
    """Accuracies at a share, or that there are none."""
    if all(ratio is None for ratio in ratios):
        return NOT_MEASURED
    cells = (NOT_MEASURED if ratio is None else f"{100 * ratio:.1f} %" for ratio in ratios)
    return f"{' / '.join(cells)} of the accuracy at {100 * share:.0f} %"
