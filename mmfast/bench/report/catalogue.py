"""Tables made from the registry: methods, cache policies, published systems, method x family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmfast.bench.cache_parity import CACHE_DRIVERS, PREFILL_DRIVERS
from mmfast.bench.parity import DRIVERS
from mmfast.bench.report.accuracy import by_policy, by_share
from mmfast.bench.report.table import NOT_MEASURED, Columns, ReportTable, Rows, at
from mmfast.bench.results import Row
from mmfast.core.registry import Method, methods

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden"
SYSTEMS = ROOT / "assets" / "systems.json"


def paper(method: Method) -> str:
    """A link to the paper of a method, on arXiv or OpenReview."""
    return f"[{method.paper}]({method.archive[1]})" if method.paper else "baseline"


def sites(method: Method) -> str:
    """Sites of a method, the default first."""
    return " ".join("llm&lt;K&gt;" if site == "llm" else site for site in method.sites)


def acts(method: Method) -> str:
    """Moment at which a cache policy acts."""
    if method.role == "retrieve":
        return "at a question"
    return {"prefill": "behind the prompt", "always": "always"}[method.moment]


def vectors(method: Method) -> int:
    """Golden vectors of the authors' code that a method is checked against.

    Methods of two kinds share a name, of which the policy or the reducer has vectors.
    """
    others = {"cache": {*CACHE_DRIVERS}, "prefill": {*PREFILL_DRIVERS}}
    mine = {**others, "reducer": {*DRIVERS}.difference(*others.values())}
    known = method.name in mine.get(method.kind, ())
    return len(list(GOLDEN.glob(f"{method.name}-*.safetensors"))) if known else 0


def press_cases(method: Method) -> list[str]:
    """Specs that name a cache policy and keep what a press of kvpress does."""
    if method.kind != "cache":
        return []
    told = _presses()
    specs = [case["spec"] for part in ("cases", "channels", "merges") for case in told[part]]
    return [s for s in specs if method.name in re.split(r"[:?+]", re.sub(r"\?[^+]*", "", s))]


def press_release() -> str:
    """Repository and release of the presses that `press_cases` are of."""
    told = _presses()
    return f"{told['repository']} {told['release']}"


@lru_cache
def _presses() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / "kvpress.json").read_text(encoding="utf-8"))
    return found


def _listed(kind: str, folder: str = "") -> Callable[[Rows], Rows]:
    def lines(rows: Rows) -> list[Row]:
        return [
            {
                "name": f"[`{m.name}`]({folder}/{m.name}.md)",
                "plain": f"`{m.name}`",
                "paper": paper(m),
                "sites": sites(m),
                "needs": " ".join(m.needs),
                "summary": m.summary,
                "role": m.role,
                "budget": m.takes,
                "acts": acts(m),
                "parity": f"{vectors(m)} vectors" if vectors(m) else "",
            }
            for m in methods(kind)
        ]

    return lines


def systems() -> list[dict[str, Any]]:
    """Published systems: what is offered (by name or in words), their figures, the limits."""
    found: list[dict[str, Any]] = json.loads(SYSTEMS.read_text(encoding="utf-8"))
    return found


# Lists of names in a system, and what each of them is called.
_OFFERS = {
    "offers": "", "caches": "cache ", "prefills": "prefill ", "compressors": "compressor ",
    "rankers": "ranking ", "heads": "head ", "families": "adapter ",
}  # fmt: skip


def _offered(system: Row) -> str:
    names = [f"{what}`{name}`" for key, what in _OFFERS.items() for name in system.get(key, ())]
    return "; ".join([text for text in (" ".join(names), system.get("also", "")) if text])


def _with(status: str) -> Callable[[Rows], Rows]:
    def lines(rows: Rows) -> list[Row]:
        needles = [row for row in rows if row.get("suite") == "needles"]
        asked = [row for row in rows if row.get("suite") != "needles"]
        reduced = by_share([row for row in asked if "cache" not in row])
        cached, texts = by_policy(asked), _texts(needles)
        return [
            {
                **system,
                "offered": _offered(system),
                "ours": _ours(system, reduced, cached, texts),
            }
            for system in systems()
            if system["status"] == status
        ]

    return lines


def _texts(rows: Rows) -> dict[str, Row]:
    """Rows of questions that stand behind long texts, by policy, at a quarter of the cache.

    A policy does not know the question when it thins the text.
    """
    mine = by_policy([r for r in rows if r["length"] == _LONG and not r["aware"]])
    return {spec.removesuffix(f":{_PART}"): row for spec, row in mine.items()}


def _ours(system: Row, reduced: Any, cached: dict[str, Row], texts: Mapping[str, Row]) -> str:
    """Accuracy at the share of the claim, relative to the run in which everything was kept.

    A policy of which no share is claimed has its answers about long texts.
    """
    part = system.get("share", 0.0)
    about = {name: texts[name] for name in system.get("caches", ()) if name in texts}
    if not part and about:
        cells = (f"`{name}` {100 * row['score']:.1f} %" for name, row in about.items())
        return f"{', '.join(cells)} right in texts of {_LONG:,} tokens at {100 * _PART:.0f} %"
    wholes = (reduced.get("all tokens", {}).get(1.0), cached.get(""))
    found = [(wholes[0], reduced.get(name, {}).get(part)) for name in system.get("offers", ())]
    found += [(wholes[1], cached.get(f"{name}:{part}")) for name in system.get("caches", ())]
    if not any(whole and row for whole, row in found):
        return NOT_MEASURED if found else "tests alone"
    cells = (
        f"{100 * row['score'] / whole['score']:.1f} %" if whole and row else NOT_MEASURED
        for whole, row in found
    )
    return f"{' / '.join(cells)} of the accuracy at {100 * part:.0f} %"


_NAMES = {"works": "implemented", "part": "implemented in part", "none": "not implemented"}


def _count(status: str) -> Callable[[Rows], str]:
    def text(rows: Rows) -> str:
        number = sum(system["status"] == status for system in systems())
        return f"**{number} systems {_NAMES[status]}.**"

    return text


def _families(rows: Rows) -> Columns:
    names = sorted({str(row["family"]) for row in rows})
    return {"method": "`{name}`"} | {f"`{name}`": at(name, "{text}") for name in names}


def _cells(rows: Rows) -> list[Row]:
    """A line a method: a tick where a pair ran, a number for a site or medium that cannot."""
    notes, lines = _notes(rows), []
    for method in methods("reducer") if rows else ():
        cells: dict[str, Row] = {}
        for family in sorted({str(row["family"]) for row in rows}):
            mine = [r for r in rows if (r["method"], r["family"]) == (method.name, family)]
            numbers = sorted({notes[_note(row)] for row in mine if row["reason"]})
            tick = "✓" if any(not row["reason"] for row in mine) else ""
            small = f"<sup>{','.join(map(str, numbers))}</sup>" if numbers else ""
            cells[family] = {"text": tick + small if mine else "not run"}
        lines.append({"name": method.name, "at": cells})
    return lines


@lru_cache
def _default(name: str) -> str:
    return next((m.sites[0] for m in methods("reducer") if m.name == name), "")


def _note(row: Row) -> tuple[str, str]:
    site = "" if row["site"] == _default(row["method"]) else str(row["site"])
    return site, str(row["reason"])


def _notes(rows: Rows) -> dict[tuple[str, str], int]:
    known = {method.name for method in methods("reducer")}
    failed = [row for row in rows if row["reason"] and row["method"] in known]
    failed.sort(key=lambda row: (row["method"], row["family"], _note(row)))
    return {note: n for n, note in enumerate(dict.fromkeys(map(_note, failed)), 1)}


def _footnotes(rows: Rows) -> str:
    lines = []
    for (site, reason), number in _notes(rows).items():
        where = f"at `{site}`: " if site else ""
        lines.append(f"<sup>{number}</sup> {where}{reason}.<br>")
    return "\n".join(lines)


def _ran(rows: Rows) -> str:
    ran = sum(not row["reason"] for row in rows)
    return f"{ran} of {len(rows)} cells (method, site, family, kind of media) run."


_SYSTEM = "system: {system} | offered here: {offered} | limit: {limit}"
_FIGURE = " | its own figure (and where): {claim} ({on}) | here, on the embedded model: {ours}"
_SOURCES = "eval-video eval-cache needles"
_LONG, _PART = 4096, 0.25  # tokens of a text, and the share of its cache that is kept
TABLES: dict[str, tuple[ReportTable, ...]] = {
    "methods": (
        ReportTable(
            "",
            "method: {name} | paper: {paper} | sites: {sites} | signals: {needs} | "
            "parity: {parity} | summary: {summary}",
            lines=_listed("reducer", "reducers"),
        ),
    ),
    "caches": (
        ReportTable(
            "",
            "policy: {name} | paper: {paper} | role: {role} | acts: {acts} | signals: {needs} | "
            "summary: {summary}",
            lines=_listed("cache", "policies"),
        ),
    ),
    "prefill_methods": (
        ReportTable(
            "",
            "method: {name} | paper: {paper} | budget: {budget} | summary: {summary}",
            lines=_listed("prefill", "prefill"),
        ),
    ),
    "rankers": (
        ReportTable(
            "",
            "ranking: {name} | paper: {paper} | sites: {sites} | signals: {needs} | "
            "summary: {summary}",
            lines=_listed("ranker", "rankers"),
        ),
    ),
    "heads": (
        ReportTable(
            "", "head: {plain} | paper: {paper} | summary: {summary}", lines=_listed("head")
        ),
    ),
    "systems": (
        ReportTable(_SOURCES, _SYSTEM + _FIGURE, lines=_with("works"), before=_count("works")),
        ReportTable(_SOURCES, _SYSTEM + _FIGURE, lines=_with("part"), before=_count("part")),
        ReportTable(
            _SOURCES,
            "system: {system} | reason: {limit} | its own figure (and where): {claim} ({on})",
            lines=_with("none"),
            before=_count("none"),
        ),
    ),
    "matrix": (ReportTable("matrix", _families, lines=_cells, before=_ran, after=_footnotes),),
}
