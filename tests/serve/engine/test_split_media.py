"""The pictures of one request on several encoders: the prompt of one encoder, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from scheduling import ask, clip, image, model_of

from mmfast.models.loading import twin_model
from mmfast.serve.engine.base import Request
from mmfast.serve.engine.encoder import Features, MediaEncoder
from mmfast.serve.engine.slots import Embedded
from mmfast.serve.engine.stages import EncodeStage
from mmfast.serve.ray.deployments import unwrap, wrap

MEDIA = [image(i) for i in range(5)]


@contextmanager
def encoders(family: str, count: int) -> Iterator[list[EncodeStage]]:
    """Stages with models of their own, as in several processes."""
    model, processor = model_of(family)
    made = [EncodeStage(MediaEncoder(twin_model(model), processor)) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.close()
            each.encoder.slicer.close()


def shared(stages: list[EncodeStage], request: Request, reduce: str | None) -> Embedded:
    """Encode the parts apart, carry them as Ray does, and embed with the first encoder."""
    found: Features = {}
    for number, stage in enumerate(stages):
        prepared = stage.encoder.prepare(request, reduce)
        part = stage.part(prepared, number, len(stages)).result(60)
        assert not found.keys() & part.keys()
        found |= unwrap(wrap(part))
    first = stages[0]
    first.encoder.kept.clear()  # nothing but what came
    calls: list[Any] = []
    first.encoder._run = lambda *given: calls.append(given)  # type: ignore[assignment, return-value]
    answer = first.encode(first.encoder.prepare(request, reduce), found).result(60)
    assert not calls  # everything was encoded elsewhere
    return answer


def alone(family: str, request: Request, reduce: str | None) -> Embedded:
    """The prompt of one encoder, one picture at a time, since a batch rounds otherwise."""
    with encoders(family, 1) as (stage,):
        stage.encoder.most = 1
        return stage.encode(stage.encoder.prepare(request, reduce)).result(60)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "llava_onevision"])
@pytest.mark.parametrize("reduce", [None, "divprune:0.5"])
def test_the_prompt_is_that_of_one_encoder(family: str, reduce: str | None) -> None:
    request = ask("a", *MEDIA, "compare them")
    with encoders(family, 5) as stages:
        found = shared(stages, request, reduce)
    wanted = alone(family, request, reduce)
    if family == "llava_onevision":  # cannot tell the pictures of a prompt apart: one part has all
        torch.testing.assert_close(found.embeds, wanted.embeds)
    else:
        assert torch.equal(found.embeds, wanted.embeds)
    assert all(map(torch.equal, found.planes, wanted.planes))
    assert torch.equal(found.positions, wanted.positions) and found.blocks == wanted.blocks
    assert (found.visual_tokens, found.kept_tokens) == (wanted.visual_tokens, wanted.kept_tokens)
    assert found.reused == wanted.reused == 0  # nobody had asked before


def test_parts_are_shares_and_fewer_than_encoders_leave_some_without() -> None:
    request = ask("a", *MEDIA[:2], clip(1, 4), "what?")
    with encoders("qwen2_5_vl", 1) as (stage,):
        prepared = stage.encoder.prepare(request)
        counts = [len(stage.part(prepared, i, 2).result(60)) for i in range(2)]
        assert counts == [2, 1]
        assert [len(stage.part(prepared, i, 5).result(60)) for i in range(5)] == [1, 1, 1, 0, 0]


def test_a_part_of_another_picture_is_seen() -> None:
    """A planted fault: features under the wrong key change the prompt."""
    request = ask("a", *MEDIA[:2], "compare them")
    with encoders("qwen2_5_vl", 1) as (stage,):
        prepared = stage.encoder.prepare(request)
        part = stage.part(prepared, 0, 1).result(60)
        one, two = part
        turned = {one: part[two], two: part[one]}
        wrong = stage.encode(stage.encoder.prepare(request), turned).result(60)
    assert not torch.equal(wrong.embeds, alone("qwen2_5_vl", request, None).embeds)
