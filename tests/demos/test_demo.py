"""The demo without a browser: what its tabs compute, its limits, its connections."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmfast
from mmfast.core.errors import MmfastError

pytest.importorskip("gradio", reason="the demo needs gradio: pip install mmfast[demo]")

from mmfast.demos import ask, compare, examples, views, watch
from mmfast.demos.app import build
from mmfast.demos.seats import Seats
from mmfast.demos.shelf import Shelf
from mmfast.demos.voice import Talk
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
    assert len(files) == 7
    for name in files:
        asked = examples.questions(name)
        assert 2 <= len(asked) <= 6 and all(examples.right_answer(name, q) for q in asked), name


def test_both_ways_answer_and_the_budget_is_exact(shelf: Shelf) -> None:
    media = ask.chosen(CLIP, None)
    base, fast = ask.answers(shelf, media, QUESTION, [None, ask.spec_of("divprune", 25)], 0.0)
    assert (base.text, base.tokens, base.of) == (examples.right_answer(CLIP, QUESTION), 288, 288)
    assert (fast.spec, fast.tokens, fast.of) == ("divprune:0.25", 72, 288)
    left = [int(re.search(r"(\d+) of 36 left", line)[1]) for _, line in fast.frames]  # type: ignore[index]
    assert len(left) == 8 and sum(left) == 72
    page = ask.cards(base, fast, "left")
    assert "72 <small>of 288" in page and "25%" in page and "Same answer" in page
    assert "Where the time went" in page and "encode" in page


def test_the_picture_shows_what_was_kept(shelf: Shelf) -> None:
    media = ask.chosen(CLIP, None)
    base, fast = ask.answers(shelf, media, QUESTION, [None, "random:0.25"], 0.0)
    html = ask.frames(base, fast)
    found = re.search(r"data-frames='([^']*)'", html)
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
    first = ask.compare(shelf, CLIP, None, QUESTION, "evs", 50, None, fresh=True)
    ways: list[list[Any]] = []
    real = ask.answers

    def counted(shelf: Shelf, media: Any, question: str, specs: list[Any], *rest: Any) -> Any:
        ways.append(specs)
        return real(shelf, media, question, specs, *rest)

    monkeypatch.setattr(ask, "answers", counted)
    second = ask.compare(shelf, CLIP, None, QUESTION, "evs", 10, first[2], fresh=False)
    assert ways == [["evs:0.10"]] and second[1] != first[1]
    assert "29 <small>of 288" in second[0] and second[2][1] is first[2][1]
    ask.compare(shelf, CLIP, None, "How many objects are there?", "evs", 10, second[2], False)
    assert ways[-1] == [None, "evs:0.10"]  # another question


def test_offered_methods_run_at_a_quarter(shelf: Shelf) -> None:
    media = ask.chosen("number.mp4", None)
    for method in ask.offered()[::5]:
        spec = ask.spec_of(method.name, 25)
        found = shelf.visual("video", spec)(media, "What number is on the screen?")
        assert found.kept_tokens == 72 and found.text, spec


def test_wrong_uploads_are_one_line_without_folders(shelf: Shelf, tmp_path: Path) -> None:
    import gradio as gr

    from mmfast.demos.views import polite
    from mmfast.serve.uploads import read_upload

    bad = tmp_path / "film.mp4"
    bad.write_bytes(b"this is no film\n" * 99)
    with pytest.raises(gr.Error) as caught:
        polite(ask.take)(str(bad))
    message = str(caught.value.message)
    assert "film.mp4" in message and str(tmp_path) not in message and "\n" not in message
    own = Shelf(read=read_upload)
    with pytest.raises(MmfastError):
        ask.compare(own, examples.OWN, str(bad), QUESTION, "evs", 25, None, fresh=True)
    with pytest.raises(MmfastError, match="upload"):
        ask.compare(shelf, examples.OWN, None, QUESTION, "evs", 25, None, fresh=True)
    with pytest.raises(MmfastError):
        ask.compare(shelf, CLIP, None, "  ", "evs", 25, None, fresh=True)


def test_an_upload_is_decoded_apart_and_answered(shelf: Shelf) -> None:
    from mmfast.serve.uploads import read_upload

    path = str(examples.CLIPS / CLIP)
    pixels = read_upload(path)
    assert pixels.shape[0] == 8 and pixels.shape[-1] == 3
    (shown,) = ask.answers(shelf, pixels, QUESTION, ["evs:0.5"], 0.0)
    assert shown.text == "left" and shown.tokens == 144
    assert read_upload(str(examples.CLIPS / "picture.jpg")).ndim == 3


def test_what_is_shown_cannot_become_markup() -> None:
    shown = ask.Shown(None, "<img src=x onerror=alert(1)>", 1, 1, 1.0, 1, (), ())
    assert "<img" not in ask.cards(shown, shown, "<b>")
    assert "<b>" not in views.note("<b>")


# --------------------------------------------------------------------------------------- compare


@pytest.mark.parametrize("name", compare.SUITES)
def test_the_chart_draws_the_rows_as_they_are(name: str) -> None:
    path = examples.RESULTS / f"eval-{compare.SUITES[name]}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    drawn = compare.chart(compare.suite_curves(name), ["divprune"])
    for row in rows:
        if row["reduce"] and "+" not in row["reduce"]:
            method, _, share = row["reduce"].rpartition(":")
            says = f"{method} at {float(share):.0%}: {row['accuracy']:.1%} right"
            assert drawn.count(f'aria-label="{says}') == 2, says  # wide and narrow
    assert drawn.count("mm-chosen") == 2 and 'tabindex="0"' in drawn
    assert ">0%</text>" in drawn  # the axis begins at nothing
    assert compare.WIDE.y(0) - compare.WIDE.y(0.5) == pytest.approx(
        compare.WIDE.y(0.5) - compare.WIDE.y(1)
    )


def test_the_table_links_every_paper() -> None:
    table = compare.table("clips")
    known = {method.name: method for method in mmfast.methods("reducer")}
    for name in compare.suite_curves("clips").curves:
        paper = known[name.partition("@")[0]].paper
        assert f"<code>{name}</code>" in table
        assert not paper or f'href="https://arxiv.org/abs/{paper}"' in table
    assert 'rel="noopener noreferrer"' in table


def test_other_questions_keep_the_methods_that_were_measured() -> None:
    update, picture, _ = compare.choose("pages", ["dtd", "divprune"])
    assert update["value"] == ["divprune"]
    assert "model tiny-document" in picture


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
    spoken = shelf.speaker()(QUESTION.lower(), verify="exact")
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
    _until(
        lambda: not [t for t in {*threading.enumerate()} - before if t.name.startswith("mmfast")]
    )


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


def test_all_that_the_page_needs_is_packaged() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = config["package-data"]["mmfast.demos"]
    for path in (ROOT / "demos").iterdir():
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert any(path.match(pattern) for pattern in patterns), path.name


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.cli import serve

    with serve._listen("127.0.0.1", 0) as taken, pytest.raises(MmfastError, match="--port 0"):
        serve._listen("127.0.0.1", taken.getsockname()[1])
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(MmfastError, match=r'pip install "mmfast\[demo\]"'):
        serve._application(None, None, "auto")


def test_the_client_of_gradio_asks(demo_url: str) -> None:
    from gradio_client import Client

    asked = Client(demo_url, verbose=False, analytics_enabled=False)
    found = asked.predict(CLIP, QUESTION, "evs:0.25", api_name="/ask")
    assert found["answer"] == "left" and found["kept_tokens"] == 72 and found["ttft_ms"] > 0
    with pytest.raises(Exception, match="no such example"):
        asked.predict("../../etc/passwd", QUESTION, "", api_name="/ask")


def _until(what: Any, patience: float = 120.0) -> None:
    limit = time.monotonic() + patience
    while not what():
        assert time.monotonic() < limit, "it did not happen"
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
