"""`mmfast eval --out`: a second run takes the rows of the first, as long as they hold."""

from __future__ import annotations

import inspect
import json
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runs import run

import mmfast
from mmfast.bench import own_data, results
from mmfast.bench.results import KeptResults, append
from mmfast.cli.own_suites import kept_results
from mmfast.core import registry, source
from mmfast.core.registry import methods
from mmfast.core.source import code_of, name_of
from mmfast.core.spec import parse
from mmfast.tiny import evaluate
from mmfast.tiny.names import OWN_SUITES, SUITES
from mmfast.tiny.stream import present

ASK = ("eval", "--suite", "image", "--n", "2", "--seed", "5", "--json")
METHOD = '''"""Keep the first tokens."""

import torch

from mmfast import Reduction, Tokens, register


@register("foremost")
def foremost(tokens: Tokens, budget: int) -> Reduction:
    """Keep the first tokens."""
    return Reduction.prune(torch.arange(budget), tokens.n)
'''


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ways that are really measured."""
    seen, stock = list[Any](), evaluate._row

    def row(
        subject: Any, batches: Any, spec: Any, behind: bool, tick: Any, cache: Any, *a: Any
    ) -> Any:
        seen.append((spec, cache))
        return stock(subject, batches, spec, behind, tick, cache, *a)

    monkeypatch.setattr(evaluate, "_row", row)
    return seen


@pytest.fixture
def method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a method, imported."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "foremost_tokens.py").write_text(METHOD)
    monkeypatch.syspath_prepend(folder)
    __import__("foremost_tokens")
    yield folder / "foremost_tokens.py"
    registry.unregister("foremost")
    del sys.modules["foremost_tokens"]


def changed(path: Path) -> None:
    path.write_text(METHOD + "\n# changed\n")
    source.digest.cache_clear()


def test_rows_of_an_earlier_run_are_taken(
    tmp_path: Path, measured: list[Any], method: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    command = (*ASK, "--reduce", "foremost:0.25", "--out", str(out))
    code, first, err = run(capsys, *command)
    assert code == 0 and "--no-resume" not in err
    assert measured == [(None, None), ("foremost:0.25", None)]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 and all(row["date"] for row in rows)
    with out.open("a") as file:
        file.write('{"suite": "image", "key": "to')  # torn by a kill
    measured.clear()
    code, second, err = run(capsys, *command)
    assert code == 0 and not measured and json.loads(second) == json.loads(first)
    assert f"2 rows are those that {out} had before; --no-resume asks again" in err
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows

    more = json.loads(run(capsys, *command, "--cache", "knorm:0.5")[1])["rows"]
    assert measured == [(None, "knorm:0.5"), ("foremost:0.25", "knorm:0.5")]
    assert [row["cache"] for row in more] == [None, None, "knorm:0.5", "knorm:0.5"]
    assert len(out.read_text().splitlines()) == 4
    measured.clear()
    again = json.loads(run(capsys, *command)[1])  # without the policies, and their column
    assert again == json.loads(first)
    run(capsys, *command, "--seed", "6")
    assert len(measured) == 2  # other questions
    measured.clear()
    changed(method)
    assert run(capsys, *command)[0] == 0 and measured == [("foremost:0.25", None)]
    measured.clear()
    assert run(capsys, *command, "--no-resume")[0] == 0 and len(measured) == 2


def test_a_suite_in_one_piece_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out = list[int](), tmp_path / "rows.jsonl"

    def run_present(n: int, seed: int, report: Any) -> dict[str, Any]:
        asked.append(seed)
        marks = [("count", True, True), ("colour", False, True)]
        rows = [{**present.present_row(way, marks), "streams": 1} for way in ("push", "watch")]
        return {"suite": "present", "n": n, "seed": seed, "model": "tiny-stream", "rows": rows}

    monkeypatch.setattr(present, "run_present", run_present)
    command = ("eval", "--suite", "present", "--n", "2", "--seed", "5", "--out", str(out), "--json")
    first = run(capsys, *command)
    second = run(capsys, *command)
    assert asked == [5] and json.loads(first[1]) == json.loads(second[1])
    lines = out.read_text().splitlines(keepends=True)
    assert len(lines) == 2 and "2 rows are those" in second[2]
    out.write_text(lines[0])  # half of it is none
    assert run(capsys, *command)[1] == first[1] and asked == [5, 5]


@pytest.mark.parametrize("suite", [*SUITES, *OWN_SUITES])
def test_the_default_model_of_a_suite_is_watched(
    suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()
    monkeypatch.setattr(results, "state_of", lambda path: seen.append(path) or [])
    given = {"suite": suite, "model": None, "n": 1, "seed": 0, "out": None, "resume": True}
    with kept_results(given):
        assert seen and all(path.is_dir() for path in seen)


def test_a_row_is_known_by_checkpoint_and_files_of_its_spec(tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"one")
    model = tmp_path / "model"
    (model / "rankers").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "rankers" / "top.safetensors").write_bytes(b"one")
    asked, spec = {"suite": "video", "n": 1, "seed": 0}, f"query_compressor:2?path={weights}"

    def key(**more: Any) -> str:
        return KeptResults(None, {**asked, **more}, [model]).key(spec)

    before = key()
    assert key() == before != key(weights="int8")
    weights.write_bytes(b"another")
    other = key()
    assert other != before
    (model / "rankers" / "top.safetensors").write_bytes(b"another")
    assert key() not in (before, other)
    out = tmp_path / "rows.jsonl"
    kept = KeptResults(out, asked, [model])
    append(out, kept.new([{"suite": "video", "reduce": spec, "accuracy": 1.0, "date": "today"}]))
    row = KeptResults(out, asked, [model]).find(spec)
    assert row == {"reduce": spec, "accuracy": 1.0}
    assert KeptResults(out, asked, [model], resume=False).find(spec) is None


def test_a_row_is_known_by_the_code_that_its_method_shares(
    tmp_path: Path, method: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that the method's file imports, and one that that imports in turn."""
    import mmfast.ops

    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(mmfast.ops, "__path__", [*mmfast.ops.__path__, str(shared)])
    near, far, apart = (shared / f"{name}.py" for name in ("near_op", "far_op", "apart_op"))
    far.write_text("FAR = 1\n")
    near.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mmfast.ops.apart_op\n"
        "def near():\n    from mmfast.ops.far_op import FAR\n    return FAR\n"
    )
    apart.write_text("APART = 1\n")
    method.write_text(METHOD + "\nimport mmfast.ops.near_op\n")
    source._imports.cache_clear()

    def found() -> tuple[str, str, str]:
        source.digest.cache_clear()
        specs = parse("foremost:0.25")
        key = KeptResults(None, {"suite": "video", "n": 1, "seed": 0}, []).key("foremost:0.25")
        return key, code_of(specs[0].method), name_of(specs)

    before = found()
    assert found() == before and before[-1].startswith("foremost@pre:0.25 ")
    apart.write_text("APART = 2\n")
    assert found() == before
    far.write_text("FAR = 2\n")
    later = found()
    near.write_text(near.read_text() + "\n# changed\n")
    assert not {*before, *later} & {*found()} and not {*before} & {*later}
    source._imports.cache_clear()


