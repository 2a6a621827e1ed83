"""A processor whose arguments are merged once gives what it gives when it merges them anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scheduling import clip, image, model_of

from mmfast.models.prompt import chat_inputs
from mmfast.serve.engine.model import settled

FAMILIES = "llava_onevision", "qwen2_5_vl", "llava", "idefics3", "gemma3"


def inputs(processor: Any, seed: int, kind: str = "image", **options: Any) -> dict[str, Any]:
    """Inputs of a question about a new medium."""
    medium = image(seed) if kind == "image" else clip(seed)
    chat = [{"role": "user", "content": [medium.shot, "what is it?"]}]
    return chat_inputs(processor, [chat], torch.device("cpu"), None, options)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if all tensors are equal."""
    assert one.keys() == other.keys()
    return all(
        torch.equal(each, other[name]) if isinstance(each, torch.Tensor) else each == other[name]
        for name, each in one.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_inputs(family: str) -> None:
    processor = model_of(family)[1]
    quick = settled(processor)
    for seed in range(3):
        assert same(inputs(processor, seed), inputs(quick, seed))
        assert same(
            inputs(processor, seed, do_normalize=False), inputs(quick, seed, do_normalize=False)
        )
    assert not same(inputs(quick, 0), inputs(quick, 0, do_normalize=False))


def test_equal_clips() -> None:
    processor = model_of("qwen2_5_vl")[1]
    quick = settled(processor)
    assert all(
        same(inputs(processor, seed, "video"), inputs(quick, seed, "video")) for seed in range(2)
    )


def test_merged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = model_of("llava")[1]
    calls: list[dict[str, Any]] = []
    merge = processor._merge_kwargs

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return merge(*args, **kwargs)

    monkeypatch.setattr(processor, "_merge_kwargs", counted)
    quick = settled(processor)
    for seed in range(4):
        inputs(quick, seed)
    assert len(calls) == 1
    inputs(quick, 0, do_normalize=False)
    assert len(calls) == 2
    assert processor._merge_kwargs is counted  # the user's own processor is as it was


def test_a_processor_without_the_merge_is_returned() -> None:
    plain = object()
    assert settled(plain) is plain
