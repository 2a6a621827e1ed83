"""What goes into Qwen2.5-Omni's thinker and what comes out: prompts, and text from tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.speech import Turn
from mmfast.frontends.audio import load_audio

# The talker was trained behind this system prompt; with another one it may fall silent.
SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech."
)
BROKEN = "\ufffd"  # a character whose bytes are not all there yet


class Prompts:
    """Conversations to the thinker's inputs.

    Args:
        processor: A `Qwen2_5OmniProcessor`, or None.
        device: Where the model is.
    """

    def __init__(self, processor: Any, device: torch.device) -> None:
        self.processor, self.device = processor, device

    def ask(self, text: str) -> dict[str, Any]:
        """A question in writing."""
        return self._inputs([_turn("user", text)], None)

    def hear(
        self, pcm: Tensor, rate: int, history: Sequence[Turn], text: str = ""
    ) -> dict[str, Any]:
        """What was said `[n]` behind turns that were written down, with words beside it."""
        sound = load_audio(pcm, 16_000, media_rate=rate)
        content = [{"type": "audio", "audio": "speech"}, *([_words(text)] if text else [])]
        turns = [_turn(each.role, each.text) for each in history]
        return self._inputs([*turns, {"role": "user", "content": content}], sound)

    def words(self, text: str | Iterable[str]) -> Iterator[int]:
        """Tokens of text, or of its pieces as they come."""
        for piece in [text] if isinstance(text, str) else text:
            yield from self._need().tokenizer(piece, add_special_tokens=False)["input_ids"]

    def read(self, tokens: list[int]) -> str:
        """Tokens to text; without a processor, none."""
        if self.processor is None:
            return ""
        text: str = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _inputs(self, turns: list[dict[str, Any]], sound: Tensor | None) -> dict[str, Any]:
        processor = self._need()
        turns = [_turn("system", SYSTEM), *turns]
        text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        text = text[0] if isinstance(text, list) else text
        media = {} if sound is None else {"audio": [sound.numpy()]}
        batch = processor(text=[text], return_tensors="pt", padding=True, **media)
        return {k: v.to(self.device) for k, v in batch.items() if isinstance(v, Tensor)}

    def _need(self) -> Any:
        if self.processor is None:
            raise ModelError(
                "there is no processor; give OmniSpeech(model, processor), or call answer(inputs)"
            )
        return self.processor


class Written:
    """Text as its tokens come, and how much of it has been told and said."""

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.tokens: list[int] = []
        self.text = ""
        self.told = self.said = 0

    @property
    def fresh(self) -> bool:
        """Whether there is text that `take` has not given."""
        return len(self.text) > self.told

    def add(self, token: int) -> None:
        """A token more; half a character waits for its other half."""
        self.tokens.append(token)
        text = self.prompts.read(self.tokens)
        if not text.endswith(BROKEN):
            self.text = text

    def take(self) -> str:
        """What has been written since the last time."""
        new, self.told = self.text[self.told :], len(self.text)
        return new

    def say(self, until: int | None) -> str:
        """Whole words up to so many characters; None: all of them."""
        stop = len(self.text)
        if until is not None and until < stop:
            stop = max(self.said, self.text.rfind(" ", 0, until + 1) + 1)
        new, self.said = self.text[self.said : stop], max(self.said, stop)
        return new


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [_words(text)]}


def _words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
