"""Kyutai's speech to text: a token of text for every frame of Mimi, 80 ms each.

The language model reads the codes of a frame beside its last token, and its text is late by the
delay the checkpoint was trained with. In a stream the codec here encodes the frames as they come;
the stock class encodes a recording at once. Paper: arXiv 2509.08753 (delayed streams).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.core.trace import Trace
from mmfast.models.cache_name import CACHE
from mmfast.models.loading import load_codec, speech_family
from mmfast.models.speech.listeners.base import StockListener, arrays, stock_errors
from mmfast.models.speech.sound import resampled


@speech_family(
    "kyutai_speech_to_text",
    "KyutaiSpeechToTextForConditionalGeneration",
    "processor",
    "AutoProcessor",
)
class KyutaiListener(StockListener):
    """The stock class; the text of a frame is chosen greedily."""

    longest = 600.0
    whole = ""
    frozen: ClassVar[Mapping[str, str]] = {
        "reduce": "its codes are added to the tokens of text and have none of their own",
        "cache": "its layers attend through a sliding window, which bounds their keys",
    }

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        features = processor.feature_extractor
        self.frame = int(model.config.codec_config.frame_size)
        self.before = int(features.audio_silence_prefix_seconds * self.rate)
        self.behind = int((features.audio_delay_seconds + 1.0) * self.rate)

    def write(self, sounds: list[Tensor], how: Mapping[str, Any], trace: Trace) -> list[str]:
        """Write sounds down in one batch, each as long as its sound and the delay behind it."""
        read = self.processor(audio=arrays(sounds), sampling_rate=self.rate)
        values = read["input_values"].to(self.model.device)  # the codec keeps its precision
        out = self.model.generate(input_values=values, do_sample=False)
        frames = [(len(sound) + self.before + self.behind) // self.frame for sound in sounds]
        rows = [row[: n + 1] for row, n in zip(out, frames, strict=True)]
        return list(self.processor.batch_decode(rows, skip_special_tokens=True))

    def follow(
        self, chunks: Iterable[Tensor], rate: int, **options: Any
    ) -> Generator[str, None, None]:
        """Yield what each frame adds; the delay of a recording follows the last sample."""
        self._how(options)
        ids: list[int] = []
        given = ""
        with stock_errors(self.model):
            for token in self._tokens(self._codes(chunks, rate)):
                ids.append(token)
                text = self.processor.decode(ids, skip_special_tokens=True)
                if text.startswith(given) and len(text) > len(given) and text[-1] != "\ufffd":
                    yield text[len(given) :]
                    given = text

    def _codes(self, chunks: Iterable[Tensor], rate: int) -> Iterator[Tensor]:
        """Codes `[Q]` of frame after frame, with silence around the sound."""
        codec = load_codec(self.model.codec_model, codebooks=self.model.config.num_codebooks)
        around = (torch.zeros(self.before), torch.zeros(self.behind))
        sound = chain(around[:1], resampled(chunks, rate, self.rate), around[1:])
        state = codec.encoder.start(1)
        for chunk in sound:
            with torch.inference_mode():
                state, codes = codec.encoder.step(state, chunk[None].to(self.model.device))
            yield from codes[0].T

    def _tokens(self, frames: Iterator[Tensor]) -> Iterator[int]:
        """The likeliest token of each frame; the last frame of all is not read."""
        model, config = self.model, self.model.config
        cache = DynamicCache(config=config)
        codes = torch.full((config.num_codebooks,), config.audio_bos_token_id)
        token = int(model.generation_config.bos_token_id)
        for frame in frames:
            read = torch.cat([torch.tensor([token]), codes.cpu()])[None, None].to(model.device)
            with torch.inference_mode():
                out = model(input_ids=read, **{CACHE: cache}, use_cache=True)
            token, codes = int(out.logits[0, -1].argmax()), frame
            yield token
