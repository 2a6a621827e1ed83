"""Benchmark of every reducer on the host: operations, largest temporary, processor time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmfast.bench.cases import textured_video
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import device_times, extra_mb, one_thread, spread
from mmfast.core.registry import Method, methods
from mmfast.core.spec import reduce
from mmfast.core.tokens import Tokens

SHAPES = (((32, 14, 14), 1024), ((5, 24, 24), 1024))  # a video, the tiles of an image
_ROUNDS, _SHARE = 5, 0.25
_WORDS, _TILES, _IMAGES = 3, 5, 3


@benchmark("kernels", "reducers")
def reducers(tick: Tick) -> list[Row]:
    """Measure every reducer at a quarter of the tokens on one thread; features take `input_mb`."""
    known = methods("reducer")
    found: list[Row] = []
    for number, (grid, d) in enumerate(SHAPES):
        tokens = all_signals(grid, d)
        with one_thread():
            for place, method in enumerate(known):
                tick(method.name, number * len(known) + place, len(SHAPES) * len(known))
                found.append(_row(method, tokens))
    tick("", 1, 1)
    return sorted(found, key=lambda row: (row["n"], row["median_ms"]), reverse=True)


def _row(method: Method, tokens: Tokens) -> Row:
    call, d = reduction(method, tokens), tokens.x.shape[-1]
    row: Row = {
        "case": f"{method.name}, {tokens.n:,} x {d:,}",
        "method": method.name,
        "device": "cpu",
    }
    row |= {"dtype": "float32", "n": tokens.n, "d": d, "budget": int(_SHARE * tokens.n)}
    row |= {"input_mb": tokens.x.nbytes / 1e6, "threads": 1}
    row |= spread(device_times({"": call}, _ROUNDS, "cpu")[""])
    return row | {"operations": counted(call).count, "extra_mb": extra_mb(call)}


@dataclass
class OperationCount:
    """Operations of torch that ran, and the bytes and name of that with the largest result."""

    count: int = 0
    largest: int = 0
    name: str = ""


class _Counting(TorchDispatchMode):
    def __init__(self, seen: OperationCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.count += 1
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() > self.seen.largest:
                self.seen.largest, self.seen.name = value.untyped_storage().nbytes(), str(func)
        return out


def counted(call: Callable[[], object]) -> OperationCount:
    """Run `call` once and count its operations: the same on every machine under any load."""
    seen = OperationCount()
    with _Counting(seen):
        call()
    return seen


def reduction(method: Method, tokens: Tokens, share: float = _SHARE) -> Callable[[], object]:
    """Return the choice of a share of the tokens, at the method's first site."""
    site = "llm2" if method.sites[0] == "llm" else method.sites[0]
    spec = f"{method.name}@{site}:{max(1, int(share * tokens.n))}"
    return lambda: reduce(tokens, spec)


def all_signals(grid: tuple[int, int, int], d: int, seed: int = 0) -> Tokens:
    """Return a synthetic video with every signal that a reducer may need; keys are 64 wide."""
    clip = textured_video(grid, d, seed)
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
