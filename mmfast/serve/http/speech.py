"""`POST /v1/audio/speech`, `transcriptions` and `translations`, and writers of audio formats."""

from __future__ import annotations

import asyncio
import base64
import math
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from fastapi import APIRouter, File, Form, UploadFile
from starlette.datastructures import FormData
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from torch import Tensor

from mmfast.core.errors import MmfastError, unknown
from mmfast.decoding.serialised import CHANNELS
from mmfast.frontends.audio.wav import WavWriter, format_rate
from mmfast.ops.audio import Resampler
from mmfast.serve.config import VOICE_NAMES
from mmfast.serve.guard.errors import ApiError, api_error, bad_request, body, busy
from mmfast.serve.guard.media import load_sound
from mmfast.serve.http.events import EVENT_SCHEMA, EVENTS, StreamedReply, event, while_connected
from mmfast.serve.http.exchange import ignoring, printable, transcribed, words_of
from mmfast.serve.http.schema import ERRORS, JsonRoute, SpeechRequest, Strict, Transcription
from mmfast.serve.http.service import VOICES, Service
from mmfast.voice.dubbing import clock
from mmfast.voice.ear import VoiceEar
from mmfast.voice.interpreter import WORD, OverlapInterpreter, Translated
from mmfast.voice.models import can

PCM_RATE = 24_000  # OpenAI's clients expect this rate of `pcm`, which has no header
TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
_CODECS = {  # format -> container and codec of FFmpeg
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "aac": ("adts", "aac"),
    "flac": ("flac", "flac"),
}


def sound_writer(kind: str, rate: int) -> _Pcm | _Wav | _Encoded:
    """Return the encoder of a format, one of `TYPES`, for samples at this rate per second.

    `write` takes samples `[n]` float in -1..1; it and `close` return the bytes that are finished.
    """
    if kind == "pcm":
        return _Pcm(rate)
    return _Wav(rate) if kind == "wav" else _Encoded(*_CODECS[kind], rate)


