"""Encoder-decoder recognisers: Whisper and Moonshine.

The decoder reads the frames of the encoder by cross-attention, which knows no positions: frames
that `reduce` drops are as if they had been masked, and those that it merges are their mean. `cache`
acts on the keys and values of frames behind the first pass of the decoder.
Papers: arXiv 2212.04356 (Whisper), 2410.15608 (Moonshine).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from mmfast.caches.plan import call_plan
from mmfast.core.errors import SpecError
from mmfast.core.spec import parse, reduce
from mmfast.core.tokens import Tokens
from mmfast.core.trace import Trace
from mmfast.models.kv.encoded import check_encoded
from mmfast.models.loading import speech_family
from mmfast.models.speech.listeners.base import StockListener, arrays, by_length, field

SIGNALS = {"x", "grid"}  # that there are of frames


class EncoderDecoderListener(StockListener):
    """A stock encoder of sound and a decoder that attends to it; greedy, or with `num_beams`."""

    knobs = frozenset({"max_new_tokens", "num_beams"})
    attached = ("cache",)  # `reduce` acts between the parts of the model, on none of them

    def check(self, spec: Any, cache: Any) -> None:
        """Refuse what frames between encoder and decoder do not have (SpecError)."""
        name = type(self.model).__name__
        check_encoded(self.model, (), call_plan(cache), {})
        for stage in parse(spec):
            lacks = sorted(set(stage.method.needs) - SIGNALS)
            if stage.site != "pre" or lacks:
                why = f"needs {lacks[0]}" if lacks else f"acts at {stage.where}"
                raise SpecError(
                    f"'{stage}' {why}, and between encoder and decoder of {name} are frames alone; "
                    "take one that compares them, such as 'divprune:0.5' or 'tome:0.5'"
                )

    def write(self, sounds: list[Tensor], how: Mapping[str, Any], trace: Trace) -> list[str]:
        """Write sounds down; under `reduce` each has a pass of its own."""
        rest = {name: value for name, value in how.items() if name != "reduce"}
        if how.get("reduce") is None:
            return self._texts(self._read(sounds), sounds, rest)
        return [self._reduced(sound, how["reduce"], rest, trace) for sound in sounds]

    def _read(self, sounds: list[Tensor]) -> dict[str, Any]:
        read = self.processor(
            arrays(sounds), sampling_rate=self.rate, return_tensors="pt", padding=True
        )
        return self.inputs(read)

    def _texts(
        self, inputs: Mapping[str, Any], sounds: list[Tensor], how: Mapping[str, Any]
    ) -> list[str]:
        most = None if "max_new_tokens" in how else self.bounds(sounds)
        asked = self.asked(how if most is None else {**how, "max_new_tokens": max(most)})
        ids = self.model.generate(**inputs, **asked)
        for row, bound in zip(ids, most or (), strict=False):
            row[bound + 1 :] = self.processor.tokenizer.pad_token_id  # behind the start token
        return list(self.processor.batch_decode(ids, skip_special_tokens=True))

    def bounds(self, sounds: list[Tensor]) -> list[int] | None:
        """Return the most tokens of each sound; None: those of the checkpoint."""
        return None

    def asked(self, how: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of the stock `generate`."""
        return {"do_sample": False, "num_beams": 1, **how}

    def _reduced(self, sound: Tensor, spec: Any, how: Mapping[str, Any], trace: Trace) -> str:
        inputs = self._read([sound])
        with trace.stage("encode"):
            out = self.model.get_encoder()(**inputs)
            frames = out.last_hidden_state[0]
        with trace.stage("pre") as row:
            found = reduce(Tokens(frames, grid=(len(frames), 1, 1)), spec)
            assert not isinstance(found, list)
            row.tokens_in, row.tokens_out, row.method = found.n, found.m, str(spec)
            trace.reductions.append(("pre", len(trace.reductions), found))
            out.last_hidden_state = found.apply(frames)[None]
        if getattr(out, "attention_mask", None) is not None:  # a sound alone has no padding
            out.attention_mask = out.attention_mask[:, : found.m]
        return self._texts({"encoder_outputs": out}, [sound], how)[0]


@speech_family("whisper", "WhisperForConditionalGeneration", "processor", "AutoProcessor")
class WhisperListener(EncoderDecoderListener):
    """Whisper: windows of 30 s, whose silence at the end is heard too.

    `language` is a name or a code, found in the sound where it is not given; `translate` writes
    English.
    """

    knobs = frozenset({"language", "max_new_tokens", "num_beams", "translate"})

    def _read(self, sounds: list[Tensor]) -> dict[str, Any]:
        read = self.processor(arrays(sounds), sampling_rate=self.rate, return_tensors="pt")
        return self.inputs({"input_features": read["input_features"]})

    def asked(self, how: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of Whisper's own `generate`."""
        rest = {name: value for name, value in how.items() if name != "translate"}
        task = {"task": "translate"} if how.get("translate") else {}
        return super().asked({**rest, **task})


@speech_family("moonshine", "MoonshineForConditionalGeneration", "processor", "AutoProcessor")
class MoonshineListener(EncoderDecoderListener):
    """Moonshine: no window, so short sound costs little; a few tokens a second bound the text."""

    per_second = 6.5  # tokens of text: its authors' bound, beyond which it repeats itself
    shortest = field((127, 7, 3), (64, 3, 2))  # of the three convolutions of its encoder

    def write(self, sounds: list[Tensor], how: Mapping[str, Any], trace: Trace) -> list[str]:
        """Write sounds down, those of equal length in a batch: its first norm is over time."""
        return by_length(sounds, partial(super().write, how=how, trace=trace))

    def bounds(self, sounds: list[Tensor]) -> list[int]:
        """Return the most tokens of each sound."""
        return [max(round(len(sound) / self.rate * self.per_second), 4) for sound in sounds]
