"""`mmfast eval --data`: accuracy on own questions, its statistics, its files, and bad input."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cli_runs import ROOT, fails, run

import mmfast
from mmfast.bench import own_data
from mmfast.bench.report import answers
from mmfast.bench.report.answers import difference
from mmfast.frontends.video.reader import read_video
from mmfast.models.loading import load
from mmfast.models.prompt import Shot, build_inputs

CLIPS = ROOT / "assets" / "clips"
KNOWN = json.loads((CLIPS / "clips.json").read_text())
CROSS = {"media": "red-circle.mp4", "question": "What colour is the cross?", "answer": "white"}
LINES: list[dict[str, Any]] = [
    CROSS,
    {**CROSS, "question": "How many objects are there?", "answer": 2.0},
    {
        "media": ["number.mp4"],
        "question": "What colour is the square?",
        "answer": ["azure", "The Blue!"],
        "kind": "colour",
    },
    {
        "media": "number.mp4",
        "question": "Which way does the blue square move?",
        "choices": ["left", "up", "right", "down"],
        "answer": "B",
    },
]


def write(folder: Path, lines: list[Any]) -> Path:
    """A file of questions in a folder that holds the clips."""
    for clip in CLIPS.glob("*.mp4"):
        if not (folder / clip.name).exists():
            (folder / clip.name).symlink_to(clip)
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    (folder / "mine.jsonl").write_text(text)
    return folder / "mine.jsonl"


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(own_data, "load", refuse)


@pytest.mark.slow
def test_rows_files_and_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = {"media": "torn.mp4", "question": "What is it?", "answer": "<b>nothing</b>"}
    data = write(tmp_path, [*LINES, "", broken])
    (tmp_path / "torn.mp4").write_bytes((CLIPS / "number.mp4").read_bytes()[:200])
    files = {name: str(tmp_path / name) for name in ("rows.jsonl", "page.html", "table.csv")}
    out, page, table = files.values()
    command = ["eval", "--data", str(data), "--reduce", "evs:0.25", "--cache", "snapkv:0.5"]
    command += ["--out", out, "--report", page, "--csv", table]
    code, printed, err = run(capsys, *command, "--json")
    document = json.loads(printed)
    rows = document["rows"]
    assert code == 0 and (document["suite"], document["n"], document["seed"]) == ("data", 5, 1000)
    assert document["model"] == "tiny-scenes"
    ways = [(None, None), ("evs:0.25", None), (None, "snapkv:0.5"), ("evs:0.25", "snapkv:0.5")]
    assert [(row["reduce"], row["cache"]) for row in rows] == ways
    assert rows[0]["accuracy"] == 1.0 and rows[0]["difference"] is rows[0]["p"] is None
    assert [row["kept"] for row in rows] == [288, 72, 288, 72]
    assert all(row["ttft_ms"] > 0 for row in rows)
    assert set(rows[1]["by_kind"]) == {"answer", "colour", "choices"}
    assert all(row["difference"] == pytest.approx(row["accuracy"] - 1) for row in rows[1:])
    failed = document["failed"][0]
    assert (failed["line"], failed["media"]) == (6, ["torn.mp4"]) and "line 6" in err

    answers = [json.loads(line) for line in Path(out).read_text().splitlines()]
    summary = [row for row in answers if "score" in row]
    assert len(answers) == 4 * 4 + 4 and [row["score"] for row in summary] == [
        row["accuracy"] for row in rows
    ]
    lines = list(csv.DictReader(Path(table).read_text().splitlines()))
    stock = [row for row in lines if not row["reduce"] and not row["cache"]]
    assert [row["answer"] for row in stock] == ["white", "2", "blue", "up"] and len(lines) == 16
    assert stock[2]["expected"] == "azure|The Blue!" and {row["right"] for row in stock} == {"True"}

    html = Path(page).read_text()
    assert html.count("data:image/svg+xml") == 2 and html.count("data:image/jpeg") == 4
    assert set(re.findall(r'(?:src|href)="?(\w+):', html)) == {"data"} and "<script" not in html
    assert "#differ:checked" in html and "torn.mp4" in html and "<b>nothing" not in html
    same = sum(len({r["answer"] for r in lines if r["line"] == str(n)}) == 1 for n in (1, 2, 3, 4))
    assert html.count("<tr class=same>") == same

    before = Path(out).read_text()
    code, printed, _ = run(capsys, *command)  # all is known: no model, only the summary again
    assert code == 0 and "all tokens" in printed and "=" in printed
    assert len(Path(out).read_text().splitlines()) == len(before.splitlines()) + 4


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = write(tmp_path, LINES[:2]), tmp_path / "rows.jsonl"
    ways: list[own_data.Way] = [(None, None), ("random:0.1", None)]
    asked: list[Any] = []
    stock = own_data.AskedModel.answer

    def counted(self: Any, row: Any, way: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(way)
        return stock(self, row, way)

    monkeypatch.setattr(own_data.AskedModel, "answer", counted)
    with pytest.raises(KeyboardInterrupt):
        own_data.run_data(data, ways, out=out)
    assert len(out.read_text().splitlines()) == 3
    out.write_text(out.read_text() + '{"suite": "data", "key": "4')  # a write cut off
    asked.clear()
    document, rows = own_data.run_data(data, ways, out=out)
    assert asked == [("random:0.1", None)]  # the fourth of four alone
    assert [row["line"] for row in rows] == [1, 1, 2, 2]
    assert [json.loads(line)["key"] for line in out.read_text().splitlines()] == [
        row["key"] for row in rows
    ]
    monkeypatch.setattr(own_data.AskedModel, "answer", stock)
    again = own_data.run_data(data, ways)[0]  # without the file: nothing is known
    for row in (*document["rows"], *again["rows"]):
        row.pop("ttft_ms")
    assert document == again

    monkeypatch.setattr(own_data, "load", None)  # not called where all is known
    assert own_data.run_data(data, ways, out=out)[0]["rows"][0]["accuracy"] == 1.0
    for changed in ({"frames": 4}, {"model": "other/model"}):
        with pytest.raises(TypeError):
            own_data.run_data(data, ways, out=out, **changed)  # type: ignore[arg-type]


def test_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    data, notes = write(tmp_path, [CROSS]), tmp_path / "notes.txt"
    notes.write_text("first\nsecond, without an end")
    with pytest.raises(mmfast.MmfastError, match="notes"):
        own_data.run_data(data, [(None, None)], out=notes)
    assert notes.read_text() == "first\nsecond, without an end"


def test_files_of_answers_appear_whole_or_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up while a page or a table is written costs neither the one before."""
    row = {"line": 1, "media": [], "question": "?", "expected": ["1"], "choices": [], "kind": "a"}
    row |= {"reduce": None, "cache": None, "answer": "1", "right": True, "kept": 1, "ttft_ms": 1.0}
    monkeypatch.setattr(answers, "trade_svg", lambda *_: "")
    document = {"rows": [], "failed": [], "model": "m"}
    for name, write_file in (("a.html", answers.write_html), ("a.csv", answers.write_csv)):
        target = tmp_path / name
        write_file(target, document, [row], tmp_path)
        before = target.read_bytes()
        assert before
        with monkeypatch.context() as full:
            full.setattr(csv, "writer", lambda file: SimpleNamespace(writerow=partial(fill, file)))
            full.setattr(Path, "write_text", lambda path, text, **_: fill(path.open("w"), text))
            with pytest.raises(mmfast.MmfastError, match=f"{name}' cannot be written: No space"):
                write_file(target, document, [row], tmp_path)
        assert target.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
        target.unlink()


