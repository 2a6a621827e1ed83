"""Golden vectors of methods that read an image encoder; see parity.py."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.bench.parity_base import Arrays, Driver, Outcome, Params, mask_of, run
from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens
from mmfast.models.scores import last_query_scores
from mmfast.ops.outliers import outlier_count
from mmfast.reducers.cdpruner import picks, relevance


def _hiprune(arrays: Arrays, params: Params) -> Outcome:
    middle, deep = (arrays[name].mean((1, 2))[:, 1:] for name in ("attn_object", "attn_deep"))
    budget = int(params["retention"] / len(deep))
    side = round(deep.shape[1] ** 0.5)
    spec = f"hiprune:{budget}?parity=true&alpha={params['alpha']}"
    crops = [
        run(
            Tokens(d[:, None], grid=(1, side, side), signals={"attn_visual": d, "attn_middle": m}),
            spec,
        )
        for d, m in zip(deep, middle, strict=True)
    ]
    outputs = {
        "mask": torch.stack([mask_of(crop) for crop in crops]),
        "indices": torch.cat([crop.keep for crop in crops]),
        "counts": torch.tensor([crop.m for crop in crops]),
    }
    return outputs, []


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
    outputs = {
        "mask": torch.cat(masks),
        "kept_per_partition": torch.cat(kept),
        "sub_budgets": torch.cat([counts[1:] for counts in kept]),
    }
    return outputs, []


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


def _prumerge_plus(arrays: Arrays, params: Params) -> Outcome:
    return _prumerge(arrays, params, "prumerge_plus")


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


DRIVERS: dict[str, Driver] = {
    "cdpruner": _cdpruner,
    "hiprune": _hiprune,
    "hired": _hired,
    "prumerge": _prumerge,
    "prumerge_plus": _prumerge_plus,
}
