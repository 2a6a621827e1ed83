"""Result rows as Markdown tables; what no row says reads "not measured"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmfast.bench.report.speed import bench_group
from mmfast.bench.results import Row, share
from mmfast.core.errors import SpecError
from mmfast.core.registry import methods
from mmfast.core.spec import parse

NOT_MEASURED = "not measured"
SHARES = (0.5, 0.25, 0.1, 0.05)
Points = dict[str, list[tuple[float, float]]]  # method: (kept share, accuracy)


def label(reduce: str | None) -> str:
    """A spec without its budgets: what it is called across budgets."""
    if not reduce:
        return "all tokens"
    try:
        stages = parse(reduce)
    except SpecError:
        return reduce
    parts = []
    for stage in stages:
        default = stage.method.sites[0]
        usual = stage.site == default and stage.layer in (None, stage.method.layer)
        knobs = "&".join(f"{key}={value}" for key, value in stage.knobs.items())
        name = stage.method.name if usual else f"{stage.method.name}@{stage.where}"
        parts.append(name + (f"?{knobs}" if knobs else ""))
    return "+".join(parts)


def points(rows: Sequence[Row]) -> Points:
    """(kept share, accuracy) by method, the latest row of each share, ascending."""
    total = next((row["kept"] for row in rows if not row["reduce"]), 0.0)
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        kept = None if row.get("cache") else share(row["reduce"], row["kept"], total)
        if kept is not None:
            found.setdefault(label(row["reduce"]), {})[round(kept, 4)] = row["score"]
    return {name: sorted(values.items()) for name, values in found.items()}


def _basis(rows: Sequence[Row]) -> str:
    last = rows[-1]
    return (
        f"{last['n']} questions about unseen media, seed {last['seed']}, model `{last['model']}`, "
        f"{last['date']}, commit `{last['commit'] or 'none'}`."
    )


def accuracy(rows: Sequence[Row]) -> list[str]:
    """Reducers by kept share; every registered one has a line."""
    lines = _by_share(rows, dict.fromkeys(label(f"{m.name}:0.5") for m in methods("reducer")))
    if rows:
        lines += ["", "![Accuracy against kept tokens](assets/images/accuracy.svg)"]
    return lines


def subset(rows: Sequence[Row]) -> list[str]:
    """The same for a further suite: the methods and shares that were asked."""
    return _by_share(rows, {}) if rows else [f"{NOT_MEASURED.capitalize()}."]


def _by_share(rows: Sequence[Row], names: dict[str, None]) -> list[str]:
    found, spread = points(rows), _intervals(rows)
    whole = dict(found.get("all tokens", [])).get(1.0)
    measured = {share for values in found.values() for share, _ in values}
    shares = SHARES if names else [share for share in SHARES if share in measured]
    head = " | ".join(f"{100 * each:.0f} %" for each in shares)
    lines = [
        f"All tokens: {_cell(whole, spread.get(('all tokens', 1.0)))}. Right answers in per cent, "
        "in brackets the 95 % interval.",
        "",
        f"| reducer | {head} |",
        "|---|" + "---|" * len(shares),
    ]
    for name in names | dict.fromkeys(found):
        values = dict(found.get(name, []))
        if name != "all tokens":
            cells = (_cell(values.get(s), spread.get((name, s))) for s in shares)
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return [*lines, "", _basis(rows)] if rows else lines


def _intervals(rows: Sequence[Row]) -> dict[tuple[str, float], Sequence[float]]:
    """The 95 % interval of each method and share."""
    total = next((row["kept"] for row in rows if not row["reduce"]), 0.0)
    found = {}
    for row in rows:
        kept = share(row["reduce"], row["kept"], total)
        if kept is not None and "interval" in row:
            found[label(row["reduce"]), round(kept, 4)] = row["interval"]
    return found


def _cell(value: float | None, between: Sequence[float] | None) -> str:
    if value is None:
        return NOT_MEASURED
    bounds = f" ({100 * between[0]:.1f} to {100 * between[1]:.1f})" if between else ""
    return f"{100 * value:.1f}{bounds}"


def kinds(rows: Sequence[Row]) -> list[str]:
    """Accuracy by kind of question: all tokens, and the best reducer at 25 and 10 %."""
    whole = next((row for row in reversed(rows) if not row["reduce"]), None)
    if whole is None:
        return [f"By kind of question: {NOT_MEASURED}."]
    columns = [("all tokens", whole)]
    for kept in (0.25, 0.1):
        at = [row for row in rows if row["reduce"] and share(row["reduce"], 0, 0) == kept]
        if at:
            best = max(at, key=lambda row: float(row["score"]))
            columns.append((f"`{best['reduce']}`", best))
    lines = [
        "| kind of question | " + " | ".join(name for name, _ in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for kind in whole["by_kind"]:
        cells = " | ".join(_percent(row["by_kind"].get(kind)) for _, row in columns)
        lines.append(f"| {kind.replace('_', ' ')} | {cells} |")
    return lines


def bench(rows: Sequence[Row]) -> list[str]:
    """One table per shape, device and stage; the latest row of each spec."""
    groups: dict[tuple[object, ...], dict[str | None, Row]] = {}
    for row in rows:
        key = tuple(row[k] for k in ("preset", "processor", "dtype", "threads", "frames", "stage"))
        groups.setdefault(key, {})[row["reduce"]] = row
    lines: list[str] = []
    for group in groups.values():
        lines += [*bench_group(list(group.values())), ""]
    return lines[:-1] or [f"Speed: {NOT_MEASURED}."]


def selection(rows: Sequence[Row]) -> list[str]:
    """The cost of choosing tokens, against the textbook formulation."""
    if not rows:
        return [f"Cost of selection: {NOT_MEASURED}."]
    latest = {row["case"]: row for row in rows}
    one = rows[-1]
    lines = [
        f"Choosing alone, one thread of {one['processor']}, {one['date']}, "
        f"commit `{one['commit'] or 'none'}`.",
        "",
        "| selection | textbook ms | mmfast ms | faster | same tokens |",
        "|---|---|---|---|---|",
    ]
    for name, row in latest.items():
        times = f"{row['textbook_ms']:.1f} | {row['median_ms']:.1f}"
        same = "yes" if row["same_indices"] else "no"
        lines.append(f"| {name} | {times} | {row['speedup']:.1f}x | {same} |")
    return lines + _extra_memory(latest)


def _extra_memory(rows: Mapping[str, Row]) -> list[str]:
    """Peak memory of the cases that measured it."""
    lines = [
        f"| {name} | {row['textbook_extra_mb']:.0f} | {row['extra_mb']:.0f} |"
        for name, row in rows.items()
        if "extra_mb" in row
    ]
    head = ["", "| peak memory above the inputs | textbook MB | mmfast MB |", "|---|---|---|"]
    return head + lines if lines else []


def _percent(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{100 * value:.1f} %"
