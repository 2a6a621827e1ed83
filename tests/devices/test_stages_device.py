"""Stages beside reducers and caches on a device: prefill, decoding, encoders, training.

`MMFAST_TEST_DEVICE=cpu pytest -m gpu tests/devices` runs them without a device.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import decode_models
import pytest
import torch
from device_models import (
    DTYPES,
    FAR,
    HOST,
    agree,
    answered,
    asked,
    give_patterns,
    moved,
    placed,
    text_placed,
)  # fmt: skip
from devices import DEVICE, MARKS
from text_zoo import prompt
from tiny_models import FAMILIES, build, generate

import mmfast
from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.compressors.llava_mini import LlavaMini
from mmfast.compressors.query_compressor import QueryCompressor
from mmfast.compressors.storm import Storm
from mmfast.core.errors import ModelError
from mmfast.decoding.loop import BatchDecoder
from mmfast.decoding.row import Costs, Open
from mmfast.models.decoder.backbone import Backbone, make_head
from mmfast.models.families.adapter import tower_of
from mmfast.models.kv.patterns import HeadPatterns
from mmfast.models.vision.folding import file_of, fold, without_attention

pytestmark = MARKS

SETTINGS = {
    "sample_attention": "rows=0.2&window=0.1",
    "zipvl": "probes=5",
    "flexprefill": "tau=0.1",
    "minference": "probes=9",
    "pbs": "segment=2",
    "hip": "share=True",
    "sale": "width=16&local=32",
    "dhsa": "chunk=8&window=2",
}
VARIED = {"repetition_penalty": 1.3}  # tiny models repeat themselves, and drafts would all stand
DECODE = {
    "self": "self:0.3?adapt=0&least=0",
    "self-snapkv": "self:0.3?score=snapkv&adapt=0&least=0",
    "self-reduce": "self?adapt=0&least=0&reduce=divprune:0.3",
    "tree": "recycle?adapt=0",
    "recycle": "recycle?adapt=0&tree=0",
    "lookup": "lookup?adapt=0",
    "adapting": "self:0.3",
}
DRAFTS = ["small", "small?reduce=random:0.3", "small?media=0"]
HEADS = ["mctp", "mtp"]


def both(family: str, dtype: torch.dtype = torch.float32, **stages: Any) -> Any:
    """What the CPU and the device say, which must agree; the answer of the device."""
    here, there = (answered(placed(family, d, dtype), 6, **stages) for d in (HOST, DEVICE))
    assert not isinstance(there, str), there
    agree(here, there)
    return there


def spec_of(name: str, block: int) -> str:
    return f"{name}:0.4?block={block}&least=8&{SETTINGS[name]}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SETTINGS)
def test_sparse_prefill(family: str, name: str) -> None:
    # It takes blocks up to a share of the mass, and sums of float32 end at another block.
    dtype = torch.float64 if name == "flexprefill" else torch.float32
    found = both(family, dtype, prefill=spec_of(name, 4))
    assert any(row.stage == "sparse" for row in found[2].rows)


def wide(device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A model of text whose heads are as wide as kernels need them."""
    return copy.deepcopy(decode_models.tiny("qwen3")).to(device, dtype).requires_grad_(False)


def logits_of(model: Any, ids: torch.Tensor, **stages: Any) -> torch.Tensor:
    with attach(model, **stages):
        found: torch.Tensor = model(ids.to(model.device)).logits.float().cpu()
    return found


