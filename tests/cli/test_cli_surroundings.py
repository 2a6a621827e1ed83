"""Commands in odd surroundings: closed or full output, a signal, a folder that is gone."""

from __future__ import annotations

import errno
import getpass
import importlib.util
import io
import json
import os
import pwd
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runs import fails, run

from mmfast import cli
from mmfast.bench import registry as bench_registry
from mmfast.cli.output import JsonRows, print_answer, print_json, print_rows, say_dim
from mmfast.cli.profile import show_profile
from mmfast.planner.rates import Rates, read_rates, write_rates

ROOT = Path(__file__).resolve().parents[2]
CLIP = ROOT / "assets" / "clips" / "red-circle.mp4"


class Refusing(io.StringIO):
    """Standard output that raises at its end, as a buffered file does, or at once."""

    def __init__(self, error: OSError, at_once: bool) -> None:
        super().__init__()
        self._error, self._at_once = error, at_once

    def write(self, text: str) -> int:
        if self._at_once:
            raise self._error
        return len(text)

    def flush(self) -> None:
        raise self._error


def test_standard_files_that_are_closed_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["methods", "--kind", "cache"])
    assert not stop.value.code
    sys.stdin.close()
    sys.stdout.close()


@pytest.mark.parametrize("at_once", [True, False])
def test_output_that_is_refused_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, code in ((full, 2), (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1)):
        monkeypatch.setattr(sys, "stdout", Refusing(error, at_once))
        with pytest.raises(SystemExit) as stop:
            cli.main(["--version"])
        assert stop.value.code == code
        said = capsys.readouterr().err
        line = f"cannot be read or written: {full.strerror}\n" if error is full else ""
        assert said.endswith(line) and said.count("\n") == (error is full)
        if not at_once or error is full:  # else typer put its own file there
            sys.stdout.close()


def test_a_folder_that_is_gone_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "current folder was deleted" in fails(capsys, "methods")


def test_sigterm_ends_a_command_as_ctrl_c_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmfast.bench import registry as bench_registry

    monkeypatch.setattr(
        bench_registry, "named_rows", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    )
    code, out, err = run(capsys, "bench", "--kernels", "reducers")
    assert (code, out) == (143, "")
    assert err.strip() == "mmfast: terminated; 0 rows kept as --out names no file"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("args", [["say", "-o", "a.wav"], ["translate", "--text"]])
def test_a_byte_that_is_no_text_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    args: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    error = fails(capsys, *args, "\udcff hello")
    assert "'\\udcff', which is no character" in error and not list(tmp_path.iterdir())


