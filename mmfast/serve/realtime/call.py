"""A call: a session over WebRTC, with a track of sound each way, a data channel, and video."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import queue
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from fractions import Fraction
from functools import partial
from typing import Any

import ifaddr
import torch
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCPeerConnection,
    RTCRtpReceiver,
    RTCSessionDescription,
)
from aiortc.exceptions import InvalidStateError
from aiortc.mediastreams import MediaStreamError
from aiortc.sdp import SessionDescription
from av import AudioFrame
from torch import Tensor

from mmfast.frontends.audio.packets import mix_channels
from mmfast.serve.guard.caller import Caller, caller_of
from mmfast.serve.guard.errors import ApiError, bad_request, busy
from mmfast.serve.realtime import protocol
from mmfast.serve.realtime.connection import GOING, SLOW, converse, opened, say_why
from mmfast.serve.realtime.conversation import new_id
from mmfast.serve.realtime.player import FRAME, TRACK_RATE, TrackPlayer
from mmfast.serve.realtime.protocol import EventError
from mmfast.serve.realtime.service import RealtimeService
from mmfast.serve.realtime.session import LONGEST, RealtimeSession
from mmfast.voice.channel import Inlet
from mmfast.voice.ear import RATE, ManualEar

OFFER = 1 << 16  # most letters of an offer
RING = 20.0  # seconds in which a call that is answered must come about
LATE = 0.5  # seconds behind its time from which a track no longer catches up
HELD = 30 * RATE  # most samples that wait to be listened to; beyond them the oldest are dropped
UNSENT = 1 << 18  # bytes in the data channel from which further events wait here
SIGHT = 0.5  # seconds between two frames taken from a video track
UNDECODED = 32  # most encoded frames that wait for the decoder
_log = logging.getLogger("mmfast.serve")
_ADDRESSES = re.compile(r"^a=(?:candidate:.*|end-of-candidates)\s*$\n?", re.MULTILINE)
_HOST = re.compile(r"^(a=candidate:\S+ \d+ udp \d+ )(\S+)", re.MULTILINE)


def checked_offer(offer: str) -> str:
    """Return an offer without the client's addresses; `ApiError` if it cannot be answered.

    The server sends nothing to an address before a packet from there has shown that its sender
    knows the password of the answer, so an offer cannot make it call other machines.
    """
    if len(offer) > OFFER:
        raise bad_request(f"the offer has {len(offer):,} letters; {OFFER:,} are allowed", "bad_sdp")
    text = _ADDRESSES.sub("", offer)
    try:
        media = SessionDescription.parse(text).media
    except Exception:  # of a parser that asserts and indexes
        media = []
    found = {each.kind: each for each in media}
    if len(found) != len(media) or not found.keys() <= {"audio", "video", "application"}:
        raise _bad("it may have one section of audio, one of video and one of data")
    if "audio" not in found:
        raise _bad("it has no audio; send the sdp of createOffer(), after addTrack()")
    if found["audio"].direction not in (None, "sendrecv", "recvonly"):
        raise _bad(f"its audio is {found['audio'].direction}; make it sendrecv to hear answers")
    for each in media:
        if (
            each.dtls is None
            or not each.dtls.fingerprints
            or not each.ice
            or not each.ice.usernameFragment
        ):
            raise _bad(f"its {each.kind} has no a=fingerprint, a=setup or a=ice-ufrag")
    if "video" in found and "video/vp8" not in {
        c.mimeType.lower() for c in found["video"].rtp.codecs
    }:
        raise _bad("its video has no VP8, the only kind that is read here")
    return text


def _bad(why: str) -> ApiError:
    return bad_request(f"the offer cannot be answered: {why}", "bad_sdp", "sdp")


def addresses_of(host: str) -> list[str]:
    """Return the addresses at which a server of this `host` takes calls."""
    if host == "localhost":
        return ["127.0.0.1"]
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(host).is_unspecified:
            return [host]
    every: Any = [ip for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    found = [ip.ip if ip.is_IPv4 else ip.ip[0] for ip in every]
    local = [str(each) for each in found if not ipaddress.ip_address(each).is_link_local]
    return [each for each in local if ":" not in each or host != "0.0.0.0"]


class SoundTrack(MediaStreamTrack):
    """The sound of the server: a frame of the player every 20 ms."""

    kind = "audio"

    def __init__(self, player: TrackPlayer) -> None:
        super().__init__()
        self._player, self._due, self._at = player, 0.0, 0

    async def recv(self) -> AudioFrame:
        """Return the next frame when it is due."""
        if self.readyState != "live":
            raise MediaStreamError
        now = asyncio.get_running_loop().time()
        if now - self._due > LATE:
            self._due = now
        await asyncio.sleep(max(self._due - now, 0.0))
        self._due += FRAME / TRACK_RATE
        frame = AudioFrame.from_ndarray(self._player.frame()[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base = TRACK_RATE, Fraction(1, TRACK_RATE)
        frame.pts = self._at
        self._at += FRAME
        return frame


class Inbox:
    """Events and sound of a client in the order in which they came, until it is ended.

    The oldest sound beyond `HELD` samples is dropped and counted; a client with more than `most`
    letters of events waiting is too fast, which ends it.
    """

    def __init__(self, most: int) -> None:
        self._items: deque[str | Tensor] = deque()
        self._most, self._letters, self._samples = most, 0, 0
        self._changed = asyncio.Event()
        self.code: int | None = None
        self.dropped = 0

    def put(self, item: str | Tensor) -> None:
        """Append an event, or samples `[n]`."""
        if isinstance(item, str):
            self._letters += len(item)
            if self._letters > self._most:
                self.end(SLOW)
        else:
            self._samples += len(item)
        self._items.append(item)
        while self._samples > HELD:
            at, oldest = next((i, x) for i, x in enumerate(self._items) if not isinstance(x, str))
            del self._items[at]
            self._samples -= len(oldest)
            self.dropped += len(oldest)
        self._changed.set()

    def end(self, code: int) -> None:
        """Let the reader end with a code, of the first call."""
        self.code = code if self.code is None else self.code
        self._changed.set()

    async def next(self) -> str | Tensor | None:
        """Return the oldest item; None after the end."""
        while not self._items and self.code is None:
            self._changed.clear()
            await self._changed.wait()
        if self.code is not None:
            return None
        item = self._items.popleft()
        if isinstance(item, str):
            self._letters -= len(item)
        else:
            self._samples -= len(item)
        return item


class _DecoderQueue(queue.Queue[Any]):
    """Encoded frames of VP8 that wait for the decoder: few, and none of too many pixels.

    A key frame tells its size before it is decoded; `refuse` is called at the first too large one.
    """

    def __init__(self, pixels: int, refuse: Callable[[int, int], None]) -> None:
        super().__init__()
        self._pixels, self._refuse, self._told, self._refused = pixels, refuse, False, False

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Append a frame, or drop it; None ends the decoder."""
        if item is None or (self.qsize() < UNDECODED and self._fits(item[1].data)):
            super().put(item, block, timeout)

    def _fits(self, data: bytes) -> bool:
        """Return False for a key frame of too many pixels, and for all that build on it."""
        if data and not data[0] & 1:  # a key frame
            width, height = (int.from_bytes(data[i : i + 2], "little") & 0x3FFF for i in (6, 8))
            self._refused = len(data) < 10 or width * height > self._pixels
            if self._refused and not self._told:
                self._told = True
                self._refuse(width, height)
        return bool(data) and not self._refused


