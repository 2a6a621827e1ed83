"""What a reducer costs on the host: operations, largest temporary, processor time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmfast.bench.selection import video
from mmfast.core.registry import Method
from mmfast.core.spec import reduce
from mmfast.core.tokens import Tokens

_WORDS, _TILES, _IMAGES = 3, 5, 3


@dataclass
class Ops:
    """Operations of torch that ran.

    Attributes:
        count: How many.
        largest: Bytes of the largest memory that one of them gave back.
        name: Of that operation.
    """

    count: int = 0
    largest: int = 0
    name: str = ""


class _Counting(TorchDispatchMode):
    def __init__(self, seen: Ops) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.count += 1
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() > self.seen.largest:
                self.seen.largest, self.seen.name = value.untyped_storage().nbytes(), str(func)
        return out


def counted(call: Callable[[], object]) -> Ops:
    """Run `call` once and count: the same on every machine, however loaded it is."""
    seen = Ops()
    with _Counting(seen):
        call()
    return seen


def spec_of(method: Method, budget: int) -> str:
    """The method at its first site with a budget of tokens."""
    site = "llm2" if method.sites[0] == "llm" else method.sites[0]
    return f"{method.name}@{site}:{budget}"


def job(method: Method, tokens: Tokens, share: float = 0.25) -> Callable[[], object]:
    """One choice of a share of the tokens."""
    spec = spec_of(method, max(1, int(share * tokens.n)))
    return lambda: reduce(tokens, spec)


def tokens_of(grid: tuple[int, int, int], d: int, seed: int = 0) -> Tokens:
    """A synthetic video with every signal that a reducer may ask for; keys are 64 wide."""
    clip = video(grid, d, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    scores = ("attn_first", "attn_middle", "attn_visual", "attn_window", "attn_ahead")
    signals = {name: torch.rand(clip.n, generator=generator) for name in scores}
    place = torch.cartesian_prod(*map(torch.arange, grid))
    token = torch.arange(clip.n)
    signals |= {
        "keys": clip.x @ torch.randn(d, 64, generator=generator) / d**0.5,
        "attn_text": torch.rand(clip.n, _WORDS, generator=generator),
        "text_attn": torch.rand(_WORDS, generator=generator),
        "tile": token * _TILES // clip.n,
        "image": token * _IMAGES // clip.n,
        "place": place.reshape(clip.n, 3),
        "pixels": clip.x,
    }
    query = torch.randn(_WORDS, d, generator=generator)
    return Tokens(clip.x, attn=clip.attn, query=query, grid=grid, signals=signals)
