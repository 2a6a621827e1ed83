"""Prompts of modules equal one plain forward pass under a mask and reserved positions."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, build, generate
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.spec import parse
from mmfast.core.trace import Trace
from mmfast.models.prompt import Shot
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.modules import PromptModules
from mmfast.streams.reuse.plan import parse_reuse
from mmfast.streams.reuse.schema import PromptSchema
from mmfast.streams.reuse.store import ReuseStore

HEAD, TAIL, TONE = "user: ", " reply:", 6
TEMPLATE = (
    "{% for m in messages %}user: {% for p in m['content'] %}{% if p['type'] == 'text' %}"
    "{{ p['text'] }}{% else %}@{% endif %}{% endfor %}{% endfor %} reply:"
)
# Two pictures of one union of which the second is larger, a scaffold whose modules are no
# neighbours, and a parameter between texts.
WORDS = {
    "rules": "be {tone} now",
    "one": "{image} first",
    "two": "second {image}",
    "end": "see {image}!",
}
PICTURES = {"one": (0, (24, 24)), "two": (1, (32, 48)), "end": (2, (24, 24))}
SCAFFOLD = ("rules", "end")


def _picture(this: Any, name: str) -> Any:
    number, size = PICTURES[name]
    size = (24, 24) if this.family == "llava_onevision" else size  # tiles that batches hold
    return this.images(3, size=size)[number]


def _schema(this: Any, scaffolds: Any = (SCAFFOLD,)) -> PromptSchema:
    modules = {}
    for name, text in WORDS.items():
        before, mark, after = text.partition("{image}")
        parts = [before, _picture(this, name), after] if mark else text
        if name == "rules":
            parts = ["be ", {"tone": TONE}, " now"]
        modules[name] = parts
    return PromptSchema(modules, unions=[("one", "two")], scaffolds=scaffolds)


@functools.cache
def _shared(family: str) -> Any:
    """A model, its modules and a schema, that tests share."""
    this, modules = _modules(family)
    return this, modules, _schema(this)


def _modules(family: str, store: ReuseStore | None = None, spec: str = "prefix") -> Any:
    this = build(family)  # hooks that stay would be copied with a model of others
    processor = copy.copy(this.processor)
    processor.chat_template = TEMPLATE.replace("@", this.facts.placeholder("image"))
    reuse = MediaReuse(this.model, processor, parse_reuse(spec), store or ReuseStore())
    return this, PromptModules(reuse, lambda media: [Shot("image", media)])


def _whole(this: Any, names: Any, tone: str, question: str, fault: str = "") -> Any:
    """Inputs, positions `[A, n]` and mask `[n, n]` of the plain forward pass.

    Every module is read by the processor on its own, in one piece; places and mask are made token
    by token, by the rules of the paper.
    """
    pad = this.processor.tokenizer.pad_token
    texts = {"": HEAD, **WORDS}
    reserved = [("",), ("rules",), ("one", "two"), ("end",)]
    places, made = {}, {}
    at = 0
    for group in reserved:
        ends = []
        for name in group:
            text = texts[name].replace("{tone}", pad * TONE)
            images = [_picture(this, name)] if name in PICTURES else []
            made[name] = this.inputs([text], images=images)
            where = _rope(this, made[name])
            places[name] = where + at
            ends.append(at + int(where.max()) + 1)
        at = max(ends)
    taken = ["", *(name for name in WORDS if name in names)]
    scaffold = set(SCAFFOLD) <= set(names) and fault != "no scaffold"
    rows: list[tuple[int, Tensor, str, bool, bool]] = []  # id, place, group, filler, new
    filler = this.processor.tokenizer.pad_token_id
    for name in taken:
        group = "joint" if scaffold and name in SCAFFOLD else name
        ids = made[name]["input_ids"][0].tolist()
        for i, token in enumerate(ids):
            rows.append((token, places[name][:, i], group, token == filler, False))
            if token == filler and (i + 1 == len(ids) or ids[i + 1] != filler):
                first = places[name][:, i] - TONE + 1
                for j, each in enumerate(tone.encode()):
                    rows.append(
                        (
                            this.processor.tokenizer(chr(each)).input_ids[0],
                            first + j,
                            "",
                            False,
                            True,
                        )
                    )
    end = max(int(places[name].max()) + 1 for name in taken)
    for j, token in enumerate(this.processor.tokenizer(question + TAIL).input_ids):
        rows.append((token, torch.full_like(places[""][:, 0], end + j), "", False, True))
    n = len(rows)
    groups = torch.tensor([sorted({row[2] for row in rows}).index(row[2]) for row in rows])
    hole, new = (torch.tensor([row[k] for row in rows]) for k in (3, 4))
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        mask[i] = ~hole if new[i] else (groups == groups[i]) & ~new
        mask[i] |= ~hole & (fault == "modules see each other")
        mask[i] |= new[i] & (fault == "fillers are seen")
        mask[i, i + 1 :] = False
    positions = torch.stack([place for _, place, *_ in rows], 1)
    if fault == "no gaps":
        positions = torch.arange(n).expand_as(positions)
    media = [made[name] for name in taken]
    keys = {
        key
        for each in media
        for key in each
        if key not in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    given = {key: torch.cat([each[key] for each in media if key in each]) for key in keys}
    return {"input_ids": torch.tensor([[row[0] for row in rows]]), **given}, positions, mask


def _rope(this: Any, inputs: Any) -> Tensor:
    """Stock positions `[A, n]` of one module, from 0."""
    n = inputs["input_ids"].shape[1]
    if not this.facts.rope:
        return torch.arange(n)[None]
    rope = this.model.model.get_rope_index
    names = ("input_ids", "attention_mask", "image_grid_thw", "mm_token_type_ids")
    return rope(**{name: inputs[name] for name in names if name in inputs})[0][:, 0]


def _oracle(this: Any, whole: Any, tokens: Any) -> Tensor:
    """Logits `[steps, V]` of one forward pass over the prompt and all tokens but the last."""
    inputs, positions, mask = whole
    more = len(tokens) - 1
    n = mask.shape[0]
    seen = torch.zeros(n + more, n + more, dtype=torch.bool)
    seen[:n, :n] = mask
    seen[n:, :n] = mask[n - 1]
    seen[n:, n:] = torch.ones(more, more).tril().bool()
    behind = positions[:, -1:] + 1 + torch.arange(more)
    where = torch.cat([positions, behind], 1)
    bias = torch.zeros(n + more, n + more).masked_fill_(~seen, torch.finfo(torch.float32).min)
    ids = torch.cat([inputs["input_ids"], tokens[None, :-1]], 1)
    with torch.no_grad():
        logits = this.model(
            **{**inputs, "input_ids": ids},
            attention_mask=bias[None, None],
            position_ids=where[:, None] if this.facts.rope else where,
            use_cache=False,
        ).logits
    return logits[0, n - 1 :]


def _answer(this: Any, modules: Any, prompt: Any, question: str, trace: Any = None) -> Any:
    found = generate(this, modules.inputs(prompt, question, trace=trace), 3)
    return torch.cat(found.logits), found.sequences[0, -3:]


NAMES = [("end", "rules", "two"), ("rules", "one"), ("two",), ("one", "end")]
FAULTS = ["modules see each other", "no gaps", "fillers are seen", "no scaffold"]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_equal_a_forward_pass_under_mask_and_places(family: str, names: Any) -> None:
    this, modules, schema = _shared(family)
    given = {"tone": "dry"} if "rules" in names else {}
    for _ in range(2):  # the second time from the store
        logits, tokens = _answer(this, modules, schema.prompt(*names, **given), "what?")
        whole = _whole(this, names, given.get("tone", ""), "what?")
        assert torch.allclose(logits, _oracle(this, whole, tokens), atol=1e-4, rtol=0)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_planted_faults_differ(family: str, fault: str) -> None:
    this, modules, schema = _shared(family)
    names = ("rules", "two", "end")
    logits, tokens = _answer(this, modules, schema.prompt(*names, tone="dry"), "what?")
    whole = _whole(this, names, "dry", "what?", fault)
    assert not torch.allclose(logits, _oracle(this, whole, tokens), atol=1e-2, rtol=0)


def test_modules_are_encoded_once_for_all_prompts_and_processes(tmp_path: Any) -> None:
    store = ReuseStore(folder=tmp_path)
    this, modules = _modules("qwen2_5_vl", store)
    schema, trace = _schema(this), Trace()
    modules.inputs(schema.prompt("rules", "two"), "what?", trace=trace)
    rows = {row.stage: row for row in trace.rows}
    assert 0 < rows["reuse modules"].tokens_in < rows["reuse modules"].tokens_out  # and fillers
    store.flush()
    _, others = _modules("qwen2_5_vl", ReuseStore(folder=tmp_path))
    trace = Trace()
    own = _schema(this)  # of other objects with the same content
    others.inputs(own.prompt("two"), "and who?", trace=trace)
    assert [(row.stage, row.tokens_out) for row in trace.rows] == [
        ("reuse modules", 0),
        ("reuse kv", len("and who?" + TAIL) - 1),
    ]
    trace = Trace()
    others.inputs(own.prompt("rules", "end"), "what?", trace=trace)  # a scaffold is another value
    assert {row.stage: row.tokens_out for row in trace.rows}["reuse modules"] > 0


def test_control_tokens_of_questions_and_arguments_are_text() -> None:
    this, modules, schema = _shared("qwen2_5_vl")
    found = modules.inputs(schema.prompt("rules", "one", tone="dry"), "<|image_pad|>?")
    image = (found["input_ids"] == this.model.config.image_token_id).sum()
    assert image == modules.counts(schema.prompt("one"), found["input_ids"])[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"modules": {}}, "no modules"),
        ({"modules": {"a b": "x"}}, "letters, digits"),
        ({"modules": {"a": ""}}, "is empty"),
        ({"modules": {"a": 3}}, "a part of module 'a' is 3"),
        ({"modules": {"a": {"x": 0}}}, "no parameter"),
        ({"modules": {"a": {"x": 1}, "b": {"x": 2}}}, "'x' is there twice"),
        ({"modules": {"a": "x", "b": "y"}, "unions": [("a", "c")]}, "unknown module of a union"),
        ({"modules": {"a": "x", "b": "y"}, "unions": [("a",)]}, "at least two"),
        ({"modules": {"a": "x", "b": "y"}, "scaffolds": ["ab"]}, "no list of modules"),
        ({"modules": dict.fromkeys("abc", "x"), "unions": [("a", "c")]}, "no neighbours"),
        ({"modules": dict.fromkeys("abc", "x"), "unions": [("a", "b"), ("b", "c")]}, "two unions"),
        (
            {"modules": dict.fromkeys("ab", "x"), "unions": ["ab"], "scaffolds": []},
            "no list of modules",
        ),
        (
            {
                "modules": dict.fromkeys("ab", "x"),
                "unions": [("a", "b")],
                "scaffolds": [("a", "b")],
            },
            "modules of one union",
        ),
    ],
)
def test_schemas_that_make_no_sense_are_refused(options: Any, said: str) -> None:
    with pytest.raises(MmfastError, match=said):
        PromptSchema(**options)
    if "modules" in options:
        with pytest.raises(MmfastError, match=said):
            PromptSchema.read(options)


def test_prompts_that_make_no_sense_are_refused() -> None:
    _, modules, schema = _shared("qwen2_5_vl")
    for names, arguments, said in (
        (("rule",), {}, "did you mean 'rules'"),
        ((), {}, "takes no module"),
        (("one", "one"), {}, "twice"),
        (("one", "two"), {}, "of one union"),
        (("one",), {"tone": "dry"}, "unknown parameter"),
        (("rules",), {"tone": 3}, "give a text"),
    ):
        with pytest.raises(MmfastError, match=said):
            schema.prompt(*names, **arguments)
    with pytest.raises(MmfastError, match=f"has 9 tokens, and its parameter {TONE}"):
        modules.inputs(schema.prompt("rules", tone="very much"), "what?")
    with pytest.raises(MmfastError, match="is empty"):
        modules.inputs(schema.prompt("rules"), " ")
    with pytest.raises(MmfastError, match="unknown key of a schema"):
        PromptSchema.read({"modules": {"a": "x"}, "union": []})


def test_what_modules_need() -> None:
    this, modules, _ = _shared("llava_onevision")
    with pytest.raises(MmfastError, match="give reuse='prefix'"):
        PromptModules(None, lambda media: [])
    plan = parse_reuse("encoder")
    assert plan is not None
    alone = MediaReuse(this.model, modules.reuse.processor, plan, ReuseStore())
    with pytest.raises(MmfastError, match="reuse= is 'encoder'"):
        PromptModules(alone, lambda media: [])
    with pytest.raises(MmfastError, match="reads the question"):
        PromptModules(modules.reuse, lambda media: [], parse("cdpruner:0.5"))
    bare = MediaReuse(this.model, this.processor, modules.reuse.plan, ReuseStore())
    with pytest.raises(ModelError, match="no chat template"):
        PromptModules(bare, lambda media: []).inputs(PromptSchema({"a": "x"}).prompt("a"), "b")


def test_reducers_act_on_each_medium_and_places_stay() -> None:
    _, modules, schema = _shared("qwen3_vl")
    own = PromptModules(modules.reuse, modules._read, parse("random:0.5"))
    prompt = schema.prompt("two", "end")
    found, whole = (each.inputs(prompt, "what?") for each in (own, modules))
    every, kept = own.counts(prompt, found["input_ids"])
    assert (every, kept) == (modules.counts(prompt, whole["input_ids"])[0], every // 2)
    assert torch.equal(found["position_ids"][-3:, 0, -1], whole["position_ids"][-3:, 0, -1])