@pytest.mark.parametrize("kind", ["reducer", "cache", "prefill", "head"])
def test_code_of_a_method_is_not_the_whole_package(kind: str) -> None:
    for each in methods(kind):
        path = Path(str(inspect.getsourcefile(each.fn)))
        files = source.files_of(path)
        layers = {file.relative_to(path.parents[-1]).parts for file in files}
        assert files[0] == path and 1 < len(files) < 20, each.name
        assert not any({"models", "serve", "pipelines"} & {*parts} for parts in layers), each.name


def test_a_method_of_a_notebook_is_known_until_it_is_defined_again() -> None:
    cell = METHOD.replace("foremost", "of_a_cell")
    name = "/tmp/no-such-folder/1234.py"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    found = []
    try:
        for _ in range(2):
            exec(compile(cell, name, "exec"), {})
            method = registry.get("of_a_cell")
            found.append(code_of(method))
            assert code_of(method) == found[-1] != ""
            registry.unregister("of_a_cell")
    finally:
        linecache.cache.pop(name)
    assert len(set(found)) == 2


def test_answers_of_a_changed_method_are_asked_for_again(
    tmp_path: Path, method: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = Path(mmfast.__file__).parents[1] / "assets" / "clips" / "picture.jpg"
    data, out = tmp_path / "mine.jsonl", tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"media": str(clip), "question": "What?", "answer": "1"}) + "\n")
    asked = list[Any]()

    def answer(self: Any, row: Any, way: Any) -> Any:
        asked.append(way[0])
        return {"answer": "1", "right": True, "kept": 1, "ttft_ms": 1.0}

    monkeypatch.setattr(own_data.AskedModel, "answer", answer)
    monkeypatch.setattr(own_data.AskedModel, "prepare", lambda *_: None)
    monkeypatch.setattr(own_data, "load", lambda *_: (None, None))
    ways: list[own_data.Way] = [(None, None), ("foremost:0.25", None)]
    own_data.run_data(data, ways, out=out, model="tiny-video")
    monkeypatch.chdir(tmp_path)  # a name of an embedded model is no path
    own_data.run_data(data, ways, out=out, model="tiny-video")
    assert asked == [None, "foremost:0.25"]
    changed(method)
    own_data.run_data(data, ways, out=out)
    own_data.run_data(data, ways, out=out, model="tiny-video")
    assert asked[2:] == [None, "foremost:0.25", "foremost:0.25"]  # the default is another model
    own_data.run_data(data, ways, out=out, model="tiny-video", resume=False)
    assert asked[5:] == [None, "foremost:0.25"]
