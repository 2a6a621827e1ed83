"""The realtime socket in a time of its own: limits, late events, frames, slow readers, fairness."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
import torch
from realtime_checks import Rules
from realtime_tools import (
    ANSWER,
    MANUAL,
    HumService,
    HumVoices,
    Wire,
    fast,
    packed,
    png,
    said,
    unpacked,
)
from tone_models import HumModel, hum, read

from mmfast.frontends.audio.activity import VoiceActivity
from mmfast.frontends.audio.reader import decode_pcm
from mmfast.models.speech.turn_end import TurnEnd
from mmfast.ops.audio import resample
from mmfast.serve.realtime.brain import ChatterVoices
from mmfast.serve.realtime.formats import encode
from mmfast.serve.realtime.service import SessionLimits
from mmfast.serve.realtime.session import RealtimeSession
from mmfast.serve.realtime.settings import ear_of
from mmfast.voice.ear import ProsodyEar, SemanticEar, VoiceEar

LONG = "one two three four five six seven eight nine ten " * 20
VAD = {"type": "server_vad"}


def turns(**options: Any) -> dict[str, Any]:
    return {"type": "realtime", "audio": {"input": {"turn_detection": {**VAD, **options}}}}


def test_a_session_ends_and_a_quiet_one_earlier() -> None:
    async def ends(limits: SessionLimits, busy: bool) -> tuple[float, str, int | None]:
        service = HumService(limits=limits)
        wire = Wire(service, Rules().server)
        while not wire.task.done():
            await asyncio.sleep(1.0)
            if busy and wire.code is None:
                wire.send("input_audio_buffer.clear")
        assert not service.sessions and not service.hums.open_brains
        return wire.times[-1], wire.events[-1]["error"]["code"], wire.code

    at, code, close = fast(ends(SessionLimits(idle=5.0, seconds=60.0), busy=False))
    assert (code, close) == ("session_idle", 1001) and 5.0 <= at < 5.2
    at, code, close = fast(ends(SessionLimits(idle=5.0, seconds=60.0), busy=True))
    assert (code, close) == ("session_expired", 1001) and 60.0 <= at < 60.2


def test_who_does_not_read_slows_his_own_responses_and_is_let_go() -> None:
    async def main() -> None:
        service = HumService(HumVoices(lambda *_: LONG * 3), SessionLimits(slow=100.0, ahead=1e9))
        slow, other = Wire(service), Wire(service, Rules().server)
        await slow.event("session.created")
        slow.reading.clear()
        slow.send("session.update", session=MANUAL)
        for wire in (slow, other):
            wire.send("response.create", response={"instructions": "tell a story"})
        await asyncio.sleep(80.0)
        made = service.hums.questions and service.hums.answering
        assert made == 1 and other.of("response.done")  # one has its answer, the other waits
        await asyncio.sleep(40.0)
        slow.reading.set()
        await slow.task
        assert slow.code == 1008 and not other.task.done() and service.hums.open_brains == 1
        await other.close()
        assert not service.hums.answering and not service.sessions

    fast(main())


def test_who_sends_without_reading_is_not_read_either() -> None:
    async def main() -> None:
        wire = Wire(HumService(limits=SessionLimits(slow=1e6)))
        await wire.event("session.created")
        wire.reading.clear()
        for _ in range(500):
            wire.raw("x" * 2000)
        await asyncio.sleep(5.0)
        assert wire._in.qsize() == 0  # errors are small: all were read
        for _ in range(2000):
            wire.send("session.update", session={"type": "realtime", "instructions": "x" * 4000})
        await asyncio.sleep(5.0)
        assert wire._in.qsize() > 1000
        wire.reading.set()
        await asyncio.sleep(5.0)
        assert wire._in.qsize() == 0 and len(wire.of("session.updated")) == 2000
        await wire.close()

    fast(main())


def test_sessions_take_turns() -> None:
    async def main() -> None:
        service = HumService(HumVoices(lambda *_: LONG), SessionLimits(ahead=1e9))
        wires = [Wire(service, Rules().server) for _ in range(3)]
        for wire in wires:
            wire.send("response.create", response={"instructions": "tell a story"})
        await asyncio.sleep(6.0)
        counts = [len(wire.of("response.output_audio.delta")) for wire in wires]
        assert min(counts) > 50 and max(counts) - min(counts) <= 1
        for wire in wires:
            await wire.close()

    fast(main())


def test_a_reply_is_not_made_long_before_it_is_heard() -> None:
    async def main() -> None:
        wire = Wire(
            HumService(HumVoices(lambda *_: LONG), SessionLimits(ahead=2.0)), Rules().server
        )
        wire.send("response.create", response={"instructions": "tell a story"})
        await asyncio.sleep(10.0)
        deltas = wire.of("response.output_audio.delta")
        seconds = sum(len(base64.b64decode(each["delta"])) for each in deltas) / 48000
        assert 11.0 <= seconds <= 12.5
        await wire.close()

    fast(main())


def test_frames_are_dropped_oldest_first_and_counted() -> None:
    async def main() -> None:
        service = HumService(limits=SessionLimits(frames=4))
        wire = Wire(service, Rules().server)
        for number in range(20):
            wire.send("mmfast.input_image_buffer.append", image="AAAA", time=number)
        item = {"type": "message", "role": "user", "content": [_text("what was there?")]}
        wire.send("conversation.item.create", item=item)
        wire.send("response.create")
        done = await wire.event("response.done")
        counts = done["response"]["mmfast"]["frames"]
        assert counts["came"] == 20 and counts["dropped"] >= 15
        assert counts["seen"] + counts["dropped"] == 20  # the question waited for what was left
        await wire.close()

    fast(main())


def _text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def test_a_frame_that_is_none_is_told_and_the_others_are_seen() -> None:
    async def main() -> None:
        wire = Wire(HumService(), Rules().server)
        wire.send("mmfast.input_image_buffer.append", image="broken", event_id="bad")
        wire.send("mmfast.input_image_buffer.append", image="AAAA")
        error = await wire.event("error")
        assert error["error"]["event_id"] == "bad" and error["error"]["param"] == "image"
        wire.send("response.create", response={"instructions": "what is there?"})
        done = await wire.event("response.done")
        counts = done["response"]["mmfast"]["frames"]
        assert (counts["seen"], counts["failed"]) == (1, 1)
        await wire.close()

    fast(main())


def test_only_so_many_frames_stay_items() -> None:
    async def main() -> None:
        wire = Wire(HumService())
        content = [{"type": "input_image", "image_url": png()}]
        item = {"type": "message", "role": "user", "content": content}
        for _ in range(40):
            wire.send("conversation.item.create", item=item)
        await wire.event("conversation.item.done", 40)
        first, last = (wire.of("conversation.item.added")[i]["item"]["id"] for i in (0, -1))
        wire.send("conversation.item.retrieve", item_id=first)
        wire.send("conversation.item.retrieve", item_id=last)
        await wire.event("conversation.item.retrieved")
        assert wire.of("error")[0]["error"]["code"] == "item_not_found"
        assert "image_url" not in wire.of("conversation.item.added")[0]["item"]["content"][0]
        await wire.close()

    fast(main())


def test_a_long_silence_is_told() -> None:
    async def main() -> None:
        wire = Wire(HumService(), Rules().server)
        wire.send("session.update", session=turns(idle_timeout_ms=1000))
        wire.send("input_audio_buffer.append", audio=said("what is it?"))
        timeout = await wire.event("input_audio_buffer.timeout_triggered")
        done = wire.times[wire.kinds().index("response.done")]
        at = wire.times[wire.kinds().index("input_audio_buffer.timeout_triggered")]
        spoken = len(ANSWER) * 0.02  # it counts from the end of the answer's sound
        assert 1.0 <= at - done <= 1.3 + spoken
        assert timeout["item_id"] in [e["item_id"] for e in wire.of("input_audio_buffer.committed")]
        await wire.close()

    fast(main())


def test_who_may_finish_and_who_is_not_answered() -> None:
    async def main() -> None:
        wire = Wire(HumService(HumVoices(lambda *_: LONG)), Rules().server)
        wire.send("session.update", session=turns(interrupt_response=False))
        wire.send("input_audio_buffer.append", audio=said("tell me"))
        await wire.event("response.output_audio.delta", 3)
        wire.send("input_audio_buffer.append", audio=said("and now?"))
        error = await wire.event("error")
        assert error["error"]["code"] == "conversation_already_has_active_response"
        assert not wire.of("response.done")
        wire.send("session.update", session=turns(create_response=False))
        wire.send("response.cancel")
        await wire.event("response.done")
        wire.send("input_audio_buffer.append", audio=said("hello"))
        await wire.event("input_audio_buffer.committed", 3)
        await asyncio.sleep(5.0)
        assert len(wire.of("response.created")) == 1
        await wire.close()

    fast(main())


def test_a_pause_in_a_sentence_makes_no_two_questions() -> None:
    async def main() -> None:
        voices = HumVoices()
        wire = Wire(HumService(voices), Rules().server)
        wire.send("input_audio_buffer.append", audio=said("what"))
        wire.send("input_audio_buffer.append", audio=said("is it?"))
        await wire.event("response.done", 2)
        assert wire.of("response.done")[0]["response"]["status"] == "cancelled"
        assert [turn.text for turn in voices.questions[-1].turns] == ["what is it?"]
        await wire.close()

    fast(main())


def test_items_stand_where_they_are_put() -> None:
    async def main() -> None:
        voices = HumVoices()
        wire = Wire(HumService(voices), Rules().server)
        for id, after, role in (("b", None, "user"), ("a", "root", "user"), ("c", "b", "system")):
            more = {} if after is None else {"previous_item_id": after}
            item = {"type": "message", "role": role, "id": id, "content": [_text(id)]}
            wire.send("conversation.item.create", item=item, **more)
        wire.send("session.update", session={"type": "realtime", "instructions": "be kind"})
        wire.send("response.create")
        await wire.event("response.done")
        asked = voices.questions[-1]
        assert [turn.text for turn in asked.turns] == ["a", "b"]
        assert asked.instructions == "be kind\n\nc"
        await wire.close()

    fast(main())


def test_a_model_that_answers_speech_itself() -> None:
    async def main() -> None:
        wire = Wire(HumService(ChatterVoices(HumModel())), Rules().server)
        asked = {"audio": {"input": {"transcription": {"model": "x"}, "turn_detection": VAD}}}
        wire.send("session.update", session={"type": "realtime", **asked})
        wire.send("input_audio_buffer.append", audio=said("hello there"))
        done = await wire.event("response.done")
        content = done["response"]["output"][0]["content"][0]
        assert content["transcript"] == "hello there"
        heard = wire.of("conversation.item.input_audio_transcription.completed")
        assert [each["transcript"] for each in heard] == ["hello there"]
        item = {"type": "message", "role": "user", "content": [_text("hello")]}
        wire.send("conversation.item.create", item=item)
        wire.send("response.create")
        failed = (await wire.event("response.done", 2))["response"]["status_details"]["error"]
        assert "speech alone" in failed["message"]
        await wire.close()

    fast(main())


@pytest.mark.parametrize(("format", "encoding"), [("audio/pcmu", "mulaw"), ("audio/pcma", "alaw")])
def test_telephones(format: str, encoding: str) -> None:
    async def main() -> None:
        wire = Wire(HumService(), Rules(hums=False).server)
        kind = {"type": format}
        audio = {"input": {"format": kind, "turn_detection": None}, "output": {"format": kind}}
        wire.send("session.update", session={"type": "realtime", "audio": audio})
        pcm = resample(torch.cat([hum("what is it?"), torch.zeros(1600)]), 16000, 8000)
        data = base64.b64encode(encode(pcm, encoding)).decode()
        wire.send("input_audio_buffer.append", audio=data)
        wire.send("input_audio_buffer.commit")
        wire.send("response.create")
        await wire.event("response.done")
        deltas = [base64.b64decode(e["delta"]) for e in wire.of("response.output_audio.delta")]
        sound, _ = decode_pcm(b"".join(deltas), encoding)
        assert read(resample(sound, 8000, 16000)) == ANSWER
        await wire.close()

    fast(main())


@pytest.mark.parametrize("encoding", ["mulaw", "alaw"])
def test_g711_is_the_nearest_code(encoding: str) -> None:
    values, _ = decode_pcm(bytes(range(256)), encoding)
    again, _ = decode_pcm(encode(values, encoding), encoding)
    assert torch.equal(again, values)
    pcm = torch.linspace(-1, 1, 2001)
    back, _ = decode_pcm(encode(pcm, encoding), encoding)
    nearest = (values[None] - pcm[:, None]).abs().min(1).values
    assert float(((back - pcm).abs() - nearest).max()) < 2**-14


def test_settings_become_ears() -> None:
    """Of real detectors: what the client asks for is what finds turns."""
    eager = ear_of({"type": "semantic_vad", "eagerness": "high"})
    asked = {"threshold": 0.2, "prefix_padding_ms": 100, "silence_duration_ms": 200}
    assert eager.hear(torch.zeros(512)) == [] == ear_of({**VAD, **asked}).hear(torch.zeros(512))


def test_an_ear_for_prosody_is_an_extra_of_the_semantic_one() -> None:
    eager = {"type": "semantic_vad", "eagerness": "high"}
    assert type(ear_of(eager)) is SemanticEar
    assert type(ear_of({**eager, "mmfast": {"prosody": True}})) is ProsodyEar

    async def main() -> None:
        wire = Wire(HumService(), Rules().server)
        wire.send("session.update", session=turns(mmfast={"prosody": True}))
        wire.send("session.update", session=turns(mmfast={"backchanels": True}))
        wire.send("session.update", session=turns())
        updated = await wire.event("session.updated")
        assert "mmfast" not in updated["session"]["audio"]["input"]["turn_detection"]
        texts = [error["error"]["message"] for error in wire.of("error")]
        assert "semantic_vad" in texts[0] and "backchanels" in texts[1] and len(texts) == 2
        await wire.close()

    fast(main())


@pytest.mark.parametrize("wanted", [True, False])
def test_a_backchannel_leaves_a_response_alone(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its words; another short word cancels the response, as all speech does without it."""
    monkeypatch.setattr(TurnEnd, "murmur", lambda self, pcm: 0.6)

    async def main() -> None:
        service = HumService(HumVoices(lambda *_: LONG))
        service.ear = lambda turns: VoiceEar(
            activity=VoiceActivity("energy"), silence_duration_ms=300
        )
        wire = Wire(service)  # OpenAI has no such event
        wire.send("session.update", session=turns(mmfast={"backchannels": wanted}))
        wire.send("input_audio_buffer.append", audio=said("tell me"))
        await wire.event("response.output_audio.delta", 3)
        wire.send("input_audio_buffer.append", audio=said("uh huh"))
        if wanted:
            passed = await wire.event("mmfast.input_audio_buffer.backchannel")
            assert passed["transcript"] == "uh huh"
            assert len(wire.of("input_audio_buffer.speech_started")) == 1
            assert len(wire.of("input_audio_buffer.committed")) == 1
            assert not wire.of("response.done")
            wire.send("input_audio_buffer.append", audio=said("stop now"))
        done = await wire.event("response.done")
        assert done["response"]["status"] == "cancelled"
        await wire.event("input_audio_buffer.committed", 2)
        assert len(wire.of("input_audio_buffer.speech_started")) == 2
        await wire.close()

    fast(main())


