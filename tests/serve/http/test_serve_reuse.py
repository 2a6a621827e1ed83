"""Media paid for once, over HTTP: counted calls, the answers of a pipeline, metrics, refusals."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from PIL import Image, ImageDraw
from serve_tools import (
    CHAT,
    MODEL,
    ROOT,
    app_of,
    client_of,
    data_url,
    get,
    image_part,
    post,
    text,
    user,
)
from torch.nn.modules.module import register_module_forward_pre_hook

import mmfast
from mmfast.bench.suites.reuse import QUESTIONS
from mmfast.serve.config import ServerConfig
from mmfast.serve.http.service import load_engine

CLIP = ROOT / "assets" / "clips" / "red-circle.mp4"
KEYS = ("key-of-one", "key-of-two")


@contextmanager
def server(reuse: str | None = None, **options: Any) -> Iterator[Any]:
    """The embedded model's app."""
    config = {"device": "cpu", "dtype": "float32", "reuse": reuse, **options}
    engine = load_engine(ServerConfig(**config, voice=False))
    try:
        yield app_of(engine, **config)
    finally:
        engine.close()


def picture(colour: str, shape: str = "ellipse") -> bytes:
    made, file = Image.new("RGB", (96, 96), "black"), io.BytesIO()
    getattr(ImageDraw.Draw(made), shape)((24, 24, 72, 72), fill=colour)
    made.save(file, "PNG")
    return file.getvalue()


ONE, TWO = picture("red"), picture("blue", "rectangle")
PROMPTS: tuple[tuple[str | bytes, ...], ...] = (
    (ONE, "What colour is the circle?"),
    ("Look at this.", ONE, "What colour is the circle?"),
    (ONE, TWO, "What shape is the blue object?"),
    (TWO, ONE, "What shape is the blue object?"),
    ("First", TWO, "then", ONE, "What colour is the circle?"),
)


def asked(parts: Sequence[str | bytes]) -> dict[str, Any]:
    content = [text(part) if isinstance(part, str) else image_part(part) for part in parts]
    return {"model": MODEL, "messages": user(*content), "max_tokens": 6}


def said(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def rows_of(reply: Any) -> dict[str, tuple[int, int]]:
    return {r["stage"]: (r["tokens_in"], r["tokens_out"]) for r in reply.json()["mmfast"]["rows"]}


def gauges(app: Any) -> dict[str, float]:
    found = re.findall(r'mmfast_engine{name="(reuse_\w+)"} (\S+)', get(app, "/metrics").text)
    return {name: float(value) for name, value in found}


@contextmanager
def calls() -> Iterator[tuple[list[int], list[int]]]:
    """Pictures that towers see, and tokens that first decoder layers see, a number a call."""
    towers, layers = list[int](), list[int]()

    def note(module: Any, args: Any) -> None:
        name = type(module).__name__
        if name == "SiglipVisionModel":
            towers.append(1)
        elif name == "Qwen2DecoderLayer" and module.self_attn.layer_idx == 0:
            layers.append(args[0].shape[1])

    handle = register_module_forward_pre_hook(note)
    try:
        yield towers, layers
    finally:
        handle.remove()


def about_clip(question: str) -> dict[str, Any]:
    film = {"type": "video_url", "video_url": {"url": data_url(CLIP.read_bytes(), "video/mp4")}}
    return {"model": MODEL, "messages": user(film, text(question)), "max_tokens": 6}


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("reuse", [None, "prefix", "blend:0.15"])
def test_a_clip_asked_five_questions_is_paid_for_once(reuse: str | None, tmp_path: Path) -> None:
    more = {} if reuse is None else {"reuse_folder": str(tmp_path)}
    with server(reuse, **more) as app, calls() as (towers, layers):
        replies = [post(app, about_clip(question)) for question in QUESTIONS]
    assert len(towers) == 1
    if reuse is not None:  # the batch of a server without it calls no layer as a module
        assert len([n for n in layers if n > 100]) == 1
    usages = [each.json()["usage"] for each in replies]
    shares = [u["prompt_tokens_details"]["cached_tokens"] / u["prompt_tokens"] for u in usages]
    assert shares[0] == 0 and min(shares[1:]) > 0.8
    with server() as app:
        expected = [said(post(app, about_clip(question))) for question in QUESTIONS]
    assert [said(each) for each in replies] == expected and len(set(expected)) > 2
    if reuse is not None:  # and never again, by a server that starts later
        with server(reuse, **more) as app, calls() as (towers, layers):
            assert said(post(app, about_clip(QUESTIONS[0]))) == expected[0]
        assert not towers and max(layers) < 100


def test_modules_of_a_schema_stand_before_a_question(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"modules": {"film": {"video": str(CLIP)}, "note": "a note"}}))
    with server("prefix", modules=str(path)) as app, calls() as (towers, _):
        asked = [
            {
                "model": MODEL,
                "messages": user(text(question)),
                "max_tokens": 6,
                "mmfast": {"modules": ["film"]},
            }
            for question in QUESTIONS[:2]
        ]
        replies = [post(app, each).json() for each in asked]
        wrong = post(app, {**asked[0], "mmfast": {"modules": ["movie"]}})
    assert len(towers) == 1
    assert [each["choices"][0]["message"]["content"] for each in replies] == expected_of(
        QUESTIONS[:2]
    )
    assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 280
    assert wrong.status_code == 400 and "unknown module 'movie'" in wrong.json()["error"]["message"]


