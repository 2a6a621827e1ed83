"""A listener, any function of text and a speaker, as one that chats by voice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.speech import Listener, Sound, Speaker, Turn

Chat = Callable[[Sequence[Turn]], str | Iterable[str]]


def speaking(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a reply as options of `Speaker.speak`, to which `rate` is not the input's."""
    return {"rate" if name == "speed" else name: value for name, value in options.items()}


class Cascade:
    """Voices a text model: what is said becomes text, its answer becomes speech as it is written.

    Args:
        listener: Understands speech.
        chat: Answers a conversation, whose last turn is the user's, with text or pieces of it as
            they come; anything that makes text will do.
        speaker: Says the answer; None leaves it text.

    Raises:
        MmfastError: One of them cannot do its part.
    """

    def __init__(self, listener: Listener, chat: Chat, speaker: Speaker | None) -> None:
        if not hasattr(listener, "transcribe"):
            raise MmfastError(f"{type(listener).__name__} cannot listen; it needs transcribe()")
        if not callable(chat):
            raise MmfastError(f"chat={chat!r} cannot be called; give a function of the turns")
        if speaker is not None and not hasattr(speaker, "speak"):
            raise MmfastError(f"{type(speaker).__name__} cannot speak; it needs speak()")
        self.listener, self.chat, self.speaker = listener, chat, speaker
        self.sample_rate = 16000 if speaker is None else speaker.sample_rate

    def reply(
        self, pcm: Tensor, rate: int = 16000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """What was said `[n]` to the answer as it comes; nothing where no word was said.

        Options are those of the speaker, its `rate` as `speed`.
        """
        heard = self.listener.transcribe(pcm, rate).strip()
        yield Sound(torch.zeros(0), self.sample_rate, heard=heard)
        if heard:
            yield from self.answer_turns((*history, Turn("user", heard)), **options)

    def answer_turns(self, turns: Sequence[Turn], **options: Any) -> Iterator[Sound]:
        """A written conversation to the answer as it comes."""
        answer = self.chat(turns)
        if self.speaker is not None:
            yield from self.speaker.speak(answer, **speaking(options))
            return
        for text in [answer] if isinstance(answer, str) else answer:
            yield Sound(torch.zeros(0), self.sample_rate, text=text)
