"""Drivers that reproduce golden vectors with the reducers, one function a method.

From the `in.*` arrays and parameters of a file to `out.*` arrays and faults of the exact mode.
Scores and counts that a Reduction does not hold come from the functions that the reducer calls.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.cache_parity import (
    CACHE_DRIVERS,
    PREFILL_DRIVERS,
    Arrays,
    Drive,
    Outcome,
    Params,
    attention,
)
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import get
from mmfast.core.spec import Spec
from mmfast.core.spec import run as run_spec
from mmfast.core.tokens import Tokens
from mmfast.models.reduction.decoder_signals import LayerAttention, last_products, mutual, text_peak
from mmfast.models.reduction.probe import last_query_scores, softmax_rows
from mmfast.models.reduction.sequence import MediaItem
from mmfast.ops import video
from mmfast.ops.clustering import information
from mmfast.ops.max_min import max_min
from mmfast.ops.merging import match
from mmfast.ops.ranking import complement, index_mask, rescale, stable_topk
from mmfast.reducers.attention.prumerge import reference_share
from mmfast.reducers.attention.vidcom2 import frame_shares, video_scores
from mmfast.reducers.decoder.sparsevlm import raters
from mmfast.reducers.diversity.cdpruner import relevance
from mmfast.reducers.merging.litevggt import geometry
from mmfast.reducers.video.holitom import static_plan
from mmfast.reducers.video.prunevid import scenes_of
from mmfast.reducers.video.stc_pruner import stream_stc_pruner


def run(tokens: Tokens, name: str, budget: int | None = None, **knobs: Any) -> list[Reduction]:
    """Return the checked reductions by a method; unlike in a spec string a budget may be 0."""
    tokens.check_finite()
    found = run_spec(Spec(get(name), "pre", None, budget, knobs), tokens)
    items = found if isinstance(found, list) else [found]
    for reduction in items:
        reduction.check()
    return items


def order_of(reduction: Reduction) -> Tensor:
    """Return slots in order of emission."""
    if reduction.order is not None:
        return reduction.order
    return torch.arange(reduction.m).expand_as(reduction.keep)


def _hiprune(arrays: Arrays, params: Params) -> Outcome:
    middle, deep = (arrays[name].mean((1, 2))[:, 1:] for name in ("attn_object", "attn_deep"))
    budget = int(params["retention"] / len(deep))
    side = round(deep.shape[1] ** 0.5)
    signals = {"attn_visual": deep, "attn_middle": middle}
    tokens = Tokens(deep[..., None], grid=(1, side, side), signals=signals)
    (found,) = run(tokens, "hiprune", budget, parity=True, alpha=params["alpha"])
    mask = index_mask(found.keep, found.n)
    return {"mask": mask, "indices": mask.nonzero()[:, 1], "counts": mask.sum(-1)}, []


def _hired(arrays: Arrays, params: Params) -> Outcome:
    n, parts = params["n_tokens"], params["num_partitions"]
    first, late = (arrays[f"{name}_layer_cls_attn"].sum(1)[:, -n:] for name in ("first", "late"))
    masks: list[Tensor] = []
    for early, score in zip(first.split(parts), late.split(parts), strict=True):
        tile = torch.arange(len(score)).repeat_interleave(n)
        signals = {"attn_first": early.flatten(), "tile": tile}
        tokens = Tokens(score.reshape(-1, 1), attn=score.flatten(), signals=signals)
        budget = int(len(score) * n * params["rate"])
        (found,) = run(tokens, "hired", budget, parity=True, alpha=params["alpha"])
        masks.append(index_mask(found.keep, found.n).reshape(-1, n))
    kept = [mask.sum(-1) for mask in masks]
    budgets = {
        "kept_per_partition": torch.cat(kept),
        "sub_budgets": torch.cat([k[1:] for k in kept]),
    }
    return {"mask": torch.cat(masks), **budgets}, []


def _prumerge(arrays: Arrays, params: Params, name: str = "prumerge") -> Outcome:
    query, keys, x = arrays["q_cls"], arrays["k"], arrays["features"]
    attn = last_query_scores(query[:, None], keys[:, None])[:, 1:]  # one head of the full width
    ratio = None if params["adaptive"] else params["ratio"]
    tokens = Tokens(x, attn=attn, signals={"keys": keys[:, 1:]})
    merged = run(tokens, name, parity=True, ratio=ratio)
    outputs = {
        "indices": torch.stack([one.keep[order_of(one)[:-1]] for one in merged]),
        "ratio": torch.tensor([reference_share(attn, ratio)], dtype=torch.float64),
        "cls_attn": attn,
        "tokens": torch.stack([m.apply(r, emit=True) for m, r in zip(merged, x, strict=True)]),
    }
    return outputs, []


def _cdpruner(arrays: Arrays, params: Params) -> Outcome:
    x, joint = arrays["features"], arrays["image_embeds"]
    query = arrays["text_embeds"].expand(len(x), -1, -1)
    tokens = Tokens(x, query=query, signals={"joint": joint})
    (found,) = run(tokens, "cdpruner", params["keep"], parity=True)
    outputs = {
        "indices": found.keep.gather(-1, order_of(found)),
        "mask": index_mask(found.keep, found.n),
        "relevance": relevance(joint, query, opposite=True, together=True),
    }
    return outputs, []


def _script(arrays: Arrays, params: Params) -> Outcome:
    query = arrays["text_embeds"].expand(len(arrays["features"]), -1, -1)
    tokens = Tokens(arrays["features"], query=query, signals={"joint": arrays["image_embeds"]})
    (found,) = run(tokens, "script", params["keep"], parity=True)
    return {"mask": index_mask(found.keep, found.n)}, []


_FRAME_TOKENS = {"clip": 144, "llava_ov": 196, "llava_vid": 169}


def _dycoke(arrays: Arrays, params: Params) -> Outcome:
    x, n = arrays["x"], params["tokens_per_frame"]
    frames = len(x) // n
    tokens = Tokens(x, grid=(frames, 1, n))
    (found,) = run(tokens, "dycoke", parity=True, ratio=params["merging_ratio"])
    outputs = {
        "indices": found.keep[order_of(found)],
        "per_frame": index_mask(found.keep, found.n).reshape(frames, n).sum(-1)[: frames // 2 * 2],
        "tokens": found.apply(x, emit=True),
    }
    return outputs, []


def _stc_pruner(arrays: Arrays, params: Params) -> Outcome:
    n, keep = _FRAME_TOKENS[params["model"]], params["keep_per_frame"]
    found: dict[str, list[Tensor]] = {name: [] for name in ("indices", "channels", "score", "raw")}
    faults: list[str] = []
    state: dict[str, Tensor] | None = None
    memory: video.ChunkMemory | None = None
    for chunk in arrays["x"].split([frames * n for frames in params["chunk_frames"]]):
        frames = len(chunk) // n
        tokens = Tokens(chunk, grid=(frames, 1, n))
        scores = video.familiarity(chunk, frames, memory)
        pruned, after = stream_stc_pruner(tokens, keep * frames, state)
        (alone,) = run(tokens, "stc_pruner", keep * frames)
        if state is None and not alone.keep.equal(pruned.keep):
            faults.append("the reducer keeps other tokens than the first chunk of a stream")
        state, memory = after, scores.memory
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
    (found,) = run(Tokens(x, grid=(frames, 1, n)), "vidcom2", ratio=params["base_scale"])
    score, unusual = video_scores(x, frames)
    outputs = {
        "indices": found.keep,
        "per_frame": index_mask(found.keep, found.n).reshape(frames, n).sum(-1),
        "channels": video.steady_channels(x.double(), x.shape[1] // 2).sort().values,
        "scales": frame_shares(unusual, params["base_scale"]),
        "score": score,
    }
    return outputs, []


def _vispruner(arrays: Arrays, params: Params) -> Outcome:
    tokens = Tokens(arrays["features"], attn=arrays["attn"].mean(1))
    important = params["important_ratio"]
    (found,) = run(tokens, "vispruner", params["visual_token_num"], important=important)
    return {"mask": index_mask(found.keep, found.n)}, []


def _prunevid(arrays: Arrays, params: Params) -> Outcome:
    x, share = arrays["x"], params["temporal_segment_ratio"]
    knobs = {"tau": params["tau"], "scenes": share, "clusters": params["cluster_ratio"]}
    rows = x.flatten(0, 1)
    (found,) = run(Tokens(rows, grid=(len(x), 1, x.shape[1])), "prunevid", **knobs)
    merged = found.apply(rows)
    order = merged.double().sum(-1).argsort()
    sizes = [last - first + 1 for first, last in scenes_of(x, share)]
    return {"tokens": merged[order], "window_sizes": torch.tensor(sizes)}, []


def _saint(arrays: Arrays, params: Params) -> Outcome:
    names = {"tau": "sim_threshold", "neighbours": "K", "gamma": "gamma"}
    budget = None
    if "r" in params:
        names, budget = {"full": "r"}, params["keep_num"] - 1  # the class token counts there
    knobs = {knob: params[name] for knob, name in names.items()}
    kept = [run(Tokens(keys), "saint", budget, **knobs)[0].keep for keys in arrays["keys"]]
    return {"indices": torch.stack(kept)}, []


def _fastvid(arrays: Arrays, params: Params) -> Outcome:
    frames, n, width = arrays["x"].shape
    rows = arrays["x"].reshape(-1, width)
    tokens = Tokens(rows, attn=arrays["attn"].flatten(), grid=(frames, 1, n))
    names = {"segments": "c", "tau": "tau", "context": "d", "every": "p", "beta": "beta"}
    knobs = {knob: params[name] for knob, name in names.items()}
    (found,) = run(tokens, "fastvid", frames * int(n * params["retention_ratio"]), **knobs)
    return {"indices": found.keep, "tokens": found.apply(rows)}, []


def _framefusion(arrays: Arrays, params: Params) -> Outcome:
    x, n = arrays["x"], params["frame_tokens"]
    # The merges of these files meet their budget, so that nothing is pruned by attention.
    signals = {"attn_visual": torch.zeros(len(x))}
    tokens = Tokens(x, grid=(len(x) // n, 1, n), signals=signals)
    (found,) = run(tokens, "framefusion", params["keep"], tau=params["tau"])
    return {"mask": index_mask(found.keep, found.n), "tokens": found.apply(x)}, []


def _v_cast(arrays: Arrays, params: Params) -> Outcome:
    frames, n, width = arrays["x"].shape
    tokens = Tokens(arrays["x"].reshape(-1, width), grid=(frames, 1, n))
    budget = max(frames, round(tokens.n * params["retain_ratio"]))
    (found,) = run(tokens, "v_cast", budget)
    per_frame = index_mask(found.keep, found.n).reshape(frames, n).sum(-1)
    return {"indices": found.keep, "per_frame": per_frame}, []


def _holitom_inner(arrays: Arrays, params: Params) -> Outcome:
    first, n = params["image_start"], params["image_len"]
    row = arrays["attn"].mean(0)
    tokens = Tokens(arrays["x"][first : first + n], attn=row[first : first + n])
    (found,) = run(tokens, "holitom_inner", round(n * (1 - params["r"])))
    return {"keep_indices": _around(found, first, len(row)), "tokens": found.apply(tokens.x)}, []


def _around(found: Reduction, first: int, length: int) -> Tensor:
    """Return places in a prompt of `length` whose media from `first` on are reduced."""
    kept = torch.ones(length, dtype=torch.bool)
    kept[first : first + found.n] = index_mask(found.keep, found.n)
    return kept.nonzero()[:, 0]


def _dart(arrays: Arrays, params: Params) -> Outcome:
    first, n = params["image_start"], params["image_len"]
    pivots, words = params["pivot_image_token"], params["pivot_text_token"]
    media, text = slice(first, first + n), slice(first + n, None)
    states, norm = arrays["states"], arrays["keys"].abs().sum((0, 2))
    signals = {"key_norm": norm[media], "text_key_norm": norm[text]}
    tokens = Tokens(states[media], query=states[text], signals=signals)
    share = int(n * (1 - params["reduction_ratio"]) // (pivots + words))
    budget = pivots + share * (pivots + words)
    (found,) = run(tokens, "dart", budget, pivots=pivots, words=words)
    return {"indices": first + found.keep}, []


def _ivc_prune(arrays: Arrays, params: Params) -> Outcome:
    first, n = params["image_start"], params["image_len"]
    media, values = slice(first, first + n), arrays["values"]
    signals = {"rope": arrays["rope"].mean((0, 2))[media], "values": values[media].flatten(1)}
    # The reference leaves out the two tokens behind the image, an end mark and a line break.
    signals["text_values"] = values[first + n + 2 :]
    tokens = Tokens(values[media].flatten(1), signals=signals)
    (found,) = run(tokens, "ivc_prune", round(n * 0.5))
    return {"keep_indices": _around(found, first, len(values))}, []


def _pyramiddrop(arrays: Arrays, params: Params) -> Outcome:
    masks = torch.zeros(arrays["key"].shape[0], arrays["key"].shape[2], dtype=torch.bool)
    rows = zip(
        *(params[name] for name in ("image_tokens", "image_index", "prompt_len")), strict=True
    )
    now, left = params["ratios"]
    for row, (tokens, first, words) in enumerate(rows):
        n, length = int(tokens * now), int(tokens * now) + words
        query, key = arrays["query"][row, None], arrays["key"][row, None, :, :length]
        attn = last_query_scores(query, key)[0, first : first + n]
        (found,) = run(Tokens(attn[:, None], attn=attn), "pyramiddrop", int(tokens * left))
        masks[row, _around(found, first, length)] = True
    return {"mask": masks}, []


def _gemfilter(arrays: Arrays, params: Params) -> Outcome:
    seen = LayerAttention(arrays["query"], arrays["key"], None, None, True, 0)
    prompt: Any = SimpleNamespace(row=0, where=torch.arange(arrays["key"].shape[2]))
    whole: Any = SimpleNamespace(drafts=0, ok=None)
    signals = {"attn_ahead": last_products(whole, seen, prompt)}
    tokens = Tokens(arrays["key"][0].transpose(0, 1).flatten(1), signals=signals)
    return {"indices": run(tokens, "gemfilter", params["topk"])[0].keep}, []


def _info_rank(arrays: Arrays, params: Params) -> Outcome:
    x, every = arrays["x"], 1e-6  # of the directions none is left out
    (found,) = run(Tokens(x), "info_rank", params["keep"], rank=every)
    score = information(x, every) * torch.linalg.matrix_norm(x.double(), 2)
    return {"indices": params["sys_length"] + found.keep, "score": score}, []


def _fastkv(arrays: Arrays, params: Params) -> Outcome:
    window, n = params["window_size"], arrays["keys"].shape[1]
    votes = attention(arrays["query"], arrays["keys"], window).mean(0)[: n - window]
    tokens = Tokens(votes[:, None], signals={"attn_window": votes})
    budget = params["tsp_length"] - window
    keep = run(tokens, "fastkv", budget, kernel=params["kernel_size"])[0].keep
    return {"indices": torch.cat([keep, torch.arange(n - window, n)])}, []


def _text_cut(arrays: Arrays, params: Params, name: str) -> Outcome:
    seen = LayerAttention(arrays["query"][None], arrays["key"][None], None, None, True, 0)
    first, n = params["image_start"], params["image_len"]
    media = MediaItem(0, 0, first + torch.arange(n), torch.arange(0), None)
    text = torch.arange(first + n, arrays["key"].shape[1])
    peak = name == "prunevid_inner"
    score = text_peak(seen, media, text) if peak else mutual(seen, media, text)
    budget = int(n * params["alpha"]) if peak else params["keep"]
    signals = {"attn_peak" if peak else "attn_mutual": score}
    (found,) = run(Tokens(score[:, None], signals=signals), name, budget)
    return {"indices": first + found.keep, **({} if peak else {"score": score})}, []


def _visiondrop(arrays: Arrays, params: Params) -> Outcome:
    seen = LayerAttention(arrays["query"][None], arrays["key"][None], None, None, True, 0)
    media = params["image_start"] + torch.arange(params["image_len"])
    signals = {"attn_visual": seen.mean(0, media, media), "key_mean": seen.key_mean(0, media)}
    context, dominant = params["contextual"], params["dominant"]
    tokens = Tokens(arrays["x"][media], signals=signals)
    knobs = {"contextual": context, "parity": True}
    (found,) = run(tokens, "visiondrop", dominant + context, **knobs)
    kept = found.keep[order_of(found)[:dominant]]
    return {"indices": media[kept], "tokens": found.apply(tokens.x, emit=True)}, []


def _audio_prune(arrays: Arrays, params: Params) -> Outcome:
    rows = softmax_rows(arrays["query"], arrays["key"], None, None)[..., 1:, 1:]  # no class token
    attn = rows.mean((1, 2))
    budget = math.ceil(params["keep_rate"] * attn.shape[1])
    (found,) = run(Tokens(attn[..., None], attn=attn), "audio_prune", budget, coverage=0.0)
    return {"mask": index_mask(found.keep, found.n)}, []


def _sparsevlm(arrays: Arrays, params: Params) -> Outcome:
    x, query, keep = arrays["x"], arrays["query"], params["keep"]
    tokens = Tokens(x, query=query, signals={"attn_text": arrays["attn"].mean(0).T})
    clusters = int((int((len(x) - keep) * 0.3) + 1) / 10) + 1
    (found,) = run(tokens, "sparsevlm", keep + clusters)
    rows = found.apply(x)
    outputs = {
        "raters": raters(x, query),
        "mask": index_mask(found.keep[found.sizes() == 1], len(x)),
        "tokens": rows[rows.double().sum(-1).argsort()],
    }
    return outputs, []


def _pixelprune(arrays: Arrays, params: Params) -> Outcome:
    merge = params["spatial_merge_size"]
    pixels = arrays["pixel_values"].reshape(-1, merge**2 * arrays["pixel_values"].shape[1])
    grids = [(t, h // merge, w // merge) for t, h, w in arrays["grid_thw"].tolist()]
    knobs = {name: params[name] for name in ("metric", "threshold", "anchored")}
    kept = [
        run(Tokens(image, grid=grid, signals={"pixels": image}), "pixelprune", **knobs)[0].keep
        for image, grid in zip(pixels.split([t * h * w for t, h, w in grids]), grids, strict=True)
    ]
    return {"indices": torch.cat(kept), "counts": torch.tensor([len(k) for k in kept])}, []


def _divprune(arrays: Arrays, params: Params) -> Outcome:
    tokens = Tokens(arrays["x"])
    count = round(params["ratio"] * tokens.n)
    found, exact = (run(tokens, "divprune", count, parity=parity)[0] for parity in (True, False))
    kept, picks = found.keep, found.keep[order_of(found)]
    faults: list[str] = []
    if exact.m != count or not torch.isin(kept, exact.keep).all():
        faults.append(f"exact mode keeps {exact.m} tokens and not all picks of the reference")
    if not max_min(tokens.x, count)[: len(kept)].equal(picks[: len(kept)]):
        faults.append("exact mode picks in another order")
    return {"indices": picks}, faults


def _dtd(arrays: Arrays, params: Params) -> Outcome:
    frames, rows, columns = grid = tuple(params[name] for name in "THW")
    n, t = rows * columns, params["threshold"]
    budget = None if params["absolute"] else n + (frames - 1) * (n - int(n * t))
    (found,) = run(Tokens(arrays["x"], grid=grid), "dtd", budget, threshold=1 - t, parity=True)
    counts = index_mask(found.keep, found.n).view(frames, n).sum(-1)
    return {"indices": found.keep, "per_frame": counts}, []


def _litevggt(arrays: Arrays, params: Params) -> Outcome:
    frames, rows, columns = grid = tuple(params[name] for name in "THW")
    n = rows * columns
    red, green, blue = arrays["pixels"].unbind(1)
    score = geometry(arrays["x"], grid, 0.299 * red + 0.587 * green + 0.114 * blue)
    tokens = Tokens(arrays["x"], grid=grid, signals={"geometry": score})
    salient, boxes = (
        (frames - 1) * max(1, int(n * 0.1)),
        (frames - 1) * (rows // 2 * (columns // 2)),
    )
    budget = n + boxes + salient
    (found,) = run(tokens, "litevggt", budget, first=True, salient=salient / budget)
    info = rescale(score.view(frames, -1)).pow(1.4).flatten()
    return {"info": info, "kept": found.keep, "target": found.keep[found.owner]}, []


def _evs(arrays: Arrays, params: Params) -> Outcome:
    merge = params["spatial_merge_size"]
    grid = (params["T"], params["H"] // merge, params["W"] // merge)
    tokens = Tokens(arrays["x"], grid=grid)
    (found,) = run(tokens, "evs", parity=True, q=params["q"])
    keep, mask = found.keep, index_mask(found.keep, found.n)
    same = run(tokens, "evs", len(keep))[0].keep.equal(keep)
    faults = [] if same else ["exact mode with the same count keeps other tokens"]
    return {"mask": mask, "indices": keep, "per_frame": mask.reshape(grid[0], -1).sum(-1)}, faults


def _fastv(arrays: Arrays, params: Params) -> Outcome:
    start, length = params["image_start"], params["image_len"]
    row = arrays["attn"].mean(0)  # [S], over heads
    score = row[start : start + length]
    count = round(length * (1 - params["r"]))
    keep = run(Tokens(score[:, None], attn=score), "fastv", count)[0].keep
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
    (zipped,) = run(tokens, "visionzip", dominant + context, parity=True, contextual=context)
    emitted = zipped.keep.gather(-1, order_of(zipped))  # dominant in order of place, then targets
    first, targets = emitted[:, :dominant], emitted[:, dominant:]
    rank = stable_topk(score.gather(-1, first), dominant)
    merged_at = complement(zipped.keep, zipped.n)
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
    n = x.shape[1]
    knobs = {name: bool(params[name]) for name in ("class_token", "distill_token")}
    count = max(min(params["r"], (n - sum(knobs.values())) // 2), 0)
    signals = {"keys": metric}
    if "size" in arrays:
        signals["sizes"] = arrays["size"][..., 0]
    (merged,) = run(Tokens(x, signals=signals), "tome", n - count, parity=True, **knobs)
    order = order_of(merged)
    emitted = merged.keep.gather(-1, order)
    source = merged.owner[:, None, :] == order[..., None]  # [B, M, N]
    sizes = signals.get("sizes", torch.ones(x.shape[:2]))
    # A Reduction does not say in which order tokens joined.
    joined = 2 * match(metric, count, **knobs).source if count else order[:, :0]
    outputs = {
        "unm_idx": emitted[emitted % 2 == 0].reshape(len(x), (n + 1) // 2 - count) // 2,
        "src_idx": joined // 2,
        "dst_idx": merged.keep.gather(-1, merged.owner.gather(-1, joined)) // 2,
        "x": merged.apply(x, emit=True),
        "size": (source * sizes[:, None, :]).sum(-1, keepdim=True),
        "source": source,
    }
    return outputs, []


def _holitom(arrays: Arrays, params: Params) -> Outcome:
    if params["D"] != 0:
        reason = "contextual tokens of a frame are not covered"
        raise MmfastError(f"parameter D={params['D']}: {reason}")
    frames, n, _ = arrays["x"].shape
    x, ratio = arrays["x"].flatten(0, 1), params["retain_ratio"]
    tau, window = params["tau"], params["max_window_size"]
    knobs = {"neighbours": params["K"], "beta": params["beta"], "tau": tau, "window": window}
    tokens = Tokens(x, attn=arrays["attn"].flatten(), grid=(frames, 1, n))
    (merged,) = run(tokens, "holitom", parity=True, ratio=ratio, **knobs)
    similarity, segments, saved, share = static_plan(arrays["x"], tau, window, ratio)
    order = order_of(merged)
    place = merged.keep[order]
    frame = place // n
    outputs = {
        "segments": torch.tensor(segments),
        "total_reduced": torch.tensor([saved]),
        "effective_ratio": torch.tensor([share], dtype=torch.float64),
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


_prumerge_plus = partial(_prumerge, name="prumerge_plus")
_TILES = "first_layer_cls_attn late_layer_cls_attn"
_PIVOTS = "image_len image_start pivot_image_token pivot_text_token reduction_ratio"
_PIXEL = "anchored metric spatial_merge_size threshold"
# Of each method the driver, the input arrays and the parameters; one with a `?` may be missing.
DRIVERS: dict[str, tuple[Drive, str, str]] = {
    "adaptinfer": (
        partial(_text_cut, name="adaptinfer"),
        "query key",
        "image_len image_start keep",
    ),
    "audio_prune": (_audio_prune, "query key", "keep_rate"),
    "cdpruner": (_cdpruner, "features image_embeds text_embeds", "keep"),
    "dart": (_dart, "states keys", _PIVOTS),
    "divprune": (_divprune, "x", "ratio"),
    "dtd": (_dtd, "x", "H T W absolute threshold"),
    "dycoke": (_dycoke, "x", "merging_ratio tokens_per_frame"),
    "evs": (_evs, "x", "H T W q spatial_merge_size"),
    "fastkv": (_fastkv, "query keys", "kernel_size tsp_length window_size"),
    "fastv": (_fastv, "attn", "image_len image_start r"),
    "fastvid": (_fastvid, "x attn", "beta c d p retention_ratio tau"),
    "framefusion": (_framefusion, "x", "frame_tokens tau keep"),
    "gemfilter": (_gemfilter, "query key", "topk"),
    "hiprune": (_hiprune, "attn_object attn_deep", "alpha retention"),
    "hired": (_hired, _TILES, "alpha n_tokens num_partitions rate grids? image_sizes?"),
    "holitom": (_holitom, "x attn", "D K beta max_window_size retain_ratio tau"),
    "holitom_inner": (_holitom_inner, "x attn", "image_len image_start r"),
    "info_rank": (_info_rank, "x", "keep sys_length"),
    "ivc_prune": (_ivc_prune, "values rope", "image_len image_start"),
    "litevggt": (_litevggt, "x pixels", "H T W"),
    "pixelprune": (_pixelprune, "pixel_values grid_thw", _PIXEL),
    "prumerge": (_prumerge, "q_cls k features", "adaptive ratio?"),
    "prumerge_plus": (_prumerge_plus, "q_cls k features", "adaptive ratio?"),
    "prunevid": (_prunevid, "x", "cluster_ratio tau temporal_segment_ratio"),
    "prunevid_inner": (
        partial(_text_cut, name="prunevid_inner"),
        "query key",
        "alpha image_len image_start",
    ),
    "pyramiddrop": (_pyramiddrop, "query key", "image_index image_tokens prompt_len ratios"),
    "saint": (_saint, "keys", "K? gamma? keep_num? r? sim_threshold?"),
    "script": (_script, "features image_embeds text_embeds", "keep"),
    "sparsevlm": (_sparsevlm, "x query attn", "keep"),
    "stc_pruner": (_stc_pruner, "x", "chunk_frames keep_per_frame model"),
    "tome": (_tome, "metric x size?", "class_token distill_token r"),
    "v_cast": (_v_cast, "x", "retain_ratio"),
    "vidcom2": (_vidcom2, "x", "base_scale tokens_per_frame model?"),
    "vispruner": (_vispruner, "attn features", "important_ratio visual_token_num"),
    "visiondrop": (_visiondrop, "query key x", "contextual dominant image_len image_start"),
    "visionzip": (_visionzip, "cls_attn hidden metric", "contextual dominant"),
    **CACHE_DRIVERS,
    **PREFILL_DRIVERS,
}
