"""Packed weights behind every engine: answers of the packed model, refusals in one line."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from engine_requests import QUESTIONS
from scheduling import answers, ask, clip, image, stock

from mmfast.attach import attach
from mmfast.cli import main
from mmfast.core.errors import MmfastError
from mmfast.models.loading import load
from mmfast.models.packing import PackedLinear, pack_weights
from mmfast.serve.batch.job import BatchJob, differences
from mmfast.serve.batch.run import Answerer
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Finish, Request
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.http.service import load_engine

ASSETS = Path(__file__).resolve().parents[3] / "assets"
CLIP = str(ASSETS / "clips" / "red-circle.mp4")
HERE: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


def packed_layers(model: Any) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


@functools.cache
def alone(form: str) -> tuple[Any, Any]:
    """The embedded model on packed weights, without an engine."""
    model, processor = load(None, **HERE)
    pack_weights(model, form)
    return model, processor


def requests() -> list[Request]:
    """Clips, pictures and texts under several specs."""
    ways: list[dict[str, Any]] = [
        {},
        {"reduce": "evs:0.25"},
        {"reduce": "fastv@llm1:0.5"},
        {"cache": "snapkv:16"},
        {"cache": "quant:8"},
    ]
    made = [
        ask(f"clip-{i}", clip(i, 4, (96, 96)), QUESTIONS[i % len(QUESTIONS)], tokens=9, **way)
        for i, way in enumerate(ways)
    ]
    return [*made, ask("image", image(1, (96, 96)), "what?"), ask("text", "hello there")]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("form", ["int8", "int4", "bfloat16"])
def test_requests_at_once_are_answered_as_by_the_packed_model_alone(form: str) -> None:
    asked, pair = requests(), alone(form)
    engine = Scheduler(None, **HERE, weights=form, chunk=48, memory="200MB")
    try:
        found = answers(engine, asked)
        assert packed_layers(engine.pair[0]) == packed_layers(pair[0]) > 20
    finally:
        engine.close()
    for request, (text, end) in zip(asked, found, strict=True):
        assert isinstance(end, Finish), end
        with attach(pair[0], request.options.reduce, cache=request.options.cache):
            assert text == stock(pair, request), (form, request.options)


def test_the_server_and_its_parts_on_ray_load_packed_weights() -> None:
    pytest.importorskip("ray")
    from mmfast.serve.ray.deployments import ReplicaSettings

    engine = load_engine(ServerConfig(weights="int8", device="cpu", memory="100MB"))
    try:
        assert packed_layers(engine.pair[0]) > 20  # type: ignore[attr-defined]
    finally:
        engine.close()
    model, _ = ReplicaSettings(None, "cpu", "float32", threads=0, weights="int8").load()
    assert packed_layers(model) > 20


def test_a_batch_is_answered_on_packed_weights_and_never_mixed_with_floats() -> None:
    plain = BatchJob(ASSETS / "clips", ("what?",), device="cpu")
    job = BatchJob(ASSETS / "clips", ("what?",), device="cpu", packed="int8")
    job.check()
    assert packed_layers(Answerer(job)._parts[0]) > 20
    assert packed_layers(Answerer(plain)._parts[0]) == 0
    assert "packed was" in differences(plain.identity(), job.identity())
    earlier = {k: v for k, v in plain.identity().items() if k != "packed"}
    assert differences(earlier, plain.identity()) == ""  # files of older releases go on
    with pytest.raises(MmfastError, match=r"'int3'.*int8"):
        BatchJob(ASSETS / "clips", ("what?",), packed="int3").check()


def cli(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one call."""
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    return int(stop.value.code or 0), *capsys.readouterr()


def test_the_option_is_shown_and_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "serve", "--dry-run", "--json", "--weights", "fastest?error=0.02")
    assert code == 0 and json.loads(out)["weights"] == "fastest?error=0.02"
    wrong = {
        ("--weights", "int3"): "int8",
        ("--weights", "int8", "--lora", "red=/a/b"): "leave out weights or lora",
        ("--weights", "int8", "--engine", "vllm", "--model", "m"): "--weights has no effect",
    }
    for options, words in wrong.items():
        code, out, err = cli(capsys, "serve", "--dry-run", *options)
        assert code != 0 and words in err and err.count("\n") == 1, err
    with pytest.raises(MmfastError, match="would change"):
        Scheduler(alone("int8"), weights="int8")


def test_a_stream_is_watched_on_packed_weights(capsys: pytest.CaptureFixture[str]) -> None:
    question, model = "Which way does the red circle move?", str(ASSETS / "models" / "tiny-video")
    options = ("--fps", "4", "--ask", question, "--device", "cpu", "--model", model)
    floats = cli(capsys, "watch", CLIP, *options)
    packed = cli(capsys, "watch", CLIP, *options, "--weights", "int8")
    assert packed[0] == floats[0] == 0 and packed[1] == floats[1] != ""
    code, _, err = cli(capsys, "watch", CLIP, *options, "--weights", "int3")
    assert code != 0 and "int8" in err
