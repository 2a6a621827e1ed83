"""`mmfast batch` without a cluster: rows, resuming, damaged files, what a user can get wrong."""

from __future__ import annotations

import functools
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

pq = pytest.importorskip("pyarrow.parquet")

from mmfast.cli import main  # noqa: E402
from mmfast.core.errors import MmfastError  # noqa: E402
from mmfast.pipelines import pipeline  # noqa: E402
from mmfast.serve.batch import store  # noqa: E402
from mmfast.serve.batch.job import (  # noqa: E402
    BatchJob,
    Medium,
    differences,
    file_hash,
    find_media,
    read_questions,
)
from mmfast.serve.batch.run import (  # noqa: E402  # noqa: E402
    Answerer,
    BatchOptions,
    Task,
    blank,
    run_batch,
)
from mmfast.serve.batch.store import (  # noqa: E402
    Row,
    RowStore,
    read,
    table_of,
    write,
)
from mmfast.tiny.video.clips import write as write_clip  # noqa: E402

QUESTION, SECOND = "What colour is the square?", "How many shapes are there?"
SHORT = ["--frames", "2", "--max-new-tokens", "2", "--engine", "inproc"]


def _clip(file: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_clip(file, rng.integers(0, 255, (2, 32, 32, 3), np.uint8))
    return file


def test_a_method_that_no_file_could_have_ends_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "o.parquet"
    for spec, model, told in (
        ("compllm:2", "tiny-video", "reads text alone, and Llava"),
        ("compllm:2", "tiny-text", "give one of images or video"),
    ):
        given = ["--reduce", spec, "--model", model, "-o", str(out), *SHORT]
        with pytest.raises(SystemExit) as left:
            main(["batch", str(folder), "-q", QUESTION, *given])
        error = capsys.readouterr().err.splitlines()
        assert left.value.code == 2 and told in error[-1] and not out.exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three clips, one of them twice, a picture, and files that are no media."""
    where = tmp_path / "corpus"
    _clip(where / "b.mp4", 1)
    _clip(where / "day 1" / "c.MP4", 2)
    (where / "a.mp4").write_bytes((where / "b.mp4").read_bytes())
    Image.fromarray(np.full((32, 32, 3), 90, np.uint8)).save(where / "day 1" / "picture.png")
    (where / "notes.txt").write_text("none of them")
    (where / ".hidden.mp4").write_bytes(b"neither")
    return where


def rows_of(file: Path) -> list[Row]:
    """What a result holds."""
    rows: list[Row] = pq.read_table(file).to_pylist()
    return rows


def batch(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one call."""
    with pytest.raises(SystemExit) as stop:
        main(["batch", *map(str, args)])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_rows_are_the_pipelines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.txt").write_text(f"\n  {SECOND}\n\n")
    (folder / "broken.mp4").write_bytes(b"no clip at all")
    out = tmp_path / "new" / "answers.parquet"
    options = ["-q", QUESTION, "--questions", tmp_path / "more.txt", "-o", out, "--json"]
    options += ["--reduce", "evs:0.5", "--batch-size", "2"]
    code, said, _ = batch(capsys, folder, *options, *SHORT)
    document = json.loads(said)
    assert code == 1  # one file cannot be read
    assert (document["files"], document["answers"], document["failed"]) == (5, 10, 2)
    rows = rows_of(out)
    told = [(each["file"], each["question"]) for each in document["errors"]]
    assert told == [("broken.mp4", QUESTION), ("broken.mp4", SECOND)]
    assert all("neither an image nor a video" in each["reason"] for each in document["errors"])
    code, said, err = batch(capsys, folder, *[o for o in options if o != "--json"], *SHORT)
    assert code == 1 and said == f"{out}\n"
    lines = [line for line in err.splitlines() if line.startswith("broken.mp4")]
    assert len(lines) == 2 and all("neither an" in line for line in lines)
    names = ["a.mp4", "b.mp4", "broken.mp4", "day 1/c.MP4", "day 1/picture.png"]
    assert [(r["path"], r["question"]) for r in rows] == [
        (name, question) for name in names for question in (QUESTION, SECOND)
    ]
    assert {r["path"] for r in rows if r["error"]} == {"broken.mp4"}
    assert "neither an image nor a video" in rows[4]["error"] and rows[4]["answer"] is None
    assert rows[0]["content_hash"] == rows[2]["content_hash"] != rows[6]["content_hash"]
    video = pipeline("video-qa", reduce="evs:0.5", frames=2, max_new_tokens=2)
    image = pipeline("image-qa", reduce="evs:0.5", max_new_tokens=2)
    for row in (r for r in rows if not r["error"]):
        kind = "image" if row["path"].endswith("png") else "video"
        answer = (image if kind == "image" else video)(folder / row["path"], row["question"])
        assert (row["answer"], row["kind"]) == (answer.text, kind)
        assert (row["visual_tokens"], row["kept_tokens"]) == (
            answer.visual_tokens,
            answer.kept_tokens,
        )
        assert row["reduce"] == "evs:0.5" and row["model"] == "embedded" and row["frames"] == 2
        assert 0 < row["ttft_ms"] <= row["ms"]
    code, said, _ = batch(capsys, folder, *options, *SHORT)  # nothing is left to do
    assert code == 1 and json.loads(said)["before"] == 10 and rows_of(out) == rows


class Fake:
    """Stands for the model: counts what it is asked, and stops the run when told to."""

    asked: list[tuple[str, str]]
    stop_at: int

    def __init__(self, job: BatchJob) -> None:
        self._job = job

    def __call__(self, tasks: list[Task]) -> list[Row]:
        rows = []
        for medium, question in tasks:
            if len(Fake.asked) == Fake.stop_at:
                raise KeyboardInterrupt
            Fake.asked.append((medium.path, question))
            digest = file_hash(medium.file)
            row = blank(self._job, medium, question) | {"content_hash": digest}
            bad = medium.path.endswith("bad.mp4")
            rows.append(row | ({"error": "bad"} if bad else {"answer": f"about {medium.path}"}))
        return rows


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    Fake.asked, Fake.stop_at = [], -1
    monkeypatch.setattr("mmfast.serve.batch.run.Answerer", Fake)
    monkeypatch.setattr(store, "ROWS", 4)
    return Fake


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Forty files; what is in them does not matter to a fake model."""
    where = tmp_path / "many"
    where.mkdir()
    for number in range(40):
        (where / f"{number:02d}.mp4").write_bytes(bytes([number]) * (number + 1))
    return where


WAY = BatchOptions(engine="inproc")


def _job(folder: Path, **options: Any) -> BatchJob:
    return BatchJob(folder, (QUESTION, SECOND), **options)


def test_interrupted_again_and_again(many: Path, tmp_path: Path, fake: type[Fake]) -> None:
    out, runs = tmp_path / "a.parquet", 0
    while not out.exists():
        fake.stop_at = len(fake.asked) + 11
        runs += 1
        try:
            run_batch(_job(many), out, WAY)
        except KeyboardInterrupt:
            assert not out.exists()
    assert runs == 8 and len(fake.asked) == len(set(fake.asked)) == 80  # nothing twice
    rows = rows_of(out)
    assert [(r["path"], r["question"]) for r in rows] == sorted(
        fake.asked, key=lambda key: (key[0], key[1] == SECOND)
    )
    assert not list(tmp_path.glob("a.parquet.*")) and not list(tmp_path.glob(".*"))


STEPS = ("execute", "write_table", "fsync", "replace", "unlink")


class _Database(sqlite3.Connection):
    """A connection whose `execute` can be replaced."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        return super().execute(*args)


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_every_step_of_writing(
    many: Path, tmp_path: Path, fake: type[Fake], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop dead before the n-th call of a step, for every n, and go on: no row lost or twice."""
    few = BatchOptions("inproc", limit=6)
    holders = {
        "execute": (_Database, "execute"),
        "write_table": (store.pq, "write_table"),
        "fsync": (os, "fsync"),
    }
    holder, name = holders.get(step, (Path, step))
    real = getattr(holder, name)
    before, kills = SimpleNamespace(left=0), 0
    connect = functools.partial(sqlite3.connect, factory=_Database)
    monkeypatch.setattr(store.sqlite3, "connect", connect)

    def dying(*args: Any, **options: Any) -> Any:
        before.left -= 1
        if before.left == 0:
            raise SystemError("dead")  # nothing that any of our code catches
        return real(*args, **options)

    for number in range(1, 200):
        out = tmp_path / f"{step}{number}.parquet"
        fake.asked = []
        before.left = number
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, dying)
            patch.setattr(RowStore, "__exit__", lambda self, *_: self._db.close())  # rolls back
            try:
                run_batch(_job(many), out, few)
                died = False
            except SystemError:
                died = True
        kills += died
        done = run_batch(_job(many), out, few)
        assert (done.answers, done.failed) == (12, 0)
        rows = rows_of(out)
        assert len(rows) == len({(r["path"], r["question"]) for r in rows}) == 12
        assert not list(tmp_path.glob(f"{out.name}.parts"))
        if not died:
            break
    assert kills >= {"execute": 25, "fsync": 2}.get(step, 1) and not died


def test_ctrl_c_in_a_commit_tells_of_what_it_commits(
    many: Path, tmp_path: Path, fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, told, real = tmp_path / "a.parquet", list[int](), RowStore.add

    def interrupted(self: RowStore, rows: Any) -> None:
        real(self, rows)
        if len(told) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowStore, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_batch(_job(many), out, WAY, tick=lambda done, total: told.append(done))
    with sqlite3.connect(f"{out}.parts") as rows:
        assert rows.execute("SELECT count(*) FROM answers").fetchone() == (told[-1],)
    rows.close()


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_damaged_database(many: Path, tmp_path: Path, fake: type[Fake], damage: str) -> None:
    out, said = tmp_path / "a.parquet", []
    fake.stop_at = 30
    with pytest.raises(KeyboardInterrupt):
        run_batch(_job(many), out, WAY)
    state = tmp_path / "a.parquet.parts"
    data = state.read_bytes()  # damaged as no kill of ours leaves it
    state.write_bytes(data[: len(data) // 2] if damage == "cut" else b"no database" * 1000)
    fake.stop_at = -1
    done = run_batch(_job(many), out, WAY, warn=said.append)
    assert len(said) == 1 and state.name in said[0] and "again" in said[0]
    assert done.answers == len(rows_of(out)) == 80 and done.before == 0
    assert [p.name for p in tmp_path.glob("a.parquet.*")] == ["a.parquet.parts.damaged"]


def test_killed_by_the_system(many: Path, tmp_path: Path) -> None:
    """A process that is killed in the middle of a commit; the next run goes on from its rows."""
    out, before = tmp_path / "a.parquet", 0
    script = Path(__file__).resolve().parents[2] / "support" / "serve" / "batch_killed.py"
    command = [sys.executable, str(script), str(many), str(out), QUESTION]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as runs:
        assert runs.stdin and runs.stdout
        for statement in (12, 13, 14, 15, 30):
            print(statement, file=runs.stdin, flush=True)
            assert runs.stdout.readline() == f"{-signal.SIGKILL}\n"
            assert not out.exists()
            with RowStore(out, BatchJob(many, (QUESTION,)).identity()) as kept:
                assert len(kept.done) % 4 == 0 and len(kept.done) >= before
                before = len(kept.done)
        runs.stdin.close()
    assert before > 0


def test_rows_that_cannot_be_written_leave_no_transaction_open(many: Path, tmp_path: Path) -> None:
    job = _job(many)
    medium, *_ = find_media(many, None, None, tmp_path / "a.parquet")
    with RowStore(tmp_path / "a.parquet", job.identity()) as kept:
        bad, good = blank(job, medium, "\udcff"), blank(job, medium, QUESTION)
        kept.add([bad])
        for _ in range(2):  # the same error again, not one of the database's
            with pytest.raises(MmfastError, match=r"cannot be written \(.*surrogates"):
                kept.flush()
        kept._rows = [good]
        kept.flush()
        assert len(kept.done) == 1


def test_changed_files_and_errors(many: Path, tmp_path: Path, fake: type[Fake]) -> None:
    out = tmp_path / "a.parquet"
    (many / "bad.mp4").write_bytes(b"bad")
    assert run_batch(_job(many), out, WAY).failed == 2
    fake.asked = []
    (many / "new.mp4").write_bytes(b"new")
    (many / "03.mp4").write_bytes(b"other content")
    os.utime(many / "04.mp4", ns=(1, 1))  # the same content, written again
    (many / "05.mp4").unlink()  # its rows stay
    done = run_batch(_job(many), out, WAY)
    assert sorted({path for path, _ in fake.asked}) == ["03.mp4", "new.mp4"]
    assert (done.files, done.failed, len(rows_of(out))) == (41, 2, 84)
    fake.asked = []
    assert run_batch(_job(many), out, BatchOptions("inproc", retry_errors=True)).failed == 2
    assert [path for path, _ in fake.asked] == ["bad.mp4"] * 2 and len(rows_of(out)) == 84
    assert run_batch(_job(many), out, BatchOptions("inproc", pattern="1*", limit=3)).answers == 6


def test_another_job_is_refused(many: Path, tmp_path: Path, fake: type[Fake]) -> None:
    out = tmp_path / "a.parquet"
    fake.stop_at = 20
    with pytest.raises(KeyboardInterrupt):  # half done: the database names its job, too
        run_batch(_job(many), out, WAY)
    fake.stop_at = -1
    for finished in (False, True):
        others = [_job(many, reduce="evs:0.5"), _job(many, frames=4), BatchJob(many, (QUESTION,))]
        for other in others:
            with pytest.raises(MmfastError, match=r"another job.*--no-resume"):
                run_batch(other, out, WAY)
        if not finished:
            run_batch(_job(many, batch_size=3, device="cpu"), out, WAY)  # no other job
    assert len(fake.asked) == 80
    assert (
        run_batch(BatchJob(many, (QUESTION,)), out, BatchOptions("inproc", resume=False)).before
        == 0
    )
    assert len(rows_of(out)) == 40


def test_one_run_at_a_time(many: Path, tmp_path: Path, fake: type[Fake]) -> None:
    out = tmp_path / "a.parquet"
    with (
        RowStore(out, _job(many).identity()),
        pytest.raises(MmfastError, match="another run writes"),
    ):
        run_batch(_job(many), out, WAY)
    assert not out.with_name("a.parquet.parts").exists()
    run_batch(_job(many), out, WAY)


def test_weights_tell_models_apart(many: Path, tmp_path: Path) -> None:
    first = _job(many, model=str(tmp_path)).identity()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert first["weights"] != _job(many, model=str(tmp_path)).identity()["weights"]
    assert _job(many, model="owner/name").identity()["weights"] == "owner/name"
    named, embedded = (_job(many, model=name).identity() for name in ("tiny-scenes", None))
    assert named["weights"] == embedded["weights"] != "tiny-scenes"


def test_questions_of_an_editor_on_windows(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_bytes("\ufeffHow many?\r\n\r\nWhere? \r\n".encode())
    assert read_questions([], file) == ("How many?", "Where?")


def test_only_a_new_line_parts_questions(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text("Is \u2028 read?\nNext\x85line?\n", encoding="utf-8")
    assert read_questions([], file) == ("Is \u2028 read?", "Next\x85line?")


def test_drafts_tell_runs_apart_where_they_change_answers(many: Path) -> None:
    plain, same, other = (
        _job(many, decode=spec).identity() for spec in (None, "draft:x?learn=1e-4", "bild:x")
    )
    assert plain == same
    assert differences(plain, other) == "decode was 'None', is 'bild:x'"


def test_usage(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("no media")
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(table_of([]), foreign)
    ask = ["-q", QUESTION]
    cases: list[tuple[list[object], str]] = [
        ([tmp_path / "nowhere", *ask], "does not exist"),
        ([folder / "a.mp4", *ask], "not a directory"),
        ([tmp_path / "empty", *ask], "is empty"),
        ([tmp_path / "text", *ask], "--pattern"),
        ([folder, *ask, "--pattern", "*.mkv"], "*.mkv"),
        ([folder], "--question"),
        ([folder, *ask, *ask], "twice"),
        ([folder, "-q", " "], "empty"),
        ([folder, "-q", "wh\udcffat?"], "no character"),
        ([folder, "--questions", tmp_path / "latin"], "UTF-8"),
        ([folder, "--questions", tmp_path / "none.txt"], "No such file"),
        ([folder, *ask, "--reduce", "evz:0.5"], "did you mean 'evs'"),
        ([folder, *ask, "--cache", "snapkw:64"], "snapkv"),
        ([folder, *ask, "--frames", "0"], "frames"),
        ([folder, *ask, "--batch-size", "0"], "batch_size"),
        ([folder, *ask, "--workers", "0"], "workers"),
        ([folder, *ask, "--workers", "2"], "workers=2 needs the engine ray"),
        ([folder, *ask, "--address", "auto"], "address=auto needs the engine ray"),
        ([folder, *ask, "--limit", "0"], "limit"),
        ([folder, *ask, "--engine", "rey"], "did you mean 'ray'"),
        ([folder, *ask, "--model", "./nowhere"], "does not exist"),
        ([folder, *ask, "--device", "tpu"], "tpu"),
        ([folder, *ask, "-o", tmp_path], "is a directory"),
        ([folder, *ask, "-o", tmp_path / "usage.csv"], "'usage.parquet'"),
        ([folder, *ask, "-o", foreign], "not written by mmfast batch"),
        ([folder, *ask, "-o", folder / "a.mp4" / "x.parquet"], "cannot be written"),
        ([folder, *ask, "-o", folder / "a.mp4", "--no-resume"], "holds no answers"),
    ]
    for arguments, words in cases:
        place = [] if "-o" in arguments else ["-o", tmp_path / "usage.parquet"]
        engine = [] if "--engine" in arguments else ["--engine", "inproc"]
        code, said, error = batch(capsys, *arguments, *place, *engine)
        assert (code, said) == (2, ""), arguments
        assert error.startswith("mmfast: error: ") and error.count("\n") == 1, error
        assert words in error, error
    assert not list(tmp_path.glob("usage*")) and foreign.exists()


def test_without_the_extra(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, error = batch(capsys, folder, "-q", QUESTION, "-o", folder / "x.parquet")
    assert code == 2 and 'pip install "mmfast[ray]"' in error and "inproc" in error
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in [n for n in sys.modules if n.startswith("mmfast.serve.batch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mmfast.serve.batch.run")
    code, _, error = batch(capsys, folder, "-q", QUESTION, *SHORT)
    assert code == 2 and 'needs pyarrow: pip install "mmfast[ray]"' in error


def test_names_that_are_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"clip-\xff.mp4")
    try:
        (tmp_path / name).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system takes text alone")
    (found,) = find_media(tmp_path, None, None, tmp_path / "out")
    assert found.path == r"clip-\xff.mp4" and Path(found.file).read_bytes() == b"x"
    (tmp_path / "gone.mp4").symlink_to(tmp_path / "nowhere")
    media = find_media(tmp_path, None, None, tmp_path / "out")
    write(tmp_path / "t.parquet", table_of([blank(_job(tmp_path), m, "q") for m in media]), {})
    assert [r["path"] for r in read(tmp_path / "t.parquet")[0].to_pylist()] == [
        r"clip-\xff.mp4",
        "gone.mp4",
    ]


def test_a_bug_in_a_method_is_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = BatchJob(folder, (QUESTION,), frames=2, max_new_tokens=2, batch_size=2)
    answer = Answerer(job)

    def broken(files: list[str], questions: list[str]) -> None:
        raise RuntimeError(f"line\nbreak {len(files)}")

    monkeypatch.setattr(answer, "_pipe", lambda kind: broken)
    media = [Medium(str(folder / name), name, 1, 1) for name in ("a.mp4", "b.mp4", "gone.mp4")]
    rows = answer([(medium, QUESTION) for medium in media])
    assert [r["error"] for r in rows[:2]] == ["RuntimeError: line break 1"] * 2
    assert "does not exist" in rows[2]["error"] and rows[2]["content_hash"] is None


def test_bench(fake: type[Fake]) -> None:
    from mmfast.bench.registry import named_rows
    from mmfast.bench.suites.serve.chats import batch

    (row,) = batch(lambda label, done, total: None, (("inproc", 1),), count=6, rounds=1)
    assert row["clips"] == 6 and row["speedup"] == 1.0 and row["clips_per_s"] > 0
    assert 0 < row["start_s"] <= row["seconds"] and len(fake.asked) == 6
    with pytest.raises(MmfastError, match="batch"):  # it is on offer
        named_rows("serve", "batsch")
