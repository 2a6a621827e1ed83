"""Qwen2.5-VL and Qwen3-VL for vLLM; imports vLLM, and is imported by vLLM alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.model_executor.models import qwen2_5_vl, qwen3_vl, qwen3_vl_moe
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmfast.vllm.media import PrunedMedia, PrunedPrompt


class Qwen2_5_VLMultiModalProcessor(  # noqa: N801 - vLLM's name
    PrunedPrompt,
    qwen2_5_vl.Qwen2_5_VLMultiModalProcessor,  # type: ignore[misc]
):
    """The processor with places for the kept tokens."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLMultiModalProcessor,
    info=qwen2_5_vl.Qwen2_5_VLProcessingInfo,
    dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder,
)
class Qwen2_5_VLForConditionalGeneration(  # noqa: N801 - vLLM's name
    PrunedMedia,
    qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,  # type: ignore[misc]
):
    """The model with the reduction of the plan."""

    mmfast_extras = ("second_per_grid_ts",)


class Qwen3VLMultiModalProcessor(
    PrunedPrompt,
    qwen3_vl.Qwen3VLMultiModalProcessor,  # type: ignore[misc]
):
    """The processor with places for the kept tokens."""


class TimedMedia(PrunedMedia):
    """A reduction for models whose prompts have a timestamp before every frame of a video."""

    _tokenizer: Any
    mmfast_extras = ("timestamps",)

    def mmfast_layout(self, frames: int, count: int, data: Mapping[str, Any]) -> list[int]:
        """Return the part of a prompt of a whole video; its timestamps are rows of their own."""
        ids: list[int] = qwen3_vl.Qwen3VLMultiModalProcessor.get_video_repl(
            tokens_per_frame=[count] * frames,
            timestamps=data["timestamps"].data,
            tokenizer=self._tokenizer,
            vision_start_token_id=self.config.vision_start_token_id,
            vision_end_token_id=self.config.vision_end_token_id,
            video_token_id=self.config.video_token_id,
        ).full
        return ids


def _registered(info: type) -> Callable[[type], type]:
    return MULTIMODAL_REGISTRY.register_processor(  # type: ignore[no-any-return]
        Qwen3VLMultiModalProcessor, info=info, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder
    )


@_registered(qwen3_vl.Qwen3VLProcessingInfo)
class Qwen3VLForConditionalGeneration(
    TimedMedia,
    qwen3_vl.Qwen3VLForConditionalGeneration,  # type: ignore[misc]
):
    """The model with the reduction of the plan."""


@_registered(qwen3_vl_moe.Qwen3VLMoeProcessingInfo)
class Qwen3VLMoeForConditionalGeneration(
    TimedMedia,
    qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration,  # type: ignore[misc]
):
    """The mixture of experts with the reduction of the plan."""
