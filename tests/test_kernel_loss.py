"""The loss by hand, against naive loops, and the paper's theorems as exact identities
on finite processes.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from koffline.errors import ConfigError, DataError
from koffline.kernel_loss import (
    discount,
    feature_v_statistic,
    kernel_loss,
    mixture_diag_weight,
    state_value_residual,
    u_statistic,
    v_statistic,
)
from koffline.kernels import Gaussian, Linear, random_fourier_features
from tests import reference
from tests.refusals import refused
from tests.strategies import draw_finite_case, finite_cases


def doubles(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def problem(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, generator=generator, dtype=torch.float64)


def test_discount_ends_with_termination_and_knows_intervals():
    terminated = torch.tensor([False, True, False])
    torch.testing.assert_close(discount(0.9, terminated), doubles(0.9, 0.0, 0.9))
    interval = torch.tensor([1, 2, 3])
    torch.testing.assert_close(
        discount(0.5, terminated, interval), doubles(0.5, 0.0, 0.125)
    )
    torch.testing.assert_close(discount(0.5, terminated, 2), doubles(0.25, 0.0, 0.25))
    with pytest.raises(ConfigError, match=r"gamma is 1\.5"):
        discount(1.5, terminated)


def test_state_value_residual_by_hand():
    residual = state_value_residual(
        doubles(1, 2), doubles(0.5, 0), doubles(3, 4), doubles(6, 100)
    )
    torch.testing.assert_close(residual, doubles(1.0 + 3.0 - 3.0, 2.0 - 4.0))


@settings(max_examples=20, deadline=None)
@given(arguments=finite_cases)
def test_expected_residuals_vanish_at_the_exact_values(arguments):
    case = draw_finite_case(**arguments)
    q, probabilities = map(
        torch.tensor, (case.mdp.action_values(case.policy, case.gamma), case.policy)
    )
    s, a, t = (
        torch.tensor(index.flatten()) for index in np.indices(case.mdp.transition.shape)
    )
    discounts = torch.full((len(s),), case.gamma, dtype=torch.float64)
    rewards = torch.tensor(case.mdp.reward)[s, a, t]
    following = (probabilities * q).sum(dim=1)[t]
    residual = state_value_residual(rewards, discounts, q[s, a], following)
    moves = case.mdp.transition
    expected = (residual.numpy().reshape(moves.shape) * moves).sum(axis=2)
    np.testing.assert_allclose(expected, 0.0, atol=1e-10)


@pytest.mark.parametrize(("rows", "width"), [(4, 1), (2, 4)])
def test_residuals_that_would_broadcast_are_refused(rows, width):
    with refused(DataError, match="equal N and R"):
        state_value_residual(
            torch.zeros(4), torch.ones(4), torch.zeros(rows, width), torch.zeros(3, 4)
        )
    with refused(DataError, match="equal N and R"):
        feature_v_statistic(torch.zeros(rows, 4, 2), torch.zeros(3, width))


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_statistics_agree_with_the_loops(rows):
    x, residual = problem(rows)
    gram = Gaussian(0.8).gram(x)
    plain = residual.tolist()
    matrix = gram.tolist()
    v = reference.v_statistic(plain, matrix)
    u = reference.u_statistic(plain, matrix)
    diagonal = reference.diagonal_mean(plain, matrix)
    assert v_statistic(residual, gram).item() == pytest.approx(v, rel=1e-12)
    assert u_statistic(residual, gram).item() == pytest.approx(u, rel=1e-12)
    for weight in (0.0, 0.3, 1.0):
        expected = (1.0 - weight) * u + weight * diagonal
        assert kernel_loss(residual, gram, weight).item() == pytest.approx(
            expected, rel=1e-12
        )
    assert kernel_loss(residual, gram, 1.0 / rows).item() == pytest.approx(v, rel=1e-12)
    assert kernel_loss(residual, gram, 1.0).item() == pytest.approx(
        residual.square().mean().item()
    )


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(2, 8),
    population=st.integers(8, 1000),
    alpha=st.floats(0, 1),
)
def test_the_papers_mini_batch_family_is_one_number(seed, rows, population, alpha):
    """L_KV = (1 − 1/n) U + (1/n) mean k_ii δ_i², hence alpha L_KV + (1 − alpha) L_KU
    has w = alpha / n.
    """
    x, residual = problem(rows, seed)
    gram = Gaussian(1.0).gram(x)
    printed = reference.batch_v_statistic(residual.tolist(), gram.tolist(), population)
    scale = residual.square().mean().item()
    l_kv = kernel_loss(residual, gram, mixture_diag_weight(1.0, population))
    assert l_kv.item() == pytest.approx(printed, rel=1e-12, abs=1e-13 * scale)
    assert kernel_loss(residual, gram, 1.0 / population).item() == pytest.approx(
        printed, abs=1e-13 * scale
    )
    mixture = alpha * printed + (1.0 - alpha) * u_statistic(residual, gram).item()
    weight = mixture_diag_weight(alpha, population)
    assert kernel_loss(residual, gram, weight).item() == pytest.approx(
        mixture, abs=1e-13 * scale
    )


def test_the_mini_batch_form_is_unbiased_for_the_whole_v_statistic():
    """Averaged over every mini-batch of 3 out of 6 rows, L_KV is the V-statistic of the
    6.
    """
    x, residual = problem(6)
    gram = Gaussian(0.8).gram(x)
    values = []
    for chosen in itertools.combinations(range(6), 3):
        index = torch.tensor(chosen)
        weight = mixture_diag_weight(1.0, 6)
        values.append(
            kernel_loss(residual[index], gram[index][:, index], weight).item()
        )
    assert np.mean(values) == pytest.approx(
        v_statistic(residual, gram).item(), rel=1e-12
    )


def test_feature_form_is_the_v_statistic_of_its_kernel():
    x, residual = problem(40)
    torch.testing.assert_close(
        feature_v_statistic(x, residual), v_statistic(residual, Linear().gram(x))
    )
    features = random_fourier_features(
        Gaussian(1.0), 2, 40_000, torch.Generator().manual_seed(0)
    )
    exact = v_statistic(residual, Gaussian(1.0).gram(x)).item()
    assert feature_v_statistic(features(x), residual).item() == pytest.approx(
        exact, rel=0.1
    )


@pytest.mark.parametrize(
    ("kind", "statistic", "arguments", "words"),
    [
        *(
            (DataError, statistic, (residual, torch.eye(4)), "residual has shape")
            for residual in (
                torch.zeros(4, 1),
                torch.zeros(3),
                torch.zeros(2, 2, 4),
                torch.tensor(1.0),
            )
            for statistic in (
                v_statistic,
                u_statistic,
                lambda r, g: kernel_loss(r, g, 0.5),
            )
        ),
        (
            DataError,
            v_statistic,
            (torch.zeros(3, 4), torch.zeros(2, 4, 4)),
            "residual has shape",
        ),
        (DataError, u_statistic, (torch.zeros(1), torch.eye(1)), "at least 2"),
        (
            ConfigError,
            kernel_loss,
            (torch.zeros(2), torch.eye(2), 1.1),
            "diag_weight is",
        ),
        (
            ConfigError,
            kernel_loss,
            (torch.zeros(2), torch.eye(2), float("nan")),
            "diag_weight is",
        ),
        (ConfigError, mixture_diag_weight, (2.0, 10), "alpha is 2"),
    ],
)
def test_what_makes_no_sense_is_refused(kind, statistic, arguments, words):
    with refused(kind, match=words):
        statistic(*arguments)


KERNEL = Gaussian(1.5)


def exact_loss(case, value):
    """L_K(V) = E_μ[k R V R V̄] through the library: weights become multiplicities n μ
    of the n states.
    """
    residual = reference.expected_residual(case.moves, case.gains, case.gamma, value)
    scaled = torch.tensor(len(value) * case.weights * np.array(residual))
    return v_statistic(scaled, KERNEL.gram(torch.tensor(case.points))).item()


def gram_of(case):
    return reference.gram(
        lambda x, y: reference.gaussian(x, y, 1.5), case.points, case.points
    )


def guess_for(case, seed):
    return case.values + np.random.default_rng(seed).normal(size=len(case.values))


@settings(max_examples=10, deadline=None)
@given(arguments=finite_cases, seed=st.integers(0, 1000))
def test_validate_loss_is_zero_at_the_true_values_and_positive_elsewhere(
    arguments, seed
):
    """thm:validate"""
    case = draw_finite_case(**arguments)
    scale = 1.0 + np.abs(case.gains).max() ** 2
    assert exact_loss(case, case.values) < 1e-20 * scale
    guess = guess_for(case, seed)
    residual = reference.expected_residual(case.moves, case.gains, case.gamma, guess)
    loss = exact_loss(case, guess)
    assert loss == pytest.approx(
        reference.kernel_norm(case.weights, residual, gram_of(case)), rel=1e-9
    )
    smallest = np.linalg.eigvalsh(gram_of(case)).min()
    # positive: states have different points
    least = smallest * np.sum((case.weights * residual) ** 2)
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
    residual = np.array(
        reference.expected_residual(case.moves, case.gains, case.gamma, guess)
    )
    projections = functions.T @ (case.weights * residual)
    loss = exact_loss(case, guess)
    assert loss == pytest.approx(
        np.sum(eigenvalues * projections**2), rel=1e-9, abs=1e-13
    )
    squared = np.sum(case.weights * residual**2)
    assert squared == pytest.approx(np.sum(projections**2), rel=1e-9)
    assert loss <= eigenvalues.max() * squared * (1.0 + 1e-12)
    features = torch.tensor(functions * np.sqrt(np.maximum(eigenvalues, 0.0)))
    scaled = torch.tensor(len(root) * case.weights * residual)
    assert feature_v_statistic(features, scaled).item() == pytest.approx(
        loss, rel=1e-9, abs=1e-13
    )


@settings(max_examples=10, deadline=None)
@given(arguments=finite_cases, seed=st.integers(0, 1000))
def test_rkhs_loss_is_the_largest_squared_mean_over_the_unit_ball(arguments, seed):
    """thm:rkhs: f = Σ_s c_s k(s, ·) has norm² cᵀKc; the maximiser is E_μ[R V(s) k(s,
    ·)].
    """
    case = draw_finite_case(**arguments)
    guess = guess_for(case, seed)
    gram = gram_of(case)
    residual = np.array(
        reference.expected_residual(case.moves, case.gains, case.gamma, guess)
    )
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
    """Minimiser of the V-statistic with the linear kernel over θ: its gradient is
    affine, so one solve.
    """
    gram = Linear().gram(features)

    def loss(theta):
        return v_statistic(
            rewards + gamma * next_features @ theta - features @ theta, gram
        )

    slope = torch.func.grad(loss)
    at_zero = slope(torch.zeros(features.shape[1], dtype=torch.float64))
    units = torch.eye(features.shape[1], dtype=torch.float64)
    curvature = torch.stack([slope(unit) - at_zero for unit in units], dim=1)
    return torch.linalg.solve(curvature, -at_zero)


@pytest.mark.parametrize("seed", range(2))
def test_same_as_td_with_the_linear_kernel(seed):
    """cor:same_as_td"""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(60, 4))
    next_features = rng.normal(size=(60, 4))
    rewards = rng.normal(size=60)
    expected = reference.lstd(features, next_features, rewards, 0.9)
    weights = minimiser(
        torch.tensor(features), torch.tensor(next_features), torch.tensor(rewards), 0.9
    )
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-7, atol=1e-9)
