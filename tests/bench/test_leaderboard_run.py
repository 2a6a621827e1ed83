"""The referee's measurements: real answers, resumption, a method of another package, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_runs import ROOT, fails, run

from mmfast.bench.leaderboard import measure
from mmfast.bench.leaderboard.grid import BoardGrid, make_grid
from mmfast.bench.leaderboard.measure import AnswerBench, SpeedBench, run_grid, stored_rows
from mmfast.bench.registry import names
from mmfast.core import registry
from mmfast.core.errors import MmfastError
from mmfast.serve.engine.base import Request
from mmfast.tiny.evaluate import run_eval

SMALL = {"suites": ["image"], "budgets": ["0.25"], "seeds": ["5"], "n": 5, "speed": False}
METHOD = '''"""Keep the longest tokens."""

from mmfast import Reduction, Tokens, register


@register("longest")
def longest(tokens: Tokens, budget: int) -> Reduction:
    """Keep the tokens of greatest length."""
    return Reduction.prune(tokens.x.norm(dim=-1).topk(budget).indices, tokens.n)


@register("breaking")
def breaking(tokens: Tokens, budget: int) -> Reduction:
    """Fail at every call."""
    raise RuntimeError("no such\\nluck")
'''


def small(*names: str, **more: Any) -> BoardGrid:
    return make_grid("reduced", names, **{**SMALL, **more})


def marks(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (row["key"], row["right"], row["kept"], row["kv_bytes"], row["chances"]) for row in rows
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the cells that are really measured."""
    seen, stock = list[str](), AnswerBench.row
    monkeypatch.setattr(
        AnswerBench, "row", lambda self, cell: seen.append(cell.label) or stock(self, cell)
    )
    return seen


def test_rows_equal_those_of_eval(tmp_path: Path) -> None:
    rows = run_grid(small("evs", "tome", "cache/snapkv"), tmp_path / "cells.jsonl")
    assert [row["method"] for row in rows] == [
        *("all tokens", "downsample", "evs", "tome", "cache/snapkv")
    ]
    specs = ["downsample:0.25", "evs:0.25", "tome:0.25"]
    wanted = run_eval(specs, 5, 5, name="image")["rows"]
    wanted += run_eval([], 5, 5, name="image", caches=["snapkv:0.25"])["rows"][1:]
    for row, known in zip(rows, wanted, strict=True):
        assert row["right"].count("1") / 5 == known["accuracy"]
        assert row["kept"] == known["kept"] and len(row["right"]) == 5
        assert all(0 < chance <= 1 for chance in row["chances"])
    whole, *_, policy = (row["kv_bytes"] for row in rows)
    assert rows[2]["kv_bytes"] < 0.4 * whole and policy < 0.4 * whole
    assert rows[0]["same"] == "11111" and rows[0]["answers"] and "answers" not in rows[1]


def test_an_interrupted_run_goes_on(tmp_path: Path, measured: list[str]) -> None:
    path, grid = tmp_path / "cells.jsonl", small("evs", "random", seeds=["5", "6"], n=4)
    whole = run_grid(grid, tmp_path / "whole.jsonl")
    assert len(measured) == len(whole) == 8
    measured.clear()

    def stop(done: int, total: int, label: str) -> None:
        assert 0 <= done <= total
        if len(measured) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, path, stop)
    with path.open("a") as file:
        file.write('{"suite": "leaderboard", "key": "to')  # torn by a kill
    measured.clear()
    rows = run_grid(grid, path)
    assert len(measured) == 3 and marks(rows) == marks(whole)
    measured.clear()
    assert marks(run_grid(grid, path)) == marks(whole) and not measured
    # A method that draws takes the seed of its cell.
    assert [r["reduce"] for r in rows if r["method"] == "random"] == [
        f"random:0.25?seed={seed}" for seed in (5, 6)
    ]
    path.write_text("no JSON\n")
    with pytest.raises(MmfastError, match="cannot go on from"):
        run_grid(grid, path)