def test_a_wrong_update_changes_nothing() -> None:
    async def main() -> None:
        wire = Wire(HumService(strict_model=True), Rules().server)
        audio = {"output": {"voice": "nobody"}}
        wire.send("session.update", session={"instructions": "be rude", "audio": audio})
        wire.send("session.update", session={"tools": [{"type": "function", "name": "f"}]})
        wire.send("session.update", session={"model": "another"})
        wire.send("session.update", session={})
        updated = await wire.event("session.updated")
        assert updated["session"]["instructions"] == ""
        params = [error["error"]["param"] for error in wire.of("error")]
        assert params == ["session.audio.output.voice", "session.tools", "session.model"]
        await wire.close()

    fast(main())


@pytest.mark.parametrize("manual", [False, True])
def test_what_is_being_said_is_told_to_be_gone_with_its_ear(manual: bool) -> None:
    """Another way to find turns begins anew: no turn stays open without an end."""

    async def main() -> None:
        wire = Wire(HumService(), Rules().server)
        if manual:
            wire.send("session.update", session=MANUAL)
        wire.send("input_audio_buffer.append", audio=packed(hum("hello there")))
        if not manual:
            await wire.event("input_audio_buffer.speech_started")
        ears = {"type": "server_vad"} if manual else None
        audio = {"input": {"turn_detection": ears}}
        wire.send("session.update", session={"type": "realtime", "audio": audio})
        await wire.event("session.updated", 1 + manual)
        assert len(wire.of("input_audio_buffer.cleared")) == 1
        wire.send("session.update", session={"instructions": "be short"})  # finds turns as before
        await wire.event("session.updated", 2 + manual)
        assert len(wire.of("input_audio_buffer.cleared")) == 1 and not wire.of("error")
        await wire.close()

    fast(main())


