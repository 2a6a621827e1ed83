"""Transducers: Parakeet RNN-T and TDT, and Nemotron, which streams.

A joint network emits tokens frame by frame of the encoder; TDT also how many frames to go on.
Paper: arXiv 2304.06795 (TDT).
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmfast.core.trace import Trace
from mmfast.models.loading import speech_family
from mmfast.models.speech.listeners.base import StockListener, arrays, stock_errors
from mmfast.models.speech.listeners.mel_stream import ENDLESS, MelStream
from mmfast.models.text_stream import stream_text

NO_TOKENS = "a transducer has no decoder that reads audio tokens and keeps keys"


@speech_family("parakeet_rnnt", "ParakeetForRNNT", "processor", "AutoProcessor")
@speech_family("parakeet_tdt", "ParakeetForTDT", "processor", "AutoProcessor")
class TransducerListener(StockListener):
    """A stock encoder with a prediction network and a joint network."""

    whole = "its encoder attends to the whole recording"
    frozen: ClassVar[Mapping[str, str]] = {"reduce": NO_TOKENS, "cache": NO_TOKENS}

    @property
    def shortest(self) -> int:
        """Samples of the shortest sound that makes a frame of the encoder."""
        return int(self.processor.feature_extractor.hop_length)

    def reader(self, how: Mapping[str, Any]) -> Any:
        """Return the processor of a call."""
        return self.processor

    def write(self, sounds: list[Tensor], how: Mapping[str, Any], trace: Trace) -> list[str]:
        """Write sounds down in one batch."""
        inputs = self.inputs(self.reader(how)(arrays(sounds), sampling_rate=self.rate))
        encoder = self.model.encoder
        frames = encoder._get_subsampling_output_length(inputs["attention_mask"].sum(-1))
        most = frames * self.model.max_symbols_per_step  # as the stock class bounds one sound
        out = self.own().generate(**inputs, max_new_tokens=int(most.max()))
        # the stock loop goes on with a sound that has ended until all of the batch have
        begins = out.durations.cumsum(-1) - out.durations
        steps = torch.arange(begins.shape[1], device=begins.device)
        ended = (begins >= frames[:, None]) | (steps > most[:, None])
        ids = out.sequences.masked_fill(ended, self.processor.tokenizer.pad_token_id)
        return list(self.processor.batch_decode(ids, skip_special_tokens=True))


@speech_family(
    "nemotron_asr_streaming", "NemotronAsrStreamingForRNNT", "processor", "AutoProcessor"
)
class NemotronListener(TransducerListener):
    """Nemotron: an encoder with a cache, which waits for `lookahead` of its frames (80 ms each)."""

    whole = ""
    knobs = frozenset({"lookahead"})

    def reader(self, how: Mapping[str, Any]) -> Any:
        """Return a processor of the look-ahead of a call."""
        found = copy.copy(self.processor)
        if "lookahead" in how:
            found.set_num_lookahead_tokens(how["lookahead"])
        return found

    def follow(
        self, chunks: Iterable[Tensor], rate: int, **options: Any
    ) -> Generator[str, None, None]:
        """Yield words as the look-ahead behind them has come."""
        with stock_errors(self.model):
            processor = self.reader(self._how(options))
            mel = MelStream(processor, processor.num_mel_frames_per_audio_chunk)
            parts = mel.features(chunks, rate)

            def generate(streamer: Any, criteria: Any) -> None:
                self.own().generate(
                    input_features=parts,
                    num_lookahead_tokens=processor.default_num_lookahead_tokens,
                    max_length=ENDLESS,
                    streamer=streamer,
                    stopping_criteria=criteria,
                )

            yield from stream_text(processor.tokenizer, generate, group_tokens=False)
