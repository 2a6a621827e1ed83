"""What travels between encoding, prefill and decoding: plain tensors and values, all picklable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mmfast.serve.engine.base import Media, Request, Sampling


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request as its model's processor writes it.

    Attributes:
        request: The request.
        inputs: What the processor returned: ids `[1, L]`, pixels, grids.
        media: Images and clips by kind, in the order of their pixels.
        reduce: Spec string of reducers at site `pre`; None reduces nothing.
        ms: Milliseconds that it took.
    """

    request: Request
    inputs: dict[str, Any]
    media: dict[str, tuple[Media, ...]]
    reduce: str | None
    ms: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompt before anything is reduced."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True, eq=False)
class Embedded:
    """A prompt as the language model gets it, m tokens.

    Attributes:
        embeds: `[m, D]`.
        positions: `[A, m]` int64, the original ones; A is 1, or 3 under M-RoPE.
        blocks: Hash of everything up to the end of each block of `BLOCK` tokens.
        visual: `[m]` bool where there are DeepStack planes; None elsewhere.
        planes: DeepStack features `[visual tokens, D]` each.
        whole: Token ids `[L]` of the prompt before it was reduced, as `generate` would get it.
        reused: Tokens of `whole` whose encoding was reused.
        visual_tokens: Visual tokens before reduction.
        kept_tokens: Visual tokens behind it.
        rows: Rows of the trace so far.
        reductions: Of `Trace.to_dict()`.
    """

    embeds: Tensor
    positions: Tensor
    blocks: tuple[bytes, ...] = ()
    visual: Tensor | None = None
    planes: tuple[Tensor, ...] = ()
    whole: Tensor | None = None
    reused: int = 0
    visual_tokens: int = 0
    kept_tokens: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    reductions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens m."""
        return int(self.embeds.shape[0])

    @property
    def whole_length(self) -> int:
        """Tokens before it was reduced."""
        return self.length if self.whole is None else len(self.whole)

    @property
    def told(self) -> dict[str, Any]:
        """What the trace says of it; holds no tensor."""
        names = ("rows", "reductions", "visual_tokens", "kept_tokens")
        return {**{name: getattr(self, name) for name in names}, "prompt": self.length}


@dataclass(frozen=True, eq=False)
class Filled:
    """A prompt behind prefill.

    Attributes:
        kv: Keys and values per decoder layer, `[2, H, m, d]`.
        position: `[A]` int64 of the first token of the answer.
        logits: `[V]` float32 at the end of the prompt.
        reused: Tokens of the prompt whose keys and values were there before.
        seen: Distinct token ids of prompt, for repetition penalties; None where there is none.
    """

    kv: tuple[Tensor, ...]
    position: Tensor
    logits: Tensor
    reused: int = 0
    seen: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens m."""
        return int(self.kv[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(each.nbytes for each in self.kv)


@dataclass(frozen=True)
class Draw:
    """How one token of one answer is chosen.

    Attributes:
        sampling: Its seed is set.
        step: Number of the token in the answer, from 0.
    """

    sampling: Sampling
    step: int = 0
