"""How the reducers are driven to reproduce a golden vector, one function a method.

A driver takes the `in.*` arrays and the parameters of a file and returns the `out.*` arrays as
mmfast computes them, and a list of further faults: where the exact mode breaks its own promise.
"""

from __future__ import annotations

import torch

from mmfast.bench import parity_encoder, parity_video
from mmfast.bench.parity_base import Arrays, Driver, Outcome, Params, order_of, run
from mmfast.core.errors import MmfastError
from mmfast.core.tokens import Tokens
from mmfast.ops.bipartite import match
from mmfast.ops.max_min import max_min
from mmfast.ops.max_min_reference import max_min_reference
from mmfast.ops.paired_cosine import temporal_cosine
from mmfast.ops.ranking import stable_topk
from mmfast.ops.static_windows import static_windows


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
        raise MmfastError(
            f"parameter D={params['D']}: contextual tokens of a frame are not covered"
        )
    frames, n, _ = arrays["x"].shape
    x, total = arrays["x"].flatten(0, 1), frames * n
    knobs = {
        "ratio": params["retain_ratio"],
        "tau": params["tau"],
        "beta": params["beta"],
        "neighbours": params["K"],
        "window": params["max_window_size"],
    }
    spec = "holitom?parity=true&" + "&".join(f"{name}={value}" for name, value in knobs.items())
    merged = run(Tokens(x, attn=arrays["attn"].flatten(), grid=(frames, 1, n)), spec)
    similarity = temporal_cosine(x, frames)
    segments, saved = static_windows(similarity > params["tau"], params["max_window_size"])
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


DRIVERS: dict[str, Driver] = {
    **parity_encoder.DRIVERS,
    **parity_video.DRIVERS,
    "divprune": _divprune,
    "evs": _evs,
    "fastv": _fastv,
    "holitom": _holitom,
    "tome": _tome,
    "visionzip": _visionzip,
}
