"""The tab "Voice": speak and be answered by voice, interrupt, or type and hear.

The conversation runs over a WebSocket. Messages are JSON texts; sound is 16-bit PCM in binary
messages: from the browser at the rate that its first message named, to the browser behind the
event `audio` that it belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

import mmfast
from mmfast.demos import examples, views
from mmfast.demos.shelf import Seats, Shelf
from mmfast.demos.views import one_line, polite

CHAT = "small talk"
RATES = (8_000, 192_000)
Tell = Callable[[tuple[dict[str, Any], bytes | None]], Any]


class Talk:
    """A conversation that a browser drives.

    Its wish has `rate` of the microphone, `about` (an example, or small talk) and `voice`. `tell`
    takes `(event, sound or None)`, in a thread of the conversation.
    """

    def __init__(self, shelf: Shelf, wish: dict[str, Any], tell: Tell) -> None:
        rate, about = wish.get("rate"), wish.get("about") or CHAT
        if not isinstance(rate, int) or not RATES[0] <= rate <= RATES[1]:
            raise mmfast.MmfastError(f"rate={rate!r} is none of a microphone; give samples/s")
        if about != CHAT and about not in dict(examples.names(pages=False)).values():
            raise mmfast.MmfastError("there is nothing of that name to talk about")
        chat = None if about == CHAT else _about(shelf, about)
        options: dict[str, Any] = {}
        if wish.get("voice"):
            options["voice"] = str(wish["voice"])
        self.rate, self._tell = rate, tell
        self.session = shelf.talk(chat, **options).open()
        self._telling = threading.Thread(target=self._events, name="mmfast-demo-voice", daemon=True)

    def start(self) -> None:
        self.session.start()
        self._telling.start()

    def take(self, message: Any) -> None:
        """Take sound, or a JSON message: `cancel`, or `truncate` with `item` and `ms`."""
        if isinstance(message, bytes):
            if len(message) % 2:
                raise mmfast.MmfastError("sound of half a sample; send 16-bit PCM")
            pcm = np.frombuffer(message, "<i2").astype(np.float32) / 32768
            self.session.push(pcm, self.rate)
            return
        kind = message.get("type") if isinstance(message, dict) else None
        if kind == "cancel":
            self.session.cancel()
        elif kind == "truncate":
            with contextlib.suppress(mmfast.MmfastError):  # an item that was forgotten meanwhile
                self.session.truncate(str(message.get("item")), message.get("ms"))
        else:
            raise mmfast.MmfastError("an unknown message; send sound, cancel or truncate")

    def _events(self) -> None:
        for event in self.session.events():
            pcm = None if event.pcm is None else _int16(event.pcm).tobytes()
            self._tell(({**event.to_dict(), "text": event.text}, pcm))

    def close(self) -> None:
        """End it, and wait until nothing of it runs any more."""
        self.session.close()
        if self._telling.is_alive() and self._telling is not threading.current_thread():
            self._telling.join()


def _int16(pcm: Any) -> Any:
    return (pcm.detach().float().cpu().clamp(-1, 1).numpy() * 32767).astype("<i2")


def _about(shelf: Shelf, name: str) -> Callable[[Sequence[Any]], Iterator[str]]:
    path = str(examples.CLIPS / name)
    pipe = shelf.visual(mmfast.kind_of(path))
    return lambda turns: pipe.stream(path, shelf.wording(turns[-1].text))


MOST = 4  # conversations at once
LONGEST = 900.0  # seconds of a conversation
SILENCE = 120.0  # seconds in which the browser says nothing at all
BIGGEST = 1 << 20  # bytes of a message
POLICY, LATER = 1008, 1013  # codes of WebSocket: not allowed; try again later


class VoiceSocket:
    """Serves conversations, each on a connection of its own.

    `who` returns the visitor a request comes from, or None where nobody may; it is the
    `auth_dependency` of `gradio.mount_gradio_app`.
    """

    def __init__(self, shelf: Shelf, who: Callable[[Any], Any] | None = None) -> None:
        self.shelf, self.who = shelf, who
        self.seats: Seats[Talk] = Seats(MOST)

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        if not await self._welcome(socket):
            await socket.close(POLICY)
            return
        name, code = uuid.uuid4().hex, 1000
        try:
            async with asyncio.timeout(LONGEST):
                await self._converse(socket, name)
        except mmfast.MmfastError as error:
            await _tell(socket, one_line(error))
            code = LATER
        except TimeoutError:
            await _tell(socket, "the conversation is over: it had been idle, or grown too long")
        except (WebSocketDisconnect, RuntimeError):
            return  # the visitor left
        finally:
            # begun at once and shielded: a server that stops also cancels this wait
            leave = asyncio.get_running_loop().run_in_executor(None, self.seats.leave, name)
            await asyncio.shield(leave)
        with contextlib.suppress(RuntimeError):
            await socket.close(code)

    async def _welcome(self, socket: WebSocket) -> bool:
        """Tell whether the page came from this server: others may not use a visitor's browser."""
        origin, host = socket.headers.get("origin"), socket.headers.get("host")
        if origin is not None and urlsplit(origin).netloc != host:
            return False
        if self.who is None:
            return True
        found = self.who(socket)
        return (await found if asyncio.iscoroutine(found) else found) is not None

    async def _converse(self, socket: WebSocket, name: str) -> None:
        wish = await _message(socket)
        if not isinstance(wish, dict):
            raise mmfast.MmfastError("a conversation begins with a JSON message")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def tell(event: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server is closing: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        def made() -> Talk:
            return Talk(self.shelf, wish, tell)

        talk = await asyncio.to_thread(self.seats.take, name, made)
        await socket.send_text(json.dumps({"kind": "ready"}))
        talk.start()
        telling = asyncio.create_task(_send(socket, events))
        try:
            while True:
                message = await _message(socket)
                self.seats.get(name)
                await asyncio.to_thread(talk.take, message)
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError, RuntimeError, WebSocketDisconnect):
                await telling


