"""Keys and values in the manner of CacheGen (arXiv 2310.07240): differences, few bits, entropy.

Tokens near each other have keys and values near each other. So every sixteenth token is an anchor,
the others are differences from theirs, and differences are rounded to steps that each channel has
of its own: finer in the first layers, whose errors all later ones read. zlib packs the codes,
channel by channel. Other than there, its Huffman codes stand in for an arithmetic coder.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.kv import KVBlock
from mmfast.streams.archive.files import TornFileError, value

ANCHOR = 16  # tokens from anchor to anchor
BITS = range(3, 9)
_FINE = 127  # steps of anchors on each side of zero


@value
@dataclass(frozen=True, eq=False)
class CodedTensor:
    """Keys or values `[H, n, d]` of one layer: packed codes, and steps `[H, 1, d]` of channels."""

    codes: Tensor  # `[bytes]` uint8
    coarse: Tensor  # steps of the anchors
    fine: Tensor  # steps of the differences
    shape: tuple[int, int, int]
    dtype: str


def layer_bits(bits: int, layer: int, layers: int) -> int:
    """Bits of a layer: two more in the first third of them, one more in the second, 8 at most."""
    return min(8, bits + 2 - 3 * layer // layers)


def coded(x: Tensor, bits: int) -> CodedTensor | Tensor:
    """Code `x` `[H, n, d]`; no number is further away than half a step, and its own rounding."""
    wide = x.float().cpu()
    if not wide.numel() or not bool(wide.isfinite().all()):
        return x
    anchors = wide[:, ::ANCHOR]
    coarse = _step(anchors, _FINE)
    near = (anchors / coarse).round()
    rest = wide - _spread(near * coarse, x.shape[1])
    most = 2 ** (bits - 1) - 1
    fine = _step(rest, most)
    codes = (rest / fine).round().clamp(-most, most)
    columns = torch.cat([near, codes], 1).to(torch.int8).transpose(1, 2).contiguous()
    packed = bytearray(zlib.compress(columns.numpy().tobytes(), 6))
    heads, n, width = x.shape
    data, dtype = torch.frombuffer(packed, dtype=torch.uint8), str(x.dtype).removeprefix("torch.")
    return CodedTensor(data, coarse, fine, (heads, n, width), dtype)


def decoded(part: Any) -> Any:
    """Return the numbers that a coded tensor stands for; TornFileError where codes are missing.

    Whatever is not coded is returned as it is.
    """
    if not isinstance(part, CodedTensor):
        return part
    heads, n, width = part.shape
    first = -(-n // ANCHOR)
    try:
        data = bytearray(zlib.decompress(part.codes.cpu().numpy().tobytes()))
        flat = torch.frombuffer(data, dtype=torch.int8)
        columns = flat.view(heads, width, first + n).transpose(1, 2).float()
    except (zlib.error, RuntimeError, ValueError) as error:
        raise TornFileError(f"holds keys and values that cannot be unpacked ({error})") from None
    near, rest = columns.split([first, n], 1)
    found: Tensor = _spread(near * part.coarse.cpu(), n) + rest * part.fine.cpu()
    return found.to(getattr(torch, part.dtype))


def _step(x: Tensor, most: int) -> Tensor:
    """Return the step `[H, 1, d]` of every channel, of which `most` reach its largest number."""
    step = x.abs().amax(1, keepdim=True) / most
    return step.masked_fill(step == 0, 1)


def _spread(anchors: Tensor, n: int) -> Tensor:
    return anchors.repeat_interleave(ANCHOR, 1)[:, :n]


def with_coded(tree: Any, bits: int) -> Any:
    """Code all blocks of keys and values in a tree of dicts and lists."""
    if isinstance(tree, KVBlock):
        count = len(tree.keys)
        each = [layer_bits(bits, layer, count) for layer in range(count)]
        keys, values = (
            tuple(
                coded(x, b) if isinstance(x, Tensor) else x for x, b in zip(part, each, strict=True)
            )
            for part in (tree.keys, tree.values)
        )
        return replace(tree, keys=keys, values=values)
    if isinstance(tree, dict):
        return {name: with_coded(part, bits) for name, part in tree.items()}
    return [with_coded(part, bits) for part in tree] if isinstance(tree, list) else tree


def with_decoded(tree: Any) -> Any:
    """Undo `with_coded`, but for what was rounded."""
    if isinstance(tree, KVBlock):
        keys, values = (tuple(map(decoded, part)) for part in (tree.keys, tree.values))
        return replace(tree, keys=keys, values=values)
    if isinstance(tree, dict):
        return {name: with_decoded(part) for name, part in tree.items()}
    return [with_decoded(part) for part in tree] if isinstance(tree, list) else tree


def has_coded(tree: Any) -> bool:
    """Tell whether anything in a tree was coded, so that its size follows the bits."""
    if isinstance(tree, KVBlock):
        return any(isinstance(part, CodedTensor) for part in (*tree.keys, *tree.values))
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return any(map(has_coded, parts))
