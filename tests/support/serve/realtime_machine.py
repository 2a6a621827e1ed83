"""Clients that do anything in any order, for hypothesis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from realtime_checks import Rules
from realtime_tools import MANUAL, FastLoop, HumService, HumVoices, Wire, said

from mmfast.core.errors import ModelError

SAYINGS = {text: said(text) for text in ("what is it?", "stop", "and now?")}
SILENCE = said("", 0.5)
JUNK = {
    "nothing": "",
    "half": "{",
    "list": "[]",
    "number": "NaN",
    "no type": '{"type":1}',
    "odd type": '{"type":"nothing"}',
    "deep": "[" * 5000,
    "wrong field": '{"type":"response.create","response":3}',
    "field missing": '{"type":"session.update"}',
    "no base64": '{"type":"input_audio_buffer.append","audio":"*"}',
    "half a letter": '{"event_id":"\\ud800"}',
}
QUESTION = {"type": "input_text", "text": "what is it?"}
VAD = {"type": "server_vad"}
CHANGES: dict[str, dict[str, Any]] = {
    "manual": MANUAL,
    "vad": {"audio": {"input": {"turn_detection": VAD}}},
    "polite": {"audio": {"input": {"turn_detection": {**VAD, "interrupt_response": False}}}},
    "listens": {"audio": {"input": {"turn_detection": {**VAD, "create_response": False}}}},
    "asks": {"audio": {"input": {"turn_detection": {**VAD, "idle_timeout_ms": 1500}}}},
    "writes": {"audio": {"input": {"transcription": {"model": "any"}}}},
    "text": {"output_modalities": ["text"]},
    "sound": {"output_modalities": ["audio"]},
    "both": {"output_modalities": ["text", "audio"]},
    "no voice": {"audio": {"output": {"voice": "nobody"}}},
    "voice": {"audio": {"output": {"voice": "marin", "speed": 1.5}}},
    "other": {"type": "transcription"},
}
PAUSES = [0.0, 0.0, 0.001, 0.03, 0.1, 0.2, 0.5, 4.0]
_IDS = st.sampled_from(["reply", "reply", "last", "first", "item_of_nobody", "mine"])


def answer(turns: Any, frames: int) -> Any:
    """Fails now and then, like a model."""
    if turns and "fail" in turns[-1].text:
        return ModelError("the model cannot")
    return "the red circle moves to the left side of it and then it goes on to the other side"


def act(**drawn: Any) -> Any:
    """A rule behind which some time passes, mostly none."""

    def wrap(function: Callable[..., None]) -> Any:
        def done(self: Clients, pause: float, **given: Any) -> None:
            function(self, **given)
            if pause:
                self.pause(pause)

        done.__name__ = function.__name__
        return rule(pause=st.sampled_from(PAUSES), **drawn)(done)

    return wrap


class Clients(RuleBasedStateMachine):
    """One client that does anything in any order, and one that minds its own business."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=FastLoop)
        self.rules, self.number = Rules(), 0
        self.broken: AssertionError | None = None
        self.abrupt = False
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.service = HumService(HumVoices(answer))
        self.wire = Wire(self.service, self._seen)
        await self.wire.event("session.created")
        item = {"type": "message", "role": "user", "content": [QUESTION]}
        self._send("conversation.item.create", item=item)

    def _seen(self, event: dict[str, Any]) -> None:
        try:
            self.rules.server(event)
        except AssertionError as error:
            self.broken = self.broken or error

    def teardown(self) -> None:
        try:
            self.runner.run(self._end())
        finally:
            self.runner.close()

    async def _end(self) -> None:
        if not self.abrupt:
            await self._wait_for_all()
        await self.wire.close()
        if self.broken is not None:
            raise self.broken
        if not self.abrupt:
            self.rules.finish()
        hums = self.service.hums
        assert not self.service.sessions and not hums.open_brains, "a session is left"
        assert not hums.answering, "a model still answers"
        assert len(asyncio.all_tasks()) == 1, "a task is left"

    async def _wait_for_all(self) -> None:
        self.wire.reading.set()
        self._send("session.update", session={"type": "realtime"})
        updates = self.rules.sent["session.update"]
        failed = self.rules.failed
        await self.wire.until(
            lambda: self.rules.kinds["session.updated"] + failed["session.update"] == updates
        )
        running = self.rules.responses.values()
        await self.wire.until(lambda: all(each.over for each in running) or self.broken)
        assert self.wire.code is None and not self.wire.task.done(), "closed unasked"

    def _send(self, type: str, **fields: Any) -> None:
        self.number += 1
        self.rules.client(type, f"mine_{self.number}")
        self.wire.send(type, event_id=f"mine_{self.number}", **fields)

    def _id(self, which: str) -> str:
        items, replies = self.rules.items, [t.item for t in self.rules.responses.values() if t.item]
        found = {"last": items[-1:], "first": items[:1], "reply": replies[-1:]}.get(which)
        return found[0] if found else which

    def pause(self, seconds: float) -> None:
        """Time passes."""
        self.runner.run(asyncio.sleep(seconds))
        if self.broken is not None:
            raise self.broken

    @act(text=st.sampled_from(sorted(SAYINGS)), cut=st.booleans())
    def speak(self, text: str, cut: bool) -> None:
        sound = SAYINGS[text]
        sound = sound[: len(sound) // 8 * 4] if cut else sound
        self._send("input_audio_buffer.append", audio=sound)

    @act()
    def be_silent(self) -> None:
        self._send("input_audio_buffer.append", audio=SILENCE)

    @act(what=st.sampled_from(["commit", "clear"]))
    def buffer(self, what: str) -> None:
        self._send(f"input_audio_buffer.{what}")

    @act(
        text=st.sampled_from(["what is it?", "fail", ""]),
        role=st.sampled_from(["user", "assistant", "system"]),
        after=st.none() | st.just("root") | _IDS,
        id=st.none() | st.just("mine"),
    )
    def write(self, text: str, role: str, after: str | None, id: str | None) -> None:
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        more = {} if after is None else {"previous_item_id": self._id(after)}
        item = item if id is None else {**item, "id": id}
        self._send("conversation.item.create", item=item, **more)

    @act(kind=st.sampled_from(["sound", "picture", "both"]))
    def show(self, kind: str) -> None:
        sound = {"type": "input_audio", "audio": SAYINGS["stop"]}
        picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
        content = {"sound": [sound], "picture": [picture], "both": [picture, sound]}[kind]
        item = {"type": "message", "role": "user", "content": content}
        self._send("conversation.item.create", item=item)

    @act(count=st.integers(1, 12))
    def frames(self, count: int) -> None:
        for _ in range(count):
            self._send("mmfast.input_image_buffer.append", image="AAAA")

    @act(
        which=_IDS,
        what=st.sampled_from(["delete", "retrieve"]),
    )
    def item(self, which: str, what: str) -> None:
        self._send(f"conversation.item.{what}", item_id=self._id(which))

    @act(which=_IDS, ms=st.sampled_from([-5, 0, 90, 300, 1000, 10**9]), retrieve=st.booleans())
    def truncate(self, which: str, ms: int, retrieve: bool) -> None:
        id = self._id(which)
        fields = {"item_id": id, "content_index": 0, "audio_end_ms": ms}
        self._send("conversation.item.truncate", **fields)
        if retrieve:
            self._send("conversation.item.retrieve", item_id=id)

    @act(
        text=st.booleans(),
        own=st.booleans(),
        tokens=st.none() | st.integers(1, 30),
        brought=st.none() | st.lists(_IDS, max_size=2),
    )
    def ask(self, text: bool, own: bool, tokens: int | None, brought: list[str] | None) -> None:
        wish: dict[str, Any] = {"output_modalities": ["text"]} if text else {}
        wish |= {"conversation": "none", "metadata": {"a": "b"}} if own else {}
        wish |= {} if tokens is None else {"max_output_tokens": tokens}
        if brought is not None:
            wish["input"] = [{"type": "item_reference", "id": self._id(id)} for id in brought]
        self._send("response.create", response=wish)

    @act(
        wait=st.sampled_from([0.01, 0.07, 0.15, 0.25, 2.0]),
        then=st.sampled_from(
            ["speak", "cancel", "truncate", "truncate", "delete", "ask again", "clear"]
        ),
    )
    def ask_and_change_your_mind(self, wait: float, then: str) -> None:
        item = {"type": "message", "role": "user", "content": [QUESTION]}
        self._send("conversation.item.create", item=item)
        self._send("response.create")
        self.pause(wait)
        reply = self._id("reply")
        if then == "speak":
            self._send("input_audio_buffer.append", audio=SAYINGS["stop"])
        elif then == "truncate":
            cut = {"content_index": 0, "audio_end_ms": 100}
            self._send("conversation.item.truncate", item_id=reply, **cut)
            self._send("conversation.item.retrieve", item_id=reply)
        elif then == "delete":
            self._send("conversation.item.delete", item_id=reply)
        elif then == "ask again":
            self._send("response.create")
        else:
            self._send("response.cancel" if then == "cancel" else "output_audio_buffer.clear")

    @act(much=st.sampled_from([False, False, True]))
    def leave_in_the_middle(self, much: bool) -> None:
        self.abrupt = self.abrupt or much

    @act(which=st.sampled_from([None, "any", "nobody"]))
    def cancel(self, which: str | None) -> None:
        known = [*self.rules.responses] or ["nobody"]
        fields = {} if which is None else {"response_id": known[-1] if which == "any" else which}
        self._send("response.cancel", **fields)

    @act(what=st.sampled_from(sorted(CHANGES)))
    def change(self, what: str) -> None:
        self._send("session.update", session={"type": "realtime", **CHANGES[what]})

    @act(what=st.sampled_from(sorted(JUNK)))
    def junk(self, what: str) -> None:
        self.wire.raw(JUNK[what])

    @act(still=st.booleans())
    def read_slowly(self, still: bool) -> None:
        (self.wire.reading.clear if still else self.wire.reading.set)()


def sequences(count: int, seed: int = 0) -> None:
    """So many random sequences, the same ones each time."""
    how = settings(
        max_examples=count,
        stateful_step_count=25,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Clients, settings=how)  # type: ignore[no-untyped-call]