class RealtimeCall:
    """One call, from its offer to its end.

    `who` may hang it up. `run` is its life after the answer; it ends where the client has gone,
    where it does not come about in `RING` seconds, and as sessions do.
    """

    def __init__(self, session: RealtimeSession, caller: Caller | None) -> None:
        self.id, self.session = new_id("rtc"), session
        self.who = "" if caller is None else caller.who
        self.task: asyncio.Task[None] | None = None
        self._caller = caller
        self._inbox = Inbox(4 * session.service.limits.message)
        self._peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._peer.on("datachannel", self._take_channel)
        self._peer.on("track", self._take_track)
        self._peer.on("connectionstatechange", self._follow)
        self._channel: Any = None
        self._reading: list[asyncio.Task[None]] = []
        self._up, self._told = asyncio.Event(), set[str]()

    async def answer(self, offer: str) -> str:
        """Return the answer to an offer that was checked; `ApiError` if there is none."""
        peer, session = self._peer, self.session
        assert isinstance(session.player, TrackPlayer)
        if "m=video" in offer:
            known: Any = RTCRtpReceiver.getCapabilities("video")
            vp8 = [codec for codec in known.codecs if "VP8" in codec.mimeType]
            direction = "recvonly" if session.brain.sees else "inactive"
            peer.addTransceiver("video", direction).setCodecPreferences(vp8)
        try:
            await peer.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        except Exception as error:
            raise _bad(str(error) or "it is no SDP of WebRTC") from None
        peer.addTrack(SoundTrack(session.player))
        config = session.service.config
        transports = [each.receiver.transport for each in peer.getTransceivers()]
        transports += [] if peer.sctp is None else [peer.sctp.transport]
        for transport in transports:
            connection: Any = transport.transport.iceGatherer._connection
            gather = type(connection).get_component_candidates
            found = partial(_gather, gather, connection, addresses_of(config.host))
            connection.get_component_candidates = found
        for each in peer.getTransceivers():
            if each.kind == "video":
                bounded = _DecoderQueue(session.service.limits.pixels, self._refuse_picture)
                receiver: Any = each.receiver  # has no other way to look before it decodes
                receiver._RTCRtpReceiver__decoder_queue = bounded
        await peer.setLocalDescription()
        sdp = str(peer.localDescription.sdp)
        if config.webrtc_address is not None:
            sdp = _HOST.sub(rf"\g<1>{config.webrtc_address}", sdp)
        return sdp

    async def run(self) -> None:
        """Talk until one side ends it."""
        try:
            async with asyncio.timeout(RING):
                await self._up.wait()
        except TimeoutError:
            _log.info("call %s did not come about in %g s", self.id, RING)
            return
        if self._inbox.code is None and not self.session.brain.sees and self._shows:
            self.session.fail(
                EventError("this model sees nothing; send no video", param="video"), None
            )
        if code := await converse(self.session, self._read, self._write):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    if code == GOING:
                        await self._write()
                    await self._flushed(0)

    def hang_up(self) -> None:
        """End it, as its caller asks for."""
        self._inbox.end(0)
        self._up.set()

    async def drain(self, seconds: float) -> None:
        """End it because the server stops, where possible after the reply that is being said."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._up.is_set() and (self.session.busy or self.session.player.sounding()):
                    await asyncio.sleep(0.05)
        say_why(self.session, "server_shutdown", "the server stops; call again in a moment")
        self._inbox.end(GOING)
        self._up.set()
        if self.task is not None:
            await asyncio.wait([self.task], timeout=5.0)

    async def close(self) -> None:
        """Close the connection."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self._peer.close()

    # --- what the connection reports ---

    def _follow(self) -> None:
        state = self._peer.connectionState
        if state in ("failed", "closed"):
            self.hang_up()
        elif state == "connected" and self._peer.sctp is None:
            self._up.set()

    def _take_channel(self, channel: Any) -> None:
        if self._channel is not None:
            channel.close()
            return
        self._channel = channel
        channel.on("message", self._take_event)
        channel.on("close", self.hang_up)
        self._up.set()

    def _take_event(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            message = message.decode("utf-8", "replace")
        caller = self._caller
        if caller is not None:
            caller.quotas.spend(caller.who, "bytes", len(message))
            if (error := caller.quotas.check(caller.who, "bytes")) is not None:
                say_why(self.session, str(error.code), error.message)
                self._inbox.end(GOING)
        self._inbox.put(message)

    def _take_track(self, track: MediaStreamTrack) -> None:
        if track.kind == "audio":
            self._reading.append(asyncio.ensure_future(self._hear(track)))
        elif self.session.brain.sees:
            self._reading.append(asyncio.ensure_future(self._look(track)))

    @property
    def _shows(self) -> bool:
        return any(each.kind == "video" for each in self._peer.getTransceivers())

    async def _hear(self, track: MediaStreamTrack) -> None:
        """Put the sound of the client into the inbox; packets that did not come are silence."""
        inlet, due = Inlet(), None
        with contextlib.suppress(MediaStreamError):
            while True:
                frame: Any = await track.recv()
                rate, pcm = frame.sample_rate, mono(frame)
                gap = 0 if due is None or frame.pts is None else frame.pts - due
                if gap > 0:
                    pcm = torch.cat([torch.zeros(min(gap, rate)), pcm])
                due = None if frame.pts is None else frame.pts + frame.samples
                self._inbox.put(inlet.take(pcm, rate))

    async def _look(self, track: MediaStreamTrack) -> None:
        """Take a frame of the video every `SIGHT` seconds."""
        session, last = self.session, -SIGHT
        with contextlib.suppress(MediaStreamError):
            while not session.closed:
                frame: Any = await track.recv()
                time = session.clock.now() - session.began
                if time - last >= SIGHT:
                    last = time
                    picture = await asyncio.to_thread(frame.to_ndarray, format="rgb24")
                    session.charge(frame.width * frame.height)
                    session.frames.add(picture, time, None)

    def _refuse_picture(self, width: int, height: int) -> None:
        most = self.session.service.limits.pixels
        text = f"a picture of the video has {width} x {height} pixels; send {most:,} at most"
        self.session.fail(EventError(text, param="video"), None)

    # --- parts of the session ---

    async def _read(self) -> int:
        """Handle events and sound of the client in order, until the inbox is ended."""
        session = self.session
        while (item := await self._inbox.next()) is not None:
            await session.outbox.calm()
            if isinstance(item, str):
                await session.handle(item)
            else:
                await self._listen(item)
        return self._inbox.code or 0

    async def _listen(self, pcm: Tensor) -> None:
        """Listen to sound; an error that comes back with every piece is told once."""
        session = self.session
        session.last_event = session.clock.now()
        if isinstance(session.ear, ManualEar):  # a track never stops, so the oldest sound goes
            session.ear.keep(LONGEST * RATE - len(pcm))
        try:
            await session.listen(pcm)
        except Exception as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                session.fail(error, None)

    async def _write(self) -> int:
        """Send events of the server; return `SLOW` if the client does not read them."""
        session, code = self.session, 0
        while (text := await session.outbox.next()) is not None:
            if self._channel is None:
                continue  # the offer had no channel: sound alone
            try:
                await self._flushed(UNSENT)
                self._channel.send(text)
            except TimeoutError:
                return SLOW
            except InvalidStateError:
                return 0
            except ValueError as error:  # more than the client takes in one message
                session.fail(EventError(f"an event was left out: {error}", "event_too_large"), None)
        return code

    async def _flushed(self, most: int) -> None:
        """Wait until at most so many bytes wait in the data channel; `TimeoutError`."""
        async with asyncio.timeout(self.session.service.limits.slow):
            while self._channel is not None and self._channel.readyState == "open":
                if self._channel.bufferedAmount <= most:
                    break
                await asyncio.sleep(0.02)


async def _gather(gather: Any, connection: Any, own: list[str], **given: Any) -> Any:
    """Gather candidates at the addresses of this server, the loopback included."""
    return await gather(connection, **{**given, "addresses": own})


def mono(frame: Any) -> Tensor:
    """Return a frame of signed 16-bit sound as samples `[n]` in -1..1, its channels mixed."""
    pcm = torch.from_numpy(frame.to_ndarray().astype("float32")) / 32768.0
    mixed: Tensor = mix_channels(pcm.reshape(-1, len(frame.layout.channels)).T)
    return mixed


@asynccontextmanager
async def _counted(caller: Caller | None) -> AsyncIterator[None]:
    """Count a call among the requests of its caller that run; `ApiError` if there are too many."""
    if caller is None:
        yield
        return
    caller.quotas.enter(caller.who)
    try:
        yield
    finally:
        caller.quotas.leave(caller.who)


async def take_call(
    service: RealtimeService, scope: Any, offer: str, asked: Sequence[protocol.SessionShape]
) -> tuple[str, str]:
    """Answer an offer; return the name of the call, which runs from now on, and the answer.

    `ApiError`: the offer or a setting is wrong, no place is free, or the server stops.
    """
    if service.stopping():
        raise busy("the server stops; call again in a moment", 5.0, "server_shutdown")
    offer, caller = checked_offer(offer), None
    with contextlib.suppress(TypeError):
        caller = caller_of(scope)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_counted(caller))
        given = opened(service, scope, asked=asked, player=TrackPlayer)
        session = await stack.enter_async_context(given)
        call = RealtimeCall(session, caller)
        stack.push_async_callback(call.close)
        answer = await call.answer(offer)
        service.calls[call.id] = call
        call.task = asyncio.ensure_future(_run(service, call, stack.pop_all()))
    return call.id, answer


async def _run(service: RealtimeService, call: RealtimeCall, held: AsyncExitStack) -> None:
    try:
        async with held:
            await call.run()
    except Exception:
        _log.exception("call %s broke", call.id)
    finally:
        service.calls.pop(call.id, None)
