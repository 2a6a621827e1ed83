"""The blocks of a vision tower taken apart: norm, projections, attention, MLP on chosen rows."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.models.towers import Tower, attention_of

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Names:
    """How one kind of block calls its parts; `project` is one name, or those of q, k and v."""

    norm1: str
    attn: str
    project: tuple[str, ...]
    out: str
    norm2: str
    scales: tuple[str, ...] = ()


_SPLIT = ("q_proj", "k_proj", "v_proj")
# SigLIP, CLIP, Idefics3, SmolVLM and SigLIP2; InternVL; Qwen; the thinker of Qwen2.5-Omni
_KINDS = (
    Names("layer_norm1", "self_attn", _SPLIT, "out_proj", "layer_norm2"),
    Names(
        "layernorm_before",
        "attention",
        _SPLIT,
        "projection_layer",
        "layernorm_after",
        ("lambda_1", "lambda_2"),
    ),
    Names("norm1", "attn", ("qkv",), "proj", "norm2"),
    Names("norm1", "attn", ("q", "k", "v"), "proj", "norm2"),
)


class Block:
    """One pre-norm block; every method takes any rows `[K, D]`."""

    def __init__(self, block: nn.Module, names: Names) -> None:
        self._block: Any = block
        self._attn: Any = getattr(block, names.attn)
        self._names = names
        self.scale = float(getattr(self._attn, "scaling", None) or self._attn.scale)

    def project(self, rows: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[K, H, d]` of rows `[K, D]`, turned by `rotary`."""
        attn, names = self._attn, self._names
        x = getattr(self._block, names.norm1)(rows)
        if len(names.project) == 1:
            q, k, v = getattr(attn, names.project[0])(x).chunk(3, dim=-1)
        else:
            q, k, v = (getattr(attn, name)(x) for name in names.project)
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, attn.head_dim)) for each in (q, k, v))
        if rotary is not None:
            turn = inspect.unwrap(type(attn).forward).__globals__["apply_rotary_pos_emb_vision"]
            q, k = turn(q, k, *rotary)
        return q, k, v

    def finish(self, rows: Tensor, attended: Tensor) -> Tensor:
        """Rows `[K, D]` behind the block, from what their heads attended, `[K, H, d]`."""
        names = self._names
        step = getattr(self._attn, names.out)(attended.flatten(1))
        rows = rows + self._scaled(step, 0)
        step = self._block.mlp(getattr(self._block, names.norm2)(rows))
        return rows + self._scaled(step, 1)

    def _scaled(self, step: Tensor, index: int) -> Tensor:
        if not self._names.scales:
            return step
        scaled: Tensor = getattr(self._block, self._names.scales[index]) * step
        return scaled


def blocks_of(tower: Tower, family: str) -> list[Block]:
    """The tower's blocks.

    Raises:
        ModelError: They are of no known kind; says what to do.
    """
    kinds = [names for names in _KINDS if all(_fits(block, names) for block in tower.blocks)]
    if not kinds or not len(tower.blocks):
        raise ModelError(
            f"the vision tower of {family!r} ({type(tower.module).__name__}) has no blocks that a "
            "frame cache knows; leave the cache out, or use a SigLIP, CLIP, InternVL or Qwen tower"
        )
    return [Block(block, kinds[0]) for block in tower.blocks]


def _fits(block: nn.Module, names: Names) -> bool:
    if not all(hasattr(block, name) for name in (names.norm1, names.norm2, names.attn, "mlp")):
        return False
    return all(hasattr(attention_of(block), name) for name in (*names.project, names.out))