def expected_of(questions: Any) -> list[str]:
    """Answers of a pipeline about the clip as a plain prompt."""
    pipe = mmfast.pipeline("video-qa", device="cpu", dtype="float32", max_new_tokens=6)
    return [pipe(str(CLIP), question).text for question in questions]


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("spec", ["prefix", "blend:0.15", "craft:0.3"])
def test_pictures_behind_other_text_and_swapped(spec: str) -> None:
    pipe = mmfast.pipeline("image-qa", device="cpu", dtype="float32", reuse=spec, max_new_tokens=6)
    with server(spec) as app:
        for number, parts in enumerate(PROMPTS):
            reply = post(app, asked(parts))
            chat = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image", "image": Image.open(io.BytesIO(part))}
                for part in parts
            ]
            expected = pipe([{"role": "user", "content": chat}])
            assert said(reply) == expected.text
            mine = rows_of(reply)
            theirs = {r.stage: (r.tokens_in, r.tokens_out) for r in expected.trace.rows}
            for stage in ("reuse encoder", "reuse kv"):
                assert mine[stage] == theirs[stage], (number, stage)
            taken = max(n - m for n, m in (mine["reuse encoder"], mine["reuse kv"]))
            usage = reply.json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == taken
        found, store = gauges(app), pipe.reuse.store
        assert found["reuse_hits"] == store.hits > 5 and found["reuse_misses"] == store.misses
        assert found["reuse_bytes"] == store.nbytes
        assert found["reuse_tokens"] > 0 < found["reuse_computed_tokens"]
        if spec != "prefix":  # swapped pictures were read in part
            assert mine["reuse kv"][1] < 0.5 * mine["reuse kv"][0]


def test_two_requests_at_once_share_a_store() -> None:
    with server() as app:
        expected = [said(post(app, asked(parts))) for parts in PROMPTS]

    async def go(app: Any) -> list[Any]:
        async with client_of(app) as client:
            each = [client.post(CHAT, json=asked(parts)) for parts in PROMPTS * 2]
            return await asyncio.gather(*each)

    with server("blend:1", slots=3) as app, calls() as (towers, _):
        replies = asyncio.run(go(app))
        assert gauges(app)["reuse_hits"] > 10
    assert [said(each) for each in replies] == expected * 2
    # each picture alone and in an album is a value of its own
    assert len(towers) <= 6
    assert sum(each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
               for each in replies) >= 5  # fmt: skip