def fill(file: Any, text: Any) -> None:
    with file:
        file.write(str(text)[:3])
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("spec", [None, "evs:0.25"])
def test_choices_by_likelihood(tmp_path: Path, spec: str | None) -> None:
    """The sums are those of one forward pass over prompt, choice and end, without a cache."""
    row = {"question": LINES[3]["question"], "expected": ["up"], "choices": ["up", "top"]}
    clip = read_video(CLIPS / "number.mp4", frames=8)
    shot = Shot("video", clip.frames, clip.metadata())
    candidate = own_data.AskedModel(None, [(None, None), (spec, None)])
    candidate.prepare([shot], row["question"])
    answered = candidate.answer(row, (spec, None))
    model, processor = load(None, "cpu", "auto")
    inputs = build_inputs(processor, [[shot]], [row["question"]], model.device)
    end = processor.tokenizer.eos_token_id

    def sum_of(choice: str, last: bool = True) -> float:
        ids = processor.tokenizer(choice, add_special_tokens=False)["input_ids"] + [end] * last
        tokens = torch.tensor([ids])
        joined = torch.cat([inputs["input_ids"], tokens], 1)
        more = {"input_ids": joined, "attention_mask": torch.ones_like(joined)}
        with torch.no_grad(), mmfast.attach(model, spec):
            logits = model(**{**inputs, **more}).logits
        logs = logits[:, -len(ids) - 1 : -1].log_softmax(-1)
        return float(logs.gather(-1, tokens[..., None]).sum())

    oracle = [sum_of(choice) for choice in row["choices"]]
    assert answered["log_likelihoods"] == pytest.approx(oracle, abs=1e-3)
    assert answered["answer"] == "up" and answered["right"]
    without_end = [sum_of(choice, False) for choice in row["choices"]]
    assert answered["log_likelihoods"] != pytest.approx(without_end, abs=1e-3)


