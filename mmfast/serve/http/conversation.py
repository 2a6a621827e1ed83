"""From the messages of a request to those of an engine: media read, sounds written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.serve.engine.base import Media, Message, Role
from mmfast.serve.guard.errors import ApiError, api_error
from mmfast.serve.guard.media import load_media, load_sound
from mmfast.serve.http import chat_request as asked
from mmfast.serve.http.service import Service


class Reader:
    """Reads the messages of one request.

    Args:
        service: Whose limits and whose ears.
        options: How clips are sampled.

    Attributes:
        heard: What was understood of each sound, in their order.
        seconds: Of all sounds.
    """

    def __init__(self, service: Service, options: asked.MmfastOptions) -> None:
        self._service, self._config = service, service.config
        self._options = options
        self._heard: dict[tuple[int, int], str] = {}
        self.seconds = 0.0

    @property
    def heard(self) -> list[str]:
        """What was understood."""
        return [self._heard[key] for key in sorted(self._heard)]

    async def messages(self, given: list[Any]) -> tuple[Message, ...]:
        """All messages, their media read side by side.

        Raises:
            ApiError: Too much of something, nothing asked, or media that cannot be read.
        """
        self._check(given)
        reading = [asyncio.ensure_future(self._message(each, i)) for i, each in enumerate(given)]
        try:
            return tuple(await asyncio.gather(*reading))
        finally:
            for task in reading:
                task.cancel()

    def _check(self, given: list[Any]) -> None:
        parts = [
            p for m in given for p in ([m.content] if isinstance(m.content, str) else m.content)
        ]
        texts = [p if isinstance(p, str) else p.text for p in parts if _is_text(p)]
        letters, limit = sum(map(len, texts)), self._config.max_text
        if letters > limit:
            raise _too_much(f"{letters:,} letters are too many; send at most {limit:,}")
        media, most = len(parts) - len(texts), self._config.max_media
        if media > most:
            raise _too_much(f"{media} images, clips and sounds are too many; send at most {most}")
        frames = self._options.frames or 0
        if frames > self._config.max_frames:
            raise ApiError(
                400,
                f"mmfast.frames={frames} is too many; ask for at most {self._config.max_frames}",
                code="invalid_value",
                param="mmfast.frames",
            )
        last = given[-1]
        if last.role != "user":
            raise ApiError(
                400,
                f"the last message is the {last.role}'s; end with one whose role is 'user'",
                code="invalid_value",
                param="messages",
            )
        own = [last.content] if isinstance(last.content, str) else last.content
        if not any(_asks(part) for part in own):
            raise ApiError(
                400,
                "the last message asks nothing; add a text",
                code="invalid_value",
                param=f"messages[{len(given) - 1}].content",
            )

    async def _message(self, given: Any, number: int) -> Message:
        role: Role = "system" if given.role == "developer" else given.role
        if isinstance(given.content, str):
            return Message(role, (given.content,))
        parts = [
            asyncio.ensure_future(self._part(part, (number, i)))
            for i, part in enumerate(given.content)
        ]
        try:
            return Message(role, tuple(await asyncio.gather(*parts)))
        finally:  # where one fails, nobody waits for the others
            for part in parts:
                part.cancel()

    async def _part(self, part: Any, place: tuple[int, int]) -> str | Media:
        if isinstance(part, asked.TextPart):
            return part.text
        param = f"messages[{place[0]}].content[{place[1]}].{part.type}"
        try:
            if isinstance(part, asked.SoundPart):
                return await self._words(part.input_audio, place, param)
            if isinstance(part, asked.ImagePart):
                return await load_media(part.image_url.url, "image", self._config, param=param)
            options, url = self._options, part.video_url.url
            return await load_media(
                url, "video", self._config, frames=options.frames, fps=options.fps, param=param
            )
        except MmfastError as error:
            self._service.metrics.rejected("media")
            raise api_error(error, param) from error

    async def _words(self, sound: asked.Sound, place: tuple[int, int], param: str) -> str:
        """What was said, as one would write it."""
        pcm, rate = await load_sound(sound.data, self._config, format=sound.format, param=param)
        voice = await self._service.voice()
        heard = await self._service.in_voice_thread(_transcriber(voice, pcm, rate))
        self.seconds += len(pcm) / rate
        self._heard[place] = heard
        return heard


def _transcriber(voice: Any, pcm: Any, rate: int) -> Callable[[], str]:
    def transcribe() -> str:
        from mmfast.pipelines.omni_chat import written

        heard = voice.transcribe(pcm, rate).strip()
        if not heard:
            raise MmfastError("no word was understood in the sound; speak louder, or send text")
        return written(heard)

    return transcribe


def _is_text(part: Any) -> bool:
    return isinstance(part, str | asked.TextPart)


def _asks(part: Any) -> bool:
    if isinstance(part, str | asked.TextPart):
        return bool((part if isinstance(part, str) else part.text).strip())
    return isinstance(part, asked.SoundPart)


def _too_much(text: str) -> ApiError:
    return ApiError(400, text, code="too_much", param="messages")
