"""Answers of the engine to what is said and shown in sessions, batched with all other requests."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import ContextError, ModelError, SpecError
from mmfast.core.speech import Sound, Turn
from mmfast.frontends.clip import make_clip
from mmfast.models.loading import embedded_path, read_processor, twin
from mmfast.models.prompt import Shot
from mmfast.pipelines.omni_chat import written
from mmfast.pipelines.video_stream import VideoStream
from mmfast.serve.calls import CLOSE, OPEN
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine import base
from mmfast.serve.engine.decode import Chooser
from mmfast.serve.engine.request import checked
from mmfast.serve.engine.rules import json_grammar
from mmfast.serve.engine.slots import Draw
from mmfast.serve.http.events import failed
from mmfast.serve.realtime.brain import (
    GREETING,
    UNKNOWN,
    BrainQuestion,
    ChatterBrain,
    ChatterVoices,
    HeardText,
    ReplyRun,
    SeenTurn,
)
from mmfast.streams.reply import Sampler
from mmfast.streams.stream import StreamModel
from mmfast.voice.models import Cascade

HOST_BYTES = "256MB"  # of one session's memory of earlier frames, outside the model's window
_log = logging.getLogger("mmfast.serve")


def media_of(frames: Sequence[tuple[Any, float]]) -> tuple[base.Media, ...]:
    """Return frames uint8 `[H, W, 3]` and their seconds as a picture, a clip, or many pictures.

    Frames of several sizes make no clip.
    """
    pixels = [np.asarray(frame) for frame, _ in frames]
    if len(pixels) < 2 or len({each.shape for each in pixels}) > 1:
        return tuple(_media(Shot("image", each)) for each in pixels)
    times = np.array([time for _, time in frames]) - frames[0][1]
    end = times[-1] + (times[-1] / (len(times) - 1) or 1.0)
    rows, whole = np.arange(len(times)), np.stack(pixels)
    clip = make_clip(whole, rows, times, end, 0.0, "the frames", "array")
    return (_media(Shot("video", clip.frames, clip.metadata())),)


def _media(shot: Shot) -> base.Media:
    digest = hashlib.sha256(shot.pixels.tobytes())
    digest.update(repr((shot.kind, shot.pixels.shape, shot.metadata)).encode())
    return base.Media(shot, digest.hexdigest())


class EngineAnswer:
    """One answer of an engine, as its text comes.

    It ends without an error when the run of its question is stopped, which cancels the request.
    """

    def __init__(self, voices: EngineVoices, request: base.Request, run: ReplyRun) -> None:
        self._voices, self._request, self._run = voices, request, run
        self._inbox: SimpleQueue[base.Event] = SimpleQueue()

    def __iter__(self) -> Iterator[str]:
        """Yield the text; `ApiError` if the engine cannot answer."""
        executor, wait, name = self._voices.executor, self._voices.wait, self._request.id
        began = before = time.perf_counter()
        self._run.on_stop(self._stop)
        try:
            if not self._run.over:
                wait(lambda: executor.submit(self._request, self._inbox.put))
            while not self._run.over:
                event = wait(self._inbox.get)
                now = time.perf_counter()
                if isinstance(event, base.Delta):
                    if before == began:
                        self._count("ttft", now - began)
                    else:
                        self._count("gap", now - before, event.tokens)
                    before = now
                    yield event.text
                elif isinstance(event, base.Finish):
                    self._count("finished", event, now - began)
                    self._run.finish = event
                    return
                elif not self._run.over:
                    raise failed(event)
        finally:
            executor.cancel(name)  # of a reply that is given up; a finished one is unknown

    def _count(self, name: str, *values: Any) -> None:
        if self._voices.metrics is not None:
            getattr(self._voices.metrics, name)(*values)

    def _stop(self) -> None:
        self._voices.executor.cancel(self._request.id)
        self._inbox.put(base.CANCELLED)


class EngineVoices(ChatterVoices):
    """The ear and the voice of a speech model around the engine that answers HTTP requests.

    `defaults` are options of choosing tokens; `metrics` are those of the server.
    """

    def __init__(
        self,
        executor: base.Executor,
        speech: Any,
        config: ServerConfig,
        *,
        defaults: Mapping[str, Any] | None = None,
        metrics: Any = None,
    ) -> None:
        super().__init__(Cascade(speech, lambda turns: "", speech))
        self.executor, self.config, self.metrics = executor, config, metrics
        self.defaults = dict(defaults or {})
        # the embedded model was trained on two turns at most, and not on spoken ones
        self.follows = config.model is not None
        pair = getattr(executor, "pair", None)
        self.processor = read_processor(config.model or embedded_path()) if not pair else pair[1]
        # a template that writes tools is that of a model that was trained to call them
        template = getattr(self.processor, "chat_template", None)
        self.calls = self.follows and "tools" in str(template)
        self._lock, self._streams = threading.Lock(), dict[str, VideoStream | None]()

    def open(self) -> ChatterBrain:
        """Return the brain of a session."""
        return EngineBrain(self, self._chatter)

    def streams(self) -> VideoStream | None:
        """Return the pipeline that watches more frames than a clip has; None where none can.

        It is made once, of the weights of the engine where they are in this process.
        """
        with self._lock:
            if "made" not in self._streams:
                self._streams["made"] = self._made()
            return self._streams["made"]

    def _made(self) -> VideoStream | None:
        config, pair = self.config, getattr(self.executor, "pair", None)
        if config.model is not None and pair is None:
            _log.warning("the weights are in other processes: sessions see their last frames alone")
            return None
        own = None if pair is None else twin(*pair)
        given: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
        given |= {"clips": own} if config.model is None else {"model": own}
        try:
            with suppress(SpecError):  # not every spec reduces frames as they come
                return VideoStream(**given, reduce=config.reduce)
            _log.warning("reduce=%s cannot reduce live frames, which stay whole", config.reduce)
            return VideoStream(**given)
        except ModelError:
            _log.warning("%s cannot watch: sessions see their last frames alone", config.model)
            return None


class EngineSampler(Sampler):
    """Chooses the tokens of a stream's answer as the engine does those of its batch."""

    def __init__(self, model: StreamModel, sampling: base.SamplingOptions) -> None:
        super().__init__()
        self._chooser, self._sampling = Chooser(model.model), sampling
        self._device = model.model.device
        self._prompt: int | None = None  # tokens of it, which come before those of the answer
        if sampling.rules is not None:
            sampling.rules.begin(model.tokenizer, self._chooser.ends)

    def __call__(self, logits: Tensor, said: Sequence[int] = ()) -> int:
        """The next token's id, behind the tokens `said`."""
        self._prompt = len(said) if self._prompt is None else self._prompt
        row = logits[None].to(self._device, torch.float32, copy=True)
        ids = torch.tensor(said, dtype=torch.int64, device=self._device)
        draw = Draw(self._sampling, len(said) - self._prompt)
        (token,) = self._chooser.choose(row, [draw], [self._chooser.seen(ids, self._sampling)])
        if isinstance(token, Exception):
            raise token
        return token


