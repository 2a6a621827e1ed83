"""Attention back ends of stock models by name: `attn="flash_attention_2"` and its kin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mmfast.core.errors import ModelError, unknown
from mmfast.models.wrappers import stock_model

# Each back end, and what it needs beside torch: a check of transformers, and how to get it.
BACKENDS: dict[str, tuple[str, str] | None] = {
    "sdpa": None,
    "eager": None,
    "flash_attention_2": ("is_flash_attn_2_available", "flash-attn"),
    "flash_attention_3": ("is_flash_attn_3_available", "flash-attn-3"),
    "flex_attention": ("is_torch_flex_attn_available", "torch"),
}


def check_attn(name: str | None) -> str | None:
    """Return the name of a back end that is installed here.

    Raises:
        ModelError: An unknown name, or one whose package or device is missing.
    """
    if name is None:
        return None
    if not isinstance(name, str) or name not in BACKENDS:
        raise ModelError(unknown("attn", name, BACKENDS))
    needs = BACKENDS[name]
    if needs is None:
        return name
    from transformers import utils

    check, package = needs
    if getattr(utils, check)():
        return name
    device = "" if torch.cuda.is_available() else " and a CUDA device, of which there is none"
    raise ModelError(
        f"attn={name!r} needs {package}, which is not installed{device}; "
        f"pip install {package}, or use attn='sdpa'"
    )


def with_attn(model_kwargs: Any, attn: str | None, model: Any = None) -> Any:
    """Return the arguments of `from_pretrained` with the back end among them.

    Raises:
        ModelError: As `check_attn`; a model that is loaded already, or another back end beside it.
    """
    if check_attn(attn) is None:
        return model_kwargs
    if model is not None and not isinstance(model, str) and not hasattr(model, "__fspath__"):
        raise ModelError(
            f"attn={attn!r} would change the {type(stock_model(model)).__name__} given; call its "
            f"set_attn_implementation({attn!r}), or mmfast.attach(model, attn={attn!r})"
        )
    if (model_kwargs or {}).get("attn_implementation", attn) != attn:
        other = model_kwargs["attn_implementation"]
        raise ModelError(
            f"attn={attn!r} and attn_implementation={other!r} are both given; give one"
        )
    return {**(model_kwargs or {}), "attn_implementation": attn}


@contextmanager
def attention_by(model: Any, attn: str) -> Iterator[None]:
    """Let a model and its parts compute attention by this back end.

    Raises:
        ModelError: As `check_attn`, or the model does not support it.
    """
    check_attn(attn)
    if not hasattr(model, "set_attn_implementation"):
        raise ModelError(f"{type(model).__name__} is no model of transformers; leave out attn=")
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [
        (config, config._attn_implementation)
        for config in configs.values()
        if hasattr(config, "_attn_implementation")
    ]
    try:
        model.set_attn_implementation(attn)
    except (ValueError, ImportError) as error:
        _restore(before)
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{type(model).__name__} has no attn={attn!r}: {reason}") from error
    try:
        yield
    finally:
        _restore(before)


def _restore(before: list[tuple[Any, Any]]) -> None:
    for config, name in before:
        config._attn_implementation = name
