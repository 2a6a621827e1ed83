"""What every relative of the families of the matrix promises, on each kind of media it takes.

In double precision against the oracle: rounding of float32 may turn over a choice of experts.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import cache_oracle
import model_oracle as oracle
import pytest
import torch
from compress_checks import equal_to_attach
from tiny_models import (
    ALL_FAMILIES,
    RELATIVES,
    Tiny,
    build,
    facts,
    generate,
    line_of,
    precise,
    tiny,
)
from torch import Tensor
from transformers import AttentionInterface

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import adapter_for
from mmfast.models.families.adapter import families as families_known
from mmfast.models.families.tower import attention_of
from mmfast.models.reduction.inputs import compress
from mmfast.models.reduction.tower_signals import tower_signals
from mmfast.models.vision.frames.cache import FrameCache

ROOT = Path(__file__).parents[3]
LINES_OF_GRIDS = ("qwen", "grids", "omni", "glm")
CASES = [(family, kind) for family in RELATIVES for kind in facts(family).kinds]
each = pytest.mark.parametrize(("family", "kind"), CASES)
# Those whose pictures come whole and in any size; test_relatives_folds.py looks at the others.
GRIDS = [(family, kind) for family, kind in CASES if line_of(family) in LINES_OF_GRIDS]
each_grid = pytest.mark.parametrize(("family", "kind"), GRIDS)
families = pytest.mark.parametrize("family", RELATIVES)
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ place[part['type']] }}"
    "{% endif %}{% endfor %}{% endfor %}\nAnswer:"
)


# What the stock model cannot do; the test asks it first.
BEAMS_CANNOT = {(family, "video") for family in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")}
BEAMS_CANNOT |= {("exaone4_5", kind) for kind in ("image", "video")}  # in 5.17
BEAMS_CANNOT.add(("hunyuan_vl", "image"))  # in 5.17


def prompt(this: Tiny, kind: str, text: str = "on {} what?") -> dict[str, Any]:
    inputs = this.inputs([text.replace("{}", f"{{{kind}}}")], **this.media(kind, text.count("{}")))
    return oracle.doubled(inputs) if this.model.dtype == torch.float64 else inputs


def inside(this: Tiny) -> str:
    """FastV behind the first layer of attention: `llm1` but in models that begin otherwise."""
    kinds = getattr(this.model.get_decoder().config, "layer_types", None) or ["full_attention"]
    return f"fastv@llm{1 + next(i for i, kind in enumerate(kinds) if 'full' in kind)}"


@pytest.mark.rest_is_slow(3)
@each
def test_all_kept_changes_no_bit_and_nothing_stays_behind(family: str, kind: str) -> None:
    this = tiny(family)
    inputs = prompt(this, kind)
    stock, tokens = this.model(**inputs).logits, generate(this, inputs, 4)
    with attach(this.model, f"divprune:1.0+{inside(this)}:1.0"):
        assert torch.equal(this.model(**inputs).logits, stock)
        again = generate(this, inputs, 4)
    assert torch.equal(again.sequences, tokens.sequences)
    assert all(map(torch.equal, again.logits, tokens.logits))
    with attach(this.model, "divprune:0.5", cache="snapkv:0.5"):
        assert this.model(**inputs).logits.shape[1] < stock.shape[1]
    assert torch.equal(this.model(**inputs).logits, stock)


@pytest.mark.rest_is_slow(3, 1)
@each
def test_pruning_equals_removal_by_hand(family: str, kind: str) -> None:
    """The stock text model on what is left, at the positions that it had."""
    this = precise(family)
    inputs = prompt(this, kind, "on {} or {}?")
    whole = oracle.embed(this, inputs)
    assert len(whole.items) == 2
    torch.testing.assert_close(_all(this, whole), this.model(**inputs).logits[0])
    with attach(this.model, "divprune:0.5") as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(whole, trace.reductions)
    assert len(logits) == len(keep) < len(whole.embeds)
    torch.testing.assert_close(logits, oracle.removed(this, whole, keep), atol=1e-5, rtol=1e-5)
    wrong = oracle.removed(this, whole, keep, contiguous=True)
    assert (logits - wrong).abs().max() > 1e-2


def _all(this: Tiny, whole: oracle.Prompt) -> Tensor:
    return oracle.removed(this, whole, torch.arange(len(whole.embeds)))


@pytest.mark.rest_is_slow(5)
@each
@pytest.mark.parametrize("spec", ["tome:0.4", "divprune:0.6+{inside}:0.5"])
def test_answers_equal_those_of_the_oracle(family: str, kind: str, spec: str) -> None:
    this = precise(family)
    inputs = prompt(this, kind)
    with attach(this.model, spec.format(inside=inside(this))) as trace:
        out = generate(this, inputs, 4)
    assert sum(r.m < r.n for _, _, r in trace.reductions) == len(trace.reductions) > 0
    length = inputs["input_ids"].shape[1]
    new = out.sequences[0, length:]
    whole = oracle.append(this, oracle.embed(this, inputs), new[:-1])
    logits = oracle.masked(this, whole, trace.reductions)[length - 1 :]
    torch.testing.assert_close(torch.cat(out.logits), logits.float(), atol=1e-5, rtol=1e-5)
    logits[:, this.blocked()] = -torch.inf
    assert torch.equal(logits.argmax(-1), new)


@pytest.mark.rest_is_slow(3, 2)
@each
def test_a_smaller_cache_equals_hidden_entries(family: str, kind: str) -> None:
    this = precise(family)
    inputs = prompt(this, kind)
    length = inputs["input_ids"].shape[1]
    walk = cache_oracle.Walk(this, oracle.embed(this, inputs))
    with attach(this.model, cache="snapkv:0.5?window=4&kernel=3"):
        out = generate(this, inputs, 4)
    held = {i: cache_oracle.kept(out.past_key_values, i, length) for i in walk.full}
    assert all(seen.sum(-1).max() < length for seen in held.values())
    tokens = out.sequences[0, length:-1].tolist()
    expected = torch.stack([walk.logits, *(walk.step(token, held) for token in tokens)]).float()
    torch.testing.assert_close(torch.cat(out.logits), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.rest_is_slow(5)
@each
@pytest.mark.parametrize("beams", [1, 2])
def test_a_ragged_batch_equals_its_rows(family: str, kind: str, beams: int) -> None:
    this = precise(family)
    texts = [text.replace("{}", f"{{{kind}}}") for text in ("{} a", "what is {} or {} then?")]
    media = this.media(kind, 3)
    ((name, items),) = media.items()
    batch = this.inputs(texts, **media)
    assert bool((batch["attention_mask"] == 0).any())
    if beams > 1 and (family, kind) in BEAMS_CANNOT:
        try:
            stock = generate(this, batch, 4, num_beams=beams)
        except (ValueError, RuntimeError) as error:  # stock counts other items than there are
            assert re.search("non-empty list|split_sizes to sum exactly", str(error))
            return
        alone = generate(this, this.inputs(texts[1:], **{name: items[1:]}), 4, num_beams=beams)
        if not torch.equal(stock.sequences[1, -4:], alone.sequences[0, -4:]):
            pytest.skip("stock transformers reads a row of a batch in another way")
    with attach(this.model, spec := f"divprune:0.6+{inside(this)}:0.5", cache="snapkv:0.7"):
        together = generate(this, batch, 4, num_beams=beams)
    for row, (text, part) in enumerate(zip(texts, [items[:1], items[1:]], strict=True)):
        inputs = this.inputs([text], **{name: part})
        with attach(this.model, spec, cache="snapkv:0.7"):
            alone = generate(this, inputs, 4, num_beams=beams)
        new = alone.sequences[0, inputs["input_ids"].shape[1] :]
        assert torch.equal(together.sequences[row, batch["input_ids"].shape[1] :], new)


def alone(family: str, kind: str) -> Tiny:
    """A model whose tower's attention says nothing: features depend on their own patches."""
    this = build(family)
    for block in adapter_for(this.model).tower_of(this.model.base_model, kind).blocks:
        attention_of(block).register_forward_hook(lambda *a: _nothing(a[-1]))
    return this


