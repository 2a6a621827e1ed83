"""A stock model called piece by piece gives what it gives in one call; others are refused."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import decode_models as small
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from mmfast.bench.timing import one_thread
from mmfast.core.errors import ModelError
from mmfast.models.decoder.backbone import Backbone
from mmfast.models.decoder.blocks import WideProduct, xnn_alone

IDS = torch.randint(0, small.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))
FORMS = [(f, a, lean) for f in small.FAMILIES for a in ("sdpa", "eager") for lean in (False, True)]
FORMS = [form for form in FORMS if form[0] != "gpt_neox" or not form[2]]


@pytest.mark.parametrize(("family", "attention", "lean"), FORMS)
@torch.no_grad()
def test_pieces_equal_the_stock_forward(family: str, attention: str, lean: bool) -> None:
    model = small.tiny(family, attn_implementation=attention)
    want = model(input_ids=IDS, use_cache=False).logits
    backbone = Backbone(model, lean=lean)
    state, found = backbone.state(2, 8), []
    for piece in IDS.split([7, 1, 1, 12, 19], 1):  # grows beyond what was reserved
        raw = backbone.run(state, backbone.embed(piece), [piece.shape[1]] * 2)
        found.append(backbone.logits(backbone.norm(raw), slice(None)))
    torch.testing.assert_close(torch.cat(found, 1), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("lean", [False, True])
@torch.no_grad()
def test_streams_of_different_lengths(lean: bool) -> None:
    """Rows advance by different counts, are cropped and read on: each as if it were alone."""
    model = small.tiny("llama").double()
    backbone = Backbone(model, lean=lean)
    want = model(input_ids=IDS, use_cache=False).logits
    state = backbone.state(2, 8)
    embeds = backbone.embed(IDS)
    at = [0, 0]
    generator = torch.Generator().manual_seed(0)
    while min(at) < 30:
        n = int(torch.randint(1, 6, (1,), generator=generator))
        counts = [int(torch.randint(0, n + 1, (1,), generator=generator)) for _ in at]
        counts[0] = n
        piece = torch.stack([embeds[i, a : a + n] for i, a in enumerate(at)])
        raw = backbone.run(state, piece, counts)
        logits = backbone.logits(backbone.norm(raw), slice(None))
        for i, (a, count) in enumerate(zip(at, counts, strict=True)):
            torch.testing.assert_close(
                logits[i, :count], want[i, a : a + count], atol=2e-5, rtol=1e-4
            )
        at = [min(a + c, 34) for a, c in zip(at, counts, strict=True)]
        at = [max(0, a - int(torch.randint(0, 2, (1,), generator=generator))) for a in at]
        state.crop(at)
        assert state.lengths == at


@torch.no_grad()
def test_only_the_rows_asked_for() -> None:
    model = small.tiny("llama")
    backbone = Backbone(model)
    hidden = torch.randn(3, backbone.width)
    whole = backbone.logits(hidden, slice(None))
    torch.testing.assert_close(backbone.logits(hidden, slice(5, 11)), whole[:, 5:11])
    assert backbone.logits(hidden, slice(5, 11)).shape == (3, 6)


@torch.no_grad()
def test_bfloat16_runs_the_stock_layers() -> None:
    model = small.tiny("qwen2", scale=1.5).to(torch.bfloat16)
    backbone = Backbone(model)
    raw = backbone.run(backbone.state(2), backbone.embed(IDS), [40, 40])
    found = backbone.logits(backbone.norm(raw), slice(None))
    want = model(input_ids=IDS, use_cache=False).logits
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, want, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_two_streams_and_a_stock_call_in_between() -> None:
    model = small.tiny("llama").double()
    backbone = Backbone(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    want = model(input_ids=IDS, use_cache=False).logits
    states = [backbone.state(), backbone.state()]
    for t in range(20):
        for i, state in enumerate(states):
            raw = backbone.run(state, backbone.embed(IDS[i : i + 1, t : t + 1]), [1])
            logits = backbone.logits(backbone.norm(raw), slice(None))
            torch.testing.assert_close(logits[0, 0], want[i, t], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, want)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def _small(config: Any, **more: Any) -> Any:
    return config(**{**small.SMALL, **more})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: OPTForCausalLM(_small(OPTConfig, ffn_dim=48, word_embed_proj_dim=32)),
            "does more around",
        ),
        (lambda: BloomForCausalLM(_small(BloomConfig, n_layer=2, n_head=4)), "one by one"),
        (
            lambda: Lfm2ForCausalLM(_small(Lfm2Config, layer_types=["conv", "full_attention"])),
            "kind conv",
        ),
        (lambda: torch.nn.Linear(3, 3), "no causal language model"),
        (
            lambda: small.tiny(
                "llama",
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            ),
            "change",
        ),
    ],
)
def test_models_that_cannot_be_called_so(make: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as error:
        Backbone(make().eval())
    assert "\n" not in str(error.value)


def test_scaled_embeddings_and_logits_that_are_forgotten_are_noticed() -> None:
    config = _small(GraniteConfig, embedding_multiplier=7.0, logits_scaling=2.0)
    backbone = Backbone(GraniteForCausalLM(config).eval())
    backbone._check_equal()
    backbone._scale = 1.0
    with pytest.raises(ModelError, match="does more around"):
        backbone._check_equal()


def test_learned_positions_end() -> None:
    """Padding of a batch may lie behind the last position, tokens may not."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=24, n_positions=12)
    model = GPT2LMHeadModel(config).eval()
    backbone = Backbone(model)
    state = backbone.state(2)
    with torch.no_grad():
        backbone.run(state, backbone.embed(IDS[:, :10]), [10, 5])
        raw = backbone.run(state, backbone.embed(IDS[:, 10:15]), [2, 5])
        want = model(input_ids=torch.cat([IDS[1:, :5], IDS[1:, 10:15]], 1)).logits[0, -5:]
        found = backbone.logits(backbone.norm(raw), slice(None))[1]
        torch.testing.assert_close(found, want, atol=2e-5, rtol=1e-5)
        with pytest.raises(ModelError, match="12 positions") as error:
            backbone.run(state, backbone.embed(IDS[:, :1]), [1, 1])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("columns", [96, 516, 13, 131])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_a_product_of_few_rows_is_the_product(
    columns: int, biased: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(columns)
    draw = partial(torch.randn, generator=generator, dtype=dtype)
    weight, bias = draw(24, columns), draw(columns) if biased else None
    product = WideProduct(weight, bias)
    near = 1e-12 if dtype == torch.float64 else 2e-5
    same = partial(torch.testing.assert_close, atol=near, rtol=near)
    with one_thread():
        for rows in (1, 2, 16, 28, 29):
            x, plus = draw(rows, 24), draw(rows, columns)
            want = (x[:, :, None].double() * weight).sum(1) + (0 if bias is None else bias)
            same(product(x).double(), want)
            kept = plus.clone()
            same(product(x, plus).double(), want + plus)
            assert torch.equal(plus, kept)
    assert (product._packed is not None) == (dtype == torch.float32 and xnn_alone())


def test_a_weight_is_packed_for_one_thread_without_gradients() -> None:
    product = WideProduct(torch.randn(8, 8), None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        product(torch.randn(3, 8))
    finally:
        torch.set_num_threads(threads)
    with one_thread():
        x = torch.randn(3, 8, requires_grad=True)
        product(x).sum().backward()
        torch.testing.assert_close(x.grad, product.weight.sum(1).expand(3, -1))
        assert product._packed is None
        product(x.detach())
        assert (product._packed is not None) == xnn_alone()


def test_threads_share_a_packed_weight() -> None:
    product = WideProduct(torch.eye(1024), None)
    with one_thread(), ThreadPoolExecutor(4) as pool:

        def right(number: int) -> bool:
            torch.set_num_threads(1)
            x = torch.full((28, 1024), float(number))
            return all(torch.equal(product(x), x) for _ in range(40))

        assert all(pool.map(right, range(16)))


THREADS = """
import sys, torch
from mmfast.models.decoder.blocks import WideProduct, xnn_alone
for count in map(int, sys.argv[1:]):
    torch.set_num_threads(count)
product = WideProduct(torch.eye(64), None)
x = torch.randn(8, 64)
assert torch.equal(product(x), x)
print(xnn_alone(), product._packed is not None)
"""


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("counts", [("1",), ("2", "1")])
def test_xnnpack_is_left_alone_where_it_has_threads(counts: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", THREADS, *counts]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    known = hasattr(torch.ops.prepacked, "linear_clamp_run")
    assert found == [str(known and counts == ("1",))] * 2
