"""Benchmarks of the vision tower on real shapes with random weights."""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.attach import attach
from mmfast.bench.cases import Case, build, feature_rows, fill_
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.registry import Tick, benchmark, over
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.timing import (
    OperationCount,
    clock_of,
    compare_jobs,
    one_thread,
    peak_during,
    timed,
)
from mmfast.core.errors import MmfastError
from mmfast.models.cost import linear_macs, tower_flops
from mmfast.models.encoder_names import encode_media
from mmfast.models.loading import pick_device
from mmfast.models.vision.acceleration import as_linear, check_encoder, fast_encoder
from mmfast.models.vision.folding import MODES
from mmfast.models.vision.merge_pass import MergePass, MergePlan
from mmfast.ops.attention import segment_attention

Jobs = dict[str, Callable[[], Any]]
_SPECIAL = {"image_token_index": 510, "video_token_index": 511}
_SMALL_TEXT: dict[str, Any] = {"vocab_size": 512, "intermediate_size": 64}
_SMALL_TEXT |= {"bos_token_id": None, "eos_token_id": None}


def only_tower(shape: Preset) -> Preset:
    """Return the shape with a small language model, which does not run."""
    return replace(shape, text={**shape.text, **_SMALL_TEXT}, special=_SPECIAL)


def siglip_shape(layers: int) -> Preset:
    """Return SigLIP-so400m at 384 pixels, 729 patches a frame, as in LLaVA-OneVision."""
    shape = get_preset("llava-onevision-0.5b")
    return only_tower(replace(shape, vision={**shape.vision, "num_hidden_layers": layers}))


def qwen_shape(layers: int) -> Preset:
    """Return Qwen2.5-VL's tower for 392 x 392 pixels, every eighth block with full attention."""
    shape = get_preset("qwen2.5-vl-7b")
    full = [*range(7, layers, 8)] or [layers - 1]
    vision = {**shape.vision, "depth": layers, "fullatt_block_indexes": full}
    return only_tower(replace(shape, vision=vision, grid=(28, 28), half=False))


class TowerShape(NamedTuple):
    """A tower, the number of its blocks, and its smallest number of frames in a call."""

    shape: Callable[[int], Preset]
    blocks: int
    frames: int = 1

    def case(self, layers: int, frames: int) -> Case:
        """Build the tower with `layers` blocks on the default device."""
        where = pick_device(None)
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
        return build(self.shape(layers), ("vit",), frames, where, dtype)


TOWERS = {
    "siglip-so400m-384": TowerShape(siglip_shape, 26),
    "qwen2.5-vl-vit": TowerShape(qwen_shape, 32, frames=2),
}


def encode(case: Case) -> Tensor:
    """Encode the clip of a case into features `[N, D]`."""
    return feature_rows(encode_media(case.model, "video", case.pixels))


def check(found: Tensor, expected: Tensor, limit: float) -> float:
    """Return the largest difference as a share of the largest value."""
    difference = (found.float() - expected.float()).abs().max()
    far = float(difference / expected.float().abs().max())
    if not far <= limit:
        raise MmfastError(
            f"features differ by {far:.1e} of their largest value, more than {limit:.0e}; run "
            "pytest tests/models/vision/test_encoder.py"
        )
    return far


# Windows of a 392 x 392 frame of Qwen2.5-VL in the order of the tower.
_UNEVEN = [64, 64, 64, 32] * 3 + [32, 32, 32, 16]
# Name: heads, head size, lengths of the segments of two frames.
SEGMENTS: dict[str, tuple[int, int, Sequence[int]]] = {
    "siglip frames": (16, 72, [729, 729]),
    "qwen2.5-vl windows, 392 px": (16, 80, _UNEVEN * 2),
    "qwen2.5-vl windows, 448 px": (16, 80, [64] * 32),
    "qwen2.5-vl whole frames": (16, 80, [784, 784]),
}


@benchmark("encoder", "attention")
def attention(tick: Tick, rounds: int = 7) -> list[Row]:
    """Compare eager and SDPA attention per segment with one call for all segments."""
    return over(SEGMENTS, lambda name: _attention_rows(name, rounds), tick)


