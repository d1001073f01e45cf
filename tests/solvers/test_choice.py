"""Folds, held-out predictions against explicit fits, and the tournament against plain loops."""

import numpy as np
import pytest
import torch

from koffline.kernels import Gaussian, random_fourier_features
from koffline.solvers import Candidates, RandomFourierFeatures, held_out, make_folds, ridge_path, tournament
from koffline.solvers.linear import StateRows, UnitBox, with_constant
from tests.solvers.test_solve import BOX, exact_log, make_log


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def cosines(x):
    """A smooth feature map of five columns."""
    return torch.cos(x @ torch.linspace(-1.5, 1.5, 10, dtype=x.dtype).view(2, 5))


def test_folds_are_even_and_groups_stay_whole():
    fold_of = make_folds(23, 5, seeded(0))
    assert sorted(torch.bincount(fold_of).tolist()) == [4, 4, 5, 5, 5]
    groups = torch.arange(40) // 4 * 17
    grouped = make_folds(40, 3, seeded(0), groups)
    assert all(len(set(grouped[groups == group].tolist())) == 1 for group in groups)
    assert set(grouped.tolist()) == {0, 1, 2}


def test_predictions_are_those_of_fits_without_the_fold():
    log = make_log(weights=np.random.default_rng(3).uniform(0.5, 2.0, 80))
    rows, fold_of = StateRows.of(log, 0.9, BOX), make_folds(80, 3, seeded(0))
    grid = Candidates((cosines, RandomFourierFeatures(1.0, 6)), (0.7, 2.0), (1e-4, 0.1, 1.0))
    values, residuals = held_out(rows, grid, fold_of, seeded(5))
    generator, number = seeded(5), 0
    maps = [random_fourier_features(Gaussian(width), 2, 1000, generator) for width in grid.bandwidths]
    for features in grid.features:
        for kernel in maps:
            for ridge in grid.ridges:
                for fold in range(3):
                    inside = fold_of == fold
                    rest = rows.select(torch.nonzero(~inside).flatten())
                    form = rest.kernel_form(features, kernel) / rest.weights.sum() ** 2
                    theta = ridge_path(form).solve(ridge).weights
                    now, later = (
                        with_constant(features, part[inside]) @ theta
                        for part in (rows.states, rows.following)
                    )
                    residual = rows.rewards[inside] + rows.discounts[inside] * later - now
                    torch.testing.assert_close(values[number][inside], now, rtol=1e-6, atol=1e-8)
                    torch.testing.assert_close(residuals[number][inside], residual, rtol=1e-6, atol=1e-8)
                number += 1


def plain_tournament(values, residuals, share, i, j):
    """How far LSTD on the line through V_i and V_j moves V_i."""
    direction = values[j] - values[i]
    size = np.sqrt(sum(share * direction**2))
    pull = sum(share * direction * residuals[i])
    slope = max(sum(share * direction * (residuals[i] - residuals[j])), 0.1 * size**2)
    return abs(pull / slope) * size


def test_tournament_is_the_farthest_of_all_pairs():
    rows = StateRows.of(make_log(weights=np.random.default_rng(1).uniform(0.1, 1.0, 80)), 0.9, BOX)
    values, residuals = torch.randn(2, 5, 80, generator=seeded(0), dtype=torch.float64)
    scores = tournament(values, residuals, rows)
    share = (rows.weights / rows.weights.sum()).numpy()
    for i, score in enumerate(scores.tolist()):
        others = (j for j in range(5) if j != i)
        farthest = max(plain_tournament(values.numpy(), residuals.numpy(), share, i, j) for j in others)
        assert score == pytest.approx(farthest, rel=1e-9)
    values[2, 3] = torch.nan
    assert tournament(values, residuals, rows)[2] == torch.inf


def test_nothing_moves_the_true_value():
    """Expectations without sampling error: every opponent's pull on V^π is zero, on any other it is not."""
    log, gamma, truth = exact_log()
    rows = StateRows.of(log, gamma, UnitBox((0.0,) * len(truth), (1.0,) * len(truth)))
    noise = torch.randn(6, len(truth), generator=seeded(0), dtype=torch.float64)
    candidates = torch.cat((torch.as_tensor(truth)[None], torch.as_tensor(truth) + noise))
    now, later = candidates @ rows.states.T, candidates @ rows.following.T
    scores = tournament(now, rows.rewards + rows.discounts * later - now, rows)
    assert float(scores[0]) == pytest.approx(0.0, abs=1e-10)
    assert float(scores[1:].min()) > 0.1
