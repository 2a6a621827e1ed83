"""Helpers that several tests share: merge checks."""

from __future__ import annotations

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from mmfast.core.spec import parse
from mmfast.core.trace import Trace
from mmfast.models.families.adapter import adapter_for
from mmfast.models.vision.merge import vit_stage


def stage(model, text, trace=None):
    trace = Trace() if trace is None else trace
    return vit_stage(model, adapter_for(model), parse(text)[0], trace)


def _pairs(window, r):
    """Tokens to merge: even ones into their most similar odd one, the `r` best."""
    best = []
    odd = torch.stack([token["key"] for token in window[1::2]])
    for i in range(0, len(window), 2):
        cosines = torch.cosine_similarity(window[i]["key"], odd, dim=1).tolist()
        scores = [(cosine, -(2 * j + 1)) for j, cosine in enumerate(cosines)]
        score, j = max(scores)
        best.append((score, -i, -j))
    return [(-i, j) for _, i, j in sorted(best, reverse=True)[:r]]


def _merge(window, target):
    """One round; a merged token stands where the odd one stood."""
    pairs = _pairs(window, len(window) - target)
    for i, j in pairs:
        window[j].setdefault("joined", []).append(window[i])
    gone = {i for i, _ in pairs}
    out = []
    for token in (t for n, t in enumerate(window) if n not in gone):
        group = [token, *token.pop("joined", [])]
        size = sum(t["size"] for t in group)
        x = sum(t["x"] * t["size"] for t in group) / size
        patches = [p for t in group for p in t["patches"]]
        share = {p: value for t in group for p, value in t["share"].items()}
        out.append({**token, "x": x, "size": size, "patches": patches, "share": share})
    return out


def _attend(tokens, heads):
    """Attention in which a token of size s weighs as s keys; notes what each token receives."""
    sizes = torch.tensor([float(token["size"]) for token in tokens])
    mixed, total = [[] for _ in tokens], torch.zeros(len(tokens))
    for h in range(heads):
        keys = torch.stack([token["k"][h] for token in tokens])
        values = torch.stack([token["v"][h] for token in tokens])
        for token, parts in zip(tokens, mixed, strict=True):
            weights = sizes * (keys @ token["q"][h] * keys.shape[-1] ** -0.5).exp()
            weights = weights / weights.sum()
            parts.append(weights @ values)
            total += weights / heads / len(tokens)
    for token, value in zip(tokens, total.tolist(), strict=True):
        token["received"] = value
    return [torch.cat(parts) for parts in mixed]


def _naive_block(block, norms, project, out, windows, targets, full, tables):
    """One block on one frame; attention per window, or over all windows where `full`."""
    for token in (t for w in windows for t in w):
        q, k, v = project(norms[0](token["x"][None]))
        if tables is not None:
            place = token["place"]
            q, k = apply_rotary_pos_emb_vision(q[None], k[None], *(t[place][None] for t in tables))
            q, k = q[0], k[0]
        token.update(q=q, k=k, v=v, key=k.mean(0))
    scopes = [[t for w in windows for t in w]] if full else windows
    for scope in scopes:
        mixed = _attend(scope, 4)
        for token, value in zip(scope, mixed, strict=True):
            token["x"] = token["x"] + out(value[None])[0]
    for token in (t for w in windows for t in w):
        token["share"] = dict.fromkeys(token["patches"], token["received"] / token["size"])
    windows = [_merge(w, n) if n < len(w) else w for w, n in zip(windows, targets, strict=True)]
    for token in (t for w in windows for t in w):
        token["x"] = token["x"] + block.mlp(norms[1](token["x"][None]))[0]
    return windows


def _spread_back(windows, count, width):
    full = torch.zeros(count, width)
    for token in (t for w in windows for t in w):
        full[token["patches"]] = token["x"]
    return full


def _steps(n, budget, blocks):
    return [n - (n - budget) * (i + 1) // blocks for i in range(blocks)]


def _naive_siglip(model, frames, budget, blocks):
    """Hidden states `[B, N, D]` after `blocks` blocks that leave `budget` of the N patches.

    Also the attention each patch's token received in the last block, per patch, `[B, N]`.
    """
    tower, done, received = model.model.vision_tower, [], []
    for start in tower.embeddings(frames):
        windows = [[{"x": x, "size": 1, "patches": [p]} for p, x in enumerate(start)]]
        for block, target in zip(
            tower.encoder.layers, _steps(len(start), budget, blocks), strict=False
        ):
            attn = block.self_attn
            project = lambda x, a=attn: [
                f(x)[0].unflatten(0, (4, 8)) for f in (a.q_proj, a.k_proj, a.v_proj)
            ]
            norms = (block.layer_norm1, block.layer_norm2)
            windows = _naive_block(
                block, norms, project, attn.out_proj, windows, [target], True, None
            )
        done.append(_spread_back(windows, *start.shape))
        shares = {p: value for t in windows[0] for p, value in t["share"].items()}
        received.append(torch.tensor([shares[p] for p in range(len(start))]))
    return torch.stack(done), torch.stack(received)
