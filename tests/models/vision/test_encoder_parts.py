"""Parts of the faster tower: segments, patches, compiled blocks, recorded passes."""

from __future__ import annotations

import gc
import shutil
import weakref
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from encoder_checks import CLOSE, features, ragged
from oracles_ops import segment_attention_reference
from tiny_models import tiny
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from tower_checks import GRIDS, onevision, pixels, qwen

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import tower_of
from mmfast.models.packing import WeightPlan, pack_weights
from mmfast.models.vision import acceleration as fast
from mmfast.models.vision.acceleration import (
    TowerGraphs,
    as_linear,
    fast_encoder,
    patch_convolutions,
    prepared,
)
from mmfast.ops.attention import (
    groups_of,
    runs_of,
    segment_attention,
    widened,
)
from mmfast.ops.weight_forms import has_onednn

WAITS = (DataDependentOutputException, DynamicOutputShapeException)
LENGTHS = [(5,), (4, 4, 4), (3, 7, 3, 3, 1), (2, 5, 2, 9, 5)]


def packed(lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(sum(lengths))
    size = (sum(lengths), 3, 8)
    q, k, v = (torch.randn(size, generator=generator, dtype=dtype) for _ in range(3))
    bias = torch.randint(1, 5, (sum(lengths),), generator=generator).to(dtype).log()
    return q, k, v, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), bias


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_segments_against_the_formula(lengths: tuple[int, ...], biased: bool) -> None:
    q, k, v, ends, bias = packed(lengths)
    doubles = [x.double() for x in (q, k, v)]
    weights = bias.double() if biased else None
    expected = segment_attention_reference(*doubles, ends, scale=0.3, bias=weights)
    found = segment_attention(q, k, v, ends, scale=0.3, bias=bias if biased else None)
    torch.testing.assert_close(found, expected.float(), atol=2e-6, rtol=2e-6)
    # Views into a larger tensor, as the towers give them.
    wide = torch.stack([q, k, v]).permute(1, 2, 0, 3)
    views = [wide[:, :, i] for i in range(3)]
    again = segment_attention(*views, ends, scale=0.3, bias=bias if biased else None)
    assert torch.equal(again, found)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_segments_apart_change_no_bit(lengths: tuple[int, ...]) -> None:
    q, k, v, ends, _ = packed(lengths)
    found = segment_attention(q, k, v, ends, scale=0.3)
    for part in (slice(a, b) for a, b in pairwise(ends.tolist())):
        alone = [x[part].transpose(0, 1)[None] for x in (q, k, v)]
        expected = nn.functional.scaled_dot_product_attention(*alone, scale=0.3)
        assert torch.equal(found[part], expected[0].transpose(0, 1))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_rows_by_length_cover_every_token_once(lengths: tuple[int, ...]) -> None:
    """How other devices than the CPU take segments together."""
    q, k, v, ends, bias = packed(lengths)
    expected = segment_attention(q, k, v, ends, scale=0.3, bias=bias)
    groups = groups_of(lengths)
    assert len(groups) == len(set(lengths)) <= len(runs_of(lengths))
    every = torch.arange(sum(lengths))
    assert torch.equal(torch.cat([every[rows] for _, rows in groups]).sort().values, every)
    fresh = ends.clone()
    fresh._mmfast_parts = (q.device, groups)  # type: ignore[attr-defined]
    assert torch.equal(segment_attention(q, k, v, fresh, scale=0.3, bias=bias), expected)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-4)])
def test_a_bias_rides_in_extra_channels(dtype: torch.dtype, limit: float) -> None:
    """The form for flash kernels, which take no mask."""
    q, k, _, _, bias = packed((9,), dtype)
    wide_q, wide_k = (x.double() for x in widened(q, k, bias, 0.3))
    found = torch.einsum("qhd,khd->hqk", wide_q, wide_k) * 0.3
    expected = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.3 + bias.double()
    assert (found - expected).abs().max() < limit
    assert wide_q.shape[-1] % 8 == 0


