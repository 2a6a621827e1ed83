"""`mmfast watch`: questions on the way, the document, Ctrl-C, saving, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from stream_tools import EMBEDDED, watcher

from mmfast.cli import main
from mmfast.cli.watch import TimedQuestion, camera_or_path, times_of
from mmfast.core.errors import MmfastError

ASSETS = Path(__file__).resolve().parents[2] / "assets"
CLIP = str(ASSETS / "clips" / "red-circle.mp4")
MODEL = str(ASSETS / "models" / "tiny-video")  # knows which way things move
QUESTION = "Which way does the red circle move?"
WAYS = {"left", "right", "up", "down"}


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one call."""
    with pytest.raises(SystemExit) as stop:
        main(["watch", *args, "--device", "cpu", "--model", MODEL])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_questions_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--fps", "4", "--ask", QUESTION, "--every", "0.75", "--ask-at", f"1.2:{QUESTION}")
    code, out, err = run(capsys, CLIP, *options)
    lines = out.splitlines()
    times = [float(line[1:].split(" s]")[0]) for line in lines]
    assert code == 0 and times == pytest.approx([0.8, 1.2, 1.5], abs=0.06), out
    assert all(line.split()[-1] in WAYS for line in lines[1:])
    assert "live tokens" in err and "0 dropped" in err


def test_a_question_whose_time_never_comes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ask", QUESTION, "--every", "60", "--ask-at", f"70:{QUESTION}", "--ask-at")
    code, out, err = run(capsys, CLIP, *options, f"1:{QUESTION}", "--json")
    assert code == 0 and len(json.loads(out)["answers"]) == 1
    notes = [line for line in err.splitlines() if line.startswith("mmfast: note:")]
    assert [note.split()[-2:] for note in notes] == [["60", "s"], ["70", "s"]], err


def test_an_address_that_is_typed_may_be_private(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "rtsp://127.0.0.1:1/x", "--allow-network")
    assert code == 2 and "private" not in err and err.count("\n") == 1


def test_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Saved at the end, gone on with in another run."""
    saved = str(tmp_path / "session")
    memory = "sink:16+window:300+retrieve:4?every=2"
    first = ("--memory", memory, "--reduce", "dtd:0.5", "--fps", "4")
    code, out, err = run(capsys, CLIP, *first, "--ask", QUESTION, "--save", saved, "--json")
    document = json.loads(out)
    keys = {"source", "answers", "events", "interrupted", "error", "saved", "stats"}
    assert code == 0 and set(document) == keys and not err
    assert document["answers"][0]["answer"] in WAYS and document["saved"] == saved
    assert document["stats"]["frames"] == document["stats"]["units"] == 8
    options = ("--restore", saved, "--tell-me-when", "a thing moves", "--threshold", "0.000001")
    code, out, err = run(capsys, CLIP, *options, "--fps", "4", "--json")
    assert code == 2 and not out and "reduce 'dtd:0.5', here None" in " ".join(err.split())
    options += ("--reduce", "dtd:0.5")
    code, out, _ = run(capsys, CLIP, *options, "--fps", "4", "--json")
    again = json.loads(out)
    assert code == 0 and again["stats"]["frames"] == 16 and again["answers"] == []
    assert len(again["events"]) == 1 and again["events"][0]["condition"] == "a thing moves"


def test_ctrl_c_ends_with_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmfast.streams.session import Session

    push, pushed = Session.push, list[Any]()

    def interrupted(self: Session, frame: Any, time: Any = None) -> int:
        pushed.append(time)
        if len(pushed) == 4:
            raise KeyboardInterrupt
        return push(self, frame, time)

    monkeypatch.setattr(Session, "push", interrupted)
    code, out, _ = run(capsys, CLIP, "--fps", "4", "--ask", QUESTION, "--json")
    document = json.loads(out)
    assert code == 0 and document["interrupted"] and document["stats"]["frames"] == 3
    assert document["answers"] == []  # whoever interrupts does not wait for answers


def test_wrong_numbers_are_refused_before_a_frame(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--max-new-tokens", "0"), ("--host-bytes", "x")
    given += (("--tell-me-when", "a red circle", "--threshold", "2"),)
    for options in given:
        code, out, err = run(capsys, CLIP, "--ask", QUESTION, *options)
        assert (code, out) == (2, "") and f"{options[-2]} " in err and options[-1] in err, err
    assert "--max-new-tokens 0 answers nothing; give at least 1" in run(capsys, CLIP, *given[0])[2]


def test_what_was_answered_is_told_where_saving_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mmfast.streams.session import Session

    def full(*_: object) -> None:
        raise MmfastError("cannot save: No space left on device")

    monkeypatch.setattr(Session, "save", full)
    given = (CLIP, "--fps", "1", "--ask", QUESTION, "--save", str(tmp_path / "new"), "--json")
    code, out, err = run(capsys, *given)
    document = json.loads(out)
    assert code == 2 and document["answers"] and document["saved"] is None
    assert "No space left" in document["error"] and "No space left" in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_folder_and_a_source_that_dies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for i, frame in enumerate(watcher(EMBEDDED).clip(3)):
        Image.fromarray(frame).save(tmp_path / f"{i}.png")
    code, out, _ = run(capsys, str(tmp_path), "--ask", QUESTION, "--json", "--fps", "24")
    assert code == 0 and json.loads(out)["stats"]["frames"] == 3
    whole = Path(CLIP).read_bytes()
    (tmp_path / "2.png").write_bytes(b"broken")
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 3])
    code, out, err = run(capsys, str(tmp_path / "cut.mp4"), "--json")
    assert code == 2 and "cut.mp4" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("nowhere.mp4",), "does not exist"),
        (("rtsp://127.0.0.1/x",), "network"),
        ((CLIP, "--memory", "widow:3"), "widow"),
        ((CLIP, "--reduce", "evz:0.5"), "evz"),
        ((CLIP, "--every", "5"), "--ask"),
        ((CLIP, "--ask", QUESTION, "--every", "0"), "--every"),
        ((CLIP, "--ask-at", "soon"), "--ask-at"),
        ((CLIP, "--threshold", "0.3"), "give --tell-me-when"),
        ((CLIP, "--yes", "left"), "give --tell-me-when"),
        ((CLIP, "--ask", " "), "empty"),
        ((CLIP, "--fps", "0"), "fps"),
        ((CLIP, "--latency", "-1"), "latency"),
        ((CLIP, "--restore", "nowhere"), "nowhere"),
        ((CLIP, "--ask", QUESTION, "--save", f"{CLIP}/session"), "name another"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], word: str) -> None:
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "" and err.startswith("mmfast: error: ") and word in err, err
    assert err.count("\n") == 1, err


def test_times_of_questions() -> None:
    assert times_of(["a"], None, []) == [TimedQuestion("a", None)]
    assert times_of(["a"], 5.0, ["2.5:b: c"]) == [
        TimedQuestion("a", 5.0, 5.0),
        TimedQuestion("b: c", 2.5),
    ]
    for bad in ("x:y", ":y", "-1:y", "nan:y", "3:"):
        with pytest.raises(MmfastError):
            times_of([], None, [bad])
    assert camera_or_path("0") == 0 and camera_or_path("0.mp4") == "0.mp4"