def _attention_rows(name: str, rounds: int) -> list[Row]:
    heads, width, lengths = SEGMENTS[name]
    where = pick_device(None)
    lengths = [*lengths] * (16 if where.type == "cuda" else 1)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    gen = torch.Generator().manual_seed(0)
    size = (sum(lengths), heads, width)
    inputs = [torch.randn(size, generator=gen).to(where, dtype) for _ in range(3)]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=where)
    together = partial(segment_attention, scale=width**-0.5, longest=max(lengths))
    jobs: Jobs = {
        "eager, one by one": partial(_by_segment, _eager, inputs, lengths),
        "sdpa, one by one": partial(_by_segment, F.scaled_dot_product_attention, inputs, lengths),
        "together": partial(together, *inputs, ends),
    }
    expected = jobs["eager, one by one"]()
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    extra = {job: {"difference": check(run(), expected, limit)} for job, run in jobs.items()}
    shared: Row = {"shape": name, "segments": len(lengths), "tokens": sum(lengths), "heads": heads}
    shared |= {"head_dim": width, "dtype": dtype_name(dtype)}
    return compare_jobs(jobs, rounds, shared, where, extra)


def _by_segment(attend: Callable[..., Tensor], inputs: Sequence[Tensor], lengths: Any) -> Tensor:
    """Split, attend to each segment, and join, as stock towers do; `[S, H, d]`."""
    parts = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in inputs), strict=True)
    return torch.cat([attend(*each).transpose(1, 2).contiguous() for each in parts], 1)[0]


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    return torch.softmax(logits, -1, dtype=torch.float32).to(q.dtype) @ v


PER_CALL = (1, 2, 4, 8)


@benchmark("encoder", "batch")
def frames_per_call(tick: Tick, frames: int = 8, layers: int = 1, rounds: int = 5) -> list[Row]:
    """Compare calls of one frame of the SigLIP tower with calls of several; all blocks on a GPU."""
    where, tower = pick_device(None), TOWERS["siglip-so400m-384"]
    if where.type == "cuda":
        frames, layers = 4 * frames, tower.blocks
    case = tower.case(layers, frames)
    encoder, pixels = case.model.base_model.vision_tower, case.pixels["pixel_values_videos"][0]

    def run(count: int) -> None:
        with torch.no_grad():
            for part in pixels.split(count):
                encoder(part)

    counts = sorted({*PER_CALL, frames}) if frames >= max(PER_CALL) else [1, frames]
    jobs: Jobs = {f"{n} a call": partial(run, n) for n in counts}
    tick("frames per call", 0, 2)
    shared = {"tower": "siglip-so400m-384", "frames": frames, "layers": layers, "of_layers": 26}
    found = compare_jobs(jobs, rounds, shared, where)
    tick("memory", 1, 2)
    found = [{**row, "peak_mb": peak_during(jobs[row["job"]])} for row in found]
    tick("memory", 2, 2)
    return found


@benchmark("encoder", "compile")
def modes(tick: Tick, rounds: int = 3, layers: int = 2) -> list[Row]:
    """Compare the stock towers with `encoder="fast"`, `"compile"` and `"graph"`."""
    return [row for name in TOWERS for row in _mode_rows(name, rounds, layers, tick)]


def _mode_rows(name: str, rounds: int, layers: int, tick: Tick) -> list[Row]:
    tower, where = TOWERS[name], pick_device(None)
    layers, frames = (tower.blocks, 32) if where.type == "cuda" else (layers, 2)
    case = tower.case(layers, frames)
    with torch.no_grad():
        expected = encode(case)
    jobs: Jobs = {"stock": partial(encode, case)}
    extra: dict[str, Row] = {}
    limit = 1e-4 if expected.dtype == torch.float32 else 5e-2
    for number, mode in enumerate(MODES):
        tick(f"{name}, {mode}", number, len(MODES))
        try:
            check_encoder(mode, where)
        except MmfastError:
            continue
        run = jobs[mode] = partial(_encode_fast, case, mode)
        first, ms = timed(run)
        extra[mode] = {"difference": check(first, expected, limit), "first_call_s": ms / 1e3}
    shared: Row = {"tower": name, "frames": frames, "layers": layers, "of_layers": tower.blocks}
    shared["dtype"] = dtype_name(expected.dtype)
    return compare_jobs(jobs, rounds, shared, where, extra)


def _encode_fast(case: Case, mode: str) -> Tensor:
    with torch.no_grad(), fast_encoder(case.model, mode):
        return encode(case)


