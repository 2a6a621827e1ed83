"""Policies that choose again while an answer is written: `every=`, and those that always do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import cache_oracle
import model_oracle as oracle
import numpy as np
import pytest
import torch
from cache_questions import ask, model_of
from cache_runs import close, rows, run
from oracles_caches import ORACLES, Layer
from tiny_models import FAMILIES, generate, tiny

from mmfast import SpecError
from mmfast.attach import attach
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import ModelError
from mmfast.core.spec import parse
from mmfast.models.kv import notes
from mmfast.models.kv.eviction import Eviction
from mmfast.models.kv.output import added_lengths
from mmfast.models.kv.queries import expected_angles
from mmfast.streams.engine import check_score


def chosen(name: str, held: Any, visible: torch.Tensor, budget: int) -> torch.Tensor:
    """What a slow policy keeps of the entries that each head still sees, `[Hkv, n]` bool."""
    seen = torch.nn.functional.pad(visible, (0, held.keys.shape[2] - visible.shape[1]), value=True)
    after = torch.zeros_like(seen)
    for head, mine in enumerate(seen):
        where = mine.nonzero()[:, 0]
        keys, values = (
            x[0, head : head + 1, where].double().numpy() for x in (held.keys, held.values)
        )
        nothing = np.zeros((1, len(where)))
        layer = Layer(keys, [0] * len(where), nothing, nothing, values=values)
        (answer,) = ORACLES[name](layer, min(budget, len(where)))
        after[head, where[answer.keep]] = True
    return after


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
@pytest.mark.parametrize(("name", "every"), [("knorm", 1), ("keydiff", 3), ("curdkv", 4)])
def test_decoding_equals_hiding_what_a_slow_policy_drops_again(
    family: str, name: str, every: int
) -> None:
    this, budget = model_of(family), 12
    inputs = ask(this)
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    with attach(this.model, cache=f"{name}:{budget}?every={every}"):
        out = generate(this, inputs, 11)
    walk = cache_oracle.Walk(this, prompt)
    start = torch.ones(walk.text.config.num_key_value_heads, length, dtype=torch.bool)
    layers = walk.cache.layers
    visible = {i: chosen(name, layers[i], start, budget) for i in walk.full}
    logits = [walk.logits]
    for step, token in enumerate(out.sequences[0, length:-1].tolist()):
        if step and step % every == 0:  # so many tokens have come since the last choice
            visible = {i: chosen(name, layers[i], visible[i], budget) for i in walk.full}
        logits.append(walk.step(token, visible))
    torch.testing.assert_close(torch.stack(logits), torch.cat(out.logits), atol=1e-5, rtol=0)
    widths = {layer.keys.shape[2] for layer in out.past_key_values.layers}
    assert widths == {budget + (10 - 1) % every + 1}


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "spec",
    [
        "snapkv:0.4?window=2&every=3",
        "vatp:11?sink=1&every=2",
        "cam:11?every=2",
        "lagkv:0.5?every=4",
        "h2o:9",
    ],
)
def test_a_ragged_batch_chooses_again_as_its_rows_do(family: str, spec: str) -> None:
    this = tiny(family)
    together = run(this, rows(this, [0, 1]), spec, tokens=9)
    for row in range(2):
        close(together, run(this, rows(this, [row]), spec, tokens=9), row)
    held = together.past_key_values.layers[0].keys.shape[2]
    once = run(this, rows(this, [0, 1]), spec.partition("?")[0].replace("h2o", "knorm"), tokens=9)
    assert held < once.past_key_values.layers[0].keys.shape[2]


@pytest.mark.parametrize(
    "spec", ["h2o:9", "cam:9?every=2", "entropy_chunkkv:9?window=3&every=3", "knorm:9", "h2o:1.0"]
)
def test_drafts_that_come_before_a_choice_are_told(spec: str) -> None:
    """Of several tokens at once none is chosen from at its own turn."""
    this, inputs = tiny("llava_onevision"), rows(tiny("llava_onevision"), [1])
    again = spec[-2:] != ".0" and spec != "knorm:9"
    told = pytest.warns(UserWarning, match="leave out the draft") if again else nullcontext()
    with attach(this.model, cache=spec) as trace, told:
        generate(this, inputs, 9, prompt_lookup_num_tokens=3)
    assert len(trace.notes) == again


@pytest.mark.parametrize(("window", "every", "queries"), [(2, 3, 2), (5, 3, 3), (1, 1, 1)])
def test_the_last_queries_vote(
    monkeypatch: pytest.MonkeyPatch, window: int, every: int, queries: int
) -> None:
    """Each choice while decoding reads the attention of the last tokens, at most all new ones."""
    sums, choose = list[float](), Eviction._choose

    def counted(own: Eviction, layer: Any, index: int, prompt: bool) -> Any:
        if not prompt:
            sums.append(float(layer.notes[notes.WINDOW].sum(-1).mean()))
        return choose(own, layer, index, prompt)

    monkeypatch.setattr(Eviction, "_choose", counted)
    this = tiny("llava_onevision")
    run(this, rows(this, [1]), f"snapkv:14?window={window}&every={every}", tokens=8)
    layers = this.model.get_decoder().config.num_hidden_layers
    assert len(sums) == (7 - 1) // every * layers
    assert sums == pytest.approx([queries] * len(sums), abs=1e-4)


def test_every_is_read_and_refused() -> None:
    plan = plan_cache("sink:4+tova:0.2?every=16")
    assert plan is not None and plan.every == 16
    assert parse("tova:0.2", kind="cache")[0].method.knobs["every"] == 0
    for spec in ("snapkv:9?every=-1", "zipvl:0.5?every=4"):
        with pytest.raises(SpecError, match="knob every="):
            plan_cache(spec)
    for spec in ("h2o:9?every=4", "expected_attention:9?every=4"):
        with pytest.raises(SpecError, match=r"knob of .* 'every'"):
            plan_cache(spec)  # one chooses at every step as it is, one reads a prompt alone


def test_a_stream_has_no_answer_to_choose_in() -> None:
    with pytest.raises(SpecError, match="every=4 does nothing in a stream"):
        check_score(plan_cache("keynorm:9?every=4"))
    check_score(plan_cache("keynorm:9"))


def test_what_a_model_does_not_show_is_said() -> None:
    with pytest.raises(ModelError, match="no o_proj"):
        added_lengths(torch.nn.Identity(), torch.ones(1, 2, 3))
    with pytest.raises(ModelError, match="no position_embeddings"):
        expected_angles(None, 3, 3, torch.nn.Identity())


@pytest.mark.parametrize("bias", [False, True])
def test_values_are_as_long_as_what_they_add(bias: bool) -> None:
    """Mean over the query heads of a key head; a bias is no value's."""
    attention, values = torch.nn.Module(), torch.randn(2, 5, 3)
    plain = torch.nn.Linear(12, 7, bias=bias)  # 4 query heads of 2 key heads
    attention.o_proj = plain
    for head, lengths in enumerate(added_lengths(attention, values)):
        blocks = [plain.weight[:, 3 * q : 3 * q + 3] for q in (2 * head, 2 * head + 1)]
        sums = [(values[head] @ block.T).abs().sum(-1) for block in blocks]
        torch.testing.assert_close(lengths, (sums[0] + sums[1]) / 2)
