"""Parity with the authors' reference implementations, and the check that proves it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mmfast import MmfastError, Reduction
from mmfast.bench.gate import ParityRow, verify
from mmfast.bench.parity import DRIVERS
from mmfast.ops.clustering import even_edges
from mmfast.ops.ranking import grouped_topk

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FILES = sorted(GOLDEN.glob("*.safetensors"))
ROWS = {row.file: row for row in verify(GOLDEN)}
RULES = {"snapkv": "adakv", "h2o": "vatp", "visionzip": "visiondrop"}  # methods that share a rule


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def only(directory: Path) -> ParityRow:
    (row,) = verify(directory)
    return row


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_parity(path: Path) -> None:
    row = ROWS[path.name]
    assert row.ok is True, row.detail
    assert row.method == path.stem.rpartition("-")[0]
    names = [name for name in load(path)[0] if name.startswith("out.")]
    assert row.detail.startswith(f"{len(names)} arrays")


def test_three_vectors_of_every_method() -> None:
    methods = [path.stem.rpartition("-")[0] for path in FILES]
    assert all(methods.count(method) >= 3 for method in DRIVERS)
    assert {row.method for row in ROWS.values()} == set(DRIVERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_array_counts(path: Path, tmp_path: Path) -> None:
    """One changed value in any result is seen."""
    arrays, metadata = load(path)
    for name in [n for n, a in arrays.items() if n.startswith("out.") and a.numel()]:
        changed = {n: a.clone() for n, a in arrays.items()}
        flat = changed[name].view(-1)
        flat[-1] = ~flat[-1] if flat.dtype == torch.bool else flat[-1] + 1
        save_file(changed, tmp_path / path.name, metadata)
        row = only(tmp_path)
        assert row.ok is False and name.removeprefix("out.") in row.detail


def test_order_counts(tmp_path: Path) -> None:
    arrays, metadata = load(GOLDEN / "divprune-1.safetensors")
    arrays["out.indices"] = arrays["out.indices"].flip(0).contiguous()
    save_file(arrays, tmp_path / "divprune-1.safetensors", metadata)
    assert only(tmp_path).ok is False


def test_drift_within_tolerance_is_fine(tmp_path: Path) -> None:
    arrays, metadata = load(GOLDEN / "tome-2.safetensors")
    arrays["out.x"] = arrays["out.x"] * (1 + 5e-5)
    save_file(arrays, tmp_path / "a.safetensors", metadata)
    assert only(tmp_path).ok is True
    arrays["out.x"] = arrays["out.x"] * (1 + 5e-3)
    save_file(arrays, tmp_path / "a.safetensors", metadata)
    assert only(tmp_path).ok is False


def _metadata(**changes: str | None) -> Callable[[dict[str, str]], dict[str, str]]:
    def change(metadata: dict[str, str]) -> dict[str, str]:
        merged: dict[str, str | None] = {**metadata, **changes}
        return {key: value for key, value in merged.items() if value is not None}

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_metadata(format="other/9"), "other/9"),
        (_metadata(format=None), "format"),
        (_metadata(params=None), "params"),
        (_metadata(params="{"), "JSONDecodeError"),
        (_metadata(params="{}"), "spatial_merge_size"),
        (_metadata(method="evz"), "did you mean 'evs'"),
        (_metadata(method=None), "method"),
    ],
)
def test_broken_metadata_is_a_row(
    change: Callable[[dict[str, str]], dict[str, str]], word: str, tmp_path: Path
) -> None:
    arrays, metadata = load(GOLDEN / "evs-1.safetensors")
    save_file(arrays, tmp_path / "evs-1.safetensors", change(metadata))
    row = only(tmp_path)
    assert row.ok is False and word in row.detail and "\n" not in row.detail


@pytest.mark.parametrize("name", [path.name for path in FILES if path.stem.endswith("-1")])
def test_broken_arrays_are_a_row(name: str, tmp_path: Path) -> None:
    arrays, metadata = load(GOLDEN / name)
    first = next(n for n, a in arrays.items() if n.startswith("in.") and a.is_floating_point())
    for broken in (
        {n: a for n, a in arrays.items() if n != first},
        {n: a for n, a in arrays.items() if not n.startswith("out.")},
        {**arrays, first: torch.zeros(0)},
        {**arrays, first: torch.full_like(arrays[first], torch.nan)},
        {**arrays, "out.other": torch.zeros(3)},
    ):
        save_file(broken, tmp_path / name, metadata)
        row = only(tmp_path)
        assert row.ok is False and row.detail


def test_truncated_and_empty_files_are_rows(tmp_path: Path) -> None:
    whole = (GOLDEN / "evs-1.safetensors").read_bytes()
    for content in (b"", b"text", whole[:40], whole[:-7]):
        (tmp_path / "evs-1.safetensors").write_bytes(content)
        row = only(tmp_path)
        assert row.ok is False and row.method == "evs"


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(MmfastError, match="no golden file"):
        verify(tmp_path)
    with pytest.raises(MmfastError, match="nowhere"):
        verify(tmp_path / "nowhere")
    shutil.copy(GOLDEN / "README.md", tmp_path / "file")
    with pytest.raises(MmfastError, match="no directory"):
        verify(tmp_path / "file")


def test_rows_are_plain_data() -> None:
    row = ROWS["evs-1.safetensors"]
    assert json.loads(json.dumps([row.file, row.method, row.ok, row.detail]))


@pytest.mark.parametrize(
    ("method", "target", "bug"),
    [
        ("fastv", "mmfast.reducers.attention.fastv.stable_topk", lambda s, k: (-s).topk(k).indices),
        (
            "pyramidkv",
            "mmfast.caches.layers.pyramidkv.budgets",
            lambda mean, n, layers, beta: torch.full((layers,), mean + 1),
        ),
        (
            "quest",
            "mmfast.caches.selection.quest.bound_scores",
            lambda query, bounds: bounds[..., 0],
        ),
        (
            "tidaldecode",
            "mmfast.caches.selection.tidaldecode.most_voted",
            lambda votes, step, wanted: torch.arange(wanted).expand(*votes.shape[:2], -1),
        ),
        (
            "quant",
            "mmfast.ops.quantisation._step",
            lambda low, high, levels: (high - low) / (levels + 1),
        ),
        (
            "adakv",
            "mmfast.caches.heads.adakv.share_out",
            lambda weights, budget, caps: torch.full_like(caps, budget // caps.shape[-1]),
        ),
        ("h2o", "mmfast.caches.attention.heavy.heaviest", lambda name, score, *_: -score),
        (
            "snapkv",
            "mmfast.caches.snapkv.window_votes",
            lambda votes, *_, window, **knobs: torch.arange(votes.shape[-1]).expand(votes.shape),
        ),
        ("evs", "mmfast.reducers.video.evs.stable_topk", lambda s, k: (-s).topk(k).indices),
        (
            "divprune",
            "mmfast.reducers.diversity.divprune.max_min",
            lambda x, k: torch.arange(k),
        ),
        (
            "visionzip",
            "mmfast.ops.merging._assign",
            lambda keys, rest, targets: torch.zeros_like(rest),
        ),
        (
            "visionzip",
            "mmfast.ops.merging._weights",
            lambda merged, target, half: torch.ones(target.shape),
        ),
        (
            "holitom",
            "mmfast.reducers.video.holitom._weights",
            lambda centres, member, beta: torch.ones(member.shape),
        ),
        (
            "tome",
            "mmfast.reducers.merging.tome._shares",
            lambda total, sizes: torch.ones(sizes.shape),
        ),
        (
            "hiprune",
            "mmfast.reducers.attention.hiprune.stable_topk",
            lambda s, k: (-s).topk(k).indices,
        ),
        (
            "hired",
            "mmfast.reducers.attention.hired._salient",
            lambda tile, *_: tile.bincount(),
        ),
        (
            "prumerge",
            "mmfast.reducers.attention.prumerge.kept_tokens",
            lambda attn, *_: 3,
        ),
        (
            "prumerge_plus",
            "mmfast.reducers.attention.prumerge._reference_rest",
            lambda listed, n: torch.arange(n - len(listed)),
        ),
        (
            "dycoke",
            "mmfast.reducers.video.dycoke._emission",
            lambda keep, *_: torch.arange(len(keep)),
        ),
        (
            "vidcom2",
            "mmfast.reducers.attention.vidcom2._TEMPERATURE",
            0.1,
        ),
        (
            "cdpruner",
            "mmfast.reducers.diversity.cdpruner.greedy_dpp",
            lambda rows, quality, k: quality.topk(k).indices,
        ),
        (
            "pixelprune",
            "mmfast.reducers.video.pixelprune.unpredicted",
            lambda image, *_, **knobs: torch.ones(image.shape[:-1], dtype=torch.bool),
        ),
        (
            "framefusion",
            "mmfast.reducers.video.framefusion.temporal_cosine",
            lambda x, frames: torch.ones(len(x) - len(x) // frames),
        ),
        (
            "prunevid",
            "mmfast.reducers.video.prunevid._contiguous",
            lambda label: list(range(len(label))),
        ),
        (
            "vispruner",
            "mmfast.reducers.attention.vispruner._distinct",
            lambda x, rest, count: rest[:, :count],
        ),
        (
            "dart",
            "mmfast.reducers.decoder.dart.cosine_table",
            lambda pivots, x: (pivots @ x.T).double(),
        ),
        (
            "holitom_inner",
            "mmfast.reducers.video.holitom._halvings",
            lambda owner, kept: torch.ones(owner.shape),
        ),
        (
            "ivc_prune",
            "mmfast.reducers.decoder.ivc_prune._resemblance",
            lambda queries, values: torch.ones(len(queries), len(values)),
        ),
        (
            "fastvid",
            "mmfast.reducers.video.fastvid._weights",
            lambda count, beta: (count * 0 + 0.5, 0.5 / count.clamp_min(1)),
        ),
        (
            "gemfilter",
            "mmfast.reducers.decoder.gemfilter.pooled_votes",
            lambda score, kernel: score,
        ),
        (
            "pyramiddrop",
            "mmfast.reducers.decoder.pyramiddrop.stable_topk",
            lambda s, k: (-s).topk(k).indices,
        ),
        (
            "sparsevlm",
            "mmfast.reducers.decoder.sparsevlm.raters",
            lambda x, query: torch.ones(len(query), dtype=torch.bool),
        ),
        (
            "v_cast",
            "mmfast.reducers.video.v_cast._curvature",
            lambda path: torch.ones(path.shape[:-1]),
        ),
        (
            "saint",
            "mmfast.reducers.diversity.saint.even_edges",
            lambda metric, tau: (even_edges(metric, tau)[0], *even_edges(metric, 0.0)[1:]),
        ),
        (
            "script",
            "mmfast.reducers.diversity.script.unit_rows",
            lambda x: x.double(),
        ),
        (
            "fastkv",
            "mmfast.reducers.decoder.fastkv.pooled_votes",
            lambda votes, kernel, **knobs: votes,
        ),
        (
            "visiondrop",
            "mmfast.reducers.attention.visiondrop.stable_topk",
            lambda s, k: (-s).topk(k).indices,
        ),
        (
            "audio_prune",
            "mmfast.reducers.attention.audio_prune.stable_topk",
            lambda s, k: (-s).topk(k).indices,
        ),
        (
            "keynorm",
            "mmfast.caches.keynorm.grouped_topk",
            lambda score, group, counts: grouped_topk(-score, group, counts),
        ),
        (
            "vatp",
            "mmfast.caches.attention.heavy.snap",
            lambda score: -score,
        ),
        (
            "saint",
            "mmfast.reducers.diversity.saint._least_alike",
            lambda metric, budget, part: torch.arange(budget).expand((*metric.shape[:-2], budget)),
        ),
        (
            "prunevid_inner",
            "mmfast.bench.parity.text_peak",
            lambda seen, media, text: seen.mean(0, text, media.where),
        ),
        (
            "adaptinfer",
            "mmfast.reducers.decoder.adaptinfer.stable_topk",
            lambda s, k: (-s).topk(k).indices,
        ),
        (
            "info_rank",
            "mmfast.reducers.attention.info_rank.stable_topk",
            lambda s, k: (-s).topk(k).indices,
        ),
        (
            "stc_pruner",
            "mmfast.reducers.video.stc_pruner.grouped_topk",
            lambda score, group, counts: torch.arange(len(score)) % 169 < counts[0],
        ),
    ],
)
def test_planted_faults_are_seen(
    method: str, target: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, bug)
    rows = {row.file: row for row in verify(GOLDEN)}
    assert any(row.ok is False for row in rows.values() if row.method == method)
    others = {method, RULES.get(method)}
    assert all(row.ok for row in rows.values() if row.method not in others)


def test_drifted_count_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    prune = Reduction.prune
    monkeypatch.setattr(Reduction, "prune", staticmethod(lambda keep, n: prune(keep[..., :-1], n)))
    rows = [row for row in verify(GOLDEN) if row.method in ("evs", "fastv", "divprune")]
    assert all(row.ok is False for row in rows)