@pytest.mark.parametrize("block", [16, 32, 48, 128])
@pytest.mark.parametrize("name", SETTINGS)
def test_sparse_prefill_by_the_kernel(name: str, block: int) -> None:
    ids = prompt(300) % decode_models.VOCABULARY
    spec = spec_of(name, block)
    here, there = (logits_of(wide(device), ids, prefill=spec) for device in (HOST, DEVICE))
    torch.testing.assert_close(there, here, atol=FAR, rtol=FAR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_sparse_prefill_in_half_precision(name: str, dtype: str) -> None:
    ids = prompt(300) % decode_models.VOCABULARY
    found = logits_of(wide(DEVICE, DTYPES[dtype]), ids, prefill=spec_of(name, 64))
    assert found.isfinite().all()


def test_sparse_prefill_of_many_lengths() -> None:
    """More lengths than a compiler would make code for."""
    here, there = wide(HOST), wide(DEVICE)
    for length in range(150, 330, 15):
        ids = prompt(length) % decode_models.VOCABULARY
        found = [logits_of(m, ids, prefill=spec_of("flexprefill", 64)) for m in (here, there)]
        torch.testing.assert_close(found[1], found[0], atol=FAR, rtol=FAR)


@pytest.mark.parametrize("cache", [None, "snapkv:0.4?window=5", "quest:0.3?page=4&skip=0"])
@pytest.mark.parametrize("attn", ["sdpa", "eager", "flex_attention"])
def test_attention_by_name(attn: str, cache: str | None) -> None:
    if attn == "flex_attention" and DEVICE.type == "cpu":
        pytest.skip("stock models give NaN with it on the CPU")
    ids, found = prompt(40) % decode_models.VOCABULARY, []
    for device, name in ((HOST, "eager"), (DEVICE, attn)):
        model = wide(device)
        if name == "flex_attention" and cache is not None and cache.startswith("quest"):
            with attach(model, attn=name, cache=cache), pytest.raises(ModelError, match="flex"):
                model.generate(ids.to(device), max_new_tokens=4)
            return
        with attach(model, attn=name, cache=cache):
            out = model.generate(
                ids.to(device), attention_mask=torch.ones_like(ids).to(device), pad_token_id=0,
                max_new_tokens=4, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        found.append(torch.stack(out.logits).cpu())
    torch.testing.assert_close(found[1], found[0], atol=FAR, rtol=FAR)


def test_flash_attention_that_is_not_installed_is_one_line() -> None:
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        pytest.skip("flash-attn is installed")
    with pytest.raises(ModelError, match="flash-attn") as error:
        attach(placed("qwen2_5_vl").model, attn="flash_attention_2")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
@pytest.mark.parametrize("name", DECODE)
def test_draft_and_verify(family: str, name: str) -> None:
    how = {"how": VARIED}
    stock = answered(placed(family), 10, **how)
    found = answered(placed(family), 10, decode=DECODE[name], **how)
    assert torch.equal(found[0], stock[0])
    torch.testing.assert_close(found[1], stock[1], atol=FAR, rtol=FAR)
    agree(answered(placed(family, HOST), 10, decode=DECODE[name], **how), found)


@pytest.mark.parametrize("beside", [{"reduce": "random:0.5"}, {"cache": "snapkv:0.5"}])
@pytest.mark.parametrize("name", ["self", "recycle"])
def test_draft_and_verify_beside(name: str, beside: dict[str, str]) -> None:
    both("qwen2_5_vl", decode=DECODE[name], how=VARIED, **beside)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DECODE)
def test_draft_and_verify_in_half_precision(name: str, dtype: str) -> None:
    found = answered(placed("qwen2_5_vl", DEVICE, DTYPES[dtype]), 8, decode=DECODE[name])
    assert not isinstance(found, str), found
    assert found[1].isfinite().all()


def test_drawn_tokens_come_from_the_device() -> None:
    how = {"do_sample": True, "temperature": 0.9, "top_k": 20}
    for name in ("self", "tree"):
        found = answered(placed("llava_onevision"), 10, decode=DECODE[name], how=how)
        assert not isinstance(found, str), found


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("drafts")
    build("llava_onevision", layers=2, seed=3).model.save_pretrained(home / "small")
    return home


@pytest.mark.parametrize("knobs", DRAFTS)
def test_a_draft_model(drafts: Path, knobs: str) -> None:
    name, _, more = knobs.partition("?")
    spec = f"draft:{drafts}/{name}?adapt=0&least=0" + (f"&{more}" if more else "")
    this = placed("llava_onevision")
    stock = answered(this, 8, how=VARIED)
    found = answered(this, 8, decode=spec, how=VARIED)
    assert not isinstance(found, str), found
    assert torch.equal(found[0], stock[0])


@pytest.mark.parametrize("verify", ["exact", "none", "typical:0.2"])
@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str, verify: str) -> None:
    said = []
    for device in (HOST, DEVICE):
        model = copy.deepcopy(decode_models.tiny()).to(device)
        backbone = Backbone(model)
        torch.manual_seed(5)
        start = make_head(name, Backbone(decode_models.tiny()), modules=3, start="random")
        head = make_head(name, backbone, modules=3, start="random").eval()
        head.load_state_dict(start.state_dict())  # numbers drawn on a device are others
        decoder = BatchDecoder(
            backbone, head, [Open(12) for _ in range(3)], verify=verify,
            costs=Costs(draft=0.01, wide=0.0), reserve=32,
        )  # fmt: skip
        decoder.feed([[1, 2, 3], [4, 5, 6, 7], [8, 9]])
        lines: list[list[int]] = [[], [], []]
        for steps in decoder:
            for line, step in zip(lines, steps, strict=True):
                line += step.tokens if step is not None else ()
        said.append(lines)
    assert said[0] == said[1]


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
@pytest.mark.parametrize("reduce", ["divprune:0.5", "fastv@llm2:0.5"])
def test_stock_caches_beside_a_reducer(reduce: str, implementation: str) -> None:
    both("qwen2_5_vl", reduce=reduce, how={"cache_implementation": implementation})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_faster_encoder(family: str) -> None:
    both(family, encoder="fast")
    found = answered(placed(family, DEVICE, torch.bfloat16), 3, encoder="fast")
    assert found[1].isfinite().all()


