"""Loading a codec: the embedded one, or a transformers checkpoint of Mimi, EnCodec or DAC."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import ModelError, unknown
from mmfast.core.speech import Codec
from mmfast.frontends.codecs.dac import dac_codec
from mmfast.frontends.codecs.encodec import encodec_codec
from mmfast.frontends.codecs.mimi import mimi_codec
from mmfast.models.loading import pick_device, pick_dtype

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
    """A codec, ready to stream.

    Args:
        source: "tiny-speech" (embedded), a directory, a hub id such as "kyutai/mimi", or a
            transformers model, which is used where it is.
        device: Where to put a loaded one; None: CUDA where there is one.
        dtype: Of a loaded one: float32 for exactness.
        **options: `codebooks` (all three: how many to encode to), `lookahead` (DAC: frames).

    Raises:
        ModelError: It cannot be loaded, is of another kind, or does not take the options.
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
    embedded = import_module("mmfast.frontends.codecs.embedded")
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
