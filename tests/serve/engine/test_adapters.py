"""LoRA adapters of requests: each answer is that of its adapter alone, merged by peft."""

from __future__ import annotations

import asyncio
import copy
import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from scheduling import EMBEDDED, answers, ask, clip, image, model_of, stock, talk

from mmfast.attach import attach
from mmfast.core.errors import MmfastError
from mmfast.serve.engine import adapters as adapters_module
from mmfast.serve.engine.adapters import load_adapters
from mmfast.serve.engine.base import Delta, Finish, Request
from mmfast.serve.engine.kv.prefixes import Prefixes
from mmfast.serve.engine.scheduler import Scheduler

TEXT = r".*language_model.*_proj"
EVERYWHERE = r".*(_proj|linear_1|merger.mlp.0|attn.proj|lm_head)"
pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def saved(family: str, seed: int, targets: str = TEXT, **config: Any) -> Path:
    """A folder with random matrices that change the answers."""
    torch.manual_seed(seed)
    made = LoraConfig(
        r=4 + seed, lora_alpha=64, target_modules=targets, init_lora_weights=False, **config
    )
    folder = Path(tempfile.mkdtemp(prefix="mmfast-lora-"))
    get_peft_model(copy.deepcopy(model_of(family)[0]), made).save_pretrained(folder)
    return folder


def merged(family: str, folder: Path | None) -> tuple[Any, Any]:
    """The model with an adapter merged into its weights by peft, the oracle."""
    model, processor = model_of(family)
    if folder is None:
        return model, processor
    own = PeftModel.from_pretrained(copy.deepcopy(model), folder)
    return own.merge_and_unload(), processor


def served(family: str, folders: dict[str, Path], **options: Any) -> Scheduler:
    """An engine of small chunks, with adapters, on a copy of the model."""
    model, processor = model_of(family)
    lora = {name: str(folder) for name, folder in folders.items()}
    pair = copy.deepcopy(model), processor
    return Scheduler(pair, **{"chunk": 48, "memory": "200MB", "lora": lora, **options})


SPECS = [
    (None, None),
    ("divprune:0.5", None),
    ("fastv@llm2:0.5", None),
    ("tome@vit:0.5", None),
    (None, "snapkv:20"),
    ("random:0.5", "sink:4+window:24"),
    (None, "quant:8"),
]


def mixed(folders: dict[str, Path]) -> list[Request]:
    """Every spec with every adapter and without one; the same media and words each time."""
    found = []
    for i, (reduce, cache) in enumerate(SPECS):
        for name in (None, *folders):
            media = (image(i), clip(i)) if i % 2 else (image(i),)
            specs = {"reduce": reduce, "cache": cache}
            found.append(ask(f"{i}-{name}", *media, "what is it?", tokens=6, adapter=name, **specs))
    turns = [("hello there " * 12,), ("red",), ("a?",)]
    return found + [talk(f"t-{name}", turns, adapter=name) for name in (None, *folders)]


def expected(family: str, folders: dict[str, Path], requests: list[Request]) -> list[str]:
    pairs = {None: merged(family, None)} | {n: merged(family, f) for n, f in folders.items()}
    found = []
    for request in requests:
        pair = pairs[request.adapter]
        with attach(pair[0], request.options.reduce, request.options.cache):
            found.append(stock(pair, request))
    return found


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize(
    "family",
    ["llava_onevision", "qwen2_5_vl", "qwen3_vl", pytest.param(EMBEDDED, marks=pytest.mark.slow)],
)
def test_answers_beside_each_other_are_those_of_each_adapter_alone(family: str) -> None:
    folders = {"v1.5": saved(family, 1), "org/b": saved(family, 2)}
    requests = mixed(folders)
    wanted = expected(family, folders, requests)
    alone = [wanted[i : i + 3] for i in range(0, len(wanted), 3)]
    # On random weights every adapter answers otherwise; the trained model says one word.
    assert sum(len(set(three)) for three in alone) >= (2 if family == EMBEDDED else 2.5) * len(
        alone
    )
    engine = served(family, folders, slots=len(requests))
    try:
        for prefix in ("", "again"):  # also from what is kept of media and prompts
            named = [copy.copy(each) for each in requests]
            for each in named:
                object.__setattr__(each, "id", prefix + each.id)
            found = answers(engine, named)
            assert [text for text, _ in found] == wanted
            assert all(isinstance(end, Finish) for _, end in found)
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_adapters_of_the_tower_and_the_head_are_used_too(family: str) -> None:
    folders = {"all": saved(family, 3, EVERYWHERE), "text": saved(family, 1)}
    requests = [
        ask(f"{i}-{name}", image(i), "what?", tokens=6, adapter=name)
        for i in range(2)
        for name in (None, *folders)
    ]
    engine = served(family, folders)
    try:
        texts = [text for text, _ in answers(engine, requests)]
        assert engine._adapters.visual == {"all"}
        # The adapter of the text shares the encodings of the model.
        assert engine._runner.encoder.kept.currsize and len(engine._runner.encoder.kept) == 4
    finally:
        engine.close()
    assert texts == expected(family, folders, requests)
    assert len(set(texts)) > 3


