"""Prompts as embeddings, and what makes the beginnings of two prompts the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.models.records import flat
from mmfast.serve.engine.media import Known, Unit

BLOCK = 16  # tokens; beginnings are compared in steps of these


def embedded(
    model: Any, rest: Mapping[str, Any], whole: Mapping[str, Any], named: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The fields of `Embedded` that the language model reads.

    Args:
        model: The model.
        rest: Inputs as `compress` returns them, of one prompt.
        whole: Encoder outputs before reduction, by kind.
        named: Identity `[n]` int64 of each feature by kind; without one, its bytes are hashed.
    """
    base, ids = model.base_model, rest["input_ids"][0]
    outputs = rest.get("mm_encoder_outputs") or {}
    embeds: Tensor | None = rest.get("inputs_embeds")
    joint = torch.zeros_like(ids, dtype=torch.bool)
    marks = ids.clone()
    hidden = base.get_input_embeddings()(ids) if embeds is None else embeds[0]
    planes: list[Tensor] = []
    for kind, output in (outputs or whole).items():
        place = ids == getattr(base.config, f"{kind}_token_id")
        features = flat(output.pooler_output).to(hidden)
        if embeds is None:
            hidden = hidden.masked_scatter(place[:, None], features)
        marks[place] = named[kind] if kind in named else hashes(hidden[place])
        for i, plane in enumerate(getattr(output, "deepstack_features", None) or ()):
            if len(planes) <= i:
                planes.append(torch.zeros_like(hidden))
            planes[i][place] = flat(plane).to(hidden)
        joint |= place
    positions = axes(model, rest["position_ids"], len(ids))
    return {
        "embeds": hidden,
        "positions": positions,
        "blocks": chain(marks, positions),
        "visual": joint if planes else None,
        "planes": tuple(plane[joint] for plane in planes),
    }


def axes(model: Any, positions: Tensor, length: int) -> Tensor:
    """Positions `[A, m]` of one prompt, from `[1, m]`, `[3, 1, m]` or `[4, 1, m]`."""
    wide = hasattr(getattr(model.get_decoder(), "rotary_emb", None), "mrope_section")
    if positions.ndim == 3:
        positions = positions[-3:, 0]
    if positions.shape[0] == 1 and wide:
        positions = positions.expand(3, -1)
    return positions[:, -length:].contiguous()


def identities(
    mine: Sequence[Unit], parts: Mapping[str, Sequence[Known]], reduce: str | None
) -> dict[str, Tensor]:
    """Identity `[n]` of each feature by kind; nothing where features are reduced."""
    found: dict[str, Tensor] = {}
    for kind, known in () if reduce else parts.items():
        keys = [unit.key for unit in mine if unit.kind == kind]
        rows = [
            _digest(repr(key).encode()) + torch.arange(len(each.features))
            for key, each in zip(keys, known, strict=True)
        ]
        found[kind] = torch.cat(rows).to(known[0].features.device)
    return found


def hashes(rows: Tensor) -> Tensor:
    """A number per row `[n, D]`, from its bytes; `[n]` int64."""
    data = rows.contiguous().view(torch.uint8).cpu().numpy()
    return torch.tensor([_digest(row.tobytes()) for row in data], device=rows.device).long()


def chain(marks: Tensor, positions: Tensor) -> tuple[bytes, ...]:
    """Hash of everything up to the end of each block of a prompt.

    Args:
        marks: `[m]` int64 what each token is.
        positions: `[A, m]` int64 where it stands.
    """
    data = torch.cat([marks[None], positions]).T.contiguous().cpu().numpy()
    found, before = [], b""
    for stop in range(BLOCK, len(data) + 1, BLOCK):
        piece = data[stop - BLOCK : stop].tobytes()
        before = hashlib.blake2b(before + piece, digest_size=16).digest()
        found.append(before)
    return tuple(found)


def _digest(data: bytes) -> int:
    # 62 bits: counting on from it stays an int64.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 2
