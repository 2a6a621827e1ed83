"""Loading a checkpoint: the embedded one, a directory or a hub id, safetensors only."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import ModelError, unknown
from mmfast.core.speech import Codec
from mmfast.frontends.codecs.checkpoints import dac_codec, encodec_codec, mimi_codec

EMBEDDED = "tiny-video"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def embedded_path(name: str = EMBEDDED) -> Path:
    """Directory of an embedded checkpoint; ModelError where the package came without it."""
    path = Path(str(files("mmfast.assets").joinpath(f"models/{name}")))
    if not (path / "config.json").is_file():
        raise ModelError(f"embedded model {name!r} is missing at {path}; reinstall mmfast")
    return path


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for (ModelError if it is not there), or CUDA if there is one, or the CPU."""
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
    """A dtype by name or as it is; ModelError for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelError(unknown("dtype", dtype, DTYPES))
    return dtype if dtype == "auto" else getattr(torch, dtype)


def load(
    model: Any, device: str | torch.device | None, dtype: str | torch.dtype
) -> tuple[Any, Any]:
    """Load `(model, processor)`, the model in evaluation mode on its device.

    `model` is None (embedded), a directory, a hub id, or such a pair, which is used as it is.
    ModelError where files are missing or the family cannot answer about images or video.
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


EMBEDDED_CODEC = "tiny-speech"
CODECS: dict[str, Callable[..., Any]] = {
    "mimi": mimi_codec,
    "encodec": encodec_codec,
    "dac": dac_codec,
}


def load_codec(
    source: Any = EMBEDDED_CODEC,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    **options: Any,
) -> Codec:
    """A codec, ready to stream: "tiny-speech" (embedded), a directory, a hub id, or a model.

    A loaded one goes to CUDA where there is one, in float32 for exactness; a model stays where it
    is. Options are `codebooks` (how many to encode to) and `lookahead` (DAC: frames). ModelError
    where it cannot be loaded, is of another kind, or does not take the options.
    """
    if isinstance(source, (str, Path)):
        if str(source) == EMBEDDED_CODEC:
            return _embedded(options)
        source = _load(str(source), device, dtype)
    kind = str(getattr(getattr(source, "config", None), "model_type", type(source).__name__))
    if kind not in CODECS:
        raise ModelError(unknown("codec", kind, [*CODECS, EMBEDDED_CODEC]))
    allowed = ["codebooks", "lookahead"] if kind == "dac" else ["codebooks"]
    for name in options:
        if name not in allowed:
            raise ModelError(unknown(f"option of codec {kind}", name, allowed))
    codec: Codec = CODECS[kind](source.eval(), **options)
    return codec


def _embedded(options: dict[str, Any]) -> Codec:
    if options:
        raise ModelError(f"codec {EMBEDDED_CODEC!r} takes no options, given: {', '.join(options)}")
    embedded = import_module("mmfast.frontends.codecs.embedded.codec")
    codec: Codec = embedded.load_embedded()
    return codec


def _load(where: str, device: str | torch.device | None, dtype: str | torch.dtype) -> Any:
    from transformers import AutoConfig, DacModel, EncodecModel, MimiModel

    classes = {"mimi": MimiModel, "encodec": EncodecModel, "dac": DacModel}
    place, kind = pick_device(device), pick_dtype(dtype)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        if config.model_type not in classes:
            raise ModelError(unknown("codec", config.model_type, [*classes, EMBEDDED_CODEC]))
        model: Any = classes[config.model_type].from_pretrained(
            where, dtype=kind, use_safetensors=True
        )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"cannot load codec {where!r}: {reason}") from error
    return model.to(place)


def device_name(device: torch.device) -> str:
    """The accelerator's product name, or the processor's; never the name of a machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
