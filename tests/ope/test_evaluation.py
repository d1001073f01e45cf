"""The estimate against exact answers, and what it does with odd logs. Settings are cut down to stay quick."""

import numpy as np
import pytest

import koffline
from koffline.config import EvaluationSettings
from koffline.errors import KofflineError
from koffline.policies import DiscretePolicy
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.problems import QUICK, SOFT, discrete_log

SHORT = {"steps": 2500, "full_replicas": 2, "resampled_replicas": 2}
# Problem: rows, tolerance relative to J from the log's own starts. Each tolerance is about twice the largest
# error over five other seeds at these settings; what remains is the sampling error of the log itself.
TOLERANCES = {
    "chain_on": (4000, 0.08),
    "chain_off": (4000, 0.10),
    "chain_off_limited": (4000, 0.10),
    "chain_tuples": (4000, 0.10),
    "grid_on": (4000, 0.15),
    "linear_on": (4000, 0.15),
    "linear_off_deterministic": (4000, 0.20),
    "linear_tuples": (4000, 0.15),
}


DEFAULT_SUITE = ("chain_off", "linear_tuples")  # discrete and continuous, episodes and tuples


@pytest.mark.parametrize(
    "name",
    [name if name in DEFAULT_SUITE else pytest.param(name, marks=pytest.mark.slow) for name in TOLERANCES],
)
def test_exact_answers(name: str) -> None:
    rows, tolerance = TOLERANCES[name]
    problem = EXACT_PROBLEMS[name](11, rows)
    estimate = koffline.evaluate(problem.transitions, problem.policy, problem.gamma, **SHORT)
    truth = problem.value_at_starts
    assert estimate.value == pytest.approx(truth, rel=tolerance)
    assert estimate.diagnostics["estimates_by_head"]["fqe"] == pytest.approx(truth, rel=1.5 * tolerance)


def test_same_seed_same_estimate_other_seed_another() -> None:
    first, again, other = (koffline.evaluate(discrete_log(), SOFT, 0.9, seed=s, **QUICK) for s in (1, 1, 2))
    assert first.value == again.value
    assert first.interval == again.interval
    assert first.diagnostics == again.diagnostics
    assert other.value != first.value


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_estimates_scale_with_the_rewards(scale: float) -> None:
    log = discrete_log()
    one, scaled = (
        koffline.evaluate(log.replace(rewards=log.rewards * factor), SOFT, 0.9, **QUICK)
        for factor in (1.0, scale)
    )
    # float32 training sees the same scaled rewards up to their last bit; 60 steps amplify it little
    assert scaled.value == pytest.approx(one.value * scale, rel=1e-3)
    assert scaled.interval.low == pytest.approx(one.interval.low * scale, rel=1e-2)


def test_terminals_only_is_a_bandit() -> None:
    n = 2000
    generator = np.random.default_rng(0)
    actions = generator.integers(3, size=n)
    ended = np.ones(n, bool)
    columns = {"actions": actions, "rewards": np.array([1.0, 2.0, 6.0])[actions]}
    log = discrete_log(n, length=1, terminated=ended, truncated=~ended, **columns)
    policy = DiscretePolicy(3, lambda s: np.tile([0.5, 0.25, 0.25], (len(s), 1)))
    estimate = koffline.evaluate(log, policy, 0.99, **{**SHORT, "steps": 800})
    assert estimate.value == pytest.approx(0.5 * 1.0 + 0.25 * 2.0 + 0.25 * 6.0, rel=0.02)  # γ does not matter


def test_start_states_from_outside_and_the_logs_hint() -> None:
    log = discrete_log()
    given = koffline.evaluate(log, SOFT, 0.9, initial_observations=log.observations[:7], **QUICK)
    assert given.diagnostics["n_initial_states"] == 7
    assert given.evidence.initial_values.shape == (7,)
    hinted = log.with_metadata(type(log.metadata)(gamma=0.8))
    assert koffline.evaluate(hinted, SOFT, **QUICK).gamma == 0.8
    settings = EvaluationSettings(gamma=0.7, **QUICK)
    explicit = koffline.evaluate(hinted, SOFT, settings=settings, estimator="fqe")
    assert (explicit.gamma, explicit.estimator) == (0.7, "fqe")


REFUSED = [
    ({"initial_observations": np.zeros((3, 5))}, "initial states have shape"),
    ({"initial_observations": np.full((3, 2), np.nan)}, "NaN"),
    ({"step": 3}, "did you mean 'steps'"),
    ({"gamma": 1.0}, "gamma"),
    ({"gamma": None}, "gamma is missing"),
    ({"learning_rate": 1e30}, "diverged"),
    ({"norm_bound": 1e300}, "norm_bound"),
    ({"instruments": 10**10}, "instruments"),
    ({"features": 10**9}, "features"),
    ({"estimator": "wpdiss"}, "did you mean 'wpdis'"),
    ({"norm_bound": 0.0, "interval": "kernel-certified"}, "0.0: input should be greater than 0"),
    ({"reward_bounds": (float("-inf"), 1.0)}, "reward_bounds"),
    ({"interval": "kernel_certified"}, "did you mean 'kernel-certified'"),
    ({"estimator": "mql", "level": 1.0 - 1e-9, "interval": "kernel-calibrated"}, "draws"),
    ({"estimator": "wdr", "interval": "hoeffding"}, "wdr has no interval of kind 'hoeffding'.*is, pdis"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(KofflineError, match=message):
        koffline.evaluate(discrete_log(), SOFT, **{"gamma": 0.9, **QUICK, **options})


def test_the_interval_is_students_of_replicas_and_episodes() -> None:
    found = koffline.evaluate(discrete_log(), SOFT, 0.9, level=0.9, seed=4, **QUICK)
    # t with one degree of freedom is 6.3138 at 90 %; six episodes
    spread = found.diagnostics["replica_standard_deviation"] * np.sqrt(2.0 * 6.0 / 5.0)
    assert found.interval.high - found.value == pytest.approx(6.3138 * spread, rel=1e-3)


def test_zero_weight_is_no_row() -> None:
    log = discrete_log()
    spoilt, starts = (
        log.replace(rewards=np.append(log.rewards[:50], np.full(10, 50.0))),
        log.observations[:50:10],
    )
    without, ignored, counted = (
        koffline.evaluate(data, SOFT, 0.5, initial_observations=starts, **{**QUICK, "steps": 400}).value
        for data in (log.select(np.arange(50)), spoilt.replace(weights=1.0 * (np.arange(60) < 50)), spoilt)
    )
    assert abs(ignored - without) < 0.2 * abs(counted - without)


def test_a_policy_of_its_own_chance_is_refused() -> None:
    generator = np.random.default_rng(0)

    def restless(observations: np.ndarray) -> np.ndarray:
        chosen = generator.integers(3, size=len(observations))
        return np.eye(3)[chosen]

    with pytest.raises(KofflineError, match="another way each time; return probabilities"):
        koffline.evaluate(discrete_log(), restless, 0.9, **QUICK)
