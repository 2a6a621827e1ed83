"""Models on packed weights: the same answers, every refusal, and floats again afterwards."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import mmfast
from mmfast.core.errors import MmfastError, ModelError
from mmfast.models.cost import linear_macs
from mmfast.models.gated import unfuse
from mmfast.models.loading import load, twin
from mmfast.models.packing import JOINT_PAYS, PackedLinear, WeightPlan, pack_weights, packed
from mmfast.ops.weight_forms import FORMS
from mmfast.planner.cost import fingerprint

CLIP = Path(__file__).resolve().parents[2] / "assets" / "clips" / "red-circle.mp4"
QUESTION = "Which way does the red circle move?"


def _text_model(tied: bool = True, groups: int = 2) -> Any:
    """Grouped heads, biases in attention, and outputs of both kernels of int8."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2112,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=groups,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).eval()


def _logits(model: Any, count: int = 9) -> torch.Tensor:
    ids = torch.arange(count)[None]
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", [1, 9, 40])
def test_logits_are_those_of_rounded_weights(name: str, count: int) -> None:
    model, rounded = _text_model(tied=False), _text_model(tied=False)
    stock = _logits(model, count)
    found = pack_weights(model, name)
    with torch.no_grad():
        for path, layer in model.named_modules():
            if isinstance(layer, PackedLinear):
                rounded.get_submodule(path).weight.copy_(layer.weight)
    assert sum(found.layers.values()) == 2 * 7 + 1 - 4 * (64 * 32 < 4096)  # small k and v stay
    want, mine = _logits(rounded, count), _logits(model, count)
    # Activations are of 8 bits at least, except where they are rounded on purpose.
    limit = 0.1 if name == "int8-dynamic" else 0.02
    assert (mine - want).norm() / want.norm() < limit
    assert not torch.equal(mine, stock)


def test_a_plan_has_forms_of_its_own_for_steps_and_prompts() -> None:
    model = _text_model()
    stock, short = _logits(model, 40), _logits(model, 1)
    with torch.no_grad():
        before = model.model(torch.arange(40)[None])[0]
    with torch.no_grad(), packed(model, WeightPlan(few="int4")) as found:
        hidden = model.model(torch.arange(40)[None])[0]
        assert torch.equal(hidden, before) and not torch.equal(_logits(model, 1), short)
        assert found.layers["int4 and stock"] and found.layers["int8"] == 1  # the head
        assert found.after > found.before  # stock weights stay beside
    assert torch.equal(_logits(model, 40), stock)


def test_tied_embeddings_keep_their_numbers_and_are_not_counted() -> None:
    model = _text_model(tied=True)
    table = model.get_input_embeddings().weight.clone()
    found = pack_weights(model, "int8")
    assert torch.equal(model.get_input_embeddings().weight, table)
    other = pack_weights(_text_model(tied=False), "int8")
    assert other.before - found.before == 2112 * 64 * 4 and other.after == found.after
    assert "layers int8" in found.note and " to " in found.note


def test_floats_are_back_after_the_with_and_again_with_the_same_weights() -> None:
    model = _text_model()
    stock = _logits(model)
    with packed(model, "int8") as found:
        first = _logits(model)
    assert torch.equal(_logits(model), stock) and not torch.equal(first, stock)
    with packed(model, found):
        assert torch.equal(_logits(model), first)
    with pytest.raises(RuntimeError), packed(model, found):
        raise RuntimeError
    assert torch.equal(_logits(model), stock)


