"""KV-Squared: the tokens of the oddest keys read again, in parts, batches and with drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cache_oracle
import decode_models
import model_oracle as oracle
import pytest
import repeat_walk
import torch
from text_zoo import padded, prompt, text_model, written

from mmfast.attach import attach
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import SpecError
from mmfast.models.kv import repetition
from mmfast.models.kv.view import view_plan
from mmfast.streams.engine import check_score

ALL = "kvsquared:4000?chunk=9&asks=0.3"  # read again, and nothing leaves
IDS = [[1 + (i * k) % 23 for i in range(n)] for n, k in ((31, 5), (24, 7), (40, 11))]


def scored(cache: Any, row: int = 0) -> list[torch.Tensor]:
    """What the real entries of a row have received, by layer."""
    real = [layer.notes["kind"][row, 0] >= 0 for layer in cache.layers]
    pairs = zip(cache.layers, real, strict=True)
    return [layer.notes["repeated"][row][:, mine] for layer, mine in pairs]


def asked(model: Any, ids: Any, **options: Any) -> Any:
    n = max(map(len, ids))
    mask = torch.tensor([[0] * (n - len(row)) + [1] * len(row) for row in ids])
    rows = torch.tensor([[0] * (n - len(row)) + row for row in ids])
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, **options}
    with attach(model, cache=ALL):
        out = model.generate(rows, attention_mask=mask, return_dict_in_generate=True, **options)
    return out.past_key_values


def by_hand(ids: list[int], asks: float = 0.3) -> Any:
    model = decode_models.tiny(attn_implementation="eager").eval()
    embeds = model.get_input_embeddings()(torch.tensor(ids)).detach()
    whole = oracle.Prompt(embeds, torch.arange(len(ids)), [])
    this = SimpleNamespace(model=model, facts=SimpleNamespace(blocks=None, prefix=False))
    with torch.no_grad():
        walk = cache_oracle.Walk(this, whole)
    return repeat_walk.received(walk, whole, 9, asks=asks).values()


def same(one: Any, other: Any) -> None:
    for mine, its in zip(one, other, strict=True):
        torch.testing.assert_close(mine.float(), torch.as_tensor(its).float(), atol=1e-5, rtol=0)


def test_rows_and_parts_are_the_passes_by_hand() -> None:
    model = decode_models.tiny().eval()
    for options in ({}, {"prefill_chunk_size": 7}):
        cache = asked(model, IDS, **options)
        for row, ids in enumerate(IDS):
            same(scored(cache, row), by_hand(ids))


def test_other_queries_are_other_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle sees the first tokens of a chunk in place of the oddest."""
    monkeypatch.setattr(
        repetition, "keydiff", lambda tokens, n: -torch.arange(n).double().expand(2, n)
    )
    with pytest.raises(AssertionError):
        test_rows_and_parts_are_the_passes_by_hand()


def test_few_tokens_pass_and_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = decode_models.tiny().eval(), list[int]()
    true = repetition.Repetition._pass
    monkeypatch.setattr(
        repetition.Repetition,
        "_pass",
        lambda self, states, *rest: (seen.append(states.shape[1]), true(self, states, *rest))[1],
    )
    with attach(model, cache="kvsquared:12?chunk=20") as trace:
        model(torch.tensor(IDS[2:]), use_cache=True)
    assert seen == [1, 1] and not trace.notes  # of 40; no word about a tokenizer
    with attach(model, cache="kvsquared:12?chunk=20&asks=0.5"):
        model(torch.tensor(IDS[2:]), use_cache=True)
    assert seen[2:] == [10, 10]


def test_drafts_and_batches_change_nothing() -> None:
    model, prompts = text_model("llama"), [prompt(41), prompt(29, 1)]
    with attach(model, cache="kvsquared:0.4?chunk=9&asks=0.2"):
        together = written(model, padded(prompts), 5)[1]
        alone = [written(model, {"input_ids": ids}, 5) for ids in prompts]
        drafts = written(model, {"input_ids": prompts[0]}, 5, prompt_lookup_num_tokens=3)
    torch.testing.assert_close(together, torch.cat([each[1] for each in alone]), atol=2e-5, rtol=0)
    assert torch.equal(drafts[0], alone[0][0])


def test_a_chunk_may_be_gone_from_later_layers() -> None:
    model, prompts = text_model("llama"), [prompt(41), prompt(29, 1)]
    with attach(model, "uniform@llm2:6?tokens=text", cache="kvsquared:0.6?chunk=4"):
        together = written(model, padded(prompts), 3)[1]
        alone = [written(model, {"input_ids": ids}, 3)[1] for ids in prompts]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-5, rtol=0)


def test_it_is_refused_where_it_cannot_act() -> None:
    with pytest.raises(SpecError, match="needs attn_repeated, which a stream does not have"):
        check_score(plan_cache("kvsquared:64"))
    with pytest.raises(SpecError, match="decode 'self' cannot choose by 'kvsquared'"):
        view_plan("kvsquared", 0.5)
    for knob in ("asks=0.0", "asks=1.5", "chunk=0", "every=4"):
        with pytest.raises(SpecError, match=knob.partition("=")[0]):
            plan_cache(f"kvsquared:0.5?{knob}")
