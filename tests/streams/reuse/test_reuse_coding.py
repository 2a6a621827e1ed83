"""Keys and values of a store in few bits: error bounds, size, and no mixing with exact files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.kv import KVBlock
from mmfast.streams.archive.files import TornFileError
from mmfast.streams.reuse.coding import CodedTensor, coded, decoded, layer_bits
from mmfast.streams.reuse.store import ReuseStore, key_of

LAYERS = 6


def _like_keys(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers `[2, n, 8]` that change slowly from token to token, channels of unlike sizes."""
    gen = torch.Generator().manual_seed(seed)
    slow = torch.randn(2, n, 8, generator=gen).mul(0.1).cumsum(1)
    return (slow * torch.logspace(-2, 1, 8) + torch.randn(2, 1, 8, generator=gen)).to(dtype)


def _block(dtype: torch.dtype = torch.float32, n: int = 200) -> KVBlock:
    keys, values = (tuple(_like_keys(n, s + i, dtype) for i in range(LAYERS)) for s in (0, 50))
    return KVBlock(keys, values, torch.arange(n)[None], torch.tensor([n]), (), 3)


@pytest.mark.parametrize("bits", range(3, 9))
@pytest.mark.parametrize("n", [1, 15, 16, 17, 200])
def test_no_number_is_further_away_than_half_a_step_of_its_channel(bits: int, n: int) -> None:
    x = _like_keys(n, bits)
    packed = coded(x, bits)
    assert isinstance(packed, CodedTensor)
    # By hand: the farthest difference of a channel from its rounded anchor, in 2^(bits - 1) - 1.
    anchors = x[:, ::16]
    scale = anchors.abs().amax(1, keepdim=True) / 127
    rounded = (anchors / scale).round() * scale
    far = torch.stack([(x[:, i] - rounded[:, i // 16]).abs() for i in range(n)], 1)
    bound = far.amax(1, keepdim=True) / (2 ** (bits - 1) - 1) / 2
    assert bool(((decoded(packed) - x).abs() <= bound * 1.001 + 1e-6).all())


def test_16_bits_come_back_as_such_and_what_is_not_finite_as_it_is() -> None:
    x = _like_keys(40, 1, torch.bfloat16)
    back = decoded(coded(x, 8))
    assert back.dtype == torch.bfloat16
    torch.testing.assert_close(back.float(), x.float(), rtol=0.02, atol=0.05)
    x[0, 3, 2] = float("nan")
    assert coded(x, 4) is x and decoded(x) is x


def test_first_layers_get_more_bits() -> None:
    assert [layer_bits(4, layer, LAYERS) for layer in range(LAYERS)] == [6, 6, 5, 5, 4, 4]
    assert layer_bits(8, 0, LAYERS) == 8


def test_files_are_smaller_and_errors_fall_with_bits(tmp_path: Path) -> None:
    block, sizes, errors = _block(torch.bfloat16), dict[int, int](), dict[int, float]()
    for bits in (None, 3, 8):
        folder = tmp_path / str(bits)
        store = ReuseStore(folder=folder, bits=bits)
        store.put(key_of("a"), {"block": block, "impact": None})
        store.flush()
        name = 0 if bits is None else bits
        sizes[name] = store.stats()["bytes"]["disk"]
        other = ReuseStore(folder=folder, bits=bits)  # as another process would
        found = other.get(key_of("a"))["block"]
        assert found.number == 3 and torch.equal(found.relative, block.relative)
        pairs = zip((*found.keys, *found.values), (*block.keys, *block.values), strict=True)
        errors[name] = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
        assert store.get(key_of("a"))["block"].keys[0].equal(block.keys[0])  # memory: as it is
    assert errors[0] == 0 < errors[8] < errors[3] / 8
    assert sizes[3] < 0.45 * sizes[0] and sizes[3] < sizes[8] < sizes[0]


def test_what_was_rounded_is_not_taken_for_what_was_not(tmp_path: Path) -> None:
    store = ReuseStore(folder=tmp_path, bits=4)
    store.put(key_of("a"), {"block": _block(), "impact": None})
    store.flush()
    assert ReuseStore(folder=tmp_path).get(key_of("a")) is None
    assert ReuseStore(folder=tmp_path, bits=5).get(key_of("a")) is None
    assert ReuseStore(folder=tmp_path, bits=4).get(key_of("a")) is not None


def test_bits_that_make_no_sense_and_codes_that_are_cut(tmp_path: Path) -> None:
    for given in ({"bits": 2, "folder": tmp_path}, {"bits": 9, "folder": tmp_path}, {"bits": 4}):
        with pytest.raises(MmfastError, match="bits="):
            ReuseStore(**given)  # type: ignore[arg-type]
    packed = coded(_like_keys(20, 0), 4)
    assert isinstance(packed, CodedTensor)
    cut = CodedTensor(packed.codes[:-4], packed.coarse, packed.fine, packed.shape, packed.dtype)
    with pytest.raises(TornFileError):
        decoded(cut)


def test_a_folder_that_is_no_path_is_refused() -> None:
    with pytest.raises(MmfastError, match="folder=5 is not allowed; give the path of a folder"):
        ReuseStore(folder=5)  # type: ignore[arg-type]
