"""`koffline.bellman_test` from outside: by hand, over windows, what it says, what it refuses."""

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError, PolicyError
from koffline.kernels import Linear
from koffline.ope.bellman_test import front
from koffline.ope.bellman_test.rows import window_matrix
from tests import reference_bellman as reference
from tests.ope.bellman_test.problems import ONLY_ACTION, known_problem, simple_q
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log
from tests.refusals import refused


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


@pytest.mark.parametrize("of_state", [False, True])
@pytest.mark.parametrize("window", [1, 3, 7])
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


def test_state_function_of_off_policy_log_is_reweighted() -> None:
    """V^π on another policy's log: rejected if taken for on-policy, not with ratios."""
    known = known_problem(5, 1500, behavior=True)
    with_ratios, without = (
        koffline.bellman_test(known.v, known.transitions, known.policy, 0.9, on_policy=given)
        for given in (None, True)
    )
    assert with_ratios.kind == "state"
    assert with_ratios.p_value > 0.05
    assert without.p_value == 1e-3  # of 999 draws


def test_training_rows_are_refused_unless_allowed() -> None:
    log, first, second = discrete_log(), *(discrete_log().select(np.arange(a, a + 30)) for a in (0, 30))
    with pytest.raises(ConfigError, match="allow_training_rows=True"):
        koffline.bellman_test(simple_q, log, SOFT, 0.9, trained_on=log)
    forced = koffline.bellman_test(simple_q, log, SOFT, 0.9, trained_on=log, allow_training_rows=True)
    assert forced.held_out is False
    assert any("says nothing" in sentence for sentence in forced.warnings)
    assert koffline.bellman_test(simple_q, first, SOFT, 0.9, trained_on=second).held_out is True


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_no_error(dtype: type) -> None:
    """Exact values leave residuals of 1e-16 or, in float32, 1e-7; an error of a thousandth is found."""
    never = np.zeros(60, bool)
    log = discrete_log().replace(rewards=np.full(60, 0.1, dtype=dtype), terminated=never, truncated=never)

    def exact(states, actions):
        return np.full(len(states), 0.1 / (1.0 - 0.97), dtype=dtype)

    result = koffline.bellman_test(exact, log, SOFT, 0.97)
    assert (result.rejects, result.statistic, result.p_value) == (False, 0.0, 1.0)
    assert any("there is nothing to test" in sentence for sentence in result.warnings)
    off = koffline.bellman_test(lambda s, a: (exact(s, a) * 1.001).astype(dtype), log, SOFT, 0.97)
    assert off.rejects


V_OFF_POLICY = {"q": lambda s: s[:, 0]}
NEVER = discrete_log(12, 3, behavior_log_probabilities=np.where(np.arange(12) == 4, -1000.0, 0.0))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"drows": 99}, ConfigError, "did you mean 'draws'"),
        ({"level": 1.5}, ConfigError, "level is 1.5: input should be less than 1"),
        ({"level": 1e-5}, ConfigError, r"or a higher level \(--level\)"),
        ({"draws": 9}, ConfigError, "give draws=19 or more"),
        ({"features": 3}, ConfigError, "features is 3: input should be a multiple of 2"),
        ({"alternative": 0.0}, ConfigError, "alternative is 0.0"),
        ({"kernel": Linear(), "features": 10}, ConfigError, "no random Fourier features"),
        ({"gamma": 1.0}, ConfigError, "gamma is 1.0"),
        ({"gamma": None}, ConfigError, "gamma is missing"),
        ({"features": 0}, ConfigError, "features=0 asks for the Gram matrix of 60 rows"),
        ({"window": 3}, ConfigError, r"no behaviour probabilities; give on_policy=True"),
        ({"q": lambda s, a: np.full(len(s), 1e200)}, DataError, "units"),
        ({"log": discrete_log().replace(rewards=np.full(60, 1e98))}, DataError, "rescale rewards"),
        ({"log": discrete_log().select([3])}, DataError, "fewer than 2 rows"),
        ({"policy": ONLY_ACTION}, PolicyError, "action"),
        (V_OFF_POLICY, ConfigError, "no behaviour probabilities"),
        (V_OFF_POLICY | {"log": NEVER}, DataError, r"row 4 is exp\(-1e\+03\) although its action was taken"),
        (
            V_OFF_POLICY
            | {"log": continuous_log().replace(behavior_log_probabilities=np.zeros(50)), "policy": NOISY},
            ConfigError,
            "density",
        ),
    ],
)
def test_what_cannot_be_tested_is_refused_in_one_line(changes, kind, message, monkeypatch) -> None:
    monkeypatch.setattr(front, "_MOST_EXACT_ROWS", 50)
    given = {"q": simple_q, "log": discrete_log(), "policy": SOFT, "gamma": 0.9, **changes}
    with refused(kind, message):
        koffline.bellman_test(given.pop("q"), given.pop("log"), given.pop("policy"), **given)
