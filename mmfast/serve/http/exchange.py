"""One request for answers, whatever the format of its reply: its messages, options and events."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from cachetools import LRUCache
from starlette.responses import Response

from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine import base
from mmfast.serve.engine.rules import json_grammar
from mmfast.serve.guard import logs
from mmfast.serve.guard.caller import Caller
from mmfast.serve.guard.errors import ApiError, api_error, bad_request, body
from mmfast.serve.guard.media import load_media, load_sound
from mmfast.serve.http import events, schema
from mmfast.serve.http.service import Service

T = TypeVar("T")


PATIENCE = 2.0  # seconds to wait with the status of a stream, so that early errors get their own
KEPT = 256 << 20  # bytes of decoded pictures that clients name by a uuid
HEARTBEAT = 15.0  # seconds between comments in a stream that waits


class Reader:
    """Reads the messages of one request; `seconds` is the duration of all sounds.

    `charge` is called with the pixels of each image and clip; `processor` holds arguments of the
    model's processor. Pictures with a `uuid` are kept for their `owner`, who need not send them
    again.
    """

    def __init__(
        self,
        service: Service,
        options: schema.MmfastOptions,
        charge: Callable[[int], None],
        processor: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> None:
        self._service, self._config, self._owner = service, service.config, owner
        kept = LRUCache[tuple[str, str], base.Media](KEPT, lambda each: each.shot.pixels.nbytes)
        self._pictures = service.parts.setdefault("pictures", kept)
        self._options, self._charge = options, charge
        # encodings under other arguments of the processor are not reused
        self._variant = f":{sorted(processor.items())}" if processor else ""
        self._heard: dict[tuple[int, int], str] = {}
        self._notes: dict[tuple[int, int], str] = {}
        self.seconds = 0.0

    @property
    def heard(self) -> list[str]:
        """Transcripts of the sounds in order."""
        return [self._heard[key] for key in sorted(self._heard)]

    async def messages(self, given: list[Any]) -> tuple[base.Message, ...]:
        """Read all messages, their media at the same time.

        `ApiError`: a limit is exceeded, nothing is asked, or a medium cannot be read.
        """
        self._check(given)
        pictures = sum(isinstance(p, schema.ImagePart) for m in given for p in parts_of(m))
        self._share = self._config.request_pixels // max(pictures, 1)
        return await _gathered(self._message(each, i) for i, each in enumerate(given))

    def _check(self, given: list[Any]) -> None:
        parts = [part for message in given for part in parts_of(message)]
        texts = [_text(p) for p in parts if _is_text(p)]
        letters, limit = sum(map(len, texts)), self._config.max_text
        if letters > limit:
            raise _too_much(f"{letters:,} letters are too many; send at most {limit:,}")
        media, most = len(parts) - len(texts), self._config.max_media
        if media > most:
            raise _too_much(f"{media} images, clips and sounds are too many; send at most {most}")
        frames = self._options.frames or 0
        if frames > self._config.max_frames:
            raise bad_request(
                f"mmfast.frames={frames} is too many; ask for at most {self._config.max_frames}",
                "invalid_value",
                "mmfast.frames",
            )
        last = given[-1]
        if last.role == "user" and not any(_asks(part) for part in parts_of(last)):
            raise bad_request(
                "the last message asks nothing; add a text",
                "invalid_value",
                f"messages[{len(given) - 1}].content",
            )

    async def _message(self, given: Any, number: int) -> base.Message:
        role: base.Role = "system" if given.role == "developer" else given.role
        parts = (self._part(part, (number, i)) for i, part in enumerate(parts_of(given)))
        content = await _gathered(parts)
        notes = (note for (at, _), note in sorted(self._notes.items()) if at == number)
        return base.Message(role, content, _more(given), tuple(notes))

    async def _part(self, part: Any, place: tuple[int, int]) -> str | base.Media:
        if _is_text(part):
            return _text(part)
        param = f"messages[{place[0]}].content[{place[1]}].{part.type}"
        try:
            if isinstance(part, schema.SoundPart):
                sound, kind = part.input_audio.data, part.input_audio.format
                return await self._words(sound, place, param, kind)
            if isinstance(part, schema.SoundUrlPart):
                return await self._words(part.audio_url.url, place, param)
            return await self._media(part, param)
        except MmfastError as error:
            self._service.metrics.rejected("media")
            raise api_error(error, param) from error

    async def _media(self, part: Any, param: str) -> base.Media:
        options, config = self._options, self._config
        if isinstance(part, schema.ImagePart):
            if part.image_url is None:
                found = self._kept(part.uuid, param)
            else:
                url = part.image_url.url
                found = await load_media(url, "image", config, most=self._share, param=param)
            if part.uuid is not None and found.shot.pixels.nbytes <= KEPT:
                self._pictures[self._owner, part.uuid] = found
        else:
            url, frames, fps = part.video_url.url, options.frames, options.fps
            found = await load_media(url, "video", config, frames=frames, fps=fps, param=param)
        self._charge(found.shot.pixels.size // 3)
        return replace(found, key=f"{found.key}{self._variant}")

    def _kept(self, uuid: str | None, param: str) -> base.Media:
        """Return a picture that was sent before; `ApiError` if none is kept that fits here."""
        if uuid is None:
            raise bad_request(f"{param} is missing; give it", "missing_required_parameter", param)
        found: base.Media | None = self._pictures.get((self._owner, uuid))
        if found is None or found.shot.pixels.size // 3 > self._share:
            text = f"no picture of uuid {uuid[:80]!r} is kept here; send it once more"
            raise bad_request(text, "unknown_uuid", param)
        return found

    async def _words(
        self, sound: str, place: tuple[int, int], param: str, kind: str | None = None
    ) -> str:
        heard, seconds, note = await transcribed(self._service, sound, param, kind)
        if not heard:
            raise MmfastError("no word was understood in the sound; speak louder, or send text")
        self.seconds += seconds
        self._heard[place] = heard
        if note:
            self._notes[place] = note
        return heard


async def _gathered(work: Iterable[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Run coroutines at the same time; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def words_of(voice: Any, pcm: Any, rate: int, asks: bool = True) -> str:
    """Return what sound `[n]` says; written as a question if it `asks`, or begins like one."""
    from mmfast.pipelines.omni_chat import ASKS, written
    from mmfast.voice.models import can

    heard = str(can(voice, "transcribe").transcribe(pcm, rate)).strip()
    return written(heard) if heard and (asks or re.match(ASKS, heard, re.IGNORECASE)) else heard


async def transcribed(
    service: Service, sound: str | bytes, param: str, kind: str | None = None, asks: bool = True
) -> tuple[str, float, str]:
    """Return the words of a recording, base64, a URL or its bytes, its seconds, and a note or "".

    There are no words where nobody speaks. A text that `asks` is written as a question, any other
    only if it begins like one.
    """
    pcm, rate, note = await load_sound(sound, service.config, format=kind, param=param)
    voice = await service.voice()
    heard = await service.in_voice_thread(partial(words_of, voice, pcm, rate, asks))
    return heard, len(pcm) / rate, note


def parts_of(message: Any) -> list[Any]:
    """Return the parts of a message; none where its content is null."""
    content = message.content
    return [] if content is None else [content] if isinstance(content, str) else list(content)


def _more(message: Any) -> dict[str, Any]:
    """Return what a chat template reads of a message beside role and content."""
    found = {name: getattr(message, name, None) for name in ("name", "tool_call_id")}
    calls = getattr(message, "tool_calls", None) or []
    made = [call.model_dump(mode="json", include={"id", "type", "function"}) for call in calls]
    for call in made:
        with suppress(ValueError):  # templates write arguments as JSON themselves
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {name: value for name, value in {**found, "tool_calls": made}.items() if value}


def _is_text(part: Any) -> bool:
    return isinstance(part, str | schema.TextPart | schema.RefusalPart)


def _text(part: Any) -> str:
    if isinstance(part, schema.RefusalPart):
        return part.refusal
    return part if isinstance(part, str) else str(part.text)


def _asks(part: Any) -> bool:
    if _is_text(part):
        return bool(_text(part).strip())
    return isinstance(part, schema.SoundPart | schema.SoundUrlPart)


def _too_much(text: str) -> ApiError:
    return bad_request(text, "too_much", "messages")


_log = logging.getLogger("mmfast.serve")


class AnswerSet:
    """The answers to one request, counted in metrics, quotas and log as they come.

    Attributes:
        texts: Text of each answer so far.
        chances: Log-probabilities of the tokens of each answer so far.
        ends: The last event of each answer that is complete.
        prompt: Tokens of the prompt, once they are known.
        spent: Tokens of all answers so far.
    """

    def __init__(self, service: Service, asked: schema.Choosing, caller: Caller, name: str) -> None:
        self.service, self.asked, self.caller, self.name = service, asked, caller, name
        self.owner = f"{caller.tenant}/{asked.user or ''}"
        self._start = time.perf_counter()
        self._last: dict[int, float] = {}
        self.texts: dict[int, str] = {}
        self.chances: dict[int, list[base.TokenChance]] = {}
        self.ends: dict[int, base.Finish] = {}
        self.total = self.prompt = self.spent = 0
        self._spent: dict[int, int] = {}
        self._check()

    def _check(self) -> None:
        """Check the request against the options of the server."""
        asked, service = self.asked, self.service
        if service.stopping:
            text = "the server is stopping; ask again in a moment"
            raise ApiError(503, text, code="stopping", headers={"Retry-After": "5"})
        self._adapter = service.adapter(asked.model)
        most, longest = service.config.max_tokens, asked.longest
        if longest is not None and longest > most:
            newer = getattr(asked, "max_completion_tokens", None)
            param = "max_tokens" if newer is None else "max_completion_tokens"
            raise bad_request(
                f"{param}={longest} is too many; ask for at most {most}", "invalid_value", param
            )
        if asked.stream_options is not None and not asked.stream:
            raise bad_request(
                "stream_options go with stream=true; set it, or leave them out",
                "invalid_value",
                "stream_options",
            )
        self.headers = ignoring(asked, service.config)

    def charge(self, pixels: int) -> None:
        """Charge the caller for decoded pixels."""
        self.caller.quotas.spend(self.caller.who, "pixels", pixels)

    async def run(
        self,
        prompts: Sequence[tuple[tuple[base.Message, ...], base.Options]],
        grammar: Any = None,
    ) -> events.RequestRun:
        """Return the requests at the engine: for each prompt as many answers as were asked for.

        `grammar` is a JSON schema that the answers follow.
        """
        asked, service = self.asked, self.service
        self.total = len(prompts) * (asked.n or 1)
        room = service.config.slots + service.config.queue
        if self.total > room:
            text = f"{self.total} answers are too many; ask for at most {room} at once"
            raise bad_request(text, param="n" if (asked.n or 1) > 1 else "prompt")
        executor = await service.executor()
        try:
            rules = None if grammar is None else await asyncio.to_thread(json_grammar, grammar)
        except MmfastError as error:
            raise bad_request(str(error), param="response_format") from None
        plain = sampling(asked, service.config, service.defaults)
        found = list[base.Request]()
        for messages, options in prompts:
            for i in range(asked.n or 1):
                seed = None if plain.seed is None else plain.seed + i
                name = self.name if not found else f"{self.name}-{len(found)}"
                found.append(
                    base.Request(
                        name,
                        messages,
                        replace(plain, seed=seed, grammar=rules),
                        options,
                        # Results are separate for each user; turns are shared by users of a key.
                        self.owner,
                        self._priority(),
                        self.caller.tenant,
                        self._adapter,
                    )
                )
        return events.RequestRun(executor, found)

    def _priority(self) -> int:
        """Return the priority, higher first; vLLM's own field counts the other way."""
        ours = self.asked.mmfast.priority if self.asked.mmfast is not None else None
        if ours is not None and self.asked.priority is not None:
            raise bad_request("priority and mmfast.priority are two; give one", param="priority")
        return ours or -(self.asked.priority or 0)

    async def whole(self, run: events.RequestRun) -> None:
        """Wait for the end of all answers. ApiError: one of them failed."""
        async with run:
            while len(self.ends) < self.total:
                found = self.noted(await run.next())
                if found is not None and isinstance(found[1], base.Failure):
                    raise self.failed(found[1])

    async def stream(
        self,
        run: events.RequestRun,
        part: Callable[[int, base.Event], Iterable[bytes]],
        end: Iterable[bytes],
        start: Iterable[bytes] = (),
        failed: Callable[[ApiError], bytes] = lambda error: events.event(body(error)),
    ) -> Response:
        """Answer with a stream; an early failure gets a status of its own.

        `part` writes an event of the answer of that number, `end`, which is read behind the last
        one, the close of the stream. A later failure takes its place, as `failed` writes it.
        """
        await run.__aenter__()
        try:
            first = self.noted(await run.next(PATIENCE))
            if first is not None and isinstance(first[1], base.Failure):
                raise self.failed(first[1])
        except BaseException:
            run.close()
            raise

        async def parts() -> AsyncGenerator[bytes, None]:
            found = first
            for piece in start:
                yield piece
            while True:
                if found is None:
                    yield events.WAITING
                elif isinstance(found[1], base.Failure):
                    yield failed(self.failed(found[1]))
                    return
                else:
                    for piece in part(*found):
                        yield piece
                    if len(self.ends) == self.total:
                        break
                found = self.noted(await run.next(HEARTBEAT))
            for piece in end:
                yield piece

        return events.StreamedReply(parts(), events.EVENTS, run.close, self.headers)

    def failed(self, failure: base.Failure) -> ApiError:
        """Turn a failure into an error reply; one of a server that stops says so."""
        if self.service.stopping and failure.status in (499, 503):
            text = "the server is stopping and has cut the answer short; ask again in a moment"
            return ApiError(503, text, code="stopping", headers={"Retry-After": "5"})
        return events.failed(failure)

    def noted(self, found: tuple[int, base.Event] | None) -> tuple[int, base.Event] | None:
        """Count an event in metrics, quotas and log."""
        if found is None:
            return None
        (number, event), metrics, now = found, self.service.metrics, time.perf_counter()
        if isinstance(event, base.Delta):
            self.texts[number] = self.texts.get(number, "") + event.text
            self.chances.setdefault(number, []).extend(event.logprobs)
            self.caller.spend(event.tokens)  # as they come, also for clients that leave early
            self._spent[number] = self._spent.get(number, 0) + event.tokens
            self.spent += event.tokens
            self.prompt = self.prompt or event.prompt_tokens
            if number in self._last:
                metrics.gap(now - self._last[number], event.tokens)
            else:
                metrics.ttft(now - self._start)
            self._last[number] = now
        elif isinstance(event, base.Finish):
            self.ends[number] = event
            metrics.finished(event, now - self._start)
            rest = max(event.completion_tokens - self._spent.get(number, 0), 0)
            self.spent += rest
            self.prompt = event.prompt_tokens
            again = number % (self.asked.n or 1)  # the prompt is charged once
            self.caller.spend((0 if again else event.prompt_tokens) + rest)
        return found

    def log(self, asked: str) -> None:
        """Log question and answers where the options ask for it."""
        config = self.service.config
        if config.log_text:
            said = logs.text(" | ".join(self.texts.values()), config)
            fields = {"id": self.caller.id, "asked": logs.text(asked, config), "answered": said}
            _log.info("answered", extra={"fields": fields})

    def usage(self, heard: Sequence[str] = (), seconds: float = 0.0) -> dict[str, Any]:
        """Return the numbers of tokens so far; of a prompt with several answers, once."""
        firsts = [self.ends[i] for i in sorted(self.ends) if i % (self.asked.n or 1) == 0]
        prompt = sum(end.prompt_tokens for end in firsts) or self.prompt
        details = schema.PromptDetails(
            cached_tokens=sum(end.cached_tokens for end in firsts),
            image_tokens=sum(end.trace.get("visual_tokens") or 0 for end in firsts),
        )
        found = schema.Usage(
            prompt_tokens=prompt,
            completion_tokens=self.spent,
            total_tokens=prompt + self.spent,
            prompt_tokens_details=details,
            completion_tokens_details=self._drafted(),
            transcribed=schema.Transcribed(sounds=len(heard), seconds=round(seconds, 3)),
        ).model_dump(mode="json")
        if not heard:
            del found["transcribed"]
        if found["completion_tokens_details"] is None:
            del found["completion_tokens_details"]
        return found

    def _drafted(self) -> schema.CompletionDetails | None:
        """Return what became of the drafts of all answers; None where nothing drafts."""
        traces = (end.trace.get("rows") or () for end in self.ends.values())
        rows = [row for mine in traces for row in mine if row["stage"] == "draft"]
        if not rows:
            return None
        made, stood = (sum(row[name] for row in rows) for name in ("tokens_in", "tokens_out"))
        return schema.CompletionDetails(
            accepted_prediction_tokens=stood, rejected_prediction_tokens=made - stood
        )


