"""`attach` on what people hold: pipelines, PEFT, compiled, dispatched and parallel models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import ALL_FAMILIES, Tiny, build
from torch import nn

import mmfast
from mmfast.attach import handle_of, turn_of
from mmfast.core.errors import ModelError
from mmfast.models.wrappers import stock_model
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import ReusePlan
from mmfast.streams.stream import StreamModel

NOT_OFFLOADED = ("fast_vlm", "idefics3", "lfm2_vl")
SPECS = ("random:0.4", "random@llm1:0.4")


@contextmanager
def peft(model: Any) -> Iterator[Any]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    yield get_peft_model(model, config)


@contextmanager
def merged_peft(model: Any) -> Iterator[Any]:
    """The tuner inside the PEFT model, as code that unwraps by hand has it."""
    with peft(model) as held:
        yield held.base_model


@contextmanager
def compiled(model: Any) -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch.compile(model, backend="eager")


@contextmanager
def compiled_and_used(model: Any) -> Iterator[Any]:
    """The stock code was compiled before: it does not look for hooks."""
    with compiled(model) as held:
        yield Used(held)


@contextmanager
def compiled_forward(model: Any) -> Iterator[Any]:
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    yield Used(model)


@contextmanager
def compiled_in_place(model: Any) -> Iterator[Any]:
    torch._dynamo.reset()
    model.compile(backend="eager")
    yield Used(model)


@contextmanager
def compiled_decoder(model: Any) -> Iterator[Any]:
    torch._dynamo.reset()
    base = model.base_model
    name = "text_model" if hasattr(base, "text_model") else "language_model"
    setattr(base, name, torch.compile(getattr(base, name), backend="eager"))
    yield Used(model)


@contextmanager
def compiled_base(model: Any) -> Iterator[Any]:
    torch._dynamo.reset()
    model.model = torch.compile(model.model, backend="eager")
    yield model


@contextmanager
def dispatched(model: Any) -> Iterator[Any]:
    from accelerate import cpu_offload

    yield cpu_offload(model, torch.device("cpu"))


@contextmanager
def parallel(model: Any) -> Iterator[Any]:
    with _group():
        model.lm_head.requires_grad_(True)  # it wants something to train
        yield nn.parallel.DistributedDataParallel(model)


@contextmanager
def sharded(model: Any) -> Iterator[Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    with _group():
        yield FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )


@contextmanager
def sharded_in_place(model: Any) -> Iterator[Any]:
    from torch.distributed.fsdp import fully_shard

    with _group():
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        yield fully_shard(model, mesh=mesh)


@contextmanager
def _group() -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def held_by_pipeline(model: Any) -> Iterator[Any]:
    """A transformers pipeline and a Trainer have the model as `.model`."""
    yield SimpleNamespace(model=model)


class Used:
    """A wrapped model that has answered the prompt once before it is attached."""

    def __init__(self, held: Any) -> None:
        self.held = held


HELD = (
    *(peft, merged_peft, compiled, compiled_and_used, compiled_forward, compiled_in_place),
    *(compiled_decoder, compiled_base, dispatched, parallel, held_by_pipeline),
    *(sharded, sharded_in_place),
)
EVERYWHERE = (peft, compiled_and_used, dispatched, parallel, held_by_pipeline)
# A family takes 40 s to compile: these, which differ most; all where MMFAST_ALL_FAMILIES is set.
EVERY_FAMILY = "MMFAST_ALL_FAMILIES" in os.environ
COMPILED = ("gemma3", "lfm2_vl", "qwen2_5_omni_thinker", "qwen3_vl")


def shallow(family: str) -> Tiny:
    """Two decoder layers, one of them behind the cut: each takes seconds to compile."""
    this = build(family)
    del this.model.get_decoder().layers[2:]
    this.model.config.get_text_config().num_hidden_layers = 2
    return this


def media(this: Tiny) -> dict[str, Any]:
    kind = "video" if "video" in this.facts.kinds else "image"
    given = {
        "video": lambda: {"videos": this.videos(1)},
        "image": lambda: {"images": this.images(1)},
    }
    found: dict[str, Any] = this.inputs([f"on {{{kind}}} what?"], **given[kind]())
    return found


def logits(held: Any, inputs: dict[str, Any]) -> torch.Tensor:
    run = held if callable(held) else held.model
    with torch.no_grad():
        found: torch.Tensor = run(**inputs).logits
    return found


def check(family: str, how: Any, spec: str) -> None:
    """Logits of the wrapped model: stock, reduced as by hand, and stock again."""
    this = shallow(family) if family == "llava_onevision" else build(family)
    inputs = media(this)
    with how(this.model) as held:
        used = isinstance(held, Used)
        held = held.held if used else held
        if used:
            logits(held, inputs)
        handle = mmfast.attach(held, spec)
        found = logits(held, inputs)[0]
        trace = handle.trace
        assert [row.stage for row in trace.rows] == [spec.partition("@")[2].split(":")[0] or "pre"]
        handle.detach()
        again = logits(held, inputs)[0]
        if isinstance(held, nn.Module) and how is dispatched:
            from accelerate.hooks import remove_hook_from_submodules

            remove_hook_from_submodules(held)
        this.model.__dict__.pop("forward", None)
        this.model._compiled_call_impl = None
        torch._dynamo.reset()
        for name, child in list(this.model.base_model._modules.items()):
            this.model.base_model._modules[name] = getattr(child, "_orig_mod", child)
        if hasattr(this.model.model, "_orig_mod"):
            this.model.model = this.model.model._orig_mod
        stock = this.model(**inputs).logits[0].detach()
        assert torch.equal(again, stock)
        prompt = oracle.embed(this, inputs)
        keep = oracle.kept_places(prompt, trace.reductions)
        assert len(keep) < len(prompt.embeds)
        with torch.no_grad():
            if spec == SPECS[0]:
                assert torch.equal(found, oracle.removed(this, prompt, keep))
            else:
                by_hand = oracle.masked(this, prompt, trace.reductions)[keep]
                torch.testing.assert_close(found, by_hand, atol=1e-5, rtol=0)
                with mmfast.attach(this.model, spec):
                    assert torch.equal(found, this.model(**inputs).logits[0])


# The ways to compile take half a minute each: they meet the specs in turn, most of them as slow.
HELD_WITH = [
    pytest.param(how, spec, marks=[pytest.mark.slow] if compiles and how is not compiled else [])
    for number, how in enumerate(HELD)
    for turn, spec in enumerate(SPECS)
    if not (compiles := how.__name__.startswith("compiled")) or (number + turn) % len(SPECS) == 0
]


@pytest.mark.parametrize("how, spec", HELD_WITH, ids=lambda part: getattr(part, "__name__", part))
def test_held_models_are_reduced_and_restored(how: Any, spec: str) -> None:
    check("llava_onevision", how, spec)


@pytest.mark.slow
@pytest.mark.parametrize("how", EVERYWHERE, ids=lambda how: how.__name__)
@pytest.mark.parametrize("family", sorted({*ALL_FAMILIES} - {"llava_onevision"}))
def test_held_models_of_every_family(family: str, how: Any) -> None:
    """The specs take turns, so that every family and every way to hold it meets each of them."""
    if (
        how is compiled_and_used
        and family not in COMPILED
        and "MMFAST_ALL_FAMILIES" not in os.environ
    ):
        pytest.skip("MMFAST_ALL_FAMILIES=1")
    if how is dispatched and family in NOT_OFFLOADED:
        pytest.skip("the stock model itself does not run under accelerate's offload")
    turn = sorted(ALL_FAMILIES).index(family) + EVERYWHERE.index(how)
    check(family, how, SPECS[turn % len(SPECS)])


@pytest.mark.slow
def test_stock_code_compiled_after_a_detach_is_forgotten() -> None:
    """As many pieces of code as before do not mean the same ones."""
    this = shallow("llava_onevision")
    inputs, held = media(this), torch.compile(this.model, backend="eager")
    torch._dynamo.reset()
    with mmfast.attach(held, SPECS[0]):
        short = logits(held, inputs)
    before = sorted(this.model.__dict__)
    torch._dynamo.reset()
    stock = logits(held, inputs)
    with mmfast.attach(held, SPECS[0]) as trace:
        assert torch.equal(logits(held, inputs), short)
    assert trace.rows and stock.shape != short.shape
    assert sorted(this.model.__dict__) == before == sorted(build("llava_onevision").model.__dict__)


def test_wrappers_come_off_in_any_depth() -> None:
    this = build("llava_onevision")
    with peft(this.model) as held:
        whole = SimpleNamespace(model=torch.compile(held, backend="eager"))
        assert stock_model(whole) is this.model
    assert stock_model(this.model) is this.model
    assert stock_model(SimpleNamespace()).__class__ is SimpleNamespace


def test_data_parallel_over_devices_is_refused() -> None:
    this = build("llava_onevision")
    held = nn.DataParallel(this.model)
    held.device_ids = [0, 1]
    with pytest.raises(ModelError, match="2 devices at every call; use DistributedDataParallel"):
        mmfast.attach(held, SPECS[0])


def test_virtual_tokens_of_peft_act_or_are_refused() -> None:
    """They stand in no layer: what calls the model past PEFT would answer without them."""
    import peft as library

    this = build("llava_onevision")
    inputs = media(this)
    config = library.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    plain, held = logits(this.model, inputs), library.get_peft_model(this.model, config).eval()
    assert logits(held, inputs).shape[1] == plain.shape[1] + 4
    with mmfast.attach(held, "random:1.0"):
        tuned = logits(held, inputs)
    assert torch.equal(tuned, logits(held, inputs))
    refused(this, held, r"virtual tokens \(PROMPT_TUNING\)")


def refused(this: Tiny, held: Any, outside: str) -> None:
    """Check that all calls past a PEFT model say what of it would not act."""
    for name, asks in {
        "a stream": lambda: StreamModel(held, this.processor),
        "decode=": lambda: mmfast.attach(held, decode="lookup"),
        "reuse='prefix'": lambda: MediaReuse(held, this.processor, ReusePlan("prefix"), None),
    }.items():
        with pytest.raises(
            ModelError, match=rf"{name} goes past the {outside} of .*; give .* LoRA"
        ):
            asks()
    assert stock_model(held.get_base_model(), "a stream") is this.model


def test_lora_that_tokens_activate_acts_or_is_refused() -> None:
    """Only PEFT's own call looks for the tokens; without them such an adapter does nothing."""
    import peft as library

    this = build("llava_onevision")
    inputs = media(this)
    last = inputs["input_ids"][0, -2:].tolist()
    config = library.LoraConfig(
        r=4,
        init_lora_weights=False,
        target_modules=r".*language_model.*\.q_proj",
        task_type="CAUSAL_LM",
        alora_invocation_tokens=last,
    )
    plain, held = logits(this.model, inputs), library.get_peft_model(this.model, config).eval()
    acted = logits(held, inputs)
    assert torch.equal(acted[:, :-2], plain[:, :-2])
    assert not torch.equal(acted[:, -2:], plain[:, -2:])
    with mmfast.attach(held, "random:1.0"):
        assert torch.equal(logits(held, inputs), acted)
    refused(this, held, r"tokens that activate the adapter \(aLoRA\)")


