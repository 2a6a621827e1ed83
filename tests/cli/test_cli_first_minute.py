"""The first minute at the command line: static answers without torch, errors that help, Ctrl-C."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from cli_runs import CLIP, QUESTION, ROOT, fails, run

from mmfast.cli import COMMANDS
from mmfast.core import registry
from mmfast.core.registry import PACKAGES, Method, get, listed, methods, unregister
from mmfast.core.spec import check_names, parse

# Refuses the heavy packages; a command that needs one of them fails with a traceback.
GUARD = """
import sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "PIL", "av"):
            raise RuntimeError(f"{name} is imported")
sys.meta_path.insert(0, Guard())
from mmfast.cli import main
main(sys.argv[1:])
"""


def guarded(*args: str, limit: float = 1.5) -> tuple[int, str, str]:
    """Run a command in a process without heavy packages, in less than `limit` processor seconds."""
    best = float("inf")
    for _ in range(3):  # a busy machine adds to processor time, too
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", GUARD, *args], cwd=ROOT, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, sum(after[:2]) - sum(before[:2]))
        if best < limit:
            break
    assert best < limit, best
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def _columns(method: Method) -> dict[str, object]:
    named = ("stream", "rough")  # functions of a method, of which the listing knows the name
    names = [f.name for f in fields(Method) if f.name not in ("fn", *named)]
    row = {name: getattr(method, name) for name in names} | {"knobs": dict(method.knobs)}
    row["function"] = (method.fn.__module__, method.fn.__name__)
    row["signature"] = [p.replace(annotation="") for p in _parameters(method.fn)]
    functions = {name: getattr(method, name) for name in named}
    return row | {name: fn and fn.__name__ for name, fn in functions.items()}


def _parameters(function: object) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", PACKAGES)
def test_the_static_registry_equals_the_imported_one(kind: str) -> None:
    imported, rows = methods(kind), registry.Methods()
    registry._read(PACKAGES[kind], rows)
    assert [_columns(rows[key]) for key in sorted(rows)] == [_columns(m) for m in imported]
    assert [m.fn is n.fn for m, n in zip(listed(kind), imported, strict=True)]


def test_a_declaration_that_text_cannot_tell_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a default names may be made by other code; then the rows are those of an import."""
    home = tmp_path / "core"
    (tmp_path / "reducers").mkdir()
    (tmp_path / "reducers" / "odd.py").write_text(
        '@register("odd", needs=("x",))\ndef odd(tokens, budget, *, k=LATER):\n    """Odd one."""\n'
    )
    monkeypatch.setattr(registry, "__file__", str(home / "registry.py"))
    monkeypatch.setattr(registry, "_LOADED", set())
    monkeypatch.setattr(registry, "import_all", lambda package: None)
    assert [m.name for m in listed("reducer")] == [m.name for m in methods("reducer")]
    text = '"""Odd one."""'
    (tmp_path / "reducers" / "odd.py").write_text(
        f"LATER = 3\n@register('odd')\ndef odd(tokens, budget, *, k=LATER):\n    {text}\n"
        f"def even(tokens, budget, *, j=2):\n    {text}\npolicy('even', needs=())(even)\n"
    )
    rows = registry.Methods()
    registry._read("mmfast.reducers", rows)
    assert (rows["reducer", "odd"].knobs, rows["reducer", "odd"].needs) == ({"k": 3}, ("x",))
    even = rows["cache", "even"]
    assert (even.knobs, even.needs, even.sites) == ({"j": 2}, (), ("kv",))


def test_methods_of_a_session_and_of_plugins_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    @registry.register("of_this_test")
    def of_this_test(tokens: object, budget: int) -> None:
        """Nothing."""

    try:
        assert "of_this_test" in {m.name for m in listed("reducer")}
        check_names(["of_this_test:0.5"])
    finally:
        unregister("of_this_test")
    monkeypatch.setattr(registry, "_plugins", lambda path: ("a plugin",))
    monkeypatch.setattr(registry, "methods", lambda kind=None: ["all of the import"])
    assert listed() == ["all of the import"]


