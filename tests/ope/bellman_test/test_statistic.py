"""T against loops over pairs, by hand, and in features; windows, weights and permutations."""

import numpy as np
import pytest
import torch

import koffline
from koffline.kernels import Gaussian, Laplacian, Linear
from koffline.ope.bellman_test import BellmanSettings
from koffline.ope.bellman_test.case import make_case
from koffline.ope.bellman_test.feature_form import FeatureForm
from koffline.ope.bellman_test.forms import gram_form, random_signs
from koffline.ope.bellman_test.kernel_space import draw_features
from koffline.ope.problem import prepare_problem
from koffline.ope.value_sources import as_value_function
from tests import reference_bellman as reference
from tests.ope.bellman_test.problems import ONLY_ACTION, five_rows, known_problem
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log


def simple_q(observations, actions):
    return np.sin(observations[:, 0]) + 0.3 * np.asarray(actions).reshape(len(observations), -1)[:, 0]


def case_of(log, policy, q=simple_q, gamma=0.9, **options):
    function = as_value_function(q, log.action_space, log.observation_shape)
    return make_case(function, log, policy, gamma, BellmanSettings(**options), 0)


def exact_form(case):
    return gram_form(case.scores, case.shift_scores, case.inputs, case.space.kernel, case.n)


def test_by_hand() -> None:
    """Two rows one median apart with bandwidth 1: k = e⁻¹, δ = (2, −1): T = (4 + 1 − 4/e)/2."""
    log = koffline.Transitions(
        observations=np.array([[0.0], [1.0]]),
        actions=np.zeros(2, dtype=np.int64),
        rewards=np.array([2.0, -1.0]),
        next_observations=np.array([[5.0], [5.0]]),
        terminated=np.array([True, True]),
        truncated=np.zeros(2, bool),
        action_space=koffline.Discrete(1),
    )
    result = koffline.bellman_test(lambda s, a: 0.0 * s[:, 0], log, ONLY_ACTION, 0.9, bandwidth=1.0)
    assert result.statistic == pytest.approx((5.0 - 4.0 / np.e) / 2.0, abs=1e-12)
    assert result.kernel_loss == pytest.approx(-2.0 / np.e, abs=1e-12)  # one pair: k δ₁ δ₂


def test_expected_values_by_hand() -> None:
    """Q = state number: δ = r + 0.9·s' − s, and no future after a terminal row."""
    result = koffline.bellman_test(lambda s, a: s[:, 0], five_rows(), ONLY_ACTION, 0.9)
    assert result.rows is not None
    np.testing.assert_allclose(result.rows.residuals, [1.9, -0.2, 0.9, 3.2, 0.0], atol=1e-12)
    np.testing.assert_allclose(result.rows.values, [0.0, 1.0, 2.0, 0.0, 3.0])


@pytest.mark.parametrize("weighted", [False, True])
def test_statistic_is_the_double_loop(weighted: bool) -> None:
    weights = np.random.default_rng(0).integers(0, 3, size=60).astype(float) if weighted else None
    log = discrete_log(weights=weights) if weighted else discrete_log()
    case = case_of(log, SOFT)
    form = exact_form(case)
    expected = reference.statistic(
        case.columns.residuals, case.inputs.numpy(), case.space.bandwidth, case.problem.row_weights
    )
    assert form.statistic == pytest.approx(expected, rel=1e-10)


def test_kernel_places_are_those_of_every_other_estimator() -> None:
    for log, policy in ((discrete_log(), SOFT), (continuous_log(), NOISY)):
        case = case_of(log, policy)
        problem = prepare_problem(log, policy, 0.9, 1, np.random.default_rng(0))
        np.testing.assert_allclose(case.inputs.numpy(), problem.kernel_inputs, atol=1e-12)


@pytest.mark.parametrize("multipliers", ["step", "block"])
def test_products_of_scores_and_draws_are_loops(multipliers: str) -> None:
    case = case_of(
        discrete_log(20, 5), SOFT, window=3, on_policy=True, multipliers=multipliers, block_length=2
    )
    form = exact_form(case)
    expected = reference.products(case.scores.toarray(), case.inputs.numpy(), case.space.bandwidth, case.n)
    np.testing.assert_allclose(form.products, expected, atol=1e-12)
    shifts = case.shift_scores.toarray()
    both = reference.products(np.vstack([shifts, case.scores.toarray()]), case.inputs.numpy(), 1.0, case.n)
    wide = gram_form(case.scores, case.shift_scores, case.inputs, Gaussian(1.0), case.n)
    count = len(shifts)
    np.testing.assert_allclose(wide.shifted, both[:count, :count], atol=1e-12)
    np.testing.assert_allclose(wide.crossed, both[:count, count:], atol=1e-12)
    assert case.units == (20 if multipliers == "step" else 12)  # blocks of 2, 2 and 1 rows in each episode
    drawn = form.draw(7, np.random.default_rng(5))
    signs = random_signs((7, len(expected)), np.random.default_rng(5))
    for draw in range(7):
        assert drawn.statistics[draw] == pytest.approx(signs[draw] @ expected @ signs[draw], rel=1e-10)


