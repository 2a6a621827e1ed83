"""Loading a checkpoint: the embedded one, a directory or a hub id, safetensors only."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import ModelError, unknown

EMBEDDED = "tiny-video"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def embedded_path(name: str = EMBEDDED) -> Path:
    """Directory of an embedded checkpoint, from a checkout or an installed wheel.

    Raises:
        ModelError: The package was installed without it.
    """
    path = Path(str(files("mmfast.assets").joinpath(f"models/{name}")))
    if not (path / "config.json").is_file():
        raise ModelError(f"embedded model {name!r} is missing at {path}; reinstall mmfast")
    return path


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or CUDA where there is one, else the CPU.

    Raises:
        ModelError: The name is no device, or it is not there.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError):
        raise ModelError(
            f"device {device!r} is unknown; choose cpu, cuda or cuda:<index>"
        ) from None
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} is not there; choose cpu, or install a CUDA driver")
    return picked


def pick_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    """A dtype by name or as it is.

    Raises:
        ModelError: Unknown name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelError(unknown("dtype", dtype, DTYPES))
    return dtype if dtype == "auto" else getattr(torch, dtype)


def load(
    model: Any, device: str | torch.device | None, dtype: str | torch.dtype
) -> tuple[Any, Any]:
    """Load model and processor.

    Args:
        model: None (embedded), a directory, a hub id, or a `(model, processor)` pair, which is
            used as it is.
        device: See `pick_device`.
        dtype: See `pick_dtype`.

    Returns:
        `(model, processor)`, the model in evaluation mode on its device.

    Raises:
        ModelError: Files are missing or of a family that cannot answer about images or video.
    """
    if isinstance(model, tuple):
        if len(model) != 2:
            raise ModelError(f"model is a tuple of {len(model)}; give (model, processor)")
        return model
    if model is not None and not isinstance(model, (str, Path)):
        raise ModelError(
            f"model is a {type(model).__name__}; give a directory, a hub id or (model, processor)"
        )
    where, place, kind = str(model or embedded_path()), pick_device(device), pick_dtype(dtype)
    _check_directory(where)
    return _from_pretrained(where, place, kind)


def _check_directory(where: str) -> None:
    path = Path(where)
    if not path.exists():
        if where.startswith((".", "/", "~")) or where.count("/") != 1:
            raise ModelError(
                f"model directory {where!r} does not exist; give a directory or a hub id"
            )
        return
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{where!r} holds no config.json; give the directory of a saved checkpoint"
        )


def _from_pretrained(where: str, device: torch.device, dtype: torch.dtype | str) -> tuple[Any, Any]:
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(where, trust_remote_code=False)
        model = _class_of(where).from_pretrained(
            where, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"cannot load model {where!r}: {reason}") from error
    return model.to(device).eval(), processor


def _class_of(where: str) -> Any:
    """The class that answers: of a Qwen2.5-Omni checkpoint, which can speak, too, the thinker."""
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        Qwen2_5OmniThinkerForConditionalGeneration,
    )

    config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    if config.model_type == "qwen2_5_omni":
        return Qwen2_5OmniThinkerForConditionalGeneration
    return AutoModelForImageTextToText
