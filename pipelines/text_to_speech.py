"""`text-to-speech`: text in, sound out, from the first piece on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from mmfast.core.speech import Sound
from mmfast.pipelines.spoken import Spoken, check_text, checked_parts, collect
from mmfast.streams.voice_models import given_options, load_speaker


class TextToSpeech:
    """Say texts with the embedded model or any other that speaks.

    Args:
        model: None (embedded), a directory or hub id (CSM, Qwen2.5-Omni), or a `Speaker`.
        voice: Name of a voice; None takes the model's own.
        rate: Words per minute.
        pitch: 0 to 99.
        mode: `vanilla`, `balance`, `boost` or `turbo` (default): when drafts are made.
        verify: `exact` (default: what one token per pass says), `typical:0.3`, or `none`: the most
            tokens per pass, and hard to understand on the embedded model.
        device: `cpu`, `cuda`, `cuda:1`; None picks CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        **options: Further options of the speaker.

    Raises:
        ModelError: The checkpoint cannot be loaded, or cannot speak.

    Example:
        >>> spoken = TextToSpeech()("The red circle moves to the left.")
        >>> spoken.save("left.wav")
    """

    task = "text-to-speech"

    def __init__(
        self,
        model: Any = None,
        *,
        voice: str | None = None,
        rate: int | None = None,
        pitch: int | None = None,
        mode: str | None = None,
        verify: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        **options: Any,
    ) -> None:
        named = {"voice": voice, "rate": rate, "pitch": pitch, "mode": mode, "verify": verify}
        self.options = {**given_options(named), **options}
        self.speaker = load_speaker(model, device, dtype)

    def __call__(self, text: str | Sequence[str], **options: Any) -> Any:
        """Say a text, or each text of a list.

        Args:
            text: What to say.
            **options: `voice`, `rate`, `pitch`, `mode`, `verify`, for this call.

        Returns:
            A `Spoken`, or a list of them for a list.

        Raises:
            MmfastError: Nothing to say, or an option that the model does not know.
        """
        if isinstance(text, list | tuple):
            texts = [check_text(each) for each in text]  # all, before the first is said
            return [self._say(each, options) for each in texts]
        return self._say(check_text(text), options)

    def _say(self, text: str, options: dict[str, Any]) -> Spoken:
        sounds = self.speaker.speak(text, **{**self.options, **given_options(options)})
        return collect(sounds, self.speaker.sample_rate)

    def stream(self, text: str | Iterable[str], **options: Any) -> Iterator[Sound]:
        """Say a text piece by piece.

        Args:
            text: A text, or an iterator of its pieces as a language model writes them.
            **options: As for a call.

        Yields:
            Sound as it is made; leaving the iterator early stops the model.
        """
        given = check_text(text) if isinstance(text, str) else checked_parts(text)
        return iter(self.speaker.speak(given, **{**self.options, **given_options(options)}))
