"""What attach() leaves behind in a decode step: hooks only where a step needs them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_recorder import CaptureError, FakeCuda
from tiny_models import generate, tiny
from transformers import StaticCache

import mmfast
from mmfast.attach import attach
from mmfast.bench.suites import decode
from mmfast.models.patching import stand_before, stand_behind
from mmfast.models.reduction import hooks
from mmfast.models.reduction.call import Arming
from mmfast.models.speech.moshi_graphs import WARM_UPS, CudaGraphs

FAMILY = "llava_onevision"
HOME = str(Path(mmfast.__file__).parent)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _inputs(this: Any, batch: int = 1) -> dict[str, Any]:
    prompts = ["{video} what?", "{video}"][:batch]
    inputs: dict[str, Any] = this.inputs(prompts, videos=this.videos(batch))
    return inputs


def _hooks(model: Any) -> int:
    """Hooks on anything below the base model."""
    below = [m for m in model.base_model.modules() if m is not model.base_model]
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in below)


def _settled(this: Any, inputs: dict[str, Any]) -> int:
    """Hooks that the stock model puts up for itself when it first runs."""
    this.model(**inputs, use_cache=True)
    return _hooks(this.model)


def _step(model: Any, cache: Any) -> None:
    model(input_ids=torch.ones(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)


SPECS = [
    ("evs:0.5", None, False),
    ("random:0.4", None, False),
    ("random:0.4+fastv@llm2:0.5", None, True),  # layers of two lengths
    (None, "snapkv:0.5", False),
    (None, "sink:4+window:16", False),
    ("random:0.4", "lookm:0.5", False),
    (None, "keyformer:0.5", False),
    (None, "retrieve:2", False),
]


@pytest.mark.parametrize(("reduce", "cache", "stays"), SPECS)
def test_hooks_leave_the_layers_behind_the_prompt(
    reduce: str | None, cache: str | None, stays: bool
) -> None:
    this = tiny(FAMILY)
    inputs = _inputs(this)
    own = _settled(this, inputs)
    with attach(this.model, reduce, cache):
        for _ in range(2):  # a second conversation finds them again
            held = this.model(**inputs, use_cache=True).past_key_values
            assert _hooks(this.model) > own
            _step(this.model, held)
            assert (_hooks(this.model) > own) == stays
            _step(this.model, held)
    assert _hooks(this.model) == own


@contextmanager
def _calls() -> Iterator[list[str]]:
    """Names of the functions of the package that run."""
    seen: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def _calls_per_step(layers: int, reduce: str | None, cache: str | None) -> int:
    this = tiny(FAMILY, layers=layers)
    inputs = _inputs(this)
    with attach(this.model, reduce, cache):
        held = this.model(**inputs, use_cache=True).past_key_values
        for _ in range(3):
            _step(this.model, held)
        with _calls() as seen:
            _step(this.model, held)
    return len(seen)


@pytest.mark.parametrize(("reduce", "cache"), [("random:0.4", None), (None, "snapkv:0.5")])
def test_a_step_runs_no_python_per_layer(reduce: str | None, cache: str | None) -> None:
    few, many = (_calls_per_step(layers, reduce, cache) for layers in (2, 8))
    # Cache layers are asked for their length, twice by stock code and once to look for uneven ones.
    assert many - few <= 2 * 6 and few <= 45


def test_a_sliding_window_looks_at_one_layer_for_all() -> None:
    few, many = (_calls_per_step(layers, None, "sink:4+window:16") for layers in (2, 8))
    assert (many - few) / 6 <= 12


def test_a_window_still_evicts_what_it_always_did() -> None:
    this = tiny(FAMILY)
    with attach(this.model, None, "sink:4+window:16"):
        held = this.model(**_inputs(this), use_cache=True).past_key_values
        for _ in range(5):
            _step(this.model, held)
    assert [layer.keys.shape[2] for layer in held.layers] == [21] * len(held.layers)
    places = [layer.notes["place"] for layer in held.layers]
    assert all(torch.equal(place, places[0]) for place in places)


def test_a_static_cache_keeps_them_for_compiled_steps() -> None:
    this = tiny(FAMILY)
    own = _settled(this, _inputs(this))
    with attach(this.model, "random:0.4"):
        generate(this, _inputs(this), 3, cache_implementation="static", disable_compile=True)
        assert _hooks(this.model) > own
        held = this.model(**_inputs(this), use_cache=True).past_key_values
        _step(this.model, held)
        assert _hooks(this.model) > own
    assert _hooks(this.model) == own


def test_a_call_of_another_thread_keeps_its_hooks() -> None:
    inside: list[str] = []

    @contextmanager
    def hooks() -> Iterator[None]:
        inside.append("in")
        yield
        inside.append("out")

    arming = Arming(hooks)
    with arming.installed():
        arming.begin(True)
        other = threading.Thread(target=lambda: (arming.begin(False), arming.end()))
        other.start()
        other.join()
        assert inside == ["in"] and not arming.idle
        arming.end()
        arming.end()  # of a call that never began
        arming.begin(False)
        assert inside == ["in", "out"] and arming.idle
        arming.end()
        arming.begin(True)
        assert inside == ["in", "out", "in"] and not arming.idle
        arming.end()
    assert inside == ["in", "out"] * 2 and not arming.idle


def test_hooks_by_name_are_counted_in_and_out() -> None:
    module, seen = torch.nn.Identity(), []
    undo = [
        stand_before(module, lambda m, a, k: seen.append(sorted(k)), "name"),
        stand_behind(module, lambda m, a, k, o: seen.append("after"), "name", always=True),
        stand_before(module, lambda m, a, k: seen.append("numbered")),
    ]
    module(torch.ones(1))
    assert seen == [[], "numbered", "after"]
    undo.append(stand_before(module, lambda m, a, k: seen.append("taken"), "name"))
    module(torch.ones(1))
    assert seen[3:] == [[], "numbered", "taken", "after"]
    for each in undo:
        each()
    tables = [v for k, v in vars(module).items() if k.startswith("_forward")]
    assert not any(tables)


def _captured(reduce: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight tokens of eager steps, and the same from replays of one recorded step."""
    this = tiny(FAMILY)
    inputs, model = _inputs(this), this.model
    length = inputs["input_ids"].shape[1]
    config = model.config.get_text_config()

    def prefill() -> tuple[Any, Any]:
        cache = StaticCache(config=config, max_cache_len=length + 16)
        out = model(**inputs, past_key_values=cache, use_cache=True)
        return cache, out.logits[:, -1:].argmax(-1)

    with attach(model, reduce):
        cache, token = prefill()
        place, want = torch.full((1, 1), length), []
        for _ in range(8):
            given = {"input_ids": token, "position_ids": place}
            token = model(**given, past_key_values=cache).logits[:, -1:].argmax(-1)
            place = place + 1
            want.append(token)
        cache, first = prefill()
        token, place, got = first.clone(), torch.full((1, 1), length), []

        def step() -> None:
            given = {"input_ids": token, "position_ids": place}
            out = model(**given, past_key_values=cache).logits[:, -1:].argmax(-1)
            place.add_(1)
            token.copy_(out)

        replay = CudaGraphs("cpu", FakeCuda())(step)
        for layer in cache.layers:  # warming up has taken steps: back to the end of the prompt
            layer.cumulative_length.sub_(WARM_UPS + 1)
        place.fill_(length)
        token.copy_(first)
        for _ in range(8):
            replay()
            got.append(token.clone())
    return torch.cat(want), torch.cat(got)


