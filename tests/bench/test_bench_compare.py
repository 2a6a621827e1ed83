"""`mmfast bench --compare`: a planted slow-down is seen, what only looks like one is not."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from mmfast.bench.compare import compare, identity
from mmfast.bench.results import append
from mmfast.cli import main, measure
from mmfast.core.errors import MmfastError

Row = dict[str, Any]


def rows(**changed: Any) -> list[Row]:
    shared = {"suite": "bench", "preset": "tiny", "device": "cpu", "dtype": "float32"}
    shared |= {"threads": 1, "frames": 8, "tokens": 128, "stage": "llm", "noise": 0.04, "n": 5}
    shared |= {"versions": {"torch": "2.11.0"}, "processor": "Some CPU", "date": "2026-01-02"}
    shared |= {"commit": "abc1234", "knobs": {}, **changed}
    times = {None: 100.0, "evs:0.25": 30.0, "fastv:0.25": 40.0}
    return [{**shared, "reduce": reduce, "median_ms": ms} for reduce, ms in times.items()]


def test_the_same_file_is_no_change() -> None:
    found = compare(rows(), rows())
    assert [pair.verdict for pair in found.pairs] == ["="] * 3
    assert not found.regressions and not found.notes and not found.only_old and not found.only_new


def test_a_planted_regression_is_found_and_nothing_else() -> None:
    new = rows()
    new[1]["median_ms"] *= 1.3
    new[2]["median_ms"] *= 1.03  # within noise
    found = compare(rows(), new)
    (worse,) = found.regressions
    assert "evs:0.25" in worse.name and worse.slowdown == pytest.approx(0.3)
    assert found.beyond(20) == (worse,) and found.beyond(31) == ()
    assert compare(new, rows()).pairs[1].verdict == "faster"


def test_the_shakier_run_decides_what_is_noise() -> None:
    new = rows(noise=0.5)
    new[1]["median_ms"] *= 1.3
    assert not compare(rows(), new).regressions and not compare(new, rows()).regressions


def test_more_per_second_is_better() -> None:
    def speed(value: float) -> list[Row]:
        return [{"suite": "serve", "bench": "load", "chats": 4, "tokens_per_s": value}]

    assert compare(speed(100.0), speed(50.0)).regressions[0].slowdown == pytest.approx(1.0)
    assert compare(speed(50.0), speed(100.0)).pairs[0].verdict == "faster"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("threads", 2), ("device", "cuda"), ("dtype", "bfloat16"), ("frames", 16)),
        *(("stage", "decode"), ("preset", "other"), ("suite", "breakeven"), ("batch", 8)),
        *(("tokens", 256), ("knobs", {"alpha": 2}), ("variant", "triton")),
    ],
)
def test_what_names_a_row(key: str, value: object) -> None:
    found = compare(rows(), rows(**{key: value}))
    assert not found.pairs and len(found.only_old) == len(found.only_new) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("commit", "other"), ("date", "other"), ("clock", "wall"), ("processor", "other")),
        *(("n", 7), ("peak_mb", 3.5), ("score", 0.5), ("share", 0.25), ("equal", True)),
    ],
)
def test_what_does_not_name_a_row(key: str, value: object) -> None:
    assert identity(rows()[0]) == identity(rows(**{key: value})[0])


def test_other_machines_and_versions_are_told_once() -> None:
    found = compare(rows(), rows(processor="Fast CPU", versions={"torch": "2.12.0"}))
    assert found.notes == ("processor: Some CPU and Fast CPU", "torch: 2.11.0 and 2.12.0")


def test_rows_of_one_file_only_and_later_ones_replace_earlier() -> None:
    old, new = rows(), rows()[:2]
    slow = {**new[1], "median_ms": 60.0}
    found = compare(old, [slow, *new])
    assert [pair.verdict for pair in found.pairs] == ["=", "="]
    (only,) = found.only_old
    assert "fastv:0.25" in only


def test_files_without_speed_are_refused() -> None:
    with pytest.raises(MmfastError, match="second file has no row with a speed"):
        compare(rows(), [{"suite": "video", "accuracy": 0.9}])


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--compare", *map(str, args)])
    out = capsys.readouterr()
    return int(caught.value.code or 0), out.out, out.err


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    slower = rows(processor="Fast CPU")
    slower[1]["median_ms"] *= 1.3
    append(old, rows())
    append(new, slower[:2])
    return old, new


def test_exit_code_only_where_asked(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *files)
    assert code == 0 and "slower" in out and "1.300" in out
    assert "processor: Some CPU and Fast CPU" in err and "only in the first file" in err
    assert run(capsys, *files, "--fail-above", 20)[0] == 1
    assert run(capsys, *files, "--fail-above", 35)[0] == 0


def test_json_is_one_document(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *files, "--json", "--fail-above", 5)
    document = json.loads(out)
    assert code == 1 and not document["ok"] and err == ""
    assert [row["verdict"] for row in document["rows"]] == ["=", "slower"]
    assert len(document["regressions"]) == len(document["only_old"]) == 1


@pytest.mark.parametrize("text", [None, "{", "[1]", ""], ids=["missing", "cut", "list", "empty"])
def test_bad_files_are_one_line(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    old, new = files
    new.unlink() if text is None else new.write_text(text)
    code, out, err = run(capsys, old, new)
    assert code == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("value", ["-1", "nan", "much"])
def test_a_bad_threshold_is_refused(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], value: str
) -> None:
    assert run(capsys, *files, "--fail-above", value)[0] == 2


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        (["--full", "--reduce", "evs"], "--reduce"),
        (["--kernels", "reducers", "--threads", "2"], "--threads"),
        (["--fail-above", "3"], "--fail-above"),
        (["--selection", "--frames", "8"], "--frames"),
        (["--break-even", "--full"], "--break-even"),
    ],
)
def test_no_option_is_ignored_in_silence(
    given: list[str], ignored: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *given])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"does not use {ignored};" in error and error.count("\n") == 1


def test_every_way_to_measure_takes_options_that_exist() -> None:
    known = {
        name
        for command in (measure.bench, measure.evaluate)
        for name in inspect.signature(command).parameters
    }
    assert {name for taken in measure._TAKES.values() for name in taken} < known
