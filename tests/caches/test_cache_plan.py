"""Cache specs: what a plan says, and what is refused."""

from __future__ import annotations

import pytest
import torch
from cache_checks import evict
from cache_factory import make

from mmfast import MmfastError, SpecError, Tokens
from mmfast.caches.plan import plan_cache


def test_what_a_plan_says() -> None:
    plan = plan_cache("sink:4+window:64+snapkv:0.25?window=16+quant:4")
    assert plan is not None and [s.method.name for s in plan.position] == ["sink", "window"]
    assert plan.needs == ("attn_window",) and plan.window == 16 and plan.bits is None
    assert plan.quantiser().bits == 4 and plan.retriever() is None
    assert str(plan) == "sink:4+window:64+snapkv:0.25?window=16+quant:4"
    assert plan_cache(str(plan)) == plan
    zip_plan = plan_cache("zipvl?low=8&high=16")
    assert zip_plan is not None and zip_plan.bits == (16, 8) and zip_plan.needs == ("attn_sum",)
    dropping = plan_cache("zipvl?low=0")
    assert dropping is not None and dropping.bits is None
    stream = plan_cache("sink:64+window:4096+retrieve:64")
    assert stream is not None and stream.retriever() is not None and stream.score is None
    assert plan_cache(None) is None and plan_cache(" ") is None


def test_without_an_evicting_policy_all_stays() -> None:
    tokens = make("random", 2, 20)
    assert evict(tokens, "quant:8").apply(tokens.x).equal(tokens.x)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("snapvk:4", "unknown cache 'snapvk'; did you mean 'snapkv'"),
        ("divprune:0.5", "unknown cache 'divprune', which is a reducer: give it to reduce= "),
        ("sink", "'sink' needs a budget"),
        ("window:0", "budget 0 keeps nothing"),
        ("window:1.5", "budget 1.5 is no share"),
        ("window@llm3:4", "cannot run at site 'llm3'; choices: kv"),
        ("sink:4?size=2", "knob of 'sink'"),
        ("snapkv:4+lookm:4", "'snapkv' and 'lookm' are both of role 'score'.*keep one"),
        ("quant:4+quant:8", "both of role 'store'"),
        ("retrieve:4+rekv:8", "both of role 'retrieve'"),
        ("quant:3", "8, 4 or 2 bits, not 3"),
        ("quant:0.5", "8, 4 or 2 bits, not 0.5"),
        ("quant", "8, 4 or 2 bits, not None"),
        ("quant:4?group=0", "group=0.*choose"),
        ("quant:4?residual=-1", "residual=-1.*choose"),
        ("zipvl+quant:4", "both choose bits"),
    ],
)
def test_wrong_specs(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        plan_cache(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "snapkv:4?kernel=2",
        "snapkv:4?window=0",
        "snapkv:4?pool=min",
        "fastkv:4?kernel=0",
        "keynorm:4?group=0",
        "keyformer:4?recent=1.5",
        "keyformer:4?noise=-1",
        "lookm:4?recent=-0.5",
        "lookm:4?merge=sum",
        "streamingvlm:4?sink=-1",
        "zipvl:4?mass=0.0",
        "zipvl:4?high=3",
        "zipvl:4?low=1",
    ],
)
def test_senseless_knobs(text: str) -> None:
    with pytest.raises(SpecError, match=r"choose|choices") as caught:
        evict(make("random", 2, 20), text)
    assert "\n" not in str(caught.value)


def test_ragged_conversations_are_refused() -> None:
    tokens = make("random", 2, 20)
    kind = torch.stack([torch.zeros(20, dtype=torch.int64), (torch.arange(20) < 10).long()])
    batch = Tokens(tokens.x.expand(2, 2, 20, -1), signals={"kind": kind})
    with pytest.raises(MmfastError, match="one by one"):
        evict(batch, "sink:4+streamingvlm:5")


def test_a_kind_is_needed_where_it_is_read() -> None:
    with pytest.raises(SpecError, match="needs 'kind'"):
        evict(Tokens(torch.randn(2, 20, 4)), "streamingvlm:5")