@pytest.mark.parametrize("encoder", ["compile", "graph"])
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_an_encoder_that_is_compiled_or_recorded(family: str, encoder: str) -> None:
    if encoder == "graph" and DEVICE.type != "cuda":
        pytest.skip("graphs are recorded on CUDA alone")
    this = placed(family, DEVICE)
    stock = answered(this, 3)
    for _ in range(2):  # recorded, and repeated
        found = answered(this, 3, encoder=encoder)
        assert not isinstance(found, str), found
        torch.testing.assert_close(found[1], stock[1], atol=FAR, rtol=FAR)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_blocks_without_attention(family: str, tmp_path: Path) -> None:
    this = placed(family, HOST)
    weights = fold(without_attention(this.model, [len(tower_of(this.model).blocks) - 1]))
    path = file_of(tmp_path, len(weights.blocks))
    base.save(weights, path)
    both(family, encoder=f"riformer:1?path={path}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_without_attention_in_half_precision(dtype: str, tmp_path: Path) -> None:
    this = placed("llava_onevision", HOST)
    weights = fold(without_attention(this.model, [0]))
    base.save(weights, path := file_of(tmp_path, 1))
    there = placed("llava_onevision", DEVICE, DTYPES[dtype])
    found = answered(there, 3, encoder=f"riformer:1?path={path}")
    assert not isinstance(found, str), found
    assert found[1].isfinite().all()


def compressor_of(name: str, folder: Path) -> str:
    torch.manual_seed(5)
    made: Any = {
        "llava_mini": lambda: LlavaMini(32, 1, (3, 3), inner=12, heads=3),
        "query_compressor": lambda: QueryCompressor(32, 2, (3, 3), inner=24, heads=3),
        "storm": lambda: Storm(32, 2, (3, 3), inner=12, states=3),
    }[name]()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    base.save(made, path := folder / f"{name}.safetensors")
    return f"{name}:{1 if name == 'llava_mini' else 2}?path={path}"


@pytest.mark.parametrize("name", ["llava_mini", "query_compressor", "storm"])
def test_a_compressor(name: str, tmp_path: Path) -> None:
    spec = compressor_of(name, tmp_path)
    both("llava_onevision", reduce=spec)
    for dtype in DTYPES.values():
        found = answered(placed("llava_onevision", DEVICE, dtype), 3, reduce=spec)
        assert not isinstance(found, str), found
        assert found[1].isfinite().all()


def test_concepts_of_a_text(tmp_path: Path) -> None:
    from mmfast.models.decoder.concepts import new_compressor

    torch.manual_seed(1)
    model = copy.deepcopy(text_placed("llama", HOST))
    model.config.eos_token_id = 7
    made = new_compressor(model, 2, segment=8, rank=4, alpha=8.0)
    for value in (*made.up.values(), made.leave.weight, made.leave.bias):
        torch.nn.init.normal_(value, std=0.2)
    base.save(made, path := tmp_path / "llama.safetensors")
    found = [
        logits_of(
            text_placed("llama", device), prompt(43), reduce=f"compllm:2?recent=5&path={path}"
        )
        for device in (HOST, DEVICE)
    ]
    torch.testing.assert_close(found[1], found[0], atol=FAR, rtol=FAR)


@pytest.mark.parametrize("gates", [False, True])
def test_heads_are_calibrated_where_the_model_is(gates: bool, tmp_path: Path) -> None:
    found = []
    for device in (HOST, DEVICE):
        model = text_placed("llama", device)
        patterns = mmfast.calibrate_heads(
            model, length=64, recent=6, count=2, gates=gates, steps=2, save=tmp_path
        )
        HeadPatterns.load(tmp_path).use(model)
        with attach(model, cache="fastkvzip:0.5" if gates else "qfilter:0.5"):
            model.generate(prompt(40).to(device), max_new_tokens=2, do_sample=False)
        found.append(patterns)
    for name in ("filters", "reach"):
        for index, mine in getattr(found[0], name).items():
            its = getattr(found[1], name)[index].cpu()
            torch.testing.assert_close(its, mine, atol=FAR, rtol=FAR)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reduce", ["random:0.5", "tome:0.5", "fastv@llm2:0.5", "tome@vit:0.5"])
def test_a_step_of_training(family: str, reduce: str) -> None:
    losses, grads = [], []
    for device in (HOST, DEVICE):
        this = build(family)
        this.model.to(device).train().requires_grad_(True)
        inputs = moved(asked(this), device)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        with torch.enable_grad():
            try:
                with attach(this.model, reduce):
                    loss = this.model(**inputs, labels=labels).loss
            except ModelError as error:
                losses.append(str(error))
                continue
            loss.backward()
        losses.append(float(loss))
        grads.append(
            {n: p.grad.cpu() for n, p in this.model.named_parameters() if p.grad is not None}
        )
    if isinstance(losses[0], str):
        assert losses[0] == losses[1]
        return
    assert losses[1] == pytest.approx(losses[0], abs=FAR)
    assert grads[0].keys() == grads[1].keys()
    for name, mine in grads[0].items():
        torch.testing.assert_close(grads[1][name], mine, atol=FAR, rtol=1e-2, msg=name)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("stages", [{"reduce": "divprune:0.5"}, {"cache": "snapkv:12?window=4"}])
def test_a_compiled_model(stages: dict[str, str], backend: str) -> None:
    if backend == "inductor" and DEVICE.type != "cuda":
        pytest.skip("takes minutes and a compiler of C++ on the CPU")
    torch._dynamo.reset()
    this = build("llava_onevision")
    this.model.to(DEVICE)
    inputs = moved(asked(this))
    with attach(this.model, **stages):
        want = generate(this, inputs, 3)
    this.model.forward = torch.compile(this.model.forward, backend=backend)
    with attach(this.model, **stages):
        found = generate(this, inputs, 3)
    torch.testing.assert_close(
        torch.stack(found.logits), torch.stack(want.logits), atol=FAR, rtol=FAR
    )


@pytest.mark.parametrize(
    "stages", [{"reduce": "divprune:0.5"}, {"reduce": "fastv@llm2:0.5"}, {"cache": "snapkv:12"}]
)
def test_inputs_on_another_device_are_an_error(stages: dict[str, str]) -> None:
    if DEVICE.type == "cpu":
        pytest.skip("there is one device alone")
    this = placed("qwen2_5_vl")
    with pytest.raises((RuntimeError, ValueError), match=r"device|cuda"):
        answered_from_the_host(this, stages)
    agree(answered(placed("qwen2_5_vl", HOST), 3, **stages), answered(this, 3, **stages))


def answered_from_the_host(this: Any, stages: dict[str, str]) -> None:
    with attach(this.model, **stages):
        this.model(**asked(this))


@pytest.mark.parametrize("cache", ["quest:0.3?page=4&skip=0", "snapkv:0.4?window=5", "quant:4"])
def test_beams_and_a_later_turn(cache: str) -> None:
    both("llava_onevision", torch.float64, cache=cache, how={"num_beams": 2})
    turns = []
    for device in (HOST, DEVICE):
        this = placed("qwen2_5_vl", device, torch.float64)
        give_patterns(this.model)
        inputs = moved(asked(this, 1), device, torch.float64)
        with attach(this.model, cache=cache):
            one = generate(this, inputs, 3)
            more = this.inputs([" and now?"])["input_ids"].to(device)
            ids = torch.cat([one.sequences, more], 1)
            two = generate(this, {"input_ids": ids}, 3, past_key_values=one.past_key_values)
        turns.append(two.sequences.cpu())
    assert torch.equal(*turns)
