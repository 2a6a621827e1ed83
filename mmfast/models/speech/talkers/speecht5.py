"""SpeechT5: text to a spectrogram frame by frame, and a HiFi-GAN that sounds it (2110.07205)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.models.loading import from_pretrained, loading, speech_family
from mmfast.models.speech.talkers.base import StockTalker, TalkerOptions, folder_of

VOCODER = "microsoft/speecht5_hifigan"  # with which the published checkpoint was trained
FOLDERS = ("vocoder", "speaker_embeddings")  # beside the checkpoint


@dataclass(frozen=True)
class SpeechT5Options(TalkerOptions):
    """Options of SpeechT5.

    `voice` is a name in the checkpoint's folder `speaker_embeddings` or a .npy file of a speaker
    embedding; `speaker_embedding` is one as a tensor. `vocoder` is a directory or hub id; None is
    the folder `vocoder` of the checkpoint, or the published one. `threshold`, `minlenratio` and
    `maxlenratio` are those of `generate_speech`: the score of an end and bounds of the length.
    """

    voice: str | None = None
    speaker_embedding: Any = None
    vocoder: Any = None
    threshold: float = 0.5
    minlenratio: float = 0.0
    maxlenratio: float = 20.0


@speech_family("speecht5", "SpeechT5ForTextToSpeech", "tokenizer")
class SpeechT5Voice(StockTalker):
    """A `SpeechT5ForTextToSpeech` as a speaker; its spectrograms are made in a batch."""

    name, Options, sample_rate = "SpeechT5", SpeechT5Options, 16_000

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.tokenizer, self.folder = tokenizer, folder_of(model)
        found = self.folder / FOLDERS[1] if self.folder else None
        files = sorted(found.glob("*.npy")) if found else []
        self.files = {file.stem: file for file in files}
        self.voices = tuple(self.files)
        self._vocoder = cache(self._load_vocoder)

    def _batches(self, how: SpeechT5Options) -> bool:
        return not how.minlenratio  # the class takes the length of the longest text for all

    def _say(self, texts: list[str], how: SpeechT5Options) -> list[Tensor]:
        inputs = self.tokenizer(texts, padding=True, return_tensors="pt").to(self.device)
        vocoder = self._vocoder(how.vocoder)
        bounds = {name: getattr(how, name) for name in ("threshold", "minlenratio", "maxlenratio")}
        mels, lengths = self.model.generate_speech(
            inputs["input_ids"],
            speaker_embeddings=self._speaker(how),
            attention_mask=inputs["attention_mask"],
            return_output_lengths=True,
            **bounds,
        )
        return [vocoder(mel[:n]) for mel, n in zip(mels, lengths, strict=True)]

    def _speaker(self, how: SpeechT5Options) -> Tensor:
        width = self.model.config.speaker_embedding_dim
        given = how.speaker_embedding
        if given is None:
            import numpy as np

            given = torch.from_numpy(np.load(self._file(how.voice), allow_pickle=False))
        found = torch.as_tensor(given).float().reshape(1, -1).to(self.device, self.model.dtype)
        if found.shape[1] != width:
            raise ModelError(
                f"a speaker embedding of {found.shape[1]} numbers does not fit this SpeechT5; "
                f"give one of {width}"
            )
        return found

    def _file(self, voice: str | None) -> Path:
        if voice is None and self.voices:
            return self.files[self.voices[0]]
        if voice in self.files:
            return self.files[voice]
        if voice is not None and voice.endswith(".npy") and Path(voice).is_file():
            return Path(voice)
        if voice is None:
            raise SpecError(
                "SpeechT5 speaks in the voice of a speaker embedding, and its folder holds none; "
                "give voice= a .npy file, or speaker_embedding= a tensor"
            )
        raise SpecError(unknown("voice", voice, [*self.voices, "a .npy file"]))

    def _load_vocoder(self, source: Any) -> Any:
        if isinstance(source, torch.nn.Module):
            return source
        from transformers import SpeechT5HifiGan

        own = self.folder / FOLDERS[0] if self.folder else None
        own = own if own is not None and own.is_dir() else None
        where = str(source or own or VOCODER)
        fix = "; give vocoder= a directory or hub id of a SpeechT5HifiGan"
        with loading(f"vocoder {where!r}", fix):
            return from_pretrained(SpeechT5HifiGan, where, self.device, self.model.dtype)
