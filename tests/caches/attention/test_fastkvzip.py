"""Fast KVzip: gates against a slow version in every way of asking, and what they learn."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import cache_oracle
import decode_models
import numpy as np
import pytest
import torch
from cache_questions import ask
from gate_models import Weights, by_hand, give_gates
from oracles_caches import gate
from safetensors.torch import load_file, save_file
from scored_caches import generated, noted, same
from tiny_models import build
from torch import Tensor
from torch.nn import functional as F

import mmfast
from mmfast.attach import attach
from mmfast.bench.prompts import load_pair, suite_prompts
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.cache_name import CACHE, returned_cache
from mmfast.models.kv.gates import KeyGate, train_gate
from mmfast.models.kv.patterns import FILE, HeadPatterns, read_modules
from mmfast.models.kv.view import view_plan
from mmfast.streams.engine import check_score

ALL = "fastkvzip:4000"  # scored, and nothing leaves
IDS = [[1 + (i * k) % 23 for i in range(n)] for n, k in ((31, 5), (24, 7), (40, 11))]


def model() -> tuple[Any, Weights]:
    """A model of text with gates, and their weights."""
    made = decode_models.tiny().eval()
    return made, give_gates(made)


def sharp() -> Any:
    """A model whose heads look at few tokens, so that there is something to learn."""
    made = decode_models.tiny().eval()
    for name, weight in made.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data.mul_(8)
    return made


def scored(cache: Any, row: int = 0) -> list[Tensor]:
    """What the gates said of the real entries of a row, by layer."""
    return noted(cache, "gated", row)


def asked(model: Any, ids: Any, spec: str | None = ALL, **options: Any) -> Any:
    return generated(model, ids, spec, **options)


def top(scores: Tensor, share: float = 0.25) -> Tensor:
    """Mark the highest scores of each head."""
    best = scores.topk(int(scores.shape[-1] * share)).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)


@pytest.mark.parametrize("shape", [(12, 2, 3, 4, 5), (7, 1, 1, 3, 1), (16, 4, 2, 16, 16)])
def test_a_gate_is_its_slow_version(shape: tuple[int, ...]) -> None:
    made, states = KeyGate(*shape), torch.randn(9, shape[0])
    for weight in made.parameters():
        weight.data.normal_(0, 1)
    weights = {name: x.double().numpy() for name, x in made.state_dict().items()}
    hand = gate(states.double().numpy(), weights)
    with torch.no_grad():
        same([made(states).T], [hand])
    assert hand.min() > 0 and hand.max() < 1


def test_scores_are_those_of_the_states_that_enter() -> None:
    made, weights = model()
    hand = by_hand(made, {"input_ids": torch.tensor(IDS[:1])}, weights)
    same(scored(asked(made, IDS[:1]).past_key_values), hand.values())
    assert max(float(x.max() - x.min()) for x in hand.values()) > 0.1


def test_rows_parts_drafts_and_threads_change_nothing() -> None:
    made, weights = model()
    alone = [by_hand(made, {"input_ids": torch.tensor([row])}, weights).values() for row in IDS]
    for options in ({}, {"prefill_chunk_size": 7}):
        cache = asked(made, IDS, **options).past_key_values
        for row, mine in enumerate(alone):
            same(scored(cache, row), mine)
    greedy = asked(made, IDS[:1], "fastkvzip:0.4", max_new_tokens=12)
    looked = asked(made, IDS[:1], "fastkvzip:0.4", max_new_tokens=12, prompt_lookup_num_tokens=3)
    assert torch.equal(greedy.sequences, looked.sequences)
    found = dict[int, Any]()
    with attach(made, cache=ALL):

        def work(row: int) -> None:
            found[row] = returned_cache(made(torch.tensor([IDS[row]]), use_cache=True))

        threads = [threading.Thread(target=work, args=(row,)) for row in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for row, mine in enumerate(alone):
        same(scored(found[row]), mine)


def test_nothing_of_the_model_changes() -> None:
    made, _ = model()
    out, stock = (asked(made, IDS, spec, max_new_tokens=6) for spec in (ALL, None))
    assert torch.equal(torch.stack(out.logits), torch.stack(stock.logits))
    assert not [name for name in made.state_dict() if "sinks" in name]
    hooks = [len(module._forward_pre_hooks) for module in read_modules(made).values()]
    assert not any(hooks)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
@pytest.mark.parametrize("reduce", ["divprune:0.5", "fastv@llm1:0.5"])
def test_what_a_reducer_left_is_scored(family: str, reduce: str) -> None:
    this, seen = build(family), dict[int, Tensor]()
    weights, inputs = give_gates(this.model), ask(this)
    with attach(this.model, reduce=reduce, cache=ALL), torch.no_grad():
        looks = [
            module.register_forward_pre_hook(
                lambda _m, _a, kwargs, i=i: seen.__setitem__(i, kwargs["hidden_states"][0]),
                with_kwargs=True,
            )
            for i, module in read_modules(this.model).items()
        ]
        cache = returned_cache(this.model(**inputs, use_cache=True))
        for look in looks:
            look.remove()
    assert len(seen[max(seen)]) < inputs["input_ids"].shape[1]
    hand = [gate(seen[i].double().numpy(), weights[i]) for i in sorted(seen)]
    same(scored(cache), hand)


def test_answers_are_scored_and_evicted_too() -> None:
    made, weights = model()
    out = asked(made, IDS[:1], "fastkvzip:22?every=4&sink=0&recent=0", max_new_tokens=27)
    hand = by_hand(made, {"input_ids": out.sequences[:, :-1]}, weights)[0]
    layer = out.past_key_values.layers[0]
    assert layer.keys.shape[2] == 22 + (26 - 1) % 4 + 1
    places = layer.notes["place"][0].expand(len(hand), -1)
    scores = layer.notes["gated"][0]
    same([scores], [np.take_along_axis(hand, places.numpy(), 1)[:, : scores.shape[1]]])
    assert bool((places[:, :22] > 30).any())  # a token of the answer stayed in place of older ones


def test_a_second_prompt_is_scored_behind_the_first() -> None:
    made, _ = model()
    more = [3, 9, 4, 17, 8]
    with attach(made, cache="fastkvzip:12"):
        cache = returned_cache(made(torch.tensor(IDS[:1]), use_cache=True))
        before = [x.clone() for x in scored(cache)]
        made(torch.tensor([[7]]), **{CACHE: cache})
    with attach(made, cache=ALL):
        made(torch.tensor([more]), **{CACHE: cache})
    for mine, its in zip(scored(cache), before, strict=True):
        assert torch.equal(mine[:, :12], its) and bool((mine[:, 12] == 1).all())
        assert mine.shape[1] == 18 and bool((mine[:, 13:] < 1).all())


def test_entries_from_before_the_gates_are_told_of_once() -> None:
    made, _ = model()
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :2] = 0  # padding is no entry that a gate has missed
    begun = {CACHE: returned_cache(made(torch.tensor(IDS[:1] * 2)[:, :9], mask, use_cache=True))}
    mask = torch.cat([mask, torch.ones(2, 22, dtype=torch.int64)], 1)
    with (
        attach(made, cache="fastkvzip:12") as trace,
        pytest.warns(UserWarning, match="^16 entries of this cache came before its policy") as told,
    ):
        made(torch.tensor(IDS[:1] * 2)[:, 9:], mask, **begun)
        made(torch.tensor([[7], [7]]), F.pad(mask, (0, 1), value=1), **begun)
    assert [str(each.message) for each in told] == trace.notes and len(trace.notes) == 1
    for mine in scored(begun[CACHE], 1):
        assert bool((mine[:, :7] == 1).all())


def test_heads_share_a_budget_and_packs_hold_the_same() -> None:
    made, weights = model()
    hand = by_hand(made, {"input_ids": torch.tensor(IDS[:1])}, weights)
    spec = "fastkvzip:12?sink=0&recent=0"
    out = asked(made, IDS[:1], f"{spec}+adakv?alpha=0.0").past_key_values
    for index, scores in hand.items():
        flat = torch.tensor(scores).flatten()
        marks = torch.zeros(len(flat), dtype=torch.bool)
        marks[flat.topk(12 * len(scores)).indices] = True
        assert torch.equal(cache_oracle.kept(out, index, 31), marks.view(scores.shape))
    plain, packed = (asked(made, IDS[:1], f"{spec}{s}").past_key_values for s in ("", "+quant:8"))
    for index in hand:
        seen = [cache_oracle.kept(each, index, 31) for each in (plain, packed)]
        assert torch.equal(*seen) and bool((seen[0].sum(1) == 12).all())


def test_a_gate_learns_what_it_is_shown() -> None:
    generator = torch.Generator().manual_seed(3)
    rule, states = torch.randn(16, 2, generator=generator), torch.randn(4000, 16)
    scores = (states @ rule).sigmoid() ** 4
    made = train_gate(states[:3000], scores[:3000], groups=2, steps=300)
    found = made(states[3000:])
    shared = (top(found.T) & top(scores[3000:].T)).sum() / top(found.T).sum()
    assert float(shared) > 0.8
    again = train_gate(states[:3000], scores[:3000], groups=2, steps=300)
    assert torch.equal(found, again(states[3000:]))
    other = train_gate(states[:3000], scores[:3000].flip(0), groups=2, steps=300)(states[3000:])
    assert float((top(other.T) & top(scores[3000:].T)).sum() / top(found.T).sum()) < 0.6


def test_calibration_trains_on_kvzip_and_is_stored(tmp_path: Path) -> None:
    made, other = (sharp() for _ in range(2))
    prompts = [{"input_ids": torch.tensor([row])} for row in IDS]
    plain = mmfast.calibrate_heads(made, prompts, recent=4, save=tmp_path)
    made.name_or_path = str(tmp_path)
    assert not plain.gates
    with pytest.raises(ModelError, match="'mmfast calibrate --gates'") as error:
        attach(made, cache="fastkvzip:0.5")
    assert "\n" not in str(error.value) and "fastkvzip:0.5 reads gates" in str(error.value)
    found = mmfast.calibrate_heads(made, prompts, recent=4, save=tmp_path, gates=True, steps=300)
    same(found.reach.values(), plain.reach.values(), 0)
    other.name_or_path = str(tmp_path)
    losses = torch.zeros(2)
    for row in IDS:
        teacher = asked(made, [row], "kvzip:4000").past_key_values
        pupils = [scored(asked(each, [row]).past_key_values) for each in (made, other)]
        same(*pupils, 5e-3)  # stored in half precision
        for layer, mine in zip(teacher.layers, pupils[0], strict=True):
            target = layer.notes["repeated"][0]
            means = target.mean(1, keepdim=True).expand_as(target)
            losses += torch.stack([F.binary_cross_entropy(x, target) for x in (mine, means)])
    assert float(losses[0]) < 0.7 * float(losses[1])
    stored = HeadPatterns.load(tmp_path)
    assert sorted(stored.gates) == sorted(found.gates) == sorted(read_modules(made))
    tensors = load_file(tmp_path / FILE)
    for wrong in ("gate.0.query.weight", "gate.0.sinks"):
        save_file({k: v for k, v in tensors.items() if k != wrong}, tmp_path / FILE)
        with pytest.raises(ModelError, match="make it anew"):
            HeadPatterns.load(tmp_path)


@pytest.mark.parametrize("name, suite", [("tiny-video", "video"), ("tiny-scenes", "scenes")])
def test_embedded_models_have_gates_that_agree_with_kvzip(name: str, suite: str) -> None:
    pair = load_pair(f"assets/models/{name}")
    (prompt,) = suite_prompts(pair, suite, 1, 256, seed=4)
    found = dict[str, Any]()
    with torch.no_grad():
        for spec in ("kvzip:9999", "fastkvzip:9999"):
            with attach(pair[0], cache=spec):
                found[spec] = returned_cache(pair[0](**prompt, use_cache=True)).layers
    shared = [
        float((top(a.notes["repeated"][0]) & top(b.notes["gated"][0])).sum(-1).float().mean())
        / int(top(b.notes["gated"][0])[0].sum())
        for a, b in zip(*found.values(), strict=True)
    ]
    assert sum(shared) / len(shared) > 0.45  # 0.25 by chance


def test_a_pipeline_reads_the_gates_of_the_embedded_model() -> None:
    pipe = mmfast.pipeline("video-qa", cache="fastkvzip:0.5")
    answer = pipe("assets/clips/red-circle.mp4", "Which way does the red circle move?")
    (row,) = [row for row in answer.trace.rows if row.stage == "kv"]
    assert answer.text and row.tokens_out == round(0.5 * row.tokens_in)


def test_it_is_refused_where_it_cannot_act() -> None:
    made, _ = model()
    with pytest.raises(SpecError, match="needs key_gate, which a stream does not have"):
        check_score(plan_cache("fastkvzip:64"))
    with pytest.raises(SpecError, match="decode 'self' cannot choose by 'fastkvzip'"):
        view_plan("fastkvzip", 0.5)
    for knob in ("sink=-1", "recent=1.5"):
        with attach(made, cache=f"fastkvzip:0.5?{knob}"), pytest.raises(SpecError, match="choose"):
            made(torch.tensor(IDS[:1]), use_cache=True)
    bare = decode_models.tiny().eval()
    with pytest.raises(ModelError, match="calibrate_heads"):
        attach(bare, cache="fastkvzip:0.5")