_TOME = tuple(f"tome@vit:{keep}" for keep in ("0.75", "0.5", "0.5?until=0.5", "0.25"))
MERGES = (*_TOME, "saint@vit:0.5")


@benchmark("encoder", "merge")
def merging(
    tick: Tick, specs: Sequence[str] = MERGES, rounds: int = 3, layers: int = 4
) -> list[Row]:
    """Compare the stock towers with merging between blocks; `ideal` is the speed-up by FLOPs."""
    return over(TOWERS, lambda name: _merge_rows(name, specs, rounds, layers), tick)


def _merge_rows(name: str, specs: Sequence[str], rounds: int, layers: int) -> list[Row]:
    tower, where = TOWERS[name], pick_device(None)
    layers, frames = (tower.blocks, 32) if where.type == "cuda" else (layers, tower.frames)
    case = tower.case(layers, frames)
    full = [math.prod((case.grid[0], *case.preset.grid))] * layers
    shared: Row = {"tower": name, "frames": frames, "layers": layers, "of_layers": tower.blocks}
    compared = partial(_merged_rows, partial(_encode_reduced, case), partial(_flops, case), full)
    return compared(specs, rounds, shared)


def _merged_rows(
    encode: Callable[[str | None], Tensor],
    flops: Callable[[list[int]], int],
    full: list[int],
    specs: Sequence[str],
    rounds: int,
    shared: Row,
    peers: Jobs | None = None,
) -> list[Row]:
    """Compare `encode` under each spec with the stock one, and with peers on the first spec."""
    shape, where = encode(None).shape, pick_device(None)
    extra: dict[str, Row] = {"stock": {"reduce": None, "ideal": 1.0, "merging_ms": 0.0}}
    jobs: Jobs = {"stock": partial(encode, None)}
    for spec in specs:
        run = jobs[spec] = partial(encode, spec)
        with _merges_recorded(counting=True) as seen:
            features = run()
        if features.shape != shape or not bool(features.isfinite().all()):
            raise MmfastError(f"{spec!r} gave features {list(features.shape)}; run the tests")
        with one_thread(), _merges_recorded() as clocked:
            run()
        extra[spec] = {"reduce": spec, "ideal": flops(full) / flops(seen.lengths)}
        extra[spec]["operations_a_block"] = seen.operations / len(full)
        extra[spec]["merging_ms"] = clocked.ms
    for name, peer in (peers or {}).items():
        jobs[name], extra[name] = peer, {"ideal": extra[specs[0]]["ideal"]}
    found = compare_jobs(jobs, rounds, shared, where, extra)
    return [{**row, "of_ideal": row["speedup"] / row["ideal"]} for row in found]


@torch.no_grad()
def _encode_reduced(case: Case, spec: str | None) -> Tensor:
    with attach(case.model, spec):
        return encode(case)


def _flops(case: Case, leaving: list[int]) -> int:
    grid = (case.grid[0], *case.preset.grid)
    return tower_flops(case.model, grid, [math.prod(grid), *leaving[:-1]], leaving)


@dataclass
class _MergeRecord:
    """Time and operations of the merging in one pass, and the tokens left after each block."""

    ms: float = 0.0
    operations: int = 0
    lengths: list[int] = field(default_factory=list)


@contextmanager
def _merges_recorded(counting: bool = False) -> Iterator[_MergeRecord]:
    stock, seen, launched = MergePass.merge, _MergeRecord(), OperationCount()
    clock, _ = clock_of(pick_device(None), 1)

    def merge(work: MergePass, block: int, hidden: Tensor) -> Tensor:
        with launched if counting else nullcontext():
            out, ms = timed(partial(stock, work, block, hidden), clock)
        seen.ms += ms
        seen.operations = launched.launches
        seen.lengths.append(sum(work.lengths))
        return out

    with patch.object(MergePass, "merge", merge):
        yield seen