def test_the_model_is_held_once_and_left_as_it_was() -> None:
    model = copy.deepcopy(model_of("qwen3_vl")[0])
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    folders = {f"a{i}": str(saved("qwen3_vl", i)) for i in range(1, 4)}
    found = load_adapters(model, folders)
    held = {each.data_ptr() for name, each in model.named_parameters() if ".lora_" not in name}
    assert held == set(before.values()) and tuple(found.keys) == ("a1", "a2", "a3")
    found.close()
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before
    assert not any("forward" in vars(each) for each in model.modules())


def test_wrong_adapters_are_refused_in_one_line(tmp_path: Path) -> None:
    model = copy.deepcopy(model_of("qwen3_vl")[0])
    names = set(dict(model.named_parameters()))
    dora = saved("qwen3_vl", 1, use_dora=True)
    whole = saved("qwen3_vl", 2, modules_to_save=("lm_head",))
    words = saved("qwen3_vl", 1, r".*embed_tokens")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{")
    (broken / "adapter_model.safetensors").write_bytes(b"x")
    cases = {
        str(tmp_path): "has no adapter_config.json",
        str(broken): "does not fit",
        str(saved(EMBEDDED, 1)): "does not fit",
        str(saved("llava_onevision", 1, r".*vision_tower.*_proj")): "does not fit",
        str(dora): "holds DORA",
        str(whole): "whole modules",
        str(words): "changes .*embed_tokens",
    }
    for folder, text in cases.items():
        with pytest.raises(MmfastError, match=text) as error:
            load_adapters(model, {"fine": str(saved("qwen3_vl", 1)), "x": folder})
        assert "\n" not in str(error.value) and "'x'" in str(error.value)
        assert set(dict(model.named_parameters())) == names
    engine = served("qwen3_vl", {"red": saved("qwen3_vl", 1)})
    try:
        with pytest.raises(MmfastError, match=r"unknown adapter 'rde'.*red"):
            answers(engine, [ask("a", "hello", adapter="rde")])
    finally:
        engine.close()


# --- planted faults: the comparison must see them -----------------------------------------------


def _agrees(monkeypatch: pytest.MonkeyPatch) -> bool:
    folders = {"a": saved("qwen3_vl", 1), "b": saved("qwen3_vl", 2)}
    long = "hello there " * 12
    requests = [
        ask(f"{i}-{name}", long, tokens=6, adapter=name, reduce=None)
        for i in range(2)
        for name in (None, "a", "b")
    ]
    wanted = expected("qwen3_vl", folders, requests)
    engine = served("qwen3_vl", folders)
    try:
        found = [answers(engine, [each])[0][0] for each in requests]
        found += [
            text
            for text, _ in answers(
                engine, [ask("x" + r.id, long, adapter=r.adapter) for r in requests]
            )
        ]
    finally:
        engine.close()
    return found == wanted * 2


def test_a_prefix_of_another_adapter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _agrees(monkeypatch)
    from mmfast.serve.engine import encoder

    chain = encoder.chain
    monkeypatch.setattr(encoder, "chain", lambda marks, places, adapter=None: chain(marks, places))
    assert not _agrees(monkeypatch)


def test_rows_of_the_wrong_adapter_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = adapters_module._forward

    def swapped(module: Any, stock: Any, keys: Any, x: Any, *args: Any) -> Any:
        names = adapters_module._RUNNING.get()
        with adapters_module.using(list(names)[::-1]):
            return forward(module, stock, keys, x, *args)

    monkeypatch.setattr(adapters_module, "_forward", swapped)
    assert not _agrees(monkeypatch)


def test_prefixes_are_reused_within_an_adapter() -> None:
    engine = served("qwen3_vl", {"a": saved("qwen3_vl", 1)})
    try:
        long = "hello there " * 12
        ends = [
            answers(engine, [ask(f"{i}", long, adapter=name)])[0][1]
            for i, name in enumerate([None, "a", "a", None])
        ]
    finally:
        engine.close()
    assert [bool(end.cached_tokens) for end in ends] == [False, False, True, True]
    assert isinstance(engine._runner.batch.prefixes, Prefixes)


def test_the_parts_of_the_engine_on_ray_answer_with_adapters() -> None:
    """Encode, prefill and decode apart, each with a copy of the model of its own."""
    from mmfast.serve.engine.request import checked
    from mmfast.serve.ray.deployments import (
        DecodeReplica,
        EncodeReplica,
        PrefillReplica,
        ReplicaSettings,
    )

    folders = {"a": saved(EMBEDDED, 1), "b": saved(EMBEDDED, 2)}
    lora = {name: str(folder) for name, folder in folders.items()}
    plan = ReplicaSettings(None, "cpu", "float32", threads=0, lora=lora, memory="100MB")
    requests = [
        ask(f"{name}", image(1), "What is this?", tokens=6, adapter=name)
        for name in (None, "a", "b")
    ]

    async def go() -> list[str]:
        parts = EncodeReplica(plan), PrefillReplica(plan), DecodeReplica(plan)

        async def answer(request: Request) -> str:
            seeded = replace(request, sampling=checked(request.sampling))
            piece = await parts[1](await parts[0](seeded, None), 6)
            events = [event async for event in parts[2](seeded, piece)]
            flat = [e for batch in events if isinstance(batch, tuple) for e in batch]
            assert isinstance(flat[-1], Finish), flat
            return "".join(each.text for each in flat if isinstance(each, Delta))

        return await asyncio.gather(*map(answer, requests))

    texts = asyncio.run(go())
    assert texts == expected(EMBEDDED, folders, requests) and len(set(texts)) > 1