@pytest.mark.parametrize("reduce", [None, "random:0.4", "random:0.4+fastv@llm2:0.5"])
def test_a_decode_step_can_be_captured(reduce: str | None) -> None:
    """No look at a value and no tensor that moves: replays alone give the tokens of eager steps."""
    want, got = _captured(reduce)
    assert torch.equal(got, want) and len(torch.unique(want)) > 1


def test_a_hook_that_looks_at_a_value_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = hooks.fit_decode

    def looks(config: Any, layer: int, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        assert hidden.shape[1] > 1 or hidden.amax().item() < 1e9
        return stock(config, layer, hidden, kwargs)

    monkeypatch.setattr(hooks, "fit_decode", looks)
    with pytest.raises(CaptureError):
        _captured("random:0.4+fastv@llm2:0.5")


def test_rows_of_the_benchmark() -> None:
    jobs = [decode.JOBS[0], decode.JOBS[1], decode.JOBS[6]]
    rows = decode.hook_rows("tiny", 2, 2, 3, jobs, device="cpu")
    assert [row["work"] for row in rows] == ["none", "none", "evicts"]
    assert len(set(rows[0]["held"])) == 1 and len(set(rows[1]["held"])) == 2
    for row in rows:
        assert row["step_ms"] > 0 and row["twin_ms"] > 0 and row["noise"] >= 0
        assert row["overhead"] < 3 and row["layers"] == 4 and row["device"] == "cpu"
