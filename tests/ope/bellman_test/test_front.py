"""`koffline.bellman_test` from outside: what it takes, what it says, what it refuses."""

import json

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError, KofflineError, PolicyError
from koffline.kernels import Linear
from koffline.ope.cross_fit import cross_fit
from tests.ope.bellman_test.problems import ONLY_ACTION, five_rows, known_problem
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log
from tests.refusals import refused


def simple_q(observations, actions):
    return np.sin(observations[:, 0]) + 0.3 * np.asarray(actions).reshape(len(observations), -1)[:, 0]


def test_result_is_plain_json_and_says_what_it_means() -> None:
    result = koffline.bellman_test(simple_q, discrete_log(), SOFT, 0.9, seed=3)
    plain = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    for name in ("statistic", "p_value", "method", "power", "alternative", "level", "n", "held_out"):
        assert name in plain
    assert plain["rejects"] == (plain["p_value"] <= 0.05)
    assert plain["n"] == 60
    assert plain["held_out"] is None
    assert any("not known which rows" in sentence for sentence in plain["warnings"])
    assert str(result).startswith(("rejected", "not rejected"))


def test_non_rejection_is_no_proof() -> None:
    known = known_problem(0, 150)
    result = koffline.bellman_test(known.q, known.transitions, known.policy, 0.9)
    assert not result.rejects
    assert "no proof" in str(result)
    assert "nothing is said of states without rows" in str(result)
    assert f"{result.detectable:.3g}" in str(result)
    assert result.alternative == pytest.approx(0.1 * result.return_scale)


def test_same_seed_same_result() -> None:
    first, again, other = (
        koffline.bellman_test(simple_q, continuous_log(), NOISY, 0.9, seed=seed) for seed in (1, 1, 2)
    )
    assert (first.statistic, first.p_value, first.power) == (again.statistic, again.p_value, again.power)
    assert first.statistic != other.statistic  # other draws of the policy's actions


@pytest.mark.parametrize("method", ["wild", "spectral", "gamma"])
@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_every_method_on_every_log(method: str, kind: str) -> None:
    log, policy = (discrete_log(), SOFT) if kind == "discrete" else (continuous_log(), NOISY)
    for features in (0, 64):
        result = koffline.bellman_test(
            lambda s, a: 30.0 + simple_q(s, a), log, policy, 0.9, method=method, features=features
        )
        assert result.method == method
        assert result.features == features
        assert result.rejects  # an error of 30 everywhere leaves −3 in every residual


def test_gamma_hint_and_callable_alternative() -> None:
    log = discrete_log().with_metadata(koffline.data.transitions.Metadata(gamma=0.8))
    hinted = koffline.bellman_test(simple_q, log, SOFT)
    assert hinted.gamma == 0.8
    constant = koffline.bellman_test(simple_q, log, SOFT, alternative=lambda s, a: np.full(len(s), 0.4))
    scaled = koffline.bellman_test(simple_q, log, SOFT, alternative=0.4 / hinted.return_scale)
    assert constant.power == pytest.approx(scaled.power)  # the same error, given twice
    assert constant.detectable == pytest.approx(scaled.detectable / 0.4, rel=1e-6)


def test_training_rows_are_refused_unless_allowed() -> None:
    log = discrete_log()
    with pytest.raises(ConfigError, match="allow_training_rows=True"):
        koffline.bellman_test(simple_q, log, SOFT, 0.9, trained_on=log)
    forced = koffline.bellman_test(simple_q, log, SOFT, 0.9, trained_on=log, allow_training_rows=True)
    assert forced.held_out is False
    assert any("says nothing" in sentence for sentence in forced.warnings)
    fresh = koffline.bellman_test(
        simple_q, log.select(np.arange(30)), SOFT, 0.9, trained_on=log.select(np.arange(30, 60))
    )
    assert fresh.held_out is True


