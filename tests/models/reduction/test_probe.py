"""Scores from sdpa against eager attention weights; logits untouched; registry restored."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    StaticCache,
)
from transformers.modeling_utils import AttentionInterface
from transformers.models.qwen2 import modeling_qwen2

from mmfast.core.errors import ModelError
from mmfast.models.reduction.probe import intercepting, last_query_scores, probing, received


def _llm(implementation="sdpa"):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 0.15)
    return model


def _inputs(padded):
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (3, 17))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
        mask[2, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _attention(model):
    return [layer.self_attn for layer in model.model.layers]


def _registry():
    table = AttentionInterface()
    return {name: table[name] for name in table}


class _Rows(list):
    """Collects (last-query scores, received) of every call."""

    def hook(self, module, q, k, v, mask, scaling, is_causal):
        self.append(
            (last_query_scores(q, k, mask, scaling), received(q, k, scaling, is_causal, mask))
        )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_scores_equal_eager_weights(implementation, padded):
    inputs = _inputs(padded)
    weights = _llm("eager")(**inputs, output_attentions=True).attentions
    model, rows = _llm(implementation), _Rows()
    stock = model(**inputs).logits
    with probing(dict.fromkeys(_attention(model), rows.hook)), torch.no_grad():
        probed = model(**inputs).logits
    assert torch.equal(stock, probed)
    real = inputs["attention_mask"].bool()
    assert len(rows) == len(weights) == 3
    for (last, mean), weight in zip(rows, weights, strict=True):
        assert last.shape == (3, 17)
        torch.testing.assert_close(last, weight[:, :, -1].mean(1), atol=1e-6, rtol=0)
        for item in range(3):
            want = weight[item][:, real[item]].mean((0, 1))
            torch.testing.assert_close(mean[item], want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_levels_come_with_the_stock_output(padded):
    model, inputs, seen = _llm(), _inputs(padded), []

    def hook(module, q, k, v, mask, scaling, is_causal, lse):
        with_level = received(q, k, scaling, is_causal, mask, lse)
        seen.append((lse, with_level, received(q, k, scaling, is_causal, mask)))

    stock = model(**inputs).logits
    with probing(dict.fromkeys(_attention(model), hook), levels=True), torch.no_grad():
        assert torch.equal(model(**inputs).logits, stock)
    assert len(seen) == 3
    for lse, with_level, without in seen:
        assert lse.shape == (3, 6, 17)
        torch.testing.assert_close(with_level, without, atol=1e-6, rtol=0)


def test_decode_step_and_generate_are_bit_equal():
    model, inputs, rows = _llm(), _inputs(True), _Rows()
    stock = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with probing({_attention(model)[1]: rows.hook}):
        probed = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(stock, probed)
    assert [last.shape[1] for last, _ in rows] == list(range(17, 23))


def test_static_cache_prefill_shows_only_filled_slots():
    model, rows = _llm(), _Rows()
    ids = _inputs(False)["input_ids"]
    want = _llm("eager")(ids, output_attentions=True).attentions[1]
    with probing({_attention(model)[1]: rows.hook}):
        model(ids, past_key_values=StaticCache(model.config, max_cache_len=32))
    last, mean = rows[0]
    torch.testing.assert_close(last, want[:, :, -1].mean(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(mean, want.mean((1, 2)), atol=1e-6, rtol=0)


def _dense(q, k, scaling, visible=None):
    """Textbook attention weights, keys repeated per head."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = (q.double() @ k.double().transpose(2, 3)) * scaling
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    return logits.softmax(-1)


def test_chunks_do_not_change_received(monkeypatch):
    q, k = torch.randn(2, 6, 50, 8), torch.randn(2, 2, 60, 8)
    visible = torch.arange(60)[None] <= torch.arange(50)[:, None] + 10
    want = _dense(q, k, 0.3, visible).mean((1, 2)).float()
    for chunk in (1, 7 * 2 * 6 * 60, 1 << 22):
        monkeypatch.setattr("mmfast.models.reduction.probe._CHUNK", chunk)
        got = received(q, k, 0.3, is_causal=True)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        assert torch.allclose(got.sum(-1), torch.ones(2))


def test_mask_kinds_agree():
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, :4] = False
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    four = (causal & keep[:, None])[:, None]
    additive = torch.zeros(four.shape).masked_fill(~four, torch.finfo(torch.float32).min)
    infinite = torch.zeros(four.shape).masked_fill(~four, -torch.inf)
    block = create_block_mask(
        lambda b, h, i, j: (i >= j) & keep[b, j], 2, None, 9, 9, device="cpu", BLOCK_SIZE=128
    )
    masks = (four, four.expand(2, 4, 9, 9), additive, infinite, keep, keep.long(), block)
    want = _dense(q, k, 8**-0.5, four)[:, :, -1].mean(1).float()
    mean = _dense(q[1:, :, 4:], k[1:, :, 4:], 8**-0.5, causal[4:, 4:]).mean((1, 2)).float()
    for mask in masks:
        torch.testing.assert_close(last_query_scores(q, k, mask), want, atol=1e-6, rtol=0)
        got = received(q, k, None, True, mask)
        torch.testing.assert_close(got[1:, 4:], mean, atol=1e-6, rtol=0)
        assert got[1, :4].abs().max() == 0


