"""Residuals over several steps, on- and off-policy, for Q(s, a) and V(s)."""

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError
from koffline.ope.bellman_test import BellmanSettings
from koffline.ope.bellman_test.windows import action_ratios, block_numbers, window_matrix
from tests import reference_bellman as reference
from tests.ope.bellman_test.problems import ONLY_ACTION, five_rows, known_problem
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log


def test_two_steps_by_hand() -> None:
    """Q = s: δ = (1.9, −0.2, 0.9, 3.2, 0); two steps: δ_t + 0.9 δ_{t+1} inside an episode."""
    result = koffline.bellman_test(
        lambda s, a: s[:, 0], five_rows(), ONLY_ACTION, 0.9, window=2, on_policy=True
    )
    assert result.rows is not None
    np.testing.assert_allclose(result.rows.window_residuals, [1.72, 0.61, 0.9, 3.2, 0.0], atol=1e-12)
    assert any("on_policy=True" in sentence for sentence in result.warnings)


@pytest.mark.parametrize("of_state", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_windows_are_the_recursion(window: int, of_state: bool) -> None:
    log, generator = discrete_log(24, 6), np.random.default_rng(1)
    values, later, ratios = generator.normal(size=24), generator.normal(size=24), generator.uniform(0, 2, 24)
    discounts = 0.9 * (1.0 - log.terminated)
    residuals = log.rewards + discounts * later - values
    found = window_matrix(log, discounts, ratios, window, of_state).T @ residuals
    for row in range(24):
        expected = reference.window_residual(
            log.rewards, discounts, values, later, log.episode_ids, ratios, row, window, of_state
        )
        assert found[row] == pytest.approx(expected, abs=1e-12)


def test_plain_sum_of_rewards_has_the_same_mean() -> None:
    """Σ γ^j r + γ^d V − Q minus ours is Σ γ^j (Q − V) of later steps: mean zero on-policy."""
    known = known_problem(3, 2000, "episodes")
    wrong = lambda s, a: known.q(s, a) + 1.0  # noqa: E731
    result = koffline.bellman_test(
        wrong, known.transitions, known.policy, 0.9, window=3, on_policy=True, method="gamma"
    )
    assert result.rows is not None
    full = np.flatnonzero(np.asarray(known.transitions.steps) < 48)
    mean, spread = (f(result.rows.window_residuals[full]) for f in (np.mean, np.std))
    assert mean == pytest.approx(0.9**3 - 1.0, abs=5 * spread / np.sqrt(len(full)))


def test_blocks_stay_in_episodes() -> None:
    log = discrete_log(24, 6)
    numbers = block_numbers(log, BellmanSettings(window=2, block_length=4))
    np.testing.assert_array_equal(numbers[:12], [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3])


def test_ratios_are_policy_over_behavior() -> None:
    log = discrete_log(12, 3, behavior_log_probabilities=np.full(12, np.log(1 / 3)))
    ratios, sentence = action_ratios(log, SOFT, BellmanSettings(window=2), False)
    expected = SOFT.probabilities(log.observations)[np.arange(12), log.actions] * 3.0
    np.testing.assert_allclose(ratios, expected)
    assert "importance ratios" in sentence
    plain, nothing = action_ratios(log, SOFT, BellmanSettings(), False)
    assert (plain == 1.0).all()
    assert nothing == ""


@pytest.mark.parametrize("kind", ["window", "state"])
def test_off_policy_without_probabilities_is_refused(kind: str) -> None:
    q = (lambda s: s[:, 0]) if kind == "state" else (lambda s, a: s[:, 0])
    window = 3 if kind == "window" else 1
    with pytest.raises(ConfigError, match=r"no behaviour probabilities; give on_policy=True"):
        koffline.bellman_test(q, discrete_log(), SOFT, 0.9, window=window)


def test_zero_behavior_probability_is_refused() -> None:
    log = discrete_log(12, 3)
    chances = np.where(np.arange(12) == 4, -1000.0, 0.0)
    log = log.replace(behavior_log_probabilities=chances)
    with pytest.raises(DataError, match=r"row 4 is exp\(-1e\+03\) although its action was taken"):
        koffline.bellman_test(lambda s, a: s[:, 0], log, SOFT, 0.9, window=2)


def test_window_needs_episodes_and_continuous_ratios_a_density() -> None:
    with pytest.raises(DataError, match="no episodes"):
        koffline.bellman_test(lambda s, a: s[:, 0], continuous_log(), NOISY, 0.9, window=2, on_policy=True)
    log = continuous_log().replace(behavior_log_probabilities=np.zeros(50))
    with pytest.raises(ConfigError, match="density"):
        koffline.bellman_test(lambda s: s[:, 0], log, NOISY, 0.9)


def test_state_function_of_off_policy_log_is_reweighted() -> None:
    """V^π on another policy's log: rejected if taken for on-policy, not with ratios."""
    known = known_problem(5, 1500, behavior=True)
    with_ratios = koffline.bellman_test(known.v, known.transitions, known.policy, 0.9, method="gamma")
    without = koffline.bellman_test(
        known.v, known.transitions, known.policy, 0.9, method="gamma", on_policy=True
    )
    assert with_ratios.kind == "state"
    assert with_ratios.p_value > 0.05
    assert without.p_value < 1e-3