def test_cross_fitted_values_and_values_of_rows() -> None:
    log = discrete_log()
    crossed = cross_fit(log, lambda part: simple_q, folds=2)
    result = koffline.bellman_test(crossed, log, SOFT, 0.9)
    assert result.held_out is True
    assert result.n == 60

    class Values:
        now = np.zeros(60)
        later = np.ones(60)
        unseen = 1.0

    rows = koffline.bellman_test(Values(), log, SOFT, 0.9)
    assert rows.rows is not None
    np.testing.assert_allclose(rows.rows.residuals, log.rewards + 0.9 * (1.0 - log.terminated), atol=1e-12)
    assert rows.held_out is True
    with pytest.raises(DataError, match="the log 30 rows"):
        koffline.bellman_test(Values(), log.select(np.arange(30)), SOFT, 0.9)


def test_zero_residuals_are_said() -> None:
    log = five_rows(rewards=np.zeros(5))
    for method in ("wild", "spectral", "gamma"):
        result = koffline.bellman_test(lambda s, a: 0.0 * s[:, 0], log, ONLY_ACTION, 0.9, method=method)
        assert result.statistic == 0.0
        assert result.p_value == 1.0
        assert any("exactly zero" in sentence for sentence in result.warnings)


def constant_reward_log(dtype: type, reward: float = 0.1) -> koffline.Transitions:
    """60 rows of one reward that never end."""
    log = discrete_log()
    return log.replace(
        rewards=np.full(60, reward, dtype=dtype), terminated=np.zeros(60, bool), truncated=np.zeros(60, bool)
    )


@pytest.mark.parametrize("method", ["wild", "spectral", "gamma"])
@pytest.mark.parametrize("gamma", [0.9, 0.97])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_no_error(method: str, gamma: float, dtype: type) -> None:
    """Exact values leave residuals of 1e-16 or, in float32, 1e-7; an error of a thousandth is found."""
    log = constant_reward_log(dtype)

    def exact(states, actions):
        return np.full(len(states), 0.1 / (1.0 - gamma), dtype=dtype)

    result = koffline.bellman_test(exact, log, SOFT, gamma, method=method)
    assert not result.rejects
    assert result.statistic == 0.0
    assert any("there is nothing to test" in sentence for sentence in result.warnings)
    off = koffline.bellman_test(
        lambda s, a: (exact(s, a) * 1.001).astype(dtype), log, SOFT, gamma, method=method
    )
    assert off.rejects


def test_too_few_signs_concern_the_wild_test_alone() -> None:
    """Four residuals: a p-value below the level and the sentence that there is none do not meet."""
    log = discrete_log(10, 10)
    rewards = np.where(np.arange(10) < 4, 1.0, 0.0)
    log = log.replace(episode_ids=None, steps=None, truncated=np.zeros(10, bool))
    log = log.replace(rewards=rewards, terminated=np.ones(10, bool))
    found = {
        method: koffline.bellman_test(lambda s, a: np.zeros(len(s)), log, SOFT, 0.9, method=method)
        for method in ("wild", "spectral", "gamma")
    }
    assert found["wild"].units == 4
    assert not found["wild"].rejects
    assert any("nothing can be rejected" in sentence for sentence in found["wild"].warnings)
    for method in ("spectral", "gamma"):
        assert not any("nothing can be rejected" in sentence for sentence in found[method].warnings)
        assert any("only roughly kept" in sentence for sentence in found[method].warnings)


def test_too_few_rows_are_said() -> None:
    result = koffline.bellman_test(lambda s, a: s[:, 0], five_rows(), ONLY_ACTION, 0.9)
    assert any("too few for level 0.05" in sentence for sentence in result.warnings)
    assert (result.power, result.detectable) == (0.0, None)
    log = discrete_log(20, 10)
    assert any("only roughly" in w for w in koffline.bellman_test(simple_q, log, SOFT, 0.9).warnings)
    blocks = koffline.bellman_test(simple_q, log, SOFT, 0.9, window=2, on_policy=True, multipliers="block")
    assert any("2 blocks of windows" in sentence for sentence in blocks.warnings)


