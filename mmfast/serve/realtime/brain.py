"""Models of one session that listen, see and answer; all sessions share their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.speech import Sound, Turn
from mmfast.models.speech.turn_end import Overheard
from mmfast.serve.calls import without_calls
from mmfast.serve.engine.base import Finish, Media
from mmfast.voice.ear import RATE, overhear
from mmfast.voice.models import voiced

# Said for a model that follows no instructions: first, and where its answer has no word.
GREETING, UNKNOWN = "Hello, how can I help you?", "I do not know."


class HeardText(str):
    """Text that was spoken, without the marks of writing."""

    __slots__ = ()


@dataclass(frozen=True)
class SeenTurn(Turn):
    """A turn with its texts and media in order."""

    content: tuple[str | Media, ...] = ()


class ReplyRun:
    """State of one reply that its session and its model share, from their threads.

    `over`: nobody wants more of it. `finish` is the end that an engine has reported.
    """

    def __init__(self) -> None:
        self.over, self.finish = False, None
        self._stop: Callable[[], None] = lambda: None

    finish: Finish | None

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Call a function when the reply is stopped, at once where it is already."""
        self._stop = stop
        if self.over:
            stop()

    def stop(self) -> None:
        """Want no more of the reply."""
        self.over = True
        self._stop()


@dataclass(frozen=True)
class BrainQuestion:
    """A question to a model.

    The last of `turns`, oldest first, is the user's, unless that is `pcm`: speech `[n]` at 16 kHz
    for a model that answers speech itself. The embedded models ignore `instructions`. `options` are
    the talker's `voice` and `speed`; `limit` is in tokens of the answer's text. `prompted`: nobody
    asked, and the last turn is the server's request to greet or to go on. The model may call
    `tools`; what it writes as calls goes to `calls` and is not said. `duty` is the JSON schema of
    the call that the answer must be. `run` stops the reply.
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
    duty: dict[str, Any] | None = None
    run: ReplyRun = field(default_factory=ReplyRun)


class ChatterBrain:
    """The models of one session: one that answers speech with speech; or a listener, a text model
    and a talker.

    Methods are called in worker threads, several at once. `native` models answer speech themselves,
    and nothing else. A chatter with `answer_turns` also answers written turns.
    """

    native: bool
    sees = calls = False  # whether it takes frames, and tools
    context: int | None = None  # most tokens of a prompt and its answer, where that is known
    tenant = ""  # owner of the session
    adapter: str | None = None  # that the session has named as its model

    def __init__(self, chatter: Any) -> None:
        self._chatter = chatter
        self._chat: Any = getattr(chatter, "chat", None)
        self.native = self._chat is None
        self.calls = bool(getattr(chatter, "calls_tools", False))
        own = hasattr(chatter, "transcribe")
        self._listener = chatter if own else getattr(chatter, "listener", None)
        self._talker = chatter if self.native else chatter.talker

    def hear(self, pcm: Tensor) -> str:
        """Transcribe speech `[n]` at 16 kHz; "" where the model cannot."""
        return "" if self._listener is None else str(self._listener.transcribe(pcm, RATE)).strip()

    def overhear(self, pcm: Tensor) -> Overheard:
        """Return speech so far `[n]` written down, and the probability of its last words."""
        return Overheard("") if self._listener is None else overhear(self._listener, pcm)

    def answer(self, question: BrainQuestion) -> Iterator[Sound]:
        """Yield the answer as it comes; for a question in `pcm`, first the transcript."""
        if self.native:
            return self._reply(question)
        return self._spoken(self._chat(instructed(question)), question)

    def _spoken(self, text: str | Iterable[str], question: BrainQuestion) -> Iterator[Sound]:
        if question.tools:
            pieces = [text] if isinstance(text, str) else text
            text = without_calls(pieces, question.calls)
        return voiced(text, self._talker if question.aloud else None, RATE, question.options)

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
    """Models that all sessions share: a `Chatter`, which speaks itself unless it has a `talker`.

    `pace` is in words per minute: least, usual, most; None where the model has no choice. `wait`
    calls what waits for another thread; a server has others work meanwhile.
    """

    wait: Callable[[Callable[[], Any]], Any] = staticmethod(lambda call: call())

    def __init__(self, chatter: Any) -> None:
        self._chatter = chatter
        talker = getattr(chatter, "talker", None) or chatter
        self.voices: tuple[str, ...] = tuple(getattr(talker, "voices", ()))
        speeds = sorted(getattr(getattr(talker, "layout", None), "speeds", ()))
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
