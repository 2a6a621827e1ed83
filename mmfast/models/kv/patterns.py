"""Patterns of the heads of a model, stored beside it and looked up by policies.

Facts about each key head: the direction that its queries share, which `qfilter` projects keys on;
how much its output needs what lies far back, by which `duo_attention` tells retrieval heads from
those that stream; and the gate by which `fastkvzip` tells how much it will need a token.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.files import whole_file
from mmfast.models.kv.gates import KeyGate
from mmfast.models.wrappers import attention_at, decoder_of, keeps_all, layers_of

FILE = "mmfast_heads.safetensors"
FILTER, REACH = "query_filter", "query_reach"
SIGNALS = {FILTER, REACH}
# By attention module: the signals of its layer, and its gate.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()
_GATES: weakref.WeakKeyDictionary[nn.Module, KeyGate] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class HeadPatterns:
    """Facts about the key heads of the layers of full attention of a model, by decoder layer.

    Attributes:
        filters: `[Hkv, d]` the common direction of the queries that read a head, mean over them.
        reach: `[Hkv]` relative change of what a head gives where only its first and recent tokens
            are seen: large in a head that retrieves, small in one that streams.
        gates: Of each layer, trained on the scores of `kvzip`; none where they were not asked for.
    """

    filters: Mapping[int, Tensor]
    reach: Mapping[int, Tensor]
    gates: Mapping[int, KeyGate] = field(default_factory=dict)

    def save(self, home: str | Path) -> Path:
        """Write them beside a model, into its folder `home`."""
        path = Path(home) / FILE
        tensors = {f"filter.{i}": x.contiguous() for i, x in self.filters.items()}
        tensors |= {f"reach.{i}": x.contiguous() for i, x in self.reach.items()}
        for index, gate in self.gates.items():
            state = gate.state_dict().items()
            tensors |= {f"gate.{index}.{k}": x.half().cpu().contiguous() for k, x in state}
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as draft:
            save_file(tensors, draft)
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
        gates: dict[int, dict[str, Tensor]] = {}
        try:
            for name, value in found.items():
                kind, index, *rest = name.split(".", 2)
                if kind == "gate":
                    gates.setdefault(int(index), {})[rest[0]] = value
                else:
                    parts[kind][int(index)] = value
            made = {index: KeyGate.of(tensors) for index, tensors in gates.items()}
        except (KeyError, ValueError, IndexError, RuntimeError):
            raise ModelError(f"{str(path)!r} has what is no pattern; make it anew") from None
        return cls(parts["filter"], parts["reach"], made)

    def use(self, model: Any) -> None:
        """Give them to a model; ModelError where its layers or heads are others."""
        modules = read_modules(model)
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
        place = order.argsort()
        start = 0
        for index in sorted(modules):
            stop = start + heads[index]
            rank = (place[start:stop].double() + 1) / len(order)
            _KNOWN[modules[index]] = {FILTER: self.filters[index], REACH: rank}
            start = stop
        if {*self.gates} == {*modules}:
            _GATES.update({module: self.gates[index] for index, module in modules.items()})


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


def require_heads(model: Any, policy: str, gates: bool = False) -> None:
    """Find the patterns of a model, in its folder if need be; ModelError where there are none.

    With `gates` those are needed, too.
    """
    modules, known = [*read_modules(model).values()], _GATES if gates else _KNOWN
    if all(module in known for module in modules):
        return
    home = str(getattr(model, "name_or_path", "") or "")
    if home and (Path(home) / FILE).is_file():
        HeadPatterns.load(home).use(model)
        if all(module in known for module in modules):
            return
    if gates:
        raise ModelError(
            f"{policy} reads gates of the heads, which this model has none of; call "
            "mmfast.calibrate_heads(model, prompts, gates=True), or 'mmfast calibrate --gates' on "
            "its folder"
        )
    raise ModelError(
        f"{policy} reads patterns of the heads, which this model has none of; call "
        "mmfast.calibrate_heads(model), or 'mmfast calibrate' on its folder"
    )


def gates_of(modules: Mapping[int, Any]) -> dict[int, KeyGate]:
    """Gates of attention modules, which `require_heads` has found."""
    return {index: _GATES[module] for index, module in modules.items()}


def read_modules(model: Any) -> dict[int, nn.Module]:
    """Attention modules of the layers that keep everything, by decoder layer."""
    text = decoder_of(model)
    found = {
        index: attention_at(text, index)
        for index in range(len(layers_of(text)))
        if keeps_all(text.config, index)
    }
    return {index: module for index, module in found.items() if module is not None}
