"""Names and shapes under which encoders of media take and return what they encode.

LLaVA-OneVision of transformers 5.17 encodes clips of an argument `pixel_values`, which its forward
and every later release call `pixel_values_videos`: here, arguments go by the later name. Its
forward, not its encoder, appends the newline at the end of a clip. Qwen3-VL of 5.17 returns the
DeepStack rows of all media in one tensor, where later releases cut them. And no model of 5.17 takes
features in place of pixels (`mm_encoder_outputs`). Up to 5.22, `generate` leaves the media out of a
prompt that it reads in chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import RELEASE
from mmfast.models.patching import override
from mmfast.models.wrappers import stock_model

NEW, OLD = "pixel_values_videos", "pixel_values"
FEATURES = "mm_encoder_outputs"
# Of a prompt in chunks, which no name of `generate` tells.
_LOSES_MEDIA = RELEASE < (5, 23)
LEGACY = {"pixel_values_images": OLD}  # of the processor of Video-LLaVA


@lru_cache(maxsize=256)  # read once: it takes as long as hashing a prompt
def _read(function: Any, clips: bool) -> tuple[inspect.Signature, bool]:
    found = inspect.signature(function)
    return found, clips and OLD in found.parameters and NEW not in found.parameters


def _signature(base: Any, method: str) -> tuple[inspect.Signature, bool]:
    """Return the signature of a method, and whether it takes clips under the old name."""
    return _read(getattr(type(base), method), method == "get_video_features")


def renamed(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a processor returned under the names that its model takes.

    Raises:
        ModelError: There are pictures for Video-LLaVA, and transformers is older than 5.21.
    """
    if LEGACY.keys() & batch.keys():
        from transformers import VideoLlavaModel

        if OLD not in _read(VideoLlavaModel.forward, False)[0].parameters:
            raise ModelError(
                "pictures of Video-LLaVA are read from transformers 5.21 on; use that, or ask "
                "about videos"
            )
    return {LEGACY.get(name, name): value for name, value in batch.items()}


def encoder_arguments(base: Any, kind: str) -> tuple[str, ...]:
    """Return the names of what a base model takes to encode media of a kind."""
    found, old = _signature(base, f"get_{kind}_features")
    return tuple(NEW if old and name == OLD else name for name in found.parameters)[1:]


def bound_arguments(
    base: Any,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    defaults: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a call of a method of `base` by name, on request with its defaults.

    Raises:
        TypeError: The method takes no such arguments.
    """
    found, old = _signature(base, method)
    if "kwargs" not in found.parameters:  # its decorator takes `return_dict`
        kwargs = {name: value for name, value in kwargs.items() if name != "return_dict"}
    bound = found.bind(base, *args, **kwargs)
    if defaults:
        bound.apply_defaults()
    given = dict(list(bound.arguments.items())[1:])  # without self
    given = {LEGACY.get(name, name): value for name, value in given.items()}
    return {NEW if old and name == OLD else name: value for name, value in given.items()}


def encode_media(base: Any, kind: str, given: Mapping[str, Any], **more: Any) -> Any:
    """Encode media of a kind from arguments that go by the later names; returns what stock does."""
    _, old = _signature(base, f"get_{kind}_features")
    named = {OLD if old and name == NEW else name: value for name, value in given.items()}
    output = getattr(base, f"get_{kind}_features")(**named, **more)
    if hasattr(output, "pooler_output"):
        output.pooler_output = features_of(base, kind, output)
    return output


def features_of(base: Any, kind: str, output: Any) -> Any:
    """Return the features of what a stock encoder returned, as its language model reads them."""
    features = output.pooler_output
    if features is None:  # sounds of Qwen Omni in 5.17
        return output.last_hidden_state
    base = getattr(base, "base_model", base)
    old = _signature(base, f"get_{kind}_features")[1] and hasattr(base, "image_newline")
    if not old or not isinstance(features, Tensor):  # LLaVA-NeXT-Video, in parts, has none
        return features
    newline = base.image_newline.to(features)  # the forward of 5.17 appends it
    return torch.cat([features, newline.expand(len(features), 1, -1)], 1)


def needed_of(stock: Any) -> dict[str, Any]:
    """Return the fields of an encoder's output that another of its class must have, too.

    Ovis2 has the embeddings of its tags there.
    """
    extra = "visual_indicator_features"
    named = [f.name for f in fields(stock) if f.default is MISSING or f.name == extra]
    return {name: getattr(stock, name) for name in named}


def output_of(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Return an encoder output of a class; features of SmolVLM in 5.17 are none of its fields."""
    known = {field.name for field in fields(kind)}
    output = kind(**{name: value for name, value in given.items() if name in known})
    for name in given.keys() - known:
        setattr(output, name, given[name])
    return output


def planes_of(output: Any) -> list[Sequence[Tensor]]:
    """Return the DeepStack planes of an encoder's output, each cut as its features are."""
    planes = getattr(output, "deepstack_features", None) or ()
    return [_cut(each, output) if isinstance(each, Tensor) else each for each in planes]


def _cut(plane: Tensor, output: Any) -> Sequence[Tensor]:
    cut: Sequence[Tensor] = plane.split([len(rows) for rows in output.pooler_output])
    return cut


def takes_features(model: Any) -> bool:
    """Return True if the forward of a model takes features in place of pixels."""
    return FEATURES in _signature(stock_model(model), "forward")[0].parameters


def no_features(base: Any) -> ModelError:
    """Return the error for features in place of pixels where a release takes none."""
    return ModelError(
        f"{type(base).__name__} of transformers {transformers.__version__} takes no features in "
        f"place of pixels ({FEATURES}); give pixels under attach(), or use transformers 5.18 or "
        "later"
    )


@contextmanager
def media_in_chunks(model: Any) -> Iterator[None]:
    """Refuse media in prompts that `generate` reads in chunks, where it would leave them out."""
    if not _LOSES_MEDIA or not hasattr(model, "_prefill"):  # a base model does not generate
        yield
        return
    with override(model, "_prefill", _whole):
        yield


def _whole(
    stock: Callable[..., Any], ids: Any, config: Any, given: dict[str, Any], *args: Any, **more: Any
) -> Any:
    from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL as MEDIA

    size, media = config.prefill_chunk_size, [given.get(name) for name in MEDIA]
    if size is not None and any(each is not None and len(each) for each in media):
        raise ModelError(
            f"prefill_chunk_size={size} loses the media of a prompt before transformers 5.23; "
            "leave out prefill_chunk_size, or use transformers 5.23 or later"
        )
    return stock(ids, config, given, *args, **more)
