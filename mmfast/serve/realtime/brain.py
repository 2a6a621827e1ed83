"""Models of one session that listen, see and answer; all sessions share their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.speech import Sound, Turn
from mmfast.pipelines.omni_chat import OmniChat, OmniSession
from mmfast.serve.calls import without_calls
from mmfast.voice.ear import RATE
from mmfast.voice.models import voiced

# Said for a model that follows no instructions: first, and where its answer has no word.
GREETING, UNKNOWN = "Hello, how can I help you?", "I do not know."


@dataclass(frozen=True)
class BrainQuestion:
    """A question to a model.

    The last of `turns`, oldest first, is the user's, unless that is `pcm`: speech `[n]` at 16 kHz
    for a model that answers speech itself. The embedded models ignore `instructions`. `options` are
    the speaker's `voice` and `speed`; `limit` is in tokens of the answer's text. `prompted`: nobody
    asked, and the last turn is the server's request to greet or to go on. The model may call
    `tools`; what it writes as calls goes to `calls` and is not said.
    """

    turns: tuple[Turn, ...]
    pcm: Tensor | None = None
    instructions: str = ""
    aloud: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    prompted: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    calls: list[str] = field(default_factory=list)


class ChatterBrain:
    """The models of one session: one that answers speech with speech; or a listener, a text model
    and a speaker.

    Methods are called in worker threads, several at once. `native` models answer speech themselves,
    and nothing else. A chatter with `answer_turns` also answers written turns.
    """

    native: bool
    sees = calls = False  # whether it takes frames, and tools

    def __init__(self, chatter: Any) -> None:
        self._chatter = chatter
        self._chat: Any = getattr(chatter, "chat", None)
        self.native = self._chat is None
        self.calls = bool(getattr(chatter, "calls_tools", False))
        own = hasattr(chatter, "transcribe")
        self._listener = chatter if own else getattr(chatter, "listener", None)
        self._speaker = chatter if self.native else chatter.speaker

    def hear(self, pcm: Tensor) -> str:
        """Transcribe speech `[n]` at 16 kHz; "" where the model cannot."""
        return "" if self._listener is None else str(self._listener.transcribe(pcm, RATE)).strip()

    def answer(self, question: BrainQuestion) -> Iterator[Sound]:
        """Yield the answer as it comes; for a question in `pcm`, first the transcript."""
        if self.native:
            return self._reply(question)
        return self._spoken(self._chat(instructed(question)), question)

    def _spoken(self, text: str | Iterable[str], question: BrainQuestion) -> Iterator[Sound]:
        if question.tools:
            pieces = [text] if isinstance(text, str) else text
            text = without_calls(pieces, question.calls)
        return voiced(text, self._speaker if question.aloud else None, RATE, question.options)

    def _reply(self, question: BrainQuestion) -> Iterator[Sound]:
        if question.pcm is None and question.prompted and hasattr(self._chatter, "speak"):
            yield from self._spoken(GREETING, question)
            return
        if question.pcm is None:
            raise ModelError("this model answers speech alone; send input_audio, not text")
        options = question.options
        for sound in self._chatter.reply(question.pcm, RATE, question.turns, **options):
            yield sound if question.aloud else silent(sound)

    def see(self, frame: Any, time: float) -> None:
        """Refuse a frame: the model sees nothing."""
        raise ModelError("this model sees nothing; start the server with one that does")

    def count(self, text: str) -> int:
        """Count words: the tokens of a model of speech are those of its own vocabulary."""
        return len(text.split())

    def figures(self) -> dict[str, Any]:
        """Return {}: nothing is kept."""
        return {}

    def close(self) -> None:
        """Do nothing, since the model holds nothing for a session."""


class ChatterVoices:
    """Models that all sessions share: a `Chatter`; without a `speaker` it speaks itself.

    `pace` is in words per minute: least, usual, most; None where the model has no choice.
    """

    def __init__(self, chatter: Any, speaker: Any = None) -> None:
        self._chatter = chatter
        speaker = speaker or getattr(chatter, "speaker", None) or chatter
        self.voices: tuple[str, ...] = tuple(getattr(speaker, "voices", ()))
        speeds = sorted(getattr(getattr(speaker, "layout", None), "speeds", ()))
        middle = len(speeds) // 2
        self.pace = (speeds[0], speeds[middle], speeds[-1]) if speeds else None

    def open(self) -> ChatterBrain:
        """Return the brain of a session."""
        return ChatterBrain(self._chatter)


def instructed(question: BrainQuestion) -> Sequence[Turn]:
    """Return the turns; instructions, for a function of text, are said by the user first."""
    if not question.instructions:
        return question.turns
    return (Turn("user", question.instructions), *question.turns)


def silent(sound: Sound) -> Sound:
    """Return its text without the sound."""
    return Sound(torch.zeros(0), sound.rate, sound.text, heard=sound.heard)


HOST_BYTES = "256MB"  # of one session's memory of earlier frames, outside the model's window


class OmniVoices(ChatterVoices):
    """Shares an `omni-chat` pipeline; `options` are those of `OmniChat.open`.

    With `follows`, the prompt holds instructions and earlier turns; the embedded model knows single
    questions only.
    """

    def __init__(self, omni: OmniChat, follows: bool = True, **options: Any) -> None:
        super().__init__(omni, omni.parts[1])
        self._omni, self._follows = omni, follows
        self._options = {"host_bytes": HOST_BYTES, **options}
        self.open().close()  # loads the model, which may be one that cannot watch

    def open(self) -> ChatterBrain:
        """Return the brain of a session, with a stream of its own."""
        opened = self._omni.open(ear="manual", **self._options)
        return OmniBrain(opened, self._omni.wording, self._follows)


class OmniBrain(ChatterBrain):
    """Answers about a stream of frames.

    `opened` is a session of `omni-chat`, whose listener and speaker are used; `wording` turns a
    transcript into a written question; `follows` is explained in `OmniVoices`.
    """

    sees = True

    def __init__(self, opened: OmniSession, wording: Callable[[str], str], follows: bool) -> None:
        super().__init__(opened.voice.chatter)
        self._opened, self._wording, self._follows = opened, wording, follows
        # a template that writes tools is that of a model that was trained to call them
        template = getattr(opened.video.model.processor, "chat_template", None)
        self.calls = follows and "tools" in str(template)

    def answer(self, question: BrainQuestion) -> Iterator[Sound]:
        """Answer about the frames so far; the video goes on while the answer is written."""
        return self._spoken(self._written(question), question)

    def _written(self, question: BrainQuestion) -> Iterator[str]:
        if question.prompted and not self._follows:
            said = [turn for turn in question.turns[:-1] if turn.role == "user"]
            if not said:
                yield GREETING
                return
            question = replace(question, turns=(*said,))  # the last question once more
        longest = min(question.limit or 64, 256)
        text = self._prompt(question)
        with self._opened.video.ask(text, max_new_tokens=longest) as reply:
            yield from reply
            if not (reply.text.strip() or self._follows):
                yield UNKNOWN

    def _prompt(self, question: BrainQuestion) -> str:
        """Write the question, after instructions and turns for a model that follows them."""
        last = self._wording(question.turns[-1].text)
        if not self._follows:
            return last
        said = [f"{turn.role}: {turn.text}" for turn in question.turns[:-1]]
        return "\n".join(part for part in (question.instructions, *said, last) if part)

    def see(self, frame: Any, time: float) -> None:
        """Watch a frame taken at this second of the session."""
        self._opened.video.push(frame, time)

    def count(self, text: str) -> int:
        """Count tokens of the model that answers."""
        return len(self._opened.video.model.tokenizer(text)["input_ids"])

    def figures(self) -> dict[str, Any]:
        """Return figures of the stream."""
        return dict(self._opened.video.stats())

    def close(self) -> None:
        """End the stream."""
        self._opened.close()
