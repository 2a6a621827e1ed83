"""Clusters by density peaks against the written rule."""

from __future__ import annotations

import pytest
import torch
from oracle_base import dpc

from mmfast.ops.clustering import dpc_knn


@pytest.mark.parametrize("neighbours", [1, 2, 5, 7, 40])
def test_density_peaks_equal_the_oracle(neighbours: int) -> None:
    """The density counts as many neighbours as there are centres, if that is fewer."""
    for seed in range(6):
        x = torch.randn(14, 6, generator=torch.Generator().manual_seed(seed))
        for count in range(1, 15):
            centres, member = dpc_knn(x, count, neighbours)
            wanted = dpc(list(x.double().numpy()), count, neighbours)
            assert centres.tolist() == sorted(wanted), (seed, count)
            for number, centre in enumerate(centres.tolist()):
                joined = (member == number).nonzero()[:, 0].tolist()
                assert joined == sorted(wanted[centre]), (seed, count)
