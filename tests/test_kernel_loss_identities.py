"""The paper's theorems as exact identities on random finite processes, float64, against naive loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.kernel_loss import feature_v_statistic, v_statistic
from koffline.kernels import Gaussian, Linear
from tests import reference
from tests.strategies import draw_finite_case, finite_cases

KERNEL = Gaussian(1.5)


def exact_loss(case, value):
    """L_K(V) = E_μ[k R V R V̄] through the library: weights become multiplicities n μ of the n states."""
    residual = reference.expected_residual(case.moves, case.gains, case.gamma, value)
    scaled = torch.tensor(len(value) * case.weights * np.array(residual))
    return v_statistic(scaled, KERNEL.gram(torch.tensor(case.points))).item()


def gram_of(case):
    return reference.gram(lambda x, y: reference.gaussian(x, y, 1.5), case.points, case.points)


def guess_for(case, seed):
    return case.values + np.random.default_rng(seed).normal(size=len(case.values))


@settings(max_examples=10, deadline=None)
@given(arguments=finite_cases, seed=st.integers(0, 1000))
def test_validate_loss_is_zero_at_the_true_values_and_positive_elsewhere(arguments, seed):
    """thm:validate"""
    case = draw_finite_case(**arguments)
    scale = 1.0 + np.abs(case.gains).max() ** 2
    assert exact_loss(case, case.values) < 1e-20 * scale
    guess = guess_for(case, seed)
    residual = reference.expected_residual(case.moves, case.gains, case.gamma, guess)
    loss = exact_loss(case, guess)
    assert loss == pytest.approx(reference.kernel_norm(case.weights, residual, gram_of(case)), rel=1e-9)
    smallest = np.linalg.eigvalsh(gram_of(case)).min()
    least = smallest * np.sum((case.weights * residual) ** 2)  # positive: states have different points
    assert loss >= 0.999 * least - 1e-14
    assert loss > 0.0


@settings(max_examples=8, deadline=None)
@given(arguments=finite_cases, seed=st.integers(0, 1000))
def test_dual_loss_is_a_norm_of_the_value_error(arguments, seed):
    """thm:Vfunction"""
    case = draw_finite_case(**arguments)
    guess = guess_for(case, seed)
    dual = reference.dual_gram(case.moves, case.weights, case.gamma, gram_of(case))
    error = guess - case.values
    expected = reference.kernel_norm(case.weights, error, dual)
    assert exact_loss(case, guess) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=10, deadline=None)
@given(arguments=finite_cases, seed=st.integers(0, 1000))
def test_eigen_loss_is_a_sum_over_eigenfunctions_and_bounded_by_l2(arguments, seed):
    """thm:eigen: e_i orthonormal in L2(μ) and Σ_t k(s, t) μ(t) e_i(t) = λ_i e_i(s)."""
    case = draw_finite_case(**arguments)
    guess = guess_for(case, seed)
    root = np.sqrt(case.weights)
    eigenvalues, vectors = np.linalg.eigh(root[:, None] * gram_of(case) * root[None, :])
    functions = vectors / root[:, None]
    np.testing.assert_allclose(
        (functions * case.weights[:, None]).T @ functions, np.eye(len(root)), atol=1e-9
    )
    residual = np.array(reference.expected_residual(case.moves, case.gains, case.gamma, guess))
    projections = functions.T @ (case.weights * residual)
    loss = exact_loss(case, guess)
    assert loss == pytest.approx(np.sum(eigenvalues * projections**2), rel=1e-9, abs=1e-13)
    squared = np.sum(case.weights * residual**2)
    assert squared == pytest.approx(np.sum(projections**2), rel=1e-9)
    assert loss <= eigenvalues.max() * squared * (1.0 + 1e-12)
    features = torch.tensor(functions * np.sqrt(np.maximum(eigenvalues, 0.0)))
    scaled = torch.tensor(len(root) * case.weights * residual)
    assert feature_v_statistic(features, scaled).item() == pytest.approx(loss, rel=1e-9, abs=1e-13)


@settings(max_examples=10, deadline=None)
@given(arguments=finite_cases, seed=st.integers(0, 1000))
def test_rkhs_loss_is_the_largest_squared_mean_over_the_unit_ball(arguments, seed):
    """thm:rkhs: f = Σ_s c_s k(s, ·) has norm² cᵀKc; the maximiser is E_μ[R V(s) k(s, ·)]."""
    case = draw_finite_case(**arguments)
    guess, gram = guess_for(case, seed), gram_of(case)
    residual = np.array(reference.expected_residual(case.moves, case.gains, case.gamma, guess))
    loss = exact_loss(case, guess)

    def squared_mean(coefficients):
        function = gram @ coefficients / np.sqrt(coefficients @ gram @ coefficients)
        return np.sum(case.weights * residual * function) ** 2

    best = case.weights * residual
    assert best @ gram @ best == pytest.approx(loss, rel=1e-9)
    assert squared_mean(best) == pytest.approx(loss, rel=1e-9)
    for coefficients in np.random.default_rng(seed).normal(size=(20, len(residual))):
        assert squared_mean(coefficients) <= loss * (1.0 + 1e-9)


def minimiser(features, next_features, rewards, gamma):
    """Minimiser of the V-statistic with the linear kernel over θ: its gradient is affine, so one solve."""
    gram = Linear().gram(features)

    def loss(theta):
        return v_statistic(rewards + gamma * next_features @ theta - features @ theta, gram)

    slope = torch.func.grad(loss)
    at_zero = slope(torch.zeros(features.shape[1], dtype=torch.float64))
    units = torch.eye(features.shape[1], dtype=torch.float64)
    curvature = torch.stack([slope(unit) - at_zero for unit in units], dim=1)
    return torch.linalg.solve(curvature, -at_zero)


@pytest.mark.parametrize("seed", range(2))
def test_same_as_td_with_the_linear_kernel(seed):
    """cor:same_as_td"""
    rng = np.random.default_rng(seed)
    features, next_features, rewards = rng.normal(size=(60, 4)), rng.normal(size=(60, 4)), rng.normal(size=60)
    expected = reference.lstd(features, next_features, rewards, 0.9)
    found = minimiser(torch.tensor(features), torch.tensor(next_features), torch.tensor(rewards), 0.9)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-7, atol=1e-9)