def test_ctrl_c_during_the_imports_is_one_line(tmp_path: Path) -> None:
    slow = "import sys, time\nprint('here', flush=True)\ntime.sleep(60)\n"
    (tmp_path / "typer.py").write_text(slow)  # stands before the true one
    process = subprocess.Popen(
        [sys.executable, "-m", "mmfast", "methods"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "mmfast: interrupted\n")


LOADING = """
import atexit, sys, threading, types
sys.modules["mmfast.cli"] = cli = types.ModuleType("mmfast.cli")
def main():
    wait = threading.Event().wait
    threading.Thread(target=wait, name=sys.argv[1], daemon=True).start()
    atexit.register(print, "tidied")
    print("answer")
    sys.exit(eval(sys.argv[2]))
cli.main = main
class Torn:  # stands for the interpreter that is taken apart around the thread
    def __del__(self): print("torn")
cli.torn = Torn()
from mmfast.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("end", "code", "said"), [("None", 0, ""), ("3", 3, ""), ("'no file'", 1, "no file\n")]
)
def test_a_command_that_still_loads_a_model_ends_before_the_interpreter(
    end: str, code: int, said: str
) -> None:
    for thread, lines in (("mmfast-load", "answer\ntidied\n"), ("x", "answer\ntidied\ntorn\n")):
        done = subprocess.run(
            [sys.executable, "-c", LOADING, thread, end], capture_output=True, text=True, cwd=ROOT
        )
        assert (done.returncode, done.stdout, done.stderr) == (code, lines, said)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_the_output_lacks_are_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """File names may be no text, and answers in letters that a terminal does not have."""
    document = {"file": b"\xff.mp4".decode("utf-8", "surrogateescape"), "text": "ü and 左"}
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    print_json(document)
    rows = JsonRows()
    rows.add({"rows": [document]})
    rows.end()
    sys.stdout.flush()
    one, rest = written.getvalue().decode(encoding).split("\n", 1)
    assert json.loads(one) == document and json.loads(rest) == {"rows": [document]}
    monkeypatch.setattr(cli, "app", lambda **_: print(document["text"]))
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    shown = document["text"].encode(encoding, "backslashreplace")
    assert not stop.value.code and written.getvalue().endswith(shown + b"\n")


def test_a_user_without_name_and_home(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `docker run --user 12345` has it; torch, when it is imported, asks for the name."""

    def nameless(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "MMFAST_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert fails(capsys, "bench", "--preset", "nowhere")
    assert getpass.getuser()
    # One sentence instead of a traceback where a folder is needed, and none where it is not.
    told = fails(capsys, "ask", str(CLIP), "what?", "--reuse", "encoder")
    assert "set MMFAST_CACHE_DIR" in told
    assert not write_rates({}, Rates()) and read_rates({}) is None
    spec = importlib.util.find_spec("mmfast.serve.guard.errors")
    assert spec is not None and spec.loader is not None
    errors = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(errors)
    assert "/root" not in errors.scrub("no /root/x.mp4")


def test_names_with_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("clip[a].mp4", "[/x]", ":red_circle:")
    print_rows(words, [words])
    print_rows(words, [words], errors=True)
    say_dim(f"{' '.join(words)} {'long ' * 40}")
    for text, lines in zip(capsys.readouterr(), (2, 3), strict=True):
        assert text.count("\n") == lines and all(text.count(word) == lines for word in words)


def test_a_trace_keeps_a_row_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    row = SimpleNamespace(label="long " * 20, tokens_in=2, tokens_out=1, ms=1.0, peak_bytes=1)
    trace = SimpleNamespace(rows=[row], notes=[])
    figures = {"kept_tokens": 1, "visual_tokens": 2, "ttft_ms": 3.0, "doubts": None, "plan": None}
    print_answer(SimpleNamespace(text="left", note="", trace=trace, **figures), False)
    out, err = capsys.readouterr()
    assert out == "left\n" and err.count("\n") == 3


def test_what_a_profile_does_not_name_has_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    roof = {"matmul_tflop_s": 0.1, "copy_gb_s": 10.0}
    document = {"parts": [], "other_ms": 25.0, "total_ms": 100.0, "roof": roof}
    show_profile({**document, "dtype": "float32", "threads": 1, "plan": "evs:0.25"}, False)
    out, err = capsys.readouterr()
    assert "25.0%" in out and "planned: evs:0.25" in err


def test_rows_that_cannot_be_kept_are_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worked = list[str]()
    monkeypatch.setattr(bench_registry, "named_rows", lambda *_, **__: worked.append("") or [])
    (tmp_path / "file").touch()
    told = fails(capsys, "bench", "--kernels", "reducers", "--out", str(tmp_path / "file" / "x"))
    assert "--out" in told and "cannot be written" in told and not worked
    made = tmp_path / "new" / "rows.jsonl"
    assert run(capsys, "bench", "--kernels", "reducers", "--out", str(made))[0] == 0
    assert worked and not made.exists() and made.parent.is_dir()


def test_no_command_writes_over_what_it_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sound, picture, link = (tmp_path / name for name in ("said.wav", "seen.png", "link.wav"))
    sound.write_bytes(b"RIFF")
    picture.write_bytes((ROOT / "assets" / "images" / "kept.png").read_bytes())
    link.symlink_to(sound)
    before = picture.read_bytes()
    for command in (
        ("codec", str(sound), "-o", str(sound)),
        ("codec", str(sound), "-o", str(link)),
        ("talk", str(sound), "-o", str(link)),
        ("talk", str(link), "--clip", str(CLIP), "-o", str(sound)),
        ("ask", str(picture), "what?", "--save-overlay", str(picture)),
    ):
        assert "is the file that is read" in fails(capsys, *command), command
    assert sound.read_bytes() == b"RIFF" and picture.read_bytes() == before
