"""Feature maps: hand-computed tiles, seeds, and boxes."""

import numpy as np
import pytest
import torch

from koffline.errors import ConfigError, DataError
from koffline.kernels import Laplacian
from koffline.solvers import RandomFourierFeatures, TileCoding, UnitBox


def rows(*points):
    return torch.tensor(points, dtype=torch.float64)


def test_fourier_features_approach_their_kernel():
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for features, kernel in (
        (RandomFourierFeatures(0.4, 20_000), lambda d: np.exp(-((d**2).sum(-1)) / 0.4**2)),
        (
            RandomFourierFeatures(1.0, 20_000, kernel=Laplacian(0.4)),
            lambda d: np.exp(-np.abs(d).sum(-1) / 0.4),
        ),
    ):
        psi = features(x)
        distance = x.numpy()[:, None] - x.numpy()[None]
        # The error of an average of 10,000 cosines has standard deviation below 0.01.
        np.testing.assert_allclose(psi @ psi.T, kernel(distance), atol=0.05)


def test_the_seed_decides_fourier_features():
    x = rows([0.1, 0.2])
    same, other = RandomFourierFeatures(0.3, 8, 1), RandomFourierFeatures(0.3, 8, 2)
    assert torch.equal(same(x), RandomFourierFeatures(0.3, 8, 1)(x))
    assert not torch.equal(same(x), other(x))


def test_tiles_by_hand():
    """Two tilings of 2 × 1 tiles, the second displaced by half a tile along the first axis only."""
    code = TileCoding((0.0, 0.0), (1.0, 2.0), (2, 1), 2, ((0.0, 0.0), (0.5, 0.0)))
    assert code.count == 2 * 3 * 2
    # Cell of a tiling: 2 · (tile on axis 0) + (tile on axis 1); the second tiling's cells start at 6.
    # The upper border belongs to the last tile inside.
    expected = {
        (0.1, 1.0): {0, 6},
        (0.3, 0.0): {0, 8},
        (0.6, 1.9): {2, 8},
        (0.9, 1.0): {2, 10},
        (1.0, 2.0): {2, 10},
    }
    found = code(rows(*expected))
    for row, cells in zip(found, expected.values(), strict=True):
        assert set(torch.nonzero(row).flatten().tolist()) == cells
        assert float(row.sum()) == 2.0


def test_tiles_outside_the_box_are_those_of_its_border():
    code = TileCoding((0.0, -1.0), (1.0, 1.0), (4, 3), 5)
    outside, border = rows([-3.0, 0.2], [2.0, 9.0]), rows([0.0, 0.2], [1.0, 1.0])
    assert torch.equal(code(outside), code(border))
    anywhere = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert bool((code(anywhere).sum(dim=1) == 5.0).all())


def test_default_offsets_split_tiles_evenly():
    """Along an axis the displaced edges of k tilings lie 1/k of a tile apart."""
    shifts = np.array(TileCoding((0.0, 0.0), (1.0, 1.0), (4, 4), 4).shifts)
    np.testing.assert_allclose(np.sort(shifts, axis=0), np.tile(np.arange(4) / 4, (2, 1)).T)
    assert not np.allclose(shifts[:, 0], shifts[:, 1])


def test_a_box_becomes_the_unit_square():
    box = UnitBox((-1.2, -0.07), (0.6, 0.07))
    scaled = box(rows([-1.2, 0.07], [-0.3, 0.0]))
    torch.testing.assert_close(scaled, rows([0.0, 1.0], [0.5, 0.5]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomFourierFeatures(0.0, 8), "bandwidth is 0.0"),
        (lambda: RandomFourierFeatures(0.1, 7), "count is 7; give an even number"),
        (lambda: TileCoding((0.0,), (1.0, 1.0), (2,)), "give equal lengths"),
        (lambda: TileCoding((), (), ()), "give equal lengths"),
        (lambda: TileCoding((1.0,), (0.0,), (2,)), "give finite low < high"),
        (lambda: TileCoding((0.0,), (1.0,), (0,)), "give at least 1"),
        (lambda: TileCoding((0.0,), (1.0,), (2,), 2, ((0.0,), (1.0,))), "give 2 tuples of 1 numbers"),
        (lambda: TileCoding((0.0,), (1.0,), (2,), 2, ((0.0,),)), "give 2 tuples of 1 numbers"),
        (lambda: UnitBox((0.0,), (0.0,)), "give equal lengths and finite low < high"),
        (lambda: UnitBox((0.0,), (1.0, 1.0)), "give equal lengths and finite low < high"),
    ],
)
def test_bad_maps_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("features", [TileCoding((0.0,), (1.0,), (2,)), UnitBox((0.0,), (1.0,))])
def test_rows_of_another_width_are_refused(features):
    with pytest.raises(DataError, match="1 axes, received rows of 2 columns"):
        features(rows([0.1, 0.2]))