async def _message(socket: WebSocket) -> Any:
    async with asyncio.timeout(SILENCE):
        message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    data = message.get("bytes") or message.get("text") or ""
    if len(data) > BIGGEST:
        raise mmfast.MmfastError(f"a message of {len(data):,} bytes; at most {BIGGEST:,}")
    if isinstance(data, bytes):
        return data
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise mmfast.MmfastError("a message that is no JSON") from None


async def _send(socket: WebSocket, events: asyncio.Queue[Any]) -> None:
    while True:
        event, pcm = await events.get()
        await socket.send_text(json.dumps(event))
        if pcm is not None:
            await socket.send_bytes(pcm)


async def _tell(socket: WebSocket, message: str) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await socket.send_text(json.dumps({"kind": "error", "text": message}))


VOICES = {
    "en-us": "low", "en-us+m3": "low, another", "en-us+f2": "high", "en-us+f3": "high, another",
}  # fmt: skip
MODES: dict[str, dict[str, str]] = {
    "exact: as one token per pass": {"mode": "exact"},
    "fast: typical drafts stand": {"mode": "fast"},
    "turbo: fewest passes": {"mode": "turbo"},
    "one token per pass": {"schedule": "vanilla"},
}
CAN_SAY = (
    "What is three plus four?", "What comes after nine?", "What is the opposite of left?",
    "of other things it knows nothing: it is small",
)  # fmt: skip
LONGEST_TEXT = 300  # letters that are read out at once


def voice_tab(shelf: Shelf) -> None:
    gr.HTML(talking(), elem_id="talk")
    with gr.Accordion("Type and hear", open=True), gr.Row(equal_height=False):
        with gr.Column(scale=5, min_width=280):
            text = gr.Textbox(
                "The red circle moves to the left.", label="Text", max_length=LONGEST_TEXT,
                lines=2, elem_id="say-text",
            )  # fmt: skip
            with gr.Row():
                voice = gr.Dropdown(
                    [(f"{name} ({how})", name) for name, how in VOICES.items()],
                    value="en-us", label="Voice", scale=2, min_width=140,
                )  # fmt: skip
                mode = gr.Dropdown(
                    list(MODES), value=next(iter(MODES)), label="Drafting", scale=3, min_width=200
                )
            button = gr.Button("Say it", variant="primary", elem_id="say")
        with gr.Column(scale=5, min_width=280):
            sound = gr.Audio(label="Speech", autoplay=True, interactive=False, buttons=["download"])
            figures = gr.HTML(views.note("Its figures come here."), elem_id="say-figures")
    spoken = polite(partial(say, shelf))
    how: dict[str, Any] = {**views.BUSY, "api_visibility": "private"}
    gr.on([button.click, text.submit], spoken, [text, voice, mode], [sound, figures], **how)


def say(shelf: Shelf, text: str, voice: str, mode: str) -> tuple[tuple[int, Any], str]:
    spoken = shelf.talker()(text, voice=voice, **MODES[mode])
    stats = spoken.stats
    rows = [
        ("seconds of speech", f"{spoken.seconds:.2f}"),
        ("first sound after", f"{stats['first_audio_ms']:.0f} ms"),
        ("time per second of speech", f"{stats['rtf']:.2f} s"),
        ("audio tokens a pass", f"{stats['tokens_per_pass']:.2f}"),
    ]
    note = f'<p class="mm-soft">{escape(spoken.note)}</p>' if spoken.note else ""
    return (spoken.rate, _int16(spoken.pcm)), views.facts(rows, "Figures of the speech") + note


def talking() -> str:
    """The conversation's element; voice.js brings it to life."""
    named = examples.names(pages=False)
    about = [*([name, f"about: {label}"] for label, name in named), [CHAT, CHAT]]
    data = {"about": about, "voices": [[n, f"{n} ({how})"] for n, how in VOICES.items()]}
    asks = {CHAT: list(CAN_SAY)}
    asks |= {name: examples.questions(name, 4) for _, name in named}
    return (
        f"<mm-voice data-choices='{escape(json.dumps(data), quote=True)}' "
        f"data-asks='{escape(json.dumps(asks), quote=True)}'></mm-voice>"
    )
