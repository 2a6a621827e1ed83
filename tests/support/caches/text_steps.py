"""Steps of a stock text model whose heads do not see some entries: what a cut must equal."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.models.cache_name import cache_of
from mmfast.models.wrappers import LayerCall


def hidden_steps(model: Any, ids: Tensor, new: Tensor, visible: dict[int, Tensor]) -> Tensor:
    """Logits of the prompt's end and of steps in a stock cache, entries hidden by head."""
    text = model.get_decoder()
    layers = text.layers if hasattr(text, "layers") else text.h
    cache = DynamicCache(config=model.config)
    logits = [model(ids, past_key_values=cache).logits[0, -1]]
    heads = model.config.num_attention_heads
    with ExitStack() as stack:
        for index, seen in visible.items():
            each = seen.repeat_interleave(heads // len(seen), 0)[None, :, None]
            hook = LayerCall(layers[index]).around(partial(hide, index, each))
            undo = layers[index].register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(undo.remove)
        logits += [
            model(token[None, None], past_key_values=cache).logits[0, -1] for token in new[:-1]
        ]
    return torch.stack(logits)


def hide(index: int, seen: Tensor, module: Any, args: Any, kwargs: Any) -> Any:
    held = cache_of(kwargs).get_seq_length(index)
    whole = torch.nn.functional.pad(seen, (0, held + 1 - seen.shape[-1]), value=True)
    dtype = args[0].dtype
    mask = torch.zeros(whole.shape, dtype=dtype).masked_fill(~whole, torch.finfo(dtype).min)
    return args, {**kwargs, "attention_mask": mask}
