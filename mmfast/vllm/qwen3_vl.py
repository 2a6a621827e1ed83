"""Qwen3-VL for vLLM; imports vLLM, and is imported by vLLM alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.models import qwen3_vl as stock
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmfast.vllm.processor import PrunedText, PrunedVideos


class Qwen3VLMultiModalProcessor(
    PrunedText,
    stock.Qwen3VLMultiModalProcessor,  # type: ignore[misc]
):
    """The processor with places for the kept tokens."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLMultiModalProcessor,
    info=stock.Qwen3VLProcessingInfo,
    dummy_inputs=stock.Qwen3VLDummyInputsBuilder,
)
class Qwen3VLForConditionalGeneration(
    PrunedVideos,
    stock.Qwen3VLForConditionalGeneration,  # type: ignore[misc]
):
    """The model with the reduction of the plan; vLLM adds timestamps and positions."""

    mmfast_needs = (*PrunedVideos.mmfast_needs, "_create_final_video_embeddings")

    mmfast_times = "timestamps"

    def mmfast_video(self, embeds: Tensor, size: Any, time: Any) -> Tensor:
        """Prune a video `[N, D]`; timestamps and positions are added by vLLM."""
        chosen, mask = self.mmfast_choose(embeds, size, self.visual_dim)
        kept: Tensor = self._create_final_video_embeddings(
            video_embeddings=chosen.apply(embeds),
            num_tokens_per_frame=mask.reshape(size[0], -1).sum(dim=1).tolist(),
            timestamps=time,
            video_grid_thw=size,
            retention_mask=mask,
        )
        return kept
