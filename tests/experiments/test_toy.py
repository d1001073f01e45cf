import numpy as np
import pytest
import torch

from koffline.experiments.figure_toy import (
    LinearKernelLoss,
    ToySettings,
    descend,
    draw_log,
    weight_errors,
)
from koffline.kernel_loss import state_value_residual
from koffline.kernels import Linear
from koffline.objectives import KernelLoss

METHODS = ("td0", "fvi", "rg", "gtd2", "sbeed", "kloss")
SETTINGS = ToySettings(seeds=3, iterations=800, copy_every=5)


@pytest.fixture(scope="module")
def run() -> dict[str, dict[str, np.ndarray]]:
    log = draw_log(SETTINGS)
    return {method: descend(method, log, SETTINGS) for method in METHODS}


def test_the_linear_time_loss_is_the_kernel_loss() -> None:
    log = draw_log(ToySettings(seeds=2, tuples=40))
    residual = torch.randn(
        2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    grams = Linear().gram(log.features)
    ours = LinearKernelLoss(log.features).compute_gradients(residual, log.discount)
    theirs = KernelLoss(Linear()).compute_gradients(residual, log.discount, grams)
    assert theirs.next_value is not None
    assert ours.next_value is not None
    torch.testing.assert_close(ours.loss, theirs.loss)
    torch.testing.assert_close(ours.value, theirs.value)
    torch.testing.assert_close(ours.next_value, theirs.next_value)


@pytest.mark.parametrize("method", ["td0", "rg", "kloss"])
def test_a_step_follows_the_gradient(method: str) -> None:
    """One step from (1, 1, 1), the gradient by autograd through the loss."""
    settings = ToySettings(seeds=1, tuples=30, iterations=1, learning_rate=0.3)
    log = draw_log(settings)
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    value = log.features[0] @ weights
    following = log.next_features[0] @ weights
    following = following.detach() if method == "td0" else following
    residual = state_value_residual(log.reward[0], log.discount[0], value, following)
    gram = log.features[0] @ log.features[0].T
    loss = (
        residual @ gram @ residual / 30**2
        if method == "kloss"
        else residual.square().mean()
    )
    (gradient,) = torch.autograd.grad(loss, weights)
    expected = weights.detach() - 0.3 * gradient
    assert descend(method, log, settings)["weights"][0] == pytest.approx(
        expected.numpy(), rel=1e-12
    )


def test_td0_and_fvi_diverge_and_say_when(
    run: dict[str, dict[str, np.ndarray]],
) -> None:
    for descent in (run["td0"], run["fvi"]):
        assert np.all(descent["diverged_at"] > 0)
        for seed, step in enumerate(descent["diverged_at"]):
            after = descent["iterations"] >= step
            assert np.all(np.isnan(descent["mse"][after, seed]))
            assert np.all(np.isfinite(descent["weight_error"][~after, seed]))
            assert descent["weight_error"][~after, seed][-1] > 1e6


@pytest.mark.parametrize("method", ["gtd2", "sbeed", "kloss"])
def test_three_methods_reach_lstd(
    run: dict[str, dict[str, np.ndarray]], method: str
) -> None:
    """GTD2 is the slowest: 1e-4 after some 600 iterations."""
    lstd = draw_log(SETTINGS).least_squares().numpy()
    assert run[method]["weights"] == pytest.approx(lstd, abs=1e-4)


def test_rg_settles_at_its_own_minimum(run: dict[str, dict[str, np.ndarray]]) -> None:
    log = draw_log(SETTINGS)
    change = log.features - log.discount.unsqueeze(-1) * log.next_features
    solution = torch.linalg.lstsq(change, log.reward.unsqueeze(-1)).solution.squeeze(-1)
    assert run["rg"]["weights"] == pytest.approx(solution.numpy(), abs=1e-9)
    # The minimum over infinitely many tuples is 0.179 away from w*; LSTD's is w*
    # itself.
    errors = weight_errors(log.least_squares().numpy())
    assert np.all(run["rg"]["weight_error"][-1] > 3 * errors)
    assert np.all(errors < 0.06)
