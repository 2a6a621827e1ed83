"""Voxtral Realtime: a token of text for every 80 ms of sound, a fixed delay behind it.

The embedding of a moment of sound is added to that of a token, so there are no audio tokens to
reduce; both encoder and decoder look back through a window.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmfast.core.trace import Trace
from mmfast.models.loading import speech_family
from mmfast.models.speech.listeners.base import StockListener, arrays, stock_errors
from mmfast.models.speech.listeners.mel_stream import ENDLESS, MelStream
from mmfast.models.text_stream import stream_text


@speech_family(
    "voxtral_realtime", "VoxtralRealtimeForConditionalGeneration", "processor", "AutoProcessor"
)
class VoxtralRealtimeListener(StockListener):
    """The stock class, whose processor is that of mistral-common."""

    longest = 600.0
    whole = ""
    frozen: ClassVar[Mapping[str, str]] = {
        "reduce": "its sound is added to the tokens of text and has none of its own",
        "cache": "its layers attend through a sliding window, which bounds their keys",
    }

    def write(self, sounds: list[Tensor], how: Mapping[str, Any], trace: Trace) -> list[str]:
        """Write sounds down in one batch, each as long as its sound and the padding behind it."""
        inputs = self.inputs(self.processor(arrays(sounds), return_tensors="pt"))
        most = -(-inputs["input_features"].shape[-1] // self.processor.audio_length_per_tok)
        out = self.model.generate(**inputs, do_sample=False, max_length=most)
        prompt = inputs["input_ids"].shape[1]
        ends = [prompt + self._later(len(sound)) + 1 for sound in sounds]
        rows = [row[prompt:end] for row, end in zip(out, ends, strict=True)]
        return [self.processor.tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def _later(self, count: int) -> int:
        """Tokens behind the first that is generated, of a sound of so many samples."""
        processor = self.processor
        tokens = -(-count // processor.raw_audio_length_per_tok) + processor.num_right_pad_tokens
        return max(int(tokens - processor.num_delay_tokens) - 2, 0)

    def follow(
        self, chunks: Iterable[Tensor], rate: int, **options: Any
    ) -> Generator[str, None, None]:
        """Yield words as they are written; the padding of a recording follows the last sample."""
        self._how(options)
        processor = self.processor
        mel = MelStream(processor, processor.audio_length_per_tok, self._later)
        parts = (
            part.to(self.model.device, self.model.dtype) for part in mel.features(chunks, rate)
        )
        with stock_errors(self.model):
            first = next(parts)
            ids = mel.opening["input_ids"].to(self.model.device)

            def features() -> Iterator[Tensor]:
                yield first
                yield from parts

            def generate(streamer: Any, criteria: Any) -> None:
                with torch.inference_mode():
                    self.own().generate(
                        input_ids=ids,
                        input_features=features(),
                        num_delay_tokens=processor.num_delay_tokens,
                        do_sample=False,
                        max_length=ENDLESS,
                        streamer=streamer,
                        stopping_criteria=criteria,
                    )

            yield from stream_text(processor.tokenizer, generate)