@pytest.mark.parametrize("kind", ["reducer", "cache"])
def test_static_checks_say_what_the_parser_says(kind: str) -> None:
    known = [m for each in (kind, *registry.NAMED_TOO.get(kind, ())) for m in listed(each)]
    for spec in (
        "evz:0.5",
        "evs:2.0",
        "evs",
        "evs@vit:0.5",
        "evs:0.5?k=1",
        "snapkw:8",
        "query_compressor:0.5",
        "a+b",
        "sink:0",
    ):
        texts = []
        for among in ((), known):
            try:
                texts.append(str(parse(spec, kind, among)))
            except Exception as error:
                texts.append(f"{type(error).__name__} {error}")
        assert texts[0] == texts[1]


def test_examples_of_all_methods_parse() -> None:
    for method in methods():
        if method.kind != "head":
            assert [s.method for s in parse(method.example, method.kind)] == [method]
    assert get("evs").takes.startswith("share") and "bits" in get("quant", "cache").takes


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_needs_no_torch(name: str) -> None:
    code, out, _ = guarded(name, "--help")
    assert code == 0 and "--help" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ask", "nofile.mp4", "q"], ["nofile.mp4", "does not exist"]),
        (["ask", ".", "q"], ["directory"]),
        (["plan", "nofile.mp4"], ["nofile.mp4", "does not exist"]),
        (["talk", "nofile.wav", "-o", "out.wav"], ["nofile.wav", "does not exist"]),
        (["ask", "README.md", "q"], ["neither an image nor a video"]),
        (["ask", CLIP, "q", "--bogus"], ["--bogus", "(see mmfast ask --help)"]),
        (
            ["ask", CLIP, "q", "--reduc", "evs"],
            ["did you mean '--reduce'", "see mmfast ask --help"],
        ),
        (["ask", CLIP, "q", "--reduce"], ["--reduce", "(see mmfast ask --help)"]),
        (["ask", CLIP], ["question", "(see mmfast ask --help)"]),
        (["ask", CLIP, "q", "--bogus"], ["unknown option '--bogus'; choices: --attn"]),
        (["ask", CLIP, "q", "--reduce", "evz:0.5"], ["evz", "did you mean 'evs'"]),
        (["ask", CLIP, "q", "--cache", "snapkw:64"], ["did you mean 'snapkv'"]),
        (["ask", CLIP, "q", "--compare"], ["--compare"]),
        (["ask", CLIP, "q", "--compare", "evz:0.5"], ["did you mean 'evs'"]),
        (["ask", CLIP, "q", "--compare", "evs:0.5", "--check"], ["leave out --check"]),
        (["bench", "--fram", "3"], ["did you mean '--frames'", "(see mmfast bench --help)"]),
        (["methods", "evz"], ["did you mean 'evs'"]),
        (["methods", "--sort", "acuracy"], ["did you mean 'accuracy'"]),
        (["methods", "--for", "vidio"], ["did you mean 'video'"]),
        (["methods", "--kind", "reduce"], ["did you mean 'reducer'"]),
        (["methods", "evs", "--for", "video"], ["leave them"]),
        (["eval", "--reduce", "evz:0.5"], ["did you mean 'evs'"]),
        (["eval", "--seed", "-1"], ["--seed -1 is no seed"]),
        (["eval", "--suite", "image", "--length", "9"], ["image takes no --length"]),
        (["serve", "--dry-run", "--memory", "potato"], ["--memory 'potato' is no size"]),
        (["serve", "--dry-run", "--memory", "0"], ["--memory '0' holds no answer"]),
        (["serve", "--dry-run", "--reuse-memory", "much"], ["--reuse-memory 'much' is no size"]),
        (["serve", "--config", "nowhere.toml"], ["read: No such file or directory; give a TOML"]),
        (["frobnicate"], ["frobnicate", "(see mmfast --help)"]),
    ],
)
def test_errors_come_before_torch(args: list[str], words: list[str]) -> None:
    code, out, err = guarded(*args)
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_methods_in_full_without_torch() -> None:
    code, out, _ = guarded("methods")
    assert code == 0 and {"evs", "snapkv", "depth"} <= {
        line.split()[0] for line in out.splitlines()
    }
    code, out, _ = guarded("methods", "divprune")
    words = ("2503.02175", "parity", "False", "pre", "share or number of tokens", "signals")
    assert code == 0 and all(word in out for word in words)
    for line in ('mmfast.attach(model, reduce="divprune:0.25")', "--reduce divprune:0.25"):
        assert line in out
    page = json.loads(guarded("methods", "snapkv", "--json")[1])
    assert page["knobs"] == {"window": 32, "kernel": 7, "pool": "max", "every": 0}
    assert page["sites"] == ["kv"] and page["example"]["command"].endswith("--cache snapkv:0.5")
    both = json.loads(guarded("methods", "fastkv", "--json")[1])
    assert {both["kind"], both["also"][0]["kind"]} == {"reducer", "cache"}
    assert (
        json.loads(guarded("methods", "fastkv", "--kind", "cache", "--json")[1])["kind"] == "cache"
    )