def test_a_mask_that_broadcasts_over_queries():
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    bias = torch.randn(2, 1, 1, 9)
    wide = bias.expand(2, 1, 9, 9)
    assert torch.equal(last_query_scores(q, k, bias), last_query_scores(q, k, wide))
    got = received(q, k, mask=bias)
    torch.testing.assert_close(got, received(q, k, mask=wide))
    assert torch.allclose(got.sum(-1), torch.ones(2))


def test_half_precision_scores_are_float32():
    q, k = torch.randn(1, 4, 5, 8).bfloat16(), torch.randn(1, 4, 30, 8).bfloat16()
    got = last_query_scores(q, k)
    assert got.dtype == torch.float32
    want = _dense(q, k, 8**-0.5)[:, :, -1].mean(1).float()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_vision_tower_modules_are_served():
    torch.manual_seed(0)
    config = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=20,
        patch_size=4,
        vision_use_head=False,
    )
    tower, rows = SiglipVisionModel(config).eval(), _Rows()
    pixels = torch.randn(2, 3, 20, 20)
    stock = tower(pixels).last_hidden_state
    with probing({tower.encoder.layers[1].self_attn: rows.hook}):
        assert torch.equal(tower(pixels).last_hidden_state, stock)
    tower.set_attn_implementation("eager")
    weights = tower(pixels, output_attentions=True).attentions[1]
    torch.testing.assert_close(rows[0][1], weights.mean((1, 2)), atol=1e-6, rtol=0)


def test_everything_is_restored():
    before, eager = _registry(), modeling_qwen2.eager_attention_forward
    model = _llm()
    attention = _attention(model)
    seen = []

    def hook(module, *_):
        seen.append(module)

    with probing({attention[0]: hook}):
        inside = _registry()
        assert all(inside[name] is not before[name] for name in before)
        with pytest.raises(RuntimeError, match="boom"), probing({attention[0]: hook}):
            model(torch.ones(1, 3, dtype=torch.long))
            raise RuntimeError("boom")
        assert len(seen) == 2
        model(torch.ones(1, 3, dtype=torch.long))
        assert len(seen) == 3
        assert _registry() == inside
    assert _registry() == before
    assert list(_registry()) == list(before)
    assert modeling_qwen2.eager_attention_forward is eager
    assert not any("_mmfast_gate" in module.__dict__ for module in model.modules())
    model(torch.ones(1, 3, dtype=torch.long))
    assert len(seen) == 3


def test_a_function_registered_meanwhile_stays():
    before = _registry()

    def theirs(*args, **kwargs):
        return before["sdpa"](*args, **kwargs)

    model = _llm()
    with probing({_attention(model)[0]: lambda *_: None}):
        AttentionInterface.register("sdpa", theirs)
    try:
        assert _registry()["sdpa"] is theirs
    finally:
        AttentionInterface.register("sdpa", before["sdpa"])


def test_an_exception_in_a_hook_restores():
    before, model = _registry(), _llm()

    def hook(*_):
        raise RuntimeError("in the hook")

    with pytest.raises(RuntimeError, match="in the hook"), probing({_attention(model)[0]: hook}):
        model(torch.ones(1, 3, dtype=torch.long))
    assert _registry() == before


def test_threads_share_the_registry():
    before, errors = _registry(), []
    ids = _inputs(False)["input_ids"]

    def work(seed):
        try:
            model = _llm()
            want = model(ids).logits
            for _ in range(10):
                rows = _Rows()
                with probing({_attention(model)[1]: rows.hook}):
                    assert torch.equal(model(ids).logits, want)
                assert len(rows) == 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert _registry() == before


def test_intercepting_changes_the_mask():
    model = _llm()
    ids = _inputs(False)["input_ids"]
    stock = model(ids).logits

    def blind(call, module, q, k, v, mask, **kwargs):
        diagonal = torch.eye(q.shape[2], dtype=torch.bool)[None, None]
        return call(module, q, k, v, diagonal, **kwargs)

    with intercepting(dict.fromkeys(_attention(model), blind)):
        alone = model(ids).logits
    assert not torch.allclose(alone, stock)
    torch.testing.assert_close(alone[:, :1], stock[:, :1], atol=1e-5, rtol=0)


def test_other_modules_are_refused():
    with pytest.raises(ModelError, match="attention interface"), probing({nn.Linear(2, 2): print}):
        pass
