"""Policies of KV memory beside the presses of kvpress: the entries that stay, and what it costs.

kvpress runs in its own environment, on a process of its own that waits while this one works. Both
make the same random weights, read the same prompts with one thread, and report the processor time
that their hooks add to the prompt.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mmfast.attach import attach
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.suites import kvpress_worker
from mmfast.bench.suites.kvpress_worker import entries, keys_of, prompt_of, random_llama
from mmfast.bench.timing import ON_ONE_THREAD, one_thread, paired, spread
from mmfast.core.errors import MmfastError
from mmfast.models.kv.notes import Attention
from mmfast.models.kv.policy import KVStage

LAYERS, TOKENS, KEPT, ROUNDS = 2, 4100, 1000, 5  # of 24 layers with the attention of Qwen2.5-0.5B
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 896,
    "intermediate_size": 64,  # no policy reads it
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_SNAP = {"press": "SnapKVPress", "options": {"window_size": 32, "kernel_size": 1}}
_CHUNKS = {"press": "SnapKVPress", "options": {"window_size": 20, "kernel_size": 1}}
_CUR = {"num_sinks": 4, "use_local_approximation": False}
_LAG = {"n_sink": 4, "lag_size": 128}
_AHEAD = {"n_future_positions": 512, "n_sink": 4}
# Spec of ours, and the press with the options under which it is the same policy.
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    f"knorm:{KEPT}": ("KnormPress", {}),
    f"keydiff:{KEPT}": ("KeyDiffPress", {}),
    f"window:1+tova:{KEPT - 1}": ("TOVAPress", {}),
    f"lagkv:{KEPT}?sink=4&lag=128": ("LagKVPress", _LAG),
    f"snapkv:{KEPT}?kernel=1": ("SnapKVPress", _SNAP["options"]),  # type: ignore[dict-item]
    f"chunkkv:{KEPT}?window=20&chunk=20": ("ChunkKVPress", {"press": _CHUNKS, "chunk_length": 20}),
    f"criticalkv:{KEPT}?kernel=1&first=0.4839": ("CriticalKVPress", {"press": _SNAP}),
    f"curdkv:{KEPT}?sink=4&rank=0": ("CURPress", _CUR),
    f"expected_attention:{KEPT}?sink=4&future=512": ("ExpectedAttentionPress", _AHEAD),
    f"capkv:{KEPT}?sink=4&future=512": ("CapPress", _AHEAD),
    # An odd number of chunks before the window, which is one of theirs, has the same medians.
    f"entropy_chunkkv:{KEPT}?window=10": (
        "EntropyGatedChunkKVPress",
        {"press": {"press": "SnapKVPress", "options": {"window_size": 10, "kernel_size": 1}}},
    ),
}


@benchmark("decode", "kvpress")
def kvpress_rows(tick: Tick, peer: str | None = None) -> list[Row]:
    """Compare each policy with its press; `peer` is a virtual environment with kvpress."""
    if peer is None:
        raise MmfastError(
            "this benchmark needs --peer FOLDER, a virtual environment with kvpress 0.5.5"
        )
    return side_rows(peer, SIZES, TOKENS, KEPT, PAIRS, ROUNDS, tick)


def side_rows(
    peer: str,
    sizes: dict[str, Any],
    tokens: int,
    kept: int,
    pairs: dict[str, tuple[str, dict[str, Any]]],
    rounds: int,
    tick: Tick,
) -> list[Row]:
    """Compare pairs on prompts of `tokens`, of which `kept` stay, in turn and every round anew."""
    model = random_llama(sizes)
    times: dict[str, list[tuple[float, float]]] = {spec: [] for spec in pairs}
    alike: dict[str, list[float]] = {spec: [] for spec in pairs}
    with tempfile.TemporaryDirectory() as folder, _worker(peer, sizes, tokens) as ask, one_thread():
        file = Path(folder, "kept.pt")
        for turn in range(-1, rounds):  # the first one warms up
            ids = prompt_of(turn + 1, tokens, sizes["vocab_size"])
            whole = keys_of(model, ids)
            for number, (spec, (press, options)) in enumerate(pairs.items()):
                tick(spec, max(turn, 0) * len(pairs) + number, rounds * len(pairs))
                share = {"compression_ratio": 1 - (kept + 0.5) / tokens}
                inner = dict(options)
                if isinstance(inner.get("press"), dict):
                    one = inner["press"]
                    inner["press"] = {**one, "options": {**one["options"], **share}}
                else:
                    inner |= share
                theirs = ask(press=press, options=inner, seed=turn + 1, file=str(file))
                ours, left = _ours(model, ids, spec)
                if turn >= 0:
                    times[spec].append((ours, theirs))
                    mine = [entries(*each) for each in zip(left, whole, strict=True)]
                    alike[spec].append(_shared(mine, torch.load(file)))
    note = f"{sizes['num_hidden_layers']} layers, {kept:,} of {tokens:,} tokens stay"
    return [
        {"job": spec, "press": press, "note": note, **_figures(times[spec], alike[spec])}
        for spec, (press, _) in pairs.items()
    ]


def _figures(times: list[tuple[float, float]], alike: list[float]) -> Row:
    ours, theirs = zip(*times, strict=True)
    return {
        "n": len(times),
        **spread(ours),
        "theirs_ms": spread(theirs)["median_ms"],
        "speedup": paired(theirs, ours),
        "alike": min(alike),
        "dtype": "float32",
        **ON_ONE_THREAD,
    }


def _shared(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the part of what heads keep that both keep, least over the layers."""
    found = []
    for mine, other in zip(ours, theirs, strict=True):
        both = [torch.isin(a, b).double().mean() for a, b in zip(mine, other, strict=True)]
        found.append(float(torch.stack(both).mean()))
    return min(found)


@torch.no_grad()
def _ours(model: Any, ids: Tensor, spec: str) -> tuple[float, list[Tensor]]:
    """Return the milliseconds of our hooks, and the keys that stay."""
    spent = 0.0

    def timed(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            start = time.process_time()
            found = function(*args, **kwargs)
            spent += time.process_time() - start
            return found

        return run

    with (
        patch.object(KVStage, "_enter", timed(KVStage._enter)),
        patch.object(KVStage, "_after", timed(KVStage._after)),
        patch.object(KVStage, "_leave", timed(KVStage._leave)),
        patch.object(Attention, "look", timed(Attention.look)),
        attach(model, cache=spec),
    ):
        left = keys_of(model, ids)
    return spent * 1e3, left


@contextmanager
def _worker(peer: str, sizes: dict[str, Any], tokens: int) -> Iterator[Any]:
    """Start the process of kvpress; what it yields asks for a press and returns milliseconds."""
    python, script = Path(peer, "bin", "python"), Path(kvpress_worker.__file__)
    if not python.exists():
        raise MmfastError(f"--peer {peer} is no virtual environment: it has no bin/python")
    given = json.dumps({"sizes": sizes, "tokens": tokens})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([python, script, given], text=True, **pipes) as process:  # type: ignore[call-overload]

        def heard() -> Any:
            line = process.stdout.readline()
            if not line:
                told = process.stderr.read().strip().splitlines() or ["no reason given"]
                raise MmfastError(f"kvpress in {peer} failed: {told[-1]}")
            return json.loads(line)

        def ask(**what: Any) -> float:
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
            return float(heard()["ms"])

        try:
            heard()
            yield ask
        finally:
            process.stdin.close()
            process.kill()
