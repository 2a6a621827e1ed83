"""Loading Qwen2.5-Omni as a voice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import ModelError
from mmfast.models.loading import pick_device, pick_dtype
from mmfast.models.omni_speech import OmniSpeech


def load_omni(
    source: Any,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    **options: Any,
) -> OmniSpeech:
    """A speaker, listener and chatter.

    Args:
        source: A directory or hub id such as "Qwen/Qwen2.5-Omni-7B", or `(model, processor)`.
        device: Where to put a loaded one; None: CUDA where there is one.
        dtype: Of a loaded one.
        **options: Of `OmniOptions`.

    Raises:
        ModelError: It cannot be loaded, or cannot speak.
    """
    if isinstance(source, tuple):
        if len(source) != 2:
            raise ModelError(f"model is a tuple of {len(source)}; give (model, processor)")
        return OmniSpeech(*source, **options)
    if not isinstance(source, (str, Path)):
        raise ModelError(
            f"model is a {type(source).__name__}; give a directory, a hub id or (model, processor)"
        )
    place, kind = pick_device(device), pick_dtype(dtype)
    return OmniSpeech(*_from_pretrained(str(source), place, kind), **options)


def _from_pretrained(where: str, place: torch.device, kind: torch.dtype | str) -> tuple[Any, Any]:
    from transformers import AutoProcessor, Qwen2_5OmniForConditionalGeneration

    try:
        processor = AutoProcessor.from_pretrained(where, trust_remote_code=False)
        model: Any = Qwen2_5OmniForConditionalGeneration.from_pretrained(
            where, dtype=kind, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"cannot load Qwen2.5-Omni {where!r}: {reason}") from error
    return model.to(place), processor
