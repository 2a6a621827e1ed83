"""Families whose pictures are cut into tiles, and what tells their pictures apart in a prompt."""

from __future__ import annotations

import re
from typing import Any

import torch
from tiny_base import SPECIALS, Family, Shape
from tiny_clip import side, siglip_config, tower_sizes
from torch import Tensor
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    AyaVisionProcessor,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionImageProcessor,
    Cohere2VisionProcessor,
    GotOcr2Config,
    GotOcr2ForConditionalGeneration,
    GotOcr2ImageProcessor,
    GotOcr2Processor,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
    Ovis2Config,
    Ovis2ForConditionalGeneration,
    Ovis2ImageProcessor,
    Ovis2Processor,
    PerceptionLMConfig,
    PerceptionLMForConditionalGeneration,
    PerceptionLMImageProcessor,
    PerceptionLMProcessor,
    PerceptionLMVideoProcessor,
)

TOKENS_AYA_VISION = {
    "image_token": "<|IMG_PATCH|>",
    "start_of_img_token": "<|START_OF_IMG|>",
    "end_of_img_token": "<|END_OF_IMG|>",
    "place": "<image>",
}


def cohere(text: dict[str, Any]) -> dict[str, Any]:
    """Every other layer sees a window."""
    kinds = ["sliding_attention", "full_attention"]
    layers = [kinds[i % 2] for i in range(text["num_hidden_layers"])]
    return {**text, "model_type": "cohere2", "sliding_window": 12, "layer_types": layers}


def split(features: Tensor, this: Any, inputs: Any, first: str, last: str) -> list[Tensor]:
    """Features `[n, D]` by image, counted in the decoded prompt between two tags."""
    text, mark = this.processor.tokenizer.decode(inputs["input_ids"][0]), this.processor.tokenizer
    images = re.findall(re.escape(first) + "(.*?)" + re.escape(last), text, re.DOTALL)
    counts = [image.count(mark.image_token) for image in images]
    assert sum(counts) == len(features)
    return list(features.split(counts))


def _items_aya_vision(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    rows = torch.cat(list(output.pooler_output))
    return split(
        rows,
        this,
        inputs,
        TOKENS_AYA_VISION["start_of_img_token"],
        TOKENS_AYA_VISION["end_of_img_token"],
    )


# Aya Vision: a text tag in front of every tile, the overview last.
def build_aya_vision(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    config = AyaVisionConfig(
        vision_config=siglip_config(shape),
        text_config=cohere(text),
        image_token_index=ids["image_token"],
        downsample_factor=shape.merge,
        alignment_intermediate_size=24,
        tie_word_embeddings=False,
    )
    size = {"height": side(shape), "width": side(shape)}
    processor = AyaVisionProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer,
        patch_size=shape.patch,
        img_size=side(shape),
        downsample_factor=shape.merge,
        tile_token="TILE",
    )
    return AyaVisionForConditionalGeneration(config), processor


FAMILY_AYA_VISION = Family(
    "aya_vision",
    build_aya_vision,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: TOKENS_AYA_VISION["place"],
    specials=TOKENS_AYA_VISION,
    items=_items_aya_vision,
)


TOKENS_COHERE2_VISION = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}


