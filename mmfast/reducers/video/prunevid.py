"""PruneVid: merge what is static in a scene, cluster the rest, then follow the question."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.clustering import dpc_knn
from mmfast.ops.ranking import one_by_one, share_out, snap, stable_topk
from mmfast.ops.similarity import unit_rows

_NEIGHBOURS = 7  # K of the density, of frames and of tokens
_FEW = 14  # tokens up to which the paper does not cluster


@dataclass(frozen=True)
class _PruneVidKnobs:
    tau: float
    scenes: float
    clusters: float


@register("prunevid", paper="2412.16117", adaptive=True, temporal=True)
def prunevid(
    tokens: Tokens,
    budget: int | None,
    *,
    tau: float = 0.8,
    scenes: float = 0.25,
    clusters: float = 0.5,
) -> Reduction:
    """Average the static places of each scene over time, and cluster what is left in space.

    Huang et al., ACL Findings 2025. Frames are clustered by density peaks and the clusters made
    contiguous; places whose tokens are alike in all frames of a scene are averaged over them; then
    the static places of a scene, and the other tokens of each of its frames, are merged in
    clusters. A budget is shared among these groups by size; where static places alone would leave
    too few tokens, the least alike of them stay apart. The second half of the paper, the
    attention of the question inside the language model, is `prunevid_inner`.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame.
        budget: Tokens to keep; None takes the paper's own counts.
        tau: Mean cosine of the frames of a scene above which a place is static.
        scenes: Number of scenes as a share of the frames, before they are made contiguous.
        clusters: Clusters as a share of a group of more than 14 tokens, without a budget.
    """
    if not (0 < scenes <= 1 and 0 < clusters <= 1):
        raise SpecError(
            f"knobs scenes={scenes}, clusters={clusters} of 'prunevid' are no shares; "
            "choose above 0 to 1"
        )
    knobs = _PruneVidKnobs(tau, scenes, clusters)
    return one_by_one(lambda item: _reduce(item, budget, knobs), tokens)


@register(
    "prunevid_inner", paper="2412.16117", needs=("attn_peak",), sites=("llm",), stages=(11 / 32,)
)
def prunevid_inner(tokens: Tokens, budget: int) -> Reduction:
    """Keep the tokens that some word of the question attends to most.

    The second half of PruneVid, behind decoder layer 10 of 32: the score of a token is the largest
    attention that any head of a text token pays it. The best are chosen among all tokens, where
    the paper takes a share of every group.

    Args:
        tokens: `attn_peak` `[..., N]`, the most that a head of a text token pays.
        budget: Tokens to keep; ties go to the lowest index.
    """
    return Reduction.prune(stable_topk(tokens.need("attn_peak"), budget), tokens.n)


def _reduce(item: Tokens, budget: int | None, knobs: _PruneVidKnobs) -> Reduction:
    frames = 1 if item.grid is None else item.grid[0]
    video = item.x.unflatten(0, (frames, -1))
    n = video.shape[1]
    parts = scenes_of(video, knobs.scenes)
    likeness = torch.stack([_likeness(video[first : last + 1]) for first, last in parts])
    static = likeness > knobs.tau  # [scenes, n]
    length = torch.tensor([last - first + 1 for first, last in parts], device=static.device)
    if budget is not None:
        _release(static, likeness, length, budget)
    groups = []
    for (first, last), still in zip(parts, static, strict=True):
        spots = still.nonzero()[:, 0]
        frame = torch.arange(first, last + 1, device=spots.device)[:, None] * n
        others = frame + (~still).nonzero()[:, 0]  # [frames, spots]
        groups += [frame + spots, *others[:, None]]
    sizes = torch.tensor([group.shape[1] for group in groups])
    if budget is None:
        counts = [size if size <= _FEW else int(size * knobs.clusters) for size in sizes.tolist()]
    else:
        counts = share_out(sizes, budget, sizes).tolist()
    target = torch.full((item.n,), -1, device=item.x.device)
    for group, count in zip(groups, counts, strict=True):
        if count:
            target[group] = _clustered(item.x[group].float().mean(0), group[0], count)
    own = target == torch.arange(item.n, device=target.device)
    return Reduction.merge(own.nonzero()[:, 0], target)


def _clustered(points: Tensor, standing: Tensor, count: int) -> Tensor:
    """The standing token `[n]` of the cluster of each point `[n, D]`, of `count` clusters."""
    if count == len(points):
        return standing
    centres, member = dpc_knn(points, count, _NEIGHBOURS, few=False)
    return standing[centres[member]]


def _likeness(scene: Tensor) -> Tensor:
    """Mean cosine of all pairs of frames of `[F, n, D]` at each place, `[n]`; -inf for one."""
    frames = len(scene)
    if frames == 1:
        return torch.full(scene.shape[1:2], -torch.inf, dtype=torch.float64, device=scene.device)
    rows = unit_rows(scene.double())
    pairs = rows.sum(0).square().sum(-1) - rows.square().sum((0, -1))
    return snap(pairs / (frames * (frames - 1)))


def _release(static: Tensor, likeness: Tensor, length: Tensor, budget: int) -> None:
    """Clear the least alike `static` `[scenes, n]` places until groups hold `budget` tokens."""
    saved = (length - 1)[:, None].expand(static.shape)[static]
    missing = budget - (static.shape[1] * int(length.sum()) - int(saved.sum()))
    if missing > 0:
        order = stable_topk(-likeness[static], len(saved))
        enough = int((saved[order].cumsum(0) < missing).sum()) + 1
        static.flatten()[static.flatten().nonzero()[order[:enough], 0]] = False


def scenes_of(video: Tensor, share: float) -> list[tuple[int, int]]:
    """First and last frames of the scenes of `[T, n, D]`."""
    count = max(1, int(len(video) * share))
    frames = torch.stack([frame.double().mean(0) for frame in video]).float()
    label: list[int] = dpc_knn(frames, count, _NEIGHBOURS, few=False)[1].tolist()
    label = _contiguous(label)
    start = [0, *(t for t in range(1, len(label)) if label[t] != label[t - 1])]
    return list(zip(start, [t - 1 for t in start[1:]] + [len(label) - 1], strict=True))


def _runs(label: list[int]) -> list[tuple[int, int]]:
    """Start and stop of the runs of equal labels."""
    start = [t for t in range(len(label)) if t == 0 or label[t] != label[t - 1]]
    return list(zip(start, [*start[1:], len(label)], strict=True))


def _contiguous(label: list[int]) -> list[int]:
    """Keep the longest runs of each cluster of frames; other frames join a run beside them.

    All longest runs of a cluster stay where they are equally long, and none of a single frame. A
    gap joins the longer neighbour, on ties the one on its left, and all of cluster 0 where no run
    is left.
    """
    longest: dict[int, int] = {}
    for start, stop in _runs(label):
        longest[label[start]] = max(longest.get(label[start], 2), stop - start)
    kept = list(label)
    for start, stop in _runs(label):
        if stop - start < longest[label[start]]:
            kept[start:stop] = [-1] * (stop - start)
    for start, stop in _runs(kept):
        if kept[start] < 0:
            beside = {run[0]: run for run in _runs(kept)}
            ends = {run[1]: run for run in _runs(kept)}
            left, right = ends.get(start, (0, 0)), beside.get(stop, (0, 0))
            near = right if right[1] - right[0] > left[1] - left[0] else left
            kept[start:stop] = [kept[near[0]] if near[1] else 0] * (stop - start)
    return kept
