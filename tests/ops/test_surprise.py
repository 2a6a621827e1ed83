"""Distance of patches from their prediction, patch by patch."""

from __future__ import annotations

import pytest
import torch

from mmfast.ops.image import surprise

DISTANCES = {
    "max": lambda a, b: (a - b).abs().max(),
    "mae": lambda a, b: (a - b).double().abs().mean(),
    "rmse": lambda a, b: (a - b).double().square().mean().sqrt(),
}


@pytest.mark.parametrize("metric", DISTANCES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (8, 3), (9, 4), (17, 5), (24, 2)])
def test_pictures_of_any_height(metric: str, shape: tuple[int, int]) -> None:
    """A CPU takes a few rows at a time, the last of which may be fewer."""
    image = torch.randn(2, *shape, 6, generator=torch.Generator().manual_seed(0))
    before, distance = image.clone(), DISTANCES[metric]
    found = surprise(image, metric)
    assert torch.equal(image, before) and found.shape == (2, *shape)
    for place in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        n, y, x = place
        picture = image[n]
        if y == x == 0:
            assert found[n, 0, 0] == torch.inf
            continue
        a, b = picture[y, max(x - 1, 0)], picture[max(y - 1, 0), x]
        corner = picture[max(y - 1, 0), max(x - 1, 0)]
        from_above = x == 0 or (y > 0 and distance(corner, a) < distance(corner, b))
        expected = float(distance(picture[y, x], b if from_above else a))
        assert float(found[n, y, x]) == pytest.approx(expected, rel=1e-6)
