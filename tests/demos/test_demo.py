"""The demo without a browser: what its tabs compute, its limits, its connections."""

from __future__ import annotations

import ast
import asyncio
import base64
import html
import importlib
import io
import json
import re
import shlex
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import mmfast
from mmfast.core.errors import MmfastError

pytest.importorskip("gradio", reason="the demo needs gradio: pip install mmfast[demo]")

from mmfast.demos import ask, compare, examples, views, voice, watch
from mmfast.demos.app import build
from mmfast.demos.shelf import Seats, Shelf
from mmfast.demos.voice import Talk, VoiceSocket
from mmfast.demos.watch import SMALL, VisitorStream

ROOT = Path(__file__).resolve().parents[2]
CLIP, QUESTION = "red-circle.mp4", "Which way does the red circle move?"

# Gradio and what it imports, on Python 3.11 to 3.13; none of it is ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Couldn't find ffmpeg or avconv:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf()


# ------------------------------------------------------------------------------------------- ask


def test_examples_are_there_and_their_questions_known() -> None:
    files = dict(examples.names()).values()
    assert len(files) == 8
    for name in files:
        asked = examples.questions(name)
        assert 2 <= len(asked) <= 6 and all(examples.right_answer(name, q) for q in asked), name


def test_both_ways_answer_and_the_budget_is_exact(shelf: Shelf) -> None:
    ticks: list[tuple[int, int]] = []
    tick = lambda *at: ticks.append(at)
    base, fast, rows = ask.timed(
        shelf, ask.chosen(CLIP, None), QUESTION, "divprune:0.25", tick=tick, seconds=0.0
    )
    assert (base.text, base.tokens, base.of) == (examples.right_answer(CLIP, QUESTION), 288, 288)
    assert (fast.spec, fast.tokens, fast.of) == ("divprune:0.25", 72, 288)
    left = [int(re.search(r"(\d+) of 36 left", line)[1]) for _, line in fast.frames]  # type: ignore[index]
    assert len(left) == 8 and sum(left) == 72
    assert ticks[-1] == (9, 3 * ask.ROUNDS)  # three rounds at least, all tokens twice in each
    page = ask.cards(base, fast, rows, "left")
    assert "72 <small>of 288" in page and "25%" in page and "Same answer" in page
    assert "Where the time went" in page and "encode" in page and "Medians of 3 rounds" in page


