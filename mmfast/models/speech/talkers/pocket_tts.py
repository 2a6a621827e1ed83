"""Pocket TTS: text to latents by a flow, a frame of 80 ms per pass (arXiv 2509.06926).

The stock class makes all latents, then its processor decodes them. Here every latent becomes sound
as it is made, by a decoder that keeps its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.speech import Sound
from mmfast.models.loading import load_codec, speech_family
from mmfast.models.speech.talkers.base import (
    GeneratingTalker,
    GeneratorState,
    Steps,
    TalkerOptions,
    named_told,
)


@dataclass(frozen=True)
class PocketOptions(TalkerOptions):
    """Options of Pocket TTS.

    `voice` is a recording whose voice is taken, `voice_latents` `[t, D]` one that was encoded. With
    `do_sample` the flow begins with noise of variance `temperature`; `num_flow_steps` are of it,
    `eos_threshold` is the score at which speech ends, `max_new_tokens` frames at most (12.5 a
    second). None keeps the checkpoint's setting.
    """

    voice: str | None = None
    voice_latents: Any = None
    temperature: float | None = None
    do_sample: bool | None = None
    num_flow_steps: int | None = None
    eos_threshold: float | None = None
    max_new_tokens: int | None = None


@speech_family(
    "pocket_tts", "PocketTTSForConditionalGeneration", "processor", reader="AutoProcessor"
)
class PocketVoice(GeneratingTalker):
    """A `PocketTTSForConditionalGeneration` as a speaker, frame by frame, sentence by sentence."""

    name, Options = "Pocket TTS", PocketOptions
    settings = ("temperature", "do_sample", "num_flow_steps", "eos_threshold", "max_new_tokens")
    detailed = True

    def __init__(self, model: Any, processor: Any, **options: Any) -> None:
        super().__init__(model, processor, **options)
        tokenizer = getattr(processor, "audio_tokenizer", None)
        if tokenizer is None:
            raise ModelError(
                "this Pocket TTS came without its audio tokenizer, so its latents have no sound; "
                "load a checkpoint whose processor has one"
            )
        self.codec = load_codec(tokenizer.to(self.device).eval())
        self.sample_rate = self.codec.sample_rate

    def _say(self, texts: list[str], how: PocketOptions) -> list[Tensor]:
        made = self._generate(self._inputs(texts, how), how)
        found: list[Tensor] = self.processor.decode(made.audio_latents, made.audio_latents_mask)
        return found

    def _stream(self, text: str, how: PocketOptions, random: GeneratorState) -> Iterator[Sound]:
        with self._refusing():
            inputs = self._inputs([text], how)
            mouth, count, given = self.codec.decoder.start(1), 0, 0
            for kind, value in self._steps(inputs, how, random):
                if kind == "end":
                    latents = value.audio_latents[:, count:]
                else:
                    latents = self.model.denormalize_latents(value)
                count += latents.shape[1]
                mouth, pcm = self.codec.decoder.step(mouth, latents.transpose(1, 2))
                pcm, given = self._faded(pcm[0], given), given + pcm.shape[1]
                yield replace(
                    self._sound(pcm, ""), passes=latents.shape[1], tokens=latents.shape[1]
                )

    def _faded(self, pcm: Tensor, given: int) -> Tensor:
        """Fade the first milliseconds in, as the processor does."""
        fade = torch.linspace(0, 1, int(self.processor.fade_in_duration * self.sample_rate))
        part = fade[given : given + len(pcm)].to(pcm)
        return torch.cat([pcm[: len(part)] * part, pcm[len(part) :]])

    def _hooks(self, steps: Steps) -> Sequence[Any]:
        def heard(named: dict[str, Any]) -> None:
            if named.get("audio_latents") is not None:
                steps.tell(named["audio_latents"][:, -1:].clone())

        return [named_told(self.model, steps, heard)]

    def _inputs(self, texts: list[str], how: PocketOptions) -> Any:
        if how.voice_latents is not None:
            voice = {"audio_prompt_latents": [torch.as_tensor(how.voice_latents)] * len(texts)}
        else:
            voice = self._recording(how.voice, len(texts))
        content = [{"type": "audio"}] if voice else []
        prompts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
                tokenize=False,
            )
            for text in texts
        ]
        inputs = self.processor(
            text=prompts, **voice, padding=True, padding_side="left", return_tensors="pt"
        )
        return inputs.to(self.device)