class _Sink:
    """A file without seeking that collects written bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        found, self._parts = b"".join(self._parts), []
        return found


class _Wav:
    def __init__(self, rate: int) -> None:
        self._sink = _Sink()
        self._wav = WavWriter(self._sink, rate)

    def write(self, pcm: Tensor) -> bytes:
        self._wav.write(pcm)
        return self._sink.take()

    def close(self) -> bytes:
        self._wav.close()
        return self._sink.take()


class _Pcm:
    def __init__(self, rate: int) -> None:
        self._resampler = Resampler(rate, PCM_RATE)
        self._state = self._resampler.start()

    def write(self, pcm: Tensor) -> bytes:
        self._state, out = self._resampler.step(self._state, pcm[None])
        return _int16(out[0])

    def close(self) -> bytes:
        return _int16(self._resampler.finish(self._state)[0])


class _Encoded:
    def __init__(self, container: str, codec: str, rate: int) -> None:
        import av

        self._rate = format_rate("opus" if codec == "libopus" else container, rate)
        self._resampler, self._sink, self._samples = Resampler(rate, self._rate), _Sink(), 0
        self._state = self._resampler.start()
        self._file: Any = av.open(self._sink, "w", format=container)
        self._stream: Any = self._file.add_stream(codec, rate=self._rate, layout="mono")

    def write(self, pcm: Tensor) -> bytes:
        self._state, out = self._resampler.step(self._state, pcm[None])
        return self._encode(out[0])

    def _encode(self, pcm: Tensor) -> bytes:
        import av

        if not len(pcm):
            return b""
        samples = torch.frombuffer(bytearray(_int16(pcm)), dtype=torch.int16).numpy()
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._samples
        self._samples += len(samples)
        self._file.mux(self._stream.encode(frame))
        return self._sink.take()

    def close(self) -> bytes:
        rest = self._encode(self._resampler.finish(self._state)[0])
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return rest + self._sink.take()


def _int16(pcm: Tensor) -> bytes:
    whole = torch.nan_to_num(pcm.detach().float().cpu(), nan=0.0) * 32768.0
    data = whole.round().clamp(-32768, 32767).to(torch.int16).numpy()
    return data.astype("<i2").tobytes()


WAITING = 8  # most speeches that wait for a thread; another one is refused
RATE = 165  # words per minute at speed 1
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")  # of transcripts; a stream has two
MODEL_NAMES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/audio/speech",
    response_class=Response,
    responses={
        **ERRORS,
        200: {
            "description": "The sound, in pieces.",
            "content": {
                **{kind: {} for kind in TYPES.values()},
                EVENTS: {"schema": EVENT_SCHEMA},
            },
        },
    },
    summary="Speak a text",
)
async def speech(asked: SpeechRequest, http: HttpRequest) -> Response:
    """Speak a text."""
    return await while_connected(http.receive, _say(asked, http.app.state.service))


async def _say(asked: SpeechRequest, service: Service) -> Response:
    if asked.model not in (service.talker_model, *MODEL_NAMES):
        raise ApiError(
            404,
            f"model {asked.model[:80]!r} speaks not here; ask for {service.talker_model!r}",
            code="model_not_found",
            param="model",
        )
    headers = ignoring(asked, service.config)
    speaker = await service.voice()
    run = SpeechRun(service, speaker, asked)
    try:
        first = await run.next()  # so that an early error has a status of its own
    except BaseException:
        run.close()
        raise
    lost: list[str] = speaker.left_out(asked.input) if hasattr(speaker, "left_out") else []
    if lost:
        headers["x-mmfast-left-out"] = printable(", ".join(lost))
    if asked.stream_format == "sse":
        done = {"type": "speech.audio.done", **({"left_out": lost} if lost else {})}
        return StreamedReply(run.events(first, done), EVENTS, run.close, headers)
    kind = TYPES[asked.response_format or "mp3"]
    return StreamedReply(run.parts(first), kind, run.close, headers)


@router.post(
    "/v1/audio/transcriptions",
    response_model=Transcription,
    responses={**ERRORS, 200: {"content": {"text/plain": {}, EVENTS: {"schema": EVENT_SCHEMA}}}},
    summary="Write a recording down",
)
async def transcriptions(
    http: HttpRequest,
    file: Annotated[UploadFile, File()],
    model: Annotated[str, Form(min_length=1, max_length=256)],
    response_format: Annotated[str, Form()] = "json",
    stream: Annotated[bool, Form()] = False,
) -> Response:
    """Write a recording down; the language is that of the speech model."""
    service: Service = http.app.state.service
    known = (service.listener_model, "whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe")
    _checked(model, known, response_format, stream)
    headers = ignoring(_idle(await http.form()), service.config)
    data = await file.read()
    if stream or response_format not in FORMATS[:2]:
        work = _by_segments(service, data, response_format, stream, headers)
        return await while_connected(http.receive, work)
    plain = transcribed(service, data, "file", asks=False)
    words, seconds, note = await while_connected(http.receive, plain)
    if response_format == "text":
        return _plain(f"{words}\n", note, headers)
    usage = {"type": "duration", "seconds": math.ceil(seconds)}
    return JSONResponse({"text": words, "usage": usage, **_noted(note)}, headers=headers)


@router.post(
    "/v1/audio/translations",
    response_model=Transcription,
    responses={**ERRORS, 200: {"content": {"text/plain": {}, EVENTS: {"schema": EVENT_SCHEMA}}}},
    summary="Translate a recording",
)
async def translations(
    http: HttpRequest,
    file: Annotated[UploadFile, File()],
    model: Annotated[str, Form(min_length=1, max_length=256)],
    response_format: Annotated[str, Form()] = "json",
    stream: Annotated[bool, Form()] = False,
    speakers: Annotated[int, Form(ge=1, le=CHANNELS)] = 1,
) -> Response:
    """Translate a recording sentence by sentence, into the language of `--translator`.

    Of two `speakers`, who may speak at once, each sentence is a line that begins with "1: " or
    "2: ", and segments have the number as `speaker`.
    """
    service: Service = http.app.state.service
    _checked(model, (service.translator_model, "whisper-1"), response_format, stream)
    headers = ignoring(_idle(await http.form(), "speakers"), service.config)
    work = _translated(service, await file.read(), response_format, stream, headers, speakers)
    return await while_connected(http.receive, work)


def _checked(model: str, known: Sequence[str], form: str, stream: bool) -> None:
    """Raise `ApiError` for a model or a format that there is not."""
    if model not in known:
        text = unknown("model", model[:80], known)
        raise ApiError(404, text, code="model_not_found", param="model")
    choices = FORMATS[:2] if stream else FORMATS
    if form not in choices:
        text = unknown("response_format", form[:80], choices)
        raise bad_request(f"{text}{' with stream' * stream}", "invalid_value", "response_format")


async def _translated(
    service: Service, data: bytes, form: str, stream: bool, headers: dict[str, str], speakers: int
) -> Response:
    pcm, rate, note = await load_sound(data, service.config, param="file")
    translator = await service.translator()
    ear = None if speakers == 1 else await service.ear_for_two()

    async def sentences() -> AsyncGenerator[dict[str, Any]]:
        async for row in segments(service, pcm, rate, heard):
            said = await service.in_voice_thread(partial(translator.translate, [row["text"]]))
            yield {**row, "text": said[0]}

    language = "velda" if service.config.translator is None else "unknown"
    task = "translate", language
    found = sentences() if ear is None else _of_two(service, ear, translator, pcm, rate)
    return await _reply(found, (len(pcm) / rate, note), form, stream, headers, task)


async def _of_two(
    service: Service, ear: Any, translator: Any, pcm: Tensor, rate: int
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the translated sentences of two speakers as segments, in order of their ends."""
    late = getattr(translator, "latencies", None)  # of a model that reads and writes in turn
    policy = f"interleaved:{late[-1]}" if late else "offline"
    session, open_texts, number = OverlapInterpreter(ear, translator, policy), [""] * CHANNELS, 0
    works: list[Callable[[], list[Translated]]]
    works = [*(partial(session.push, part) for part in pcm.split(rate)), session.finish]
    for work in works:
        for piece in await service.in_voice_thread(work):
            assert piece.speaker is not None
            open_texts[piece.speaker] += piece.text
            text = open_texts[piece.speaker].strip()
            if not piece.final or not text:
                continue
            open_texts[piece.speaker], who = "", piece.speaker + 1
            span = max(0.0, piece.span[0] - WORD / 2), piece.span[1]
            yield {**_segment(number, *span, f"{who}: {text}"), "speaker": who}
            number += 1


