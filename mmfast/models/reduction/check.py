"""Refusal of stages that a model cannot run, before anything of the model is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from mmfast.caches.plan import CachePlan
from mmfast.compressors.base import check_file, find
from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.registry import ALL, MEDIA, TEXT, TOKENS, methods
from mmfast.core.spec import Spec, expand
from mmfast.models.families.adapter import Adapter, adapter_for, check_inner, tower_of
from mmfast.models.families.tower import (
    TIMM_BLOCKS,
    Tower,
    argument,
    attention_of,
    check_blocks,
    has_halves,
)
from mmfast.models.kv.sinks import rotary_of
from mmfast.models.reduction.decoder_signals import AHEAD, BEFORE, INNER
from mmfast.models.reduction.look_ahead import layer_ahead
from mmfast.models.reduction.site import POSITIONS
from mmfast.models.vision.folding import check_folded
from mmfast.models.vision.scene import check_scene
from mmfast.models.wrappers import (
    CONV,
    FULL,
    HYBRID,
    KEEPS_ALL,
    LAYER_KINDS,
    RECURRENT,
    attention_at,
    base_of,
    decoder_of,
    feed_forward_at,
    kind_of,
    layers_of,
    lender_of,
    turns_once,
)
from mmfast.rankers import find as find_ranking


def check(
    specs: Sequence[Spec], model: Any, cache: CachePlan | None = None, encoder: str | None = None
) -> tuple[Spec, ...]:
    """Refuse stages that a model cannot run, alone or together; returns schedules as their cuts.

    A budget above the tokens of a prompt, and a signal that its media lack, are refused when the
    stage runs (`reduction.site`). SpecError names a site, a layer, a knob or a combination that the
    model does not have; ModelError an unknown family, or layers that cannot hold reduced tokens.
    """
    adapter = adapter_for(model)
    if adapter.alone:
        _check_alone(specs, tower_of(model), cache, encoder)
        check_folded(encoder, specs, model)
        return tuple(specs)
    text = decoder_of(model)
    if not adapter.media:
        _check_text(specs, model, encoder)
    _check_head([spec for spec in specs if not spec.whole], model)
    _check_parallel(specs, model, cache)
    if cache is not None:
        _check_cache(cache, model)
        if cache.follows and specs:
            raise SpecError(
                f"positions=new of cache '{cache}' closes gaps that the cache has left, and "
                f"'{specs[0]}' leaves others; leave out one of the two"
            )
    _check_concepts([spec for spec in specs if spec.method.rate], model)
    specs = [weighted(placed(spec, model), model) for spec in specs]
    attends = [attention_at(text, index) is not None for index in range(len(layers_of(text)))]
    specs = expand(specs, len(attends), [i + 1 for i, able in enumerate(attends[:-1]) if able])
    for spec in specs:
        _check_site(spec, model, len(attends))
        _check_before(spec, attends)
    specs = tuple(ranked(spec, model) for spec in specs)
    _check_layers([spec for spec in specs if spec.site != "vit"], model)
    _check_order(specs)
    _check_revival(specs, text.config, cache)
    _check_bypass(specs, text, cache)
    _check_tower(specs, adapter, model, encoder)
    check_folded(encoder, specs, model)
    for spec in specs:
        if AHEAD in spec.method.needs:
            layer_ahead(spec, text)
            _check_positions(spec, turns_once(text, adapter.mrope))
    return specs


_BY_PLACE = ("ForTokenClassification", "ForQuestionAnswering")  # heads, by the end of their class
# Signals that are the same in every process of tensor parallelism, of which each has some heads.
_SHARED = {"x", "query", "grid", "pixels", "image", "kind", "drift", "rope"}


def _check_head(specs: Sequence[Spec], model: Any) -> None:
    """Refuse cuts under a head that answers by the places of all tokens."""
    name = type(model).__name__
    if specs and name.endswith(_BY_PLACE):
        raise ModelError(
            f"'{specs[0]}' drops tokens, and {name} answers at places of the whole prompt; leave "
            "out reduce=, or use a head that generates or classifies the prompt"
        )


def _check_parallel(specs: Sequence[Spec], model: Any, cache: CachePlan | None) -> None:
    """Refuse what would choose by the heads of one process, each of them other tokens."""
    if (getattr(model, "tp_size", None) or 1) == 1:
        return
    parts = () if cache is None else cache.parts
    by_head = [str(s) for s in specs if not s.whole and not set(s.method.needs) <= _SHARED]
    by_head += [f"cache '{part}'" for part in parts if part.method.role != "position"]
    if by_head:
        raise ModelError(
            f"{by_head[0]} reads attention, keys or values, of which each of {model.tp_size} "
            "tensor-parallel processes has its own heads, and would choose its own tokens; use a "
            "method of features such as 'divprune', cache='sink:4+window:512', or data parallelism"
        )


def _check_positions(spec: Spec, turns: bool) -> None:
    """Refuse an unknown way to count positions, and a new count where none is possible."""
    asked, known = spec.knobs.get(POSITIONS, "auto"), ("auto", "new", "original")
    if asked not in known:
        raise SpecError(unknown(f"value of knob {POSITIONS!r} of '{spec}'", asked, known))
    if asked == "new" and not turns:
        raise SpecError(
            f"'{spec}': positions of this model are learned, or frames, rows and columns, which "
            f"cannot be counted anew; write {POSITIONS}=original"
        )


def _check_text(specs: Sequence[Spec], model: Any, encoder: str | None) -> None:
    """Refuse what has nothing to act on in a model that reads text alone."""
    name, text = type(model).__name__, decoder_of(model)
    if encoder:
        raise SpecError(f"encoder={encoder!r}: {name} reads text alone; leave it out")
    for spec in specs:
        if spec.tokens == MEDIA and spec.method.text:
            able = spec.site == "llm" or AHEAD in spec.method.needs
            inside = spec if able else replace(spec, site="llm", layer=spec.method.layer)
            raise SpecError(
                f"'{spec}' acts on tokens of media, and {name} reads text alone; write "
                f"'{replace(inside, knobs={**spec.knobs, TOKENS: TEXT})}'"
            )
        if spec.tokens == MEDIA:
            known = ", ".join(method.name for method in methods("reducer") if method.text)
            raise SpecError(
                f"'{spec}' acts on tokens of media, and {name} reads text alone; reducers of text: "
                f"{known}; cache='snapkv:1024' bounds its memory"
            )
    if specs and not hasattr(text, "layers"):  # GPT-2 and those built like it
        raise ModelError(
            f"'{specs[0]}': {name} gives its output the length of the prompt, so its layers cannot "
            "hold fewer tokens; cache='snapkv:1024' bounds its memory"
        )


def _check_cache(cache: CachePlan, model: Any) -> None:
    """Require a layer whose keys and values a policy can act on."""
    text = decoder_of(model)
    kinds = [kind_of(text.config, index) for index in range(len(layers_of(text)))]
    lent = any(lender_of(text.config, index) != index for index in range(len(kinds)))
    if lent and (cache.store or cache.heads or cache.bits or cache.retrieve is not None):
        raise ModelError(
            f"cache '{cache}' packs or picks for the attention of a layer, and the last layers of "
            f"{type(model).__name__} read the same entries; evict instead, as 'snapkv:1024' does"
        )
    if not set(kinds) & set(KEEPS_ALL):
        raise ModelError(
            f"cache '{cache}' has nothing to act on in {type(model).__name__}, whose layers are "
            f"all of type {', '.join(sorted(set(kinds)))}, bounded by themselves; leave it out"
        )
    if HYBRID in kinds and (cache.store or cache.heads or cache.bits):
        raise ModelError(
            f"cache '{cache}' packs whole layers, and those of {type(model).__name__} remember a "
            "recurrence beside keys and values; evict instead, as 'snapkv:1024' does"
        )
    if all(attention_at(text, index) is None for index in range(len(kinds))):
        raise ModelError(
            f"{type(model).__name__} names its attention in a way that is not known, so cache "
            f"'{cache}' cannot act; use a model whose layers have self_attn, attention or attn"
        )
    if cache.follows:
        rotary_of(model)


def _check_alone(
    specs: Sequence[Spec], tower: Tower, cache: CachePlan | None, encoder: str | None
) -> None:
    """Refuse what a vision encoder without a language model does not have."""
    name = type(tower.module).__name__
    if cache is not None:
        raise SpecError(f"cache '{cache}': {name} is an encoder and caches nothing; leave it out")
    for spec in specs:
        if spec.site != "vit":
            raise SpecError(
                f"'{spec}' cannot run in {name}: the only site of an encoder is vit; write for "
                "example 'tome@vit:0.5'"
            )
    inside = [spec for spec in specs if not spec.whole]
    check_scene(inside, tower, encoder)
    for spec in inside:
        check_merge_knobs(spec)
    _check_one(inside)
    if inside and encoder in ("compile", "graph"):
        raise SpecError(
            f"encoder={encoder!r} repeats whole blocks, and '{inside[0]}' merges inside of them; "
            "use encoder='fast' beside it"
        )
    for block in tower.blocks if inside else ():
        plain = type(block).__name__ in TIMM_BLOCKS and hasattr(attention_of(block), "k_norm")
        if not has_halves(block) or (tower.timm and not plain):
            raise ModelError(
                f"'{inside[0]}' merges between attention and MLP, and {type(block).__name__} of "
                f"this {name} is built otherwise; it works in {', '.join(TIMM_BLOCKS)}"
            )


def _check_one(inside: Sequence[Spec]) -> None:
    if len(inside) > 1:
        raise SpecError(
            f"'{inside[1]}' is a second stage of site 'vit'; join both budgets in one stage"
        )


def placed(spec: Spec, model: Any) -> Spec:
    """Move a stage that resizes pictures behind a tower that takes one size of them alone.

    There features are interpolated instead, in families that spend fewer tokens on smaller
    pictures or pool frames themselves; elsewhere it is a ModelError.
    """
    adapter = adapter_for(model)
    if not spec.method.resizes or spec.site != "pixel" or adapter.tower(base_of(model)).packed:
        return spec
    if not adapter.resizes:
        raise ModelError(
            f"'{spec}' is not possible in {adapter.family!r}, whose pictures all have one size and "
            f"number of tokens; '{replace(spec, site='pre')}' interpolates their features instead"
        )
    return replace(spec, site="pre")


def refuse_files(specs: Sequence[Spec]) -> None:
    """Refuse stages that name a file, for callers that must not choose what is read (SpecError)."""
    for spec in specs:
        if spec.knobs.get("path"):
            budget = "" if spec.budget is None else f":{spec.budget}"
            raise SpecError(
                f"'{spec}' names a file, which a request must not; put the weights beside the "
                f"served checkpoint and write '{spec.method.name}{budget}'"
            )


def weighted(spec: Spec, model: Any) -> Spec:
    """Give a learned compressor the file of its weights, by default the one beside the model's."""
    if not spec.method.learned or spec.whole:
        return spec
    adapter = adapter_for(model)
    if adapter.deepstack:
        raise ModelError(
            f"'{spec}' replaces features, and {adapter.family!r} adds DeepStack planes to them "
            "that no compressor has learned; use a reducer that keeps tokens, such as 'divprune'"
        )
    home = str(getattr(model, "name_or_path", "") or "")
    name, tokens = spec.method.name, int(spec.budget or 0)
    path = Path(str(spec.knobs.get("path") or find(home, name, tokens))).absolute()
    check_file(path, name, tokens, int(decoder_of(model).config.hidden_size))
    return replace(spec, knobs={**spec.knobs, "path": str(path)})  # wherever a prompt is read from


