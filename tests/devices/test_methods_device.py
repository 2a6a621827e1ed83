"""Methods on a device: reducers, cache policies and everything beside them, against the CPU.

`MMFAST_TEST_DEVICE=cpu pytest -m gpu tests/devices` runs them without a device.
"""

from __future__ import annotations

from typing import Any

import device_models as models
import pytest
import torch
from device_models import DTYPES, FAR, HOST, agree, answered, placed
from devices import DEVICE, LIKE, MARKS
from matrix_cells import spec_of
from tiny_models import ALL_FAMILIES, FAMILIES

import mmfast
from mmfast.core.registry import get

pytestmark = MARKS

CELLS = [
    pytest.param(family, method.name, site, id=f"{method.name}-{site}-{family}")
    for family in FAMILIES
    for method in mmfast.methods("reducer")
    for site in method.sites
]
HALVES = [
    pytest.param(method.name, site, dtype, id=f"{method.name}-{site}-{dtype}")
    for method in mmfast.methods("reducer")
    for site in method.sites
    for dtype in DTYPES
]
# Every policy, in a setting in which it acts on prompts of some sixty tokens.
CACHES = {
    "adakv": "snapkv:0.4?window=5+adakv",
    "cam": "cam:0.4",
    "kvcompose": "kvcompose:0.4?chunk=9",
    "capkv": "capkv:0.4?future=20",
    "entropy_chunkkv": "entropy_chunkkv:0.4?window=3&chunk=4",
    "chunkkv": "chunkkv:0.4?window=3&chunk=4",
    "compactor": "compactor:0.4?chunk=7&sink=3",
    "criticalkv": "criticalkv:0.5?window=3",
    "curdkv": "curdkv:0.4",
    "dstp": "dstp:0.3?similar=0.9&hold=2",
    "duo_attention": "duo_attention?retrieval=0.5&sink=2&recent=5",
    "expected_attention": "expected_attention:0.4?future=20",
    "fastkv": "fastkv:0.4?window=3&kernel=3",
    "fastkvzip": "fastkvzip:0.4",
    "finch": "finch:0.4?window=4&chunk=9",
    "h2o": "h2o:0.4",
    "infinipot_v": "infinipot_v:0.5",
    "keydiff": "keydiff:0.4",
    "keyformer": "keyformer:0.4",
    "keynorm": "keynorm:0.4?group=8",
    "kinetics": "sink:2+kinetics:0.6?page=4&skip=1",
    "knorm": "knorm:0.4",
    "kvsquared": "kvsquared:0.4?chunk=9&asks=0.3",
    "kvzip": "kvzip:0.4?chunk=9",
    "lagkv": "lagkv:0.5?sink=2&lag=4",
    "leverage": "leverage:0.4",
    "livevlm": "livevlm:0.5?window=5",
    "lookm": "lookm:0.4",
    "mixkv": "mixkv:0.4?window=3",
    "pyramidkv": "pyramidkv:0.4?window=3",
    "qfilter": "qfilter:0.4",
    "quant": "quant:4?residual=6&group=4",
    "quest": "quest:0.3?page=4&skip=1",
    "random": "random:0.4",
    "rekv": "rekv:1",
    "resv": "resv:0.3?radius=3",
    "retrieve": "sink:2+window:9+retrieve:1",
    "sentencekv": "sink:2+sentencekv:0.3?ends=57_71_9_83_36_11",
    "simlayerkv": "simlayerkv:0.5?threshold=0.3&window=3",
    "sink": "sink:2+window:17",
    "slimfer": "sink:2+slimfer:0.3?block=4&unit=2",
    "snapkv": "snapkv:0.4?window=5&kernel=3",
    "specache": "sink:2+window:6+specache:0.2?group=4",
    "streamingvlm": "streamingvlm:0.5",
    "streammem": "streammem:0.5?window=3",
    "think": "snapkv:20?window=5+think:0.5?residual=5",
    "tidaldecode": "tidaldecode:0.2?skip=0&again=0",
    "tokenselect": "tokenselect:0.2?similar=0.7",
    "tova": "tova:0.25",
    "twilight": "twilight:0.6?base=0.6&page=4&skip=0",
    "vatp": "vatp:0.4?sink=2",
    "window": "sink:2+window:7+snapkv:9?window=4",
    "zipcache": "zipcache:0.5?high=8&low=4&every=4",
    "zipvl": "zipvl:0.5?high=8&low=2",
}
BESIDE = {
    "snapkv-every": "snapkv:0.4?window=2&every=3",
    "vatp-every": "vatp:11?sink=1&every=2",
    "snapkv-quant": "snapkv:0.5?window=5+quant:4?residual=6&group=4",
    "rekv-quant": "rekv:1+quant:8?residual=4",
    "window-quant": "sink:2+window:19+quant:4?residual=6&group=4",
    "specache-bits": "specache:9?bits=4&group=8",
    "quest-sink": "sink:2+window:6+quest:0.1?page=4&skip=0",
    "knorm-adakv": "sink:2+knorm:0.3+adakv?alpha=0.5",
}
POLICIES = [pytest.param(spec, id=name) for name, spec in {**CACHES, **BESIDE}.items()]