def test_settings_of_a_reply_stay_while_it_is_spoken() -> None:
    async def main() -> None:
        wire = Wire(HumService())
        item = {"type": "message", "role": "user"}
        item["content"] = [{"type": "input_text", "text": "tell me"}]  # type: ignore[assignment]
        wire.send("conversation.item.create", item=item)
        wire.send("response.create")
        await wire.event("response.output_audio.delta", 2)
        audio = {"output": {"format": {"type": "audio/pcmu"}, "voice": "hmm"}}
        text = {"output_modalities": ["text"], "max_output_tokens": 1}
        wire.send("session.update", session={"type": "realtime", "audio": audio, **text})
        done = (await wire.event("response.done"))["response"]
        pcm = torch.cat([unpacked(e["delta"]) for e in wire.of("response.output_audio.delta")])
        assert done["status"] == "completed" and read(pcm) == ANSWER
        await wire.close()

    fast(main())


def test_a_voice_that_cannot_be_loaded() -> None:
    class Broken(HumService):
        async def voices(self) -> Any:
            self._load = lambda: 1 // 0  # type: ignore[assignment,return-value]
            return await super().voices()

    async def main() -> None:
        service = Broken()
        wire = Wire(service)
        await wire.task
        assert wire.messages[0]["status"] == 503 and not service.sessions
        assert "zero" not in json.loads(wire.messages[1]["body"])["error"]["message"]

    fast(main())