def test_copies_share_the_weights() -> None:
    model = _text_model()
    pack_weights(model, "int8")
    other, _ = twin(model, None)
    assert torch.equal(_logits(other), _logits(model))
    layer, copied = model.lm_head, other.lm_head
    assert copied is not layer and copied._forms is layer._forms
    copied.register_forward_hook(lambda *_: None)
    assert not layer._forward_hooks and type(copy.deepcopy(layer)) is PackedLinear


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 9, 40])
def test_joint_products_are_those_of_each_layer(name: str, dtype: Any, count: int) -> None:
    """To the bit, but for bfloat16 on many rows, where oneDNN adds in the order of other tiles."""
    apart, together = (_text_model(groups=4).to(dtype) for _ in range(2))
    with (
        packed(apart, WeightPlan(name, name, joint=False)),
        packed(together, _together(name)) as found,
    ):
        assert len(_joint(together)) == 2 * 5 and not _joint(apart)
        unfuse(apart.modules())
        whole, parts = _logits(together, count), _logits(apart, count)
        layers = dict(apart.named_modules())
        for path, layer in together.named_modules():
            if isinstance(layer, PackedLinear):
                assert torch.equal(layer.weight, layers[path].weight)
        assert found.after == sum(each.nbytes for each in _packed_layers(together))
    if name == "bfloat16":
        torch.testing.assert_close(whole, parts, rtol=0.02, atol=0.02)
    else:
        assert torch.equal(whole, parts)


def _together(name: str) -> WeightPlan:
    return WeightPlan(name, name, joint=True)


def test_forms_that_gain_by_it_are_joint_by_themselves() -> None:
    for name in FORMS:
        with packed(_text_model(), name) as found:
            joint = [layer for *_, layer in found.places if getattr(layer, "_joint", None)]
            assert bool(joint) == (name in JOINT_PAYS)


def _packed_layers(model: Any) -> list[PackedLinear]:
    return [each for each in model.modules() if isinstance(each, PackedLinear)]


def _joint(model: Any) -> list[PackedLinear]:
    return [each for each in _packed_layers(model) if each._joint is not None]


class _Counted:
    """A form of weights that counts its products."""

    def __init__(self, form: Any) -> None:
        self.form, self.calls = form, 0

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.form.product(x, bias)
        return found


def _pair() -> tuple[Any, Any, _Counted]:
    """Gate and up of one layer, their products counted."""
    model = _text_model()
    pack_weights(model, _together("int8"))
    gate, up = model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj
    count = _Counted(gate._forms[0])
    gate._forms = up._forms = (count, count)
    return gate, up, count


@torch.no_grad()
def test_siblings_take_their_columns_of_the_very_same_tensor_alone() -> None:
    gate, up, count = _pair()
    x, other = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    first, second = gate(x), up(x)
    assert count.calls == 1 and not gate._joint[0]._held  # all was taken
    assert torch.equal(gate(x), first) and torch.equal(up(x.clone()), second)
    assert count.calls == 3
    gate(other)
    assert torch.equal(up(x), second)  # of another tensor than the one that gate was given
    x.mul_(2)
    gate(x)
    x.mul_(2)  # the same object, but not the same numbers
    assert torch.equal(up(x), up(x.clone()))


@torch.no_grad()
def test_columns_go_with_their_input() -> None:
    gate, up, count = _pair()
    x = torch.randn(1, 64)
    gate(x)
    held = gate._joint[0]._held
    assert held
    del x
    assert not held
    with torch.inference_mode():
        x = torch.randn(1, 64)
        gate(x), up(x)
    assert not held and count.calls == 2


@torch.no_grad()
def test_threads_do_not_take_columns_of_each_other() -> None:
    gate, up, _ = _pair()
    inputs = [torch.randn(3, 64) for _ in range(2)]
    expected = [(gate(x), up(x)) for x in inputs]
    barrier = threading.Barrier(2)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        barrier.wait()
        first = gate(x)
        barrier.wait()
        return first, up(x)

    with ThreadPoolExecutor(2) as pool:
        for (gates, ups), (first, second) in zip(pool.map(run, inputs), expected, strict=True):
            assert torch.equal(gates, first) and torch.equal(ups, second)
    assert not gate._joint[0]._held


