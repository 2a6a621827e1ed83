"""Qwen2.5-VL for vLLM; imports vLLM, and is imported by vLLM alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models import qwen2_5_vl as stock
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmfast.vllm.processor import PrunedPrompt, PrunedVideos


class Qwen2_5_VLMultiModalProcessor(  # noqa: N801 - vLLM's name
    PrunedPrompt,
    stock.Qwen2_5_VLMultiModalProcessor,  # type: ignore[misc]
):
    """The processor with places for the kept tokens."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLMultiModalProcessor,
    info=stock.Qwen2_5_VLProcessingInfo,
    dummy_inputs=stock.Qwen2_5_VLDummyInputsBuilder,
)
class Qwen2_5_VLForConditionalGeneration(  # noqa: N801 - vLLM's name
    PrunedVideos,
    stock.Qwen2_5_VLForConditionalGeneration,  # type: ignore[misc]
):
    """The model with the reduction of the plan; each kept token has its original position."""

    mmfast_times = "second_per_grid_ts"

    def mmfast_video(self, embeds: Tensor, size: Any, time: Any) -> Tensor:
        """Prune a video `[N, D]` and append the positions `[M, 4]` that vLLM strips again."""
        chosen, _ = self.mmfast_choose(embeds, size, embeds.shape[-1])
        positions = stock.compute_mrope_for_media(
            size,
            self.visual.spatial_merge_size,
            tokens_per_second=self.config.vision_config.tokens_per_second,
            video_second_per_grid=int(time),  # whole, as the model's
        ).to(embeds.device)
        return torch.cat([chosen.apply(embeds), positions[chosen.keep].to(embeds.dtype)], dim=1)
