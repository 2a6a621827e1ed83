"""Files of learned modules: reading one disturbs nothing, and what is wrong is told early."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import Tiny, generate, tiny
from torch import nn

from mmfast import ModelError
from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.compressors.llava_mini import LlavaMini
from mmfast.compressors.query_compressor import QueryCompressor
from mmfast.compressors.storm import Storm
from mmfast.rankers import bavit, top

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "llava_mini": (lambda: LlavaMini(16, 1, (4, 4), inner=12, heads=3), base.load),
    "query_compressor": (lambda: QueryCompressor(16, 1, (4, 4), inner=12, heads=3), base.load),
    "storm": (lambda: Storm(16, 1, (4, 4), inner=8), base.load),
    "top": (lambda: top.RankHead(16, 2, inner=12, heads=3), top.load),
    "bavit": (lambda: bavit.BackgroundVit(16, inner=12), bavit.load),
}


@pytest.mark.parametrize("name", list(MODULES))
def test_reading_a_file_leaves_the_callers_seed_alone(name: str, tmp_path: Path) -> None:
    """The first sampled answer under a seed is that of the second call."""
    make, read = MODULES[name]
    base.save(make(), path := tmp_path / "weights.safetensors")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    read(path)
    assert torch.equal(torch.rand(4), expected)


def test_a_default_device_is_not_that_of_a_file(tmp_path: Path) -> None:
    base.save(MODULES["storm"][0](), path := tmp_path / "weights.safetensors")
    with torch.device("meta"):
        found = base.load(path)
    assert {each.device.type for each in (*found.parameters(), *found.buffers())} == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_read_for_an_answer_serve_training_too(dtype: torch.dtype, tmp_path: Path) -> None:
    base.save(MODULES["storm"][0](), path := tmp_path / "weights.safetensors")
    x = torch.randn(2, 16, 16, dtype=dtype, requires_grad=True)
    with torch.inference_mode():
        base.placed(str(path), x.device, dtype)
    base.placed(str(path), x.device, dtype)(x).vectors.sum().backward()
    assert x.grad is not None and bool(x.grad.any())


@pytest.mark.parametrize(
    "header",
    [
        "null", "[]", "7", '"storm"', '{"name": 3}', '{"name": "storm", "width": 0}',
        '{"name": "storm", "width": 16, "tokens": 1, "grid": [4]}',
        '{"name": "storm", "width": 16, "tokens": 1, "grid": null}',
        '{"name": "storm", "width": 16, "tokens": 1, "grid": [4, 4], "stride": 0}',
        '{"name": "compllm", "width": 16, "tokens": 2, "shapes": {}, "rank": 0}',
        '{"name": "compllm", "width": 16, "tokens": 2, "shapes": [1]}',
    ],
)  # fmt: skip
def test_a_header_of_another_kind_is_one_line(header: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(MODULES["storm"][0]().state_dict(), path, {"compressor": header})
    for read in (base.load, top.load):
        with pytest.raises(ModelError, match=r"weights.safetensors' cannot be read") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def one(this: Tiny) -> dict[str, Any]:
    return dict(this.inputs(["on {image} what?"], images=this.images(1)))


def test_what_is_wrong_with_a_file_is_told_by_attach(tmp_path: Path) -> None:
    """And not by the first prompt, which a server would have to answer."""
    model, path = tiny("llava").model, tmp_path / "weights.safetensors"
    base.save(Storm(32, 4, (6, 6), inner=8), path)
    narrow = tmp_path / "narrow.safetensors"
    base.save(Storm(16, 4, (6, 6), inner=8), narrow)
    for spec, words in {
        f"storm:4?path={tmp_path / 'none'}": "none' cannot be read",
        f"storm:1?path={path}": "is a storm:4 for a model of width 32, not a storm:1",
        f"storm:4?path={narrow}": "is a storm:4 for a model of width 16, not a storm:4 for one of",
        f"query_compressor:4?path={path}": "holds a 'storm', not a 'query_compressor'",
    }.items():
        with pytest.raises(ModelError, match=re.escape(words)) as caught:
            attach(model, spec)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["storm:4", "bavit:4", "top@llm1:4"])
def test_a_relative_path_is_that_of_the_folder_it_was_written_in(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this = tiny("llava")
    made: dict[str, nn.Module] = {
        "storm:4": Storm(32, 4, (6, 6), inner=8),
        "bavit:4": bavit.BackgroundVit(32, inner=12),
        "top@llm1:4": top.RankHead(32, 1, inner=12, heads=3),
    }
    base.save(made[name], tmp_path / "weights.safetensors")
    monkeypatch.chdir(tmp_path)
    with attach(this.model, f"{name}?path=weights.safetensors") as trace:
        monkeypatch.chdir("/")
        generate(this, one(this), 1)
    assert [r.m for _, _, r in trace.reductions] == [4]