def ignoring(asked: schema.Strict, config: ServerConfig) -> dict[str, str]:
    """Return the header that names parameters without effect, which a strict server refuses.

    One of ours beside `mmfast` instead of inside is refused by any.
    """
    unused = schema.ignored(asked)
    ours = schema.MmfastOptions.model_fields if "mmfast" in type(asked).model_fields else ()
    for name in ours:
        if name in unused:
            text = f'{name} belongs into mmfast: send "mmfast": {{"{name}": …}}'
            raise bad_request(text, "unknown_parameter", name)
    shown = ", ".join(unused)
    if unused and config.strict:
        text = f"{shown[:300]}: without effect here, and this server is strict; leave it out"
        raise bad_request(text, "unknown_parameter", unused[0])
    return {"x-mmfast-ignored": printable(shown)} if unused else {}


def printable(text: str) -> str:
    """Return a text as the value of a header: ASCII, other letters by number, of 1,000 at most."""
    text = text.encode("ascii", "backslashreplace").decode()
    # A space at an end, such as behind the name of nothing that can be printed, is no header.
    return "".join(letter for letter in text if letter.isprintable())[:1000].strip()


def sampling(
    asked: schema.Choosing, config: ServerConfig, defaults: Mapping[str, Any]
) -> base.SamplingOptions:
    """Return the options of choosing tokens; `defaults` are those of the checkpoint."""
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    bias = {int(token): value for token, value in (asked.logit_bias or {}).items()}
    names = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "min_tokens",
        "presence_penalty", "frequency_penalty", "ignore_eos",
    )  # fmt: skip
    given = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    found = {**defaults, **given}
    found["top_k"] = max(found.get("top_k", 0), 0)  # -1 takes all, too
    return base.SamplingOptions(
        asked.longest or min(config.default_tokens, config.max_tokens),
        stop=tuple(stop),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        logit_bias=tuple(bias.items()),
        logprobs=asked.likeliest,
        **found,
    )
