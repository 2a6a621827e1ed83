"""Heads of a layer that keep unlike numbers: oracles, masks, bytes, ragged rows, refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import oracles_heads
import pytest
import torch
from cache_factory import make
from text_steps import hidden_steps
from text_zoo import padded, prompt, text_model, written
from torch import Tensor

import mmfast
from mmfast.attach import attach
from mmfast.caches.plan import call_plan, plan_cache
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.tokens import Tokens
from mmfast.models.kv.patterns import FILE
from mmfast.ops.eviction import call
from mmfast.ops.ragged import RaggedRows

SCORES = ("snapkv", "knorm", "keydiff", "expected_attention", "criticalkv", "leverage", "mixkv")
SPECS = ("snapkv:0.4?window=5+adakv", "adakv:0.3", "sink:2+knorm:0.3+adakv?alpha=0.5")


def kept(layer: Any, row: int, length: int) -> Tensor:
    """Which of `length` tokens each head still holds, `[H, n]`."""
    places, kinds = layer.notes["place"][row], layer.notes["kind"][row]
    seen = torch.zeros(layer.keys.shape[1], length, dtype=torch.bool)
    for head, mine in enumerate(seen):
        at, real = (x.expand(len(seen), -1)[head] for x in (places, kinds >= 0))
        mine[at[real & (at < length)]] = True
    return seen


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", ["random", "ties", "text"])
def test_adakv_is_its_oracle(score: str, kind: str) -> None:
    for budget in (1, 7, 20, 39):
        tokens = make(kind, 3, 40, seed=budget)
        for alpha, guard in ((0.2, "blend"), (0.2, "least"), (0.0, "blend"), (1.0, "least")):
            plan = plan_cache(f"{score}:{budget}+adakv?alpha={alpha}&guard={guard}")
            assert plan is not None and plan.score is not None
            marks = plan.marks(tokens)
            values = call(plan.score, tokens, budget).double().clamp_max(1e300).tolist()
            found = [row.nonzero()[:, 0].tolist() for row in marks]
            assert found == oracles_heads.adakv(values, budget, alpha, guard)
            assert int(marks.sum()) == 3 * budget


@pytest.mark.parametrize("knob", ["alpha=1.5", "guard=leat"])
def test_adakv_names_a_wrong_knob(knob: str) -> None:
    plan = plan_cache(f"knorm:7+adakv?{knob}")
    assert plan is not None
    with pytest.raises(SpecError, match=r"choose from 0 to 1|did you mean 'least'"):
        plan.marks(make("random", 2, 40))


def test_duo_attention_is_its_oracle_and_holds_its_budget() -> None:
    model = text_model("llama")
    found = mmfast.calibrate_heads(model, length=48, recent=6)
    reach = [found.reach[i].tolist() for i in sorted(found.reach)]
    ids = prompt(40)
    for spec, share in (("retrieval=0.5&", 0.5), ("retrieval=0.25&", 0.25), ("retrieval=0.0&", 0)):
        with attach(model, cache=f"duo_attention?{spec}sink=2&recent=5"):
            cache = written(model, {"input_ids": ids}, 1)[2].past_key_values
        expected = oracles_heads.duo_attention(reach, 40, share, 2, 5)
        for index, layer in enumerate(cache.layers):
            assert [row.nonzero()[:, 0].tolist() for row in kept(layer, 0, 40)] == expected[index]
    for budget in (0.75, 0.5, 0.3):
        with attach(model, cache=f"duo_attention:{budget}?sink=2&recent=5") as trace:
            written(model, {"input_ids": ids}, 1)
        assert 0.8 * 40 * budget - 5 <= trace.rows[-1].tokens_out <= 40 * budget


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cut_is_a_mask_and_rows_are_alone(family: str) -> None:
    model = text_model(family)
    for spec in SPECS:
        rows, unlike = [prompt(24), prompt(40, 2)], False
        with attach(model, cache=spec) as trace:
            _, logits, _ = written(model, padded(rows), 3)
        for row, ids in enumerate(rows):
            with attach(model, cache=spec):
                new, alone, out = written(model, {"input_ids": ids}, 3)
            torch.testing.assert_close(logits[row], alone[0], atol=1e-5, rtol=1e-5)
            layers = out.past_key_values.layers
            short = ((i, x) for i, x in enumerate(layers) if getattr(x, "notes", None))
            visible = {i: kept(x, 0, ids.shape[1]) for i, x in short}
            unlike |= any(len(set(seen.sum(1).tolist())) > 1 for seen in visible.values())
            hand = hidden_steps(model, ids, new[0], visible).float()  # as `generate` returns logits
            torch.testing.assert_close(alone[0], hand, atol=1e-5, rtol=1e-5)
        assert unlike and trace.rows[-1].tokens_out < trace.rows[-1].tokens_in


def test_what_is_stored_has_no_padding() -> None:
    model, ids = text_model("llama"), prompt(40)
    held = {}
    for spec in ("knorm:0.25", "knorm:0.25+adakv"):
        with attach(model, cache=spec) as trace:
            written(model, {"input_ids": ids}, 1)
        held[spec] = trace.rows[-1].peak_bytes
    assert held["knorm:0.25"] == held["knorm:0.25+adakv"]
    rows = torch.randn(3, 8, 4)
    stays = torch.rand(3, 8) < 0.5
    ragged = RaggedRows.of(rows, stays)
    whole = ragged.whole()
    assert ragged.nbytes == int(stays.sum()) * 16 and whole.shape == ragged.shape
    for head in range(3):
        assert whole[head, whole.shape[1] - int(stays[head].sum()) :].equal(rows[head, stays[head]])


def test_a_second_prompt_is_shared_out_anew() -> None:
    model, first = text_model("llama"), prompt(30)
    for spec in SPECS:
        with attach(model, cache=spec) as trace:
            _, _, out = written(model, {"input_ids": first}, 3)
            ids = torch.cat([out.sequences, prompt(20, 5)], 1)
            again = written(model, {"input_ids": ids}, 3, past_key_values=out.past_key_values)
        assert torch.isfinite(again[1]).all()
        assert int(again[2].past_key_values.layers[0].get_seq_length()) == ids.shape[1] + 2
        one, two = (row for row in trace.rows if row.stage == "kv")
        assert two.tokens_in > one.tokens_out and two.tokens_out < two.tokens_in


def test_beams_and_drafts_see_what_one_token_sees() -> None:
    model, ids = text_model("llama"), prompt(36)
    with attach(model, cache=SPECS[0]):
        plain = written(model, {"input_ids": ids}, 8)[0]
        drafted = written(model, {"input_ids": ids}, 8, prompt_lookup_num_tokens=3)[0]
        beams = model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False)
    assert torch.equal(plain, drafted) and beams.shape[1] == 42


def test_patterns_are_stored_beside_a_model_and_found_there(tmp_path: Path) -> None:
    model, other = (text_model.__wrapped__("llama") for _ in range(2))  # no test knows these
    with pytest.raises(ModelError, match="calibrate_heads"), attach(model, cache="qfilter:0.5"):
        pass
    found = mmfast.calibrate_heads(model, length=144, save=tmp_path)
    assert (tmp_path / FILE).is_file()
    other.config._name_or_path = other.name_or_path = str(tmp_path)
    ids, kept_by = prompt(40), []
    for each in (model, other):
        with attach(each, cache="qfilter:0.5"):
            cache = written(each, {"input_ids": ids}, 1)[2].past_key_values
        kept_by.append([kept(layer, 0, 40) for layer in cache.layers])
    assert all(a.equal(b) for a, b in zip(*kept_by, strict=True))
    keys = torch.randn(2, 20, 8)
    wrong = {i: x[:1] for i, x in found.reach.items()}
    with pytest.raises(ModelError, match="do not fit"):
        type(found)(found.filters, wrong).use(other)
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot read"):
        type(found).load(tmp_path)
    assert Tokens(keys).n == 20


def test_a_filter_is_the_singular_vector_of_the_queries() -> None:
    from mmfast.models.reduction.probe import probing
    from mmfast.models.wrappers import attention_at, decoder_of

    model, ids = text_model("llama"), prompt(30)
    found = mmfast.calibrate_heads(model, [{"input_ids": ids}])
    seen: list[Tensor] = []
    module = attention_at(decoder_of(model), 1)
    with probing({module: lambda _, query, *rest: seen.append(query[0])}):
        model(ids)
    queries = seen[0].double()
    ways = torch.linalg.svd(queries, full_matrices=False).Vh[:, 0]
    ways = ways * (queries.mean(1) * ways).sum(-1, keepdim=True).sign()
    expected = ways.unflatten(0, (2, 2)).mean(1).float()
    torch.testing.assert_close(found.filters[1], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("chunkkv:0.5+adakv", "does not tell"),
        ("snapkv:0.5+adakv:0.5", "shares out the budget"),
        ("snapkv:0.5+adakv+quant:4", "cannot read"),
        ("snapkv:0.5+duo_attention", "drop one"),
        ("h2o:0.5+adakv", "at every step"),
        ("snapkv:0.5?every=8+adakv", "every=8"),
        ("adakv:0.5+adakv:0.5", "both of role"),
    ],
)
def test_refusals_are_one_line(spec: str, why: str) -> None:
    with pytest.raises(SpecError, match=why) as error:
        call_plan(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "several", "rows"),
    [("knorm:0.5+adakv", 1, 1), ("knorm:0.5", 1, 2), ("pyramidkv:0.5", 2, 1)],
)
def test_a_cache_that_needs_masks_of_its_own_goes_on_attached_alone(
    spec: str, several: int, rows: int
) -> None:
    """Heads, rows or layers hold unlike numbers, and the stock model would read the padding."""
    model = text_model("llama")
    inputs = padded([prompt(24 - 9 * row, row) for row in range(rows)])
    with torch.no_grad(), attach(model, cache=spec):
        cache = model(**inputs).past_key_values
        whole = copy.deepcopy(cache)
        mask = inputs["attention_mask"]
        more = {
            "input_ids": prompt(several, 5).expand(rows, -1),
            "attention_mask": torch.cat([mask, mask.new_ones(rows, several)], 1),
        }
        want = model(**more, past_key_values=whole).logits
        saved = pickle.dumps(cache)
        copies = [copy.deepcopy(cache), pickle.loads(saved)]
        copies.append(copy.deepcopy(copies[0]))
    for mine in (cache, *copies, copy.deepcopy(cache), pickle.loads(saved)):
        with torch.no_grad(), pytest.raises(ModelError, match=r"go on inside attach\(…\)"):
            model(**more, past_key_values=mine)
        with torch.no_grad(), attach(model, cache=spec):
            assert torch.equal(model(**more, past_key_values=mine).logits, want)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_goes_on_in_a_compiled_step(copied: Any) -> None:
    """Its first call under an attachment may be one that no hook sees."""
    model, inputs = text_model("llama"), padded([prompt(24, 0), prompt(15, 1)])
    with torch.no_grad(), attach(model, cache="snapkv:0.5"):
        cache = model(**inputs).past_key_values
        mask = inputs["attention_mask"]
        more = {
            "input_ids": prompt(1, 5).expand(2, -1),
            "attention_mask": torch.cat([mask, mask.new_ones(2, 1)], 1),
        }
        want = model(**more, past_key_values=copied(cache)).logits
        step = torch.compile(model, backend="eager")
        found = step(**more, past_key_values=copied(cache)).logits
    torch.testing.assert_close(found, want)
