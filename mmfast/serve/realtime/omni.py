"""A session that watches, listens and answers: live video in the bounded memory of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mmfast.core.speech import Sound
from mmfast.pipelines.omni_chat import OmniChat
from mmfast.pipelines.omni_session import OmniSession
from mmfast.serve.realtime.brain import Question, pace_of, voiced
from mmfast.streams.voice_ear import RATE

HOST_BYTES = "256MB"  # of one session's memory of what it has seen, beside the window on the model


class OmniVoices:
    """Shares an `omni-chat` pipeline.

    Args:
        omni: The pipeline.
        follows: The model follows instructions and earlier turns in its prompt; the embedded one
            knows questions alone.
        **options: Of `OmniChat.open`, such as `memory`.
    """

    def __init__(self, omni: OmniChat, follows: bool = True, **options: Any) -> None:
        self._omni, self._follows = omni, follows
        self._options = {"host_bytes": HOST_BYTES, **options}
        _, speaker = omni.parts
        self.voices: tuple[str, ...] = tuple(getattr(speaker, "voices", ()))
        self.pace = pace_of(speaker)
        self.open().close()  # loads the model, which may be one that cannot watch

    def open(self) -> OmniBrain:
        """See `mmfast.serve.realtime.brain.Voices`."""
        opened = self._omni.open(ear="manual", **self._options)
        return OmniBrain(opened, self._omni, self._follows)


class OmniBrain:
    """See `mmfast.serve.realtime.brain.Brain`."""

    native, sees = False, True

    def __init__(self, opened: OmniSession, omni: OmniChat, follows: bool) -> None:
        self._opened, self._omni, self._follows = opened, omni, follows
        self._listener, self._speaker = omni.parts

    def hear(self, pcm: Tensor) -> str:
        """See `Brain`."""
        return str(self._listener.transcribe(pcm, RATE)).strip()

    def answer(self, question: Question) -> Iterator[Sound]:
        """About what was seen so far; the video goes on while the answer is written."""
        return voiced(self._written(question), self._speaker, question)

    def _written(self, question: Question) -> Iterator[str]:
        longest = min(question.limit or 64, 256)
        text = self._prompt(question)
        with self._opened.video.ask(text, max_new_tokens=longest) as reply:
            yield from reply

    def _prompt(self, question: Question) -> str:
        """The question; before it what was told and said, for a model that can follow that."""
        last = self._omni.wording(question.turns[-1].text)
        if not self._follows:
            return last
        said = [f"{turn.role}: {turn.text}" for turn in question.turns[:-1]]
        return "\n".join(part for part in (question.instructions, *said, last) if part)

    def see(self, frame: Any, time: float) -> None:
        """See `Brain`."""
        self._opened.video.push(frame, time)

    def count(self, text: str) -> int:
        """Tokens of the model that answers."""
        return len(self._opened.video.viewer.tokenizer(text)["input_ids"])

    def figures(self) -> dict[str, Any]:
        """Of the stream."""
        return dict(self._opened.video.stats())

    def close(self) -> None:
        """See `Brain`."""
        self._opened.close()