@pytest.mark.slow
def test_a_killed_process_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mmfast", "leaderboard", "--methods", "evs,random,pool"]
    command += ["--suites", "image", "--seeds", "5", "--n", "4", "--no-speed"]
    command += ["--out", str(tmp_path), "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    cells = tmp_path / "cells.jsonl"
    started = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not (cells.is_file() and cells.read_bytes().count(b"\n") >= 2):
        assert started.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = [json.loads(line) for line in cells.read_text().split("\n")[:-1]]
    done = subprocess.run(command, env=env, capture_output=True, check=True, text=True)
    document = json.loads(done.stdout)
    rows = [json.loads(line) for line in cells.read_text().splitlines()]
    assert rows[: len(kept)] == kept and len({row["key"] for row in rows}) == len(rows) == 9
    assert {row["method"] for row in document["rows"]} == {
        *("all tokens", "downsample", "evs", "random", "pool")
    }
    assert (tmp_path / "leaderboard.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "leaderboard.json").read_text()) == document


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with one module and one entry point, as `pip install` leaves it."""
    home = tmp_path / "site"
    info = home / "longest_tokens-1.0.dist-info"
    info.mkdir(parents=True)
    (home / "longest_board_tokens.py").write_text(METHOD)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: longest-tokens\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mmfast.plugins]\nlongest = longest_board_tokens\n")
    monkeypatch.syspath_prepend(home)
    yield home / "longest_board_tokens.py"
    for name in ("longest", "breaking"):
        registry.unregister(name)
    registry._LOADED.discard("longest_board_tokens")
    sys.modules.pop("longest_board_tokens", None)


def test_a_method_of_another_package_takes_part(
    package: Path, tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"longest", "breaking"} <= {each.name for each in make_grid().entrants}
    command = ["leaderboard", "--methods", "breaking,longest", "--suites", "image", "--n", "3"]
    command += ["--seeds", "5", "--budgets", "0.25", "--no-speed", "--out", str(tmp_path / "b")]
    code, out, err = run(capsys, *command, "--json")
    document = json.loads(out)
    assert code == 0 and [row["method"] for row in document["rows"]] == [
        *("all tokens", "downsample", "longest")
    ]
    assert "not measured: image breaking 25 %: RuntimeError: no such luck" in err
    page = (tmp_path / "b" / "leaderboard.html").read_text()
    assert "longest" in page and "no such luck" in page
    measured.clear()
    code, out, _ = run(capsys, *command)
    assert code == 0 and measured == ["image breaking 25 % answers"]  # what failed is tried again
    assert "longest" in out and "breaking" not in out
    # A further run in the folder adds to what is there.
    command[2] = "uniform"
    document = json.loads(run(capsys, *command, "--json")[1])
    assert {"longest", "uniform"} <= {row["method"] for row in document["rows"]}
    # A changed method is another one.
    before = {cell.entrant.name: cell.key for cell in small("longest", "evs").cells}
    change(package)
    after = {cell.entrant.name: cell.key for cell in small("longest", "evs").cells}
    assert {name for name in before if before[name] != after[name]} == {"longest"}
    with (tmp_path / "b" / "cells.jsonl").open("a") as file:
        file.write('{"suite": "leaderboard", "key": "of another hand"}\n[]\n')
    rows = stored_rows(tmp_path / "b" / "cells.jsonl")
    assert {row["method"] for row in rows} == {"all tokens", "downsample", "uniform"}


def change(path: Path) -> None:
    """Change a module, as an upgrade does."""
    from mmfast.core import source

    path.write_text(METHOD + "\n# changed\n")
    source.digest.cache_clear()


@pytest.mark.slow
def test_times_to_the_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real answers, whose times are replaced by what was asked: a busy machine changes none."""
    waited, asked = SpeedBench._waited, list[tuple[int, bool]]()

    def tell(self: SpeedBench, requests: Sequence[Request]) -> list[float]:
        found, plain = waited(self, requests), requests[0].options.reduce is None
        assert len(found) == len(requests) and min(found) > 0
        asked.append((len(requests), plain))
        return [100.0 * len(requests) + 60.0 * plain] * len(requests)

    monkeypatch.setattr(SpeedBench, "_waited", tell)
    monkeypatch.setattr(measure, "TOGETHER", 3)
    grid = small("evs", speed=True)
    grid = BoardGrid(grid.entrants, ("image",), (0.25,), (5,), 2, ("image",), rounds=2)
    rows = [row for row in run_grid(grid, tmp_path / "cells.jsonl") if row["job"] == "speed"]
    assert [row["method"] for row in rows] == ["downsample", "evs"]
    for row in rows:
        assert "error" not in row and row["gains_1"] == [1.6] * 2 and row["gains_3"] == [1.2] * 2
        assert (row["ttft_3_ms"], row["ttft_1_ms"]) == (300, 100)
        assert (row["stock_ttft_3_ms"], row["stock_ttft_1_ms"]) == (360, 160)
    for plain in (True, False):  # of each row: one request to warm up, then two rounds
        assert asked.count((3, plain)) == 2 * 2
        assert asked.count((1, plain)) == 2 * (1 + 2 * measure.ALONE)


def test_a_missing_package_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = make_grid("reduced", ["evs"], ["image"], ["0.25"], ["1"], 2, True)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "mmfast.serve.engine.scheduler", None)
        with pytest.raises(MmfastError, match="--no-speed"):
            run_grid(grid, tmp_path / "cells.jsonl")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "mmfast.bench.suites.serve.load", None)
    with pytest.raises(MmfastError, match=r"--serve needs .*serve.load.*pip install"):
        names("serve")


def test_grids() -> None:
    reduced, full = make_grid(), make_grid("full")
    names = {each.name for each in full.entrants}
    assert {each.name for each in reduced.entrants} < names
    assert {"cache/snapkv", "cache/window", "evs", "fastv"} <= names
    assert not {"pixelprune", "cache/quant", "cache/retrieve"} & names
    assert len(reduced.seeds) == 3 and full.budgets == (0.5, 0.25, 0.1, 0.05)
    assert len({cell.key for cell in reduced.cells}) == len(reduced.cells)
    for group in reduced.groups():
        first = group[0].entrant.name
        assert first == ("all tokens" if group[0].job == "answers" else "downsample")
    twice = make_grid(names=["evs", "downsample"], budgets=["0.1", "0.50", "0.5"])
    assert [each.name for each in twice.entrants] == ["downsample", "evs"]
    assert twice.budgets == (0.5, 0.1)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--grid", "huge"], ["'huge'", "reduced", "full"]),
        (["--methods", "evz"], ["'evz'", "did you mean 'evs'"]),
        (["--methods", "evs,,tome"], ["empty part"]),
        (["--suites", "vidio"], ["'vidio'", "'video'"]),
        (["--budgets", "2"], ["'2'", "between 0 and 1"]),
        (["--budgets", "nan"], ["'nan'"]),
        (["--budgets", "few"], ["'few'", "0.25,0.1"]),
        (["--seeds", "-1"], ["'-1'", "1000,1001"]),
        (["--n", "0"], ["--n 0"]),
        (["--out", "/dev/null/board"], ["/dev/null/board"]),
    ],
)
def test_rubbish_is_one_line(
    args: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(capsys, "leaderboard", *args)
    assert all(text in error for text in told), error
