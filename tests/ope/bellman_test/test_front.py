"""`koffline.bellman_test` from outside: by hand, what it says, what it refuses, and its
size and power.

The evidence on size and power at length is scripts/bench/bellman_size.py.
"""

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError, PolicyError
from koffline.ope.bellman_test import forms
from tests.ope.bellman_test.problems import ONLY_ACTION, known_problem, simple_q
from tests.ope.importance.cases import log_of_steps
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log
from tests.refusals import refused


def test_by_hand() -> None:
    """Two rows one median apart with bandwidth 1: k = e⁻¹, δ = (2, −1): T = (4 + 1 −
    4/e)/2.
    """
    log = log_of_steps(
        np.array([2.0, -1.0]), 1, n_actions=1, observations=np.array([[0.0], [1.0]])
    )
    result = koffline.bellman_test(
        lambda s, a: 0.0 * s[:, 0], log, ONLY_ACTION, 0.9, bandwidth=1.0
    )
    assert result.statistic == pytest.approx((5.0 - 4.0 / np.e) / 2.0, abs=1e-12)
    # one pair: k δ₁ δ₂
    assert result.kernel_loss == pytest.approx(-2.0 / np.e, abs=1e-12)


@pytest.mark.parametrize("features", [0, 64])
def test_gram_and_features_on_every_log(features: int) -> None:
    for log, policy in ((discrete_log(), SOFT), (continuous_log(), NOISY)):
        result = koffline.bellman_test(
            lambda s, a: 30 + simple_q(s, a), log, policy, 0.9, features=features
        )
        assert result.features == features
        assert result.rejects  # an error of 30 everywhere leaves −3 in every residual


def test_training_rows_are_refused_unless_allowed() -> None:
    log, first, second = (
        discrete_log(),
        *(discrete_log().select(np.arange(a, a + 30)) for a in (0, 30)),
    )
    with pytest.raises(ConfigError, match="allow_training_rows=True"):
        koffline.bellman_test(simple_q, log, SOFT, 0.9, trained_on=log)
    forced = koffline.bellman_test(
        simple_q, log, SOFT, 0.9, trained_on=log, allow_training_rows=True
    )
    assert forced.held_out is False
    assert any("says nothing" in sentence for sentence in forced.warnings)
    assert (
        koffline.bellman_test(simple_q, first, SOFT, 0.9, trained_on=second).held_out
        is True
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_is_no_error(dtype: type) -> None:
    """Exact values leave residuals of 1e-16 or, in float32, 1e-7; an error of a
    thousandth is found.
    """
    never = np.zeros(60, bool)
    log = discrete_log().replace(
        rewards=np.full(60, 0.1, dtype=dtype), terminated=never, truncated=never
    )

    def exact(states, actions):
        return np.full(len(states), 0.1 / (1.0 - 0.97), dtype=dtype)

    result = koffline.bellman_test(exact, log, SOFT, 0.97)
    assert (result.rejects, result.statistic, result.p_value) == (False, 0.0, 1.0)
    assert any("there is nothing to test" in sentence for sentence in result.warnings)
    assert koffline.bellman_test(
        lambda s, a: (exact(s, a) * 1.001).astype(dtype), log, SOFT, 0.97
    ).rejects


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drows": 99}, "did you mean 'draws'"),
        ({"level": 1.5}, "level is 1.5: input should be less than 1"),
        ({"level": 1e-5}, r"or a higher level \(--level\)"),
        ({"draws": 9}, "give draws=19 or more"),
        ({"features": 3}, "features is 3: input should be a multiple of 2"),
        ({"alternative": 0.0}, "alternative is 0.0"),
        ({"gamma": 1.0}, "gamma is 1.0"),
        ({"gamma": None}, "gamma is missing"),
        ({"features": 0}, "features=0 asks for the Gram matrix of 60 rows"),
    ],
)
def test_bad_options_are_one_line(
    options: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_MOST_EXACT_ROWS", 50)
    with refused(ConfigError, message):
        koffline.bellman_test(
            simple_q, discrete_log(), SOFT, **{"gamma": 0.9, **options}
        )


@pytest.mark.parametrize(
    ("q", "log", "policy", "kind", "message"),
    [
        (lambda s, a: np.full(len(s), 1e200), discrete_log(), SOFT, DataError, "units"),
        (
            simple_q,
            discrete_log().replace(rewards=np.full(60, 1e98)),
            SOFT,
            DataError,
            "rescale rewards",
        ),
        (simple_q, discrete_log().select([3]), SOFT, DataError, "fewer than 2 rows"),
        (simple_q, discrete_log(), ONLY_ACTION, PolicyError, "action"),
        (lambda s: s[:, 0], discrete_log(), SOFT, DataError, "a column per action"),
    ],
)
def test_bad_values_logs_and_policies_are_one_line(
    q, log, policy, kind, message
) -> None:
    with refused(kind, message):
        koffline.bellman_test(q, log, policy, 0.9)


def rejections(
    repetitions: int, n: int, kind: str, error: float = 0.0, **options: object
) -> int:
    """Number of rejections at 5 % of Q^π + error · N(0, 1) per row's state and
    action.
    """
    count = 0
    for seed in range(repetitions):
        known = known_problem(seed, n, kind)
        table = error * np.random.default_rng(seed + 999).standard_normal(4096)

        def q(s, a, known=known, table=table):
            place = (np.abs(s[:, 0] * 1e5).astype(np.int64) + 7 * np.asarray(a)) % 4096
            return known.q(s, a) + table[place]

        count += koffline.bellman_test(
            q, known.transitions, known.policy, 0.9, seed=seed, **options
        ).rejects
    return count


def test_size_is_near_the_level() -> None:
    """At 5 % more than 5 of 20 have probability below 1e-3."""
    assert rejections(20, 60, "iid", draws=99) <= 5
    assert rejections(20, 50, "trajectory", draws=99) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["iid", "trajectory", "episodes"])
def test_size(kind: str) -> None:
    """200 repetitions: outside 2 … 21 with probability 0.002 where the rate is 5 %."""
    assert 2 <= rejections(200, 200, kind, draws=299) <= 21


@pytest.mark.slow
def test_power_against_wrong_values() -> None:
    assert rejections(10, 150, "iid", error=1.5) >= 8
