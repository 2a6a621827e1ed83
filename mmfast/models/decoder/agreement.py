"""Answers that were given, read by a model again: the tokens that it would have chosen itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode

from mmfast.core.errors import MmfastError, an
from mmfast.models.cache_name import returned_cache
from mmfast.models.decoder.reader import SequenceReader


def check_undrawn(what: str, model: Any, how: Mapping[str, Any]) -> None:
    """Refuse (MmfastError) answers that are drawn, or not written over a plain cache."""
    config = copy.deepcopy(how.get("generation_config") or model.generation_config)
    config.update(**{k: v for k, v in how.items() if v is not None and hasattr(config, k)})
    mode = config.get_generation_mode(how.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH):
        raise MmfastError(
            f"{what} counts the likeliest tokens, and this call is "
            f"{an(mode.value.replace('_', ' '))}; give do_sample=False, or drop the check"
        )
    if config.cache_implementation not in (None, "dynamic"):
        raise MmfastError(
            f"{what} reads answers over a dynamic cache; leave out "
            f"cache_implementation={config.cache_implementation!r}, or drop the check"
        )


def chosen_tokens(generate: Callable[..., Any], answers: Tensor) -> tuple[Tensor, Tensor]:
    """Read answers in one pass behind their prompt; return what the model would have chosen.

    Args:
        generate: Stock `generate` of the model with the prompts and options of the answers.
        answers: Tokens `[B, n]` of the answers, padded behind the end of each.

    Returns:
        The likeliest tokens `[B, n]` at every place behind the answer so far, by the processors of
        `generate`, and a mask `[B, n]` of the places that belong to answers, their end included.
    """
    found: list[Tensor] = []

    def read(
        model: Any, ids: Tensor, logits_processor: Any, generation_config: Any, **kwargs: Any
    ) -> Tensor:
        kwargs.pop("stopping_criteria", None)
        out = model._prefill(ids, generation_config, kwargs)
        logits = out.logits[:, -1:].to(dtype=torch.float32, device=ids.device)
        if answers.shape[1] > 1:
            more = SequenceReader(model, kwargs, returned_cache(out)).read(answers[:, :-1])
            logits = torch.cat([logits, more], 1)
        places = range(answers.shape[1])
        behind = (torch.cat([ids, answers[:, :place]], 1) for place in places)
        scores = [logits_processor(text, logits[:, i]) for i, text in enumerate(behind)]
        ends = generation_config._eos_token_tensor
        over = torch.isin(answers, ends) if ends is not None else torch.zeros_like(answers) > 0
        earlier = over.long().cumsum(1) - over.long()
        found.extend((torch.stack([each.argmax(-1) for each in scores], 1), earlier == 0))
        return ids

    generate(custom_generate=read)
    return found[0], found[1]