def test_both_multipliers_share_one_statistic_of_window_residuals() -> None:
    found = []
    for multipliers in ("step", "block"):
        case = case_of(discrete_log(), SOFT, window=4, on_policy=True, multipliers=multipliers)
        form = exact_form(case)
        found.append(form.statistic)
        expected = reference.statistic(case.window_residuals, case.inputs.numpy(), case.space.bandwidth)
        assert form.statistic == pytest.approx(expected, rel=1e-10)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


@pytest.mark.parametrize("multipliers", ["step", "block"])
@pytest.mark.parametrize("kernel", [Gaussian(1.3), Laplacian(2.0)])
def test_features_and_gram_are_one_form(multipliers: str, kernel: object) -> None:
    """With the Gram matrix of the features themselves everything agrees to rounding."""
    case = case_of(
        discrete_log(), SOFT, window=2, on_policy=True, multipliers=multipliers, kernel=kernel, block_length=3
    )
    features = draw_features(kernel, case.inputs.shape[1], 64, 0)
    by_features = FeatureForm(case.scores, case.shift_scores, case.inputs, features, case.n)

    exact = gram_form(case.scores, case.shift_scores, features(case.inputs), Linear(), case.n)
    assert by_features.statistic == pytest.approx(exact.statistic, rel=1e-10)
    left, right = exact.moments(), by_features.moments()
    for name in ("mean", "variance", "linear", "quadratic"):
        assert getattr(left, name) == pytest.approx(getattr(right, name), rel=1e-9), name
    spectrum = np.linalg.eigvalsh(exact.products)[-20:]
    np.testing.assert_allclose(by_features.eigenvalues()[0][-20:], spectrum, atol=1e-10 * spectrum[-1])
    few = by_features.condensed()
    np.testing.assert_allclose(few.products, exact.products, atol=1e-12)
    np.testing.assert_allclose(few.crossed, exact.crossed, atol=1e-12)
    np.testing.assert_allclose(few.shifted, exact.shifted, atol=1e-12)
    drawn = by_features.draw(3, np.random.default_rng(1))
    signs = random_signs((len(exact.products), 3), np.random.default_rng(1)).T
    for draw in range(3):
        assert drawn.statistics[draw] == pytest.approx(signs[draw] @ exact.products @ signs[draw], rel=1e-9)
        others = exact.crossed - np.diag(np.diagonal(exact.crossed))
        assert drawn.linear[draw] == pytest.approx(signs[draw] @ others.sum(axis=0), rel=1e-8)
    assert drawn.moments.mean == pytest.approx(left.mean, rel=1e-9)
    assert drawn.moments.quadratic == pytest.approx(left.quadratic, rel=1e-9)


def test_blocks_of_features_are_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(discrete_log(), SOFT, window=3, on_policy=True)
    features = draw_features(case.space.kernel, case.inputs.shape[1], 32, 0)
    whole = FeatureForm(case.scores, case.shift_scores, case.inputs, features, case.n)
    expected = whole.statistic, whole.moments()
    monkeypatch.setattr("koffline.ope.bellman_test.feature_form._BLOCK", 7)
    parts = FeatureForm(case.scores, case.shift_scores, case.inputs, features, case.n)
    assert len(list(parts._blocks())) > 5
    assert parts.statistic == pytest.approx(expected[0], rel=1e-12)
    assert parts.moments().variance == pytest.approx(expected[1].variance, rel=1e-10)


def test_features_approach_the_kernel() -> None:
    known = known_problem(0, 300)
    exact = koffline.bellman_test(known.q, known.transitions, known.policy, 0.9, features=0, method="gamma")
    many = koffline.bellman_test(known.q, known.transitions, known.policy, 0.9, features=4000, method="gamma")
    assert many.statistic == pytest.approx(exact.statistic, rel=0.05)
    assert many.p_value == pytest.approx(exact.p_value, abs=0.05)  # m^(−1/2) = 0.011


def test_order_of_rows_does_not_matter() -> None:
    known = known_problem(1, 80)
    order = np.random.default_rng(0).permutation(80)
    for method in ("gamma", "spectral"):
        first, second = (
            koffline.bellman_test(known.q, rows, known.policy, 0.9, method=method)
            for rows in (known.transitions, known.transitions.select(order))
        )
        assert first.statistic == pytest.approx(second.statistic, rel=1e-9)
        assert first.p_value == pytest.approx(second.p_value, rel=1e-6)
        assert first.detectable == pytest.approx(second.detectable, rel=1e-6)


