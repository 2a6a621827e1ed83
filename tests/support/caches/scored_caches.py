"""Ragged prompts generated from under a policy, and what its scores in the cache are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmfast.attach import attach


def generated(model: Any, ids: Any, spec: str | None, **options: Any) -> Any:
    """Generate from prompts padded on the left, one token unless told otherwise."""
    n = max(map(len, ids))
    mask = torch.tensor([[0] * (n - len(row)) + [1] * len(row) for row in ids])
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, **options}
    with attach(model, cache=spec):
        return model.generate(
            torch.tensor([[0] * (n - len(row)) + row for row in ids]),
            attention_mask=mask,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )


def noted(cache: Any, name: str, row: int = 0) -> list[Tensor]:
    """Notes of this name of the real entries of a row, by layer."""
    found = []
    for layer in cache.layers:
        real = layer.notes["kind"][row, 0] >= 0
        found.append(layer.notes[name][row][:, real])
    return found


def same(one: Any, other: Any, atol: float = 1e-5) -> None:
    """Hold that two lists of tensors are equal."""
    for mine, its in zip(one, other, strict=True):
        torch.testing.assert_close(mine.float(), torch.as_tensor(its).float(), atol=atol, rtol=0)
