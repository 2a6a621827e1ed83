"""The realtime socket under those who ask too much: what waits, nests, or is long has a bound."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from realtime_checks import Rules
from realtime_tools import MANUAL, HumService, HumVoices, Wire, fast, said

from mmfast.serve.realtime import protocol
from mmfast.serve.realtime.protocol import EventError
from mmfast.serve.realtime.service import SessionLimits

FAILED = "conversation.item.input_audio_transcription.failed"
COMPLETED = "conversation.item.input_audio_transcription.completed"
HEARD: dict[str, Any] = {
    "type": "realtime",
    "audio": {"input": {"turn_detection": None, "transcription": {"model": "any"}}},
}
WRITTEN: dict[str, Any] = {**MANUAL, "output_modalities": ["text"]}


def item(text: str, name: str | None = None) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    named = {} if name is None else {"id": name}
    return {"type": "message", "role": "user", "content": content, **named}


def sound(name: str) -> dict[str, Any]:
    content = [{"type": "input_audio", "audio": said("left", 0.0)}]
    return {"type": "message", "role": "user", "content": content, "id": name}


def test_recordings_that_wait_are_few_and_the_newest() -> None:
    async def main() -> None:
        service = HumService(limits=SessionLimits(recordings=4))
        service.cost = 5.0  # seconds to understand each
        wire = Wire(service, Rules().server)
        wire.send("session.update", session=HEARD)
        for number in range(20):
            wire.send("conversation.item.create", item=sound(f"r{number}"))
        await wire.event(COMPLETED, 5)
        lost = [event["item_id"] for event in wire.of(FAILED)]
        assert lost == [f"r{number}" for number in range(1, 16)]
        assert {event["error"]["code"] for event in wire.of(FAILED)} == {"too_many_recordings"}
        heard = [event["item_id"] for event in wire.of(COMPLETED)]
        assert heard == ["r0", "r16", "r17", "r18", "r19"]
        wire.send("response.create")  # what was given up is not understood, and harms nothing
        assert (await wire.event("response.done"))["response"]["status"] == "completed"
        await wire.close()

    fast(main())


def test_a_session_that_ends_waits_for_no_recordings() -> None:
    async def main() -> None:
        service = HumService(limits=SessionLimits(recordings=16))
        service.cost = 10.0
        wire = Wire(service, Rules().server)
        wire.send("session.update", session=HEARD)
        for number in range(10):
            wire.send("conversation.item.create", item=sound(f"r{number}"))
        await asyncio.sleep(1.0)
        start = asyncio.get_running_loop().time()
        await wire.close()
        assert asyncio.get_running_loop().time() - start < 15.0  # the one at work, and no other
        assert not service.sessions and not service.hums.open_brains

    fast(main())


@pytest.mark.parametrize("mark", ["[", '{"a":'])
def test_deep_events_are_refused_before_they_are_parsed(mark: str) -> None:
    for depth in (33, 50_000):
        with pytest.raises(EventError) as error:
            protocol.read('{"type": "session.update", "x": ' + mark * depth)
        assert error.value.code == "too_deep"
    text = '{"type": "session.update", "x": [' + "[]," * 300_000 + "0]}"
    tracemalloc.start()
    try:
        with pytest.raises(EventError) as error:
            protocol.read(text)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(text)
    finally:
        tracemalloc.stop()
    assert error.value.code == "too_many_values"
    assert protocol.read('{"type": "x", "a": [[["\\ud83d\\ude00"]]]}')["a"] == [[["😀"]]]
    with pytest.raises(EventError) as error:
        protocol.read('{"type": NaN}')
    assert error.value.code == "invalid_json"


def test_depth_is_the_servers() -> None:
    async def main() -> None:
        wire = Wire(HumService(max_json_depth=5), Rules().server)
        wire.raw('{"type": "session.update", "session": [[[[[[]]]]]]}')
        assert (await wire.event("error"))["error"]["code"] == "too_deep"
        await wire.close()

    fast(main())


def test_texts_have_the_servers_limit() -> None:
    """One that is too long is refused; of many the newest are read."""

    async def main() -> None:
        voices = HumVoices()
        service = HumService(voices, SessionLimits(text=100))
        wire = Wire(service, Rules().server)
        wire.send("session.update", session=WRITTEN)
        long = {"type": "realtime", "instructions": "x" * 101}
        wire.send("session.update", session=long)
        wire.send("conversation.item.create", item=item("x" * 101))
        wire.send("response.create", response={"instructions": "x" * 101})
        await wire.event("error", 3)
        codes = [event["error"]["code"] for event in wire.of("error")]
        places = [event["error"]["param"] for event in wire.of("error")]
        assert codes == ["string_above_max_length"] * 3
        assert places == ["session.instructions", "item.content", "response.instructions"]
        for word in ("one", "two", "three"):
            wire.send("conversation.item.create", item=item(f"{word} " + "y" * 40))
        wire.send("response.create")
        await wire.event("response.done")
        (question,) = voices.questions
        assert [turn.text[:5] for turn in question.turns] == ["two y", "three"]
        brought = [item("z" * 80), item("w" * 80)]
        wire.send("response.create", response={"conversation": "none", "input": brought})
        await wire.event("response.done", 2)
        assert [turn.text[0] for turn in voices.questions[1].turns] == ["w"]
        await wire.close()

    fast(main())


def test_tokens_have_the_servers_limit() -> None:
    async def main() -> None:
        voices = HumVoices()
        wire = Wire(HumService(voices, SessionLimits(context=20)), Rules().server)
        wire.send("session.update", session=WRITTEN)
        for count in (9, 8, 7):  # a word is a token here
            wire.send("conversation.item.create", item=item("go " * count))
        wire.send("response.create", response={"max_output_tokens": 4})
        done = await wire.event("response.done")
        assert [len(turn.text.split()) for turn in voices.questions[0].turns] == [8, 7]
        assert done["response"]["usage"]["input_tokens"] == 15
        wire.send("conversation.item.create", item=item("and now"))
        wire.send("response.create")  # "inf" is what is left of the context
        await wire.event("response.done", 2)
        assert voices.questions[1].limit == 20 - sum(
            len(turn.text.split()) for turn in voices.questions[1].turns
        )
        wire.send("conversation.item.create", item=item("no " * 30))
        wire.send("response.create")
        done = await wire.event("response.done", 3)
        assert done["response"]["status"] == "failed"
        assert done["response"]["status_details"]["error"]["code"] == "context_length_exceeded"
        assert len(voices.questions) == 2
        await wire.close()

    fast(main())


def test_limits_come_from_the_servers_options() -> None:
    from mmfast.serve.config import ServerConfig
    from mmfast.serve.realtime.service import RealtimeService

    config = ServerConfig(max_text=1234, context=99)
    limits = RealtimeService(config, HumVoices).limits
    assert (limits.text, limits.context) == (1234, 99)


def test_what_has_no_effect_is_said() -> None:
    async def main() -> None:
        wire = Wire(HumService(), Rules().server)
        near = {"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}
        wire.send("session.update", session={"type": "realtime", **near, "truncation": "auto"})
        told = (await wire.event("session.updated"))["session"]
        assert told["audio"]["input"]["noise_reduction"] is None  # as it is
        assert told["mmfast"] == {"without_effect": ["audio.input.noise_reduction"]}
        wire.send("session.update", session={"type": "realtime", "tracing": "auto"})
        told = (await wire.event("session.updated", 2))["session"]
        assert told["mmfast"]["without_effect"] == ["audio.input.noise_reduction", "tracing"]
        off = {"audio": {"input": {"noise_reduction": None}}, "tracing": None}
        wire.send("session.update", session={"type": "realtime", **off})
        assert "mmfast" not in (await wire.event("session.updated", 3))["session"]
        wrong = {"audio": {"input": {"noise_reduction": {"type": "moon"}}}}
        wire.send("session.update", session={"type": "realtime", **wrong})
        error = (await wire.event("error"))["error"]
        assert error["param"] == "session.audio.input.noise_reduction.type"
        await wire.close()

    fast(main())


def test_the_official_types_know_what_is_said() -> None:
    openai = pytest.importorskip("openai")
    from openai.types.realtime import RealtimeServerEvent

    from mmfast.serve.realtime.protocol import SessionShape
    from mmfast.serve.realtime.settings import Settings

    settings = Settings("sess_1", "mmfast", ("a",), 60.0)
    given = {"audio": {"input": {"noise_reduction": {"type": "far_field"}}}}
    settings.update(SessionShape.model_validate(given))
    event = {"type": "session.updated", "event_id": "event_1", "session": settings.values}
    value = json.loads(json.dumps(event))
    assert openai._models.validate_type(type_=RealtimeServerEvent, value=value) is not None
