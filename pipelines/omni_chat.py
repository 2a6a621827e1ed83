"""`omni-chat`: watch without end, be asked by voice, answer by voice."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from numbers import Real
from typing import Any

import torch

from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError, warn
from mmfast.core.spec import parse
from mmfast.core.speech import Turn
from mmfast.core.trace import Trace
from mmfast.decoding.speculation import plan_decode
from mmfast.frontends.audio.reader import is_batch, load_audio
from mmfast.models.loading import load
from mmfast.models.speech.sound import tell_if_quiet
from mmfast.pipelines.answer import AnswerStream
from mmfast.pipelines.generation import CALL, GENERATE, merged, several
from mmfast.pipelines.options import checked, named, within
from mmfast.pipelines.registry import task
from mmfast.pipelines.speech import TALKING, cascade, collect, ear_of, speech_options, stream_of
from mmfast.pipelines.video_stream import VideoStream
from mmfast.pipelines.visual_qa import TARGET, VideoQA, VisualQA
from mmfast.planner.target import make_target
from mmfast.streams.session import Session
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.ear import RATE, Ear
from mmfast.voice.playback import ReplyMeter
from mmfast.voice.session import VoiceSession


class OmniSession:
    """Frames go into `video`, speech into `voice`; a spoken question is about what was seen.

    Any thread may push frames while another converses. `video` is a
    `mmfast.streams.session.Session` (`push`, `watch`, `stats`), `voice` a
    `mmfast.voice.session.VoiceSession` (`push`, `poll`, `step`, `start`, `events`, `truncate` and
    so on).
    """

    def __init__(self, video: Session, voice: VoiceSession) -> None:
        self.video, self.voice = video, voice

    def push_frame(self, frame: Any, time: Any = None) -> int:
        """Take the next frame; see `Session.push`."""
        return self.video.push(frame, time)

    def watch(self, source: Any, **options: Any) -> Any:
        """Watch a source; see `Session.watch`."""
        return self.video.watch(source, **options)

    def run(
        self, chunks: Any, rate: int = RATE, frames: Iterable[tuple[float, Any]] = ()
    ) -> Iterator[VoiceEvent]:
        """Converse until the sound ends; yields events, and frames are seen when their time comes.

        Args:
            chunks: Sound, as for `SpeechChat.run`.
            rate: Samples per second.
            frames: `(seconds, frame)`, ascending; those behind the end of the sound are seen
                at its end.
        """
        sound, rate = stream_of(chunks, rate)
        yield from self.voice.run(self._with_frames(sound, rate, iter(frames)), rate)

    def _with_frames(
        self, sound: Iterable[Any], rate: int, frames: Iterator[tuple[float, Any]]
    ) -> Iterator[Any]:
        frames = map(_timed, frames)
        following = next(frames, None)
        for chunk in self.voice.inlet.blocks(sound, rate, max(rate // 50, 1)):
            now = self.voice.inlet.samples / RATE
            while following is not None and following[0] <= now:
                self.push_frame(following[1], following[0])
                following = next(frames, None)
            yield chunk
        for time, frame in chain([following] if following else [], frames):
            self.push_frame(frame, time)

    def stats(self) -> dict[str, Any]:
        """Figures of both."""
        return {"video": self.video.stats(), "voice": self.voice.stats()}

    def close(self) -> None:
        """End both."""
        self.voice.close()
        self.video.close()

    def __enter__(self) -> OmniSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _timed(given: Any) -> tuple[float, Any]:
    """Return a time and a frame; MmfastError for anything else."""
    if not (isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], Real)):
        raise MmfastError(
            f"frames= has {reprlib.repr(given)}; give pairs of seconds and a frame, such as "
            "(0.0, frame)"
        )
    return float(given[0]), given[1]


ASKS = r"(?:in |at )?(?:what|which|how|where|who|when|why|is|are|do|does|did|can|was|were)\b"
# a clip is sampled by `frames`, and sound tells no doubts
_CLIP = (named(VisualQA.__init__) | {*CALL}) - {"fps", "check"}
_STREAM = named(VideoStream.__init__)
ASKED = {"max_new_tokens", "do_sample", "temperature", "top_p", "seed", "generation_config"}
_OPEN = named(VideoStream.open)


def written(heard: str) -> str:
    """A question as it was heard, as one would write it: without "please tell me", with a mark."""
    text = " ".join(heard.split())
    found = re.search(rf"(?:^|[\s,]){ASKS}", text, re.IGNORECASE)
    if found is not None and len(text[: found.start()].split()) <= 5:
        text = text[found.start() :].lstrip(" ,")
    # what a recogniser leaves out: "which moves faster, the red circle or …"
    text = re.sub(r"^((?:which|what)\b.* (?:faster|first)) (?=the )", r"\1, ", text, flags=re.I)
    text = text.rstrip(" .")
    return text[:1].upper() + text[1:] + ("" if text.endswith(("?", "!")) else "?")


@task("omni-chat")
class OmniChat:
    """Video in, spoken questions in, spoken answers out.

    Args:
        model: Answers about video: None (embedded), a directory, a hub id, or a
            `(model, processor)` pair.
        speech: Listens and speaks: None (embedded), a directory, a hub id, or an object.
        listener: Understands speech; None takes `speech`.
        talker: Says the answer; None takes `speech`.
        wording: Makes a written question of what was heard.
        device: `cpu`, `cuda`, `cuda:1`; None picks CUDA where there is one.
        dtype: Of the video model.
        voice: Options of the talker, such as `{"voice": "en-us+f2", "speed": 195}`.
        processor: As for `VisualQA`.
        model_kwargs: Of the video model; see `VisualQA`.
        **options: Of `VideoStream` (`reduce`, `fps`, `frame_cache`, …) and `VideoQA` (`cache`,
            `frames`, `max_new_tokens`, …).

    Raises:
        MmfastError: An unknown option or value, before any weight is read.
        ModelError: A checkpoint cannot be loaded.

    Example:
        >>> omni = OmniChat()
        >>> omni("clip.mp4", "question.wav").save("answer.wav")
        >>> with omni.open() as session:
        ...     for event in session.run("question.wav", frames=[(0.0, frame)]): ...
    """

    task: str

    @checked(_CLIP | _STREAM, GENERATE)
    def __init__(
        self,
        model: Any = None,
        *,
        speech: Any = None,
        listener: Any = None,
        talker: Any = None,
        wording: Callable[[str], str] = written,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        voice: dict[str, Any] | None = None,
        processor: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        speaks = speech if talker is None else talker
        if not isinstance(voice, Mapping | None):
            raise MmfastError(
                f"{self.task}: voice={voice!r} is not allowed; give a dict of options of the "
                "talker, such as {'voice': 'en-us'}"
            )
        self.wording, self.options = wording, speech_options(self.task, speaks, voice or {})
        with within(self.task):
            parse(options.get("reduce")), call_plan(options.get("cache"))
            plan_decode(options.get("decode"))
            make_target(**{k: v for k, v in options.items() if k in TARGET})
            self._how = merged({k: v for k, v in options.items() if k in (*CALL, *GENERATE)}, {})
        # one checkpoint for clips and streams is loaded once; the embedded ones differ
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        given: dict[str, Any] = {"processor": processor, "model_kwargs": model_kwargs}
        self._model = None if model is None else load(model, **place, **given)
        self._video = {**place, **options, **(given if model is None else {})}
        self._voice = (speech, listener, talker, device)
        self._parts: tuple[Any, Any] | None = None
        self._clips: VideoQA | None = None
        self._streams: VideoStream | None = None

    @property
    def parts(self) -> tuple[Any, Any]:
        """Listener and talker, loaded when first needed."""
        if self._parts is None:
            speech, listener, talker, device = self._voice
            whole = cascade(lambda turns: "", speech, listener, talker, device, "auto")
            self._parts = whole.listener, whole.talker
        return self._parts

    def _pipe(self, cls: Any, names: Collection[str]) -> Any:
        return cls(self._model, **{k: v for k, v in self._video.items() if k in names})

    def __call__(self, media: Any, question: Any, **options: Any) -> Any:
        """Answer a spoken question about a clip; a list of questions or of clips gives a list.

        Args:
            media: A clip, as for `video-qa`; a list of clips goes with a list of questions.
            question: A recording of the question, or a text that ends in a question mark.
            **options: Of the talker, for this call.

        Returns:
            A `Spoken`; its `heard` is the question as it was understood, its `answer` the written
            one with the tokens of the clip.

        Raises:
            MediaError: Clip or recording cannot be read.
        """
        batch, none = is_batch(question), isinstance(media, list) and not media
        if batch or none or several(media, "videos"):
            question = question if batch else [question] * len(media)
            many = media if none or several(media, "videos", question) else [media] * len(question)
            if len(many) != len(question):
                raise MmfastError(
                    f"{len(many)} clips, {len(question)} questions; give one question per clip"
                )
            return [self(m, q, **options) for m, q in zip(many, question, strict=True)]
        if self._clips is None:
            self._clips = self._pipe(VideoQA, _CLIP | GENERATE)
        pipe, (listener, talker) = self._clips, self.parts
        given = {**self.options, **speech_options(self.task, talker, options)}
        meter, read, pcm = ReplyMeter(), Trace(), torch.zeros(1)

        streams: list[AnswerStream] = []  # one, unless nothing was heard

        def chat(turns: Sequence[Turn]) -> Iterable[str]:
            streams.append(pipe.stream(media, self.wording(turns[-1].text)))
            return streams[-1]

        whole = cascade(chat, None, listener, talker, None, "auto")
        if isinstance(question, str) and question.rstrip().endswith("?"):
            sounds = whole.answer_turns((Turn("user", question),), **given)
        else:
            pcm = load_audio(question, RATE, trace=read)
            sounds = whole.reply(pcm, RATE, **given)
        spoken = collect(sounds, whole.sample_rate, meter)
        tell_if_quiet(pcm, spoken.heard + spoken.text, read)
        spoken = spoken.noted(read)
        return replace(spoken, answer=streams[-1].answer) if streams else spoken

    @checked(_OPEN | TALKING | {"max_new_tokens"})
    def open(self, ear: Ear | str = "voice", **options: Any) -> OmniSession:
        """Begin to watch and listen.

        Args:
            ear: As for `SpeechChat.open`.
            **options: Of the video, as for `VideoStream.open` (`memory`, `host_bytes`, …); of the
                conversation, as for `SpeechChat.open` (`clock`, `ahead`, …); `max_new_tokens`.

        Of the pipeline's options `max_new_tokens`, `temperature`, `top_p` and `seed` act here, too;
        of others that act on clips alone a warning tells.
        """
        idle = sorted(self._video.keys() & (_CLIP | GENERATE) - _STREAM - ASKED - {"frames"})
        if idle:
            warn(f"{self.task}: {', '.join(idle)} of the pipeline act on clips, not on this stream")
        if self._streams is None:
            self._streams = self._pipe(VideoStream, _STREAM)
        talking = {name: options.pop(name) for name in TALKING if name in options}
        own = {name: options.pop(name) for name in {"max_new_tokens"} & options.keys()}
        how = asked_as(self._how | own)
        video, (listener, talker) = self._streams.open(**options), self.parts
        chat = asker(video, self.wording, how)
        whole = cascade(chat, None, listener, talker, None, "auto")
        heard_by = ear_of(ear, whole) if isinstance(ear, str) else ear
        return OmniSession(video, VoiceSession(whole, heard_by, options=self.options, **talking))


def asked_as(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `generate` as options of `Session.ask`."""
    found = {"max_new_tokens": how.get("max_new_tokens", 64), "seed": how.get("seed")}
    if how.get("do_sample"):
        found |= {"temperature": how.get("temperature", 1.0), "top_p": how.get("top_p", 1.0)}
    return found


def asker(
    video: Session, wording: Callable[[str], str], how: Mapping[str, Any]
) -> Callable[[Sequence[Turn]], Iterator[str]]:
    """A function of turns that asks what the session has seen, with options of `Session.ask`.

    Leaving its answer early stops it.
    """

    def chat(turns: Sequence[Turn]) -> Iterator[str]:
        if video.stream.timeline.last is None:  # an error would end the conversation
            yield "I can not see a video."
            return
        with video.ask(wording(turns[-1].text), **how) as reply:
            yield from reply

    return chat