@pytest.mark.parametrize("features", [0, 64])
@pytest.mark.parametrize("method", ["wild", "spectral", "gamma"])
def test_rows_of_weight_zero_are_not_there(method: str, features: int) -> None:
    """Half of the rows switched off is the log without them: T, U, witness, power and places."""
    known = known_problem(4, 120)
    weights = np.where(np.arange(120) % 2 == 0, 1.0 + np.arange(120) % 3, 0.0)
    some = known.transitions.replace(weights=weights)

    def q(states, actions):
        return known.q(states, actions) + 1.0 * (states[:, 0] > 0.0)

    off, gone = (
        koffline.bellman_test(q, log, known.policy, 0.9, method=method, features=features)
        for log in (some, some.select(np.flatnonzero(weights)))
    )
    for name in (
        "n", "units", "statistic", "p_value", "kernel_loss", "rms_residual", "power", "detectable"
    ):  # fmt: skip
        assert getattr(off, name) == pytest.approx(getattr(gone, name), rel=1e-6), name
    places = known.transitions.observations[:7], known.transitions.actions[:7]
    for name in ("witness", "mean", "standard_error", "effective_rows"):
        np.testing.assert_allclose(
            getattr(off.witness(*places), name), getattr(gone.witness(*places), name), rtol=1e-9
        )
    for left, right in zip(off.witness.top_regions(3), gone.witness.top_regions(3), strict=True):
        assert (left.size, left.action) == (right.size, right.action)
        assert left.z_score == pytest.approx(right.z_score, rel=1e-9)
        assert left.threshold == pytest.approx(right.threshold, rel=1e-9)


def test_weighted_sizes_by_loops() -> None:
    """T = ‖Σ wψδ‖²/n with Σ w = n; U = Σ_{i≠j} wδkδw / Σ_{i≠j} w w; f* = Σ wδk / Σ w."""
    weights = np.tile([0.0, 1.0, 3.0], 20)
    log = discrete_log(weights=weights)
    result = koffline.bellman_test(simple_q, log, SOFT, 0.9, features=0)
    assert result.witness is not None
    gram = result.witness.space.kernel.gram(torch.as_tensor(result.witness.inputs)).numpy()
    both = weights * result.rows.residuals
    whole, own = both @ gram @ both, both**2 @ np.diagonal(gram)
    assert result.statistic == pytest.approx(40 * whole / weights.sum() ** 2, rel=1e-9)
    pairs = weights.sum() ** 2 - np.square(weights).sum()
    assert result.kernel_loss == pytest.approx((whole - own) / pairs, rel=1e-9)
    found = result.witness(log.observations, log.actions).witness
    np.testing.assert_allclose(found, gram @ both / weights.sum(), atol=1e-12)


def test_weight_two_is_two_rows_in_the_statistic_up_to_n() -> None:
    """A row of weight two enters the loss V̂ = T/n as two rows would; n counts it once."""
    log = discrete_log(20, 1, truncated=np.ones(20, bool), terminated=np.zeros(20, bool))
    log = log.replace(episode_ids=None, steps=None)
    twice = log.select(np.append(np.arange(20), 3))
    weighted = log.replace(weights=np.where(np.arange(20) == 3, 2.0, 1.0))
    results = [
        koffline.bellman_test(simple_q, rows, SOFT, 0.9, kernel=Gaussian(1.0)) for rows in (weighted, twice)
    ]
    assert [r.n for r in results] == [20, 21]
    assert results[0].statistic / 20 == pytest.approx(results[1].statistic / 21, rel=1e-9)


def test_units_scale_with_rewards() -> None:
    """Rewards and values times 1e6: T times 1e12, p and power alike."""
    known = known_problem(2, 100)
    big = known.transitions.replace(rewards=known.transitions.rewards * 1e6)
    one = koffline.bellman_test(known.q, known.transitions, known.policy, 0.9)
    other = koffline.bellman_test(lambda s, a: 1e6 * known.q(s, a), big, known.policy, 0.9)
    assert other.statistic == pytest.approx(1e12 * one.statistic, rel=1e-9)
    assert other.p_value == one.p_value
    assert other.power == one.power
    assert other.detectable == pytest.approx(1e6 * one.detectable, rel=1e-6)


def test_signs_are_fair_and_reproducible() -> None:
    signs = random_signs((300, 101), np.random.default_rng(0))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert abs(signs.mean()) < 5 / np.sqrt(300 * 101)
    np.testing.assert_array_equal(signs, random_signs((300, 101), np.random.default_rng(0)))
    assert torch.as_tensor(signs).dtype == torch.float64
