"""The table of published systems is made from the registry and the accuracy rows."""

from __future__ import annotations

from typing import Any

from mmfast.bench.report.systems import systems, table
from mmfast.core.registry import methods
from mmfast.models.families.adapter import families


def _row(reduce: str | None, score: float) -> dict[str, Any]:
    return {"reduce": reduce, "score": score, "kept": 288}


def test_everything_offered_exists() -> None:
    known = {kind: {m.name for m in methods(kind)} for kind in ("reducer", "cache")}
    for system in systems():
        assert set(system.get("offers", ())) <= known["reducer"], system["system"]
        assert set(system.get("caches", ())) <= known["cache"], system["system"]
        assert set(system.get("families", ())) <= set(families()), system["system"]
        assert system["claim"] and system["on"]


def test_every_published_method_has_its_system() -> None:
    offered = {name for system in systems() for name in system.get("offers", ())}
    assert {m.name for m in methods("reducer") if m.paper} - offered <= {"audio_prune"}  # a study
    cached = {name for system in systems() for name in system.get("caches", ())}
    # `retrieve` is ReKV by the name of what it does.
    assert {m.name for m in methods("cache") if m.paper} - cached <= {"retrieve"}


def _cached(cache: str | None, score: float) -> dict[str, Any]:
    return {"reduce": None, "cache": cache, "score": score, "kept": 288}


def test_caches_are_compared_with_the_whole_cache_of_their_own_run() -> None:
    rows = [_row(None, 0.98), _row("fastkv:0.1", 0.49), _row("holitom:0.1", 0.882)]
    rows += [_cached(None, 0.9), _cached("lookm:0.1", 0.45), _cached("fastkv:0.1", 0.81)]
    lines = table(rows)
    (line,) = [line for line in lines if line.startswith("| LOOK-M |")]
    assert "| cache `lookm` |" in line and line.endswith("| 50.0 % of the accuracy at 10 % |")
    (line,) = [line for line in lines if line.startswith("| FastKV |")]
    assert "| `fastkv` cache `fastkv` |" in line and "| 50.0 % / 90.0 % of" in line
    (line,) = [line for line in lines if line.startswith("| HoliTom |")]
    assert "90.0 % / not measured" in line
    (line,) = [line for line in lines if line.startswith("| SnapKV |")]
    assert line.endswith("| not measured |")


def test_figures_stand_beside_the_claims() -> None:
    lines = table([_row(None, 0.98), _row("holitom:0.1", 0.882), _row("holitom_inner:0.1", 0.49)])
    (line,) = [line for line in lines if line.startswith("| HoliTom |")]
    assert "`holitom` `holitom_inner`" in line and "TTFT 2.28x" in line
    assert "90.0 % / 50.0 % of the accuracy at 10 %" in line
    (line,) = [line for line in lines if line.startswith("| DivPrune |")]
    assert line.endswith("| not measured |")
    (line,) = [line for line in lines if line.startswith("| FastVLM |")]
    assert "adapter `fast_vlm`" in line
