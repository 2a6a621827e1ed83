"""Prefill of streamed frames into the KV cache, reduced and whole, on a real model shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.bench.cases import Case, build
from mmfast.bench.named import Tick
from mmfast.bench.presets import get_preset
from mmfast.bench.results import Row
from mmfast.bench.stream_jobs import compare
from mmfast.core.errors import MmfastError
from mmfast.core.tokens import Tokens
from mmfast.streams.frontend import StreamReducer

PRESET, SPEC = "llava-onevision-0.5b", "stc_pruner:0.3"
LAYERS, FRAMES, ROUNDS = 24, 8, 3


def rows(progress: Tick) -> list[Row]:
    """Rows of a stream of 8 frames of 196 tokens, appended to the cache one by one."""
    progress(PRESET, 0, 1)
    return measure(LAYERS, FRAMES, ROUNDS)


def measure(layers: int, frames: int, rounds: int) -> list[Row]:
    """The same for other sizes; the time includes choosing the tokens."""
    shape = get_preset(PRESET)
    text = {**shape.text, "num_hidden_layers": layers, "vocab_size": 512}
    special = {"image_token_index": 510, "video_token_index": 511}
    case = build(replace(shape, text=text, special=special), ("llm",), frames=frames)
    with torch.no_grad():
        kept = _check(case)
    jobs: dict[str, Callable[[], object]] = {
        "whole": lambda: prefill(case, None),
        SPEC: lambda: prefill(case, SPEC),
    }
    shared = {
        "preset": PRESET,
        "note": f"{layers} of {shape.text['num_hidden_layers']} layers, {frames} frames one by one",
        "dtype": "float32",
        "tokens": case.n,
        "frames": frames,
    }
    own: list[Row] = [
        {"method": None, "knobs": {}, "kept": case.n},
        {"method": "stc_pruner", "knobs": {"budget": 0.3}, "kept": kept},
    ]
    found = compare(jobs, rounds)
    return [{**shared, **mine, **row} for mine, row in zip(own, found, strict=True)]


def prefill(case: Case, spec: str | None) -> tuple[DynamicCache, Tensor]:
    """Append every frame to an empty cache; returns it and the last hidden state `[D]`.

    What is left of a frame keeps its place in the frame, and the next frame begins where it would
    behind the whole one.
    """
    decoder: Any = case.model.get_decoder()
    _, rows, columns = case.grid
    reducer = None if spec is None else StreamReducer(spec)
    state = None if reducer is None else reducer.start()
    cache, last = DynamicCache(config=case.model.config.get_text_config()), case.visual[0]
    for number, x in enumerate(case.visual.split(rows * columns)):
        keep = torch.arange(len(x))
        if reducer is not None and state is not None:
            state, found = reducer.step(state, Tokens(x, grid=(1, rows, columns)))
            keep, x = found.keep, found.apply(x)
        places = keep + number * rows * columns
        output = decoder(
            inputs_embeds=x[None],
            position_ids=places[None],
            past_key_values=cache,
            use_cache=True,
        )
        last = output.last_hidden_state[0, -1]
    return cache, last


def _check(case: Case) -> int:
    """Tokens kept; frame by frame must equal all at once.

    Raises:
        MmfastError: It does not.
    """
    cache, last = prefill(case, None)
    decoder: Any = case.model.get_decoder()
    at_once = decoder(inputs_embeds=case.visual[None]).last_hidden_state[0, -1]
    kept = int(prefill(case, SPEC)[0].get_seq_length())
    far = float((last - at_once).abs().max() / at_once.abs().max())
    if far > 1e-3 or cache.get_seq_length() != case.n:
        raise MmfastError(
            f"prefill frame by frame is {far:.1e} away from prefill at once, so its time tells "
            "nothing; run pytest tests/streams/test_stream_reducers.py"
        )
    return kept
