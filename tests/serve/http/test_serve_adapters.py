"""Adapters and priorities as clients name them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("peft")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from scheduling import EMBEDDED, ask, model_of, stock
from serve_tools import MODEL, app_of, get, post, saying, user

from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig, resolve
from mmfast.serve.engine.base import Delta, Finish
from mmfast.serve.http.service import load_engine

ANSWER = (Delta("left"), Finish("stop", 70, 1))
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def test_an_adapter_is_a_name_of_a_model() -> None:
    engine = saying(*ANSWER)
    app = app_of(engine, lora=("red=/a/b", "org/blue-v1.5=~/c"))
    cards = {each["id"]: each for each in get(app, "/v1/models").json()["data"]}
    assert set(cards) == {MODEL, "red", "org/blue-v1.5"}
    assert cards["red"]["parent"] == MODEL and cards[MODEL]["parent"] is None
    assert get(app, "/v1/models/org/blue-v1.5").json()["id"] == "org/blue-v1.5"
    for name in ("red", "org/blue-v1.5", MODEL, "mmfast"):
        found = post(app, {"model": name, **HELLO})
        assert found.status_code == 200 and found.json()["model"] == name
        post(app, {"model": name, "prompt": "hello"}, "/v1/completions")
        post(app, {"model": name, "input": "hello"}, "/v1/responses")
    wanted = ["red", "org/blue-v1.5", None, None]
    assert [each.adapter for each in engine.requests] == [n for n in wanted for _ in range(3)]
    missing = post(app, {"model": "rde", **HELLO})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    text = missing.json()["error"]["message"]
    assert "\n" not in text and all(repr(name) in text for name in cards)


def test_texts_to_continue_take_the_options_of_a_chat_or_refuse_them() -> None:
    engine = saying(*ANSWER)
    app, path = app_of(engine), "/v1/completions"
    wishes = {"reduce": "fastv@llm2:0.5", "cache": "snapkv:8", "prefill": "none", "decode": "none"}
    wishes["target_ttft_ms"] = 50.0
    assert post(app, {"model": MODEL, "prompt": "hi", "mmfast": wishes}, path).status_code == 200
    assert {name: getattr(engine.requests[0].options, name) for name in wishes} == wishes
    for name, value in {"frames": 4, "fps": 2, "reuse": "encoder"}.items():
        wrong = post(app, {"model": MODEL, "prompt": "hi", "mmfast": {name: value}}, path)
        error = wrong.json()["error"]
        assert wrong.status_code == 400 and error["param"] == f"mmfast.{name}"
        assert f"{name} acts on media" in error["message"]


def test_priorities_count_as_in_vllm_and_ours_the_other_way() -> None:
    engine = saying(*ANSWER)
    app = app_of(engine)
    for more in ({}, {"priority": 3}, {"priority": -2}, {"mmfast": {"priority": 4}}):
        assert post(app, {"model": MODEL, **HELLO, **more}).status_code == 200
        done = post(app, {"model": MODEL, "prompt": "hello", **more}, "/v1/completions")
        assert done.status_code == 200 and "x-mmfast-ignored" not in done.headers
        done = post(app, {"model": MODEL, "input": "hello", **more}, "/v1/responses")
        assert done.status_code == 200 and "x-mmfast-ignored" not in done.headers
    wanted = [0, -3, 2, 4]
    assert [each.priority for each in engine.requests] == [n for n in wanted for _ in range(3)]
    both = post(app, {"model": MODEL, **HELLO, "priority": 1, "mmfast": {"priority": 1}})
    assert both.status_code == 400 and both.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("given", ["red", "=folder", "red=", "a=b,a=c", "mine=x"])
def test_a_wrong_lora_option_is_told(given: str) -> None:
    with pytest.raises(MmfastError, match="--lora") as error:
        resolve({"name": "mine"}, None, {"MMFAST_LORA": given})
    assert "\n" not in str(error.value)


def test_the_option_is_a_flag_given_several_times() -> None:
    command = [sys.executable, "-m", "mmfast", "serve", "--dry-run", "--json"]
    command += ["--lora", "a=x", "--lora", "b=y"]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert shown["lora"] == ["a=x", "b=y"]
    assert resolve({}, None, {"MMFAST_LORA": "a=x,b=y"}).adapters() == {"a": "x", "b": "y"}


@pytest.mark.filterwarnings("ignore")
def test_a_server_answers_with_its_adapters() -> None:
    model, processor = model_of(EMBEDDED)
    torch.manual_seed(4)
    made = LoraConfig(
        r=8, lora_alpha=64, target_modules=r".*language_model.*_proj", init_lora_weights=False
    )
    folder = Path(tempfile.mkdtemp(prefix="mmfast-lora-"))
    get_peft_model(copy.deepcopy(model), made).save_pretrained(folder)
    config = ServerConfig(lora=(f"odd={folder}",), device="cpu", dtype="float32", voice=False)
    engine = load_engine(config)
    try:
        app = app_of(engine, lora=config.lora)
        asked = {"messages": user("What colour is the circle?"), "max_tokens": 6}
        replies = [post(app, {"model": name, **asked}).json() for name in (MODEL, "odd")]
    finally:
        engine.close()
    merged = PeftModel.from_pretrained(copy.deepcopy(model), folder).merge_and_unload(), processor
    alone = ask("a", "What colour is the circle?", tokens=6)
    texts = [each["choices"][0]["message"]["content"] for each in replies]
    assert texts == [stock((model, processor), alone), stock(merged, alone)]
    assert texts[0] != texts[1]
