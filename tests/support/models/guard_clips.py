"""Small CLIPs and SigLIPs of guards, saved with their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_base import tokenizer_of_bytes
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipProcessor,
)

LONGEST = 40  # letters of a description, and the end


def words() -> Any:
    """Return a tokenizer of bytes that ends every text, as CLIP's does."""
    tokenizer = tokenizer_of_bytes({})
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.padding_side, tokenizer.model_max_length = "right", LONGEST
    return tokenizer


def save_clip(folder: Path, vision: dict[str, Any], *, seed: int = 0, kind: str = "clip") -> Any:
    """Save a CLIP, or a SigLIP, with a random text side and this vision side; return it."""
    tokenizer = words()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": LONGEST,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    square = {"height": vision["image_size"], "width": vision["image_size"]}
    if kind == "clip":
        sizes: Any = {"text_config": text, "vision_config": vision, "projection_dim": 8}
        model: Any = CLIPModel(CLIPConfig(**sizes))
        pixels: Any = CLIPImageProcessor(
            size={"shortest_edge": vision["image_size"]}, crop_size=square, do_center_crop=True
        )
        processor: Any = CLIPProcessor(pixels, tokenizer)
    else:
        vision = {**vision, "hidden_size": 16}
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
        processor = SiglipProcessor(SiglipImageProcessor(size=square), tokenizer)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 1.0 / weight[0].numel() ** 0.5)
            elif "norm" not in name and "logit" not in name:
                weight.normal_(0.0, 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().requires_grad_(False).save_pretrained(folder)
    processor.save_pretrained(folder)
    return model