def _check_concepts(specs: Sequence[Spec], model: Any) -> None:
    """Require a model of text with rotary positions on one device, and knobs that make sense."""
    adapter, name = adapter_for(model), type(model).__name__
    for spec in specs:
        if adapter.media:
            raise ModelError(f"'{spec}' reads text alone, and {name} media, too; use 'fastkv'")
        if not turns_once(decoder_of(model), adapter.mrope):
            raise ModelError(
                f"'{spec}' counts positions anew, and those of {name} are not rotary; use 'fastv'"
            )
        if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
            raise ModelError(f"'{spec}' needs {name} on one device; load it without device_map")
        for knob, least in (("recent", 1), ("first", 0), ("memory", 0)):
            value = spec.knobs.get(knob, least)
            if value < least:
                raise SpecError(f"knob {knob}={value} of '{spec}' is too small; give {least} on")
    if len(specs) > 1:
        raise SpecError(f"'{specs[1]}' is a second compressor of one text; leave it out")


def ranked(spec: Spec, model: Any) -> Spec:
    """Give a learned ranking its file, by default the one beside the model's."""
    if spec.method.kind != "ranker" or spec.whole:
        return spec
    home, named = str(getattr(model, "name_or_path", "") or ""), str(spec.knobs.get("path", ""))
    path = find_ranking(home, spec.method.name, spec.layer, named).absolute()
    return replace(spec, knobs={**spec.knobs, "path": str(path)})


