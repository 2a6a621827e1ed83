"""Prompts whose beginnings are known, under policies of KV memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduling import answers, ask, clip, image, model_of, stock

from mmfast.attach import attach
from mmfast.caches.plan import plan_cache
from mmfast.core.kv import KVBlock
from mmfast.serve.engine.base import Finish, Request
from mmfast.serve.engine.encoder import MediaEncoder
from mmfast.serve.engine.kv.prefixes import Prefixes
from mmfast.serve.engine.prefill import Prefiller
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.slots import Embedded

CLIPS = {"llava_onevision", "qwen3_vl"}
READ_ON = [
    "snapkv:16",
    "sink:4+window:24+quant:8?residual=16",
    "quant:8?residual=8",
    "infinipot_v:0.5",
    "keydiff:0.4?every=3",
    "tova:14?every=2",
]
READ_ALL = ["h2o:20", "expected_attention:0.4?future=20"]


def question(name: str, family: str, asked: str, cache: str = "") -> Request:
    media = clip(3, 4) if family in CLIPS else image(3)
    return ask(name, "look at this for a while " * 3, media, asked, cache=cache, tokens=9)


def alone(family: str, request: Request) -> str:
    with attach(model_of(family)[0], None, request.options.cache or None):
        return stock(model_of(family), request)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_answers_behind_a_known_beginning_are_those_of_the_whole_prompt(family: str) -> None:
    specs = ["", *READ_ON, *READ_ALL]
    asked = [question(str(i), family, f"what is it, {i}?", spec) for i, spec in enumerate(specs)]
    expected = [alone(family, request) for request in asked]
    made = Scheduler(model_of(family), chunk=40, slots=16, queue=64)
    try:
        for request, text in zip(asked, expected, strict=True):
            ((found, end),) = answers(made, [request])
            assert isinstance(end, Finish) and found == text, request.options
            reads_on = request is not asked[0] and request.options.cache not in READ_ALL
            assert (end.cached_tokens > end.trace["visual_tokens"]) == reads_on, request.options
    finally:
        made.close()


@pytest.mark.parametrize("spec", ["snapkv:16", "quant:8?residual=8"])
def test_a_prompt_under_a_policy_is_a_known_beginning(spec: str) -> None:
    """What the policy dropped or packed is kept in full for later prompts."""
    family = "llava_onevision"
    first, later = question("a", family, "what?", spec), question("b", family, "why is it so?")
    expected = alone(family, later)
    made = Scheduler(model_of(family), chunk=40)
    try:
        ((_, none),) = answers(made, [first])
        ((text, end),) = answers(made, [later])
    finally:
        made.close()
    assert (none.cached_tokens, end.cached_tokens > 64, text) == (0, True, expected)


def rows_of(spec: str, rest: int | None = None) -> tuple[list[Any], list[Any]]:
    """Layers behind a prompt that was read as a whole, and behind a known beginning."""
    model, processor = model_of("llava_onevision")
    encoder, prefiller, known = MediaEncoder(model, processor), Prefiller(model, 64), Prefixes(1e9)
    found = []
    for turn, asked in enumerate(["what is it?"] * 3):
        prepared = encoder.prepare(question(str(turn), "llava_onevision", asked))
        (prompt,) = encoder.encode([replace(prepared, cache=spec)])
        assert isinstance(prompt, Embedded)
        rest = prefiller.rereads(prompt) if rest is None else rest
        assert rest is not None
        start: tuple[KVBlock, int] | None = None
        if turn == 2:
            start = known.find("", prompt.blocks, prompt.length, rest)
            assert start is not None and prompt.length - start[1] >= rest
        job = prefiller.job(prompt, prompt.length + 8, start)
        while job.logits is None:
            prefiller.step([job])
        row = prefiller.result(job).row
        if turn == 0:
            kv = job.prefix()
            assert kv is not None
            known.put("", prompt.blocks, kv)
        else:
            assert row is not None
            found.append(list(row.parts))
    encoder.slicer.close()
    return found[0], found[1]


def differ(rows: tuple[list[Any], list[Any]]) -> bool:
    return any(
        one.keys.shape != two.keys.shape or not torch.allclose(one.keys, two.keys, atol=1e-5)
        for one, two in zip(*rows, strict=True)
    )


@pytest.mark.parametrize("spec", ["snapkv:16?window=24", "tova:14", "keydiff:0.4", "lagkv:0.5"])
def test_the_same_entries_are_kept(spec: str) -> None:
    assert not differ(rows_of(spec))


def test_too_few_tokens_read_again_would_be_seen() -> None:
    assert differ(rows_of("snapkv:16?window=24", rest=1))


def test_every_plan_knows_what_must_be_read_again() -> None:
    plans = {spec: plan_cache(spec).rereads for spec in (*READ_ON, *READ_ALL)}
    assert {spec for spec, rest in plans.items() if rest is None} == set(READ_ALL)
    assert (plans["snapkv:16"], plans["quant:8?residual=8"], plans["tova:14?every=2"]) == (
        *(32, 0, 1),
    )