@pytest.mark.parametrize(
    ("media", "file"), [("video", "video"), ("image", "image"), ("kv", "cache")]
)
def test_methods_sorted_by_what_was_measured(media: str, file: str) -> None:
    field = "cache" if media == "kv" else "reduce"
    lines = (ROOT / "assets" / "results" / f"eval-{file}.jsonl").read_text().splitlines()
    scores = {row[field]: row["accuracy"] for row in map(json.loads, lines)}
    rows = json.loads(guarded("methods", "--sort", "accuracy", "--for", media, "--json")[1])
    kind = "cache" if media == "kv" else "reducer"
    assert {row["name"] for row in rows} == {m.name for m in methods(kind)}
    for row in rows:
        for budget, figures in row["measured"].items():
            assert figures["accuracy"] == scores[f"{row['name']}:{budget}"]
    at = [row["measured"]["0.1"]["accuracy"] for row in rows if "0.1" in row["measured"]]
    assert at == sorted(at, reverse=True) and len(at) >= 7
    known = ["0.1" in row["measured"] for row in rows]
    assert known == sorted(known, reverse=True)  # what was not measured comes last
    out = guarded("methods", "--for", media)[1].splitlines()
    shown = [line.split()[0] for line in out]
    assert shown[2:] == [row["name"] for row in rows] and f"{at[0]:.3g}" in out[2]
    fast = json.loads(guarded("methods", "--sort", "ttft", "--for", media, "--json")[1])
    ms = [row["measured"]["0.1"]["ttft_ms"] for row in fast if "0.1" in row["measured"]]
    assert ms == sorted(ms)


def test_serve_dry_run_tells_what_would_be_served() -> None:
    args = ("serve", "--dry-run", "--reduce", "evs:0.25", "--port", "8123", "--max-text", "99")
    code, out, _ = guarded(*args, "--api-key", "sk-secret", "--engine", "ray")
    assert code == 0 and "sk-secret" not in out
    lines = {line.split()[0]: line for line in out.splitlines()}
    for name, word in {
        "model": "tiny-scenes", "reduce": "evs:0.25", "cache": "all keys", "engine": "ray",
        "workers": "1 decode", "slots": "16", "URL": "http://127.0.0.1:8123/v1",
        "max_text": "99", "api_keys": "hidden",
    }.items():  # fmt: skip
        assert word in lines[name], out
    assert "2 with the whole engine" in guarded(*args, "--engine", "ray", "--replicas", "2")[1]
    assert "this process" in guarded(*args)[1]
    assert json.loads(guarded(*args, "--json")[1])["max_text"] == 99
    assert guarded("serve", "--json")[0] == 2
    assert "did you mean 'evs'" in guarded("serve", "--dry-run", "--reduce", "evz:0.5")[2]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--model", "nope", "model directory 'nope' does not exist"),
        ("--model", "a/b/c", "model directory 'a/b/c' does not exist"),
        ("--model", "mmfast", "'mmfast' holds no config.json"),
        ("--model", ".", "'.' holds no config.json"),
        ("--model", "/", "'/' holds no config.json"),
        ("--default-tokens", "5000", "default_tokens=5000 is more than max_tokens=1024"),
        ("--speech", "./nope", "model directory './nope' does not exist"),
        ("--listener", "nope", "model directory 'nope' does not exist"),
        ("--talker", "nope", "model directory 'nope' does not exist"),
        ("--translator", "nope", "model directory 'nope' does not exist"),
        ("--decode", "draft:nope", "model directory 'nope' does not exist"),
        ("--decode", "exit:nope", "'exit:nope' names no file"),
        ("--dtype", "float128", "unknown dtype 'float128'"),
    ],
)
def test_serve_refuses_what_is_not_there_before_anything_is_loaded(
    option: str, value: str, told: str
) -> None:
    code, out, err = guarded("serve", "--dry-run", option, value)
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1