def _idle(form: FormData, *taken: str) -> Strict:
    """Return the fields without effect; `ApiError` for times of words, which no model tells."""
    times = ("timestamp_granularities", "timestamp_granularities[]")
    if wrong := {str(each) for name in times for each in form.getlist(name)} - {"segment"}:
        text = unknown("timestamp_granularities", min(wrong)[:80], ("segment",))
        raise bad_request(text, "invalid_value", "timestamp_granularities")
    known = {"file", "model", "response_format", "stream", *times, *taken}
    return Strict(**dict.fromkeys(name for name in form if name not in known))


async def _by_segments(
    service: Service, data: bytes, form: str, stream: bool, headers: dict[str, str]
) -> Response:
    """Write a recording down in a format that tells times, or as a stream."""
    pcm, rate, note = await load_sound(data, service.config, param="file")
    embedded = (service.config.listener or service.config.speech) is None
    task = "transcribe", "english" if embedded else "unknown"
    found = segments(service, pcm, rate)
    return await _reply(found, (len(pcm) / rate, note), form, stream, headers, task)


async def _reply(
    found: AsyncGenerator[dict[str, Any]],
    sound: tuple[float, str],
    form: str,
    stream: bool,
    headers: dict[str, str],
    task: tuple[str, str],
) -> Response:
    """Return segments as a stream, or as a document of `task` (its name, the language).

    `sound` are its seconds and the note on it.
    """
    first = await anext(found, None)  # an early error has a status of its own
    if stream:
        return StreamedReply(_deltas(first, found, sound[1]), EVENTS, lambda: None, headers)
    rows = [] if first is None else [first, *[each async for each in found]]
    return _document(rows, sound, form, headers, task)