@pytest.mark.parametrize("bias", [True, False])
def test_patches_by_a_product(bias: bool) -> None:
    flat = nn.Conv2d(3, 8, (4, 5), (4, 5), bias=bias)
    deep = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=bias)
    for conv, size in ((flat, (2, 3, 9, 21)), (deep, (6, 3, 2, 4, 4)), (deep, (2, 3, 4, 9, 8))):
        x = torch.randn(size)
        expected, found = conv(x), as_linear(conv, conv, x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.flatten(2), expected.flatten(2), atol=1e-5, rtol=1e-5)


def test_only_convolutions_that_cut_into_patches_are_taken() -> None:
    keep = [nn.Conv2d(3, 8, 4, 4), nn.Conv3d(3, 8, 2, 2), nn.Conv2d(3, 8, 4, 4, padding="valid")]
    others = [
        nn.Conv2d(3, 8, 4, 2),
        nn.Conv2d(4, 8, 4, 4, groups=2),
        nn.Conv2d(3, 8, 4, 4, padding=1),
        nn.Conv2d(3, 8, 4, 4, dilation=2),
        nn.Conv2d(3, 8, 1, 1),
        nn.ConvTranspose2d(3, 8, 4, 4),
    ]
    assert patch_convolutions(nn.Sequential(*others, *keep)) == keep


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
def test_compiled_blocks(monkeypatch: Any) -> None:
    """Once for all blocks of a class."""
    torch.compiler.reset()
    model, frames = onevision(), torch.randn(1, 3, 3, 20, 20)
    compiled, stock = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: compiled.append(f) or stock(f, **k))
    expected = features(model, "video", {"pixel_values_videos": frames})
    with fast_encoder(model, "compile"):
        found = features(model, "video", {"pixel_values_videos": frames})
    torch.testing.assert_close(found, expected, **CLOSE)
    assert compiled == [type(tower_of(model).blocks[0]).forward]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs a C++ compiler")
@pytest.mark.skipif(not has_onednn(), reason="the processor multiplies no bfloat16")
def test_compiled_blocks_on_packed_weights() -> None:
    """What oneDNN has laid out is no tensor that a compiler can read."""
    torch.compiler.reset()
    model = qwen("qwen2_5_vl").bfloat16()
    call = {"pixel_values_videos": pixels(GRIDS).bfloat16(), "video_grid_thw": GRIDS}
    expected = features(model, "video", call)
    assert pack_weights(model, WeightPlan(tower="bfloat16")).layers
    with fast_encoder(model, "compile"):
        found = features(model, "video", call)
    assert (found - expected).norm() < 0.02 * expected.norm()


