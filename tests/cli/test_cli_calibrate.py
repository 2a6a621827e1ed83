"""`mmfast calibrate`: patterns of heads in a folder, and the policies that find them there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import CLIP, QUESTION, fails, run

import mmfast
from mmfast.bench.prompts import load_pair, own_prompts, suite_prompts
from mmfast.models.kv.patterns import FILE, HeadPatterns
from mmfast.models.loading import load
from mmfast.models.text_chat import load_text
from mmfast.tiny.text.evaluate import documents

SIZE = ("--count", "1", "--length", "144")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model in a folder of its own, which nobody has calibrated."""
    home = tmp_path / "model"
    shutil.copytree("assets/models/tiny-video", home, ignore=shutil.ignore_patterns(FILE))
    return home


def asked(capsys: pytest.CaptureFixture[str], folder: Path, cache: str) -> Any:
    given = ("--model", str(folder), "--cache", cache, "--max-new-tokens", "4", "--json")
    code, out, error = run(capsys, "ask", CLIP, QUESTION, *given)
    assert code == 0, error
    (row,) = [row for row in json.loads(out)["trace"] if row["stage"] == "kv"]
    return row


def test_policies_find_what_was_calibrated(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    for cache in ("qfilter:0.5", "duo_attention"):
        refused = fails(capsys, "ask", CLIP, QUESTION, "--model", str(folder), "--cache", cache)
        assert "'mmfast calibrate'" in refused and cache.partition(":")[0] in refused
    written = f"{folder.parent}/./{folder.name}/"  # not as a Path writes it
    code, out, _ = run(capsys, "calibrate", written, *SIZE, "--json")
    document = json.loads(out)
    assert code == 0 and document["file"] == str(folder / FILE)
    stored, (model, _) = HeadPatterns.load(folder), load(str(folder), "cpu", "auto")
    direct = mmfast.calibrate_heads(model, count=1, length=144)
    assert sorted(map(int, document["reach"])) == sorted(stored.reach) == sorted(direct.reach)
    for index, reach in direct.reach.items():
        assert torch.allclose(stored.reach[index], reach, atol=1e-4)
        assert torch.allclose(stored.filters[index], direct.filters[index], atol=1e-4)
        assert document["reach"][str(index)] == pytest.approx(reach.tolist(), abs=2e-4)
    row = asked(capsys, folder, "qfilter:0.5")
    assert row["tokens_out"] == -(-row["tokens_in"] // 2)
    row = asked(capsys, folder, "duo_attention?sink=4&recent=16")
    assert 0 < row["tokens_out"] < row["tokens_in"]


def test_another_folder_and_a_table(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "patterns"
    code, shown, _ = run(capsys, "calibrate", str(folder), "--out", str(out), *SIZE)
    assert code == 0 and (out / FILE).is_file() and not (folder / FILE).exists()
    assert "reach of its heads" in shown and FILE in shown
    reach = HeadPatterns.load(out).reach
    assert str(round(float(reach[0][0]), 4)) in shown


def test_gates_learn_from_a_text_and_are_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home, text = tmp_path / "model", tmp_path / "mine.txt"
    shutil.copytree("assets/models/tiny-text", home, ignore=shutil.ignore_patterns(FILE))
    text.write_text(next(documents(3, 512)).text)
    given = ("--gates", "--data", str(text), "--count", "2", "--length", "200", "--json")
    code, out, error = run(capsys, "calibrate", str(home), *given)
    assert code == 0, error
    assert json.loads(out)["gates"] == 3 == len(HeadPatterns.load(home).gates)
    model, _ = load_text(home, "cpu")
    with mmfast.attach(model, cache="fastkvzip:16") as trace:
        model(torch.arange(40)[None], use_cache=True)
    assert [row.tokens_out for row in trace.rows] == [16]


def test_questions_and_suites_are_prompts(tmp_path: Path) -> None:
    pair = load_pair("assets/models/tiny-video")
    asked = {"media": str(Path(CLIP).resolve()), "question": QUESTION, "answer": "left"}
    (tmp_path / "mine.jsonl").write_text(f"{json.dumps(asked)}\n" * 3)
    own = list(own_prompts(pair, tmp_path / "mine.jsonl", 2, 9))
    made = list(suite_prompts(pair, "image", 2, 9))
    assert len(own) == len(made) == 2 and "pixel_values_videos" in own[0]
    assert own[0]["input_ids"].shape[1] > 288 and "pixel_values" in made[0]
    assert not torch.equal(made[0]["pixel_values"], made[1]["pixel_values"])


def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert "'nowhere' is no folder" in fails(capsys, "calibrate", "nowhere")
    assert "--count 0" in fails(capsys, "calibrate", str(folder), "--count", "0")
    assert "give --data FILE or --suite NAME" in fails(capsys, "calibrate", str(folder), "--gates")
    both = ("--data", "a.txt", "--suite", "video")
    assert "drop one" in fails(capsys, "calibrate", str(folder), *both)
    assert "unknown suite 'vdeo'" in fails(capsys, "calibrate", str(folder), "--suite", "vdeo")
    assert "cannot read 'a.txt'" in fails(capsys, "calibrate", str(folder), *both[:2])
    assert "length=9" in fails(capsys, "calibrate", str(folder), "--length", "9")
    told = fails(capsys, "calibrate", str(folder), "--length", "99999999")
    assert "length=99999999 is more than a LlavaOnevision" in told and "at most 4096" in told
    blank, long = folder.parent / "blank.txt", folder.parent / "long.txt"
    blank.write_text("\n ")
    told = fails(capsys, "calibrate", str(folder), "--data", str(blank))
    assert f"{str(blank)!r} holds no words" in told
    long.write_text("left " * 5_000)
    told = fails(capsys, "calibrate", str(folder), "--data", str(long), "--length", "5000")
    assert "longer than the 4,096 that this" in told
    told = fails(capsys, "calibrate", str(folder), *SIZE, "--out", str(folder / "config.json"))
    assert "--out" in told and "cannot be written" in told
    (folder / FILE).write_bytes(b"no tensors")
    refused = fails(capsys, "ask", CLIP, QUESTION, "--model", str(folder), "--cache", "qfilter:0.5")
    assert FILE in refused and "\n" not in refused.strip()


def test_an_embedded_model_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "give --out FOLDER" in fails(capsys, "calibrate", "tiny-video", *SIZE)
    for name in ("tiny-video", "tiny-text"):
        out = tmp_path / name
        code, _, error = run(capsys, "calibrate", name, "--out", str(out), *SIZE)
        assert code == 0 and (out / FILE).is_file(), error


def test_folders_without_a_model_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty, adapter = tmp_path / "empty", tmp_path / "adapter"
    for each in (empty, adapter):
        each.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert "holds no config.json" in fails(capsys, "calibrate", str(empty))
    assert "merge_and_unload" in fails(capsys, "calibrate", str(adapter))
