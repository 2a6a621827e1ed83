"""The table of published systems is made from assets/systems.json, the registry and the rows."""

from __future__ import annotations

from typing import Any

from mmfast.bench.report.catalogue import systems
from mmfast.bench.report.docs import write_table
from mmfast.core.registry import methods
from mmfast.models.families.adapter import families

KINDS = {"offers": "reducer", "caches": "cache", "heads": "head", "prefills": "prefill"}
KINDS |= {"compressors": "compressor", "rankers": "ranker"}


def _row(reduce: str | None, score: float) -> dict[str, Any]:
    return {"reduce": reduce, "score": score, "kept": 288}


def _cached(cache: str | None, score: float) -> dict[str, Any]:
    return {"reduce": None, "cache": cache, "score": score, "kept": 288}


def _line(lines: list[str], system: str) -> str:
    (line,) = [line for line in lines if line.startswith(f"| {system} |")]
    return line


def test_everything_offered_exists() -> None:
    for system in systems():
        for field, kind in KINDS.items():
            known = {method.name for method in methods(kind)}
            assert set(system.get(field, ())) <= known, system["system"]
        assert set(system.get("families", ())) <= set(families()), system["system"]
        assert system["claim"] and system["on"] and system["kind"]


def test_every_system_is_listed_once_with_an_offer_or_a_limit() -> None:
    names = [system["system"] for system in systems()]
    assert len(names) == len(set(names)) == 201
    for system in systems():
        assert system["status"] in ("works", "part", "none")
        offers = any(system.get(field) for field in (*KINDS, "families", "also"))
        assert offers == (system["status"] != "none"), system["system"]
        assert system["status"] == "works" or system["limit"], system["system"]


def test_every_published_method_has_its_system() -> None:
    offered = {name for system in systems() for name in system.get("offers", ())}
    assert {m.name for m in methods("reducer") if m.paper} - offered <= {"audio_prune"}  # a study
    cached = {name for system in systems() for name in system.get("caches", ())}
    # `retrieve` is ReKV by a descriptive name.
    assert {m.name for m in methods("cache") if m.paper} - cached <= {"retrieve"}
    sparse = {name for system in systems() for name in system.get("prefills", ())}
    assert {m.name for m in methods("prefill")} == sparse
    heads = {name for system in systems() for name in system.get("heads", ())}
    assert {m.name for m in methods("head")} <= heads


def test_caches_are_compared_with_the_whole_cache_of_their_own_run() -> None:
    rows = [_row(None, 0.98), _row("fastkv:0.1", 0.49), _row("holitom:0.1", 0.882)]
    rows += [_cached(None, 0.9), _cached("lookm:0.1", 0.45), _cached("fastkv:0.1", 0.81)]
    lines = write_table("systems", rows)
    line = _line(lines, "LOOK-M")
    assert "| cache `lookm` |" in line and line.endswith("| 50.0 % of the accuracy at 10 % |")
    line = _line(lines, "FastKV")
    assert "| `fastkv` cache `fastkv` |" in line and "| 50.0 % / 90.0 % of" in line
    assert "90.0 % / not measured" in _line(lines, "HoliTom")
    assert _line(lines, "SnapKV").endswith("| not measured |")


def test_policies_without_a_claimed_share_have_their_answers_about_long_texts() -> None:
    """Thinned without the question; the claim of another has a share, and a run of its own."""
    told = {"suite": "needles", "length": 4096, "aware": False, "reduce": None}
    rows = [{**_cached(f"{name}:0.25", 0.8), **told} for name in ("tova", "lookm")]
    rows += [{**rows[0], "aware": True, "score": 0.9}, {**rows[0], "length": 1024, "score": 0.7}]
    lines = write_table("systems", rows)
    assert _line(lines, "TOVA").endswith("| `tova` 80.0 % right in texts of 4,096 tokens at 25 % |")
    assert _line(lines, "LOOK-M").endswith("| not measured |")


def test_figures_stand_beside_the_claims() -> None:
    rows = [_row(None, 0.98), _row("holitom:0.1", 0.882), _row("holitom_inner:0.1", 0.49)]
    lines = write_table("systems", rows)
    line = _line(lines, "HoliTom")
    assert "`holitom` `holitom_inner`" in line and "TTFT 2.28x" in line
    assert "90.0 % / 50.0 % of the accuracy at 10 %" in line
    assert _line(lines, "DivPrune").endswith("| not measured |")
    assert "adapter `fast_vlm`" in _line(lines, "FastVLM")


def test_a_system_that_is_missing_names_the_reason() -> None:
    lines = write_table("systems", [])
    assert "needs training" in _line(lines, "Cache-to-Cache")
    missing = sum(system["status"] == "none" for system in systems())
    assert f"**{missing} systems not implemented.**" in lines and missing == 44