def _check_site(spec: Spec, model: Any, layers: int) -> None:
    if spec.site not in ("pixel", "vit", "pre", "llm"):
        raise SpecError(
            f"site {spec.where!r} of {str(spec)!r} is not one of pixel, vit, pre, llm<K>"
        )
    if spec.layer is not None and spec.layer >= layers:
        raise SpecError(
            f"{str(spec)!r} asks for decoder layer {spec.layer}, but {type(model).__name__} "
            f"has {layers} layers; choose llm0 to llm{layers - 1}"
        )


def _check_before(spec: Spec, attends: Sequence[bool]) -> None:
    """Require two layers with attention in front of a cut that compares them."""
    able = [index for index, attention in enumerate(attends) if attention]
    if BEFORE in spec.method.needs and not spec.whole and sum(attends[: spec.layer]) < 2:
        what = f"choose llm{able[1] + 1} or later" if len(able) > 2 else "use fastv"
        raise SpecError(
            f"{str(spec)!r} compares the attention of two layers, and fewer stand before decoder "
            f"layer {spec.layer}; {what}"
        )


def _check_layers(specs: Sequence[Spec], model: Any) -> None:
    """Require that every decoder layer from the first cut on can hold fewer tokens."""
    config = decoder_of(model).config
    kinds = list(getattr(config, "layer_types", None) or ())
    lent = {i for n in range(len(kinds)) if (i := lender_of(config, n)) != n}
    for spec in specs:
        if lent and (spec.layer or 0) > min(lent) and not spec.whole:
            raise ModelError(
                f"{str(spec)!r} cuts behind decoder layer {min(lent)} of {type(model).__name__}, "
                f"whose keys later layers read again; reduce at pre"
            )
    first = min((spec.layer or 0 for spec in specs), default=len(kinds))
    for index, kind in enumerate(kinds):
        if index >= first and kind not in LAYER_KINDS:
            raise ModelError(
                f"decoder layer {index} of {type(model).__name__} is of type {kind!r} and cannot "
                "hold reduced tokens; reduce after the last such layer, at llm<K>"
            )
    for spec in specs:
        before = kinds[spec.layer - 1] if spec.layer and kinds else FULL
        if before in RECURRENT and not spec.whole and INNER & set(spec.method.needs):
            after = [f"llm{i + 1}" for i, kind in enumerate(kinds[:-1]) if kind not in RECURRENT]
            what = "a convolution" if before == CONV else "a recurrence"
            raise ModelError(
                f"{str(spec)!r} reads the attention of decoder layer {(spec.layer or 0) - 1} of "
                f"{type(model).__name__}, which is {what}; choose {' or '.join(after)}"
            )