def _noted(note: str) -> dict[str, Any]:
    return {"mmfast": {"notes": [note]}} if note else {}


def _plain(text: str, note: str, headers: dict[str, str]) -> PlainTextResponse:
    """Return a text, whose form has no room for the note on its sound, which is a header."""
    noted = {"x-mmfast-notes": printable(note)} if note else {}
    return PlainTextResponse(text, headers={**headers, **noted})


def _document(
    rows: list[dict[str, Any]],
    sound: tuple[float, str],
    form: str,
    headers: dict[str, str],
    task: tuple[str, str],
) -> Response:
    """Return segments in one of `FORMATS`; `task` is its name and the language of the text."""
    text = "".join(part for row in rows for part in (_gap(row), row["text"]))[1:]
    seconds, note = sound
    rest = {"usage": {"type": "duration", "seconds": math.ceil(seconds)}, **_noted(note)}
    if form == "text":
        return _plain(f"{text}\n", note, headers)
    if form == "json":
        return JSONResponse({"text": text, **rest}, headers=headers)
    if form == "verbose_json":
        document = {"task": task[0], "language": task[1], "duration": round(seconds, 3)}
        document |= {"text": text, "segments": rows}
        return JSONResponse({**document, **rest}, headers=headers)
    blocks = [] if form == "srt" else ["WEBVTT"]
    for number, row in enumerate(rows, 1):
        mark = "," if form == "srt" else "."
        times = " --> ".join(clock(row[name], mark) for name in ("start", "end"))
        blocks.append("\n".join([*([str(number)] if form == "srt" else []), times, row["text"]]))
    return _plain("\n\n".join(blocks) + "\n", note, headers)


def heard(voice: Any, pcm: Tensor, rate: int) -> str:
    """Return what sound `[n]` says, as the model writes it."""
    return str(can(voice, "transcribe").transcribe(pcm, rate)).strip()


_WORDS = partial(words_of, asks=False)  # questions are written as such