# Command A Vision: a line break behind every tile, the overview last.
def build_cohere2_vision(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    config = Cohere2VisionConfig(
        vision_config=siglip_config(shape),
        text_config=cohere(text),
        image_token_id=ids["image_token"],
        downsample_factor=shape.merge,
        alignment_intermediate_size=24,
        tie_word_embeddings=False,
    )
    images = Cohere2VisionImageProcessor(
        size={"height": side(shape), "width": side(shape)}, min_patches=1, max_patches=4
    )
    # By this name, the processor has the tokens per side of a tile.
    images.patch_size = side(shape) // shape.patch // shape.merge
    processor = Cohere2VisionProcessor(images, tokenizer)
    return Cohere2VisionForConditionalGeneration(config), processor


def _items_cohere2_vision(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    rows = output.pooler_output.flatten(0, 1)
    return split(
        rows, this, inputs, TOKENS_COHERE2_VISION["boi_token"], TOKENS_COHERE2_VISION["eoi_token"]
    )


FAMILY_COHERE2_VISION = Family(
    "cohere2_vision",
    build_cohere2_vision,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: TOKENS_COHERE2_VISION["image_token"],
    specials=TOKENS_COHERE2_VISION,
    items=_items_cohere2_vision,
)


TAGS_OVIS2 = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


TOKENS_OVIS2 = {
    "image_token": "<IMG_ATOM>",
    "place": "<image>",
    **{tag[1:-1]: tag for tag in TAGS_OVIS2},
}


# Ovis2: the overview first, tokens that tell columns from rows between the tiles.
def build_ovis2(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    config = Ovis2Config(
        vision_config={
            **tower_sizes(shape),
            "image_size": side(shape),
            "vocab_size": 32,
            "hidden_stride": shape.merge,
        },
        text_config={"model_type": "qwen2", **text},
        image_token_id=ids["image_token"],
        visual_indicator_token_ids=[ids[tag[1:-1]] for tag in TAGS_OVIS2],
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        tie_word_embeddings=False,
    )
    size = {"height": side(shape), "width": side(shape)}
    images = Ovis2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4)
    length = (side(shape) // shape.patch // shape.merge) ** 2
    processor = Ovis2Processor(images, tokenizer, image_seq_length=length)
    return Ovis2ForConditionalGeneration(config), processor


def _items_ovis2(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    return split(output.pooler_output.flatten(0, 1), this, inputs, TAGS_OVIS2[0], TAGS_OVIS2[-1])


def _amend_ovis2(this: Any, output: Any, ids: Tensor, embeds: Tensor) -> None:
    """The tags have embeddings of the visual vocabulary."""
    tags = this.model.config.visual_indicator_token_ids
    for tag, row in zip(tags, output.visual_indicator_features, strict=True):
        embeds[ids == tag] = row


FAMILY_OVIS2 = Family(
    "ovis2",
    build_ovis2,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: "<image>",
    specials=TOKENS_OVIS2,
    items=_items_ovis2,
    amend=_amend_ovis2,
)


SIDE_GOT_OCR2 = 16  # tokens, which the processor takes for granted


# GOT-OCR2: every 4 x 4 patches one token; tiles of an image lie side by side in the prompt.
def build_got_ocr2(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model with pixels for patches, and windows alone: a tile has as many as a real one."""
    side = 4 * SIDE_GOT_OCR2
    config = GotOcr2Config(
        vision_config={
            "hidden_size": 16,
            "output_channels": 8,
            "mlp_dim": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": 1,
            "window_size": 4,
            "global_attn_indexes": [],
        },
        text_config={"model_type": "qwen2", **text},
        image_token_index=ids["image_token"],
        image_seq_length=SIDE_GOT_OCR2 * SIDE_GOT_OCR2,
        tie_word_embeddings=False,
    )
    size = {"height": side, "width": side}
    images = GotOcr2ImageProcessor(size=size)
    processor = GotOcr2Processor(images, tokenizer)
    return GotOcr2ForConditionalGeneration(config), processor


FAMILY_GOT_OCR2 = Family(
    "got_ocr2",
    build_got_ocr2,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: "<img><imgpad></img>",
    specials={"image_token": "<imgpad>", "first": "<img>", "last": "</img>"},
    items=lambda this, output, kind, inputs: split(
        output.pooler_output.flatten(0, 1), this, inputs, "<img>", "</img>"
    ),
)


# Perception LM: a tower of timm, the overview first, as many tiles in each image of a call.
def build_perception_lm(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    side = shape.image_size or 6 * shape.patch
    config = PerceptionLMConfig(
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_tiny_patch16_384",
            "do_pooling": False,
            "num_classes": 0,
            "hidden_size": 16,
            "model_args": {
                "embed_dim": 16,
                "depth": shape.depth,
                "num_heads": 2,
                "img_size": [side, side],
                "patch_size": shape.patch,
                "global_pool": "",
                "use_post_transformer_norm": False,
            },
        },
        text_config={"model_type": "llama", **text},
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        projector_pooling_ratio=shape.merge,
        vision_use_cls_token=True,
        tie_word_embeddings=False,
    )
    images = PerceptionLMImageProcessor(
        tile_size=side, max_num_tiles=4, vision_input_type="thumb+tile"
    )
    clips = PerceptionLMVideoProcessor(size={"height": side, "width": side})
    processor = PerceptionLMProcessor(
        clips, images, tokenizer, patch_size=shape.patch, pooling_ratio=shape.merge
    )
    return PerceptionLMForConditionalGeneration(config), processor


def _items_perception_lm(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    rows, images = output.pooler_output, len(inputs["pixel_values"])
    return list(rows.unflatten(0, (images, -1)).flatten(1, 2))


FAMILY_PERCEPTION_LM = Family(
    "perception_lm", build_perception_lm, {"image": ("pixel_values",)}, items=_items_perception_lm
)


TOKENS_MINICPMV4_6 = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


# MiniCPM-V 4.6: up to 4 slices behind an overview, without its linear attention.
def build_minicpmv4_6(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    side = 8 * shape.patch
    config = MiniCPMV4_6Config(
        vision_config={
            **tower_sizes(shape),
            "image_size": side,
            "insert_layer_id": 0,
        },
        text_config={"model_type": "qwen3", "head_dim": 8, **text},
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        image_size=side,
        insert_layer_id=0,
    )
    sizes = {"scale_resolution": side, "patch_size": shape.patch, "max_slice_nums": 4}
    processor = MiniCPMV4_6Processor(
        MiniCPMV4_6ImageProcessor(**sizes), MiniCPMV4_6VideoProcessor(**sizes), tokenizer
    )
    return MiniCPMV4_6ForConditionalGeneration(config), processor


def _items_minicpmv4_6(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    """Features by item: every one has a number in front of it."""
    text = this.processor.tokenizer.decode(inputs["input_ids"][0])
    parts = re.split("<image_id>", text)[1:]
    counts = [part.count(SPECIALS[f"{kind}_token"]) for part in parts]
    return list(torch.cat(list(output.pooler_output)).split([n for n in counts if n]))


FAMILY_MINICPMV4_6 = Family(
    "minicpmv4_6",
    build_minicpmv4_6,
    {
        "image": ("pixel_values", "target_sizes"),
        "video": ("pixel_values_videos", "target_sizes_videos"),
    },
    specials=TOKENS_MINICPMV4_6,
    items=_items_minicpmv4_6,
)


FAMILIES = {
    "aya_vision": FAMILY_AYA_VISION,
    "cohere2_vision": FAMILY_COHERE2_VISION,
    "ovis2": FAMILY_OVIS2,
    "got_ocr2": FAMILY_GOT_OCR2,
    "perception_lm": FAMILY_PERCEPTION_LM,
    "minicpmv4_6": FAMILY_MINICPMV4_6,
}
