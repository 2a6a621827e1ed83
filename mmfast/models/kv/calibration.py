"""Patterns of the heads of a model, found once by a few prompts and stored beside the model.

Two facts about each key head: the direction that its queries share, which `qfilter` projects keys
on, and how much its output needs what lies far back, by which `duo_attention` tells retrieval heads
from those that stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.models.reduction.probe import bias_of, probing, softmax_rows
from mmfast.models.wrappers import KEEPS_ALL, attention_at, base_of, decoder_of, kind_of, layers_of

FILE = "mmfast_heads.safetensors"
FILTER, REACH = "query_filter", "query_reach"
SIGNALS = {FILTER, REACH}
# By attention module: the signals of its layer.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
_ROWS = 64  # queries compared at once


@dataclass(frozen=True, eq=False)
class HeadPatterns:
    """Facts about the key heads of the layers of full attention of a model, by decoder layer.

    Attributes:
        filters: `[Hkv, d]` the common direction of the queries that read a head, mean over them.
        reach: `[Hkv]` relative change of what a head gives where only its first and recent tokens
            are seen: large in a head that retrieves, small in one that streams.
    """

    filters: Mapping[int, Tensor]
    reach: Mapping[int, Tensor]

    def save(self, home: str | Path) -> Path:
        """Write them beside a model, into its folder `home`."""
        path = Path(home) / FILE
        tensors = {f"filter.{i}": x.contiguous() for i, x in self.filters.items()}
        tensors |= {f"reach.{i}": x.contiguous() for i, x in self.reach.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
        return path

    @classmethod
    def load(cls, home: str | Path) -> HeadPatterns:
        """Read those of a folder; ModelError where there are none, or the file is damaged."""
        path = Path(home) / FILE
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"cannot read {str(path)!r} ({error}); make it with mmfast.calibrate_heads"
            ) from None
        parts: dict[str, dict[int, Tensor]] = {"filter": {}, "reach": {}}
        for name, value in found.items():
            kind, _, index = name.partition(".")
            if kind not in parts or not index.isdigit():
                raise ModelError(f"{str(path)!r} has {name!r}, which is no pattern; make it anew")
            parts[kind][int(index)] = value
        return cls(parts["filter"], parts["reach"])

    def use(self, model: Any) -> None:
        """Give them to a model; ModelError where its layers or heads are others."""
        modules = _modules(model)
        heads = {i: len(x) for i, x in self.reach.items()}
        if {*modules} != {*heads} or any(
            heads[i] != int(getattr(module.config, "num_key_value_heads", heads[i]) or heads[i])
            for i, module in modules.items()
        ):
            raise ModelError(
                f"head patterns of layers {sorted(heads)} do not fit a model with layers "
                f"{sorted(modules)}; calibrate this model with mmfast.calibrate_heads"
            )
        every = torch.cat([self.reach[i] for i in sorted(modules)]).double()
        order = every.argsort(descending=True, stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        start = 0
        for index in sorted(modules):
            stop = start + heads[index]
            rank = (place[start:stop].double() + 1) / len(order)
            _KNOWN[modules[index]] = {FILTER: self.filters[index], REACH: rank}
            start = stop


def known_heads(needs: Iterable[str], module: Any) -> dict[str, Tensor]:
    """Signals on the heads of one attention module, of those that a policy needs.

    `query_filter` is `[Hkv, d]`; `query_reach` `[Hkv]` is the share of the heads of the model that
    retrieve no less than this one.
    """
    wanted = SIGNALS & set(needs)
    if not wanted:
        return {}
    found, device = _KNOWN[module], next(module.parameters()).device
    return {name: found[name].to(device) for name in wanted}


def require_heads(model: Any, policy: str) -> None:
    """Find the patterns of a model, in its folder if need be; ModelError where there are none."""
    if all(module in _KNOWN for module in _modules(model).values()):
        return
    home = str(getattr(model, "name_or_path", "") or "")
    if not home or not (Path(home) / FILE).is_file():
        raise ModelError(
            f"{policy} reads patterns of the heads, which this model has none of; call "
            "mmfast.calibrate_heads(model), or 'mmfast calibrate' on its folder"
        )
    HeadPatterns.load(home).use(model)


def calibrate_heads(
    model: Any,
    prompts: Iterable[Mapping[str, Any]] | None = None,
    *,
    save: str | Path | None = None,
    sink: int = 4,
    recent: int = 32,
    count: int = 4,
    length: int = 256,
    seed: int = 0,
) -> HeadPatterns:
    """Find the patterns of the heads of a model, which `qfilter` and `duo_attention` read.

    Args:
        model: A stock model of transformers, of text or with media.
        prompts: Inputs of the model, each a mapping as a processor makes it, one row each. None
            makes `count` prompts of `length` tokens drawn by chance, whose second half repeats the
            first: a head that retrieves looks half a prompt back there.
        save: Folder to write `mmfast_heads.safetensors` to, as a rule that of the model; `attach`
            finds it there.
        sink: First tokens that a streaming head sees.
        recent: Recent tokens that a streaming head sees.
        count: Prompts that are made.
        length: Tokens of each.
        seed: Seed of the draw, made on the CPU.

    Returns:
        The patterns, which the model knows from now on.

    Raises:
        ModelError: A model without layers of full attention, no prompt, or made ones too short.
    """
    if prompts is None and length < (least := 4 * (sink + recent)):
        raise ModelError(
            f"length={length}: half a prompt back is within what streaming heads see; give {least}"
        )
    modules = _modules(model)
    sums = {index: _Sums(sink, recent) for index in modules}
    hooks: Any = {module: partial(sums[index].look) for index, module in modules.items()}
    given = _drawn(model, count, length, seed) if prompts is None else prompts
    with torch.no_grad(), probing(hooks):
        for each in given:
            base_of(model)(**each, use_cache=False)
    if not modules or any(not each.count for each in sums.values()):
        raise ModelError("no layer of full attention has read a prompt; give one prompt or more")
    found = HeadPatterns(
        {index: each.filters() for index, each in sums.items()},
        {index: (each.reach / each.count).float().cpu() for index, each in sums.items()},
    )
    found.use(model)
    if save is not None:
        found.save(save)
    return found


class _Sums:
    """Sums over the queries of one layer."""

    def __init__(self, sink: int, recent: int) -> None:
        self._sink, self._recent = sink, recent
        self.gram: Any = 0.0
        self.total: Any = 0.0
        self.reach: Any = 0.0
        self.count = 0

    def look(
        self,
        _: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: Any,
        causal: Any,
    ) -> None:
        """Add the queries `[1, H, L, d]` of a prompt."""
        rows = query[:1].double()[0]
        self._heads = key.shape[1]
        self.gram = self.gram + rows.transpose(1, 2) @ rows
        self.total = self.total + rows.sum(1)
        length, size = query.shape[2], key.shape[2]
        # Early queries see no more than a streaming head does.
        for places in torch.arange(length // 2, length, device=query.device).split(_ROWS):
            bias = bias_of(mask, query[:1], key[:1], places, causal, 0)
            weights = softmax_rows(query[:1, :, places], key[:1], bias, scaling)[0]  # [H, c, S]
            seen = torch.arange(size, device=key.device)[None]
            here = (places + size - length)[:, None]
            near = (seen < self._sink) | (seen > here - self._recent)
            part = weights * near
            part = part / part.sum(-1, keepdim=True).clamp_min(1e-12)
            rows_of = value[0].float().repeat_interleave(len(weights) // self._heads, 0)
            full, less = weights @ rows_of, part @ rows_of
            change = (full - less).norm(dim=-1) / full.norm(dim=-1).clamp_min(1e-12)
            self.reach = self.reach + change.double().sum(-1).unflatten(0, (self._heads, -1)).mean(
                1
            )
            self.count += len(places)

    def filters(self) -> Tensor:
        """First right singular vector of the queries of each head, towards their mean."""
        vectors = torch.linalg.eigh(self.gram).eigenvectors[..., -1]  # [H, d]
        sign = (vectors * self.total).sum(-1, keepdim=True).sign()
        found: Tensor = (vectors * torch.where(sign == 0, 1.0, sign)).unflatten(
            0, (self._heads, -1)
        )
        return found.mean(1).float().cpu()


def _modules(model: Any) -> dict[int, nn.Module]:
    """Attention modules of the layers that keep everything, by decoder layer."""
    text = decoder_of(model)
    found = {
        index: attention_at(text, index)
        for index in range(len(layers_of(text)))
        if kind_of(text.config, index) in KEEPS_ALL
    }
    return {index: module for index, module in found.items() if module is not None}


def _drawn(model: Any, count: int, length: int, seed: int) -> Iterable[dict[str, Tensor]]:
    """Prompts of tokens drawn by chance, the second half like the first."""
    config = model.config
    special = {
        int(value)
        for part in (config, config.get_text_config())
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    known = torch.tensor(
        [i for i in range(config.get_text_config().vocab_size) if i not in special]
    )
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    for _ in range(count):
        half = known[torch.randint(len(known), (1, length // 2), generator=generator)]
        yield {"input_ids": torch.cat([half, half], 1).to(device)}