def test_a_photograph_gets_the_note_of_the_command_line(shelf: Shelf, tmp_path: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.png")
    tab, given = ask.Answers(shelf), (ask.OWN, str(tmp_path / "photo.png"), "What is it?")
    page, _, _ = tab.slide(*given, "divprune", 25, 8, None)
    with pytest.warns(UserWarning, match="this image is outside") as told:
        note = mmfast.pipeline("image-qa")(tmp_path / "photo.png", "What is it?").note
    assert len(told) == 1 and page.count(html.escape(note)) == 1
    page, _, _ = tab.slide(CLIP, None, QUESTION, "divprune", 25, 8, None)
    assert "is outside" not in page


@pytest.mark.parametrize(("speedup", "equal", "shown"), [(1.04, True, "="), (1.5, False, "1.50x")])
def test_a_difference_within_the_noise_is_shown_as_none(
    speedup: float, equal: bool, shown: str
) -> None:
    row = {"stage": "first token", "all_ms": 120.0, "median_ms": 80.0, "n": 5, "noise": 0.05}
    one = ask.Shown("evs:0.25", "left", 72, 288, ())
    page = ask.cards(one, one, [{**row, "speedup": speedup, "equal": equal}], None)
    assert f"80 ms <small>{shown}</small>" in page and "120 ms" in page and "noise 5%" in page
    assert ("within the noise: no difference" in page) == equal
    assert page.count(f"{speedup:.2f}x") == (0 if equal else 2)
    assert "not timed" in ask.cards(one, one, [], None)


@pytest.mark.parametrize(
    ("method", "percent", "near"),
    [("divprune", 25, 0.25), ("evs", 12, 0.1), ("fastv", 90, 0.25), ("dtd", 3, 0.1)],
)
def test_rows_of_a_real_size_are_those_on_file(method: str, percent: int, near: float) -> None:
    text = (examples.RESULTS / "bench-cpu.jsonl").read_text()
    rows = [row for row in map(json.loads, text.splitlines()) if row.get("preset") == examples.REAL]
    here = [row for row in rows if row["stage"] == "llm" and row["kept"] < row["tokens"]]
    here = [row for row in here if row["reduce"].endswith(f":{near}")]
    mine = [row for row in here if row["method"] == method]
    page = ask.real_size(method, percent)
    assert (
        "Not run here" in page
        and f"at {near:.0%}, the measured budget nearest to {percent}%" in page
    )
    for row in here:
        cells = f"<td>{row['kept']:,}</td><td>{row['median_ms']:,.0f}</td>"
        line = f"<th scope=row>{row['reduce']}</th>{cells}"
        assert (line in page) == (not mine or row in mine), row["reduce"]
    assert (f"{method} was not measured" in page) == (not mine)


def test_the_first_answer_is_there_before_anybody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    blocks = build(shelf)
    assert any(call.__name__ == "arrival" for call in shelf.needed)
    loads = [fn for fn in blocks.fns.values() if any(t[1] == "load" for t in fn.targets)]
    assert any(fn.fn.__name__ == "arrival" for fn in loads)
    tab = ask.Answers(shelf)
    first = tab.arrival()
    assert "mm-cards" in first[0] and "Medians of" in first[0] and "data:image/webp" in first[1]
    monkeypatch.setattr(mmfast, "time_answers", None)  # it is not worked out again
    assert ask.Answers(shelf).arrival() is first


def test_a_page_is_read_by_the_model_that_reads_print(shelf: Shelf) -> None:
    """All answers are right with all tokens; methods are ranked by what they keep of tables."""
    page = str(examples.CLIPS / "receipt.jpg")
    for question, right in examples.listing()["receipt.jpg"].items():
        assert ask.glimpse(shelf, page, question, None, 8).text == right
    found = ask.answer(shelf, "receipt.jpg", "What is the weight of the nuts?", "divprune:0.25")
    assert found["answer"] == "47" and found["kept_tokens"] < found["visual_tokens"]
    assert all(name != "receipt.jpg" for _, name in examples.names(pages=False))
    assert (
        examples.reader(page) == "tiny-document" and examples.reader("/uploads/receipt.jpg") is None
    )
    theirs = Shelf(model="tiny-video")
    assert theirs.visual("image", reader="tiny-document").model is theirs.visual("image").model


@pytest.mark.parametrize("example", [CLIP, "picture.jpg", "receipt.jpg"])
def test_copied_code_gives_what_the_page_shows(
    shelf: Shelf, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = examples.questions(example)[0]
    given = (example, None, asked, "divprune", 25, 4)
    python, line = _copied(ask.copies(shelf, *given))
    exec(compile(python, "copied", "exec"), {})
    said, kept, _ = capsys.readouterr().out.rsplit(" ", 2)
    path, seen = ask.opened(shelf, example, None, 4)
    shown = ask.glimpse(shelf, seen, asked, "divprune:0.25", 4)
    assert (said, int(kept)) == (shown.text, shown.tokens)
    assert shown.of == (144 if example == CLIP else shown.of)
    words = shlex.split(re.sub(r'"\$\(.*\)"', "CLIPS", line))
    reader = ["--model", "tiny-document"] if example == "receipt.jpg" else []
    assert words[:3] == ["mmfast", "ask", f"CLIPS/clips/{example}"] and words[3:] == [
        asked, "--frames", "4", "--compare", "divprune:0.25", *reader,
    ]  # fmt: skip
    code = re.search(r'"\$\(python -c "(.*)"\)"/clips/', line)
    assert code is not None
    exec(code[1], {})
    assert f"{capsys.readouterr().out.strip()}/clips/{example}" == path


def test_pictures_have_views_and_clips_have_frames(shelf: Shelf) -> None:
    said = {
        name: [
            ask._caption(i, len(seen), line)
            for seen in [ask.glimpse(shelf, path, "How many?", "divprune:0.25", 2).frames]
            for i, (_, line) in enumerate(seen)
        ]
        for name in (CLIP, "receipt.jpg")
        for path in [ask.chosen(name, None)]
    }
    heads = {name: [line.partition(":")[0] for line in lines] for name, lines in said.items()}
    assert heads == {CLIP: ["Frame 1 of 2", "Frame 2 of 2"], "receipt.jpg": ["Tiles", "Overview"]}


def test_signals_of_a_method_are_words() -> None:
    assert "Reads: features." in ask.about_method("divprune")
    assert "Reads: positions, values, text values." in ask.about_method("ivc_prune")


def test_words_that_cannot_be_said_are_told(shelf: Shelf) -> None:
    with pytest.warns(UserWarning, match="left out"):
        _, page = voice.say(shelf, "left \u4f60", "en-us", next(iter(voice.MODES)))
    assert "left out, as the model cannot say them: \u4f60" in page
    _, page = voice.say(shelf, "left", "en-us", next(iter(voice.MODES)))
    assert "left out" not in page


def test_copied_code_of_an_upload_quotes_what_the_visitor_wrote() -> None:
    shelf = Shelf("org/model", "cuda")
    name, asked = '-it\'s "a" <film>.mp4', 'Who\'s "there"? $(reboot)'
    given = (examples.OWN, f"/tmp/x/{name}", asked, "evs", 10, 16)
    page = ask.copies(shelf, *given)
    python, line = _copied(page)
    assert "<film>" not in page and "/tmp" not in page
    assert [ast.literal_eval(each) for each in _call(python, "pipe").args] == [name, asked]
    made = {k.arg: ast.literal_eval(k.value) for k in _call(python, "pipeline").keywords}
    assert made == {"model": "org/model", "device": "cuda", "reduce": "evs:0.10", "frames": 16}
    assert shlex.split(line) == [
        "mmfast", "ask", f"./{name}", asked, "--frames", "16",
        "--compare", "evs:0.10", "--model", "org/model", "--device", "cuda",
    ]  # fmt: skip


def _copied(page: str) -> list[str]:
    return [html.unescape(text) for text in re.findall(r'data-copy="([^"]*)"', page)]


def _call(python: str, name: str) -> ast.Call:
    calls = [node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call)]
    return next(c for c in calls if ast.unparse(c.func).rpartition(".")[2] == name)


def test_the_picture_shows_what_was_kept(shelf: Shelf) -> None:
    clip = ask.chosen(CLIP, None)
    base, fast = (ask.glimpse(shelf, clip, QUESTION, spec, 8) for spec in (None, "random:0.25"))
    page = ask.pictures_of(base, fast)
    found = re.search(r"data-frames='([^']*)'", page)
    assert found is not None
    frames = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert len(frames) == 8 and frames[0]["caption"].startswith("Frame 1 of 8: ")
    seen, kept = (_picture(frames[0][side]) for side in ("seen", "kept"))
    patches = kept.reshape(6, len(kept) // 6, 6, -1, 3).mean((1, 3, 4))
    whole = seen.reshape(6, len(seen) // 6, 6, -1, 3).mean((1, 3, 4))
    bright = (patches > 0.5 * whole).sum()
    assert f"{bright} of 36 left" in frames[0]["caption"]


def _picture(uri: str) -> np.ndarray[Any, Any]:
    data = base64.b64decode(uri.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.float32)


def test_the_slider_reuses_the_answer_with_all_tokens(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[Any] = []
    real = ask.glimpse

    def counted(shelf: Shelf, media: Any, question: str, spec: Any, frames: int) -> Any:
        ways.append(spec)
        return real(shelf, media, question, spec, frames)

    monkeypatch.setattr(ask, "glimpse", counted)
    tab = ask.Answers(shelf)
    first = tab.slide(CLIP, None, QUESTION, "evs", 50, 8, None)
    second = tab.slide(CLIP, None, QUESTION, "evs", 10, 8, first[2])
    assert ways == [None, "evs:0.50", "evs:0.10"] and second[1] != first[1]
    assert "29 <small>of 288" in second[0] and second[2][1] is first[2][1]
    assert "not timed" in second[0] and "press Ask" in second[0]
    tab.slide(CLIP, None, QUESTION, "evs", 10, 4, second[2])  # other frames
    assert ways[3:] == [None, "evs:0.10"]


def test_stop_ends_the_work_between_two_answers(shelf: Shelf) -> None:
    run, seen = views.Run(), list[int]()

    def progress(at: tuple[int, int], **_: Any) -> None:
        seen.append(at[0])
        if at[0] == 2:
            run.stop()

    tab = ask.Answers(shelf)
    with pytest.raises(MmfastError, match="stopped"):
        tab.fresh(CLIP, None, QUESTION, "evs", 25, 8, run, progress)
    assert seen == [0, 0, 1, 2]
    assert run.tick(progress) and not run.stopped  # the next one runs


def test_a_new_upload_leaves_nothing_of_the_one_before() -> None:
    example, player, tries, result, pictures, before = ask.own(tries=True)
    assert not tries.visible and not tries.samples
    assert len(ask.own(tries=False)) == 5
    assert example == examples.OWN and "Choose a file" in player
    assert (result, pictures, before) == views.emptied() and "mm-card" not in result


def test_more_frames_of_a_clip_and_of_an_upload(shelf: Shelf) -> None:
    from mmfast.serve.guard.media import read_upload

    path = str(examples.CLIPS / CLIP)
    own = Shelf(read=read_upload)
    for given, frames in ((shelf, 12), (own, 5)):
        name = CLIP if given is shelf else examples.OWN
        _, seen = ask.opened(given, name, path, frames)
        shown = ask.glimpse(shelf, seen, QUESTION, None, frames)
        assert len(shown.frames) == frames and shown.of == 36 * frames


def test_offered_methods_run_at_a_quarter(shelf: Shelf) -> None:
    clip = ask.chosen("number.mp4", None)
    for method in ask.offered()[::5]:
        spec = ask.spec_of(method.name, 25)
        found = shelf.visual("video", spec)(clip, "What number is on the screen?")
        assert found.kept_tokens == 72 and found.text, spec


def test_wrong_uploads_are_one_line_without_folders(shelf: Shelf, tmp_path: Path) -> None:
    import gradio as gr

    from mmfast.demos.views import polite
    from mmfast.serve.guard.media import read_upload

    bad = tmp_path / "film.mp4"
    bad.write_bytes(b"this is no film\n" * 99)
    with pytest.raises(gr.Error) as caught:
        polite(ask.take)(examples.OWN, str(bad))
    message = str(caught.value.message)
    assert "film.mp4" in message and str(tmp_path) not in message and "\n" not in message
    own = Shelf(read=read_upload)
    with pytest.raises(MmfastError):
        ask.Answers(own).slide(examples.OWN, str(bad), QUESTION, "evs", 25, 8, None)
    with pytest.raises(MmfastError, match="upload"):
        ask.Answers(shelf).slide(examples.OWN, None, QUESTION, "evs", 25, 8, None)
    with pytest.raises(MmfastError):
        ask.Answers(shelf).slide(CLIP, None, "  ", "evs", 25, 8, None)


def test_an_upload_is_decoded_apart_and_answered(shelf: Shelf) -> None:
    from mmfast.serve.guard.media import read_upload

    path = str(examples.CLIPS / CLIP)
    pixels, note = read_upload(path)
    assert not note
    assert pixels.shape[0] == 8 and pixels.shape[-1] == 3
    shown = ask.glimpse(shelf, pixels, QUESTION, "evs:0.5", 8)
    assert shown.text == "left" and shown.tokens == 144
    assert read_upload(str(examples.CLIPS / "picture.jpg"))[0].ndim == 3


def test_what_is_not_read_of_an_upload_is_told(tmp_path: Path) -> None:
    from mmfast.serve.guard.media import read_upload

    page, path = Image.new("RGB", (64, 48)), str(tmp_path / "scan.tiff")
    page.save(path, save_all=True, append_images=[page])
    with pytest.warns(UserWarning, match="several pages, of which one is read"):
        _, pixels = ask.opened(Shelf(read=read_upload), examples.OWN, path, 8)
    assert pixels.shape == (48, 64, 3)


def test_what_is_shown_cannot_become_markup() -> None:
    shown = ask.Shown(None, "<img src=x onerror=alert(1)>", 1, 1, ())
    assert "<img" not in ask.cards(shown, shown, [], "<b>")
    assert "<b>" not in views.note("<b>")


# --------------------------------------------------------------------------------------- compare


def _plotted(drawn: str) -> dict[str, Any]:
    found = re.search(r"<mm-plot data-plot='([^']*)'></mm-plot>", drawn)
    assert found is not None
    plot: dict[str, Any] = json.loads(html.unescape(found[1]))
    return plot


@pytest.mark.parametrize("name", compare.SUITES)
def test_the_chart_draws_the_rows_as_they_are(name: str) -> None:
    path = examples.RESULTS / f"eval-{compare.SUITES[name]}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    plot = _plotted(compare.chart(compare.suite_curves(name), ["divprune"]))
    dots = {short: (x, y) for each in plot["series"] for x, y, short, _ in each["dots"]}
    for row in rows:
        if row["reduce"] and "+" not in row["reduce"]:
            method, _, share = row["reduce"].rpartition(":")
            x, y = dots[f"{method} at {float(share):.0%}: {row['accuracy']:.1%} right"]
            assert y == row["accuracy"] and 0 <= x < 1  # all tokens are at 1
    assert [bool(each["colour"]) for each in plot["series"]].count(True) == 1
    assert plot["series"][-1]["colour"]  # in front
    for each in plot["series"]:
        assert each["line"] == [*(dot[:2] for dot in each["dots"]), [1.0, plot["level"]]]
    marks = {words: x for x, words in plot["marks"]}
    assert marks["5%"] == 0 and marks["100%"] == 1  # each doubling is as wide as every other
    assert marks["10%"] == pytest.approx(marks["100%"] - marks["50%"])


def test_the_table_links_every_paper() -> None:
    table = compare.table("clips")
    known = {method.name: method for method in mmfast.methods("reducer")}
    for name in compare.suite_curves("clips").curves:
        paper = known[name.partition("@")[0]].paper
        assert f"<code>{name}</code>" in table
        assert not paper or f'href="https://arxiv.org/abs/{paper}"' in table
    assert 'rel="noopener noreferrer"' in table


def test_papers_are_linked_where_they_are() -> None:
    known = {method.name: method for method in mmfast.methods()}
    assert views.link(known["pool"]) == ""
    assert ">arXiv 2503.02175</a>" in views.link(known["divprune"])
    found = views.link(known["cam"])
    assert 'href="https://openreview.net/forum?id=LCTmppB165"' in found and ">OpenReview" in found


def test_other_questions_keep_the_methods_that_were_measured() -> None:
    update, picture, _ = compare.choose("pages", ["dtd", "divprune"])
    assert update["value"] == ["divprune"]
    assert "model tiny-document" in picture


def test_recommended_methods_are_those_above_random_selection() -> None:
    for suite in ("clips", "pictures"):
        path = examples.RESULTS / f"eval-{compare.SUITES[suite]}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        right = {row["reduce"]: row["accuracy"] for row in rows}
        good, rest = compare.ranked(suite, 0.25)
        assert good and "random" in rest
        for name in [*good, *rest]:
            if f"{name}:0.25" in right:
                assert (name in good) == (right[f"{name}:0.25"] > right["random:0.25"]), name
        scores = [right[f"{name}:0.25"] for name in good if f"{name}:0.25" in right]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("known", [True, False])
def test_methods_are_compared_on_one_clip(shelf: Shelf, known: bool) -> None:
    clip, asked = ask.chosen(CLIP, None), examples.questions(CLIP)[:2]
    right = [examples.right_answer(CLIP, asked[0]), "never said"] if known else []
    ticks: list[tuple[int, int]] = []
    tick = lambda *at: ticks.append(at)
    specs = ["evs:0.25", "random:0.05"]
    found = compare.trial(shelf, clip, asked, specs, right, tick=tick, seconds=0.0)
    assert [each.name for each in found] == [compare.ALL, *specs]
    assert [each.tokens for each in found] == [288, 72, 14] and found[0].faster == ""
    for each in found:
        spec = None if each.name == compare.ALL else each.name
        said = [shelf.visual("video", spec)(clip, question).text for question in asked]
        stock = [shelf.visual("video")(clip, question).text for question in asked]
        wanted = right or stock
        assert each.share == sum(map(ask.same, said, wanted)) / 2
        assert each.low <= each.ms <= each.high
        assert each.faster in ("", "=") or each.faster.endswith("x")
    assert ticks == sorted(ticks) and len({total for _, total in ticks}) == 1


def test_the_chart_of_a_trial_places_what_it_says() -> None:
    ways = [
        compare.Outcome("all tokens", 1.0, 200.0, 190.0, 230.0, "", 288),
        compare.Outcome("<b>:0.25", 0.5, 100.0, 90.0, 120.0, "2.00x", 72),
    ]
    drawn = compare.trial_chart(ways, "right answers")
    assert "<b>" not in drawn
    plot = _plotted(drawn)
    (first, second), most = plot["series"], 1.08 * 230
    assert [*first["dots"][0][:2], *second["dots"][0][:2]] == pytest.approx(
        [200 / most, 1, 100 / most, 0.5]
    )
    assert second["dots"][0][2:] == ["<b>:0.25: 50%, 100 ms", "<b>:0.25: 50%, 100 ms 2.00x"]
    assert second["line"] == [pytest.approx([ms / most, 0.5]) for ms in (90, 120)]
    assert plot["marks"][0] == [0, "0"]  # time begins at nothing
    assert plot["marks"][1] == [pytest.approx(50 / most), "50"]


def test_a_comparison_needs_questions_and_methods_that_fit(shelf: Shelf) -> None:
    empty = views.Run()
    for asked, methods in ((" \n", ["evs"]), ("What?", [])):
        with pytest.raises(MmfastError, match="compare nothing"):
            compare.run_trial(
                shelf, CLIP, None, asked, methods, 25, 8, empty, lambda *_, **__: None
            )


# ----------------------------------------------------------------------------------------- watch


def test_a_world_is_watched_and_asked(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PACE", 500.0)
    stream = VisitorStream(shelf.stream().open(memory=SMALL))
    with pytest.raises(MmfastError, match="nothing was seen"):
        list(stream.ask("What number is on the screen now?"))
    fact = stream.world.event(0)
    stream.play()
    _until(lambda: stream.seconds > fact.stop + 2)
    stream.pause()
    at = stream.seconds
    answer = "".join(stream.ask(f"What number is at the {fact.name}?"))
    assert not stream.playing and stream.seconds == at
    assert stream.log[-1][1:] == (f"What number is at the {fact.name}?", stream.log[-1][2])
    assert str(fact.number) == stream.log[-1][2] and answer.endswith(stream.log[-1][2])
    assert stream.shown()[-1][:3] == (fact.name, fact.number, fact.corner)
    stream.play()
    _until(lambda: stream.seconds > at + 3)
    stream.close()
    assert stream.session.closed and not stream.playing


def test_memory_stays_bounded_and_counters_say_so(shelf: Shelf) -> None:
    stream = VisitorStream(shelf.stream().open(memory=SMALL))
    sizes = []
    for second, (frame, _) in zip(range(48), stream.world.frames(), strict=False):
        stream.session.push(frame, float(second))
        sizes.append(stream.session.stats()["memory"]["bytes"])
    assert sizes[-1] == sizes[40]
    figures = dict(stream.figures())
    assert figures["frames seen"] == "48" and int(figures["archived frames"]) > 10
    assert figures["window"] == "sink:64 + window:1152 + retrieve:16"  # breaks into lines
    assert figures["read again"] == "no frame yet"
    assert figures["by tier"].startswith("device ") and figures["left out"] == "0 frames"
    stream.session.push(frame, 46.5)
    assert dict(stream.figures())["left out"] == "1 frames"
    "".join(stream.ask(f"What number is at the {stream.world.event(0).name}?"))
    again = dict(stream.figures())["read again"]
    assert again == watch._read_again(stream.recalled) and int(again.split()[0]) > 2
    assert min(stream.recalled) < 48 - 32 < 48
    assert int(figures["live tokens"].replace(",", "")) <= 64 + 1152 + 36
    stream.close()


def test_places_are_bounded_and_given_up() -> None:
    class Thing:
        closed = False

        def close(self) -> None:
            self.closed = True

    seats: Seats[Thing] = Seats(most=2, idle=300)
    first, second = seats.take("a", Thing), seats.take("b", Thing)
    assert seats.take("a", Thing) is first and len(seats) == 2
    refused = Thing()
    with pytest.raises(MmfastError, match="places"):
        seats.take("c", lambda: refused)
    assert refused.closed
    seats.leave("a")
    assert first.closed and seats.get("a") is None
    seats.idle = -1.0  # everybody has been idle for longer than that
    seats.take("d", Thing)
    assert second.closed and len(seats) == 1
    seats.close()
    assert not len(seats)


def test_who_leaves_while_a_place_is_made_leaves_nothing_behind() -> None:
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def __init__(self) -> None:
            begun.set()
            assert go_on.wait(60)

        def close(self) -> None:
            closed.set()

    seats: Seats[Slow] = Seats()
    coming = threading.Thread(target=seats.take, args=("a", Slow))
    leaving = threading.Thread(target=seats.leave, args=("a",))
    coming.start()
    assert begun.wait(60)
    leaving.start()
    go_on.set()
    coming.join(60)
    leaving.join(60)
    assert closed.is_set() and not len(seats)


# ----------------------------------------------------------------------------------------- voice


class _Told:
    """Events of a conversation as they come."""

    def __init__(self) -> None:
        self.events: list[tuple[dict[str, Any], bytes | None]] = []
        self.lock = threading.Lock()

    def __call__(self, event: tuple[dict[str, Any], bytes | None]) -> None:
        with self.lock:
            self.events.append(event)

    def kinds(self) -> list[str]:
        return [event["kind"] for event, _ in self.events]

    def first(self, kind: str) -> dict[str, Any]:
        return next(event for event, _ in self.events if event["kind"] == kind)


@pytest.fixture(scope="module")
def question(shelf: Shelf) -> bytes:
    """A question about the clip, spoken, with silence around it: 16-bit PCM at 16 kHz."""
    spoken = shelf.talker()(QUESTION.lower(), verify="exact")
    pcm = (spoken.pcm.clamp(-1, 1).numpy() * 32767).astype("<i2")
    return bytes(8000) + pcm.tobytes() + bytes(2 * 16000)


def test_a_spoken_question_about_a_clip_is_answered_aloud(shelf: Shelf, question: bytes) -> None:
    told = _Told()
    talk = Talk(shelf, {"rate": 16000, "about": CLIP, "voice": "en-us+f2"}, told)
    talk.start()
    for at in range(0, len(question), 2048):
        talk.take(question[at : at + 2048])
    _until(lambda: "done" in told.kinds() or _silence(talk))
    talk.close()
    assert "red circle" in told.first("heard")["text"]
    said = "".join(event["text"] for event, _ in told.events if event["kind"] == "text")
    assert "left" in said
    sounds = [pcm for event, pcm in told.events if event["kind"] == "audio"]
    assert len(sounds) > 1 and all(sounds)  # it sounds before it is finished


def _silence(talk: Talk) -> bool:
    talk.take(bytes(1024))  # time is what the microphone sends
    return False


def test_an_interrupted_reply_keeps_what_was_heard(shelf: Shelf, question: bytes) -> None:
    told = _Told()
    talk = Talk(shelf, {"rate": 16000, "about": CLIP}, told)
    talk.start()
    for at in range(0, len(question), 2048):
        talk.take(question[at : at + 2048])
    _until(lambda: "audio" in told.kinds() or _silence(talk))
    item = told.first("audio")["item"]
    talk.take({"type": "cancel"})
    talk.take({"type": "truncate", "item": item, "ms": 0})
    talk.take({"type": "truncate", "item": "nothing", "ms": 0})
    _until(lambda: "truncated" in told.kinds())
    talk.close()
    assert told.first("truncated")["text"] == ""


@pytest.mark.parametrize(
    "wish", [{}, {"rate": 1}, {"rate": "16000"}, {"rate": 16000, "about": "../x.mp4"}]
)
def test_wrong_wishes_of_a_conversation(shelf: Shelf, wish: dict[str, Any]) -> None:
    with pytest.raises(MmfastError):
        Talk(shelf, wish, _Told())


def test_wrong_messages_in_a_conversation(shelf: Shelf) -> None:
    talk = Talk(shelf, {"rate": 16000}, _Told())
    for message in (b"\0", "text", {"type": "sing"}, 7, None):
        with pytest.raises(MmfastError):
            talk.take(message)
    talk.close()


# ---------------------------------------------------------------------------------- page, server


@pytest.fixture(scope="module")
def client(shelf: Shelf) -> Iterator[Any]:
    from fastapi import FastAPI
    from starlette.testclient import TestClient

    from mmfast.demos.app import mount

    app, before = FastAPI(), set(threading.enumerate())  # those are of other tests
    assert mount(app, "/demo", shelf=shelf) is app
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client

    def left() -> list[str]:
        new = {*threading.enumerate()} - before
        return [thread.name for thread in new if thread.name.startswith("mmfast")]

    _until(lambda: not left(), told=left)


def test_the_page_is_mounted_and_asks_nobody_else(client: Any) -> None:
    page = client.get("/demo/").text
    assert "mm-frames" in page and "mm-voice" in page
    loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(https?:[^\"]+)", page)
    assert not [url for url in loaded if not url.startswith("http://127.0.0.1")]
    assert "fonts.googleapis" not in page
    theme = client.get("/demo/theme.css").text
    assert "@import" not in theme and "url(http" not in theme


def test_no_file_of_the_machine_is_served(client: Any) -> None:
    for path in ("/etc/passwd", str(ROOT / "pyproject.toml")):
        assert client.get(f"/demo/gradio_api/file={path}").status_code in (403, 404)
    files = {"files": ("big.mp4", bytes(51 << 20))}
    assert client.post("/demo/gradio_api/upload", files=files).status_code == 413


def test_conversations_of_other_pages_are_refused(client: Any) -> None:
    from starlette.websockets import WebSocketDisconnect

    path = "/demo/voice-socket"
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect(path, headers={"origin": "https://elsewhere.example"}) as socket,
    ):
        socket.receive_text()
    headers = {"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"}
    with client.websocket_connect(path, headers=headers) as socket:
        socket.send_text('{"rate": 48000}')
        assert json.loads(socket.receive_text()) == {"kind": "ready"}
        socket.send_bytes(bytes(2048))
        socket.send_text("{")
        assert json.loads(socket.receive_text())["kind"] == "error"


class _Visitor:
    """A socket that begins a conversation and then says nothing."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self._wish: str | None = '{"rate": 48000}'
        self.welcomed = asyncio.Event()

    async def accept(self) -> None:
        """Nothing to do."""

    async def receive(self) -> dict[str, str]:
        if self._wish is None:
            await asyncio.Event().wait()
        wish, self._wish = self._wish, None
        return {"type": "websocket.receive", "text": str(wish)}

    async def send_text(self, text: str) -> None:
        self.welcomed.set()


def test_a_server_that_stops_under_load_leaves_no_conversation(shelf: Shelf) -> None:
    served, free = VoiceSocket(shelf), threading.Event()

    async def stopped() -> None:
        visitor, loop = _Visitor(), asyncio.get_running_loop()
        serving = asyncio.create_task(served.serve(visitor))  # type: ignore[arg-type]
        await visitor.welcomed.wait()
        await asyncio.sleep(0.1)
        crowd = ThreadPoolExecutor(1)
        loop.set_default_executor(crowd)
        crowd.submit(free.wait)  # no thread is free for what the end has to do
        for _ in range(2):
            serving.cancel()
            await asyncio.wait([serving], timeout=0.1)
        assert serving.done() and len(served.seats) == 1
        free.set()

    asyncio.run(stopped())
    _until(lambda: len(served.seats) == 0, 20)


def test_all_that_the_page_needs_is_packaged() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = config["package-data"]["mmfast.demos"]
    for path in (ROOT / "demos").iterdir():
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert any(path.match(pattern) for pattern in patterns), path.name


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.http.run import bind

    serve = importlib.import_module("mmfast.cli.serve")
    with bind("127.0.0.1", 0) as taken, pytest.raises(MmfastError, match="0 takes a free one"):
        bind("127.0.0.1", taken.getsockname()[1])
    warm = Mock()
    monkeypatch.setattr(Shelf, "warm_soon", warm)
    monkeypatch.setattr("mmfast.demos.app.mount", lambda app, *_, **__: app)
    with bind("127.0.0.1", 0) as taken, pytest.raises(MmfastError, match="cannot listen"):
        serve.demo(port=taken.getsockname()[1])
    warm.assert_not_called()  # no thread loads a model while the process ends
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(MmfastError, match=r'pip install "mmfast\[demo\]"'):
        serve._application(None, None, "auto")


@pytest.mark.slow
def test_the_client_of_gradio_asks(demo_url: str) -> None:
    from gradio_client import Client

    asked = Client(demo_url, verbose=False, analytics_enabled=False)
    found = asked.predict(CLIP, QUESTION, "evs:0.25", api_name="/ask")
    assert found["answer"] == "left" and found["kept_tokens"] == 72 and found["ttft_ms"] > 0
    with pytest.raises(Exception, match="no such example"):
        asked.predict("../../etc/passwd", QUESTION, "", api_name="/ask")


def _until(what: Any, patience: float = 120.0, told: Any = lambda: "") -> None:
    limit = time.monotonic() + patience
    while not what():
        assert time.monotonic() < limit, f"it did not happen: {told()}"
        time.sleep(0.01)


# --------------------------------------------------------------------------------------- uploads


@pytest.mark.parametrize("path", ["/etc/hostname", "/dev/zero", "http://example.com/x.png"])
def test_what_nobody_uploaded_is_not_taken(path: str, shelf: Shelf) -> None:
    import gradio as gr
    from gradio.context import LocalContext
    from gradio.processing_utils import async_move_files_to_cache

    blocks = build(shelf)
    token = LocalContext.blocks.set(blocks)
    try:
        for block in list(blocks.blocks.values()):
            given = {"path": path, "meta": {"_type": "gradio.FileData"}}
            with pytest.raises((gr.Error, gr.exceptions.InvalidPathError)):
                asyncio.run(async_move_files_to_cache(given, block, check_in_upload_folder=True))
            assert not block.temp_files
    finally:
        LocalContext.blocks.reset(token)
