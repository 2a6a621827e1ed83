"""The official client talks to the server; its own types check every event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
import websockets
from openai import AsyncOpenAI
from realtime_client import Talk, listening, talking
from realtime_tools import ANSWER, MANUAL, HumVoices, packed, png, said
from tone_models import HumEar, hum

from mmfast.core.speech import Turn
from mmfast.serve.config import ServerConfig
from mmfast.serve.realtime.service import RealtimeService

LONG = "one two three four five six seven eight nine ten eleven twelve " * 4


def say(turns: Sequence[Turn], frames: int) -> str:
    """Tells a long story where it is asked to, and counts pictures."""
    asked = turns[-1].text
    if "story" in asked:
        return LONG.strip()
    return f"{frames} frames" if "frames" in asked else ANSWER


@pytest.fixture(scope="module")
def voices() -> HumVoices:
    return HumVoices(say, each=lambda: time.sleep(0.01))


@pytest.fixture(scope="module")
def url(voices: HumVoices) -> Iterator[str]:
    service = RealtimeService(
        ServerConfig(realtime_sessions=3), lambda: voices, ear=lambda turns: HumEar()
    )
    with listening(service) as url:
        yield url
        deadline = time.monotonic() + 30
        while service.sessions and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not service.sessions and not voices.open_brains and not voices.answering


def run(url: str, what: Callable[[Talk], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        async with talking(url, **options) as talk:
            await what(talk)

    asyncio.run(main())


async def transcribing(talk: Talk) -> None:
    asked = {"audio": {"input": {"transcription": {"model": "any"}}}}
    await talk.connection.session.update(session={"type": "realtime", **asked})
    await talk.event("session.updated")


def test_a_spoken_question(url: str) -> None:
    async def what(talk: Talk) -> None:
        await transcribing(talk)
        await talk.speak(said("what is it?"))
        done = await talk.event("response.done")
        started = talk.of("input_audio_buffer.speech_started")[0]
        stopped = talk.of("input_audio_buffer.speech_stopped")[0]
        heard = talk.of("conversation.item.input_audio_transcription.completed")[0]
        assert heard["transcript"] == "what is it?" and heard["item_id"] == started["item_id"]
        assert started["audio_start_ms"] == 0 and 450 <= stopped["audio_end_ms"] <= 650
        assert done["response"]["status"] == "completed"
        assert done["response"]["output"][0]["content"][0]["transcript"] == ANSWER
        assert done["response"]["usage"]["output_tokens"] > len(ANSWER.split())
        kinds = [event["type"] for event in talk.events]
        order = [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.done",
        ]
        assert [kinds.index(kind) for kind in order] == sorted(map(kinds.index, order))

    run(url, what)


def test_text_and_what_one_response_may_change(url: str, voices: HumVoices) -> None:
    async def what(talk: Talk) -> None:
        await talk.connection.session.update(
            session={"type": "realtime", "output_modalities": ["text"], "instructions": "be brief"}
        )
        await talk.say("hello")
        done = await talk.event("response.done")
        assert done["response"]["output"][0]["content"] == [{"type": "output_text", "text": ANSWER}]
        assert not talk.of("response.output_audio.delta")
        assert voices.questions[-1].instructions == "be brief"
        wish = {
            "output_modalities": ["audio"],
            "metadata": {"client_event_id": "mine"},
            "audio": {"output": {"voice": "marin"}},
            "max_output_tokens": 25,
            "conversation": "none",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "tell me a story"}],
                }
            ],
        }
        await talk.connection.response.create(response=wish)
        done = await talk.event("response.done", 2)
        response = done["response"]
        assert response["metadata"] == {"client_event_id": "mine"}
        assert response["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
        assert response["conversation_id"] is None and response["usage"]["output_tokens"] <= 25
        assert len(voices.questions[-1].turns) == 1
        assert len(talk.rules.items) == 2  # the question that was written, and its answer

    run(url, what)


def test_who_speaks_is_listened_to(url: str, voices: HumVoices) -> None:
    async def what(talk: Talk) -> None:
        await talk.speak(said("tell me a story"))
        await talk.event("response.output_audio.delta", 12)
        await asyncio.sleep(0.5)
        await talk.connection.input_audio_buffer.append(audio=packed(hum("stop")))
        done = await talk.event("response.done")
        kinds = [event["type"] for event in talk.events]
        began = len(kinds) - 1 - kinds[::-1].index("input_audio_buffer.speech_started")
        # nothing but its end comes between the first word and the end of what was being said
        assert kinds[began + 1 :] == [
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
        details = done["response"]["status_details"]
        assert details == {"type": "cancelled", "reason": "turn_detected"}
        await talk.speak(packed(hum("").new_zeros(8000)))
        await talk.event("response.done", 2)
        kept = voices.questions[-1].turns[1]
        assert kept.role == "assistant" and LONG.startswith(kept.text) and kept.text
        assert len(kept.text) < len(done["response"]["output"][0]["content"][0]["transcript"])

    run(url, what)


def test_what_was_not_heard_is_forgotten(url: str, voices: HumVoices) -> None:
    async def what(talk: Talk) -> None:
        await talk.say("tell me a story")
        item = (await talk.event("response.done"))["response"]["output"][0]["id"]
        truncate = talk.connection.conversation.item.truncate
        await truncate(item_id=item, content_index=0, audio_end_ms=10_000_000)
        assert (await talk.event("conversation.item.truncated"))["audio_end_ms"] > 1000  # no error
        await truncate(item_id=item, content_index=0, audio_end_ms=300)
        assert (await talk.event("conversation.item.truncated", 2))["audio_end_ms"] == 300
        await talk.connection.conversation.item.retrieve(item_id=item)
        kept = (await talk.event("conversation.item.retrieved"))["item"]["content"][0]
        assert kept["transcript"] == "one two three"
        await talk.say("and then?")
        await talk.event("response.done", 2)
        assert [turn.text for turn in voices.questions[-1].turns] == [
            "tell me a story",
            "one two three",
            "and then?",
        ]
        await talk.connection.conversation.item.delete(item_id=item)
        await talk.event("conversation.item.deleted")

    run(url, what)


def test_cancel(url: str) -> None:
    async def what(talk: Talk) -> None:
        await talk.say("tell me a story")
        await talk.event("response.output_audio.delta")
        await talk.connection.response.create()
        assert (await talk.event("error"))["error"]["code"] == (
            "conversation_already_has_active_response"
        )
        await talk.connection.response.cancel()
        done = await talk.event("response.done")
        assert done["response"]["status_details"]["reason"] == "client_cancelled"
        assert done["response"]["output"][0]["status"] == "incomplete"
        await talk.connection.response.cancel(event_id="late")
        error = (await talk.event("error", 2))["error"]
        assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "late")

    run(url, what)


def test_errors_name_what_is_wrong_and_the_session_goes_on(url: str) -> None:
    async def what(talk: Talk) -> None:
        wrong: list[tuple[dict[str, Any], str, str]] = [
            ({"type": "response.creat"}, "type", "did you mean 'response.create'"),
            (
                {
                    "type": "session.update",
                    "session": {"type": "realtime", "audio": {"output": {"speed": 9.0}}},
                },
                "session.audio.output.speed",
                "1.5",
            ),
            (
                {
                    "type": "session.update",
                    "session": {"type": "realtime", "audio": {"output": {"voice": "humm"}}},
                },
                "session.audio.output.voice",
                "did you mean 'hum'",
            ),
            (
                {"type": "session.update", "session": {"type": "realtime", "modalities": []}},
                "session.modalities",
                "",
            ),
            ({"type": "input_audio_buffer.append", "audio": "?"}, "audio", "base64"),
            ({"type": "conversation.item.retrieve", "item_id": "x"}, "item_id", "no item 'x'"),
            (
                {
                    "type": "conversation.item.create",
                    "item": {
                        "type": "message",
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}],
                    },
                },
                "item.content.0.image_url",
                "data:",
            ),
        ]
        for number, (event, param, text) in enumerate(wrong):
            await talk.connection.send({**event, "event_id": f"mine_{number}"})
            error = (await talk.event("error", number + 1))["error"]
            assert error["event_id"] == f"mine_{number}" and error["param"] == param, error
            assert text in error["message"], error
        await talk.say("hello")
        assert (await talk.event("response.done"))["response"]["status"] == "completed"

    run(url, what)


def test_frames_are_watched_and_never_answered(url: str) -> None:
    async def what(talk: Talk) -> None:
        for color in (50, 100, 150):
            content = [{"type": "input_image", "image_url": png(color)}]
            item = {"type": "message", "role": "user", "content": content}
            await talk.connection.conversation.item.create(item=item)
        await talk.connection.send(
            {"type": "mmfast.input_image_buffer.append", "image": png(200), "time": 9.0}
        )
        await talk.event("conversation.item.done", 3)
        await asyncio.sleep(0.2)
        assert not talk.of("response.created")
        await talk.speak(said("how many frames?"))
        done = await talk.event("response.done")
        assert done["response"]["output"][0]["content"][0]["transcript"] == "4 frames"
        assert done["response"]["usage"]["input_token_details"]["image_tokens"] == 16
        assert done["response"]["mmfast"]["frames"]["seen"] == 4
        assert len(talk.rules.items) == 5  # three frames, the question, its answer

    run(url, what)


def test_the_client_says_when_a_turn_is_over(url: str) -> None:
    async def what(talk: Talk) -> None:
        await talk.connection.session.update(session=MANUAL)
        await talk.connection.input_audio_buffer.commit(event_id="empty")
        assert (await talk.event("error"))["error"]["code"] == "input_audio_buffer_commit_empty"
        await talk.speak(said("nobody hears this"))
        await talk.connection.input_audio_buffer.clear()
        await talk.speak(said("what is it?"))
        await talk.connection.input_audio_buffer.commit()
        item = (await talk.event("conversation.item.done"))["item"]
        assert not talk.of("response.created") and item["content"][0]["type"] == "input_audio"
        await talk.connection.response.create()
        await talk.event("response.done")
        await talk.connection.conversation.item.retrieve(item_id=item["id"])
        kept = (await talk.event("conversation.item.retrieved"))["item"]["content"][0]
        assert kept["transcript"] == "what is it?" and len(kept["audio"]) > 1000

    run(url, what)


def test_who_may_not_come_in(url: str) -> None:
    async def status(url: str, **options: Any) -> int:
        try:
            async with talking(url, **options):
                return 101
        except websockets.InvalidStatus as error:
            assert b"message" in error.response.body
            return error.response.status_code

    async def main() -> None:
        for name in ("gpt-realtime", "another"):  # agents ask for names of other vendors
            assert await status(url, model=name) == 101
        strict = RealtimeService(ServerConfig(strict_model=True), HumVoices)
        with listening(strict) as narrow:
            assert await status(narrow, model="gpt-realtime") == 404
            assert await status(narrow, model="mmfast") == 101
        async with talking(url), talking(url), talking(url):
            assert await status(url) == 429
        service = RealtimeService(
            ServerConfig(api_keys=("secret",)), HumVoices, ear=lambda turns: HumEar()
        )
        with listening(service) as guarded:
            assert await status(guarded, api_key="wrong") == 401
            assert await status(guarded, api_key="secret") == 101
            offered = ["realtime", "openai-insecure-api-key.secret"]
            address = guarded.replace("http", "ws") + "/realtime"
            async with websockets.connect(address, subprotocols=offered) as browser:  # type: ignore[arg-type]
                assert browser.subprotocol == "realtime"
                assert "session.created" in str(await browser.recv())
            with pytest.raises(websockets.InvalidStatus):
                await websockets.connect(address, subprotocols=["realtime"])  # type: ignore[list-item]

    asyncio.run(main())


def test_the_client_reads_our_events_as_its_own(url: str) -> None:
    """As its documentation has it: iterate over typed events."""

    async def main() -> str:
        client = AsyncOpenAI(api_key="none", base_url=url)
        async with client, client.realtime.connect(model="mmfast") as connection:
            await connection.session.update(
                session={"type": "realtime", "output_modalities": ["text"]}
            )
            await connection.conversation.item.create(
                item={
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "Say hello!"}],
                }
            )
            await connection.response.create()
            text = ""
            async for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.done":
                    break
            return text

    assert asyncio.run(main()) == ANSWER
