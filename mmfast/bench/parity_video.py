"""Golden vectors of methods that compare frames or pixels; see parity.py."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.bench.parity_base import Arrays, Driver, Outcome, Params, mask_of, order_of, run
from mmfast.core.tokens import Tokens
from mmfast.ops.chunk_memory import ChunkMemory, familiarity
from mmfast.ops.steady_channels import steady_channels
from mmfast.reducers.stc_pruner import prune_chunk
from mmfast.reducers.vidcom2 import frame_shares, video_scores

_FRAME_TOKENS = {"clip": 144, "llava_ov": 196, "llava_vid": 169}


def _dycoke(arrays: Arrays, params: Params) -> Outcome:
    x, n = arrays["x"], params["tokens_per_frame"]
    frames = len(x) // n
    spec = f"dycoke?parity=true&ratio={params['merging_ratio']}"
    found = run(Tokens(x, grid=(frames, 1, n)), spec)
    outputs = {
        "indices": found.keep[order_of(found)],
        "per_frame": mask_of(found).reshape(frames, n).sum(-1)[: frames // 2 * 2],
        "tokens": found.apply(x, emit=True),
    }
    return outputs, []


def _stc_pruner(arrays: Arrays, params: Params) -> Outcome:
    n, keep = _FRAME_TOKENS[params["model"]], params["keep_per_frame"]
    found: dict[str, list[Tensor]] = {name: [] for name in ("indices", "channels", "score", "raw")}
    faults: list[str] = []
    memory: ChunkMemory | None = None
    for chunk in arrays["x"].split([frames * n for frames in params["chunk_frames"]]):
        frames = len(chunk) // n
        tokens = Tokens(chunk, grid=(frames, 1, n))
        scores = familiarity(chunk, frames, memory)
        pruned, after = prune_chunk(tokens, keep * frames, memory)
        alone = run(tokens, f"stc_pruner:{keep * frames}")
        if memory is None and not alone.keep.equal(pruned.keep):
            faults.append("the reducer keeps other tokens than the first chunk of a stream")
        memory = after
        places = pruned.keep.reshape(frames, keep) % n
        found["indices"].append(places)
        found["channels"].append(scores.channels[None])
        found["score"].append(scores.score)
        found["raw"].append(_rows_with_separators(places))
    outputs = {name: torch.cat(found[name]) for name in ("indices", "channels", "score")}
    if params["model"] == "llava_vid":
        outputs["raw_rows"] = torch.cat(found["raw"])
        outputs["raw_rows_per_chunk"] = torch.tensor([len(rows) for rows in found["raw"]])
    return outputs, faults


def _rows_with_separators(places: Tensor, side: int = 13) -> Tensor:
    """Rows of a layout with a separator after every `side` tokens: kept ones, then separators."""
    frame = torch.arange(len(places))[:, None] * side * (side + 1)
    kept = frame + places // side * (side + 1) + places % side
    ends = frame + torch.arange(1, side + 1) * (side + 1) - 1
    return torch.cat([kept, ends], dim=-1).flatten()


def _vidcom2(arrays: Arrays, params: Params) -> Outcome:
    x, n = arrays["x"], params["tokens_per_frame"]
    frames = len(x) // n
    found = run(Tokens(x, grid=(frames, 1, n)), f"vidcom2?ratio={params['base_scale']}")
    score, unusual = video_scores(x, frames)
    outputs = {
        "indices": found.keep,
        "per_frame": mask_of(found).reshape(frames, n).sum(-1),
        "channels": steady_channels(x.double(), x.shape[1] // 2).sort().values,
        "scales": frame_shares(unusual, params["base_scale"]),
        "score": score,
    }
    return outputs, []


def _pixelprune(arrays: Arrays, params: Params) -> Outcome:
    merge = params["spatial_merge_size"]
    pixels = arrays["pixel_values"].reshape(-1, merge**2 * arrays["pixel_values"].shape[1])
    grids = [(t, h // merge, w // merge) for t, h, w in arrays["grid_thw"].tolist()]
    knobs = "&".join(f"{name}={params[name]}" for name in ("metric", "threshold", "anchored"))
    kept = [
        run(Tokens(image, grid=grid, signals={"pixels": image}), f"pixelprune?{knobs}").keep
        for image, grid in zip(pixels.split([t * h * w for t, h, w in grids]), grids, strict=True)
    ]
    return {"indices": torch.cat(kept), "counts": torch.tensor([len(k) for k in kept])}, []


DRIVERS: dict[str, Driver] = {
    "dycoke": _dycoke,
    "pixelprune": _pixelprune,
    "stc_pruner": _stc_pruner,
    "vidcom2": _vidcom2,
}
