"""Cache layers that report logical lengths, and what is done to caches between calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from mmfast.core.errors import ModelError
from mmfast.models.reduction.cache_layers import extend, is_short, padding_mask, shorten


def filled(valid: list[list[bool]], dropped: int) -> DynamicCache:
    cache = DynamicCache()
    layer = shorten(cache, 0)
    extend(layer, None, torch.tensor(valid))
    layer.dropped = dropped
    rows, length = len(valid), len(valid[0])
    cache.update(torch.randn(rows, 1, length, 2), torch.randn(rows, 1, length, 2), 0)
    return cache


def test_lengths_and_masks_of_a_dynamic_layer() -> None:
    cache = filled([[False, True, True], [True, True, True]], dropped=4)
    layer = cache.layers[0]
    assert cache.get_seq_length() == 7 and layer.keys.shape[2] == 3
    assert cache.get_mask_sizes(2, 0) == (5, 4)
    mask = padding_mask(layer, 2)
    assert mask is not None and mask.shape == (2, 9)
    assert mask[0].tolist() == [False] * 5 + [True] * 4
    assert mask[1].tolist() == [False] * 4 + [True] * 5


def test_rows_and_crops_take_the_padding_along() -> None:
    cache = filled([[False, True, True], [True, True, True]], dropped=4)
    layer = cache.layers[0]

    def padding() -> list[bool]:
        valid: Tensor = layer.valid
        return valid[:, 0].tolist()

    cache.reorder_cache(torch.tensor([1, 0]))
    assert padding() == [True, False]
    cache.batch_repeat_interleave(2)
    assert padding() == [True, True, False, False]
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert padding() == [False, True]
    cache.crop(-1)
    assert cache.get_seq_length() == 6 and layer.valid.shape == (2, 2)
    cache.reset()
    assert cache.get_seq_length() == 0 and layer.valid is None and layer.dropped == 0


def test_a_static_layer_offsets_its_slots() -> None:
    layer = StaticLayer(max_cache_len=8)
    cache = DynamicCache()
    cache.layers = [layer]
    short = shorten(cache, 0)
    short.dropped = 5
    short.update(torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2))
    assert int(short.get_seq_length()) == 8 and short.get_mask_sizes(1) == (8, 5)
    assert is_short(short) and shorten(cache, 0) is short
    assert type(short).__mro__[2] is StaticLayer


def test_other_caches_stay_stock() -> None:
    filled([[True]], dropped=2)
    fresh = DynamicCache()
    fresh.update(torch.randn(1, 1, 3, 2), torch.randn(1, 1, 3, 2), 0)
    assert type(fresh.layers[0]) is DynamicLayer and fresh.get_seq_length() == 3


def test_a_sliding_window_counts_what_went_in() -> None:
    """Window 4 over 5 tokens that stand for 7: the last 3 are held, at their logical places."""
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(4)]
    layer = shorten(cache, 0)
    extend(layer, None, torch.tensor([[False, False, False, True, True]]))
    layer.dropped = 2
    layer.update(torch.randn(1, 1, 5, 2), torch.randn(1, 1, 5, 2))
    assert layer.get_seq_length() == 7 and layer.keys.shape[2] == 3
    assert layer.get_mask_sizes(1) == (4, 4)  # keys at places 4 to 7
    mask = padding_mask(layer, 1)
    assert mask is not None and mask[0, 4:].tolist() == [False, True, True, True]


def test_a_layer_without_keys_is_refused() -> None:
    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer()]
    with pytest.raises(ModelError, match="LinearAttentionLayer"):
        shorten(cache, 0)
