"""Calls over WebRTC, by a client of aiortc: what is said is heard, what is answered sounds."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiortc")

import numpy as np
import torch
from openai._models import validate_type
from openai.types.realtime import RealtimeServerEvent
from realtime_tools import ANSWER, LoopClock
from tone_models import hum
from torch import Tensor
from webrtc_client import (
    QUESTION,
    Camera,
    Phone,
    Voices,
    app_with,
    call,
    calling,
    dialled,
    exchange,
    likeness,
    offered,
    realtime,
)

import mmfast.serve.realtime.call as calls
from mmfast.core.errors import MmfastError
from mmfast.frontends.video.reader import read_video
from mmfast.ops.audio import resample
from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.caller import Caller, CallerLimits, CallerQuotas, ClientSecrets
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.http.app import create_app
from mmfast.serve.realtime.call import HELD, RING, Inbox, addresses_of
from mmfast.serve.realtime.player import TrackPlayer
from mmfast.serve.realtime.service import SessionLimits
from mmfast.tiny.speech.recordings import say

CLIP = Path(__file__).parents[3] / "assets" / "clips" / "red-circle.mp4"
LONG = " ".join([ANSWER] * 8)
KEYS = ("a-key-of-one", "a-key-of-two")


def checked(phone: Phone) -> None:
    """Every event is one of the protocol, and none carries sound."""
    for event in phone.events:
        assert event["type"] != "response.output_audio.delta"
        found = validate_type(type_=RealtimeServerEvent, value=event)  # type: ignore[arg-type]
        assert found.type == event["type"]


def time_of(phone: Phone, kind: str, count: int = 1) -> float:
    at = [i for i, event in enumerate(phone.events) if event["type"] == kind][count - 1]
    return phone.times[at]


def asked_and_answered() -> None:
    """One question through Opus and back."""
    voices = Voices()

    async def main() -> Phone:
        async with exchange(app_with(voices)) as client, calling(client) as phone:
            await phone.event("session.created")
            phone.mic.say(hum(QUESTION))
            await phone.event("output_audio_buffer.stopped")
            await asyncio.sleep(0.3)
            return phone

    phone = call(main())
    checked(phone)
    kinds = phone.kinds()
    order = [
        "session.created",
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "response.created",
        "response.content_part.added",
        "output_audio_buffer.started",
        "response.output_audio.done",
        "response.done",
        "output_audio_buffer.stopped",
    ]
    assert [kind for kind in kinds if kind in order] == order
    (done,) = phone.of("response.done")
    assert done["response"]["status"] == "completed"
    assert done["response"]["output"][0]["content"][0]["transcript"] == ANSWER
    assert voices.questions[0].turns[-1].text == QUESTION
    assert likeness(voices.heard[0], hum(QUESTION)) > 0.8
    assert likeness(phone.heard, hum(ANSWER)) > 0.8
    length = len(hum(ANSWER)) / 16_000
    sounded = phone.loud()
    assert sounded[-1] - sounded[0] == pytest.approx(length, abs=0.1)
    begins, ends = (time_of(phone, f"output_audio_buffer.{k}") for k in ("started", "stopped"))
    assert ends - begins == pytest.approx(length, abs=0.06)
    # between and behind replies the track goes on, silent
    times = [at for at, _ in phone.frames]
    assert len(times) == pytest.approx((times[-1] - times[0]) / 0.02 + 1, abs=3)


def test_a_question_is_heard_and_its_answer_sounds() -> None:
    asked_and_answered()


@pytest.mark.parametrize("fault", ["mute", "fast", "deaf", "chatty"])
def test_a_broken_call_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "mute":
        frame = TrackPlayer.frame
        monkeypatch.setattr(TrackPlayer, "frame", lambda self: 0 * frame(self))
    elif fault == "fast":  # no pace: every frame is due at once
        monkeypatch.setattr(calls, "TRACK_RATE", 96_000)
    elif fault == "deaf":
        mono = calls.mono
        monkeypatch.setattr(calls, "mono", lambda frame: mono(frame)[::2])
    else:
        play = TrackPlayer.play

        def twice(self: TrackPlayer, response: Any, pcm: Tensor, rate: int) -> None:
            self._outbox.put(response.delta("output_audio", "AAAA"))
            play(self, response, pcm, rate)

        monkeypatch.setattr(TrackPlayer, "play", twice)
    with pytest.raises((AssertionError, TimeoutError)):
        asked_and_answered()


def test_who_speaks_silences_the_reply() -> None:
    voices = Voices(LONG)

    async def main() -> Phone:
        async with exchange(app_with(voices)) as client, calling(client) as phone:
            phone.mic.say(hum(QUESTION))
            await phone.event("output_audio_buffer.started")
            await asyncio.sleep(2.0)
            phone.mic.say(hum("stop it"))
            await phone.event("output_audio_buffer.started", 2)
            return phone

    phone = call(main())
    checked(phone)
    began, cleared, again = (
        time_of(phone, "output_audio_buffer.started"),
        time_of(phone, "output_audio_buffer.cleared"),
        time_of(phone, "output_audio_buffer.started", 2),
    )
    heard = time_of(phone, "input_audio_buffer.speech_started", 2)
    assert 0 <= cleared - heard < 0.05 and 1.9 < cleared - began < 2.6
    (cut,) = phone.of("conversation.item.truncated")
    assert cut["audio_end_ms"] == pytest.approx(1e3 * (cleared - began), abs=100)
    late = [at for at in phone.loud(cleared + 0.15) if at < again]
    assert not late and phone.loud(began)
    said = voices.questions[1].turns[-2]
    assert said.role == "assistant" and LONG.startswith(said.text)
    assert 0.5 < len(hum(said.text)) / 16_000 / (cleared - began) < 1.1


def test_replies_sound_one_behind_the_other_and_fall_silent_together() -> None:
    voices = Voices()

    async def main() -> tuple[Phone, float]:
        async with exchange(app_with(voices)) as client, calling(client) as phone:
            phone.mic.say(hum(QUESTION))
            await phone.event("response.done")
            phone.send("response.create")  # while the first one sounds
            await phone.event("output_audio_buffer.stopped", 2)
            one = time_of(phone, "output_audio_buffer.stopped", 2)
            for number in (3, 4):
                phone.send("response.create")
                await phone.event("response.done", number)
            phone.send("output_audio_buffer.clear")
            await phone.event("output_audio_buffer.cleared")
            await asyncio.sleep(0.5)
            return phone, one

    phone, both = call(main())
    checked(phone)
    kinds = [k.split(".")[1] for k in phone.kinds() if k.startswith("output_audio_buffer")]
    assert kinds[:4] == ["started", "stopped"] * 2 and kinds[4] == "started"
    assert "stopped" not in kinds[4:] and "cleared" in kinds[4:]
    length = len(hum(ANSWER)) / 16_000
    began = time_of(phone, "output_audio_buffer.started")
    assert both - began == pytest.approx(2 * length, abs=0.1)
    names = [e["response_id"] for e in phone.events if e["type"].startswith("output_audio_buffer")]
    assert names[0] == names[1] != names[2] == names[3]
    assert not phone.loud(time_of(phone, "output_audio_buffer.cleared") + 0.15)


def test_a_reply_that_is_being_made_is_cancelled() -> None:
    voices = Voices(LONG)

    async def main() -> Phone:
        app = app_with(voices, SessionLimits(ahead=0.5))
        async with exchange(app) as client, calling(client) as phone:
            phone.mic.say(hum(QUESTION))
            await phone.event("output_audio_buffer.started")
            await asyncio.sleep(1.0)
            phone.send("response.cancel")
            phone.send("output_audio_buffer.clear")
            await phone.event("response.done")
            await asyncio.sleep(0.5)
            return phone

    phone = call(main())
    checked(phone)
    done = phone.of("response.done")[0]["response"]
    assert done["status"] == "cancelled" and not phone.of("error")
    assert len(phone.of("output_audio_buffer.cleared")) == 1
    assert not phone.of("output_audio_buffer.stopped")
    assert not phone.loud(time_of(phone, "output_audio_buffer.cleared") + 0.15)
    assert voices.answering == 0


def test_bad_offers_are_refused_in_one_line() -> None:
    app = app_with(Voices())

    async def main() -> list[tuple[Any, str]]:
        phone = Phone()
        good = await phone.offer()
        bad = [
            ("", "no audio"),
            ("v=0\r\nhello", "no audio"),
            ("m=audio x y z\r\n", "no audio"),
            (good.replace("a=rtpmap:96 opus/48000/2", "a=rtpmap:96 opus"), "no audio"),
            (re.sub(r"a=ice-ufrag:.*\r\n", "", good), "a=ice-ufrag"),
            (re.sub(r"a=fingerprint:.*\r\n", "", good), "a=fingerprint"),
            (re.sub(r"a=setup:.*\r\n", "", good), "a=setup"),
            (good.replace("a=sendrecv", "a=sendonly"), "sendonly"),
            (re.sub(r"a=rtpmap:\d+ \S+\r\n", "", good), "cannot be answered"),
            (good + good[good.index("m=audio") :], "one section"),
            (good.replace("m=audio", "m=image"), "one section"),
            (good.replace("a=rtcp-mux\r\n", ""), "RTCP mux"),
            ("a" * 70_000, "70,000 letters"),
        ]
        found = []
        async with exchange(app) as client:
            for offer, why in bad:
                found.append((await dialled(client, offer), why))
            kinds = {"Content-Type": "text/plain"}
            found.append((await dialled(client, good, headers=kinds), "multipart/form-data"))
            form = {"session": (None, '{"type": "realtime"}')}
            found.append((await client.post("/v1/realtime/calls", files=form), "no sdp"))
            form = {"sdp": (None, good), "session": (None, '{"type": "realtime", "voice": 1}')}
            found.append((await client.post("/v1/realtime/calls", files=form), "session.voice"))
            form["session"] = (None, '{"audio": {"output": {"voice": "nobody"}}}')
            found.append((await client.post("/v1/realtime/calls", files=form), "'nobody'"))
            assert not realtime(app).sessions and not realtime(app).calls
        await phone.close()
        return found

    for reply, why in call(main()):
        error = reply.json()["error"]
        assert reply.status_code == (415 if why.startswith("multipart") else 400), error
        assert why in error["message"] and "\n" not in error["message"], error


def test_without_aiortc_the_reply_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmfast.serve.http.realtime.find_spec", lambda name: None)

    async def main() -> Any:
        async with exchange(app_with(Voices())) as client:
            return await dialled(client, "v=0")

    reply = call(main())
    assert reply.status_code == 501
    assert 'pip install "mmfast[webrtc]"' in reply.json()["error"]["message"]


def test_calls_are_limited_and_hung_up_by_their_caller() -> None:
    app = app_with(Voices(), realtime_sessions=1, api_keys=KEYS)
    one, two = ({"Authorization": f"Bearer {key}"} for key in KEYS)

    async def main() -> None:
        async with exchange(app) as client:
            assert (await dialled(client, "")).status_code == 401
            for ending in ("delete", "hangup", "peer", "lost"):
                async with calling(client, headers=one) as phone:
                    await phone.event("session.created")
                    full = await dialled(client, await offered(), headers=one)
                    assert full.status_code == 429 and "too_many_sessions" in full.text
                    other = await client.delete(phone.url, headers=two)
                    assert other.status_code == 404, "of another caller"
                    if ending == "delete":
                        assert (await client.delete(phone.url, headers=one)).status_code == 200
                    elif ending == "hangup":
                        reply = await client.post(f"{phone.url}/hangup", headers=one)
                        assert reply.status_code == 200
                    elif ending == "peer":
                        await phone.close()
                    else:  # the line is dead, and nothing says so
                        await phone.peer.sctp.transport.transport._connection.close()
                        await asyncio.sleep(60)
                    await asyncio.sleep(3)
                    assert not realtime(app).sessions and not realtime(app).calls, ending
                assert (await client.delete(phone.url, headers=one)).status_code == 404
            # one that is answered, and never comes about
            reply = await dialled(client, await offered(), headers=one)
            assert reply.status_code == 201 and len(realtime(app).sessions) == 1
            await asyncio.sleep(RING + 1)
            assert not realtime(app).sessions and not realtime(app).calls

    call(main())


def test_a_client_secret_opens_calls_and_nothing_else() -> None:
    app = app_with(Voices(), api_keys=KEYS)
    own = {"Authorization": f"Bearer {KEYS[0]}"}

    async def main() -> None:
        async with exchange(app) as client:
            wish = {"type": "realtime", "instructions": "Be brief.", "model": "gpt-realtime"}
            asked = {"expires_after": {"anchor": "created_at", "seconds": 60}, "session": wish}
            where = "/v1/realtime/client_secrets"
            assert (await client.post(where, json=asked)).status_code == 401
            wrong = {"session": {"type": "realtime", "audio": {"output": {"voice": "nobody"}}}}
            reply = await client.post(where, json=wrong, headers=own)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "session.audio.output.voice"
            reply = await client.post(where, json=asked, headers=own)
            found = reply.json()
            assert reply.status_code == 200 and found["value"].startswith("ek_")
            assert found["session"]["instructions"] == "Be brief."
            short = {"Authorization": f"Bearer {found['value']}"}
            for path in ("/v1/models", where):
                assert (await client.request("GET", path, headers=short)).status_code == 401
            bad = {"Authorization": "Bearer ek_nothing"}
            assert (await dialled(client, "", headers=bad)).status_code == 401
            async with calling(client, headers=short) as phone:
                shown = (await phone.event("session.created"))["session"]
                assert shown["instructions"] == "Be brief."
                assert (await client.delete(phone.url, headers=own)).status_code == 200

    call(main())


def test_secrets_expire_and_are_few() -> None:
    now = [100.0]
    secrets = ClientSecrets(2, lambda: now[0])
    caller = Caller("id", CallerQuotas(CallerLimits()), "key:x", "x")
    value, expires = secrets.make(caller, 60, {"a": 1})
    found = secrets.find(value.encode())
    assert expires == 160 and found is not None
    assert (found.who, found.tenant, found.session) == ("key:x", "x", {"a": 1})
    assert secrets.find(value[:-1].encode()) is None
    secrets.make(caller, 60, {})
    with pytest.raises(ApiError, match="2 client secrets"):
        secrets.make(caller, 60, {})
    now[0] = 160.0
    assert secrets.find(value.encode()) is None
    secrets.make(caller, 60, {})


@pytest.mark.parametrize("kept", [False, True])
def test_an_offer_makes_the_server_send_to_nobody_else(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept:  # a server that believes offers: the test must see that
        monkeypatch.setattr(calls, "_ADDRESSES", re.compile("(?!)"))
    victim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    victim.bind(("127.0.0.1", 0))
    victim.setblocking(False)
    line = f"a=candidate:1 1 udp 2130706431 127.0.0.1 {victim.getsockname()[1]} typ host\r\n"

    async def main() -> int:
        async with exchange(app_with(Voices())) as client:
            phone = Phone()
            offer = (await phone.offer()).replace("a=end-of-candidates\r\n", "")
            offer = re.sub(r"(a=ice-ufrag)", line.replace("\\", "") + r"\1", offer)
            reply = await dialled(client, offer)
            assert reply.status_code == 201
            if not kept:
                await phone.connect(reply.text)
                await phone.event("session.created")
            await asyncio.sleep(2)
            await phone.close()
        count = 0
        try:
            while victim.recv(2000):
                count += 1
        except BlockingIOError:
            return count

    assert bool(call(main())) == kept
    victim.close()


def test_video_becomes_frames_where_the_model_sees() -> None:
    async def main(voices: Voices, limits: SessionLimits) -> tuple[str, list[Any]]:
        app = app_with(voices, limits)
        async with exchange(app) as client:
            phone = Phone(Camera())
            reply = await dialled(client, await phone.offer())
            await phone.connect(reply.text)
            await asyncio.sleep(4)
            await phone.close()
            return reply.text, phone.of("error")

    voices = Voices()
    answer, errors = call(main(voices, SessionLimits()))
    assert not errors and 5 <= len(voices.brains[0].frames) <= 9
    steps = torch.tensor(voices.brains[0].frames).diff()
    assert float(steps.min()) >= 0.49
    voices = Voices()
    _, errors = call(main(voices, SessionLimits(pixels=1000)))
    assert [e["error"]["message"] for e in errors] == [
        "a picture of the video has 64 x 48 pixels; send 1,000 at most"
    ]
    assert not voices.brains[0].frames
    answer, errors = call(main(Voices(sees=False), SessionLimits()))
    assert "a=inactive" in answer and "sees nothing" in errors[0]["error"]["message"]


def test_a_server_that_stops_ends_its_calls_after_their_reply() -> None:
    voices, phones = Voices(LONG), list[Phone]()

    async def main() -> tuple[float, int]:
        app = app_with(voices, shutdown_seconds=20.0)
        async with exchange(app) as client:
            phones.append(Phone())
            reply = await dialled(client, await phones[0].offer())
            await phones[0].connect(reply.text)
            phones[0].mic.say(hum(QUESTION))
            await phones[0].event("output_audio_buffer.started")
            app.state.service.stop()
            refused = await dialled(client, await offered())
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.2)
        await phones[0].close()
        return loop.time(), refused.status_code

    ended, status = call(main())
    phone = phones[0]
    assert status == 429
    assert phone.events[-1]["error"]["code"] == "server_shutdown"
    assert time_of(phone, "output_audio_buffer.stopped") <= phone.times[-1] < ended
    length = len(hum(LONG)) / 16_000
    assert phone.times[-1] - time_of(phone, "output_audio_buffer.started") < length + 0.5


def test_the_official_client_calls() -> None:
    httpx2 = pytest.importorskip("httpx2")
    from openai import AsyncOpenAI

    app = app_with(Voices(), api_keys=KEYS)

    async def main() -> None:
        async with exchange(app):
            transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
            client = AsyncOpenAI(
                api_key=KEYS[0],
                base_url="http://localhost/v1",
                http_client=transport,
                max_retries=0,
            )
            secret = await client.realtime.client_secrets.create(session={"type": "realtime"})
            assert secret.session.type == "realtime" and secret.expires_at > 0
            phone = Phone()
            reply = await client.realtime.calls.create(
                sdp=await phone.offer(), session={"type": "realtime", "instructions": "Be brief."}
            )
            await phone.connect(reply.text)
            shown = (await phone.event("session.created"))["session"]
            assert shown["instructions"] == "Be brief."
            name = reply.response.headers["location"].rpartition("/")[2]
            await client.realtime.calls.hangup(name)
            await asyncio.sleep(0.5)
            assert not realtime(app).calls
            await phone.close()

    call(main())


@pytest.mark.slow
def test_the_embedded_models_see_hear_and_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmfast.serve.realtime.service.Clock", LoopClock)
    app = create_app(ServerConfig(demo=False))
    service = app.state.service
    service.start().result()
    voice = service._voice.start().result()
    frames = [frame for frame in read_video(str(CLIP), frames=8).frames for _ in range(5)]

    async def main() -> Phone:
        camera = Camera([np.ascontiguousarray(frame) for frame in frames])
        async with exchange(app) as client, calling(client, camera=camera) as phone:
            asked = {"input": {"transcription": {"model": "own"}}}
            phone.send("session.update", session={"type": "realtime", "audio": asked})
            await asyncio.sleep(4.5)
            phone.mic.say(say("what colour is the circle?").pcm)
            await phone.event("output_audio_buffer.stopped")
            await asyncio.sleep(0.3)
            return phone

    phone = call(main())
    checked(phone)
    (heard,) = phone.of("conversation.item.input_audio_transcription.completed")
    (done,) = phone.of("response.done")
    spoken = done["response"]["output"][0]["content"][0]["transcript"]
    assert done["response"]["mmfast"]["frames"]["seen"] >= 8
    assert re.sub("[^a-z ]", "", heard["transcript"].lower()) == "what colour is the circle"
    assert spoken.lower().split() == ["red"]
    said = [resample(sound.pcm, sound.rate, 16_000) for sound in voice.speak(spoken)]
    assert likeness(phone.heard, torch.cat(said)) > 0.9


def test_an_inbox_is_bounded() -> None:
    async def main() -> None:
        inbox = Inbox(10)
        for _ in range(4):
            inbox.put(torch.zeros(HELD // 2))
        inbox.put("event")
        assert inbox.dropped == HELD and inbox.code is None
        found = [await inbox.next() for _ in range(3)]
        assert [isinstance(each, str) for each in found] == [False, False, True]
        inbox.put("a" * 11)
        assert inbox.code == calls.SLOW and await inbox.next() is None

    call(main())


def test_addresses_of_a_host() -> None:
    assert addresses_of("127.0.0.1") == addresses_of("localhost") == ["127.0.0.1"]
    assert addresses_of("::1") == ["::1"]
    every = addresses_of("0.0.0.0")
    assert "127.0.0.1" in every and not any(":" in each for each in every)


def test_the_address_behind_a_router_is_told() -> None:
    async def main() -> str:
        async with exchange(app_with(Voices(), webrtc_address="203.0.113.7")) as client:
            return (await dialled(client, await offered())).text

    found = re.findall(r"a=candidate:\S+ \d udp \d+ (\S+) \d+ typ host", call(main()))
    assert found and set(found) == {"203.0.113.7"}
    with pytest.raises(MmfastError, match="webrtc_address='router': give an address"):
        ServerConfig(webrtc_address="router")