@torch.no_grad()
def test_layers_that_do_not_read_one_input_stay_apart() -> None:
    """Hooks act on each layer, layers at two places stay apart, and so does cross attention."""
    model = _text_model()
    plain = model.model.layers[0].self_attn.q_proj
    model.model.layers[0].self_attn.v_proj = plain  # read twice: by two places
    pack_weights(model, _together("int8"))
    assert not any(each._joint for each in _packed_layers(model.model.layers[0].self_attn))
    mlp = model.model.layers[0].mlp
    stock = mlp(torch.ones(1, 64))
    handle = mlp.up_proj.register_forward_hook(lambda _, __, found: 0 * found)
    assert not mlp(torch.ones(1, 64)).any()
    handle.remove()
    handle = mlp.up_proj.register_forward_pre_hook(lambda _, given: (0 * given[0],))
    assert not mlp(torch.ones(1, 64)).any()  # another tensor: columns of its own
    handle.remove()
    assert torch.equal(mlp(torch.ones(1, 64)), stock)
    sizes = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    sizes |= {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99}
    roles = ("pad", "bos", "eos", "decoder_start")
    ids = {f"{role}_token_id": 0 for role in roles} | {"suppress_tokens": []}
    other = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ids))
    pack_weights(other, _together("int8"))
    assert _packed_layers(other) and not _joint(other)


def test_costs_and_measured_rates_know_packed_layers() -> None:
    model = _text_model()
    macs, before = linear_macs(model.model), fingerprint(model)
    with packed(model, "int8"):
        assert linear_macs(model.model) == macs and fingerprint(model) != before
    assert fingerprint(model) == before


def test_packed_weights_cannot_be_trained_saved_or_moved(tmp_path: Path) -> None:
    model = _text_model()
    pack_weights(model, "int8")
    with pytest.raises(ModelError, match="cannot be trained"):
        model(input_ids=torch.arange(3)[None])
    with pytest.raises(ModelError, match="cannot be saved"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="stay on the CPU"):
        model.to("meta")
    with pytest.raises(ModelError, match="packed already"):
        pack_weights(model, "int4")


def test_models_that_cannot_be_packed() -> None:
    model = _text_model()
    with pytest.raises(ModelError, match=r"'int3'.*int4"):
        pack_weights(model, "int3")
    with pytest.raises(ModelError, match="not a Linear"):
        pack_weights(nn.Linear(2, 2), "int8")
    with pytest.raises(ModelError, match="on meta"):
        pack_weights(_text_model().to("meta"), "int8")
    kind = type("LoraLinear", (nn.Linear,), {"__module__": "peft.tuners.lora"})
    model.model.layers[0].self_attn.q_proj = kind(64, 64)
    with pytest.raises(ModelError, match="PEFT layers; merge_and_unload"):
        pack_weights(model, "int8")
    model = _text_model()
    model.hf_quantizer = object()
    with pytest.raises(ModelError, match="quantised already"):
        pack_weights(model, "int8")


@pytest.fixture(scope="module")
def stock() -> Any:
    return mmfast.pipeline("video-qa", device="cpu", max_new_tokens=6)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reducers": {"reduce": "evs:0.5+fastv@llm3:0.5"},
    "cache": {"cache": "snapkv:0.5+quant:8"},
    "drafts": {"decode": "self:0.25"},
    "reuse": {"reuse": "prefix"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_pipelines_answer_as_before(stock: Any, name: str, way: str) -> None:
    pipe = mmfast.pipeline("video-qa", device="cpu", max_new_tokens=6, weights=name, **WAYS[way])
    found = pipe(CLIP, QUESTION)
    assert found.text == stock(CLIP, QUESTION).text
    (note,) = [note for note in found.trace.notes if note.startswith("weights: ")]
    assert f"layers {name}" in note


def test_streams_take_packed_weights() -> None:
    pipe = mmfast.pipeline("video-stream", device="cpu", weights="int8")
    with pipe.open() as session:
        session.watch(CLIP)
        assert "".join(session.ask("What colour is the circle?"))
    assert pipe.packing.layers["int8"]


def test_refusals_of_pipelines(stock: Any) -> None:
    pair = (stock.model, stock.processor)
    with pytest.raises(MmfastError, match=r"weights='int8' would change the Llava.*pack_weights"):
        mmfast.pipeline("video-qa", pair, weights="int8")
    with pytest.raises(MmfastError, match=r"'in8'.*int8"):
        mmfast.pipeline("video-qa", "/no/such/folder", weights="in8")
    assert load(pair, "cpu", "auto")[0] is stock.model  # and it is as it was
    assert not any(isinstance(each, PackedLinear) for each in stock.model.modules())
