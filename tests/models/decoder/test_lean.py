"""The lean decoder gives what the model's own code gives, and steps aside where it would not."""

from __future__ import annotations

import copy
import inspect
from contextlib import closing
from typing import Any

import pytest
import torch
from scheduling import answers, ask, image, model_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmfast.models.cache_name import CACHE, returned_cache
from mmfast.serve.engine.decode import DecodeBatch
from mmfast.serve.engine.lane import AttentionCall, Lane, passing
from mmfast.serve.engine.scheduler import Scheduler

LEAN = (
    "fast_vlm",
    "idefics3",
    "internvl",
    "llava",
    "llava_next",
    "llava_onevision",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen2_5_omni_thinker",
    "smolvlm",
)
STOCK = "gemma3", "lfm2_vl"  # four norms a layer; convolutions
SPECS = "", "snapkv:16", "sink:4+window:64", "quant:8", "retrieve:2"


def causal(index: int, attention: AttentionCall, *heads: Tensor) -> Tensor:
    """Attention of a pass without earlier tokens."""
    return attention(*heads, None)


def given(lane: Lane, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random embeddings, and positions with as many axes as the decoder has."""
    draws = torch.Generator().manual_seed(seed)
    weight = lane.output.weight
    axes = 3 if hasattr(lane.decoder.rotary_emb, "mrope_section") else 1
    embeds = torch.randn(rows, length, weight.shape[1], generator=draws).to(weight)
    return embeds, torch.randint(0, 200, (axes, rows, length), generator=draws)


@torch.inference_mode()
def outputs(lane: Lane, *inputs: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Last hidden states by the model's own code, and as the lane runs it."""
    cache = passing([None] * len(lane.kinds))
    return (
        lane._stock(causal, cache, *inputs, **more),
        lane.run(causal, cache, *inputs, **more),
    )


@pytest.mark.parametrize("family", LEAN)
def test_equal_to_the_bit(family: str) -> None:
    lane = Lane(model_of(family)[0])
    assert lane.lean is not None and lane.lean.free
    for rows, length in ((1, 1), (16, 1), (1, 37), (3, 5)):
        expected, found = outputs(lane, *given(lane, rows, length, rows + length))
        assert torch.equal(expected, found)


def test_a_model_that_was_once_asked_for_its_states_stays_lean() -> None:
    model = copy.deepcopy(model_of("llava")[0])
    layers = model.get_decoder().layers
    model(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert all(layer._forward_hooks for layer in layers), "transformers leaves no hooks any more"
    lane = Lane(model)
    assert lane.lean is not None and lane.lean.free
    expected, found = outputs(lane, *given(lane, 2, 5, 3))
    assert torch.equal(expected, found)
    layers[0].register_forward_hook(lambda *_: None)
    assert not lane.lean.free


@pytest.mark.parametrize("family", STOCK)
def test_other_decoders_run_their_own_code(family: str) -> None:
    assert Lane(model_of(family)[0]).lean is None


def test_half_precision_calls_the_norms() -> None:
    model = model_of("llava")[0].to(torch.bfloat16)
    lane = Lane(model)
    assert lane.lean is not None
    assert torch.equal(*outputs(lane, *given(lane, 4, 1, 0)))
    model.to(torch.float32)


@pytest.mark.parametrize("part", ["layer", "norm", "mlp", "rotary", "extra"])
def test_a_changed_decoder_is_not_run_lean(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = model_of("llava")[0].get_decoder()
    layer = decoder.layers[1]
    owner = {
        "layer": layer,
        "norm": layer.post_attention_layernorm,
        "mlp": layer.mlp,
    }.get(part)
    if owner is not None:  # another class of the same shape, as a fork of a model has

        class Changed(type(owner)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return super().forward(*args, **kwargs) * 1.01

        monkeypatch.setattr(owner, "__class__", Changed)
    elif part == "rotary":  # turned the other way round
        spaces = inspect.unwrap(type(layer.self_attn).forward).__globals__
        turn = spaces["apply_rotary_pos_emb"]
        monkeypatch.setitem(spaces, turn.__name__, lambda q, k, cos, sin: turn(q, k, cos, -sin))
    else:
        monkeypatch.setitem(layer._modules, "gate", nn.Identity())
    assert Lane(model_of("llava")[0]).lean is None


def test_hooks_of_users_act() -> None:
    model = model_of("llava")[0]
    lane = Lane(model)
    inputs = given(lane, 2, 3, 0)
    before = outputs(lane, *inputs)[1]
    layer = model.get_decoder().layers[0]
    for module in (layer, layer.self_attn, layer.mlp, layer.input_layernorm):
        handle = module.register_forward_hook(lambda _, __, out: _doubled(out))
        expected, found = outputs(lane, *inputs)
        handle.remove()
        assert torch.equal(expected, found) and not torch.equal(found, before)
    # A hook on a linear layer acts in the lean form itself.
    handle = layer.mlp.down_proj.register_forward_hook(lambda _, __, out: out * 2)
    assert lane.lean is not None and lane.lean.free
    expected, found = outputs(lane, *inputs)
    handle.remove()
    assert torch.equal(expected, found) and not torch.equal(found, before)


def _doubled(out: Any) -> Any:
    return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


def test_layers_are_wrapped_in_both_forms() -> None:
    lane = Lane(model_of("qwen2_5_vl")[0])
    seen: list[int] = []

    def around(index: int, layer: Any, hidden: Tensor, **kwargs: Any) -> Any:
        seen.append(index)
        return hidden if index == 1 else layer(hidden, **kwargs)

    expected, found = outputs(lane, *given(lane, 1, 6, 3), around=around)
    assert torch.equal(expected, found)
    assert seen == 2 * list(range(len(lane.kinds)))


class _Count(TorchDispatchMode):
    """Counts the operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operations(monkeypatch: pytest.MonkeyPatch, caches: tuple[str, ...]) -> int:
    """Operations of one decoding step of 16 answers."""
    model, processor = model_of("llava_onevision")
    counts: list[int] = []
    stock = DecodeBatch.rounds

    def rounds(batch: DecodeBatch) -> Any:
        if len(batch) < 16:
            return stock(batch)
        with _Count() as mode:
            found = list(stock(batch))
        counts.append(mode.count)
        return iter(found)

    monkeypatch.setattr(DecodeBatch, "rounds", rounds)
    requests = [
        ask(f"{i}", image(i), "what is it?", tokens=48, cache=caches[i % len(caches)])
        for i in range(16)
    ]
    with closing(Scheduler((model, processor), name="tiny", queue=16)) as scheduler:
        answers(scheduler, requests)
    return min(counts)


@torch.inference_mode()
def _stock_operations() -> int:
    """Operations of one step of the stock model on a batch of 16, and of a greedy choice."""
    model = model_of("llava_onevision")[0]
    ids = torch.randint(5, 50, (16, 12), generator=torch.Generator().manual_seed(0))
    out = model(input_ids=ids, use_cache=True)
    with _Count() as mode:
        step = model(input_ids=ids[:, :1], **{CACHE: returned_cache(out)}, use_cache=True)
        step.logits[:, -1].float().argmax(-1)
    return mode.count


def test_a_step_takes_fewer_operations_than_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = _stock_operations()
    plain = _operations(monkeypatch, ("",))
    mixed = _operations(monkeypatch, SPECS)
    assert plain < stock
    assert mixed < 1.9 * stock  # three tensors of rows in a layer, one of them packed