def test_a_kernel_that_sees_nothing_is_said() -> None:
    result = koffline.bellman_test(simple_q, discrete_log(), SOFT, 0.9, bandwidth=0.005)
    assert any("almost alone" in sentence for sentence in result.warnings)
    assert result.power == 0.0
    assert result.detectable is None
    assert "no error of this kind can be found" in str(result)
    long = koffline.bellman_test(simple_q, discrete_log(), SOFT, 0.9, window=11, on_policy=True)
    assert any("longest episode has 10 steps" in sentence for sentence in long.warnings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "bayes"}, "give one of wild, spectral, gamma"),
        ({"metod": "wild"}, "did you mean 'method'"),
        ({"level": 1.5}, "level is 1.5"),
        ({"draws": 9}, "give draws=19 or more"),
        ({"draws": 0}, "whole number of at least 1"),
        ({"window": 0}, "window is 0"),
        ({"bandwidth": -1.0}, "bandwidth is -1.0"),
        ({"features": 3}, "even number"),
        ({"alternative": 0.0}, "alternative is 0.0"),
        ({"multipliers": "rows"}, "give one of step, block"),
        ({"kernel": Linear(), "features": 10}, "no random Fourier features"),
        ({"gamma": 1.0}, "gamma is 1.0"),
        ({"gamma": None}, "gamma is missing"),
        ({"seed": -1}, "seed is -1"),
        ({"level": 1e-5}, r"or a higher level \(--level\)"),
    ],
)
def test_bad_options_are_one_line(options: dict, message: str) -> None:
    gamma = options.pop("gamma", 0.9)
    with pytest.raises(ConfigError, match=message) as caught:
        koffline.bellman_test(simple_q, discrete_log(), SOFT, gamma, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": "x"}, "gamma is 'x'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"level": "x"}, "level is 'x'"),
        ({"bandwidth": "x"}, "bandwidth is 'x'"),
        ({"alternative": "x"}, "alternative is 'x'"),
        ({"features": 1.5}, "features is 1.5"),
    ],
)
def test_wrong_types_are_one_line(options: dict, message: str) -> None:
    with refused(ConfigError, message):
        koffline.bellman_test(simple_q, discrete_log(), SOFT, **{"gamma": 0.9, **options})


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (lambda s, a: np.zeros((len(s), 3)), "shape"),
        (lambda s, a: np.full(len(s), np.nan), "nan"),
        (lambda s, a: np.full(len(s), 1e200), "units"),
        (lambda s, a: np.full(len(s), 1e60), "units"),
        (lambda s, a: 1 / 0, "division by zero"),
    ],
)
def test_bad_values_are_one_line(q, message: str) -> None:
    with pytest.raises(KofflineError, match=message) as caught:
        koffline.bellman_test(q, discrete_log(), SOFT, 0.9)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["wild", "spectral", "gamma"])
def test_huge_rewards(method: str) -> None:
    log = discrete_log()
    scaled = log.replace(rewards=log.rewards * 1e48)
    assert np.isfinite(koffline.bellman_test(simple_q, scaled, SOFT, 0.9, method=method).p_value)
    with pytest.raises(DataError, match="rescale rewards and values"):
        koffline.bellman_test(simple_q, log.replace(rewards=log.rewards * 1e98), SOFT, 0.9, method=method)


def test_policy_must_fit() -> None:
    with pytest.raises(PolicyError):
        koffline.bellman_test(simple_q, discrete_log(), ONLY_ACTION, 0.9)


def test_one_row_is_too_few() -> None:
    with pytest.raises(DataError, match="fewer than 2 rows"):
        koffline.bellman_test(simple_q, discrete_log(60).select([3]), SOFT, 0.9)


def test_gram_matrix_of_many_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koffline.ope.bellman_test.front.MOST_EXACT_ROWS", 50)
    with pytest.raises(ConfigError, match="features=0 asks for the Gram matrix of 60 rows"):
        koffline.bellman_test(simple_q, discrete_log(), SOFT, 0.9, features=0)
