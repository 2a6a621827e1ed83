"""How a checkpoint's own chat template writes a conversation about a video that goes on.

The template is run on short sample conversations and the result is cut at the placeholder of the
video, so a stream holds exactly the text that a stock prompt of the same conversation would.
"""

from __future__ import annotations

from typing import Any

from mmfast.core.errors import MmfastError, ModelError
from mmfast.models.prompt import check_question

_SAMPLE = "What is it?"
# A reply that no template writes by itself; what comes behind it opens the next turn.
_REPLY = "mmfastreply"


class Wording:
    """Texts of a stream, as token ids.

    Args:
        processor: The checkpoint's processor.
        system: Text of a system message; None leaves it to the template.

    Raises:
        ModelError: There is no chat template, or one that puts the question before the video.
    """

    def __init__(self, processor: Any, system: str | None = None) -> None:
        if getattr(processor, "chat_template", None) is None:
            raise ModelError(f"{type(processor).__name__} has no chat template; give one that has")
        self.processor, self.system = processor, system
        self.tokenizer = processor.tokenizer
        self.video: str = processor.video_token
        self.video_id: int = processor.video_token_id
        opening, _ = self._cut([self._user(_SAMPLE, video=True)], 2)
        if _SAMPLE in opening:
            raise ModelError(
                f"the chat template of {type(processor).__name__} puts the question before the "
                "video, so no frame can be read before it is known; use pipeline('video-qa')"
            )
        self._opening = opening

    def opening(self) -> list[int]:
        """From the start of the conversation up to the first frame."""
        return self._ids(self._opening, after=True, special=True)

    def question(self, text: str) -> list[int]:
        """From behind the last frame to where the answer begins."""
        _, tail = self._cut([self._user(self._checked(text), video=True)], 2)
        return self._ids(tail, before=True)

    def prompt(self, text: str) -> str:
        """The stock prompt about one video, with its placeholder."""
        return self._render([self._user(self._checked(text), video=True)])

    def alone(self, text: str) -> list[int]:
        """A whole prompt without a video."""
        return self._ids(self._render([self._user(self._checked(text))]), special=True)

    def again(self) -> list[int]:
        """From behind an answer up to the first frame that follows it."""
        turns = [self._user(_SAMPLE, True), self._said(), self._user(_SAMPLE, True)]
        return self._ids(self._cut(turns, 3)[1].partition(_REPLY)[2], after=True)

    def next_question(self, text: str) -> list[int]:
        """From behind an answer to where the next begins, where no frame came between them."""
        turns = [self._user(_SAMPLE, True), self._said(), self._user(self._checked(text))]
        return self._ids(self._cut(turns, 2)[1].partition(_REPLY)[2])

    def text(self, text: str) -> list[int]:
        """Any text that stands alone between special tokens."""
        return self._ids(text)

    def _checked(self, text: str) -> str:
        text = check_question(text)
        for token in (self.video, getattr(self.processor, "image_token", None)):
            if token and token in text:
                raise MmfastError(
                    f"question {text!r} holds the placeholder {token!r}; leave it out"
                )
        return text

    def _user(self, text: str, video: bool = False) -> dict[str, Any]:
        content = [{"type": "video"}] if video else []
        return {"role": "user", "content": [*content, {"type": "text", "text": text}]}

    def _said(self) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "text", "text": _REPLY}]}

    def _render(self, turns: list[dict[str, Any]]) -> str:
        if self.system is not None:
            system = {"role": "system", "content": [{"type": "text", "text": self.system}]}
            turns = [system, *turns]
        text: str = self.processor.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        return text

    def _cut(self, turns: list[dict[str, Any]], parts: int) -> list[str]:
        cut = self._render(turns).split(self.video)
        if len(cut) != parts:
            raise ModelError(
                f"the chat template of {type(self.processor).__name__} wrote {len(cut) - 1} "
                f"placeholders {self.video!r} for {parts - 1} videos; a stream needs one each"
            )
        return cut

    def _ids(
        self, text: str, before: bool = False, after: bool = False, special: bool = False
    ) -> list[int]:
        """Token ids of a text between placeholders, which are there while it is cut into tokens."""
        full = self.video * before + text + self.video * after
        ids: list[int] = self.tokenizer(full, add_special_tokens=special)["input_ids"]
        return ids[int(before) : len(ids) - int(after)]