def packs(spec: str) -> bool:
    """Tell if a code that turns over is a whole step, so that only float64 can be compared."""
    return any(name in spec for name in ("quant", "zip", "specache"))


LEVEL = 2e-2  # of logits where pictures of 8 bits are resized: they may be one level apart


def pair(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    return placed(family, HOST, dtype), placed(family, DEVICE, dtype)


def test_the_policies_are_all() -> None:
    assert set(CACHES) == {method.name for method in mmfast.methods("cache")}


@pytest.mark.parametrize(("family", "name", "site"), CELLS)
def test_a_reducer_keeps_what_it_keeps_on_the_cpu(family: str, name: str, site: str) -> None:
    spec = spec_of(get(name), site)
    far = LEVEL if site == "pixel" and get(name).resizes else FAR
    agree(*(answered(this, 3, reduce=spec) for this in pair(family)), far=far)


@pytest.mark.parametrize(("name", "site", "dtype"), HALVES)
def test_a_reducer_in_half_precision(name: str, site: str, dtype: str) -> None:
    this = placed(
        "qwen2_5_vl" if site in ("pixel", "vit") else "llava_onevision", DEVICE, DTYPES[dtype]
    )
    found = answered(this, 2, reduce=spec_of(get(name), site))
    assert not isinstance(found, str), found
    assert found[1].isfinite().all() and found[2].reductions


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", POLICIES)
def test_a_policy_says_what_it_says_on_the_cpu(family: str, spec: str) -> None:
    if family == "qwen3_vl" and "keynorm" in spec:
        pytest.skip(LIKE)
    models_of = pair(family, torch.float64 if packs(spec) else torch.float32)
    for this in models_of:
        models.give_patterns(this.model)
    here, there = (answered(this, 8, cache=spec) for this in models_of)
    assert not isinstance(here, str), here
    agree(here, there)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", POLICIES)
def test_a_policy_in_half_precision(spec: str, dtype: str) -> None:
    this = placed("qwen2_5_vl", DEVICE, DTYPES[dtype])
    models.give_patterns(this.model)
    found = answered(this, 6, cache=spec)
    assert not isinstance(found, str), found
    assert found[1].isfinite().all()


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize(
    "spec", ["divprune:0.5", "fastv@llm2:0.5", "visionzip:0.5", "tome@vit:0.5", "downsample:0.5"]
)
def test_a_family_on_the_device(family: str, spec: str) -> None:
    far = LEVEL if spec.startswith("downsample") else FAR
    agree(*(answered(this, 3, reduce=spec) for this in pair(family)), far=far)
