"""Habits of agents: they speak first, name other models, send pictures in a row, or only listen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from realtime_checks import Rules
from realtime_tools import ANSWER, HumBrain, HumService, HumVoices, Wire, fast, png, said
from serve_tools import saying
from tone_models import HumModel, HumSpeaker

from mmfast.core.speech import Sound, Turn
from mmfast.serve.calls import call_schema
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Delta, Finish, Request
from mmfast.serve.engine.rules import json_grammar
from mmfast.serve.realtime.brain import BrainQuestion, ChatterVoices
from mmfast.serve.realtime.engine import EngineVoices
from mmfast.serve.realtime.response import GO_ON, GREET
from mmfast.serve.realtime.service import RealtimeService, SessionLimits
from mmfast.serve.realtime.session import NEAR
from mmfast.voice.models import Cascade

HEARD = "conversation.item.input_audio_transcription.completed"


def test_a_response_without_a_question_greets_and_goes_on() -> None:
    async def main() -> None:
        service = HumService()
        wire = Wire(service, Rules().server)
        wire.send("session.update", session={"type": "realtime", "instructions": "be Kelly"})
        for number in (1, 2):
            wire.send("response.create")
            done = await wire.event("response.done", number)
            assert done["response"]["status"] == "completed"
        wire.send("response.create", response={"instructions": "say a number"})
        await wire.event("response.done", 3)
        first, second, third = service.hums.questions
        assert first.turns == (Turn("user", GREET),) and first.instructions == "be Kelly"
        assert second.turns == (Turn("assistant", ANSWER), Turn("user", GO_ON))
        assert first.prompted and second.prompted and not third.prompted
        assert third.turns[-1] == Turn("user", "say a number")
        await wire.close()

    fast(main())


def test_other_names_of_the_model_are_shown_as_without_effect() -> None:
    async def main() -> None:
        wire = Wire(HumService(), Rules().server, query_string=b"model=gpt-realtime")
        wire.send("session.update", session={"type": "realtime", "model": "gpt-realtime"})
        shown = (await wire.event("session.updated"))["session"]
        assert shown["model"] == "mmfast" and shown["mmfast"]["without_effect"] == ["model"]
        wire.send("session.update", session={"type": "realtime", "model": "mmfast"})
        assert "mmfast" not in (await wire.event("session.updated", 2))["session"]
        await wire.close()

    fast(main())


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 8))
def test_pictures_of_items_are_all_seen_in_order_of_time(runs: list[int], room: int) -> None:
    brains = list[HumBrain]()

    class Voices(HumVoices):
        def open(self) -> HumBrain:
            brains.append(super().open())
            return brains[-1]

    async def main() -> None:
        wire = Wire(HumService(Voices(), limits=SessionLimits(frames=room)))
        for run in runs:
            content = [{"type": "input_image", "image_url": png()}] * run
            item = {"type": "message", "role": "user", "content": content}
            wire.send("conversation.item.create", item=item)
        wire.send("response.create", response={"instructions": "what moves?"})
        done = await wire.event("response.done")
        counts = done["response"]["mmfast"]["frames"]
        assert counts["came"] == counts["seen"] == sum(runs) and not counts["dropped"]
        await wire.close()

    fast(main())
    assert all(after - before >= NEAR - 1e-6 for before, after in pairwise(brains[0].frames))


def test_a_session_of_transcription_only_listens() -> None:
    async def main(how: str) -> None:
        query = b"intent=transcription" if how == "intent" else b"model=mmfast"
        service = HumService()
        wire = Wire(service, query_string=query)
        created = (await wire.event("session.created"))["session"]
        audio: dict[str, Any] = {"input": {"turn_detection": {"type": "server_vad"}}}
        wire.send("session.update", session={"type": "transcription", "audio": audio})
        shown = (await wire.event("session.updated"))["session"]
        assert created["type"] == ("transcription" if how == "intent" else "realtime")
        assert shown["type"] == "transcription" and "output" not in shown["audio"]
        assert shown["object"] == "realtime.transcription_session" and "voice" not in str(shown)
        wire.send("input_audio_buffer.append", audio=said("what is it?"))
        assert (await wire.event(HEARD))["transcript"] == "what is it?"
        wire.send("response.create")
        assert (await wire.event("error"))["error"]["param"] == "type"
        assert not wire.of("response.created") and not service.hums.questions
        wire.send("session.update", session={"type": "transcription", "instructions": "be rude"})
        shown = (await wire.event("session.updated", 2))["session"]
        assert shown["mmfast"]["without_effect"] == ["instructions"]
        wire.send("session.update", session={"type": "realtime"})  # and may become a dialogue
        wire.send("response.create")
        await wire.event("response.done")
        await wire.close()

    for how in ("intent", "update"):
        fast(main(how))


TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def calling(answers: list[str]) -> tuple[HumService, list[Sequence[Turn]]]:
    """A service whose model calls tools: it writes the answers in pieces of three letters."""
    asked, left = list[Sequence[Turn]](), iter(answers)

    def chat(turns: Sequence[Turn]) -> Iterator[str]:
        asked.append(turns)
        text = next(left)
        return (text[at : at + 3] for at in range(0, len(text), 3))

    chatter = Cascade(HumModel(), chat, HumSpeaker(1600), calls_tools=True)
    return HumService(ChatterVoices(chatter)), asked


def test_a_tool_is_called_and_its_result_is_answered() -> None:
    async def main() -> None:
        service, asked = calling([f"one moment {CALL}", "sunny"])
        wire = Wire(service)
        wire.send("session.update", session={"type": "realtime", "tools": [TOOL]})
        assert (await wire.event("session.updated"))["session"]["tools"] == [TOOL]
        wire.send("response.create", response={"instructions": "what is the weather?"})
        done = (await wire.event("response.done"))["response"]
        said, call = done["output"]
        assert said["content"][0]["transcript"].strip() == "one moment"
        assert (call["type"], call["name"]) == ("function_call", "weather")
        assert json.loads(call["arguments"]) == {"city": "Paris"}
        assert '"weather"' in asked[0][0].text  # told of the function
        arguments = wire.of("response.function_call_arguments.done")[0]
        assert arguments["output_index"] == 1 and arguments["call_id"] == call["call_id"]
        spoken = [event["delta"] for event in wire.of("response.output_audio_transcript.delta")]
        assert "tool_call" not in "".join(spoken)
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        wire.send("conversation.item.create", item=output)
        wire.send("response.create")
        await wire.event("response.done", 2)
        assert "sun" in asked[1][-1].text and "weather" in asked[1][-2].text
        assert {event["item"]["type"] for event in wire.of("conversation.item.added")} == {
            "message",
            "function_call",
            "function_call_output",
        }
        await wire.close()

    fast(main())


@pytest.mark.parametrize("wrong", ["{", '{"name": "other"}', "[]", '{"arguments": {}}'])
def test_a_call_that_is_none_fails_the_response(wrong: str) -> None:
    async def main() -> None:
        service, _ = calling([f"<tool_call>{wrong}</tool_call>", "fine"])
        wire = Wire(service)
        wire.send("session.update", session={"type": "realtime", "tools": [TOOL]})
        for number, status in ((1, "failed"), (2, "completed")):
            wire.send("response.create", response={"instructions": "what is the weather?"})
            done = await wire.event("response.done", number)
            assert done["response"]["status"] == status
        wire.send("session.update", session={"type": "realtime", "tools": [{"type": "mcp"}]})
        assert (await wire.event("error"))["error"]["param"] == "session.tools.0"
        await wire.close()

    fast(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "weather"}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}},
        {"tools": [TOOL], "tool_choice": "sometimes"},
        {"tools": [TOOL], "tool_choice": 7},
        {"tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "x"}},
    ],
)
def test_a_choice_that_the_tools_do_not_allow_is_refused(wrong: dict) -> None:
    async def main() -> None:
        wire = Wire(calling(["fine", "fine"])[0])
        wire.send("session.update", session={"type": "realtime", **wrong})
        wire.send("response.create", response=wrong)
        await wire.event("error", 2)
        errors = [event["error"] for event in wire.of("error")]
        assert [each["param"].split(".")[0] for each in errors] == ["session", "response"]
        for each in errors:
            assert ".tool_choice" in each["param"] and each["type"] == "invalid_request_error"
        wire.send("session.update", session={"type": "realtime", "tool_choice": "auto"})
        assert (await wire.event("session.updated"))["session"]["tools"] == []
        choice = {"type": "function", "name": "weather"}
        wire.send("session.update", session={"tools": [TOOL], "tool_choice": choice})
        assert (await wire.event("session.updated", 2))["session"]["tool_choice"] == choice
        wire.send("session.update", session={"tools": []})  # the choice stays, and needs them
        assert (await wire.event("error", 3))["error"]["param"] == "session.tool_choice"
        wire.send("response.create", response={"tools": [], "tool_choice": "none"})
        assert (await wire.event("response.done"))["response"]["status"] == "completed"
        await wire.close()

    fast(main())


class Spoken(HumSpeaker):
    """A voice that hears one sentence."""

    voices = ()

    def transcribe(self, pcm: Any, rate: int = 16000) -> str:
        return "what is the weather"


async def asked_of_engine(
    *events: Delta | Finish, name: str = "mine", update: dict[str, Any] | None = None
) -> tuple[Wire, Request, dict[str, Any]]:
    """Ask an engine with adapters by a name of its model; return its request and the response."""
    engine = saying(*events)
    config = ServerConfig(demo=False, strict_model=True, lora=("odd=/a/b",))
    voices = EngineVoices(engine, Spoken(1600), config)
    voices.follows = voices.calls = True  # as a checkpoint whose template has tools
    service = RealtimeService(config, lambda: voices, model=lambda: "mine")
    wire = Wire(service, query_string=f"model={name}".encode())
    session = {"type": "realtime", "output_modalities": ["text"], **(update or {})}
    wire.send("session.update", session=session)
    await wire.event("session.updated")
    wire.send("response.create", response={"instructions": "what is the weather?"})
    done = (await wire.event("response.done"))["response"]
    return wire, engine.requests[0], done


WRITTEN = '{"name": "weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}, "auto"])
def test_a_call_that_is_asked_for_follows_a_grammar(choice: Any) -> None:
    async def main() -> None:
        forced = choice != "auto"
        text = WRITTEN if forced else CALL
        update = {"tools": [TOOL], "tool_choice": choice}
        pieces = (Delta(text[:20]), Delta(text[20:]), Finish("stop", 9, 9))
        wire, request, done = await asked_of_engine(*pieces, update=update)
        wanted = json_grammar(call_schema({"weather": TOOL["parameters"]}))
        assert request.sampling.grammar == (wanted if forced else None)
        assert done["status"] == "completed", done["status_details"]
        assert [each["type"] for each in done["output"]] == ["function_call"]
        assert json.loads(done["output"][0]["arguments"]) == {"city": "Paris"}
        assert not wire.of("response.output_text.delta")
        await wire.close()

    asyncio.run(main())


def test_a_call_that_is_cut_short_is_incomplete_and_no_failure() -> None:
    async def main() -> None:
        update = {"tools": [TOOL], "tool_choice": "required"}
        pieces = (Delta(WRITTEN[:30]), Finish("length", 9, 9))
        wire, _, done = await asked_of_engine(*pieces, update=update)
        assert done["status"] == "incomplete" and done["output"] == []
        assert done["status_details"]["reason"] == "max_output_tokens"
        await wire.close()

    asyncio.run(main())


def test_a_session_names_an_adapter_as_its_model_and_shows_the_trace() -> None:
    async def main() -> None:
        trace = {"visual_tokens": 4, "kept_tokens": 1, "rows": [], "notes": ["a note"]}
        for name, adapter in (("odd", "odd"), ("mine", None)):
            pieces = Delta("rain"), Finish("stop", 9, 1, 0, trace)
            wire, request, done = await asked_of_engine(*pieces, name=name)
            assert wire.of("session.created")[0]["session"]["model"] == name
            assert request.adapter == adapter
            assert trace.items() <= done["mmfast"].items()
            other = {"odd": "mine", "mine": "odd"}[name]
            wire.send("session.update", session={"type": "realtime", "model": other})
            refused = (await wire.event("error"))["error"]
            assert f"stays {name!r}" in refused["message"] and refused["param"] == "session.model"
            await wire.close()

    asyncio.run(main())


@pytest.mark.parametrize("lost", [["日本"], []])
def test_a_response_names_what_its_voice_cannot_say(lost: list[str]) -> None:
    class Brain(HumBrain):
        def answer(self, question: BrainQuestion) -> Iterator[Sound]:
            for sound in super().answer(question):
                yield replace(sound, notes={**sound.notes, "left_out": lost})

    class Voices(HumVoices):
        def open(self) -> HumBrain:
            return Brain(self)

    async def main() -> None:
        wire = Wire(HumService(Voices()))
        wire.send("response.create", response={"instructions": "what moves?"})
        done = await wire.event("response.done")
        assert done["response"]["mmfast"].get("left_out", []) == lost
        await wire.close()

    fast(main())
