"""Prompts of modules equal one plain forward pass under a mask and reserved positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, generate, tiny
from torch import Tensor

from mmfast.core.errors import MmfastError, ModelError
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
    "{{ p['text'] }}{% else %}@{{ p['type'] }}@{% endif %}{% endfor %}{% endfor %} reply:"
)
# Two pictures of one union of which the second is larger, a scaffold whose modules are no
# neighbours, and a parameter between texts.
WORDS = {
    "rules": "be {tone} now",
    "one": "{image} first",
    "two": "second {image}",
    "end": "see {image}!",
}
PICTURES = {"one": (0, None), "two": (1, (56, 72)), "end": (2, None)}
SCAFFOLD = ("rules", "end")


def _picture(this: Any, name: str) -> Any:
    number, size = PICTURES[name]
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


def _modules(family: str, store: ReuseStore | None = None, spec: str = "prefix") -> Any:
    this = tiny(family)
    processor = copy.copy(this.processor)
    template = TEMPLATE
    for kind in ("image", "video"):
        template = template.replace("@{{ p['type'] }}@", f"{this.facts.placeholder('image')}")
    processor.chat_template = template
    reuse = MediaReuse(this.model, processor, parse_reuse(spec), store or ReuseStore())
    return this, PromptModules(reuse, lambda media: [Shot("image", media)])


def _whole(this: Any, names: Any, tone: str, question: str, fault: str = "") -> Any:
    """Inputs, positions `[A, n]` and mask `[n, n]` of the plain forward pass.

    Every module is read by the processor on its own, in one piece; places and mask are made token
    by token, by the rules of the paper.
    """
    pad = this.processor.tokenizer.pad_token
    parts = [("", HEAD, None, 0)]
    start = None
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
    del parts, start
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
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i, (_, _, mine, _, new) in enumerate(rows):
        for j, (_, _, other, hole, late) in enumerate(rows[: i + 1]):
            sees = not hole if new else (mine == other and not late)
            mask[i, j] = sees or (fault == "modules see each other" and not hole)
            mask[i, j] |= fault == "fillers are seen" and new
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "names", [("two",), ("rules", "one"), ("end", "rules", "two"), ("one", "end")]
)
def test_modules_equal_a_forward_pass_under_mask_and_places(family: str, names: Any) -> None:
    this, modules = _modules(family)
    schema = _schema(this)
    given = {"tone": "dry"} if "rules" in names else {}
    for _ in range(2):  # the second time from the store
        logits, tokens = _answer(this, modules, schema.prompt(*names, **given), "what?")
        whole = _whole(this, names, given.get("tone", ""), "what?")
        assert torch.allclose(logits, _oracle(this, whole, tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "fault", ["modules see each other", "no gaps", "fillers are seen", "no scaffold"]
)
def test_planted_faults_differ(family: str, fault: str) -> None:
    this, modules = _modules(family)
    names = ("rules", "two", "end")
    logits, tokens = _answer(this, modules, _schema(this).prompt(*names, tone="dry"), "what?")
    whole = _whole(this, names, "dry", "what?", fault)
    assert not torch.allclose(logits, _oracle(this, whole, tokens), atol=1e-2, rtol=0)
