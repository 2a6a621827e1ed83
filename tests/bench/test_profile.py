"""`mmfast profile`: parts that add up, work that is counted, a graph that can be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from cli_runs import CLIP, QUESTION, fails, run
from torch.nn import functional as F

import mmfast
from mmfast.bench.profile import (
    Flame,
    PartClock,
    WorkCounter,
    profile_request,
    write_flame,
)
from mmfast.models.cost import prefill_flops


@pytest.fixture(scope="module")
def profiled() -> tuple[Any, dict[str, Any], Flame]:
    pipe = mmfast.pipeline("video-qa", device="cpu", max_new_tokens=4, min_new_tokens=4)
    return pipe, *profile_request(pipe, CLIP, QUESTION)


def test_parts_add_up_to_the_request(profiled: tuple[Any, dict[str, Any], Flame]) -> None:
    _, document, _ = profiled
    rows = {row["part"]: row for row in document["parts"]}
    assert {"prepare", "tower", "projector", "prefill", "decode", "head", "generate"} == set(rows)
    assert rows["prefill"]["calls"] == 1 and rows["decode"]["calls"] == 3
    assert rows["head"]["calls"] == 4 and document["plan"] is None
    total = sum(row["ms"] for row in rows.values()) + document["other_ms"]
    assert total == pytest.approx(document["total_ms"], rel=1e-3, abs=0.1)
    for row in rows.values():
        assert 0 <= row["python_ms"] <= row["ms"] and 0 <= row["share"] <= 1
    assert document["roof"]["matmul_tflop_s"] > 0 and document["roof"]["copy_gb_s"] > 0


def test_the_work_of_a_prompt_is_what_its_shape_says(
    profiled: tuple[Any, dict[str, Any], Flame],
) -> None:
    pipe, document, _ = profiled
    (row,) = [row for row in document["parts"] if row["part"] == "prefill"]
    tokens = next(row["tokens_in"] for row in document["trace"] if row["stage"] == "prefill")
    layers = pipe.model.config.get_text_config().num_hidden_layers
    want = prefill_flops(pipe.model, [tokens] * layers) / 1e9
    assert row["gflop"] == pytest.approx(want, rel=0.05)


def test_products_and_bytes_are_counted_by_part() -> None:
    clock = PartClock()
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    with torch.inference_mode(), WorkCounter(clock), clock.around("a"):
        F.linear(x, w)
        with clock.around("b"):
            F.scaled_dot_product_attention(q, k, k)
        x.view(-1).expand(2, -1)  # moves nothing
    assert clock.costs["a"].flops == 2 * 3 * 8 * 5
    assert clock.costs["a"].bytes == 4 * (3 * 8 + 5 * 8 + 3 * 5)
    assert clock.costs["b"].flops == 4 * 2 * 4 * 6 * 8
    assert clock.costs["a"].calls == clock.costs["b"].calls == 1


def test_a_part_does_not_count_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr("mmfast.bench.profile.time.perf_counter", lambda: next(now))
    clock = PartClock()
    with clock.around("outer"), clock.around("inner"):
        pass
    assert clock.costs["outer"].ms == pytest.approx(3000)
    assert clock.costs["inner"].ms == pytest.approx(3000)


def test_a_flame_graph_is_drawn_to_scale(tmp_path: Path) -> None:
    root = Flame("request")
    root.child("a & b").own = 30.0
    root.child("c").child("d").own = 10.0
    write_flame(root, tmp_path / "f.svg", "t < u")
    tree = ElementTree.parse(tmp_path / "f.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    boxes = {
        group.find(f"{name}title").text.split(":")[0]: float(group.find(f"{name}rect").get("width"))
        for group in tree.iter(f"{name}g")
    }
    assert set(boxes) == {"request", "a & b", "c", "d"}
    assert boxes["a & b"] == pytest.approx(3 * boxes["c"], abs=0.2) and boxes["d"] == boxes["c"]


def test_a_flame_graph_appears_whole_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "f.svg"
    write_flame(Flame("request"), target, "before")
    before = target.read_bytes()

    def full(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(mmfast.MmfastError, match="cannot be written: No space left"):
        write_flame(Flame("request"), target, "after")
    assert target.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_the_command_prints_a_table_or_a_document(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    graph = tmp_path / "flame.html"
    more = ["--reduce", "evs:0.5", "--decode", "self:0.1", "--max-new-tokens", "3"]
    code, out, _ = run(capsys, "profile", CLIP, QUESTION, *more, "--flame", str(graph), "--json")
    document = json.loads(out)
    assert code == 0 and document["reduce"] == "evs:0.5" and document["decode"] == "self:0.1"
    assert "<svg" in graph.read_text(encoding="utf-8")


def test_a_graph_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "write a .svg" in fails(capsys, "profile", CLIP, QUESTION, "--flame", "x.png")
    nowhere = str(tmp_path / "nowhere" / "f.svg")
    assert "cannot be written" in fails(capsys, "profile", CLIP, QUESTION, "--flame", nowhere)
