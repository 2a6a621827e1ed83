"""ReKV: read the stored frames whose mean key answers the question."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from einops import rearrange
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.kv import Clusters, Retriever
from mmfast.core.reduction import Segments
from mmfast.core.registry import policy
from mmfast.ops.attention import group_queries
from mmfast.ops.clustering import best_blocks, leader_clusters
from mmfast.ops.merging import segment_merge
from mmfast.ops.ranking import mass_cover, stable_topk


@policy("rekv", paper="2503.00540", needs=(), role="retrieve")
def rekv(budget: int | None, *, chunk: int = 1, group: int = 0, look: int = 0) -> Retriever:
    """Read the frames whose mean key has the largest product with the question's mean query.

    Each stored block stands as the mean of its keys before RoPE, heads side by side; the
    question as the mean of its queries, where the query heads of a group add up; in every layer
    the blocks with the largest dot products are read, in order of time (Di et al., 2025).

    Args:
        budget: Blocks to read.
        chunk: Blocks that are chosen together with their neighbours, by the mean of their
            products; 1 chooses each for itself.
        group: Successive blocks that stand together as the mean of their mean keys, for days of
            video: the best groups are found first, and blocks are looked for in these alone; 0
            compares every block.
        look: Groups that are looked into; 0 is four times as many as the budget fills, and eight
            at least.

    Raises:
        SpecError: A budget that is no number of blocks, a chunk below 1, a group below 2, or a
            group beside chunks.
    """
    if not isinstance(budget, int) or budget < 1 or chunk < 1:
        raise SpecError(f"'rekv' got {budget!r} blocks in chunks of {chunk}; write 'rekv:64'")
    if group < 0 or group == 1 or look < 0 or (group and chunk > 1) or (look and not group):
        raise SpecError(
            f"'rekv' got group={group}, look={look}, chunk={chunk}; write 'rekv:64?group=32', with "
            "look= groups if you like, and without chunk="
        )
    if group:
        return GroupedKeys(budget, 1, group, look or max(_LOOK, 4 * -(-budget // group)))
    return MeanKeys(budget, chunk)


_LOOK = 8  # groups that are looked into at least


@dataclass(frozen=True)
class MeanKeys:
    """One mean key per block, and dot products with the mean query."""

    budget: int
    chunk: int = 1

    def represent(self, keys: Tensor) -> Clusters:
        """The mean of the block's keys `[H, n, d]`, in float32."""
        n = keys.shape[1]
        return Clusters(
            means=keys.float().mean(1)[None],
            counts=torch.tensor([n], device=keys.device),
            owner=torch.zeros(n, dtype=torch.long, device=keys.device),
        )

    def choose(self, query: Tensor, index: Clusters) -> Tensor:
        """Blocks by dot product with the mean of the query `[Hq, T, d]`: `[C]` bool."""
        return best_blocks(products(query, index.means), index.owner, self.budget, self.chunk)


def products(query: Tensor, means: Tensor) -> Tensor:
    """Products `[C]` of mean keys `[C, H, d]` with the mean of a query `[Hq, T, d]`."""
    seen = group_queries(query.float().mean(1, keepdim=True), means.shape[1])
    return means.flatten(1) @ seen.sum((1, 2)).flatten()


