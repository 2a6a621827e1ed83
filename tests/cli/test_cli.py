"""The command line: documents, exit codes, one-line errors for what a user can get wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from cli_runs import CLIP, QUESTION, ROOT, fails, run
from PIL import Image

from mmfast import attach, cli
from mmfast.cli import COMMANDS, load
from mmfast.core.registry import listed


def test_ask(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "ask", CLIP, QUESTION)
    assert code == 0 and out.strip() in {"left", "right", "up", "down"}
    assert "visual tokens" in err


def test_ask_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ask", CLIP, QUESTION, "--reduce", "evs:0.25", "--json")
    document = json.loads(out)
    assert code == 0
    assert set(document) == {"answer", "ttft_ms", "visual_tokens", "kept_tokens", "trace"}
    assert document["kept_tokens"] == round(0.25 * document["visual_tokens"]) > 0
    assert document["ttft_ms"] > 0
    assert {"stage", "tokens_in", "tokens_out", "ms", "peak_bytes"} == set(document["trace"][0])


def test_ask_about_an_image(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = np.full((96, 96, 3), 90, np.uint8)
    picture[30:62, 30:62] = (220, 30, 30)
    Image.fromarray(picture).save(tmp_path / "square.png")
    code, out, _ = run(capsys, "ask", str(tmp_path / "square.png"), "What colour is the square?")
    assert code == 0 and out.strip()


def test_methods_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "methods", "--json")
    rows = json.loads(out)
    assert code == 0 and {"evs", "divprune", "holitom"} <= {row["name"] for row in rows}
    assert all(set(row) == {"name", "kind", "paper", "needs", "summary"} for row in rows)
    kinds = {"reducer", "cache", "head", "prefill", "compressor", "ranker"}
    assert {row["kind"] for row in rows} == kinds
    code, out, _ = run(capsys, "methods", "--kind", "cache")
    assert code == 0 and "snapkv" in out and "divprune" not in out and "cache position" in out


def test_methods_are_shown_with_arguments_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = set(signature(attach).parameters)
    for method in {method.kind: method for method in listed()}.values():  # one of each kind
        code, out, _ = run(capsys, "methods", method.name, "--kind", method.kind, "--json")
        example = json.loads(out)["example"]
        assert code == 0
        if "attach" in example:
            (name,) = re.findall(r", (\w+)=", example["attach"])
            assert name in known and f"--{name} " in example["command"], example


def test_verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "verify", str(ROOT / "tests" / "golden"), "--json")
    document = json.loads(out)
    assert code == 0 and document["ok"] and len(document["rows"]) >= 18
    (tmp_path / "evs-1.safetensors").write_bytes(b"no tensors here")
    code, out, _ = run(capsys, "verify", str(tmp_path), "--json")
    assert code == 1 and not json.loads(out)["ok"]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    rows = {row["what"]: row for row in json.loads(out)}
    assert code == 0 and rows["torch"]["ok"] and rows["model tiny-scenes"]["ok"]
    assert not any(row["fix"] for row in rows.values() if row["ok"])


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[1].strip().count(".") == 2
    code, out, _ = run(capsys)
    assert code == 0 and "bench" in out


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("evz:0.5", ["evz", "did you mean 'evs'"]),
        ("divprune:0", ["0", "share"]),
        ("divprune:1.5", ["1.5", "share"]),
        ("divprune:-3", ["-3", "share"]),
        ("divprune:nan", ["nan"]),
        ("divprune:lots", ["lots"]),
        ("divprune", ["needs a budget"]),
        ("divprune:100000", ["100000", "more than"]),
        ("divprune@llm99:0.5", ["99", "layers"]),
        ("divprune@nowhere:0.5", ["nowhere", "choices"]),
        ("evs:0.5?colour=blue", ["colour", "choices"]),
        ("@@", ["@@", "for example"]),
    ],
)
def test_bad_specs(capsys: pytest.CaptureFixture[str], spec: str, words: list[str]) -> None:
    error = fails(capsys, "ask", CLIP, QUESTION, "--reduce", spec)
    assert all(word in error for word in words), error


def test_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "question" in fails(capsys, "ask", CLIP, "  ")
    assert "frames" in fails(capsys, "ask", CLIP, QUESTION, "--frames", "0")
    assert "tpu" in fails(capsys, "ask", CLIP, QUESTION, "--device", "tpu")
    assert "float8" in fails(capsys, "ask", CLIP, QUESTION, "--dtype", "float8")
    assert "config.json" in fails(capsys, "ask", CLIP, QUESTION, "--model", str(tmp_path))
    assert "does not exist" in fails(capsys, "ask", CLIP, QUESTION, "--model", "./nowhere")
    assert "max_new_tokens" in fails(capsys, "ask", CLIP, QUESTION, "--max-new-tokens", "0")
    assert "question" in fails(capsys, "ask", CLIP).lower()
    assert "--n 0" in fails(capsys, "eval", "--n", "0")
    assert "nope" in fails(capsys, "bench", "--preset", "nope")
    assert "nowhere" in fails(capsys, "verify", str(tmp_path / "nowhere"))
    assert "frobnicate" in fails(capsys, "frobnicate")


def test_bad_media(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("not a film\n" * 100)
    whole = Path(CLIP).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 3])
    for name in ("missing.mp4", "empty.mp4", "text.mp4", "cut.mp4", "."):
        error = fails(capsys, "ask", str(tmp_path / name), QUESTION)
        assert name.strip(".") in error, error


def test_completion_knows_the_methods() -> None:
    from mmfast.cli.options import complete_preset, complete_spec

    assert "evs:0.5+divprune" in complete_spec("evs:0.5+div")
    shapes = ["llava-onevision-0.5b", "llava-onevision-7b", "llava-onevision-7b-2-layers"]
    assert complete_preset("llava") == shapes


def test_help_is_instant_and_imports_no_command() -> None:
    code = (
        "import sys\nfrom mmfast.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "loaded = {name for name in sys.modules if name.startswith('mmfast.')}\n"
        "assert loaded == {'mmfast.cli', 'mmfast.core', 'mmfast.core.errors'}, loaded\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    run = [sys.executable, "-c", code]
    shown = subprocess.run(run, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    for name in COMMANDS:
        assert f" {name} " in shown
    assert "Answer one question about a video or an image" in shown


def test_names_of_suites_and_grids_are_checked_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom mmfast.cli import main\n"
        "for given in ('eval --suite', 'leaderboard --grid', 'leaderboard --suites'):\n"
        "    try:\n        main([*given.split(), 'nope'])\n"
        "    except SystemExit as end:\n        assert end.code == 2\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "from mmfast.tiny import names, suites\n"
        "assert tuple(suites.SUITES) == names.SUITES\n"
    )
    run = [sys.executable, "-c", code]
    told = subprocess.run(run, check=True, cwd=ROOT, capture_output=True, text=True).stderr
    assert told.count("'nope'") == told.count("\n") == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_is_for(name: str) -> None:
    assert load(name).help and load(name).get_short_help_str()


def test_a_wrong_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bench-all")
    assert code == 2 and "No such command" in err
    assert "Did you mean 'ask'" in run(capsys, "askk")[2]


def test_a_warning_is_one_line_without_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.formatwarning
    text = cli._warning(UserWarning("a\nlong one"), UserWarning, "/deep/inside.py", 3)
    assert text == "mmfast: warning: a long one\n"
    with pytest.raises(SystemExit):
        cli.main(["methods", "--kind", "head"])
    assert warnings.formatwarning is before
    capsys.readouterr()
