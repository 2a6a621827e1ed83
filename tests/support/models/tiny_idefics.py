"""What Idefics3 and SmolVLM share: towers, tags, and which tiles are one picture."""

from __future__ import annotations

from typing import Any

import torch
from tiny_base import Shape
from torch import Tensor

ROWS = range(1, 5)
SPECIALS = {
    "image_token": "<image>",
    "video_token": "<video>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    **{f"tile_{r}_{c}_token": f"<row_{r}_col_{c}>" for r in ROWS for c in ROWS},
}
CALLS = {"image": ("pixel_values", "pixel_attention_mask")}


def side_of(shape: Shape) -> int:
    return shape.image_size or 6 * shape.patch


def config_of(text: Any, ids: Any, shape: Shape) -> dict[str, Any]:
    """Arguments of the config."""
    return {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "image_size": side_of(shape),
            "patch_size": shape.patch,
        },
        "text_config": {"model_type": "llama", **text},
        "image_token_id": ids["image_token"],
        "scale_factor": shape.merge,
    }


def sizes_of(shape: Shape) -> dict[str, Any]:
    """Arguments of the image processor: images are cut into at most 2 tiles per side."""
    side = side_of(shape)
    return {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}}


def tokens_of(shape: Shape) -> int:
    return (side_of(shape) // shape.patch // shape.merge) ** 2


def items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    """Features of each picture or clip of a prompt, read off its text."""
    text = this.processor.tokenizer.decode(inputs["input_ids"][0])
    length = tokens_of(this.shape)
    counts: list[int] = []
    begins = True
    for before in text.split("<image>" * length)[:-1]:
        frame = "Frame from " in before and "series of" not in before
        if begins and not frame:
            counts.append(0)
        counts[-1] += 1
        begins = before.endswith("<global-img>")
    rows = torch.cat(list(output.pooler_output))
    return list(rows.split([count * length for count in counts]))