# Generated text, accepted text, whether they agree.
PAIRS = [
    *(("White.", "white", True), ("the red circle", "Red circle", True), ("a", "A", True)),
    *(("4", "4.0", True), ("1,000", "1000", True), ("-4", "4", False), ("3.5", "35", False)),
    *(
        ("\u22124.50", "-4.5", True),
        ("4 objects", "4", False),
        ("bottom-left", "bottom left", True),
    ),
    *(("red", "red circle", False), ("not red", "red", False), ("", "red", False)),
    *(("don't", "dont", True), ("?", "!", False), ("12:30", "1230", False), ("the", "a", False)),
    *(("Stra\u00dfe", "STRASSE", True), ("3d", "3", False), ("1e3", "1000", True)),
]


def judge(match: Callable[[str, str], bool]) -> None:
    for said, accepted, agree in PAIRS:
        assert match(said, accepted) is agree, (said, accepted)


def test_normalised_match() -> None:
    judge(lambda said, accepted: own_data.normal(said) == own_data.normal(accepted))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda said, accepted: said == accepted,
        lambda said, accepted: accepted.lower() in said.lower(),
        lambda said, accepted: re.sub(r"\W", "", said).lower() == re.sub(r"\W", "", accepted),
        lambda said, accepted: True,
    ],
)
def test_wrong_scorers_are_caught(wrong: Callable[[str, str], bool]) -> None:
    with pytest.raises(AssertionError):
        judge(wrong)


def test_a_wrong_scorer_changes_the_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path, [CROSS, {**CROSS, "answer": "green"}])
    assert own_data.run_data(data, [(None, None)])[0]["rows"][0]["accuracy"] == 0.5
    monkeypatch.setattr(own_data, "normal", lambda text: ())
    assert own_data.run_data(data, [(None, None)])[0]["rows"][0]["accuracy"] == 1.0


def marks(seed: int, n: int) -> tuple[list[bool], list[bool]]:
    draw = random.Random(seed)
    first = [draw.random() < 0.8 for _ in range(n)]
    return first, [mark if draw.random() < 0.7 else not mark for mark in first]


def check_mcnemar(test: Callable[[list[bool], list[bool]], float]) -> None:
    binomtest = pytest.importorskip("scipy.stats").binomtest
    for seed in range(40):
        first, second = marks(seed, 1 + 31 * seed)
        lost = sum(a and not b for a, b in zip(first, second, strict=True))
        won = sum(b and not a for a, b in zip(first, second, strict=True))
        p = binomtest(lost, lost + won, 0.5).pvalue if lost + won else 1.0
        assert test(first, second) == pytest.approx(p, rel=1e-9)


def test_mcnemar() -> None:
    check_mcnemar(own_data.mcnemar)
    assert own_data.mcnemar([True] * 3000, [False] * 3000) == pytest.approx(0, abs=1e-300)
    with pytest.raises(AssertionError):  # one-sided
        check_mcnemar(lambda first, second: own_data.mcnemar(first, second) / 2)
    with pytest.raises(AssertionError):  # unpaired: the same shares, other pairs
        check_mcnemar(lambda first, second: own_data.mcnemar(sorted(first), sorted(second)))


def test_paired_bootstrap() -> None:
    """The interval is that of resampled questions, drawn one by one."""
    first, second = (np.array(each, float) for each in marks(3, 90))
    draw = np.random.default_rng(5).integers(0, 90, (20_000, 90))
    expected = np.percentile((second - first)[draw].mean(1), [2.5, 97.5])
    found = own_data.paired_interval(list(first > 0), list(second > 0), 7)
    assert found == pytest.approx(expected, abs=0.012)
    assert found == own_data.paired_interval(list(first > 0), list(second > 0), 7)
    row = {"p": 0.2, "difference": -0.1, "difference_interval": found}
    assert difference(row).startswith("= (") and difference({**row, "p": 0.01}).startswith("-0.100")


