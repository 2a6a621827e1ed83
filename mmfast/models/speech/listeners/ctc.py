"""CTC recognisers: wav2vec 2.0 and its kin, Parakeet CTC.

Every frame of the encoder names a letter or the blank; equal neighbours are one letter, blanks
none. A stream is heard in chunks between context on both sides, so it is the whole where the
context reaches the ends. Papers: arXiv 2006.11477 (wav2vec 2.0), 2106.07447 (HuBERT).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.trace import Trace
from mmfast.models.loading import speech_family
from mmfast.models.speech.listeners.base import (
    StockListener,
    arrays,
    by_length,
    field,
    stock_errors,
)
from mmfast.models.speech.sound import resampled, taken

LONGEST = 600.0  # seconds of a chunk of a stream, and on each side of it
NO_TOKENS = "a CTC model has no decoder that reads audio tokens and keeps keys"


@speech_family("hubert", "HubertForCTC", "processor", "AutoProcessor")
@speech_family("parakeet_ctc", "ParakeetForCTC", "processor", "AutoProcessor")
@speech_family("unispeech-sat", "UniSpeechSatForCTC", "processor", "AutoProcessor")
@speech_family("wav2vec2", "Wav2Vec2ForCTC", "processor", "AutoProcessor")
@speech_family("wavlm", "WavLMForCTC", "processor", "AutoProcessor")
class CtcListener(StockListener):
    """A stock encoder with a CTC head.

    `context` are the seconds on each side of a chunk of a stream, `chunk` those of the chunk.
    """

    whole = ""
    knobs = streamed = frozenset({"chunk", "context"})
    frozen: ClassVar[Mapping[str, str]] = {"reduce": NO_TOKENS, "cache": NO_TOKENS}

    def write(self, sounds: list[Tensor], how: Mapping[str, Any], trace: Trace) -> list[str]:
        """Write sounds down; those of a model without a mask share a pass at equal length."""
        ids = self._ids(sounds) if self._masks else by_length(sounds, self._ids)
        return [self._text(each) for each in ids]

    @property
    def _masks(self) -> bool:
        """Return True where padding is masked everywhere; a norm over time would hear it."""
        own = getattr(self.processor.feature_extractor, "return_attention_mask", True)
        return bool(own) and getattr(self.model.config, "feat_extract_norm", "") != "group"

    @property
    def shortest(self) -> int:
        """Samples of the shortest sound that makes a frame of the encoder."""
        config = self.model.config
        if not hasattr(config, "conv_kernel"):
            return 1
        return field(config.conv_kernel, config.conv_stride)

    def _ids(self, sounds: list[Tensor]) -> list[list[int]]:
        """Ids of the frames of each sound, without those of padding."""
        read = self.processor(
            arrays(sounds), sampling_rate=self.rate, return_tensors="pt", padding=True
        )
        inputs = self.inputs(read)
        ids = self.model(**inputs).logits.argmax(-1).cpu()
        mask = inputs.get("attention_mask")
        if mask is None:
            return [list(row) for row in ids.tolist()]
        if self._generates:
            valid = self.model._get_output_attention_mask(mask, target_length=ids.shape[1])
        else:
            valid = self.model._get_feature_vector_attention_mask(ids.shape[1], mask)
        return [row[own.bool().cpu()].tolist() for row, own in zip(ids, valid, strict=True)]

    @property
    def _generates(self) -> bool:
        return hasattr(self.model, "_get_output_attention_mask")

    def _text(self, ids: list[int]) -> str:
        # to the tokenizers of wav2vec 2.0 the end of a word is a special token
        skip = {"skip_special_tokens": True} if self._generates else {}
        return str(self.processor.batch_decode([ids], **skip)[0])

    @property
    def hop(self) -> int:
        """Samples from one frame of the encoder to the next."""
        config, features = self.model.config, self.processor.feature_extractor
        if hasattr(config, "inputs_to_logits_ratio") and not hasattr(features, "hop_length"):
            return int(config.inputs_to_logits_ratio)
        encoder = getattr(config, "encoder_config", config)
        return int(features.hop_length * encoder.subsampling_factor)

    def follow(
        self, chunks: Iterable[Tensor], rate: int, **options: Any
    ) -> Generator[str, None, None]:
        """Yield what a chunk adds; `context` seconds behind it must have come."""
        how = self._how(options)
        chunk, context = how.get("chunk", 2.0), how.get("context", 4.0)
        _check_seconds("chunk", chunk, self.hop / self.rate)
        _check_seconds("context", context, 0.0)
        size, around = (round(seconds * self.rate / self.hop) for seconds in (chunk, context))
        ids: list[int] = []
        given = ""
        for more in self._windows(resampled(chunks, rate, self.rate), size, around):
            ids += more
            text = self._text(ids).strip()
            if text.startswith(given) and len(text) > len(given):
                yield text[len(given) :]
                given = text

    def _windows(self, sound: Iterator[Tensor], size: int, around: int) -> Iterator[list[int]]:
        """Ids of `size` frames after another, each heard with `around` frames on both sides."""
        buffer, before, going, hop = torch.zeros(0), 0, True, self.hop
        while going:
            most = (before + size + around) * hop  # a later sample would depend on the split
            buffer, going = taken(buffer, sound, most)
            if not going and len(buffer) < max(before * hop + 1, self.shortest):
                return
            with torch.inference_mode(), stock_errors(self.model):
                ids = self._ids([buffer[:most]])[0]
            yield ids[before : before + size if going else None]
            drop = max(before + size - around, 0) if going else 0
            buffer, before = buffer[drop * hop :], before + size - drop


def _check_seconds(name: str, value: Any, least: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and least <= value <= LONGEST):
        raise SpecError(f"{name}={value!r} is not allowed; give seconds, {least:g} to {LONGEST:g}")
