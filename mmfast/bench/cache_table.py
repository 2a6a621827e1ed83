"""Cache policies as Markdown: what is registered, and what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.results import Row
from mmfast.bench.sections import NOT_MEASURED
from mmfast.core.errors import SpecError
from mmfast.core.registry import Method
from mmfast.core.registry import methods as registered
from mmfast.core.spec import parse

SHARES = (0.5, 0.25, 0.1)
ACTS = {"prefill": "behind the prompt", "always": "always"}
Found = dict[str, Row]  # the latest row of each cache spec, "" without one


def caches(_: Sequence[Row]) -> list[str]:
    """One line a registered policy."""
    lines = ["| policy | paper | role | acts | needs | what it does |", "|---|" + "---|" * 5]
    for m in registered("cache"):
        paper = f"[{m.paper}](https://arxiv.org/abs/{m.paper})" if m.paper else "baseline"
        acts = "at a question" if m.role == "retrieve" else ACTS[m.moment]
        cells = (f"`{m.name}`", paper, m.role, acts, " ".join(m.needs), m.summary)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def latest(rows: Sequence[Row]) -> Found:
    """Rows of runs that asked for caches and for no reduction, by cache spec."""
    return {row["cache"] or "": row for row in rows if "cache" in row and not row["reduce"]}


def relative(name: str, share: float, found: Found) -> float | None:
    """Accuracy of a policy at a share, relative to the whole cache; None if it was not measured."""
    whole, row = found.get(""), found.get(f"{name}:{share}")
    if whole is None or row is None or not whole["score"]:
        return None
    return float(row["score"]) / float(whole["score"])


def cache_accuracy(rows: Sequence[Row]) -> list[str]:
    """Policies by the share of keys and values that is left, then the other specs."""
    found = latest(rows)
    head = " | ".join(f"{100 * share:.0f} %" for share in SHARES)
    lines = [
        f"The whole cache: {_cell(found.get(''))}. Right answers in per cent, in brackets the "
        "95 % interval. The first token of an answer comes from the pass that reads the prompt, "
        "before anything leaves the cache; those behind it, such as a second digit, read what is "
        "left.",
        "",
        f"| policy | {head} |",
        "|---|" + "---|" * len(SHARES),
    ]
    table = [m.name for m in registered("cache") if _by_share(m)]
    for name in table:
        cells = " | ".join(_cell(found.get(f"{name}:{share}")) for share in SHARES)
        lines.append(f"| `{name}` | {cells} |")
    shown = {"", *(f"{name}:{share}" for name in table for share in SHARES)}
    others = [spec for spec in found if spec not in shown and _known(spec)]
    if others:
        lines += ["", "| cache | right answers |", "|---|---|"]
        lines += [f"| `{spec}` | {_cell(found[spec])} |" for spec in others]
    return [*lines, "", _basis(rows)] if rows else lines


def _by_share(method: Method) -> bool:
    return method.role in ("position", "score")


def _known(spec: str) -> bool:
    """Whether a spec still means something; policies come and go, rows stay."""
    try:
        return bool(parse(spec, kind="cache"))
    except SpecError:
        return False


def _cell(row: Row | None) -> str:
    if row is None:
        return NOT_MEASURED
    bounds = row.get("interval")
    between = f" ({100 * bounds[0]:.1f} to {100 * bounds[1]:.1f})" if bounds else ""
    return f"{100 * row['score']:.1f}{between}"


def _basis(rows: Sequence[Row]) -> str:
    last = rows[-1]
    return (
        f"{last['n']} questions about unseen clips, seed {last['seed']}, model `{last['model']}`, "
        f"{last['date']}, commit `{last['commit'] or 'none'}`."
    )
