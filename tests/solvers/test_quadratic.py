"""Ridge paths against numpy's dense solves, and what happens where there is no minimum."""

import numpy as np
import pytest
import torch

from koffline.solvers.quadratic import Quadratic, RidgePath

FREE = torch.tensor([False, False, False, True, False, True])


def draw_quadratic(seed=0, stack=()):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(*stack, 9, 7, generator=generator, dtype=torch.float64)
    return Quadratic.of_residual(root.mT @ root)


def plain_minimum(quadratic, ridge, free):
    curvature, slope = quadratic.curvature.numpy(), quadratic.slope.numpy()
    penalty = np.diag(np.where(free.numpy(), 0.0, ridge * np.diag(curvature)[~free.numpy()].mean()))
    return np.linalg.solve(curvature + penalty, slope)


@pytest.mark.parametrize("ridge", [0.0, 1e-6, 0.1, 10.0])
@pytest.mark.parametrize("free", [FREE, torch.zeros(6, dtype=torch.bool)], ids=["two_free", "none_free"])
def test_path_solves_the_ridged_system(ridge, free):
    quadratic = draw_quadratic()
    solution = RidgePath(quadratic, free).solve(ridge)
    np.testing.assert_allclose(solution.weights, plain_minimum(quadratic, ridge, free), rtol=1e-9)


def test_degrees_of_freedom_are_the_trace_of_the_smoother():
    quadratic = draw_quadratic()
    scale = float(quadratic.curvature.diagonal()[~FREE].mean())
    penalty = torch.diag((~FREE).double() * 0.3 * scale)
    expected = torch.linalg.solve(quadratic.curvature + penalty, quadratic.curvature).trace()
    found = RidgePath(quadratic, FREE).solve(0.3).degrees_of_freedom
    torch.testing.assert_close(found, expected)
    assert RidgePath(quadratic, FREE).solve(0.0).degrees_of_freedom == pytest.approx(6.0)
    assert RidgePath(quadratic, FREE).solve(1e12).degrees_of_freedom == pytest.approx(2.0, abs=1e-9)


def test_open_directions_stay_at_zero():
    """A column that is the copy of another: only the sum of both weights is decided."""
    root = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    columns = torch.cat((root[:, :1], root), dim=1)
    path = RidgePath(Quadratic.of_residual(columns.mT @ columns), torch.zeros(4, dtype=torch.bool))
    solution = path.solve(0.0)
    assert solution.condition == np.inf
    assert solution.degrees_of_freedom == pytest.approx(3.0)
    assert float(solution.weights[0] - solution.weights[1]) == pytest.approx(0.0, abs=1e-9)
    expected = np.linalg.lstsq(root[:, :3].numpy(), root[:, 3].numpy(), rcond=None)[0]
    assert float(solution.weights[:2].sum()) == pytest.approx(expected[0])


def test_without_a_minimum_weights_are_nan():
    quadratic = Quadratic(
        torch.diag(torch.tensor([1.0, -0.5], dtype=torch.float64)),
        torch.ones(2, dtype=torch.float64),
        torch.zeros((), dtype=torch.float64),
    )
    path = RidgePath(quadratic, torch.zeros(2, dtype=torch.bool))
    assert bool(path.solve(0.1).weights.isnan().all())
    # The unit of the ridge is the mean absolute curvature, 0.75: λ = 0.75 outweighs −0.5.
    torch.testing.assert_close(path.solve(1.0).weights, torch.tensor([1 / 1.75, 1 / 0.25]).double())
