"""Vision encoders without a language model: ViTs of timm, SigLIP, CLIP and DINOv2 of transformers.

They have no `model_type` that names a family of models, so `adapter_for` asks here first. Every
image is one raster of patches; class, distillation and register tokens stand in front of it.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import Adapter, Call, Layout
from mmfast.models.families.tower import Tower, batch_tower

# `model_type` of encoders of transformers; one of their modules has `embeddings` and `encoder`.
TRANSFORMERS = ("siglip_vision_model", "clip_vision_model", "dinov2", "dinov2_with_registers")


def encoder_adapter(model: Any) -> Adapter | None:
    """The adapter of a model that is a vision encoder alone; None for any other model.

    Encoders inside timm's feature extractor and inside the wrapper of transformers are found, too.
    ModelError for another model of timm.
    """
    tower = _find(model)
    if tower is None:
        return None
    name = type(tower.module).__name__
    return Adapter(name, _layout, _fold, tower=lambda _: tower, media=("image",), alone=True)


def _find(model: Any) -> Tower | None:
    if "timm" in sys.modules:
        from timm.models.eva import Eva
        from timm.models.vision_transformer import VisionTransformer

        for part in (model, getattr(model, "timm_model", None), getattr(model, "model", None)):
            if isinstance(part, (VisionTransformer, Eva)):
                blocks: Any = part.blocks
                return Tower(part, part, blocks, False, part.cls_token is not None)
        if type(model).__module__.startswith("timm."):
            raise ModelError(
                f"{type(model).__name__} of timm is no plain ViT; attach to a VisionTransformer "
                "(ViT, DeiT, SigLIP, CLIP, DINOv2) or an Eva (EVA, EVA-02, DINOv3)"
            )
    if getattr(getattr(model, "config", None), "model_type", None) not in TRANSFORMERS:
        return None
    parts = (m for m in model.modules() if hasattr(m, "embeddings") and hasattr(m, "encoder"))
    module = next(parts)
    return batch_tower(module, module)


def _layout(base: Any, kind: str, call: Call) -> list[Layout]:
    images, _, height, width = call["pixel_values"].shape
    if hasattr(base, "patch_embed"):
        rows, columns = map(int, base.patch_embed.dynamic_feat_size((height, width)))
    else:
        rows, columns = height // base.config.patch_size, width // base.config.patch_size
    return [Layout(rows * columns, (1, rows, columns))] * images


def _fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    return list(values.cpu().chunk(len(call["pixel_values"])))