def test_one_picture_in_two_requests_at_once_is_encoded_once() -> None:
    async def go(app: Any) -> list[Any]:
        async with client_of(app) as client:
            each = [client.post(CHAT, json=asked((ONE, text))) for text in QUESTIONS[:4]]
            return await asyncio.gather(*each)

    with server("prefix") as app, calls() as (towers, layers):
        asyncio.run(go(app))
    assert len(towers) == 1 and len([n for n in layers if n > 100]) == 1


def test_little_memory_pushes_out() -> None:
    pictures = [picture(colour) for colour in ("red", "blue", "lime")]
    with server("prefix") as app:
        said(post(app, asked((pictures[0], QUESTIONS[0]))))
        size = int(gauges(app)["reuse_bytes"])
    with server("prefix", reuse_memory=str(int(1.5 * size))) as app:
        fresh = []
        for each in (0, 0, 1, 2, 0):
            reply = post(app, asked((pictures[each], QUESTIONS[0])))
            fresh.append(rows_of(reply)["reuse encoder"][1] > 0)
            assert gauges(app)["reuse_bytes"] <= 1.5 * size
    assert fresh == [True, False, True, True, True]


def test_a_pipeline_finds_what_a_server_wrote(tmp_path: Path) -> None:
    with server("prefix", reuse_folder=str(tmp_path)) as app:
        expected = said(post(app, asked(PROMPTS[0])))
    options = {"reuse": "prefix", "store": tmp_path, "max_new_tokens": 6}
    pipe = mmfast.pipeline("image-qa", device="cpu", dtype="float32", **options)
    found = pipe(Image.open(io.BytesIO(ONE)), PROMPTS[0][1])
    rows = {row.stage: row for row in found.trace.rows}
    assert found.text == expected and rows["reuse encoder"].tokens_out == 0
    assert rows["reuse kv"].tokens_out < 0.1 * rows["reuse kv"].tokens_in


def test_a_request_chooses_its_share_and_what_cannot_act_is_refused() -> None:
    def more(reuse: str, **options: Any) -> dict[str, Any]:
        return {**asked(PROMPTS[3]), "mmfast": {"reuse": reuse, **options}}

    refused = [("prefix", {"cache": "snapkv:64"}, "cache policy"), ("all", {}, "choices")]
    with server("blend:0.15") as app:
        said(post(app, asked(PROMPTS[2])))
        specs = ("blend:0", "blend:0.15", "craft:0.5", "blend:1", "prefix")
        rows = [rows_of(post(app, more(spec))) for spec in specs]
        computed = [each["reuse kv"][1] for each in rows]
        assert computed[0] < computed[1] < computed[2] < computed[3] == computed[4]
        for spec, options, message in refused:
            reply = post(app, more(spec, **options))
            assert reply.status_code == 400 and message in reply.json()["error"]["message"]
        wish = {"model": MODEL, "prompt": "the red", "mmfast": {"reuse": "prefix"}}
        reply = post(app, wish, path="/v1/completions")
        assert reply.status_code == 400 and "acts on media" in reply.json()["error"]["message"]
    for reuse, message in (("encoder", "give 'encoder'"), (None, "--reuse")):
        with server(reuse) as app:
            reply = post(app, more("blend:0.5"))
            assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_each_key_has_its_own_store() -> None:
    with server("blend:0.15", api_keys=KEYS) as app:
        fresh = []
        for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[1]):
            headers = {"Authorization": f"Bearer {key}"}
            reply = post(app, asked(PROMPTS[0]), headers=headers)
            fresh.append(rows_of(reply)["reuse encoder"][1] > 0)
    assert fresh == [True, True, False, False]


def test_a_request_with_a_policy_is_read_as_without_a_store() -> None:
    document = {**asked(PROMPTS[0]), "mmfast": {"cache": "sink:4+window:64"}}
    with server() as app:
        expected = said(post(app, document))
    with server("prefix") as app:
        for _ in range(2):
            reply = post(app, document)
            assert said(reply) == expected and "reuse kv" not in rows_of(reply)
        assert gauges(app)["reuse_hits"] == 0
