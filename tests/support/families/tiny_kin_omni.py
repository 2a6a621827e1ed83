"""Qwen3-Omni, the thinker."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_family_qwen2_5_omni_thinker import FAMILY as BEFORE
from tiny_family_qwen2_5_omni_thinker import MELS, sound_config
from tiny_kin_qwen import EXPERTS, rope
from tiny_qwen import media, vision_config
from torch import Tensor
from transformers import (
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessorKwargs,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    vision = vision_config(text, shape)
    config = Qwen3OmniMoeThinkerConfig(
        audio_config={**sound_config(text, shape), "downsample_hidden_size": 4},
        vision_config={
            **vision,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(range(shape.deepstack)),
        },
        text_config={**text, **EXPERTS, "rope_parameters": rope(text)},
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        audio_token_id=ids["audio_token"],
        audio_start_token_id=ids["audio_bos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        position_id_per_seconds=13,
    )
    processor = Qwen3OmniMoeProcessor(
        tokenizer=tokenizer,
        feature_extractor=WhisperFeatureExtractor(feature_size=MELS, chunk_length=2),
        **media(vision, Qwen2VLVideoProcessor),
    )
    processor.videos_kwargs = {}  # else frames of at least 100,000 pixels, as before 5.23, too:
    getattr(Qwen3OmniMoeProcessorKwargs, "_defaults", {}).get("videos_kwargs", {}).pop("size", None)
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    model.set_experts_implementation("eager")  # the others take no double precision
    return model, processor


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    """Sounds come joined: three strides of two over every second, 13 tokens each."""
    if kind != "audio":
        return list(output.pooler_output)
    frames = inputs["feature_attention_mask"].sum(-1).tolist()
    counts = [13 * (n // 100) + -(-(n % 100) // 8) for n in frames]
    return list(output.pooler_output.split(counts))


FAMILIES = {
    "qwen3_omni_moe_thinker": Family(
        "qwen3_omni_moe_thinker",
        build,
        BEFORE.calls,
        placeholder=BEFORE.placeholder,
        specials=BEFORE.specials,
        items=_items,
        positions=BEFORE.positions,
    )
}
