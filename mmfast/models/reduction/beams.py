"""Media of the beams of `generate`: each beam of a prompt has all of them, in their order.

Stock code repeats sounds, and up to transformers 5.17 pictures and clips, one by one: of a prompt
with A and B, three beams get AAABBB, where they read ABABAB. Where a row of the pixels is one item,
rows are put in that order; else, as of tiles, the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import transformers
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import RELEASE
from mmfast.models.encoder_names import encoder_arguments, media_in_chunks
from mmfast.models.families.adapter import Adapter, placeholder
from mmfast.models.families.tower import PIXELS
from mmfast.models.patching import override
from mmfast.models.reduction.record import Record
from mmfast.models.reduction.sequence import whole_pieces

_EXPAND = "_expand_inputs_for_generation"
_OLD = RELEASE < (5, 18)


@contextmanager
def media_of_generate(model: Any, adapter: Adapter) -> Iterator[None]:
    """Give the chunks and the beams of a prompt its media, or refuse them."""
    with media_in_chunks(model), media_of_beams(model, adapter):
        yield


@contextmanager
def media_of_beams(model: Any, adapter: Adapter) -> Iterator[None]:
    """Give the beams of a model the media of their prompts, in their order."""
    own = getattr(type(model), _EXPAND, None)
    # Models with a way of their own mean media, but for thinkers of 5.17, which mean positions.
    thinks = _OLD and hasattr(getattr(model, "config", None), "audio_token_id")
    if own is None or (own is not getattr(transformers.GenerationMixin, _EXPAND) and not thinks):
        yield
        return
    with override(model, _EXPAND, partial(_repeated, model, adapter)):
        yield


def _repeated(model: Any, adapter: Adapter, stock: Callable[..., Any], **given: Any) -> Any:
    ids, out = stock(**given)
    for kind in PIXELS if given.get("expand_size", 1) > 1 and ids is not None else ():
        out |= _in_order(model, adapter, kind, ids, given)
    return ids, out


def _in_order(
    model: Any, adapter: Adapter, kind: str, ids: Tensor, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the media of a kind for the beams `ids` `[B * beams, L]`, where stock code errs."""
    media, token = given.get(PIXELS[kind]), placeholder(model.config, kind)
    if media is None or token is None:
        return {}
    counts, beams, base = (ids == token).sum(1).tolist(), given["expand_size"], model.base_model
    prompts = sum(map(bool, counts)) // beams
    if media.flatten(1).any(1).sum() == prompts:  # one each, without the padding of Idefics3
        return {}
    names = [name for name in encoder_arguments(base, kind) if name in given]
    call = {name: given[name] for name in names}
    layouts = adapter.layout(base, kind, {**call, "input_ids": given["input_ids"]})
    if len(layouts) != len(media):
        raise ModelError(
            f"{beams} beams or answers of a prompt would read the wrong {PIXELS[kind]}: there are "
            f"{len(media)} for {prompts} prompts; leave out num_beams and num_return_sequences, or "
            "use transformers 5.18 or later"
        )
    order = [
        item for item, *_ in whole_pieces(Record(kind, layouts, [{} for _ in layouts]), counts)
    ]
    return {name: each[order] for name, each in call.items() if isinstance(each, Tensor)}