@dataclass(frozen=True)
class GroupedKeys(MeanKeys):
    """Mean keys that are looked for in the `look` best groups of so many successive blocks.

    Block b is of group b // `group`, which stands as the mean of the means that are there.
    """

    group: int = 32
    look: int = _LOOK

    def choose(self, query: Tensor, index: Clusters) -> Tensor:
        """Blocks of the best groups, which are made anew; an archive keeps them."""
        numbers, of = (index.owner // self.group).unique(return_inverse=True)
        means = segment_merge(index.means.flatten(1), Segments(of, len(numbers), mean=True))
        best = self.groups(query, means.view(-1, *index.means.shape[1:]))
        inside = torch.zeros(len(numbers), dtype=torch.bool, device=best.device)
        inside[best] = True
        rows = inside[of].nonzero()[:, 0]
        part = Clusters(index.means[rows], index.counts[rows], index.owner[rows])
        chosen = torch.zeros_like(index.owner, dtype=torch.bool)
        chosen[rows] = self.within(query, part)
        return chosen

    def within(self, query: Tensor, index: Clusters) -> Tensor:
        """Choose blocks of groups that are looked into: `[C]` bool."""
        return super().choose(query, index)

    def groups(self, query: Tensor, means: Tensor) -> Tensor:
        """Return the groups to look into, best first, of those with mean keys `[G, H, d]`."""
        return stable_topk(products(query, means), min(self.look, len(means)))


policy("retrieve", paper="2503.00540", needs=(), role="retrieve")(rekv)


_AT_ONCE = 1 << 24  # scores in flight; bounds memory however many clusters are stored


@policy("resv", paper="2512.12284", needs=(), role="retrieve", adaptive=True)
def resv(
    budget: float | None,
    *,
    planes: int = 32,
    radius: int = 7,
    limit: int = 8192,
    seed: int = 0,
) -> Retriever:
    """Read the fewest clusters of like keys that hold a share of the question's attention.

    Keys before RoPE, heads side by side, are hashed to the sides of random hyperplanes they lie
    on; keys of a block whose hashes differ in fewer than `radius` bits form a cluster, which
    stands as its mean key. A cluster's attention mass is the softmax of its product with the
    query, counted once per key in it. For every token of the question the heaviest clusters are
    read until they hold the share (V-Rex, 2025; there raw products are summed, which is no mass
    where some are negative). A choice serves all heads, so the mass is their mean.

    Args:
        budget: Share of the mass, in (0, 1]; None is 0.3.
        planes: Hyperplanes, the bits of a hash.
        radius: Hamming distance from which on keys are unlike.
        limit: Keys read per layer at most, the heaviest clusters first; 0 sets no limit.
        seed: Of the hyperplanes.

    Raises:
        SpecError: A budget that is no share, or a knob below its least value.
    """
    share = 0.3 if budget is None else budget
    if not isinstance(share, float) or not 0 < share <= 1:
        raise SpecError(f"'resv' got a mass of {budget!r}; write a share in (0, 1]: 'resv:0.3'")
    if planes < 1 or radius < 0 or limit < 0:
        raise SpecError(
            f"'resv' got planes={planes}, radius={radius}, limit={limit}; choose at least 1, 0, 0"
        )
    return HashClusters(share, planes, radius, limit, seed)


@dataclass(frozen=True)
class HashClusters:
    """Clusters of keys by hash bits, chosen by attention mass."""

    share: float
    planes: int = 32
    radius: int = 7
    limit: int = 8192
    seed: int = 0

    def represent(self, keys: Tensor) -> Clusters:
        """Clusters of the block's keys `[H, n, d]`, their means in float32."""
        heads, n, _ = keys.shape
        rows = rearrange(keys.float(), "h n d -> n (h d)")
        planes = hyperplanes(rows.shape[1], self.planes, self.seed).to(rows.device)
        owner = leader_clusters(rows @ planes > 0, self.radius)
        counts = owner.bincount() if n else owner
        means = segment_merge(rows, Segments(owner, len(counts), mean=True))
        return Clusters(rearrange(means, "c (h d) -> c h d", h=heads), counts, owner)

    def choose(self, query: Tensor, index: Clusters) -> Tensor:
        """Clusters by attention mass of the query `[Hq, T, d]`: `[C]` bool."""
        clusters = len(index.counts)
        step = max(1, _AT_ONCE // max(1, clusters * query.shape[0]))
        chosen = torch.zeros(clusters, dtype=torch.bool, device=query.device)
        total = torch.zeros(clusters, dtype=torch.float64, device=query.device)
        for rows in query.split(step, dim=1):
            mass = attention_mass(rows, index)  # [t, C]
            chosen |= mass_cover(mass, self.share).any(0)
            total += mass.sum(0, dtype=torch.float64)
        return self._within(chosen, total, index.counts) if self.limit else chosen

    def _within(self, chosen: Tensor, mass: Tensor, counts: Tensor) -> Tensor:
        """The heaviest of the chosen clusters that hold `limit` keys together, at least one."""
        order = mass.masked_fill(~chosen, -1).sort(descending=True, stable=True).indices
        behind = counts[order].cumsum(0) <= self.limit
        behind[:1] = True
        return chosen & torch.zeros_like(chosen).scatter_(0, order, behind)


def attention_mass(query: Tensor, index: Clusters) -> Tensor:
    """Attention `[T, C]` that clusters get from queries `[Hq, T, d]`, mean over heads."""
    rows = group_queries(query.float(), index.means.shape[1]) * query.shape[-1] ** -0.5
    score = torch.einsum("hgtd,chd->hgtc", rows, index.means)
    mass: Tensor = (score + index.counts.log()).softmax(-1).mean((0, 1))
    return mass


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def hyperplanes(width: int, planes: int, seed: int) -> Tensor:
    """Normals of random hyperplanes through the origin, `[width, planes]`."""
    return torch.randn(width, planes, generator=torch.Generator().manual_seed(seed))