def test_experts_of_x_lora_are_refused_where_nothing_weighs_them(tmp_path: Path) -> None:
    import peft as library

    this = build("llava_onevision")
    config = library.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    library.get_peft_model(this.model, config).save_pretrained(tmp_path)
    this = build("llava_onevision")
    text = this.model.config.get_text_config()
    this.model.config.use_cache, this.model.config.hidden_size = False, text.hidden_size
    experts = library.XLoraConfig(
        task_type="CAUSAL_LM",
        hidden_size=text.hidden_size,
        adapters={"one": str(tmp_path), "two": str(tmp_path)},
    )
    held = library.get_peft_model(this.model, experts).eval()
    refused(this, held, r"weights of the experts \(X-LoRA\)")


def test_a_classifier_of_pictures_reads_no_text() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = ViTForImageClassification(ViTConfig(num_attention_heads=2, image_size=32, **sizes))
    for asked in ({"reduce": "tome@vit:0.5"}, {"cache": "snapkv:12"}):
        with pytest.raises(ModelError, match=r"'vit'.* has no adapter"):
            mmfast.attach(model, **asked)


def test_text_models_take_a_kv_policy_and_reducers_of_text_alone() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).eval()
    ids = torch.arange(40)[None]
    with mmfast.attach(model, cache="snapkv:12") as trace:
        out = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, do_sample=False)
    assert [row.stage for row in trace.rows] == ["kv"]
    assert trace.rows[0].tokens_out == 12
    assert out.past_key_values.layers[0].keys.shape[2] == 12 + 2
    with pytest.raises(ValueError, match=r"acts on tokens of media.*divprune@llm2"):
        mmfast.attach(model, "divprune:0.5")


def test_what_is_attached_to_a_model_is_found_through_its_adapter() -> None:
    """Pipelines and streams around a PEFT model ask for it, and share one lock."""
    tiny = build("llava_onevision")
    with peft(tiny.model) as held:
        handle = mmfast.attach(held, "random:0.4")
        handle.trace.calls = 1  # nothing to be warned of
        assert handle_of(held) is handle_of(tiny.model) is handle
        assert turn_of(held) is turn_of(tiny.model)
        handle.detach()
