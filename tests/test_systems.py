"""The table of published systems is made from the registry and the accuracy rows."""

from __future__ import annotations

from typing import Any

from mmfast.bench.systems import systems, table
from mmfast.core.registry import methods
from mmfast.models.adapter import families


def _row(reduce: str | None, score: float) -> dict[str, Any]:
    return {"reduce": reduce, "score": score, "kept": 288}


def test_everything_offered_exists() -> None:
    known = {m.name for m in methods("reducer")}
    for system in systems():
        assert set(system.get("offers", ())) <= known, system["system"]
        assert set(system.get("families", ())) <= set(families()), system["system"]
        assert system["claim"] and system["on"]


def test_every_published_method_has_its_system() -> None:
    offered = {name for system in systems() for name in system.get("offers", ())}
    assert {m.name for m in methods("reducer") if m.paper} - offered <= {"audio_prune"}  # a study


def test_figures_stand_beside_the_claims() -> None:
    lines = table([_row(None, 0.98), _row("holitom:0.1", 0.882), _row("holitom_inner:0.1", 0.49)])
    (line,) = [line for line in lines if line.startswith("| HoliTom |")]
    assert "`holitom` `holitom_inner`" in line and "TTFT 2.28x" in line
    assert "90.0 % / 50.0 % of the accuracy at 10 %" in line
    (line,) = [line for line in lines if line.startswith("| DivPrune |")]
    assert line.endswith("| not measured |")
    (line,) = [line for line in lines if line.startswith("| FastVLM |")]
    assert "adapter `fast_vlm`" in line