def test_pages_of_other_hosts_stay_out() -> None:
    async def status(*headers: tuple[bytes, bytes]) -> int:
        wire = Wire(HumService(), headers=[(b"host", b"localhost:8000"), *headers])
        await asyncio.sleep(1.0)
        if not wire.messages or wire.messages[0]["type"] == "websocket.accept":
            await wire.close()
            return 101
        return int(wire.messages[0]["status"])

    assert fast(status()) == 101
    assert fast(status((b"origin", b"http://localhost:8000"))) == 101
    assert fast(status((b"origin", b"https://evil.example"))) == 403


def test_speech_goes_on_while_a_model_works() -> None:
    """Steps of seconds hold up neither who interrupts nor the end of what is cut off."""

    async def main() -> None:
        service = HumService(HumVoices(lambda *_: LONG))
        service.cost = 3.0
        wire = Wire(service, Rules().server)
        wire.send("response.create", response={"instructions": "tell a story"})
        await wire.event("response.output_audio.delta")
        await asyncio.sleep(0.1)
        wire.send("input_audio_buffer.append", audio=packed(hum("stop")))
        done = await wire.event("response.done")
        started = wire.times[wire.kinds().index("input_audio_buffer.speech_started")]
        assert done["response"]["status_details"]["reason"] == "turn_detected"
        assert wire.times[wire.kinds().index("response.done")] - started < 0.1
        await wire.close()

    fast(main())


def test_the_rules_notice_who_talks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        wire = Wire(HumService(HumVoices(lambda *_: LONG)))
        wire.send("response.create", response={"instructions": "tell a story"})
        await wire.event("response.output_audio.delta")
        wire.send("input_audio_buffer.append", audio=packed(hum("stop")))
        await asyncio.sleep(3.0)
        await wire.close()
        rules = Rules()
        for event in wire.events:
            rules.server(event)

    fast(main())
    monkeypatch.setattr(RealtimeSession, "interrupt", lambda self, status: False)
    with pytest.raises(AssertionError, match="after somebody spoke"):
        fast(main())
