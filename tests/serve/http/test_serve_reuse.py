"""Five questions about one clip over HTTP: one call of the tower, and the clip is read once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
from serve_tools import MODEL, app_of, data_url, running, text, user

from mmfast.serve.engine import encoder

CLIPS = Path(__file__).resolve().parents[3] / "assets" / "clips"
QUESTIONS = (
    "How many objects are there?",
    "What colour is the circle?",
    "Which way does the red circle move?",
    "What shape is the red object?",
    "How many circles are there?",
)


@pytest.fixture(scope="module")
def client(engine: Any) -> Iterator[Any]:
    with (
        running(app_of(engine, None, max_tokens=16)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made,
    ):
        yield made


def test_the_clip_is_encoded_and_read_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    encode = encoder.encode

    def counted(base: Any, adapter: Any, needs: Any, group: Any, *specs: Any) -> Any:
        calls.append(sum(unit.count for unit in group))
        return encode(base, adapter, needs, group, *specs)

    monkeypatch.setattr(encoder, "encode", counted)
    url = data_url((CLIPS / "four-shapes.mp4").read_bytes(), "video/mp4")
    clip = {"type": "video_url", "video_url": {"url": url}}
    fresh = []
    for question in QUESTIONS:
        messages = user(clip, text(question))
        reply = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        usage = reply.usage
        fresh.append(usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0))
    assert calls == [1]  # and none for the four questions that follow
    assert fresh[0] > 256 and all(n < fresh[0] / 4 for n in fresh[1:]), fresh
