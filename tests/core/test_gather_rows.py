"""Rows by index: equal to a gather with an expanded index, whatever the memory looks like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmfast.core.reduction import gather_rows


def plain(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-2, index[..., None].expand(*index.shape, x.shape[-1]))


def chosen(lead: tuple[int, ...], n: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(n, (*lead, count), generator=generator)


def layouts(lead: tuple[int, ...], n: int, width: int) -> dict[str, Tensor]:
    """The same shape as it lies in a buffer, between heads, in a wider row and repeated."""
    wide = torch.randn(*lead, n + 3, width + 5)
    heads = torch.randn(*lead[:-1], n, *lead[-1:], width) if lead else torch.randn(n, width)
    return {
        "contiguous": torch.randn(*lead, n, width),
        "buffer": torch.randn(*lead, n + 7, width)[..., 2 : n + 2, :],
        "columns": wide[..., :n, 2 : width + 2],
        "heads": heads.transpose(-2, -3) if lead else heads,
        "repeated": torch.randn(*lead[:-1], *(1,) * bool(lead), n, width).expand(*lead, n, width),
        "turned": torch.randn(*lead, width, n).transpose(-1, -2),
        "windows": torch.randn(*lead, n + width - 1).unfold(-1, width, 1),
    }


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (1, 4), (2, 1, 3)])
def test_rows_are_those_of_a_gather(lead: tuple[int, ...]) -> None:
    for name, x in layouts(lead, 90, 128).items():
        index = chosen(lead, 90, 70)
        assert gather_rows(x, index).equal(plain(x, index)), name
        assert gather_rows(x, index).is_contiguous(), name
    shared = chosen(lead[:-1] + (1,) * bool(lead), 90, 70).expand(*lead, 70)
    whole = torch.randint(9, (*lead, 90, 128))
    assert gather_rows(whole, shared).equal(plain(whole, shared))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int32])
def test_any_dtype(dtype: torch.dtype) -> None:
    x, index = torch.randint(2, (3, 80, 100)).to(dtype), chosen((3,), 80, 60)
    assert gather_rows(x, index).equal(plain(x, index))


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 4), max_size=3), st.integers(1, 40))
def test_random_shapes(seed: int, lead: list[int], width: int) -> None:
    torch.manual_seed(seed)
    n, count = int(torch.randint(1, 300, ())), int(torch.randint(0, 400, ()))
    x = torch.randn(n, *lead, width).movedim(0, -2)
    index = chosen(tuple(lead), n, count, seed)
    assert gather_rows(x, index).equal(plain(x, index))


def test_gradients_reach_the_rows() -> None:
    x = torch.randn(2, 60, 3, 200, requires_grad=True)
    for view in (x, x.transpose(1, 2)):
        index = chosen(tuple(view.shape[:2]), view.shape[2], 50)
        (expected,) = torch.autograd.grad(plain(view, index).square().sum(), x, retain_graph=True)
        (found,) = torch.autograd.grad(gather_rows(view, index).square().sum(), x)
        torch.testing.assert_close(found, expected)


class IndexReads(TorchDispatchMode):
    """Numbers of index that operations read, a repeated number each time."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count += sum(
                a.numel() for a in args if isinstance(a, Tensor) and a.dtype == torch.long
            )
        return func(*args, **(kwargs or {}))


def test_heads_of_a_cache_are_read_by_rows() -> None:
    """The index of each number, not the copy itself, is what takes a gather its time."""
    x, index = torch.randn(4, 6336, 128), chosen((4,), 6336, 1584)
    with IndexReads() as plainly:
        plain(x, index)
    with IndexReads() as by_rows:
        gather_rows(x, index)
    assert plainly.count == index.numel() * 128
    assert by_rows.count < 4 * index.numel()