class Recorder:
    """Stands in for CUDA graphs: repeats a call into the memory of the first one's output."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, run: Any) -> Any:
        output = run()
        self.calls += 1

        def repeat() -> None:
            fresh = run()
            for name, value in output.items():
                _overwrite(value, fresh[name])

        return repeat, output


def _overwrite(old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif old is not None:
        for one, other in zip(old, new, strict=True):
            _overwrite(one, other)


@pytest.mark.parametrize("name", ["siglip", "qwen2_5_vl", "qwen3_vl"])
def test_recorded_passes(name: str, monkeypatch: Any) -> None:
    """Another shape is another record; what a pass gave is not overwritten by the next."""
    recorder = Recorder()
    monkeypatch.setattr(fast, "TowerGraphs", lambda: TowerGraphs(recorder))
    monkeypatch.setattr("mmfast.models.vision.acceleration.check_encoder", lambda *_: None)
    model = onevision() if name == "siglip" else qwen(name)
    calls = [_call(name, seed, count) for seed, count in ((0, 2), (1, 2), (2, 1))]
    expected = [features(model, "video", call) for call in calls]
    for _ in range(2):  # the second time nothing is recorded anew
        with fast_encoder(model, "graph"):
            found = [features(model, "video", call) for call in calls]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
    assert recorder.calls == 2
    with fast_encoder(model, "graph"), torch.enable_grad():
        features(model, "video", calls[0])
    assert recorder.calls == 2


def _call(name: str, seed: int, count: int) -> dict[str, Any]:
    if name == "siglip":
        generator = torch.Generator().manual_seed(seed)
        return {"pixel_values_videos": torch.randn(1, count, 3, 20, 20, generator=generator)}
    return {"pixel_values_videos": pixels(GRIDS[:count], seed), "video_grid_thw": GRIDS[:count]}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_what_a_graph_reads_is_kept_with_it(name: str) -> None:
    """A graph knows the addresses of its inputs, not the tensors: freed ones hold other numbers."""
    read: list[weakref.ref[torch.Tensor]] = []

    def record(run: Any) -> tuple[Any, Any]:
        given = [*run.args, *run.keywords.values()]
        read.extend(weakref.ref(each) for each in given if isinstance(each, torch.Tensor))
        return (lambda: None), run()

    model = qwen(name)
    graphs, tower = TowerGraphs(record), tower_of(model)
    grid = GRIDS[:1]
    with torch.no_grad():
        graphs.around(tower, tower.module.forward, pixels(grid, 0), grid_thw=grid.clone())
    gc.collect()
    assert len(read) > 3
    assert all(each() is not None for each in read)


def test_few_shapes_are_kept(monkeypatch: Any) -> None:
    monkeypatch.setattr(fast, "KEPT", 1)
    recorder, model = Recorder(), onevision()
    graphs, tower = TowerGraphs(recorder), tower_of(model)
    for count in (1, 2, 1):
        graphs.around(tower, tower.module, torch.randn(count, 3, 20, 20))
    assert recorder.calls == 3
    assert len(graphs) == 1


@pytest.mark.parametrize("family", ["llava", "llava_next", "gemma3", "internvl"])
def test_recorded_passes_of_other_towers(family: str, monkeypatch: Any) -> None:
    """Whatever the name by which pixels come; and nothing waits for the device."""
    recorder, this = Recorder(), tiny(family)
    monkeypatch.setattr(fast, "TowerGraphs", lambda: TowerGraphs(recorder))
    monkeypatch.setattr("mmfast.models.vision.acceleration.check_encoder", lambda *_: None)
    call, tower = ragged(this, "image"), tower_of(this.model)
    expected = features(this, "image", call)
    with fast_encoder(this.model, "graph"):
        for _ in range(2):
            torch.testing.assert_close(features(this, "image", call), expected, **CLOSE)
    assert recorder.calls == 1
    pixels = call["pixel_values"].flatten(0, -4)
    with fast_encoder(this.model, "fast"), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        output = tower.module(fake.from_tensor(pixels))
        assert output.last_hidden_state.shape[0] == len(pixels)


@pytest.mark.parametrize("family", ["idefics3", "smolvlm", "lfm2_vl", "fast_vlm"])
def test_towers_that_cannot_be_recorded(family: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("mmfast.models.vision.acceleration.check_encoder", lambda *_: None)
    with pytest.raises(ModelError, match=r"repeats passes of one shape.*use encoder='compile'"):
        fast_encoder(tiny(family).model, "graph").__enter__()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_nothing_of_a_recorded_pass_waits_for_the_device(name: str) -> None:
    """Reading one value of a tensor on the host would break a CUDA graph; fake tensors refuse."""
    model = qwen(name)
    tower, x = tower_of(model), pixels(GRIDS)
    with fast_encoder(model, "fast"):
        known = prepared(tower, GRIDS)
        expected = tower.module(x, grid_thw=GRIDS)
        found = tower.module(x, grid_thw=GRIDS, **known)
        assert torch.equal(found.pooler_output, expected.pooler_output)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            unknown = fake.from_tensor(x)
            grid = fake.from_tensor(GRIDS)
            output = tower.module(unknown, grid_thw=grid, **known)
            assert output.pooler_output.shape == expected.pooler_output.shape
            with pytest.raises(WAITS):
                tower.module(unknown, grid_thw=grid)
