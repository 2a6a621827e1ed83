"""The engine of the server on a device: answers of stock generate, whatever runs beside them."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE, MARKS
from scheduling import answers, ask, clip, image, mixed, model_of, stock, talk

import mmfast
from mmfast.attach import attach
from mmfast.models.loading import load
from mmfast.serve.engine.base import Finish, Request, SamplingOptions
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.streams.reuse.store import ReuseStore

pytestmark = MARKS

ON = str(DEVICE)
TAUGHT = "tiny-video"
FAMILIES = (TAUGHT, "llava_onevision", "qwen2_5_vl", "qwen3_vl")


@functools.cache
def pair(family: str, device: str) -> tuple[Any, Any]:
    if family == TAUGHT:
        return load(TAUGHT, device, "float32")  # type: ignore[return-value]
    model, processor = model_of(family)
    return copy.deepcopy(model).to(device), processor


@contextmanager
def engine(family: str, device: str = ON, **options: Any) -> Iterator[Any]:
    made = Scheduler(pair(family, device), **{"chunk": 48, "memory": "200MB", **options})
    try:
        yield made
    finally:
        made.close()


def texts(found: list[tuple[str, Any]]) -> list[str]:
    for _, end in found:
        assert isinstance(end, Finish), end
    return [text for text, _ in found]


def attached(family: str, device: str, request: Request) -> str:
    """The answer of stock `generate` under the specs of a request."""
    found = pair(family, device)
    with attach(found[0], request.options.reduce or None, request.options.cache or None):
        return stock(found, request)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_all_kinds(family: str) -> None:
    expected = [stock(pair(family, ON), request) for request in mixed()]
    assert expected == [stock(pair(family, "cpu"), request) for request in mixed()]
    with engine(family) as made:
        assert texts(answers(made, mixed())) == expected
        again = answers(made, mixed("again-"))  # of what is kept of media and prompts
        assert texts(again) == expected
        assert any(end.cached_tokens for _, end in again)
        health = made.health()
        assert health.ready and health.gauges["kv_bytes"] == 0


SPECS: list[tuple[str | None, str | None]] = [
    ("divprune:0.5", None),
    ("visionzip:0.5", None),
    ("divprune:0.5+fastv@llm2:0.5", None),
    ("tome@vit:0.5", None),
    ("evs:0.5", None),
    ("script:0.5", None),
    (None, "snapkv:20"),
    (None, "sink:4+window:24"),
    (None, "tova:14?every=2"),
    (None, "quant:4"),
    ("random:0.5", "quant:8"),
    ("fastv@llm2:0.5", "h2o:20"),
    (None, "expected_attention:0.5"),
    (None, "infinipot_v:0.5"),
    (None, "keydiff:0.5?every=3"),
]


def _requests(specs: list[tuple[str | None, str | None]]) -> list[Request]:
    found = []
    for i, (reduce, cache) in enumerate(specs):
        media = (image(i), clip(i))
        found.append(ask(str(i), *media, "what?", tokens=5, reduce=reduce, cache=cache))
    return found


@pytest.mark.parametrize("spec", SPECS, ids=[f"{r or ''} {c or ''}".strip() for r, c in SPECS])
@pytest.mark.parametrize("family", [TAUGHT, "qwen3_vl"])
def test_one_method_beside_a_plain_request(
    family: str, spec: tuple[str | None, str | None]
) -> None:
    requests = [*_requests([spec]), ask("plain", image(9), "what?", tokens=12)]
    expected = [attached(family, ON, request) for request in requests]
    with engine(family) as made:
        assert texts(answers(made, requests)) == expected


@pytest.mark.parametrize("family", [TAUGHT, "llava_onevision", "qwen3_vl"])
def test_many_methods_in_one_batch(family: str) -> None:
    requests = _requests(SPECS[:4] + SPECS[6:8] + SPECS[10:12])
    expected = [attached(family, ON, request) for request in requests]
    with engine(family, slots=16) as made:
        assert texts(answers(made, requests)) == expected


@pytest.mark.parametrize("sparse", ["sample_attention:0.95", "minference:0.5"])
def test_sparse_prefill(sparse: str) -> None:
    requests = [ask("a", image(1), "what? " * 20, prefill=sparse), ask("b", image(2), "what?")]
    with engine(TAUGHT) as made, engine(TAUGHT, "cpu") as here:
        assert texts(answers(made, requests)) == texts(answers(here, requests))


@pytest.mark.parametrize("family", [TAUGHT, "qwen2_5_vl"])
@pytest.mark.parametrize("mode", ["encoder", "prefix", "blend:0.15", "craft:0.3", "kvcomm?least=1"])
def test_reuse(mode: str, family: str) -> None:
    found = []
    for device in ("cpu", ON):
        with engine(family, device, reuse=mode, store=ReuseStore(host="200MB")) as made:
            said = []
            for round_ in range(3):
                one = [ask(f"{round_}a", image(1), "what?"), ask(f"{round_}b", clip(1), "and?")]
                two = [ask(f"{round_}c", image(2), image(1), "which?")]
                said += texts(answers(made, one)) + texts(answers(made, two))
            found.append(said)
    assert found[0] == found[1]


def test_reuse_of_a_store_on_the_device_and_on_disk(tmp_path: Path) -> None:
    store = ReuseStore(device="50MB", host="50MB", disk="200MB", folder=tmp_path)
    said = []
    for round_ in range(2):
        with engine(TAUGHT, reuse="prefix", store=store) as made:
            said.append(texts(answers(made, [ask(f"{round_}", clip(1), "what?")])))
    assert said[0] == said[1]


def test_modules() -> None:
    schema = mmfast.PromptSchema({"rules": ["Answer about ", {"what": 6}, "."], "end": "Now."})
    with engine(TAUGHT, reuse="prefix", modules=schema) as made:
        assert texts(answers(made, [ask("plain", clip(1), "what?")]))


HEAT: dict[str, SamplingOptions] = {
    "seed": SamplingOptions(8, temperature=1.0, seed=3),
    "top p": SamplingOptions(8, temperature=1.0, top_p=0.8, seed=3),
    "logprobs": SamplingOptions(8, temperature=0.0, logprobs=3),
    "penalties": SamplingOptions(8, temperature=1.0, seed=3, presence_penalty=0.5),
    "frequencies": SamplingOptions(8, temperature=0.0, frequency_penalty=0.5),
    "bias": SamplingOptions(8, temperature=0.0, logit_bias=((5, -100.0), (7, 2.0))),
}


@pytest.mark.parametrize("name", [*HEAT])
def test_choices_of_tokens(name: str) -> None:
    found = []
    for device in ("cpu", ON):
        with engine(TAUGHT, device) as made:
            one = talk("one", [(clip(1), "what?")], sampling=HEAT[name])
            two = talk("two", [(clip(1), "what?")], sampling=HEAT[name])
            found.append(texts(answers(made, [one, two])))
            assert found[-1][0] == found[-1][1]
    assert found[0] == found[1]


def test_a_target_of_latency() -> None:
    with engine(TAUGHT) as made:
        assert texts(answers(made, [ask("a", clip(1), "what?", target_ttft_ms=500.0)]))


def test_more_requests_than_slots_and_little_memory() -> None:
    requests = [ask(str(i), image(i), "what?", tokens=4 + i) for i in range(7)]
    expected = [stock(pair(TAUGHT, ON), request) for request in requests]
    with engine(TAUGHT, slots=2, memory="9MB") as made:
        assert texts(answers(made, requests)) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_loaded_in_a_type(dtype: str) -> None:
    made = Scheduler(TAUGHT, device=ON, dtype=dtype, chunk=48, memory=None)
    try:
        requests = [
            ask("a", clip(1), "what?", reduce="evs:0.5"),
            ask("b", image(1), "what?", cache="quant:4"),
            ask("c", "hello", cache="snapkv:8"),
        ]
        assert texts(answers(made, requests))
        assert made.pair[0].device.type == DEVICE.type
    finally:
        made.close()


def test_two_engines_on_two_devices() -> None:
    with engine(TAUGHT, "cpu") as here, engine(TAUGHT) as far:
        assert texts(answers(here, mixed())) == texts(answers(far, mixed()))


# --- HTTP -----------------------------------------------------------------------------------------


def _post(app: Any, *documents: dict[str, Any]) -> list[Any]:
    """Replies to requests that are sent at once."""
    from serve_tools import CHAT, client_of

    async def go() -> list[Any]:
        async with client_of(app) as client:
            calls = (client.post(CHAT, json=each, timeout=120) for each in documents)
            return list(await asyncio.gather(*calls))

    return asyncio.run(go())


def test_chat_over_http() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("cachetools")
    from serve_tools import app_of, events_of, image_part, png, text, user

    with engine(TAUGHT, name=TAUGHT) as made:
        app = app_of(made)
        picture = image_part(png((96, 96)))
        asked = {"model": TAUGHT, "messages": user(picture, text("What color is it?"))}
        given = {**asked, "mmfast": {"reduce": "divprune:0.5"}}
        other = {**asked, "mmfast": {"cache": "snapkv:16"}}
        whole, reduced, cached, streamed = _post(
            app, asked, given, other, {**asked, "stream": True}
        )
        for reply in (whole, reduced, cached):
            assert reply.status_code == 200, reply.text
        said = whole.json()["choices"][0]["message"]["content"]
        chunks = [each for each in events_of(streamed.text) if each != "[DONE]"]
        deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
        assert "".join(deltas) == said


def test_a_format_over_http() -> None:
    for name in ("fastapi", "llguidance", "cachetools"):
        pytest.importorskip(name)
    from serve_tools import app_of, user

    with engine(TAUGHT, name=TAUGHT) as made:
        shape = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": shape}}
        asked = {"model": TAUGHT, "messages": user("How many?"), "response_format": form}
        reply = _post(app_of(made), {**asked, "max_tokens": 40})[0]
        assert reply.status_code == 200, reply.text
        assert "n" in reply.json()["choices"][0]["message"]["content"]


def test_metrics_over_http() -> None:
    for name in ("fastapi", "prometheus_client", "cachetools"):
        pytest.importorskip(name)
    from serve_tools import app_of, get

    with engine(TAUGHT, name=TAUGHT) as made:
        assert get(app_of(made), "/metrics").status_code == 200
        assert get(app_of(made), "/health").status_code == 200


def test_memory_of_the_device_is_shared_out() -> None:
    from mmfast.serve.engine.slots import kv_limit

    limits = [kv_limit(None, torch.device(ON), sharing) for sharing in (1, 2)]
    assert 0 < limits[1] <= limits[0]
