"""Edges of the reference implementations that no recorded file has, from independent oracles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_files import FILES, GOLDEN, load, parts, record
from oracles_policies import POLICIES
from oracles_reference import REFERENCES
from reducer_checks import reduce
from torch import Tensor

import mmfast
from mmfast import SpecError, Tokens
from mmfast.bench.cache_parity import CACHE_DRIVERS, PREFILL_DRIVERS
from mmfast.bench.gate import verify

Case = tuple[dict[str, Tensor], dict[str, Any]]


def seeded(*words: object) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, " ".join(map(str, words)))))


def test_every_recorded_method_has_a_second_oracle() -> None:
    methods = {path.stem.rpartition("-")[0] for path in FILES}
    assert methods == {*REFERENCES, *POLICIES} and {*POLICIES} == {*CACHE_DRIVERS, *PREFILL_DRIVERS}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_oracles_reproduce_the_recorded_files(path: Path) -> None:
    arrays, metadata = load(path)
    wanted = parts(arrays, "out")
    rule = {**REFERENCES, **POLICIES}[metadata["method"]]
    found = rule(parts(arrays, "in"), json.loads(metadata["params"]))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        limits = (1e-4, 1e-5) if array.dtype.kind == "f" else (0, 0)
        assert np.allclose(found[name], array, *limits), name


def rows(*shape: int, seed: object = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed, shape))


def probabilities(*shape: int, seed: object = 0) -> Tensor:
    return (3 * rows(*shape, seed=seed)).softmax(-1)


def video(frames: int, n: int, width: int = 12) -> Tensor:
    """Frames that change by a little more at every place, `[T, n, width]`."""
    scene, noise = rows(1, n, width, seed=n), rows(frames, n, width, seed=frames)
    return scene + noise * torch.linspace(0.02, 1.5, n)[:, None]


def divprune() -> Iterator[Case]:
    for n, ratio in ((24, 0), (24, 1.0), (7, 0.5), (5, 0.5), (2, 1), (2, 0.5), (30, 0.02)):
        yield {"x": rows(n, 8, seed=ratio)}, {"ratio": ratio}


def visionzip() -> Iterator[Case]:
    for batch, n, dominant, contextual in (
        (1, 20, 0, 3),
        (2, 20, 0, 20),
        (2, 20, 12, 8),
        (1, 20, 19, 1),
        (1, 21, 6, 8),
        (3, 9, 2, 1),
    ):
        inputs = {
            "cls_attn": probabilities(batch, 2, n + 1),
            "hidden": rows(batch, n + 1, 6),
            "metric": rows(batch, n + 1, 5),
        }
        yield inputs, {"dominant": dominant, "contextual": contextual}


def hiprune() -> Iterator[Case]:
    for crops, retention, alpha in (
        (1, 20, 0),
        (1, 125, 0.1),
        (1, 576, 1.0),
        (3, 2, 0.1),
        (2, 201, 0.9),
        (2, 1152, 0.3),
    ):
        inputs = {f"attn_{w}": probabilities(crops, 2, 2, 577, seed=w) for w in ("object", "deep")}
        yield inputs, {"retention": retention, "alpha": alpha}
    # Two anchors side by side: 8 tokens, which a fifth of the budget as their limit would halve.
    middle = torch.zeros(1, 1, 1, 577)
    middle[..., 301], middle[..., 302] = 0.6, 0.4
    inputs = {"attn_object": middle, "attn_deep": probabilities(1, 1, 1, 577)}
    yield inputs, {"retention": 9, "alpha": 1.0}


def hired() -> Iterator[Case]:
    for partitions, rate, alpha in (
        ([5], 1.0, 0.5),
        ([1, 5, 3], 0.3, 0.25),
        ([1, 1], 1, 1),
        ([3], 0.001, 0.5),
        ([5], 0.2, 0),
        ([5, 3], 0.15, 1.0),
        ([3], 0.9, 0.01),
    ):
        shape = (sum(partitions), 2, 25)
        inputs = {f"{w}_layer_cls_attn": probabilities(*shape, seed=w) for w in ("first", "late")}
        params = {"n_tokens": 24, "num_partitions": partitions, "rate": rate, "alpha": alpha}
        yield inputs, params


def fastv() -> Iterator[Case]:
    for start, length, r in ((3, 20, 0), (3, 20, 1.0), (0, 30, 0.5), (4, 5, 0.5), (29, 1, 0.6)):
        yield {"attn": probabilities(3, 30)}, {"image_start": start, "image_len": length, "r": r}


def holitom() -> Iterator[Case]:
    for frames, n, ratio, tau, knobs in (
        (1, 9, 0.3, 0.8, {}),
        (6, 10, 1.0, 0.8, {}),
        (6, 10, 1, 0.8, {"beta": 1.0}),
        (6, 10, 0.05, 0.8, {}),
        (5, 9, 0.5, -1.0, {}),
        (5, 9, 0.5, 1.0, {}),
        (7, 12, 0.4, 0.7, {"max_window_size": 1}),
        (7, 12, 0.4, 0.7, {"max_window_size": 2, "K": 2}),
        (7, 12, 0.4, 0.7, {"K": 50, "beta": 0}),
        (4, 1, 0.5, 0.5, {}),
    ):
        inputs = {"x": video(frames, n), "attn": probabilities(frames, n)}
        params = {"D": 0.0, "K": 7, "beta": 0.6, "max_window_size": 1024, **knobs}
        yield inputs, {**params, "retain_ratio": ratio, "tau": tau}


def dtd() -> Iterator[Case]:
    for grid, threshold, absolute in (
        ((6, 3, 4), -1.0, True),
        ((6, 3, 4), 0.7, True),
        ((1, 3, 5), 0.5, True),
        ((1, 3, 5), 0.5, False),
        ((5, 2, 3), 0.0, False),
        ((4, 3, 3), 1.0, False),
    ):
        sides = dict(zip("THW", grid, strict=True))
        x = video(grid[0], grid[1] * grid[2]).flatten(0, 1)
        yield {"x": x}, {"threshold": threshold, "absolute": absolute, **sides}


def litevggt() -> Iterator[Case]:
    for grid in ((2, 4, 2), (2, 8, 2), (2, 16, 2)):
        frames, height, width = grid
        pixels = rows(frames, 3, 4 * height, 4 * width, seed="pixels")
        pixels[:, :, [0, -1]] = pixels[..., [0, -1]] = 0  # what lies behind the border
        x = video(frames, height * width, 32).flatten(0, 1)
        yield {"x": x, "pixels": pixels}, dict(zip("THW", grid, strict=True))


def evs() -> Iterator[Case]:
    for grid, q in (
        ((6, 3, 4), 0),
        ((6, 3, 4), 1.0),
        ((6, 3, 4), 0.99),
        ((1, 3, 5), 0.5),
        ((2, 1, 1), 0.1),
        ((10, 1, 2), 0.9),
        ((5, 3, 7), 0.3),
    ):
        frames, height, width = grid
        for merge in (1, 2):
            x = video(frames, height * width).flatten(0, 1)
            sides = {"H": height * merge, "W": width * merge, "spatial_merge_size": merge}
            yield {"x": x}, {"T": frames, "q": q, **sides}


def tome() -> Iterator[Case]:
    for batch, n, r, special, sized in (
        (2, 8, 0, (False, False), False),
        (1, 9, -3, (True, False), True),
        (2, 8, 99, (False, False), True),
        (2, 9, 99, (True, True), False),
        (2, 10, 3, (False, True), True),
        (1, 2, 1, (False, False), False),
        (1, 3, 1, (True, False), False),
        (1, 1, 1, (False, False), False),
        (1, 1, 5, (True, False), True),
    ):
        inputs = {"metric": rows(batch, n, 6), "x": rows(batch, n, 5)}
        if sized:
            inputs["size"] = torch.randint(1, 9, (batch, n, 1), generator=seeded(n)).float()
        yield inputs, {"r": r, "class_token": special[0], "distill_token": special[1]}


def class_keys(loud: list[int], n: int, width: int = 8) -> dict[str, Tensor]:
    """Class query, keys and features of as many images, some tokens of each loud in attention."""
    query = rows(len(loud), 1, width, seed=n)
    keys = 0.3 * rows(len(loud), n + 1, width, seed=sum(loud))
    for item, count in enumerate(loud):
        spots = torch.randperm(n, generator=seeded(item, count))[:count] + 1
        strength = torch.linspace(2.5, 3.5, count)[:, None]
        keys[item, spots] += strength * query[item] * width**0.5 / query[item].square().sum()
    return {"q_cls": query, "k": keys, "features": rows(len(loud), n, 5, seed=loud)}


def prumerge() -> Iterator[Case]:
    for loud, n, adaptive, ratio in (
        ([3], 40, False, 1.0),
        ([3, 0], 40, False, 1),
        ([3], 40, False, 0),
        ([2], 33, False, 0.5),
        ([2], 33, False, 0.999),
        ([7, 2], 49, True, 0.125),
        ([0, 11], 64, True, 0.125),
        ([5, 5, 1], 50, True, 0.125),
        ([0, 0], 40, True, 0.125),
    ):
        yield class_keys(loud, n), {"adaptive": adaptive, "ratio": ratio}


def prumerge_plus() -> Iterator[Case]:
    for loud, adaptive, ratio in (
        ([9], False, 1.0),
        ([9, 4], False, 0.6),
        ([9], False, 0.5),
        ([9], False, 1 / 3),
        ([9], False, 0.01),
        ([9], False, 0.001),
        ([130], True, 0.125),
        ([100], True, 0.125),
        ([1], True, 0.125),
    ):
        yield class_keys(loud, 576), {"adaptive": adaptive, "ratio": ratio}


def dycoke() -> Iterator[Case]:
    for frames, n, ratio in (
        (5, 6, 0.0),
        (8, 7, 0),
        (9, 6, 1.0),
        (7, 5, 0.3),
        (6, 1, 0.0),
        (12, 20, 0.9),
        (10, 4, 0.5),
        (11, 9, 0.05),
    ):
        x = video(frames, n).flatten(0, 1)
        yield {"x": x}, {"tokens_per_frame": n, "merging_ratio": ratio}


def stc_pruner() -> Iterator[Case]:
    for model, n, chunks, keep, width in (
        ("clip", 144, [3], 144, 7),
        ("clip", 144, [1, 2, 1], 1, 9),
        ("llava_vid", 169, [2, 1], 0, 6),
        ("llava_vid", 169, [1], 169, 6),
    ):
        x = video(sum(chunks), n, width).flatten(0, 1)
        yield {"x": x}, {"model": model, "chunk_frames": chunks, "keep_per_frame": keep}


def vidcom2() -> Iterator[Case]:
    for frames, n, scale, width in ((1, 9, 0.3, 8), (5, 9, 1.0, 7), (5, 9, 0.001, 9), (4, 7, 0, 8)):
        x = video(frames, n, width).flatten(0, 1)
        yield {"x": x}, {"model": "llava_ov", "tokens_per_frame": n, "base_scale": scale}


def framefusion() -> Iterator[Case]:
    for frames, n, tau, keep in ((1, 9, 0.6, 0), (6, 5, -1.0, 0), (6, 5, 1.1, 0), (2, 7, 0.0, 8)):
        params = {"frame_tokens": n, "tau": tau, "keep": keep or None}
        yield {"x": video(frames, n).flatten(0, 1)}, params


def prunevid() -> Iterator[Case]:
    for frames, n, tau, share, ratio in (
        (1, 20, 0.8, 0.25, 0.5),
        (5, 6, 0.8, 1.0, 0.5),
        (9, 15, -1.0, 0.4, 0.1),
        (9, 20, 1.1, 0.4, 1.0),
    ):
        params = {"tau": tau, "temporal_segment_ratio": share, "cluster_ratio": ratio}
        yield {"x": video(frames, n)}, params


def v_cast() -> Iterator[Case]:
    for frames, n, ratio in ((3, 9, 0.01), (6, 5, 1.0), (1, 12, 0.3)):
        yield {"x": video(frames, n)}, {"retain_ratio": ratio}


def holitom_inner() -> Iterator[Case]:
    for first, n, behind, r in ((0, 9, 1, 0.9), (4, 20, 3, 0.0), (2, 21, 0, 0.5)):
        length = first + n + behind
        inputs = {"x": rows(length, 8, seed=n), "attn": probabilities(2, length, seed=n)}
        yield inputs, {"image_start": first, "image_len": n, "r": r}


def dart() -> Iterator[Case]:
    for first, n, text, pivots, words, ratio in ((0, 20, 3, 1, 1, 0.5), (5, 16, 9, 4, 4, 0.9)):
        inputs = {"states": rows(first + n + text, 8), "keys": rows(2, first + n + text, 4)}
        pivot = {"pivot_image_token": pivots, "pivot_text_token": words}
        yield inputs, {"image_start": first, "image_len": n, "reduction_ratio": ratio, **pivot}


def ivc_prune() -> Iterator[Case]:
    for first, n, text in ((0, 10, 3), (3, 40, 9)):
        length = first + n + text
        inputs = {"values": rows(length, 2, 4), "rope": rows(1, length, 4, 2).clamp(-1, 1)}
        yield inputs, {"image_start": first, "image_len": n}


def sparsevlm() -> Iterator[Case]:
    for n, words, keep in ((30, 4, 10), (90, 9, 20)):
        attn = probabilities(2, words, n, seed=n)
        inputs = {"x": rows(n, 8, seed=n), "query": rows(words, 8, seed=n), "attn": attn}
        yield inputs, {"keep": keep}


def fastvid() -> Iterator[Case]:
    for frames, n, ratio, every, context in ((1, 9, 0.5, 4, 0.4), (6, 8, 0.9, 2, 1.0)):
        knobs = {"c": 2, "tau": 0.9, "d": context, "p": every, "beta": 0.6}
        inputs = {"x": video(frames, n), "attn": probabilities(frames, n, seed=n)}
        yield inputs, {"retention_ratio": ratio, **knobs}


def gemfilter() -> Iterator[Case]:
    for heads, groups, n, topk in ((2, 2, 3, 1), (4, 1, 20, 20), (4, 2, 21, 5)):
        inputs = {"query": rows(1, heads, 1, 4, seed=n), "key": rows(1, groups, n, 4, seed=n)}
        yield inputs, {"topk": topk}


def pyramiddrop() -> Iterator[Case]:
    for tokens, first, words, ratios in ((9, 0, 1, [1, 0.12]), (20, 4, 6, [0.5, 0.45])):
        inputs = {"query": rows(1, 2, 1, 4, seed=tokens), "key": rows(1, 2, 30, 4, seed=tokens)}
        lists = {"image_tokens": [tokens], "image_index": [first], "prompt_len": [words]}
        yield inputs, {**lists, "ratios": ratios}


def saint() -> Iterator[Case]:
    for n, tau, votes, gamma in (
        (2, 0.5, 1, 10.0),
        (1, 0.5, 1, 10.0),
        (9, 1.1, 1, 2.0),
        (40, 0, 9, 0),
    ):
        params = {"sim_threshold": float(tau), "K": votes, "gamma": float(gamma)}
        yield {"keys": rows(1, n, 6, seed=n)}, params
    for n, keep, part in ((9, 10, 4), (9, 9, 9), (33, 2, 3), (40, 21, 1)):
        yield {"keys": rows(2, n, 6, seed=n)}, {"keep_num": keep, "r": part}


def vispruner() -> Iterator[Case]:
    for n, count, important in ((17, 5, 0.5), (9, 1, 0.0), (40, 13, 1.0), (33, 32, 0.2)):
        inputs = {"features": rows(2, n, 8, seed=n), "attn": probabilities(2, 3, n, seed=n)}
        yield inputs, {"visual_token_num": count, "important_ratio": important}


def pixelprune() -> Iterator[Case]:
    for sides, merge, metric, threshold, anchored in (
        ([(1, 1)], 1, "max", 0.1, True),
        ([(1, 9)], 1, "max", 0.2, True),
        ([(9, 1), (2, 3)], 1, "rmse", 0.2, True),
        ([(5, 7)], 2, "rmse", 0.25, False),
        ([(5, 7)], 2, "mae", 0, True),
        ([(5, 7)], 2, "exact", 0.7, True),
        ([(5, 7)], 2, "max", 5.0, True),
    ):
        total = sum(h * w for h, w in sides)
        shade = torch.randint(0, 4, (total, 1), generator=seeded(sides)) / 4
        pixels = shade.expand(total, merge * merge * 3) + 0.13 * rows(total, merge * merge * 3)
        pixels = torch.where(rows(total, 1) > 0, pixels, shade)  # some are exactly flat
        inputs = {
            "pixel_values": pixels.reshape(total * merge * merge, 3),
            "grid_thw": torch.tensor([(1, h * merge, w * merge) for h, w in sides]),
        }
        knobs = {"metric": metric, "threshold": threshold, "anchored": anchored}
        yield inputs, {"spatial_merge_size": merge, **knobs}


def cdpruner() -> Iterator[Case]:
    for batch, n, texts, keep in ((2, 12, 1, 12), (1, 12, 2, 1), (2, 12, 3, 0), (3, 9, 1, 4)):
        inputs = {
            "features": rows(batch, n, 16),
            "image_embeds": rows(batch, n, 10),
            "text_embeds": rows(texts, 10),
        }
        yield inputs, {"keep": keep}


def script() -> Iterator[Case]:
    for batch, n, texts, keep in ((2, 12, 1, 12), (1, 12, 2, 1), (2, 12, 5, 0), (3, 9, 3, 4)):
        inputs = {
            "features": rows(batch, n, 16),
            "image_embeds": rows(batch, n, 10),
            "text_embeds": rows(texts, 10),
        }
        yield inputs, {"keep": keep}


def fastkv() -> Iterator[Case]:
    for heads, groups, n, window, length in ((2, 2, 12, 4, 12), (4, 1, 20, 8, 9), (2, 1, 9, 1, 4)):
        inputs = {"query": rows(heads, n, 4, seed=n), "keys": rows(groups, n, 4, seed=n)}
        yield inputs, {"window_size": window, "kernel_size": 3, "tsp_length": length}


def visiondrop() -> Iterator[Case]:
    for first, n, dominant, contextual in (
        (0, 9, 8, 1),
        (3, 20, 0, 3),
        (2, 12, 4, 8),
        (1, 15, 3, 5),
    ):
        shape = (2, first + n + 2, 4)
        inputs = {"query": rows(*shape, seed=n), "key": rows(*shape, seed=-n)}
        inputs["x"] = rows(shape[1], 6)
        counts = {"dominant": dominant, "contextual": contextual}
        yield inputs, {"image_start": first, "image_len": n, **counts}


def audio_prune() -> Iterator[Case]:
    for batch, n, rate in ((1, 2, 0.5), (2, 10, 1.0), (1, 30, 0.01)):
        inputs = {"query": rows(batch, 2, n, 4, seed=n), "key": rows(batch, 2, n, 4, seed=-n)}
        yield inputs, {"keep_rate": rate}


def prunevid_inner() -> Iterator[Case]:
    for first, n, alpha in ((0, 9, 0.01), (3, 20, 1.0), (2, 1, 1.0)):
        shape = (2, first + n + 3, 4)
        inputs = {"query": rows(*shape, seed=n), "key": rows(*shape, seed=-n)}
        yield inputs, {"image_start": first, "image_len": n, "alpha": alpha}


def adaptinfer() -> Iterator[Case]:
    for first, n, words, keep in ((0, 9, 1, 8), (3, 20, 6, 0), (2, 5, 4, 4)):
        shape = (2, first + n + words, 4)
        inputs = {"query": rows(*shape, seed=n), "key": rows(*shape, seed=-n)}
        yield inputs, {"image_start": first, "image_len": n, "keep": keep}


def info_rank() -> Iterator[Case]:
    for n, width, keep in ((5, 9, 0), (6, 6, 6), (20, 4, 3), (1, 3, 1)):
        yield {"x": rows(n, width, seed=n)}, {"keep": keep, "sys_length": n}


CASES: Mapping[str, Callable[[], Iterator[Case]]] = {name: globals()[name] for name in REFERENCES}
NUMBERED = [
    pytest.param(name, case, id=f"{name}-{number}")
    for name, cases in CASES.items()
    for number, case in enumerate(cases())
]


@pytest.mark.parametrize(("name", "case"), NUMBERED)
def test_edges_of_the_reference(name: str, case: Case, tmp_path: Path) -> None:
    record(tmp_path / f"{name}-1.safetensors", *case)
    (row,) = verify(tmp_path)
    assert row.ok, (case[1], row.detail)


@pytest.mark.parametrize("name", sorted(CASES))
def test_half_precision_inputs_count_as_they_are(name: str, tmp_path: Path) -> None:
    """Inputs in bfloat16 give what their values give in float32."""
    arrays, metadata = load(GOLDEN / f"{name}-1.safetensors")
    inputs = {n[3:]: a for n, a in arrays.items() if n.startswith("in.")}
    half = {n: a.bfloat16() if a.is_floating_point() else a for n, a in inputs.items()}
    record(tmp_path / f"{name}-1.safetensors", half, json.loads(metadata["params"]))
    (row,) = verify(tmp_path)
    assert row.ok, row.detail


def test_a_batch_of_two_has_one_share_of_outliers() -> None:
    inputs, params = class_keys([7, 2], 49), {"adaptive": True}
    wanted = REFERENCES["prumerge"]({n: a.numpy() for n, a in inputs.items()}, params)
    attn = torch.tensor(wanted["cls_attn"])
    keys = inputs["k"][:, 1:]
    tokens = Tokens(inputs["features"], attn=attn, signals={"keys": keys})
    found = mmfast.reduce(tokens, "prumerge?parity=true")
    assert isinstance(found, list) and [one.m for one in found] == [5, 5]
    for one, indices in zip(found, wanted["indices"], strict=True):
        assert one.keep[one.order[:-1]].tolist() == indices.tolist()
    alone = mmfast.reduce(tokens, "prumerge")  # the default takes each image by itself
    assert isinstance(alone, list) and [one.m for one in alone] == [8, 3]


def test_a_summary_of_nothing_is_a_row_of_zeros() -> None:
    inputs = class_keys([3], 40)
    attn = torch.rand(40, generator=seeded("attn"))
    tokens = Tokens(inputs["features"][0], attn=attn, signals={"keys": inputs["k"][0, 1:]})
    found = reduce(tokens, "prumerge?parity=true&ratio=1.0")
    assert found.m == 40 and found.order.tolist()[-1] == -1
    emitted = found.apply(tokens.x, emit=True)
    assert emitted.shape[0] == 41 and not emitted[-1].any() and bool(emitted[:-1].any(-1).all())
    assert reduce(tokens, "prumerge:40?parity=true").m == 40  # a budget counts the summary
    with pytest.raises(SpecError, match=r"ratio=1\.5"):
        reduce(tokens, "prumerge?parity=true&ratio=1.5")


def test_hiprune_as_the_reference_refuses_more_anchors_than_budget() -> None:
    middle = torch.zeros(576)
    middle[[60, 300]] = 1.0
    signals = {"attn_middle": middle, "attn_visual": torch.rand(576, generator=seeded(1))}
    tokens = Tokens(torch.randn(576, 2), grid=(1, 24, 24), signals=signals)
    with pytest.raises(SpecError, match="10 anchors and neighbours, above the budget 9"):
        reduce(tokens, "hiprune:9?alpha=1.0&parity=true")
    assert reduce(tokens, "hiprune:9?alpha=1.0").m == 9


def test_hiprune_as_the_reference_takes_items_one_by_one() -> None:
    middle, deep = (torch.rand(3, 60, generator=seeded(i)) for i in range(2))
    batch = Tokens(
        torch.randn(3, 60, 2),
        grid=(1, 6, 10),
        signals={"attn_middle": middle, "attn_visual": deep},
    )
    together = reduce(batch, "hiprune:20?alpha=0.6&parity=true")
    for item in range(3):
        alone = reduce(batch.select(item), "hiprune:20?alpha=0.6&parity=true")
        assert together.select(item).keep.equal(alone.keep)


def test_joined_frames_keep_a_row_of_zeros() -> None:
    """Emission of consecutive frames, where one of them ends with a sum of nothing."""
    from mmfast.streams.frontend import joined

    inputs = class_keys([3, 3], 40)
    parts_ = [
        reduce(
            Tokens(x, attn=torch.rand(40, generator=seeded(i)), signals={"keys": keys}),
            "prumerge?parity=true&ratio=1.0",
        )
        for i, (x, keys) in enumerate(zip(inputs["features"], inputs["k"][:, 1:], strict=True))
    ]
    emitted = joined(parts_).apply(inputs["features"].flatten(0, 1), emit=True)
    one_by_one = [p.apply(x, emit=True) for p, x in zip(parts_, inputs["features"], strict=True)]
    torch.testing.assert_close(emitted, torch.cat(one_by_one))