def call_of(this: Tiny, inputs: dict[str, Any], kind: str) -> dict[str, Any]:
    names = (*this.facts.calls[kind], "input_ids")
    return {name: inputs[name] for name in names if name in inputs}


@pytest.mark.rest_is_slow(3)
@each
def test_fold_brings_every_patch_to_its_token(family: str, kind: str) -> None:
    """A change of one row at the tower's first block moves the token that `fold` names, alone."""
    this = alone(family, kind)
    base, adapter = this.model.base_model, adapter_for(this.model)
    inputs = this.inputs([f"{{{kind}}}"], **this.media(kind, 1))
    call, tower = call_of(this, inputs, kind), adapter.tower_of(base, kind)
    if not tower.packed:
        pytest.skip("batches are looked at in test_relatives_folds.py")

    def features(row: int | None) -> tuple[Tensor, Tensor]:
        """Features `[n, D]`, and a mark `[S, 1]` of the row that was changed."""
        seen: list[Tensor] = []

        def change(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            states = (args[0] if args else kwargs["hidden_states"]).clone()
            rows = states.flatten(0, -2)
            seen.append(torch.zeros(len(rows), 1))
            if row is not None:
                seen[-1][row] = 1.0
                rows[row, ::2] += 3.0
            named = {} if args else {"hidden_states": states}
            return (states, *args[1:]) if args else (), {**kwargs, **named}

        handle = tower.blocks[0].register_forward_pre_hook(change, with_kwargs=True)
        output = oracle.encode(this, inputs, kind)
        handle.remove()
        found = torch.cat(this.facts.items(this, output, kind, inputs))
        return found[this.facts.content(this, found)], seen[0]

    before, marks = features(None)
    layouts = adapter.layout(base, kind, call)
    assert sum(len(layout.content()) for layout in layouts) == len(before)
    for row in range(0, len(marks), max(1, len(marks) // 7)):
        after, mark = features(row)
        folded = torch.cat(adapter.fold(base, kind, mark, call))[:, 0]
        moved = (after - before).abs().amax(-1) > 1e-6
        assert torch.equal(moved, folded > 0)
        assert moved.any()


RECEIVED: list[Tensor] = []  # of the last pass of a tower, `[S]` per call of its attention


def plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **k: Any
) -> Any:
    """Attention spelled out, `[1, H, S, d]`, that notes the mean each key receives."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    weights = (query @ key.mT * k["scaling"]).softmax(-1)
    RECEIVED.append(weights.mean((0, 1, 2)))
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("plain", plain_attention)


@pytest.mark.rest_is_slow(3)
@each_grid
def test_signals_of_the_tower_are_the_attention_of_its_last_block(family: str, kind: str) -> None:
    this = tiny(family)
    base, adapter = this.model.base_model, adapter_for(this.model)
    inputs = this.inputs([f"{{{kind}}}{{{kind}}}"], **this.media(kind, 2))
    with tower_signals(this.model, adapter, ("attn",)) as collector:
        oracle.encode(this, inputs, kind)
    blocks = adapter.tower_of(base, kind).blocks
    config = attention_of(blocks[-1]).config
    before, config._attn_implementation = config._attn_implementation, "plain"
    RECEIVED.clear()
    try:
        oracle.encode(this, inputs, kind)
    finally:
        config._attn_implementation = before
    rows = torch.cat(RECEIVED).chunk(len(blocks))[-1]
    folded = adapter.fold(base, kind, rows[:, None], call_of(this, inputs, kind))
    assert collector.count(kind) == len(folded) == 2
    for number, expected in enumerate(folded):
        torch.testing.assert_close(collector.signal("attn", (kind, number)), expected[:, 0])


@pytest.mark.rest_is_slow(3, 1)
@each
def test_a_fast_encoder_says_the_same(family: str, kind: str) -> None:
    this = tiny(family)
    inputs = prompt(this, kind, "on {} or {}?")
    stock = this.model(**inputs).logits
    with attach(this.model, "divprune:1.0", encoder="fast"):
        torch.testing.assert_close(this.model(**inputs).logits, stock, atol=1e-3, rtol=0)


SEEN = [(family, kind) for family, kind in GRIDS if kind != "audio"]


@pytest.mark.rest_is_slow(3, 2)
@pytest.mark.parametrize(("family", "kind"), SEEN)
def test_layout_says_where_in_the_picture_a_token_is(family: str, kind: str) -> None:
    """A change of some pixels, in a clip of its later half, moves the tokens at that place."""
    this = alone(family, kind)
    height, width = this.shape.height, this.shape.width_px
    ((name, (pixels,)),) = this.media(kind, 1).items()
    inputs = this.inputs([f"{{{kind}}}"], **{name: [pixels]})
    call = call_of(this, inputs, kind)
    (layout,) = adapter_for(this.model).layout(this.model.base_model, kind, call)
    assert layout.grid is not None
    times, rows, columns = layout.grid
    (down, rest), (right, more) = divmod(height, rows), divmod(width, columns)
    assert (rest, more) == (0, 0)
    assert down == right
    other = pixels.copy()
    part = other[len(other) // 2 :] if kind == "video" else other[None]
    part[:, 2 * down : 3 * down, right : 2 * right] ^= 255
    changed = this.inputs([f"{{{kind}}}"], **{name: [other]})
    before, after = (
        torch.cat(this.facts.items(this, oracle.encode(this, each, kind), kind, each))
        for each in (inputs, changed)
    )
    moved = ((after - before).abs().amax(-1) > 1e-6)[layout.content()]
    place = layout.place()
    assert place is not None
    there = (place[:, 0] >= times // 2) & (place[:, 1] == 2) & (place[:, 2] == 1)
    assert torch.equal(moved, there)


@pytest.mark.rest_is_slow(3)
@each
def test_reduced_inputs_equal_hooks(family: str, kind: str) -> None:
    this = tiny(family)
    if family == "gemma4_e":  # layers get inputs made of embeddings
        with pytest.raises(ModelError, match=r"use attach\(\), or a method that only drops"):
            compress(this.model, prompt(this, kind), "tome:0.7")
        # Products with as many rows as tokens: on some processors last bits depend on how many.
        equal_to_attach(this, prompt(this, kind), "divprune:0.5", within=1e-5)
        return
    if family == "exaone4_5":
        with pytest.raises(ModelError, match=r"takes no positions.*use attach\(\)"):
            compress(this.model, prompt(this, kind), "divprune:0.5")
        return
    equal_to_attach(this, prompt(this, kind), "divprune:0.5+tome:0.7")


def _nothing(out: Any) -> Any:
    if isinstance(out, tuple):
        return (torch.zeros_like(out[0]), *out[1:])
    return torch.zeros_like(out)


@pytest.mark.rest_is_slow(3, 1)
@families
def test_pipelines_load_a_saved_folder(family: str, tmp_path: Any) -> None:
    this = tiny(family)
    processor = copy.copy(this.processor)
    places = {k: this.facts.placeholder(k) for k in this.facts.kinds if k != "audio"}
    processor.chat_template = "{% set place = " + repr(places) + " %}" + TEMPLATE
    this.model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    for kind in set(this.facts.kinds) - {"audio"}:
        options = {} if kind == "image" else {"frames": 4}
        task = f"{kind}-qa"
        pipe = mmfast.pipeline(
            task, model=str(tmp_path), reduce="divprune:0.5", max_new_tokens=2, **options
        )
        (item,) = next(iter(this.media(kind, 1).values()))
        if kind == "video":
            item = item[:1].repeat(4, 0)  # a still clip, of which VideoLLaMA3 drops tokens itself
        answer = pipe(item, "what?")
        assert answer.kept_tokens == max(1, round(answer.visual_tokens * 0.5)) > 0


# Towers that are none of Qwen's.
OTHER_TOWERS = [family for family in RELATIVES if not adapter_for(tiny(family).model).inner]


@pytest.mark.rest_is_slow(5)
@pytest.mark.parametrize("family", OTHER_TOWERS)
@pytest.mark.parametrize("spec", ["tome@vit:0.5", "pixelprune", "downsample:0.5"])
def test_sites_in_a_tower_of_another_build_are_refused(family: str, spec: str) -> None:
    this = tiny(family)
    with pytest.raises(ModelError, match=f"{family!r}, whose tower.*site 'pre'") as error:
        attach(this.model, spec)
    assert "\n" not in str(error.value)


def test_what_else_works_inside_a_tower_is_refused_there() -> None:
    model = tiny("glm4v").model
    with pytest.raises(ModelError, match="encoder='graph' cannot act"):
        attach(model, encoder="graph")
    with pytest.raises(ModelError, match="a frame cache cannot act"):
        FrameCache(model, 0.25)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_method_that_reads_attention_cannot_stand_behind_a_recurrence(family: str) -> None:
    with pytest.raises(ModelError, match=r"recurrence; choose llm2$"):
        attach(tiny(family).model, "fastv@llm1:0.5")


def test_a_clip_that_the_processor_has_thinned_out_is_refused() -> None:
    """All frames of a still clip look alike, and VideoLLaMA3 keeps the tokens of the first."""
    this = tiny("video_llama_3")
    still = [this.videos(1)[0][:1].repeat(4, 0)]
    inputs = this.inputs(["on {video} what?"], videos=still, use_token_compression=True)
    stock = this.model(**inputs).logits
    with (
        attach(this.model, "divprune:0.5"),
        pytest.raises(
            ModelError, match=r"left [1-9]. of 140 tokens .* use_token_compression=False"
        ),
    ):
        this.model(**inputs)
    assert torch.equal(this.model(**inputs).logits, stock)


def test_every_family_is_tested_and_the_docs_name_each() -> None:
    assert {*families_known("image"), *families_known("video")} == {
        facts(name).name for name in (*ALL_FAMILIES, *RELATIVES)
    }
    page = (ROOT / "docs/results/families.md").read_text(encoding="utf-8")
    assert [name for name in RELATIVES if f"`{facts(name).name}`" not in page] == []
