"""Drivers that reproduce golden vectors with the reducers, one function a method.

From the `in.*` arrays and parameters of a file to `out.*` arrays and faults of the exact mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import reduce
from mmfast.core.tokens import Tokens
from mmfast.models.reduction.probe import last_query_scores
from mmfast.ops import video
from mmfast.ops.max_min import max_min, max_min_reference
from mmfast.ops.merging import match
from mmfast.ops.ranking import outlier_count, stable_topk
from mmfast.reducers.attention.vidcom2 import frame_shares, video_scores
from mmfast.reducers.diversity.cdpruner import picks, relevance
from mmfast.reducers.video.stc_pruner import prune_chunk

Arrays = Mapping[str, Tensor]
Params = Mapping[str, Any]
Outcome = tuple[dict[str, Tensor], list[str]]
Driver = Callable[[Arrays, Params], Outcome]


def run(tokens: Tokens, spec: str) -> Reduction:
    """Return the one Reduction of a spec, checked."""
    reduction = reduce(tokens, spec)
    if isinstance(reduction, list):
        raise MmfastError(f"{spec!r} gave {len(reduction)} reductions instead of one")
    reduction.check()
    return reduction


def order_of(reduction: Reduction) -> Tensor:
    """Return slots in order of emission."""
    if reduction.order is not None:
        return reduction.order
    return torch.arange(reduction.m).expand_as(reduction.keep)


def mask_of(reduction: Reduction) -> Tensor:
    """Return `[..., N]` bool, True at the kept sources."""
    none = torch.zeros(reduction.owner.shape, dtype=torch.bool)
    return none.scatter_(-1, reduction.keep, torch.ones_like(reduction.keep, dtype=torch.bool))


def _hiprune(arrays: Arrays, params: Params) -> Outcome:
    middle, deep = (arrays[name].mean((1, 2))[:, 1:] for name in ("attn_object", "attn_deep"))
    budget = int(params["retention"] / len(deep))
    side = round(deep.shape[1] ** 0.5)
    spec = f"hiprune:{budget}?parity=true&alpha={params['alpha']}"
    signals = [{"attn_visual": d, "attn_middle": m} for d, m in zip(deep, middle, strict=True)]
    grid = (1, side, side)
    crops = [
        run(Tokens(each["attn_visual"][:, None], grid=grid, signals=each), spec) for each in signals
    ]
    mask, indices = torch.stack(list(map(mask_of, crops))), torch.cat([c.keep for c in crops])
    return {"mask": mask, "indices": indices, "counts": torch.tensor([c.m for c in crops])}, []


def _hired(arrays: Arrays, params: Params) -> Outcome:
    first, late = (arrays[f"{name}_layer_cls_attn"].sum(1)[:, 1:] for name in ("first", "late"))
    n, parts = params["n_tokens"], params["num_partitions"]
    masks: list[Tensor] = []
    for early, score in zip(first.split(parts), late.split(parts), strict=True):
        tile = torch.arange(len(score)).repeat_interleave(n)
        signals = {"attn_first": early.flatten(), "tile": tile}
        tokens = Tokens(score.reshape(-1, 1), attn=score.flatten(), signals=signals)
        budget = int(len(score) * n * params["rate"])
        found = run(tokens, f"hired:{budget}?parity=true&alpha={params['alpha']}")
        masks.append(mask_of(found).reshape(-1, n))
    kept = [mask.sum(-1) for mask in masks]
    budgets = {
        "kept_per_partition": torch.cat(kept),
        "sub_budgets": torch.cat([k[1:] for k in kept]),
    }
    return {"mask": torch.cat(masks), **budgets}, []


def _prumerge(arrays: Arrays, params: Params, name: str = "prumerge") -> Outcome:
    query, keys, x = arrays["q_cls"], arrays["k"], arrays["features"]
    attn = last_query_scores(query[:, None], keys[:, None])[:, 1:]  # one head of the full width
    ratio = outlier_count(attn) / attn.numel() if params["adaptive"] else params["ratio"]
    spec = f"{name}?parity=true" + ("" if params["adaptive"] else f"&ratio={ratio}")
    merged: list[Reduction] = []
    for row, score, key in zip(x, attn, keys[:, 1:], strict=True):
        merged.append(run(Tokens(row, attn=score, signals={"keys": key}), spec))
    listed = [one.keep[one.order[:-1]] for one in merged if one.order is not None]
    outputs = {
        "indices": torch.stack(listed),
        "ratio": torch.tensor([ratio], dtype=torch.float64),
        "cls_attn": attn,
        "tokens": torch.stack([m.apply(r, emit=True) for m, r in zip(merged, x, strict=True)]),
    }
    return outputs, []


def _cdpruner(arrays: Arrays, params: Params) -> Outcome:
    x, joint = arrays["features"], arrays["image_embeds"]
    query = arrays["text_embeds"].expand(len(x), -1, -1)
    found = run(
        Tokens(x, query=query, signals={"joint": joint}), f"cdpruner:{params['keep']}?parity=true"
    )
    score = relevance(joint, query, opposite=True, together=True)
    order = picks(x, score, params["keep"])
    same = found.keep.equal(order.sort(dim=-1).values)
    faults = [] if same else ["the reducer with parity=true does not keep the picks"]
    return {"indices": order, "mask": mask_of(found), "relevance": score}, faults


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
    memory: video.ChunkMemory | None = None
    for chunk in arrays["x"].split([frames * n for frames in params["chunk_frames"]]):
        frames = len(chunk) // n
        tokens = Tokens(chunk, grid=(frames, 1, n))
        scores = video.familiarity(chunk, frames, memory)
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
    """Return positions in a layout with a separator after every `side` tokens, separators last."""
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
        "channels": video.steady_channels(x.double(), x.shape[1] // 2).sort().values,
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


def _divprune(arrays: Arrays, params: Params) -> Outcome:
    tokens = Tokens(arrays["x"])
    count = round(params["ratio"] * tokens.n)
    picks = max_min_reference(tokens.x, count)
    kept = picks.unique()
    faults: list[str] = []
    if not run(tokens, f"divprune:{count}?parity=true").keep.equal(kept):
        faults.append("the reducer with parity=true does not keep the picks of the reference")
    exact = run(tokens, f"divprune:{count}")
    if exact.m != count or not torch.isin(kept, exact.keep).all():
        faults.append(f"exact mode keeps {exact.m} tokens and not all picks of the reference")
    if not max_min(tokens.x, count)[: len(kept)].equal(picks[: len(kept)]):
        faults.append("exact mode picks in another order")
    return {"indices": picks}, faults


def _evs(arrays: Arrays, params: Params) -> Outcome:
    merge = params["spatial_merge_size"]
    grid = (params["T"], params["H"] // merge, params["W"] // merge)
    tokens = Tokens(arrays["x"], grid=grid)
    keep = run(tokens, f"evs?parity=true&q={params['q']}").keep
    mask = torch.zeros(tokens.n, dtype=torch.bool).index_fill_(0, keep, True)
    same = run(tokens, f"evs:{len(keep)}").keep.equal(keep)
    faults = [] if same else ["exact mode with the same count keeps other tokens"]
    return {"mask": mask, "indices": keep, "per_frame": mask.reshape(grid[0], -1).sum(-1)}, faults


def _fastv(arrays: Arrays, params: Params) -> Outcome:
    start, length = params["image_start"], params["image_len"]
    row = arrays["attn"].mean(0)  # [S], over heads
    score = row[start : start + length]
    count = round(length * (1 - params["r"]))
    keep = run(Tokens(score[:, None], attn=score), f"fastv@pre:{count}").keep
    ranked = keep[stable_topk(score[keep], len(keep))]
    kept = torch.ones(len(row), dtype=torch.bool)
    kept[start : start + length] = False
    kept[start + keep] = True
    return {"topk_visual": start + ranked, "keep_indices": kept.nonzero()[:, 0]}, []


def _visionzip(arrays: Arrays, params: Params) -> Outcome:
    dominant, context = params["dominant"], params["contextual"]
    score = arrays["cls_attn"].sum(1)[:, 1:]  # [B, N]: over heads, without the class token
    hidden = arrays["hidden"]
    tokens = Tokens(hidden[:, 1:], attn=score, signals={"keys": arrays["metric"][:, 1:]})
    spec = f"visionzip:{dominant + context}?parity=true&contextual={context}"
    zipped = run(tokens, spec)
    emitted = zipped.keep.gather(-1, order_of(zipped))  # dominant in order of place, then targets
    first, targets = emitted[:, :dominant], emitted[:, dominant:]
    rank = stable_topk(score.gather(-1, first), dominant)
    merged = torch.ones_like(score, dtype=torch.bool).scatter_(-1, zipped.keep, False)
    merged_at = merged.nonzero()[:, 1].reshape(len(hidden), -1)
    number = order_of(zipped).argsort(-1).gather(-1, zipped.owner.gather(-1, merged_at)) - dominant
    class_token = torch.zeros(len(hidden), 1, dtype=torch.int64)
    outputs = {
        "indices": torch.cat([class_token, first.gather(-1, rank) + 1], dim=-1),
        "target_indices": targets + 1,
        "merged_indices": merged_at + 1,
        "assign": number,
        "tokens": torch.cat([hidden[:, :1], zipped.apply(tokens.x, emit=True)], dim=1),
    }
    return outputs, []


def _tome(arrays: Arrays, params: Params) -> Outcome:
    x, metric = arrays["x"], arrays["metric"]
    knobs = {name: bool(params[name]) for name in ("class_token", "distill_token")}
    count = max(min(params["r"], (x.shape[1] - sum(knobs.values())) // 2), 0)
    signals = {"keys": metric}
    if "size" in arrays:
        signals["sizes"] = arrays["size"][..., 0]
    spec = f"tome:{x.shape[1] - count}?parity=true&" + "&".join(
        f"{k}={v}" for k, v in knobs.items()
    )
    merged = run(Tokens(x, signals=signals), spec)
    order = order_of(merged)
    source = merged.owner[:, None, :] == order[..., None]  # [B, M, N]
    sizes = signals.get("sizes", torch.ones(x.shape[:2]))
    pairs = match(metric, count, **knobs)
    outputs = {
        "unm_idx": pairs.unmerged,
        "src_idx": pairs.source,
        "dst_idx": pairs.target,
        "x": merged.apply(x, emit=True),
        "size": (source * sizes[:, None, :]).sum(-1, keepdim=True),
        "source": source,
    }
    return outputs, [] if merged.m == x.shape[1] - count else [f"{merged.m} tokens are left"]


def _holitom(arrays: Arrays, params: Params) -> Outcome:
    if params["D"] != 0:
        reason = "contextual tokens of a frame are not covered"
        raise MmfastError(f"parameter D={params['D']}: {reason}")
    frames, n, _ = arrays["x"].shape
    x, total = arrays["x"].flatten(0, 1), frames * n
    given = {"ratio": "retain_ratio", "neighbours": "K", "window": "max_window_size"}
    knobs = {name: params[given.get(name, name)] for name in (*given, "tau", "beta")}
    spec = "holitom?parity=true&" + "&".join(f"{name}={value}" for name, value in knobs.items())
    merged = run(Tokens(x, attn=arrays["attn"].flatten(), grid=(frames, 1, n)), spec)
    similarity = video.temporal_cosine(x, frames)
    segments, saved = video.static_windows(similarity > params["tau"], params["max_window_size"])
    order = order_of(merged)
    place = merged.keep[order]
    frame = place // n
    ratio = min(params["retain_ratio"] / ((total - saved) / total), 1)
    outputs = {
        "segments": torch.tensor(segments),
        "total_reduced": torch.tensor([saved]),
        "effective_ratio": torch.tensor([ratio], dtype=torch.float64),
        "frame_similarity": similarity,
        "segment_token_counts": torch.tensor(
            [int(((frame >= first) & (frame <= last)).sum()) for first, last in segments]
        ),
        "tokens": merged.apply(x, emit=True),
        "token_pos": place % n,
        "token_frame": frame,
        "token_is_static": merged.sizes()[order] > 1,
    }
    return outputs, []


_DRIVERS: list[Callable[..., Outcome]] = [_cdpruner, _divprune, _dycoke, _evs, _fastv, _hiprune]
_DRIVERS += [_hired, _holitom, _pixelprune, _prumerge, _stc_pruner, _tome, _vidcom2, _visionzip]
DRIVERS: dict[str, Driver] = {driver.__name__.removeprefix("_"): driver for driver in _DRIVERS}
DRIVERS["prumerge_plus"] = partial(_prumerge, name="prumerge_plus")
