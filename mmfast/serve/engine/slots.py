"""Memory of running answers: rows of keys and values, and the data between the stages."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.kv import KVBlock
from mmfast.core.spec import Spec, parse
from mmfast.core.trace import free_bytes
from mmfast.planner.target import parse_bytes
from mmfast.serve.engine.base import Media, Request, SamplingOptions
from mmfast.serve.engine.kv.rows import AnswerRow
from mmfast.serve.engine.policies import PromptRecipe

_SHARE = {"cuda": 0.8}  # of the free memory; of others, which other programs use too, a quarter
_FALLBACK = 2 << 30  # where the free memory is unknown


def kv_limit(memory: str | int | None, device: torch.device, sharing: int = 1) -> int:
    """Return the bytes for keys and values: `"2GB"`, or by default a share of the free memory.

    `sharing` counts the workers that share the device, this one included.
    """
    given = parse_bytes(memory)
    if given is not None:
        return given
    free = free_bytes(device)
    return int((_FALLBACK if free is None else free) * _SHARE.get(device.type, 0.25) / sharing)


T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """Return the value with all its tensors on a device; on the CPU, unchanged.

    Tensors are found in dictionaries, lists, tuples and dataclasses.
    """
    return value if device.type == "cpu" else _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: _moved(getattr(value, each.name), device) for each in fields(value)}
        return replace(value, **parts)
    return value


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request after the processor of the model."""

    request: Request
    inputs: dict[str, Any]  # outputs of the processor: ids `[1, L]`, pixels, grids
    media: dict[str, tuple[Media, ...]]  # images and clips by kind, in the order of their pixels
    reduce: str | None  # spec string of reducers at `pixel` and `pre`; None reduces nothing
    ms: float = 0.0  # milliseconds of the processor
    deep: tuple[Spec, ...] = ()  # reducers inside the language model
    cache: str | None = None  # spec string of the KV policy
    inside: Spec | None = None  # reducer inside the vision tower
    view: CachePlan | None = None  # choice of the keys and values on which the model drafts

    @property
    def tower_specs(self) -> list[Spec]:
        """Reducers before and inside the vision tower."""
        before = [spec for spec in parse(self.reduce) if spec.site == "pixel"]
        return before if self.inside is None else [*before, self.inside]

    @property
    def tower(self) -> str:
        """Name of these."""
        return "+".join(map(str, self.tower_specs))

    @property
    def length(self) -> int:
        """Tokens of the prompt before reduction."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True, eq=False)
class Embedded:
    """A prompt of m tokens as the language model reads it."""

    embeds: Tensor
    positions: Tensor  # `[A, m]` int64, the original ones; A is 1, or 3 under M-RoPE
    # hash of everything up to the end of each block of `BLOCK` tokens
    blocks: tuple[bytes, ...] = ()
    visual: Tensor | None = None  # `[m]` bool where there are DeepStack planes; None elsewhere
    planes: tuple[Tensor, ...] = ()  # DeepStack features `[visual tokens, D]` each
    images: Tensor | None = None  # `[m]` image inside which a token sees forward, -1 outside
    recipe: PromptRecipe | None = None  # specs that act in the language model
    # token ids `[L]` of the prompt before it was reduced, as `generate` would get it
    whole: Tensor | None = None
    adapter: str | None = None  # LoRA adapter that reads it
    reused: int = 0  # tokens of `whole` whose encoding was reused
    visual_tokens: int = 0
    kept_tokens: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    reductions: list[dict[str, Any]] = field(default_factory=list)  # of `Trace.to_dict()`
    notes: list[str] = field(default_factory=list)  # of its stages

    @property
    def length(self) -> int:
        """Tokens m."""
        return int(self.embeds.shape[0])

    @property
    def whole_length(self) -> int:
        """Tokens before it was reduced."""
        return self.length if self.whole is None else len(self.whole)

    @property
    def trace(self) -> dict[str, Any]:
        """Entries of the trace, without tensors."""
        names = ("rows", "reductions", "visual_tokens", "kept_tokens", "notes")
        return {**{name: getattr(self, name) for name in names}, "prompt": self.length}


@dataclass(frozen=True, eq=False)
class Filled:
    """A prompt after prefill."""

    kv: KVBlock  # keys and values per decoder layer, `[H, m, d]`
    position: Tensor  # `[A]` int64 of the first token of the answer
    logits: Tensor  # `[V]` float32 at the end of the prompt
    reused: int = 0  # tokens of the prompt whose keys and values were reused
    # token ids `[L]` of the whole prompt, for repetition penalties; None where there are none
    ids: Tensor | None = None
    row: AnswerRow | None = None  # what is left of `kv` behind a policy; None where that is all
    adapter: str | None = None  # LoRA adapter that read it, and answers
    view: AnswerRow | None = None  # the part of it on which the model drafts

    @property
    def length(self) -> int:
        """Tokens m."""
        return int(self.kv.keys[0].shape[1])


@dataclass(frozen=True)
class Draw:
    """Options of choosing one token of one answer."""

    sampling: SamplingOptions
    step: int = 0  # number of the token in the answer, from 0
