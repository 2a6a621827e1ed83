"""Methods that see all images of a prompt at once: budgets, signals, splitting, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import generate, tiny

from mmfast import Tokens
from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.registry import register, unregister
from mmfast.models.reduction.choice import join, split

SEEN: list[Tokens] = []


@pytest.fixture(autouse=True)
def methods() -> Iterator[None]:
    @register("_across", needs=("x", "attn", "query"), sites=("pre", "llm"), scope="prompt")
    def across(tokens: Tokens, budget: int) -> Reduction:
        """Most attended tokens of all images."""
        SEEN.append(tokens)
        return Reduction.prune(tokens.need("attn").topk(budget).indices, tokens.n)

    @register("_mixing", scope="prompt")
    def mixing(tokens: Tokens, budget: int) -> Reduction:
        """Folds everything into the first tokens."""
        return Reduction(torch.arange(budget), torch.arange(tokens.n).clamp_max(budget - 1))

    @register("_last", scope="prompt")
    def last(tokens: Tokens, budget: int) -> Reduction:
        """Keeps the last tokens, so that nothing is left of the first image."""
        return Reduction.prune(torch.arange(tokens.n - budget, tokens.n), tokens.n)

    SEEN.clear()
    yield
    for name in ("_across", "_mixing", "_last"):
        unregister(name)


def _inputs(family: str, rows: int = 1) -> tuple[Any, dict[str, Any]]:
    """Two images in the first prompt, three in the second."""
    this = tiny(family)
    prompts = ["{image} and {image}?", "{image}{image} or {image}, well?"][:rows]
    return this, this.inputs(prompts, images=this.images(2 if rows == 1 else 5))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("where", ["_across:0.3", "_across:20", "_across@llm2:0.3"])
def test_the_budget_is_for_the_whole_prompt(family: str, where: str) -> None:
    this, inputs = _inputs(family)
    with attach(this.model, where) as trace, torch.no_grad():
        logits = this.model(**inputs).logits[0]
    (tokens,) = SEEN
    found = {number: reduction for _, number, reduction in trace.reductions}
    assert tokens.n == sum(r.n for r in found.values()) and list(found) == [0, 1]
    want = 20 if where.endswith("20") else round(0.3 * tokens.n)
    assert sum(r.m for r in found.values()) == want == trace.rows[0].tokens_out
    best = tokens.attn.topk(want).indices.sort().values
    image = tokens.need("image")
    assert image.tolist() == [0] * found[0].n + [1] * found[1].n
    joined = torch.cat([found[0].keep, found[1].keep + found[0].n])
    assert torch.equal(joined, best)
    assert found[0].m != found[1].m  # ragged: one image deserves more
    with torch.no_grad():
        prompt = oracle.embed(this, inputs)
        expected = oracle.masked(this, prompt, trace.reductions)
        keep = oracle.kept_places(prompt, trace.reductions)
    torch.testing.assert_close(logits, expected[keep], atol=2e-4, rtol=2e-4)


def test_rows_of_a_batch_are_prompts_of_their_own() -> None:
    this, inputs = _inputs("qwen2_5_vl", rows=2)
    with attach(this.model, "_across:0.25") as trace:
        both = generate(this, inputs, 4)
    kept = [reduction.keep for _, _, reduction in trace.reductions]
    images, at = this.images(5), 0
    for row, (prompt, count) in enumerate([("{image} and {image}?", 2)]):
        single = this.inputs([prompt], images=images[at : at + count])
        with attach(this.model, "_across:0.25") as alone:
            one = generate(this, single, 4)
        assert torch.equal(one.sequences[0, -4:], both.sequences[row, -4:])
        for got, (_, _, want) in zip(kept[at : at + count], alone.reductions, strict=True):
            assert torch.equal(got, want.keep)
    assert [tokens.n for tokens in SEEN] == [70, 105, 70]


def test_stages_of_both_scopes_follow_each_other() -> None:
    this, inputs = _inputs("qwen3_vl")
    with attach(this.model, "divprune:0.6+_across:0.5+uniform:0.5") as trace, torch.no_grad():
        this.model(**inputs)
    counts = [(number, r.n, r.m) for _, number, r in trace.reductions]
    assert counts[0] == (0, 35, 21) and counts[3] == (1, 35, 21)
    assert [n for _, n, _ in counts[1::3]] == [21, 21]
    assert counts[1][2] + counts[4][2] == 21
    assert counts[2] == (0, counts[1][2], round(0.5 * counts[1][2]))


def test_an_image_may_lose_all_its_tokens() -> None:
    for family in ("llava_onevision", "qwen3_vl"):
        this, inputs = _inputs(family)
        with attach(this.model, "_last:10+fastv@llm2:0.5+divprune@llm3:0.5") as trace:
            generate(this, inputs, 3)
        kept = [(site, number, r.m) for site, number, r in trace.reductions]
        assert kept[:2] == [("pre", 0, 0), ("pre", 1, 10)]
        assert ("llm2", 1, 5) in kept


def test_a_share_of_one_is_the_stock_model() -> None:
    this, inputs = _inputs("qwen2_5_vl")
    with torch.no_grad():
        stock = this.model(**inputs).logits
        with attach(this.model, "_across:1.0+divprune:1.0") as trace:
            assert torch.equal(this.model(**inputs).logits, stock)
    assert not trace.reductions and not SEEN


def test_catp_in_a_model() -> None:
    this, inputs = _inputs("qwen2_5_vl", rows=2)
    with attach(this.model, "catp:0.2") as trace:
        generate(this, inputs, 2)
    kept = [(reduction.n, reduction.m) for _, _, reduction in trace.reductions]
    assert [n for n, _ in kept] == [35] * 5
    assert sum(m for _, m in kept[:2]) == 14 and sum(m for _, m in kept[2:]) == 21
    assert trace.rows[0].tokens_out == 35


def test_errors() -> None:
    this, inputs = _inputs("qwen2_5_vl")
    merging = pytest.raises(ModelError, match="'_mixing@pre:10' merges tokens of different images")
    with merging, attach(this.model, "_mixing:10"), torch.no_grad():
        this.model(**inputs)
    with pytest.raises(SpecError, match="71"), attach(this.model, "_across:71"), torch.no_grad():
        this.model(**inputs)
    chunks = pytest.raises(ModelError, match="leave out prefill_chunk_size")
    with chunks, attach(this.model, "_across:0.5"):
        generate(this, inputs, 2, prefill_chunk_size=16)


def test_joining_and_splitting_are_inverse() -> None:
    parts = [Reduction.merge(torch.tensor([1]), torch.tensor([1, 1, -1])), Reduction.identity(2)]
    owner = torch.tensor([0, 0, -1, 1, 2])
    whole = Reduction(torch.tensor([1, 3, 4]), owner, weight=torch.rand(5))
    for got, want in zip(split(whole, [3, 2]), parts, strict=True):
        assert torch.equal(got.keep, want.keep) and torch.equal(got.owner, want.owner)
        got.check()
    x = torch.randn(5, 4)
    triplets = Mix(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 3, 4]), torch.rand(4))
    mixed = Reduction(whole.keep, owner, mix=triplets)
    halves = split(mixed, [3, 2])
    merged = torch.cat([halves[0].apply(x[:3]), halves[1].apply(x[3:])])
    torch.testing.assert_close(merged, mixed.apply(x))
    with pytest.raises(ModelError, match="different images"):
        split(Reduction(whole.keep, owner, mix=Mix(*(t.clone() for t in _crossing()))), [3, 2])
    with pytest.raises(ModelError, match="different images"):
        split(Reduction.merge(torch.tensor([0]), torch.zeros(5, dtype=torch.long)), [3, 2])


def _crossing() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor([0, 1, 2]), torch.tensor([4, 3, 4]), torch.ones(3)


def test_joined_signals() -> None:
    items = [
        Tokens(
            torch.randn(n, 4),
            attn=torch.rand(n),
            query=torch.zeros(2, 4),
            grid=(1, 1, n),
            signals={
                "keys": torch.randn(n, 3),
                "text_key_norm": torch.rand(2),
                f"only{n}": torch.rand(n),
            },
        )
        for n in (3, 5)
    ]
    whole = join([(0, items[0]), (2, items[1])])
    assert whole.n == 8 and whole.grid is None and whole.attn.shape == (8,)
    assert whole.need("image").tolist() == [0] * 3 + [2] * 5
    assert whole.need("keys").shape == (8, 3) and whole.need("text_key_norm").shape == (2,)
    assert set(whole.signals) == {"keys", "text_key_norm", "image"}
    assert join([(1, items[0])]).grid == (1, 1, 3)