@benchmark("encoder", "timm")
def timm_encoder(
    tick: Tick, rounds: int = 5, layers: int = 4, size: int = 384, peer: str | None = None
) -> list[Row]:
    """Compare timm's ViT-L/16 with merging; `peer` is a checkout of facebookresearch/ToMe."""
    from timm.models.vision_transformer import VisionTransformer

    where, dtype, images = pick_device(None), torch.float32, 1
    if where.type == "cuda":
        dtype, layers, images = torch.bfloat16, 24, 64
    shape: dict[str, Any] = {"img_size": size, "embed_dim": 1024, "num_heads": 16, "depth": layers}
    model: Any = VisionTransformer(**shape, weight_init="skip").eval()
    fill_(model)
    model = model.to(where, dtype)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(images, 3, size, size, generator=gen).to(where, dtype)
    peers: Jobs = {}
    if peer is not None:
        peers["ToMe's own code"] = partial(torch.no_grad()(_peer_model(model, peer)), x)
    full = [images * model.patch_embed.num_patches] * layers
    shared: Row = {"tower": f"ViT-L/16, {size} px", "images": images, "layers": layers}
    shared |= {"of_layers": 24, "dtype": dtype_name(dtype)}
    tick("ViT-L/16", 0, 1)
    run, flops = partial(_classify, model, x), partial(_vit_flops, model, images)
    found = _merged_rows(run, flops, full, ("tome@vit:0.5", "saint@vit:0.5"), rounds, shared, peers)
    return [{**row, "images_per_s": images / row["median_ms"] * 1e3} for row in found]


@torch.no_grad()
def _classify(model: Any, x: Tensor, spec: str | None) -> Tensor:
    with attach(model, spec):
        return model(x)  # type: ignore[no-any-return]


def _vit_flops(model: Any, images: int, leaving: Sequence[int]) -> int:
    """FLOPs of the blocks of a ViT of timm that leave so many patches of all images."""
    total, prefix = 0, images * model.num_prefix_tokens
    entering = [images * model.patch_embed.num_patches, *leaving[:-1]]
    for block, n, m in zip(model.blocks, entering, leaving, strict=True):
        mlp, n, m = linear_macs(block, "mlp"), n + prefix, m + prefix
        total += 2 * (linear_macs(block) - mlp) * n + 2 * mlp * m
        total += 4 * n * n // images * int(model.embed_dim)
    return total


def _peer_model(model: Any, path: str) -> Any:
    """The model under the authors' patch, losing as many tokens a block as `tome@vit:0.5`."""
    if not Path(path, "tome", "patch").is_dir():
        raise MmfastError(f"--peer {path} holds no tome/patch; give a checkout of ToMe")
    sys.path.append(path)
    model, n = copy.deepcopy(model), model.patch_embed.num_patches
    importlib.import_module("tome.patch").timm(model)
    plan = MergePlan((n,), (round(n / 2),), (n,), len(model.blocks))
    left = [n, *(plan.after(block)[0] for block in range(plan.blocks))]
    model.r = [before - after for before, after in pairwise(left)]
    return model


PATCHES = ("siglip-so400m-384, two frames", "qwen2.5-vl, two frames of 392 x 392")


@benchmark("encoder", "patch")
def patches(tick: Tick) -> list[Row]:
    """Compare the stock patch convolution with the same sums as a matrix product."""
    dtypes = (torch.float32, torch.bfloat16)
    each = lambda name: [row for dtype in dtypes for row in patch_rows(name, dtype, rounds=5)]
    return over(PATCHES, each, tick)


def patch_rows(name: str, dtype: torch.dtype, rounds: int) -> list[Row]:
    """Measure one of `PATCHES`."""
    where = pick_device(None)
    torch.manual_seed(0)
    conv: Any
    if name == PATCHES[0]:
        conv, x = nn.Conv2d(3, 1152, 14, 14), torch.randn(2, 3, 384, 384)
    else:
        size = (2, 14, 14)
        conv, x = nn.Conv3d(3, 1280, size, size, bias=False), torch.randn(784, 3, *size)
    conv, x = conv.to(where, dtype), x.to(where, dtype)
    # The towers flatten the raster at once, so both jobs do.
    jobs: Jobs = {
        "convolution": lambda: conv(x).flatten(2).transpose(1, 2).contiguous(),
        "linear": lambda: as_linear(conv, conv, x).flatten(2).transpose(1, 2).contiguous(),
    }
    cudnn = torch.backends.cudnn  # whose convolutions of float32 round to TF32 by default
    with torch.no_grad(), cudnn.flags(enabled=cudnn.enabled, allow_tf32=False):
        expected = jobs["convolution"]()
        far = check(jobs["linear"](), expected, 1e-5 if dtype == torch.float32 else 1e-2)
    shared: Row = {"shape": name, "dtype": dtype_name(dtype)}
    return compare_jobs(jobs, rounds, shared, where, {"linear": {"difference": far}})
