"""Folds, held-out predictions against explicit fits, and the two rules against plain loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from koffline.kernels import Gaussian, random_fourier_features
from koffline.solvers import CandidateGrid, RandomFourierFeatures, solve_kernel_loss
from koffline.solvers.selection import (
    HeldOut,
    held_out_loss,
    lstd_tournament,
    make_folds,
    predict_held_out,
)
from tests.engine_problems import make_table
from tests.reference import u_statistic
from tests.solvers.problems import cosines, exact_table

GRID = CandidateGrid((cosines, RandomFourierFeatures(1.0, 6)), (0.7, 2.0), (1e-4, 0.1, 1.0))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def draw_held_out(candidates=5, rows=24, folds=3):
    def draw(*shape):
        return torch.randn(*shape, generator=seeded(sum(shape)), dtype=torch.float64)

    return HeldOut(
        values=draw(candidates, rows),
        residuals=draw(candidates, rows).flip(1),
        kernel_inputs=draw(rows, 2),
        weights=torch.rand(rows, generator=seeded(1), dtype=torch.float64),
        fold_of=torch.arange(rows) % folds,
        largest_discount=0.9,
    )


def test_folds_are_even_and_groups_stay_whole():
    fold_of = make_folds(23, 5, seeded(0))
    assert sorted(torch.bincount(fold_of).tolist()) == [4, 4, 5, 5, 5]
    groups = torch.arange(40) // 4 * 17
    grouped = make_folds(40, 3, seeded(0), groups)
    assert all(len(set(grouped[groups == group].tolist())) == 1 for group in groups)
    assert set(grouped.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("form", "weight", "weighted"), [("state", None, True), ("state", 0.4, False), ("continuous", 0.4, True)]
)
def test_predictions_are_those_of_fits_without_the_fold(form, weight, weighted):
    table = make_table(form)
    fold_of = make_folds(40, 3, seeded(0))
    row_weights = torch.rand(40, generator=seeded(3), dtype=torch.float64) if weighted else None
    held_out = predict_held_out(table, GRID, fold_of, seeded(5), weight, 20, row_weights)
    generator = seeded(5)
    maps = {
        width: random_fourier_features(Gaussian(width), table.kernel_inputs.shape[1], 20, generator)
        for width in GRID.bandwidths
    }
    for index, candidate in enumerate(GRID.candidates):
        for fold in range(3):
            inside = fold_of == fold
            value = solve_kernel_loss(
                table.select(torch.nonzero(~inside).flatten()),
                candidate.features,
                maps[candidate.bandwidth],
                diag_weight=weight,
                ridge=candidate.ridge,
                row_weights=None if row_weights is None else row_weights[~inside],
            )
            now = value.values(table.inputs[inside])
            draws = table.next_inputs[inside].reshape(int(inside.sum()), -1, table.inputs.shape[1])
            later = value.values(draws.flatten(0, 1)).view(draws.shape[:2]).mean(dim=1)
            residual = table.rewards[inside] + table.discounts[inside] * later - now
            torch.testing.assert_close(held_out.values[index][inside], now, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(held_out.residuals[index][inside], residual, rtol=1e-6, atol=1e-8)


def test_held_out_loss_is_the_u_statistic_within_folds():
    held_out = replace(draw_held_out(), weights=torch.ones(24, dtype=torch.float64))
    judge = Gaussian(1.0)
    scores = held_out_loss(held_out, judge, seeded(2), kernel_features=200)
    psi = random_fourier_features(judge, 2, 200, seeded(2))(held_out.kernel_inputs)
    for candidate, score in enumerate(scores.tolist()):
        expected = np.mean(
            [
                u_statistic(held_out.residuals[candidate][rows].tolist(), (psi[rows] @ psi[rows].T).tolist())
                for rows in held_out.folds
            ]
        )
        assert score == pytest.approx(expected, rel=1e-9)


def plain_tournament(held_out, i, j):
    """How far LSTD on the line through V_i and V_j moves V_i."""
    share = (held_out.weights / held_out.weights.sum()).numpy()
    here, there = held_out.values[i].numpy(), held_out.values[j].numpy()
    own, other = held_out.residuals[i].numpy(), held_out.residuals[j].numpy()
    direction = there - here
    size = np.sqrt(sum(share * direction**2))
    pull = sum(share * direction * own)
    slope = max(sum(share * direction * (own - other)), 0.1 * size**2)
    return abs(pull / slope) * size


def test_tournament_is_the_farthest_of_all_pairs():
    held_out = draw_held_out()
    scores = lstd_tournament(held_out)
    for i, score in enumerate(scores.tolist()):
        opponents = [plain_tournament(held_out, i, j) for j in range(5) if j != i]
        assert score == pytest.approx(max(opponents), rel=1e-9)


def test_nothing_moves_the_true_value():
    """Expectations without sampling error: every opponent's pull on V^π is zero, on any other it is not."""
    table, weights, values = exact_table()
    noise = torch.randn(6, len(values), generator=seeded(0), dtype=torch.float64)
    candidates = torch.cat((values[None], values + noise))
    now, later = candidates @ table.inputs.T, candidates @ table.next_inputs.T
    held_out = HeldOut(
        values=now,
        residuals=table.rewards + table.discounts * later - now,
        kernel_inputs=table.kernel_inputs,
        weights=weights,
        fold_of=torch.zeros(len(table), dtype=torch.int64),
        largest_discount=0.9,
    )
    scores = lstd_tournament(held_out)
    assert float(scores[0]) == pytest.approx(0.0, abs=1e-10)
    assert float(scores[1:].min()) > 0.1
