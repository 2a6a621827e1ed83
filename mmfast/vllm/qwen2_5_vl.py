"""Qwen2.5-VL for vLLM; imports vLLM, and is imported by vLLM alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models import qwen2_5_vl as stock
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmfast.vllm.processor import PrunedPrompt, PrunedVideos, field


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

    def _postprocess_video_embeds_evs(
        self, video_embeds_split: tuple[Tensor, ...], video_input: Any
    ) -> tuple[Tensor, ...]:
        """Prune each video `[N, D]` and append the positions `[M, 4]` that vLLM strips again."""
        if self.mmfast_plan is None:
            pruned: tuple[Tensor, ...] = super()._postprocess_video_embeds_evs(
                video_embeds_split, video_input
            )
            return pruned
        sizes = field(video_input, "video_grid_thw").tolist()
        seconds = field(video_input, "second_per_grid_ts").long().tolist()  # whole, as the model's
        done = []
        for embeds, size, each in zip(video_embeds_split, sizes, seconds, strict=True):
            chosen, _ = self.mmfast_choose(embeds, size, embeds.shape[-1])
            positions = stock.compute_mrope_for_media(
                size,
                self.visual.spatial_merge_size,
                tokens_per_second=self.config.vision_config.tokens_per_second,
                video_second_per_grid=each,
            ).to(embeds.device)
            kept = positions[chosen.keep].to(embeds.dtype)
            done.append(torch.cat([chosen.apply(embeds), kept], dim=1))
        return tuple(done)
