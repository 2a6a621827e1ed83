"""Evicted caches against stock layers that hold every entry and hide what a slow policy drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_oracle
import model_oracle as oracle
import pytest
import torch
from cache_questions import SCORES, answers, ask, kinds_of, model_of
from tiny_models import ALL_FAMILIES, FAMILIES, build, generate

from mmfast.attach import attach

TOKENS = 5


def difference(
    family: str,
    spec: str,
    fault: Callable[..., None] | None = None,
) -> float:
    """Largest difference of the logits of all steps."""
    this = model_of(family)
    inputs = ask(this)
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    with attach(this.model, cache=spec):
        out = generate(this, inputs, TOKENS)
    walk = cache_oracle.Walk(this, prompt)
    found = answers(this, walk, kinds_of(this, inputs, prompt), *SCORES[spec])
    visible = cache_oracle.apply(walk, found)
    if fault is not None:
        fault(visible, walk)
    logits = [walk.logits]
    logits += [walk.step(t, visible) for t in out.sequences[0, length:-1].tolist()]
    assert all(0 < seen.sum() < seen.numel() for seen in visible.values())
    return float((torch.stack(logits) - torch.cat(out.logits)).abs().max())


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("spec", SCORES)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_decoding_equals_hiding_what_a_slow_policy_drops(family: str, spec: str) -> None:
    assert difference(family, spec) < 1e-5


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("fault", [0, 1])
def test_windows_slide_at_every_step(family: str, fault: int) -> None:
    """Each query sees the first tokens and the last ones; a window one longer is another one."""
    this = model_of(family)
    inputs = ask(this)
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    with attach(this.model, cache="sink:3+window:12"):
        out = generate(this, inputs, 6)
    walk = cache_oracle.Walk(this, prompt)
    heads, logits = walk.text.config.num_key_value_heads, [walk.logits]
    for n, token in enumerate(out.sequences[0, length:-1].tolist(), start=length):
        seen = torch.zeros(heads, n, dtype=torch.bool)
        seen[:, :3], seen[:, -12 - fault :] = True, True
        logits.append(walk.step(token, dict.fromkeys(walk.full, seen)))
    off = float((torch.stack(logits) - torch.cat(out.logits)).abs().max())
    assert off > 1e-3 if fault else off < 2e-5


def _other_head(visible: dict[int, torch.Tensor], _: Any) -> None:
    for seen in visible.values():
        seen.copy_(seen.flip(0))


def _shifted(visible: dict[int, torch.Tensor], _: Any) -> None:
    for seen in visible.values():
        seen.copy_(seen.roll(1, 1))


def _one_entry(visible: dict[int, torch.Tensor], _: Any) -> None:
    seen = visible[max(visible)]
    seen[0, int(seen[0].nonzero()[0])] = False


def _contiguous(visible: dict[int, torch.Tensor], walk: cache_oracle.Walk) -> None:
    """As if the cache had told its physical length."""
    gone = int((~next(iter(visible.values()))[0]).sum())
    walk.position = walk.position - gone


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", [_other_head, _shifted, _one_entry, _contiguous])
def test_the_oracle_sees_planted_faults(family: str, fault: Any) -> None:
    assert difference(family, "snapkv:0.4?window=5&kernel=3", fault) > 1e-3


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_what_is_left_of_the_difference_is_rounding(family: str) -> None:
    """In double precision nothing is."""
    this = build(family)
    this.model.double()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in ask(this).items()}
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    with attach(this.model, cache="snapkv:0.4?window=5&kernel=3"):
        out = this.model.generate(
            **inputs,
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    walk = cache_oracle.Walk(this, prompt)
    visible = {i: cache_oracle.kept(out.past_key_values, i, length) for i in walk.full}
    assert all(seen.sum() < seen.numel() for seen in visible.values())
    logits = [walk.logits]
    logits += [walk.step(t, visible) for t in out.sequences[0, length:-1].tolist()]
    # generate hands out float32 logits
    assert (torch.stack(logits) - torch.cat(out.logits)).abs().max() < 1e-6
