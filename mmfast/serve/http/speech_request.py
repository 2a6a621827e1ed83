"""What `/v1/audio/speech` takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mmfast.serve.http.chat_request import Name, Strict

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class SpeechRequest(Strict):
    """A text to say."""

    model: Name
    input: Annotated[str, Field(min_length=1, max_length=4096)]
    voice: Name
    response_format: Format | None = None
    speed: Annotated[float, Field(ge=0.25, le=4.0)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    instructions: Annotated[str, Field(max_length=0)] | None = None
