"""`mmfast bench --kernels reducers`: what every reducer costs on one thread of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmfast.bench.kernel_runs import extra_mb, timing
from mmfast.bench.reducer_costs import counted, job, tokens_of
from mmfast.bench.timing import device_times, one_thread
from mmfast.core.registry import methods

SHAPES = (((32, 14, 14), 1024), ((5, 24, 24), 1024))  # a video, the tiles of an image
ROUNDS = 5
_SHARE = 0.25


def rows(tick: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Measure every reducer at a quarter of the tokens.

    Returns:
        A row per reducer and shape: processor milliseconds, operations of torch, and `extra_mb` of
        memory above what was there before, beside `input_mb` of the features.
    """
    known = methods("reducer")
    found: list[dict[str, Any]] = []
    for number, (grid, d) in enumerate(SHAPES):
        tokens = tokens_of(grid, d)
        with one_thread():
            for place, method in enumerate(known):
                tick(method.name, number * len(known) + place, len(SHAPES) * len(known))
                found.append(
                    {
                        "case": f"{method.name}, {tokens.n:,} x {d:,}",
                        "method": method.name,
                        "device": "cpu",
                        "dtype": "float32",
                        "n": tokens.n,
                        "d": d,
                        "budget": int(_SHARE * tokens.n),
                        "input_mb": tokens.x.nbytes / 1e6,
                        "threads": 1,
                        **_measured(job(method, tokens, _SHARE)),
                    }
                )
    tick("", 1, 1)
    return sorted(found, key=lambda row: (row["n"], row["median_ms"]), reverse=True)


def _measured(call: Callable[[], object]) -> dict[str, Any]:
    times = device_times({"": call}, ROUNDS, "cpu")[""]
    return {**timing(times), "operations": counted(call).count, "extra_mb": extra_mb(call)}