def test_a_sample_of_questions(tmp_path: Path) -> None:
    rows = [{**CROSS, "question": f"What is {n}?"} for n in range(30)]
    data = write(tmp_path, rows)
    read = own_data.read_questions(data)
    assert [row["line"] for row in read] == list(range(1, 31))
    drawn = own_data.draw(read, 10, 3)
    assert len(drawn) == 10 and drawn == own_data.draw(read, 10, 3) != own_data.draw(read, 10, 4)
    assert all(a["line"] < b["line"] for a, b in pairwise(drawn))
    with pytest.raises(mmfast.MmfastError, match="30"):
        own_data.draw(read, 31, 3)


CHOICES = {**CROSS, "choices": ["red", "white"]}
WRONG: list[tuple[Any, str]] = [
    ("{no json}", "no JSON"),
    ("[1, 2]", "object"),
    ("[" * 100_000, "no JSON"),
    ({**CROSS, "anwser": "x"}, "did you mean 'answer'"),
    ({"media": "red-circle.mp4", "question": "What?"}, "'answer' is missing"),
    ({"question": "What?", "answer": "x"}, "'media' is missing"),
    ({**CROSS, "media": []}, "media []"),
    ({**CROSS, "media": 7}, "media 7"),
    ({**CROSS, "question": " "}, "question"),
    ({**CROSS, "answer": []}, "answer []"),
    ({**CROSS, "answer": " "}, "answer"),
    ({**CROSS, "answer": True}, "True"),
    ({**CHOICES, "answer": "whit"}, "did you mean 'white'"),
    ({**CHOICES, "answer": "C"}, "'C'"),
    ({**CHOICES, "answer": ["white"]}, "beside choices"),
    ({**CHOICES, "choices": ["white"]}, "two or more"),
    ({**CHOICES, "choices": ["white", "white "]}, "two or more"),
]


@pytest.mark.parametrize(("line", "said"), WRONG)
@pytest.mark.usefixtures("no_model")
def test_wrong_lines(
    line: Any, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = write(tmp_path, [CROSS, "", line])
    error = fails(capsys, "eval", "--data", str(data), "--out", str(tmp_path / "rows.jsonl"))
    assert "line 3" in error and said in error and len(error) < 600
    assert not (tmp_path / "rows.jsonl").exists()


def test_letters_and_texts(tmp_path: Path) -> None:
    given = [
        ("B", "white"),
        ("(a)", "red"),
        ("White", "white"),
        ("white", "white"),
        ("b.", "white"),
    ]
    data = write(tmp_path, [{**CHOICES, "answer": answer} for answer, _ in given])
    read = own_data.read_questions(data)
    assert [row["expected"] for row in read] == [[choice] for _, choice in given]
    swapped = write(tmp_path, [{**CHOICES, "choices": ["B", "A"], "answer": "A"}])
    assert own_data.read_questions(swapped)[0]["expected"] == ["A"]  # the text, not the first


@pytest.mark.usefixtures("no_model")
def test_wrong_files_and_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = str(write(tmp_path, [CROSS]))
    assert "none.jsonl" in fails(capsys, "eval", "--data", str(tmp_path / "none.jsonl"))
    assert "twice" in fails(capsys, "eval", "--data", data, "--csv", data)
    told = fails(capsys, "eval", "--data", data, "--report", str(tmp_path / "r.pdf"))
    assert "r.pdf': write a .html or .htm file" in told and not (tmp_path / "r.pdf").exists()
    assert Path(data).read_text() == json.dumps(CROSS) + "\n"
    assert "--suite" in fails(capsys, "eval", "--data", data, "--suite", "video")
    assert "--report" in fails(capsys, "eval", "--report", "page.html", "--n", "1")
    assert "give at most 1" in fails(capsys, "eval", "--data", data, "--n", "2")
    assert "evs" in fails(capsys, "eval", "--data", data, "--reduce", "evss:0.25")
    assert "auto" in fails(capsys, "eval", "--data", data, "--reduce", "auto")
    assert "write" in fails(capsys, "eval", "--data", data, "--csv", str(tmp_path))
    lost = {**CROSS, "media": "lost.mp4"}
    data = str(write(tmp_path, [CROSS, lost]))
    assert "line 2" in fails(capsys, "eval", "--data", data, "--strict")
    mixed = {**CROSS, "media": ["red-circle.mp4", str(CLIPS / "picture.jpg")]}
    data = str(write(tmp_path, [lost, mixed]))
    assert "no question can be asked" in fails(capsys, "eval", "--data", data)
    assert "line 1: " in fails(capsys, "eval", "--data", data, "--strict")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    assert "no question" in fails(capsys, "eval", "--data", str(tmp_path / "empty.jsonl"))
    (tmp_path / "empty.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in fails(capsys, "eval", "--data", str(tmp_path / "empty.jsonl"))
