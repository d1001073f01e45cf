"""What must not change the solution: order of rows, units, blocks, weights for copies."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from koffline.kernels import Gaussian, random_fourier_features
from koffline.solvers import linear, solve_kernel_loss, solve_lstd
from koffline.solvers.forms import accumulate_forms
from koffline.solvers.linear import LinearResidual
from tests.engine_problems import FORMS, make_table
from tests.solvers.problems import cosines

SOLVERS = {
    "v_statistic": lambda table, **more: solve_kernel_loss(table, cosines, Gaussian(1.0), ridge=1e-3, **more),
    "mixture": lambda table, **more: solve_kernel_loss(
        table, cosines, Gaussian(1.0), diag_weight=0.2, ridge=1e-3, **more
    ),
    "lstd": lambda table, **more: solve_lstd(table, cosines, ridge=1e-3, **more),
}
EACH_SOLVER = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)


@EACH_SOLVER
def test_order_of_rows(solver):
    table = make_table("state")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(solver(table).weights, solver(table.select(order)).weights)


@EACH_SOLVER
def test_values_have_the_unit_of_the_reward(solver):
    table = make_table("state")
    scaled = solver(replace(table, rewards=-250.0 * table.rewards))
    torch.testing.assert_close(scaled.weights, -250.0 * solver(table).weights)


@EACH_SOLVER
def test_a_shift_of_the_reward_shifts_the_constant_alone(solver):
    """r + c without terminations is worth c/(1 − γ); the ridge does not touch the constant."""
    table = make_table("state")
    table = replace(table, discounts=torch.full_like(table.discounts, 0.9))
    before, after = solver(table).weights, solver(replace(table, rewards=table.rewards + 3.0)).weights
    expected = before.clone()
    expected[-1] += 30.0
    torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("unit", [1e-8, 1e6])
@pytest.mark.parametrize("name", ["v_statistic", "lstd"])
def test_values_do_not_know_the_unit_of_the_features(name, unit):
    """The ridge is relative; the constant beside the features has a curvature of its own."""
    table = make_table("state")

    def solve(features):
        if name == "lstd":
            return solve_lstd(table, features, ridge=1e-3).values(table.inputs)
        return solve_kernel_loss(table, features, Gaussian(1.0), ridge=1e-3).values(table.inputs)

    torch.testing.assert_close(solve(lambda x: unit * cosines(x)), solve(cosines), rtol=1e-6, atol=1e-8)


@EACH_SOLVER
def test_equal_weights_are_no_weights(solver):
    table = make_table("state")
    weighted = solver(table, row_weights=torch.full((40,), 0.3))
    assert torch.equal(weighted.weights, solver(table).weights)


@pytest.mark.parametrize("name", ["v_statistic", "lstd"])
def test_a_weight_of_three_is_three_copies(name):
    table = make_table("state")
    counts = torch.randint(1, 4, (40,), generator=torch.Generator().manual_seed(1)).double()
    copies = table.select(torch.repeat_interleave(torch.arange(40), counts.long()))
    weighted = SOLVERS[name](table, row_weights=counts)
    torch.testing.assert_close(weighted.weights, SOLVERS[name](copies).weights)
    torch.testing.assert_close(weighted.loss, SOLVERS[name](copies).loss)


def test_residual_gradient_too():
    table = make_table("state")
    counts = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(1)).double()
    copies = table.select(torch.repeat_interleave(torch.arange(40), counts.long()))
    weighted = solve_kernel_loss(table, cosines, Gaussian(1.0), diag_weight=1.0, row_weights=counts)
    plain = solve_kernel_loss(copies, cosines, Gaussian(1.0), diag_weight=1.0)
    torch.testing.assert_close(weighted.weights, plain.weights)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [1, 7, 39, 41])
def test_blocks_of_any_size_agree(form, block_size):
    residual = LinearResidual(make_table(form), cosines)
    whole = accumulate_forms(residual, Gaussian(0.8), block_size=40)
    blocks = accumulate_forms(residual, Gaussian(0.8), block_size=block_size)
    torch.testing.assert_close(blocks.total, whole.total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(blocks.own, whole.own, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", ["exact", "features"])
def test_rows_that_do_not_fit_are_computed_again(monkeypatch, kernel):
    table = make_table("continuous")
    chosen = Gaussian(0.8)
    if kernel == "features":
        chosen = random_fourier_features(chosen, 5, 10, torch.Generator().manual_seed(0))
    weights = torch.rand(40, generator=torch.Generator().manual_seed(0))
    stored = accumulate_forms(LinearResidual(table, cosines), chosen, weights)
    monkeypatch.setattr(linear, "_MOST_NUMBERS", 200)
    residual = LinearResidual(table, cosines)
    assert residual.stored() is None
    assert len(list(residual.blocks())) > 5
    again = accumulate_forms(residual, chosen, weights, block_size=6)
    for name in ("total", "own", "square"):
        torch.testing.assert_close(getattr(again, name), getattr(stored, name), rtol=1e-12, atol=1e-12)


@dataclass(frozen=True, eq=False)
class Watched:
    """A kernel and a feature map that remember the largest block they were asked for."""

    sizes: list[int]

    def gram(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.sizes.append(max(len(x), 0 if y is None else len(y)))
        return Gaussian(1.0).gram(x, y)

    def diagonal(self, x: Tensor) -> Tensor:
        return Gaussian(1.0).diagonal(x)

    def __call__(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return cosines(x)


def test_no_block_is_larger_than_asked(monkeypatch):
    monkeypatch.setattr(linear, "_MOST_NUMBERS", 1000)
    table, kernel, features = make_table("state", rows=300), Watched([]), Watched([])
    solve_kernel_loss(table, features, kernel, ridge=1e-3, block_size=32)
    assert max(kernel.sizes) == 32
    assert max(features.sizes) <= max(32, 1000 // (4 * 6))
    assert len(kernel.sizes) == 10 * 11 // 2  # the half above the diagonal