async def segments(
    service: Service,
    pcm: Tensor,
    rate: int,
    write: Callable[[Any, Tensor, int], str] = _WORDS,
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the segments of sound `[n]`: what is said between two silences, with times in seconds.

    Probabilities, which the speech model does not tell, are 0. `ModelError`: silero-vad is not
    installed.
    """
    voice, ear, number = await service.voice(), VoiceEar(), 0
    events = await service.in_voice_thread(lambda: [*ear.hear(pcm), *ear.flush()])
    turns = [(each.at - len(each.pcm), each.pcm) for each in events if each.pcm is not None]
    # Ears tell whole milliseconds: a turn of all samples would begin before the first.
    for start, part in [(max(0, at), mine) for at, mine in turns] or [(0, pcm)]:
        if text := await service.in_voice_thread(partial(write, voice, part, rate)):
            begin, end = (at / rate for at in (start, start + len(part)))
            yield _segment(number, begin, end, text)
            number += 1


def _gap(row: dict[str, Any]) -> str:
    """Return what parts a segment from the one before: of two speakers each has a line."""
    return "\n" if "speaker" in row else " "


def _segment(number: int, start: float, end: float, text: str) -> dict[str, Any]:
    times = {"start": round(start, 3), "end": round(end, 3)}
    row: dict[str, Any] = {"id": number, "seek": 0, **times, "text": text, "tokens": []}
    size = len(text.encode()) / len(zlib.compress(text.encode()))
    row |= {"temperature": 0.0, "avg_logprob": 0.0, "no_speech_prob": 0.0}
    return {**row, "compression_ratio": size}


async def _deltas(
    first: Any, rest: AsyncGenerator[dict[str, Any]], note: str
) -> AsyncGenerator[bytes, None]:
    text, row = "", first
    try:
        while row is not None:
            delta = f"{_gap(row)}{row['text']}" if text else row["text"]
            text += delta
            yield event({"type": "transcript.text.delta", "delta": delta})
            row = await anext(rest, None)
    except Exception as error:
        yield event(body(error))
        return
    yield event({"type": "transcript.text.done", "text": text, **_noted(note)})


def voice_of(name: str, voices: tuple[str, ...]) -> str:
    """Return the model's name of a voice; `ApiError` if there is none of that name."""
    if name in voices or not voices:
        return name
    if name.lower() in VOICE_NAMES:
        return voices[VOICE_NAMES[name.lower()] % len(voices)]
    text = unknown("voice", name[:80], [*voices, *VOICE_NAMES])
    raise bad_request(text, "invalid_value", "voice")


class SpeechRun:
    """The synthesis of one text, in a thread of the service."""

    def __init__(self, service: Service, speaker: Any, asked: SpeechRequest) -> None:
        waiting: set[SpeechRun] = service.parts.setdefault("speech", set())
        if len(waiting) >= VOICES + WAITING:
            raise busy(f"{len(waiting)} texts are being spoken or wait; try again in a second")
        self._service, self._start, self._gone = service, time.perf_counter(), False
        self._queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._loop, self._waiting = asyncio.get_running_loop(), waiting
        voices = tuple(getattr(speaker, "voices", ()))  # a name is never taken for a file here
        options: dict[str, Any] = {"voice": voice_of(asked.voice, voices)} if voices else {}
        if asked.speed not in (None, 1.0):
            options["rate"] = round(RATE * asked.speed)
        from mmfast.pipelines.speech import check_text

        try:
            check_text(asked.input)
            sounds = iter(speaker.speak(asked.input, **options))
        except MmfastError as error:
            raise api_error(error, "speed" if "rate" in str(error) else "input") from error
        writer = sound_writer(asked.response_format or "mp3", speaker.sample_rate)
        waiting.add(self)
        service.spawn_voice(lambda: self._work(sounds, writer))

    def _work(self, sounds: Any, writer: Any) -> None:
        last: BaseException | None = None
        try:
            while not self._gone:
                sound = next(sounds, None)
                if sound is None:
                    self._put(writer.close())
                    break
                if len(sound.pcm):
                    self._put(writer.write(sound.pcm))
        except BaseException as error:  # for the reply
            last = error
        finally:
            getattr(sounds, "close", lambda: None)()
            self._put(last)

    def _put(self, part: bytes | BaseException | None) -> None:
        if part != b"" and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, part)

    async def next(self) -> bytes | None:
        """Return the next piece, None at the end; `ApiError` if the text cannot be spoken."""
        part = await self._queue.get()
        if isinstance(part, MmfastError):
            raise api_error(part, "input")
        if isinstance(part, BaseException):
            raise part
        if part is not None and self._start:
            self._service.metrics.first_audio(time.perf_counter() - self._start, "speech")
            self._start = 0.0
        return part

    async def parts(self, first: bytes | None) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the file."""
        part = first
        while part is not None:
            yield part
            part = await self.next()

    async def events(
        self, first: bytes | None, done: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the file as events, the last of which is `done`."""
        part = first
        try:
            while part is not None:
                sound = base64.b64encode(part).decode()
                yield event({"type": "speech.audio.delta", "audio": sound})
                part = await self.next()
        except Exception as error:
            yield event(body(error))
            return
        yield event(done)

    def close(self) -> None:
        """Stop the synthesis."""
        self._gone = True
        self._waiting.discard(self)
