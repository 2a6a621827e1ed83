"""Drivers that reproduce golden vectors with the cache policies, one function a method.

They read queries and keys of one layer, and find the attention that a policy asks for as a cache
does. Names of parameters are those of the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.caches.plan import CachePlan, plan_cache
from mmfast.core.blocks import PromptLayer
from mmfast.core.errors import MmfastError
from mmfast.core.kv import Clusters, LayerStep, StepChoice
from mmfast.core.reduction import gather_rows
from mmfast.core.tokens import Tokens
from mmfast.models.kv.gates import KeyGate
from mmfast.models.reduction.probe import head_mass, probe_mass
from mmfast.ops.block_selection import block_sums, last_queries, pooled_scores, probe_rows
from mmfast.ops.pages import bound_scores, marked_places, selected_attention
from mmfast.ops.quantisation import dequantise
from mmfast.ops.ranking import index_mask
from mmfast.prefill.flexprefill import estimate, jensen_shannon
from mmfast.prefill.minference import SPLITS
from mmfast.prefill.plan import plan_prefill

Arrays = Mapping[str, Tensor]
Params = Mapping[str, Any]
Outcome = tuple[dict[str, Tensor], list[str]]
Drive = Callable[[Arrays, Params], Outcome]

_POOLS = {"maxpool": "max", "avgpool": "mean"}


def plan_of(spec: str) -> CachePlan:
    """Return the plan of a spec that names a policy."""
    plan = plan_cache(spec)
    assert plan is not None
    return plan


def prefill_method(spec: str) -> Any:
    """Return what a spec of sparse prefill chooses blocks with."""
    plan = plan_prefill(spec)
    assert plan is not None
    return plan.selector()


def _finite(arrays: Arrays) -> None:
    for name, array in arrays.items():
        if not bool(array.isfinite().all()):
            raise MmfastError(f"{name} are not finite")


def attention(query: Tensor, keys: Tensor, last: int) -> Tensor:
    """Attention `[H, n]` of the last queries `[Hq, c, d]`, mean over those that share a key head.

    Summed over the queries; an MmfastError says that they are not finite.
    """
    count = query.shape[1]
    found = head_mass(query[None], keys[None], 0, torch.arange(count - last, count))
    if not bool(found.isfinite().all()):
        raise MmfastError("queries or keys are not finite")
    return found


def _window_knobs(params: Params) -> str:
    names = f"window={params['window_size']}&kernel={params['kernel_size']}"
    return f"{names}&pool={_POOLS[params['pooling']]}"


def _snapkv(arrays: Arrays, params: Params) -> Outcome:
    keys = arrays["keys"]
    votes = attention(arrays["query"], keys, params["window_size"]) / params["window_size"]
    tokens = Tokens(keys, signals={"attn_window": votes})
    knobs = _window_knobs(params)
    return {
        "kept": plan_of(f"snapkv:{params['max_capacity_prompt']}?{knobs}").reduce(tokens).keep
    }, []


def _h2o(arrays: Arrays, params: Params) -> Outcome:
    query, keys = arrays["query"], arrays["keys"]
    heavy, recent, n = params["hh_size"], params["recent_size"], params["prompt"]
    plan = plan_of(f"h2o:{heavy + recent}?recent={recent / (heavy + recent)}")
    held = torch.arange(n).expand(len(keys), -1)  # the numbers of the tokens of each head
    gathered = attention(query[:, :n], keys[:, :n], n)
    found = []
    for step in range(n, keys.shape[1] + 1):
        keep = plan.reduce(Tokens(gather_rows(keys, held), signals={"attn_sum": gathered})).keep
        held, gathered = held.gather(-1, keep), gathered.gather(-1, keep)
        found.append(held)
        if step < keys.shape[1]:
            held = F.pad(held, (0, 1), value=step)
            now = attention(query[:, step : step + 1], gather_rows(keys, held), 1)
            gathered = F.pad(gathered, (0, 1)) + now
    return {"kept": torch.stack(found)}, []


def _pyramidkv(arrays: Arrays, params: Params) -> Outcome:
    window, layers = params["window_size"], len(arrays["keys"])
    spec = f"pyramidkv:{params['max_capacity_prompt']}?beta={float(params['beta'])}"
    plan = plan_of(f"{spec}&{_window_knobs(params)}")
    found = []
    for depth, (query, keys) in enumerate(zip(arrays["query"], arrays["keys"], strict=True)):
        signals = {"attn_window": attention(query, keys, window) / window}
        signals |= {"depth": torch.tensor(depth), "depths": torch.tensor(layers)}
        found.append(plan.reduce(Tokens(keys, signals=signals)).keep)
    counts = torch.tensor([kept.shape[-1] for kept in found])
    return {"counts": counts, "kept": torch.cat(found, -1)}, []


def _step(arrays: Arrays, depth: int, depths: int, layer: int | None = None) -> LayerStep:
    """Return the decode step of arrays `query` `[H, 1, d]` and `keys` of a layer."""
    query, keys = (x if layer is None else x[layer] for x in (arrays["query"], arrays["keys"]))
    if not bool(query.isfinite().all() and keys.isfinite().all()):
        raise MmfastError("queries or keys are not finite")
    rows = query[None].unflatten(1, (len(keys), -1)).squeeze(3)
    return LayerStep(rows, keys[None], query.shape[-1] ** -0.5, depth, depths)


def _marks(choice: StepChoice, heads: int, n: int) -> Tensor:
    """Mark `[H, n]` the entries that a choice reads."""
    if choice.pages is None:
        return torch.ones(heads, n, dtype=torch.bool)
    index, _ = choice.entries(n)
    return index_mask(index[0].expand(heads, -1), n)


def _quest(arrays: Arrays, params: Params) -> Outcome:
    page, (heads, n, _) = params["chunk_size"], arrays["keys"].shape
    wanted = params["token_budget"] // page - 1  # the newest page counts there
    selector = plan_of(f"quest:{wanted * page}?page={page}&skip=0").selector()
    assert selector is not None
    step = _step(arrays, 0, 1)
    read = _marks(selector.choose(step), heads, n)
    bounds = step.memory["bounds"].grow(step.keys, (n - 1) // page)
    score = bound_scores(step.query, bounds)[0]
    return {"read": read, "bounds": score}, []


def _tidaldecode(arrays: Arrays, params: Params) -> Outcome:
    layers, heads, n, _ = arrays["keys"].shape
    # The newest token, which is always read here, is among the chosen ones there.
    spec = f"tidaldecode:{params['top_k'] - 1}?skip={params['sparse_layer_start']}"
    plan = plan_of(f"{spec}&again={params['correction_layer'] / layers}")
    selector, shared = plan.selector(), dict[str, Any]()
    assert selector is not None
    marks, out = [], []
    for layer in range(layers):
        step = replace(_step(arrays, layer, layers, layer), shared=shared)
        read = _marks(selector.choose(step), heads, n)
        places, real = marked_places(read[None])
        values = arrays["values"][layer][None]
        query = arrays["query"][layer][None]
        out.append(selected_attention(query, step.keys, values, places, real=real)[0, :, 0])
        marks.append(read)
    return {"read": torch.stack(marks), "out": torch.stack(out)}, []


def _quant(arrays: Arrays, params: Params) -> Outcome:
    group = params["group_size"]
    store = plan_of(f"quant:{params['bits']}?group={group}").quantiser()
    assert store is not None
    found: dict[str, Tensor] = {}
    for name, dim in (("key", -2), ("value", -1)):
        packed = store.pack(arrays[f"{name}s"], keys=name == "key")
        low, step = (x.repeat_interleave(group, dim) for x in (packed.low, packed.step))
        codes = ((dequantise(packed) - low) / step).round().to(torch.uint8)
        found[f"{name}_codes"] = codes
        found |= {f"{name}_low": packed.low, f"{name}_scale": packed.step}
    return found, []


def _adakv(arrays: Arrays, params: Params) -> Outcome:
    keys, window = arrays["keys"], params["window_size"]
    votes = attention(arrays["query"], keys, window) / window
    spec = f"snapkv:{params['base_capacity']}?{_window_knobs(params)}"
    plan = plan_of(f"{spec}+adakv?alpha={float(params['floor_alpha'])}")
    return {"kept": plan.marks(Tokens(keys, signals={"attn_window": votes}))}, []


def _vatp(arrays: Arrays, params: Params) -> Outcome:
    keys, n = arrays["keys"], arrays["keys"].shape[1]
    heavy, recent = (int(params[f"{name}_ratio"] * n) for name in ("heavy", "recent"))
    plan = plan_of(
        f"vatp:{heavy + recent}?sink={params['sink_len']}&recent={recent / (heavy + recent)}"
    )
    signals = {"attn_sum": attention(arrays["query"], keys, n), "values": arrays["values"]}
    return {"kept": index_mask(plan.reduce(Tokens(keys, signals=signals)).keep, n)}, []


def _keynorm(arrays: Arrays, params: Params) -> Outcome:
    keys, group = arrays["keys"], params["group"]
    heads, n, _ = keys.shape
    plan = plan_of(f"keynorm:{n // group * int(group * params['top_p'])}?group={group}")
    found = plan.reduce(Tokens(keys, signals={"kind": torch.ones(n, dtype=torch.int64)}))
    return {"kept": found.keep.reshape(heads, -1)[0]}, []


def _keyformer(arrays: Arrays, params: Params) -> Outcome:
    n = params["prompt"]
    query, keys = (arrays[name][:, :n] for name in ("query", "keys"))
    total = int(n * params["kv_cache"] / 100)
    last = int(total * params["recent"] / 100)
    signals = {"attn_sum": attention(query, keys, n), "layer": torch.tensor(0)}
    plan = plan_of(f"keyformer:{total}?noise=0.0&recent={last / total}")
    # The reference loses the first of the recent tokens at once, and that is no choice.
    return {"chosen": plan.reduce(Tokens(keys, signals=signals)).keep[:, : total - last]}, []


def _lookm(arrays: Arrays, params: Params) -> Outcome:
    keys, n = arrays["keys"], arrays["keys"].shape[1]
    kind, size = torch.zeros(n, dtype=torch.long), params["image_tokens"]
    for number, place in enumerate(params["image_position"]):
        first = place + number * (size - 1)  # images before it held one place each
        kind[first : first + size] = 1
    heavy, recent = params["hh_size"], params["recent_size"]
    signals = {"attn_sum": attention(arrays["query"], keys, n), "kind": kind}
    plan = plan_of(f"lookm:{heavy + recent}?recent={recent / (heavy + recent)}")
    found = plan.reduce(Tokens(keys, signals=signals))
    merged = {name: found.apply(arrays[name]) for name in ("keys", "values")}
    return {"kept": found.keep, **merged}, []


def _mixkv(arrays: Arrays, params: Params) -> Outcome:
    keys, window = arrays["keys"], params["window_size"]
    _finite(arrays)
    votes = attention(arrays["query"], keys, window) / window
    tokens = Tokens(keys, signals={"attn_window": votes, "values": arrays["values"]})
    spec = f"mixkv:{params['max_capacity_prompt']}?{_window_knobs(params)}"
    return {"kept": plan_of(spec).reduce(tokens).keep}, []


def _cam(arrays: Arrays, params: Params) -> Outcome:
    _finite(arrays)
    query, keys, values = (arrays[name] for name in ("query", "keys", "values"))
    start, recent, n = params["start_budget"], params["recent_budget"] - 2, keys.shape[1]
    merge = params["merge_budget"]
    plan = plan_of(f"sink:{start}+cam:{recent}?recent=1.0&merge={merge}")
    begin = n - query.shape[1] + 1  # tokens at the first step
    held = torch.cat([torch.arange(start), torch.arange(begin - recent - 1, begin)])
    held = held.expand(len(keys), -1)
    kept = gather_rows(values, held)
    for step in range(query.shape[1]):
        rows = gather_rows(keys, held)
        now = attention(query[:, step : step + 1], rows, 1)
        found = plan.reduce(Tokens(rows, signals={"attn_sum": now}))
        kept, held = found.apply(kept), held.gather(-1, found.keep)
        if begin + step < n:
            held = F.pad(held, (0, 1), value=begin + step)
            kept = torch.cat([kept, values[:, begin + step, None]], 1)
    return {"kept": held, "values": kept}, []


_GATE = "query query_bias key query_norm key_norm sinks bias"


def _fastkvzip(arrays: Arrays, params: Params) -> Outcome:
    _finite(arrays)
    names = "query.weight query.bias key.weight query_scale key_scale sinks bias"
    tensors = {
        name: arrays[theirs] for name, theirs in zip(names.split(), _GATE.split(), strict=True)
    }
    tensors |= {name: tensors[name].squeeze(1) for name in ("sinks", "bias")}
    states, first = arrays["states"], params["sink"]
    scores = KeyGate.of(tensors)(states).T
    n = len(states)
    # Half a token more, so that the share of the last tokens is cut at their number.
    knobs = f"sink={first}&recent={(params['window_size'] + 0.5) / n}"
    plan = plan_of(f"fastkvzip:{first + int((n - first) * params['ratio'])}?{knobs}")
    tokens = Tokens(scores[..., None], signals={"key_gate": scores})
    return {"scores": scores, "kept": plan.reduce(tokens).keep}, []


def _simlayerkv(arrays: Arrays, params: Params) -> Outcome:
    knobs = "&".join(f"{name}={params[name]}" for name in ("sink", "recent", "threshold"))
    plan, found = plan_of(f"simlayerkv?window=1&{knobs}"), []
    for query, keys in zip(arrays["query"], arrays["keys"], strict=True):
        signals = {"attn_window": attention(query, keys, 1)}
        found.append(plan.reduce(Tokens(keys, signals=signals)).keep[0])  # of all heads
    return {"counts": torch.tensor([len(kept) for kept in found]), "kept": torch.cat(found)}, []


def _think(arrays: Arrays, params: Params) -> Outcome:
    _finite(arrays)
    query, keys, width = arrays["query"], arrays["keys"], arrays["keys"].shape[-1]
    stays = width - int(width * params["ratio"])
    pruner = plan_of(f"think:{stays}?residual={params['recent_size']}").pruner()
    assert pruner is not None
    power = query[:, -pruner.window :].square().unflatten(0, (len(keys), -1)).sum((1, 2))
    split = keys.shape[1] - pruner.residual
    thin = pruner.prune(keys[:, :split], pruner.score(keys, power))
    channels = index_mask(thin.kept.long(), width)
    return {"channels": channels, "keys": torch.cat([thin.whole(), keys[:, split:]], 1)}, []


def _duo_attention(arrays: Arrays, params: Params) -> Outcome:
    _finite(arrays)
    gates, n = arrays["gates"], params["tokens"]
    more = gates.flatten() >= gates[..., None]  # heads that retrieve no less, [L, H, L * H]
    knobs = f"sink={params['sink_size']}&recent={params['recent_size']}"
    plan = plan_of(f"duo_attention?retrieval={1 - params['sparsity']}&{knobs}")
    found = []
    for reach in more.double().mean(-1):
        empty = torch.zeros(gates.shape[1], n, 1)
        found.append(plan.marks(Tokens(empty, signals={"query_reach": reach})))
    return {"kept": torch.stack(found)}, []


def _infinipot_v(arrays: Arrays, params: Params) -> Outcome:
    first, size = params["system_size"], params["token_per_frame"]
    place = torch.arange(arrays["keys"].shape[1]) - first
    signals = {
        "frame": torch.where(place < 0, -1, place // size),
        "spot": place.clamp_min(0) % size,
    }
    knobs = f"tar={float(params['tar_ratio'])}&recent={float(params['query_ratio'])}"
    plan = plan_of(f"infinipot_v:{first + params['compress_frame_num'] * size}?{knobs}")
    signals |= {"values": arrays["values"]}
    return {"kept": plan.reduce(Tokens(arrays["keys"], signals=signals)).keep}, []


def _lagkv(arrays: Arrays, params: Params) -> Outcome:
    keys, sink, lag = arrays["keys"], params["sink_size"], params["lag_size"]
    _finite(arrays)
    parts = (keys.shape[1] - sink) // lag - 1  # that lose some of their tokens
    budget = keys.shape[1] - parts * (lag - int(params["ratio"] * lag))
    plan = plan_of(f"lagkv:{budget}?sink={sink}&lag={lag}")
    return {"kept": plan.reduce(Tokens(keys, signals={"values": arrays["values"]})).keep}, []


def _zipcache(arrays: Arrays, params: Params) -> Outcome:
    query, keys = arrays["query"][None], arrays["keys"]
    _finite(arrays)
    n = keys.shape[1]
    sums, seen = probe_mass(query, keys[None], 0, torch.arange(n))  # all of them are probes
    plan = plan_of(f"zipcache:{n - int(params['k_unimportant_ratio'] * n)}")
    found = plan.reduce(Tokens(keys, signals={"attn_probed": sums / seen}))
    return {"kept": found.keep[0]}, []


def _sentencekv(arrays: Arrays, params: Params) -> Outcome:
    query, keys, size = arrays["query"], arrays["keys"], params["sentence_tokens"]
    _finite(arrays)
    n, count = keys.shape[1], keys.shape[1] // size
    selector = plan_of(f"sentencekv:{params['budget']}").selector()
    assert selector is not None
    # The newest token, which asks, is the first one of a sentence behind those of the file.
    keys = F.pad(keys, (0, 0, 0, 1))
    step = _step({"query": query.mean(1, keepdim=True), "keys": keys}, 0, 1)
    step = replace(step, sentence=torch.arange(n + 1)[None].clamp_max(count * size) // size)
    read = _marks(selector.choose(step), len(keys), n + 1)[:, :n]
    return {"read": read, "means": step.memory["means"].means}, []


def _tokenselect(arrays: Arrays, params: Params) -> Outcome:
    keys, first, last = arrays["keys"], params["n_init"], params["n_local"]
    place = torch.arange(keys.shape[1])
    selector = plan_of(f"tokenselect:{params['topk']}").selector()
    assert selector is not None
    stays = (place < first) | (place >= len(place) - last)
    step = replace(_step(arrays, 0, 1), stays=stays, scale=1.0)  # the reference does not divide
    return {"read": _marks(selector.choose(step), 1, len(place))[0]}, []


def _rekv(arrays: Arrays, params: Params) -> Outcome:
    _finite(arrays)
    means = arrays["means"]
    retriever = plan_of(f"rekv:{params['topk']}?chunk={params['chunk_size']}").retriever()
    number = torch.arange(len(means))
    index = Clusters(means, torch.ones_like(number), number)
    return {"read": retriever.choose(arrays["query"], index)}, []


def _prompt(arrays: Arrays) -> PromptLayer:
    """Return a layer of arrays `query` and `keys` `[H, n, d]` that has no earlier part."""
    _finite(arrays)
    return PromptLayer(arrays["query"][:, None], arrays["keys"], arrays["keys"].shape[-1] ** -0.5)


def _minference(arrays: Arrays, params: Params) -> Outcome:
    if "slash_size" in params:
        return _vertical_slash(_prompt(arrays), params["vertical_size"], params["slash_size"])
    layer, size = _prompt(arrays), params["block_size"]
    # The own block, which is always read here, is among the chosen ones there.
    share = (params["top_k"] - 1) / -(-layer.n // size)
    chooser = prefill_method(f"minference:{float(share)}?block={size}")
    found = [chooser.block_sparse(layer, head)[0] for head in range(layer.heads)]
    return {"blocks": torch.stack(found)}, []


def _vertical_slash(layer: PromptLayer, columns: int, slashes: int) -> Outcome:
    """Columns and distances that the second pattern reads, with blocks of one token."""
    chooser = prefill_method(f"minference:{(columns + slashes) / layer.n}?block=1")
    last, found = last_queries(layer, chooser.probes), []
    way = SPLITS.index(columns / (columns + slashes))
    for head in range(layer.heads):
        rows = probe_rows(layer, head, last).mean(0)
        blocks, chosen = chooser.vertical_slash(layer, rows, last)[way]
        near = blocks[-1].flip(0)  # of the last query
        near[0] = True  # itself, which is always read
        found.append((chosen, near))
    marks = (torch.stack(each) for each in zip(*found, strict=True))
    return dict(zip(("columns", "slashes"), marks, strict=True)), []


def _flexprefill(arrays: Arrays, params: Params) -> Outcome:
    layer, size = _prompt(arrays), params["block_size"]
    chooser = prefill_method(f"flexprefill?tau={float(params['tau'])}&block={size}")
    columns = chooser.choose(layer).columns
    trusted = ~columns.any(-1)  # the other pattern has columns
    last, heads = last_queries(layer, size), range(layer.heads)
    rows = [block_sums(probe_rows(layer, head, last).mean(0), size) for head in heads]
    pairs = [(estimate(layer, head, size), rows[head]) for head in heads]
    shares = [pooled_scores(layer, h, size, own=True) for h in heads if trusted[h]]
    distance = torch.tensor([jensen_shannon(*pair) for pair in pairs])
    return {"trusted": trusted, "distance": distance, "shares": torch.stack(shares)}, []


def _pbs(arrays: Arrays, params: Params) -> Outcome:
    layer, size = _prompt(arrays), params["block_size"]
    segment = params["segment_size"] // size
    share = float(params["threshold"])
    found = prefill_method(f"pbs:{share}?block={size}&segment={segment}").choose(layer)
    assert found.order is not None
    return {"order": found.order, "blocks": found.blocks}, []


_WINDOW = "kernel_size max_capacity_prompt pooling window_size"
_FRAMES = "compress_frame_num query_ratio system_size tar_ratio token_per_frame"
# As `DRIVERS` in `parity`, which has these, too.
CACHE_DRIVERS: dict[str, tuple[Drive, str, str]] = {
    "adakv": (_adakv, "query keys", "base_capacity floor_alpha kernel_size pooling window_size"),
    "cam": (_cam, "query keys values", "merge_budget recent_budget start_budget"),
    "duo_attention": (_duo_attention, "gates", "recent_size sink_size sparsity tokens"),
    "fastkvzip": (_fastkvzip, f"states {_GATE}", "ratio sink window_size"),
    "h2o": (_h2o, "query keys", "hh_size prompt recent_size"),
    "keynorm": (_keynorm, "keys", "group top_p"),
    "infinipot_v": (_infinipot_v, "keys values", _FRAMES),
    "keyformer": (_keyformer, "query keys", "kv_cache prompt recent"),
    "lagkv": (_lagkv, "keys values", "lag_size ratio sink_size"),
    "lookm": (_lookm, "query keys values", "hh_size image_position image_tokens recent_size"),
    "mixkv": (_mixkv, "query keys values", _WINDOW),
    "pyramidkv": (_pyramidkv, "query keys", f"{_WINDOW} beta"),
    "quant": (_quant, "keys values", "bits group_size"),
    "quest": (_quest, "query keys", "chunk_size token_budget"),
    "rekv": (_rekv, "query means", "chunk_size topk"),
    "sentencekv": (_sentencekv, "query keys", "budget sentence_tokens"),
    "simlayerkv": (_simlayerkv, "query keys", "recent sink threshold"),
    "think": (_think, "query keys", "ratio recent_size"),
    "tidaldecode": (_tidaldecode, "query keys values", "correction_layer sparse_layer_start top_k"),
    "snapkv": (_snapkv, "query keys", _WINDOW),
    "vatp": (_vatp, "query keys values", "heavy_ratio recent_ratio sink_len"),
    "tokenselect": (_tokenselect, "query keys", "n_init n_local topk"),
    "zipcache": (_zipcache, "query keys", "k_unimportant_ratio"),
}
PREFILL_DRIVERS: dict[str, tuple[Drive, str, str]] = {
    "flexprefill": (_flexprefill, "query keys", "block_size tau"),
    "minference": (_minference, "query keys", "block_size? top_k? slash_size? vertical_size?"),
    "pbs": (_pbs, "query keys", "block_size segment_size threshold"),
}