class EngineBrain(ChatterBrain):
    """Puts questions to the engine, with the frames that the session has seen.

    As many frames as the server takes of a clip are shown to the engine beside the question. More
    are a stream: they go into a memory of bounded size, which answers outside of the engine's
    batch, by the same rules; a question with pictures of its own goes to the engine also then.
    """

    sees = True

    def __init__(self, voices: EngineVoices, chatter: Any) -> None:
        super().__init__(chatter)
        self._voices, self.calls = voices, voices.calls
        self.context = getattr(voices.executor, "context", None)
        self._frames: list[tuple[Any, float]] = []
        self._lock, self._video = threading.Lock(), None

    _video: Any

    def answer(self, question: BrainQuestion) -> Iterator[Sound]:
        """Answer from the conversation and the frames so far."""
        return self._spoken(self._written(question), question)

    def _written(self, question: BrainQuestion) -> Iterator[str]:
        follows, said = self._voices.follows, False
        if question.prompted and not follows:
            asked = [turn for turn in question.turns[:-1] if turn.role == "user"]
            if not asked:
                yield GREETING
                return
            question = replace(question, turns=(*asked,))  # the last question once more
        for text in self._answer(question):
            said = said or bool(text.strip())
            yield text
        if not (said or follows or question.run.over):
            yield UNKNOWN

    def _answer(self, question: BrainQuestion) -> Iterator[str]:
        video = self._video
        if video is None or _shown(question.turns[-1:]):
            turns = question.turns
            try:
                answer: Iterable[str] = EngineAnswer(
                    self._voices, self.request(question), question.run
                )
                yield from answer if question.duty is None else _called(answer)
            except ContextError:  # before any text: what is shown counts as well
                if len(turns) < 2:
                    raise
                yield from self._answer(replace(question, turns=turns[(len(turns) + 1) // 2 :]))
            return
        said = self._watched(video, question)
        yield from said if question.duty is None else _called(said)

    def _watched(self, video: Any, question: BrainQuestion) -> Iterator[str]:
        """Answer from the stream by the rules of the engine's batch; the end goes to the run."""
        sampling, text = checked(self._sampling(question)), self._prompt(question)
        visual, how = int(self.figures()["tokens"]), partial(EngineSampler, sampling=sampling)
        with video.ask(text, max_new_tokens=sampling.max_tokens, sampler=how) as reply:
            yield from reply
        shown = {"rows": [row.to_dict() for row in reply.trace.rows], "ttft_ms": reply.ttft_ms}
        trace = {**shown, "visual_tokens": visual, "notes": reply.trace.notes}
        end: base.Reason = "length" if reply.finished == "length" else "stop"
        finish = base.Finish(end, visual + self.count(text), len(reply.ids), trace=trace)
        question.run.finish = finish
        if self._voices.metrics is not None:
            self._voices.metrics.ttft(reply.ttft_ms / 1e3)
            self._voices.metrics.finished(finish, (reply.ms or 0.0) / 1e3)

    def request(self, question: BrainQuestion) -> base.Request:
        """Return a question as the engine takes it: what chat completions would send."""
        voices, turns = self._voices, list(question.turns)
        if not voices.follows:
            turns, shown = turns[-1:], _shown(turns)
            if shown and not (_shown(turns) or self._frames):
                turns = [SeenTurn("user", turns[0].text, (*shown, *_parts(turns[0])))]
        messages = [base.Message("system", (question.instructions,))] * bool(
            question.instructions and voices.follows
        )
        seen = media_of(tuple(self._frames))
        for number, turn in enumerate(turns, 1):
            parts = _parts(turn)
            if number == len(turns) and not (seen and _shown([turn]) and not voices.follows):
                parts = (*seen, *parts)
            if messages and messages[-1].role == turn.role:  # templates want roles in turn
                parts = (*messages.pop().content, *parts)
            messages.append(base.Message(turn.role, parts))
        name, owner = f"realtime-{uuid.uuid4().hex}", self.tenant
        # results are reused as those of the caller's chat requests are
        given = {"tenant": f"{owner}/", "account": owner, "adapter": self.adapter}
        how = self._sampling(question)
        return base.Request(name, tuple(messages), how, **given)  # type: ignore[arg-type]

    def _sampling(self, question: BrainQuestion) -> base.SamplingOptions:
        """Return how tokens are chosen, by the engine and in answers of a stream."""
        config, defaults = self._voices.config, dict(self._voices.defaults)
        defaults["top_k"] = max(defaults.get("top_k", 0), 0)
        longest = min(question.limit or config.default_tokens, config.max_tokens)
        sampling = base.SamplingOptions(longest, **defaults)
        if question.duty is None:
            return sampling
        return replace(sampling, grammar=json_grammar(question.duty))

    def _prompt(self, question: BrainQuestion) -> str:
        """Write the question to a stream, after instructions and turns where the model follows."""
        last = "".join(part for part in _parts(question.turns[-1]) if isinstance(part, str))
        if not self._voices.follows:
            return last
        said = [f"{turn.role}: {turn.text}" for turn in question.turns[:-1]]
        return "\n".join(part for part in (question.instructions, *said, last) if part)

    def see(self, frame: Any, time: float) -> None:
        """Take a frame of this second of the session."""
        if isinstance(frame, Tensor):
            frame = frame.numpy()
        with self._lock:
            if self._video is not None:
                self._video.push(frame, time)
                return
            self._frames.append((frame, time))
            if len(self._frames) <= self._voices.config.frames:
                return
            # the memory of a stream is read without adapters
            streams = self._voices.streams() if self.adapter is None else None
            if streams is None:
                self._frames = self._frames[1:]
                return
            video = streams.open(host_bytes=HOST_BYTES)
            for each in self._frames:
                video.push(*each)
            self._video, self._frames = video, []

    def count(self, text: str) -> int:
        """Count tokens of the model that answers."""
        return len(self._voices.processor.tokenizer(text)["input_ids"])

    def figures(self) -> dict[str, Any]:
        """Return figures of the stream, where there is one."""
        return {} if self._video is None else dict(self._video.stats())

    def close(self) -> None:
        """End the stream."""
        if self._video is not None:
            self._video.close()


def _called(answer: Iterable[str]) -> Iterator[str]:
    """Yield the call that an answer is, in the tags of a call."""
    mark = OPEN
    for text in answer:
        yield mark + text
        mark = ""
    if not mark:
        yield CLOSE


def _parts(turn: Turn) -> tuple[str | base.Media, ...]:
    """Return texts and media of a turn; what was heard as one would write it."""
    parts = turn.content if isinstance(turn, SeenTurn) else (turn.text,)
    return tuple(written(part) if isinstance(part, HeardText) else part for part in parts)


def _shown(turns: Sequence[Turn]) -> tuple[base.Media, ...]:
    """Return the media of the last turn that has some."""
    for turn in reversed(turns):
        found = tuple(part for part in _parts(turn) if isinstance(part, base.Media))
        if found:
            return found
    return ()