def test_serve_knows_models_by_name_by_hub_id_and_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "of mine"
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    for name in ("tiny-video", "Qwen/Qwen2.5-VL-7B-Instruct", "~/of mine", "~/lora"):
        code, out, _ = guarded("serve", "--dry-run", "--json", "--model", name)
        shown = name.replace("~", str(tmp_path))
        assert code == 0 and json.loads(out)["model"] == shown
    assert guarded("serve", "--dry-run", "--speech", "tiny-speech")[0] == 0
    assert guarded("serve", "--dry-run", "--translator", "tiny-interleaved")[0] == 0


def _interrupt(args: list[str], ready: Path, size: int, folder: Path) -> tuple[int, str]:
    """Start a command, send it Ctrl-C once `ready` has `size` bytes, return code and errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mmfast", *args],
        cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not (ready.exists() and ready.stat().st_size >= size):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        while process.poll() is None:  # one that meets a destructor is lost
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        return process.returncode, process.communicate()[1]
    finally:
        process.kill()


@pytest.mark.slow
def test_ctrl_c_tells_of_the_rows_of_an_evaluation(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    specs = [part for share in range(1, 60) for part in ("--reduce", f"uniform:{share / 100}")]
    code, err = _interrupt(["eval", "--n", "40", "--out", str(out), *specs], out, 1, tmp_path)
    rows = out.read_text().splitlines()
    assert code == 130 and 1 <= len(rows) < 60
    assert f"mmfast: interrupted; {len(rows)} rows kept in {out}" in err and "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_tells_of_the_answers_of_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(400):
        (tmp_path / "clips").mkdir(exist_ok=True)
        (tmp_path / "clips" / f"{number:03}.mp4").write_bytes(Path(CLIP).read_bytes())
    out = tmp_path / "answers.parquet"
    args = ["batch", str(tmp_path / "clips"), "-q", QUESTION, "-o", str(out), "--engine", "inproc"]
    base = out.with_name("answers.parquet.parts")  # empty tables take 12 KB
    code, err = _interrupt([*args, "--frames", "2"], base, 20_000, tmp_path)
    assert code == 130 and "Traceback" not in err, err
    kept = int(err.rpartition("interrupted; ")[2].split()[0])
    assert f"{kept} answers kept in {out}.parts, run again to resume" in err
    import sqlite3

    with sqlite3.connect(f"{out}.parts") as rows:
        assert rows.execute("SELECT count(*) FROM answers").fetchone() == (kept,)
    rows.close()


def test_an_interrupted_command_exits_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmfast.bench import registry as bench_registry

    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_registry, "named_rows", stop)
    code, out, err = run(capsys, "bench", "--kernels", "reducers")
    assert (code, out) == (130, "")
    assert err.strip() == "mmfast: interrupted; 0 rows kept as --out names no file"


@pytest.mark.parametrize("whole", [2, 4])
def test_an_interrupted_measurement_keeps_whole_rounds(
    whole: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mmfast.bench import timing

    calls, out, interleave = [0], tmp_path / "rows.jsonl", timing.interleave

    def interrupted(jobs: dict, rounds: int, tick: object, *rest: object, **more: object) -> object:
        def raises() -> None:
            calls[0] += 1
            if calls[0] > whole * len(jobs):
                raise KeyboardInterrupt

        return interleave(jobs, rounds, raises, *rest, **more)

    monkeypatch.setattr(timing, "interleave", interrupted)
    args = ("bench", "--reduce", "uniform:0.25", "--frames", "2", "--out", str(out))
    code, text, err = run(capsys, *args, "--iters", "9")
    assert code == 130
    if whole < timing.FEWEST:
        assert not out.exists() and f"; 0 rows kept in {out}" in err and not text
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert {row["n"] for row in rows} == {4} and "uniform:0.25" in text
        assert f"mmfast: interrupted; {len(rows)} rows kept in {out}" in err


def test_a_wrong_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for option, near in {
        "--qualty": "--quality",
        "--frame": "--frames",
        "--cach": "--cache",
    }.items():
        assert f"did you mean '{near}'" in fails(capsys, "ask", CLIP, QUESTION, option, "1")