def _check_order(specs: Sequence[Spec]) -> None:
    """Refuse a stage between a look ahead and the decoder, and a cut behind one that revives."""
    ahead: Spec | None = None
    for spec in specs:
        if ahead is not None and spec.site in ("pixel", "pre"):
            raise SpecError(
                f"{str(spec)!r} cannot follow {str(ahead)!r}, which looks through the decoder; "
                f"write {ahead.method.name!r} last of the stages before it"
            )
        if AHEAD in spec.method.needs:
            ahead = spec
    inside = [spec for spec in specs if spec.site == "llm"]
    for spec, other in combinations(inside, 2):
        if spec.layer == other.layer and spec.tokens != other.tokens:
            raise SpecError(
                f"'{spec}' and '{other}' cut at one layer and drop different tokens; put them at "
                f"different layers, or write tokens={ALL} once"
            )
    for spec in inside:
        others = [o for o in inside if o is not spec and (o.layer or 0) >= (spec.layer or 0)]
        others = [o for o in others if not o.method.revives or o.layer == spec.layer]
        if spec.method.revives and others:
            raise SpecError(
                f"{str(others[0])!r} cuts at or behind {str(spec)!r}, whose tokens may come back; "
                f"put {spec.method.name!r} last"
            )


def _check_revival(specs: Sequence[Spec], config: Any, cache: CachePlan | None) -> None:
    """Require full attention, masks of our own and a cache that keeps all, for tokens to return."""
    reviving = [spec for spec in specs if spec.method.revives]
    if not reviving:
        return
    if cache is not None:
        raise SpecError(
            f"{str(reviving[0])!r} puts tokens back into the cache, which {str(cache)!r} does not "
            "expect; drop one of them, or reduce with fastv"
        )
    first = max(0, min(spec.layer or 0 for spec in reviving) - 1)  # that one ranks them
    types = {kind_of(config, index) for index in range(first, config.num_hidden_layers)}
    if types - {FULL}:
        raise ModelError(
            f"lazyllm puts tokens back into full attention, and decoder layers from {first} on "
            f"are {', '.join(sorted(types))}; use fastv"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ModelError(
            "lazyllm makes masks of its own for sdpa and eager attention, not for "
            f"{config._attn_implementation!r}; call model.set_attn_implementation('sdpa')"
        )


def _check_bypass(specs: Sequence[Spec], text: Any, cache: CachePlan | None) -> None:
    """Require feed-forward layers to pass by, and caches of full attention that entries leave."""
    passing = [spec for spec in specs if spec.method.bypasses and not spec.whole]
    if not passing:
        return
    spec, layer = passing[0], passing[0].layer or 0
    if cache is not None:
        raise SpecError(
            f"'{spec}' drops keys when the prompt ends, which '{cache}' does not expect; leave out "
            "one of them, or reduce with fastv"
        )
    beside = [o for o in specs if o is not spec and o.site == "llm" and o.layer == layer]
    if beside or len(passing) > 1:
        other = (beside or passing[1:])[0]
        raise SpecError(
            f"'{other}' beside '{spec}': one stage lets tokens skip, alone at its layer; cut at "
            "another one"
        )
    for index in range(layer, len(layers_of(text))):
        if kind_of(text.config, index) != FULL or feed_forward_at(text, index) is None:
            raise ModelError(
                f"'{spec}' needs full attention and a feed-forward module in every layer from "
                f"{layer} on, and layer {index} of {type(text).__name__} is "
                f"{kind_of(text.config, index)} or names its own otherwise; use fastv"
            )


def _check_tower(specs: Sequence[Spec], adapter: Adapter, model: Any, encoder: str | None) -> None:
    early = [spec for spec in specs if spec.site == "pixel"]
    inside = [spec for spec in specs if spec.site == "vit" and not spec.whole]
    for spec in early + inside:
        check_inner(adapter, f"{str(spec)!r}")
    if encoder == "graph":
        check_inner(adapter, "encoder='graph'")
    changing = [spec for spec in specs if spec in inside or (spec in early and not spec.whole)]
    if encoder == "graph" and changing:
        raise SpecError(
            f"encoder='graph' repeats one pass of the tower, and {str(changing[0])!r} makes each "
            "another; use encoder='compile' beside it"
        )
    if early and inside:
        raise SpecError(
            f"{str(early[0])!r} and {str(inside[0])!r} cannot share a vision tower: merging "
            "needs whole frames; use site 'pre' for one of them"
        )
    for spec in inside:
        _check_merging(spec, adapter, model)
    if len(early) > 1 and any(spec.method.resizes for spec in early):
        raise SpecError(
            f"'{early[0]}' and '{early[1]}' cannot share site 'pixel': one of them resizes the "
            "picture; write a stage of site 'pre' for the other"
        )
    _check_one(inside)
    if early and not adapter.tower(base_of(model)).packed:
        raise ModelError(
            f"'{early[0]}' cannot run in {adapter.family!r}: its vision tower takes tiles of fixed "
            "size; site 'pixel' works in qwen2_vl, qwen2_5_vl, qwen3_vl and later ones of Qwen, "
            "and in exaone4_5; elsewhere use site 'pre'"
        )


def check_merge_knobs(spec: Spec) -> None:
    """Refuse a stage of site `vit` without a budget, or with knobs out of range."""
    if spec.budget is None:
        raise SpecError(f"'{spec}' needs a budget at site 'vit'; write '{spec}:0.5'")
    reuse = spec.knobs.get("reuse", 1)
    if reuse < 1:
        raise SpecError(f"knob reuse={reuse} of '{spec}' is no number of blocks; choose 1 or more")
    until = spec.knobs.get("until", 1.0)
    if not 0 < until <= 1:
        raise SpecError(f"knob until={until} of '{spec}' is no share of the blocks; choose 0 to 1")


def _check_merging(spec: Spec, adapter: Adapter, model: Any) -> None:
    check_merge_knobs(spec)
    tower = adapter.tower(base_of(model))
    check_scene([spec], tower, None)
    check_blocks(tower, adapter.family, "site 'vit'")
    layers = argument(tower.base, {}, "vision_feature_layer")
    where, why = f"'{spec}' cannot run in ", None
    if not tower.packed and not hasattr(tower.base.config.vision_config, "image_size"):
        why = f"the vision tower of {adapter.family!r}, which pads images of different sizes"
    elif not has_halves(tower.blocks[0]):
        why = f"a vision tower of {type(tower.blocks[0]).__name__}"
    elif not isinstance(layers, int | None):
        why = f"a vision tower of which several layers are used, {layers}"
    if why is not None:
        raise SpecError(f"{where}{why}; use site 'pre'")
