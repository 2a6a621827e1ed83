"""Families with a Pixtral tower."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import pixtral_config
from transformers import (
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LightOnOcrProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

BREAKS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


# Mistral 3: a token of text ends every row of an image.
def build_mistral3(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = Mistral3Config(
        vision_config=pixtral_config(shape),
        text_config={"model_type": "mistral", "sliding_window": None, **text},
        image_token_index=ids["image_token"],
        spatial_merge_size=shape.merge,
        tie_word_embeddings=False,
    )
    patch = {"height": shape.patch, "width": shape.patch}
    images = PixtralImageProcessor(size={"longest_edge": 12 * shape.patch}, patch_size=patch)
    processor = PixtralProcessor(
        images,
        tokenizer,
        patch_size=shape.patch,
        spatial_merge_size=shape.merge,
        image_token=tokenizer.image_token,
    )
    return Mistral3ForConditionalGeneration(config), processor


FAMILY_MISTRAL3 = Family(
    "mistral3", build_mistral3, {"image": ("pixel_values", "image_sizes")}, specials=BREAKS
)


# LightOnOCR.
def build_lighton_ocr(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = LightOnOcrConfig(
        vision_config=pixtral_config(shape),
        text_config={**text, "model_type": "qwen3", "head_dim": 8},
        image_token_id=ids["image_token"],
        spatial_merge_size=shape.merge,
        tie_word_embeddings=False,
    )
    side = shape.merge * shape.patch
    images = PixtralImageProcessor(
        size={"longest_edge": 12 * shape.patch}, patch_size={"height": side, "width": side}
    )
    processor = LightOnOcrProcessor(
        images, tokenizer, patch_size=shape.patch, spatial_merge_size=shape.merge
    )
    return LightOnOcrForConditionalGeneration(config), processor


FAMILY_LIGHTON_OCR = Family(
    "lighton_ocr", build_lighton_ocr, {"image": ("pixel_values", "image_sizes")}, specials=BREAKS
)


# LLaVA with a Pixtral tower: Pixtral-12B as transformers has it.
def build_llava_pixtral(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    patch = 2 * shape.patch
    config = LlavaConfig(
        vision_config={**pixtral_config(shape), "patch_size": patch},
        text_config={"model_type": "mistral", "sliding_window": None, **text},
        image_token_index=ids["image_token"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = PixtralImageProcessor(
        size={"longest_edge": 6 * patch}, patch_size={"height": patch, "width": patch}
    )
    processor = PixtralProcessor(
        images, tokenizer, patch_size=patch, image_token=tokenizer.image_token
    )
    return LlavaForConditionalGeneration(config), processor


FAMILY_LLAVA_PIXTRAL = Family(
    "llava", build_llava_pixtral, {"image": ("pixel_values", "image_sizes")}, specials=BREAKS
)


FAMILIES = {
    "mistral3": FAMILY_MISTRAL3,
    "lighton_ocr": FAMILY_LIGHTON_OCR,
    "llava_pixtral": FAMILY_LLAVA_PIXTRAL,
}
