"""Tokens of one response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Spent:
    """What went in and out.

    Attributes:
        text_in: Of the turns.
        audio_in: Of speech that the model answers as it is.
        image_in: Of the frames that the answer is about; all of them were read when they came.
        text_out: Of the answer.
        audio_out: Likewise.
    """

    text_in: int = 0
    audio_in: int = 0
    image_in: int = 0
    text_out: int = 0
    audio_out: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.text_in + self.audio_in + self.image_in + self.text_out + self.audio_out

    def usage(self) -> dict[str, Any]:
        """As the client sees it."""
        came = self.text_in + self.audio_in + self.image_in
        went = self.text_out + self.audio_out
        cached = {"text_tokens": 0, "audio_tokens": 0, "image_tokens": self.image_in}
        return {
            "total_tokens": self.total,
            "input_tokens": came,
            "output_tokens": went,
            "input_token_details": {
                "text_tokens": self.text_in,
                "audio_tokens": self.audio_in,
                "image_tokens": self.image_in,
                "cached_tokens": self.image_in,
                "cached_tokens_details": cached,
            },
            "output_token_details": {
                "text_tokens": self.text_out,
                "audio_tokens": self.audio_out,
            },
        }
