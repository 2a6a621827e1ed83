"""VibeVoice: text to latents by diffusion, a frame of 133 ms per pass (arXiv 2508.19205).

The stock `generate` decodes each frame before it makes the next one, and hands all of them out at
the end. Here a frame is handed out as it is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.speech import Sound
from mmfast.models.loading import speech_family
from mmfast.models.speech.talkers.base import (
    GeneratingTalker,
    GeneratorState,
    Steps,
    TalkerOptions,
)


@dataclass(frozen=True)
class VibeVoiceOptions(TalkerOptions):
    """Options of VibeVoice.

    `voice` is a recording whose voice is taken. `guidance_scale` and `num_diffusion_steps` are of
    the diffusion, `max_new_tokens` frames at most (7.5 a second); None keeps the checkpoint's
    setting. `noise_scheduler` is one of diffusers, None the checkpoint's.
    """

    voice: str | None = None
    guidance_scale: float | None = None
    num_diffusion_steps: int | None = None
    max_new_tokens: int | None = None
    noise_scheduler: Any = None


@speech_family(
    "vibevoice", "VibeVoiceForConditionalGeneration", "processor", reader="AutoProcessor"
)
class VibeVoiceTalker(GeneratingTalker):
    """A `VibeVoiceForConditionalGeneration` as a speaker, frame by frame."""

    name, Options, by_sentence = "VibeVoice", VibeVoiceOptions, False
    settings = ("guidance_scale", "num_diffusion_steps", "max_new_tokens", "noise_scheduler")

    def __init__(self, model: Any, processor: Any, **options: Any) -> None:
        super().__init__(model, processor, **options)
        self.sample_rate = int(processor.feature_extractor.sampling_rate)

    def _say(self, texts: list[str], how: VibeVoiceOptions) -> list[Tensor]:
        found = self._generate(self._inputs(texts, how), how)
        return [torch.zeros(0) if pcm is None else pcm.reshape(-1) for pcm in found]

    def _stream(self, text: str, how: VibeVoiceOptions, random: GeneratorState) -> Iterator[Sound]:
        with self._refusing():
            inputs = self._inputs([text], how)
            for kind, pcm in self._steps(inputs, how, random):
                if kind == "step":
                    yield replace(self._sound(pcm, ""), passes=1, tokens=1)

    def _hooks(self, steps: Steps) -> Sequence[Any]:
        def decoded(_: Any, args: Any, out: Any) -> None:
            if steps.mine():
                steps.tell(out.audio[0, 0].clone())

        return [self.model.model.audio_tower.decoder.register_forward_hook(decoded)]

    def _inputs(self, texts: list[str], how: VibeVoiceOptions) -> Any:
        sound = self._recording(how.voice, len(texts))
        heard = [{"type": "audio"}] if sound else []
        prompts = [
            self.processor.apply_chat_template(
                [{"role": "0", "content": [{"type": "text", "text": text}, *heard]}],
                tokenize=False,
            )
            for text in texts
        ]
        inputs = self.processor(text=prompts, **sound, padding=True, return_tensors="pt")
        return inputs.to(self.device, dtype=self.model.dtype)
