"""Benchmark of a frame of Moshi, beside the lower bound that its bytes set.

On the CPU a tiny shape; the large shape is then a row without a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.cases import fill_, unfilled
from mmfast.bench.registry import Tick, benchmark, quiet
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.stages import ceilings
from mmfast.bench.timing import frozen, one_thread, quantile
from mmfast.decoding.sampling import Sampling
from mmfast.models.speech.moshi import MoshiVoice
from mmfast.models.speech.moshi_graphs import (
    GraphRecorder,
    MoshiFrames,
    compile_run,
    frame_bytes,
    graphs_for,
)
from mmfast.models.speech.moshi_steps import UserSound

BATCHES, FRAMES, BUDGET_MS = (1, 8, 32), 200, 80.0
GOAL_MS = {1: 6.5, 32: 20.0}  # by batch, on an H200
CHECKED = 8  # frames whose codes are compared between both ways
SEVEN_B: dict[str, Any] = {"audio_vocab_size": 2048}  # the rest is the default of MoshiConfig
_WIDE = ("hidden_size", "vocab_size", "audio_vocab_size", "sliding_window")
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
_MIMI = {"codebook_size": 64, "num_filters": 4, "num_quantizers": 8, "upsample_groups": 32}
_MIMI |= dict.fromkeys(("codebook_dim", "vector_quantization_hidden_dimension", "head_dim"), 16)
_MIMI |= {"hidden_size": 32, "intermediate_size": 32, "sliding_window": 50, **_LAYERS}
TINY: dict[str, Any] = {
    **dict.fromkeys((*_WIDE, "max_position_embeddings"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_codebooks"), 4),
    "ffn_dim": 128,
    "depth_decoder_config": {"hidden_size": 32, **_SMALL},
    "audio_encoder_config": {"model_type": "mimi", **_MIMI},
}
Frame = Callable[[Tensor], UserSound]


@benchmark("decode", "moshi-frame")
def moshi_frame(tick: Tick) -> list[Row]:
    """Measure the 7B shape where there is a GPU, else the tiny one."""
    if torch.cuda.is_available():
        return measure(SEVEN_B, "moshi-7b", BATCHES, FRAMES, "cuda", tick=tick)
    small = measure(TINY, "tiny", (1,), 60, "cpu", compile_run, tick=tick)  # compiles for minutes
    small += measure(TINY, "tiny", (8,), 60, "cpu", tick=tick)
    return [*small, *(unmeasured(SEVEN_B, "moshi-7b", batch) for batch in BATCHES)]


def unmeasured(sizes: Mapping[str, Any], name: str, batch: int) -> Row:
    """Return the bytes of a shape that this machine cannot run, without a time."""
    model = build(sizes, "meta", torch.bfloat16)
    parts = frame_bytes(model, batch)
    row = {"preset": name, "job": "graphs", "batch": batch, "device": "not measured"}
    mb = sum(parts.values()) / 1e6
    return {**row, "mb": mb, "median_ms": None, "goal_ms": GOAL_MS.get(batch)}


@torch.no_grad()
def measure(
    sizes: Mapping[str, Any],
    name: str,
    batches: Sequence[int],
    frames: int,
    device: str,
    compiled: GraphRecorder | None = None,
    copy_gb_s: float | None = None,
    tick: Tick = quiet,
) -> list[Row]:
    """Measure every batch and way."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build(sizes, device, dtype)
    voice = MoshiVoice(model, text=Sampling(), audio=Sampling())
    bandwidth = copy_gb_s or ceilings(device)["copy_gb_s"]
    found: list[Row] = []
    with one_thread() if device == "cpu" else frozen():
        for number, batch in enumerate(batches):
            floor = sum(frame_bytes(model, batch).values()) / bandwidth / 1e6
            shared = {"preset": name, "batch": batch, "device": device, "floor_ms": floor}
            shared |= {"window": model.config.sliding_window, "dtype": dtype_name(dtype)}
            found += [{**shared, **row} for row in _rows(voice, batch, frames, device, compiled)]
            tick(f"{name} batch {batch}", number + 1, len(batches))
    for row in found:
        row["of_floor"] = row["floor_ms"] / row["median_ms"]
    return found


def _rows(
    voice: MoshiVoice, batch: int, frames: int, device: str, compiled: GraphRecorder | None
) -> Iterator[Row]:
    pcm = torch.randn(CHECKED + frames, batch, voice.codec.hop) * 0.1
    recorded = "graphs" if device == "cuda" else "static"
    graphs = {recorded: graphs_for(device)} | ({"compiled": compiled} if compiled else {})
    ways: dict[str, Frame] = {"steps": _by_value(voice, batch)}
    spent: dict[str, float] = {"steps": 0.0}
    for way, recorder in graphs.items():
        start = time.perf_counter()
        ready = MoshiFrames(voice, batch, recorder)
        ready.frame(pcm[0])
        spent[way] = time.perf_counter() - start
        ready.reset()
        ways[way] = ready.frame
    said = {way: [frame(p).codes.clone() for p in pcm[:CHECKED]] for way, frame in ways.items()}
    times = _times(ways, pcm[CHECKED:], device)
    for way, ms in times.items():
        same = torch.stack(said[way]) == torch.stack(said["steps"])
        middle, late, cuda = median(ms), quantile(ms, 0.99), device == "cuda"
        row = {"job": way, "median_ms": middle, "p99_ms": late, "p99_of_median": late / middle}
        row |= {"speedup": median(times["steps"]) / middle, "prepare_s": spent[way], "n": frames}
        row |= {"goal_ms": GOAL_MS.get(batch) if cuda else None, "budget_ms": BUDGET_MS}
        clock = "wall, sound on the host" if cuda else "processor time"
        yield {**row, "same_codes": float(same.float().mean()), "clock": clock}


def _times(ways: Mapping[str, Frame], pcm: Tensor, device: str) -> dict[str, list[float]]:
    clock = time.perf_counter if device == "cuda" else time.process_time
    times: dict[str, list[float]] = {way: [] for way in ways}
    for each in pcm:
        for way, frame in ways.items():
            start = clock()
            frame(each).pcm.cpu()
            times[way].append(1e3 * (clock() - start))
    return times


def _by_value(voice: MoshiVoice, batch: int) -> Frame:
    state = voice.start(batch)

    def frame(pcm: Tensor) -> UserSound:
        nonlocal state
        state, heard = voice.step(state, pcm)
        return heard

    return frame


def build(sizes: Mapping[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Build `MoshiForConditionalGeneration` with random weights."""
    from transformers import MoshiConfig, MoshiForConditionalGeneration

    with unfilled(device, dtype):
        model: Any = MoshiForConditionalGeneration(MoshiConfig(**sizes))
    if device != "meta":
        fill_(model)
        for weight in model.depth_decoder.parameters():
            if weight.ndim == 3:  # weights of all codebooks side by side: the fan-in is of one
                weight.mul_(weight.shape[1] ** 0.5)
        source = torch.Generator(device).manual_seed(0)
        for name, table in model.audio_encoder.named_buffers():
            if name.endswith("embed_sum"):  # codebooks are buffers, not parameters
                table.normal_(generator=source)
    return model.eval()
