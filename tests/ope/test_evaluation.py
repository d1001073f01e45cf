"""Every estimator against exact answers, odd logs, refusals.

Settings are cut down to stay quick.
"""

import numpy as np
import pytest

import koffline
from koffline.config import EvaluationSettings
from koffline.errors import ConfigError, KofflineError
from koffline.ope.evaluation import estimate_all
from koffline.ope.names import CERTIFIED_KINDS, ESTIMATORS, OVER_EPISODES, WITHOUT_MODEL
from koffline.ope.networks.fitted_q import fit_value_function
from koffline.ope.results import EstimateTable
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.problems import QUICK, SOFT, discrete_log

SHORT = {"steps": 2500, "full_replicas": 2, "resampled_replicas": 2}
# Of the default suite: the largest error over four seeds is 3.4 %.
SMALLER = {**SHORT, "steps": 1500, "hidden_units": (32, 32)}
# Tolerance relative to J from the log's own starts, 4000 rows: about twice the largest
# error over five other seeds at these settings; what remains is the sampling error of
# the log itself.
TOLERANCES = {
    "chain_on": 0.08,
    "chain_off": 0.10,
    "chain_off_limited": 0.10,
    "chain_tuples": 0.10,
}
TOLERANCES |= {
    "grid_on": 0.15,
    "linear_on": 0.15,
    "linear_off_deterministic": 0.20,
    "linear_tuples": 0.15,
}
# discrete and continuous, episodes and tuples
DEFAULT_SUITE = (
    "chain_off",
    "linear_tuples",
)
ROWS = 1500
BRIEF = {"steps": 800, "full_replicas": 1, "resampled_replicas": 3}
# Twice the largest error of each estimator over five other seeds (measured at these
# settings and sizes).
IMPORTANCE = 0.2
USUAL = 0.12


@pytest.fixture(scope="module")
def table() -> EstimateTable:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    return estimate_all(
        problem.transitions, problem.policy, problem.gamma, seed=3, **BRIEF
    )


@pytest.mark.parametrize(
    "name",
    [
        name if name in DEFAULT_SUITE else pytest.param(name, marks=pytest.mark.slow)
        for name in TOLERANCES
    ],
)
def test_exact_answers(name: str) -> None:
    problem = EXACT_PROBLEMS[name](11, 4000)
    settings = SHORT
    if name in DEFAULT_SUITE:
        settings = SMALLER
    estimate = koffline.evaluate(
        problem.transitions, problem.policy, problem.gamma, **settings
    )
    truth = problem.value_at_starts
    tolerance = TOLERANCES[name]
    assert estimate.value == pytest.approx(truth, rel=tolerance)
    assert estimate.diagnostics["estimates_by_head"]["fqe"] == pytest.approx(
        truth, rel=1.5 * tolerance
    )


def test_same_seed_same_estimate_other_seed_another() -> None:
    first, again, other = (
        koffline.evaluate(discrete_log(), SOFT, 0.9, seed=s, **QUICK) for s in (1, 1, 2)
    )
    assert first.value == again.value
    assert first.interval == again.interval
    assert first.diagnostics == again.diagnostics
    assert other.value != first.value


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_estimates_scale_with_the_rewards(scale: float) -> None:
    log = discrete_log()
    plain, scaled = (
        koffline.evaluate(log.replace(rewards=log.rewards * factor), SOFT, 0.9, **QUICK)
        for factor in (1.0, scale)
    )
    # float32 training sees the same scaled rewards up to their last bit; 60 steps
    # amplify it little
    assert scaled.value == pytest.approx(plain.value * scale, rel=1e-3)
    assert scaled.interval.low == pytest.approx(plain.interval.low * scale, rel=1e-2)


def test_start_states_from_outside_and_the_logs_hint() -> None:
    log = discrete_log()
    at_starts = koffline.evaluate(
        log, SOFT, 0.9, initial_observations=log.observations[:7], **QUICK
    )
    assert at_starts.diagnostics["n_initial_states"] == 7
    assert at_starts.evidence.initial_values.shape == (7,)
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
    (
        {"norm_bound": 0.0, "interval": "kernel-certified"},
        "0.0: input should be greater than 0",
    ),
    ({"reward_bounds": (float("-inf"), 1.0)}, "reward_bounds"),
    ({"interval": "kernel_certified"}, "did you mean 'kernel-certified'"),
    (
        {"estimator": "mql", "level": 1.0 - 1e-9, "interval": "kernel-calibrated"},
        "draws",
    ),
    (
        {"estimator": "wdr", "interval": "hoeffding"},
        "wdr has no interval of kind 'hoeffding'.*is, pdis",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(KofflineError, match=message):
        koffline.evaluate(discrete_log(), SOFT, **{"gamma": 0.9, **QUICK, **options})


def test_zero_weight_is_no_row() -> None:
    log = discrete_log()
    spoilt = log.replace(rewards=np.append(log.rewards[:50], np.full(10, 50.0)))
    starts = log.observations[:50:10]
    without, ignored, counted = (
        koffline.evaluate(
            data, SOFT, 0.5, initial_observations=starts, **{**QUICK, "steps": 400}
        ).value
        for data in (
            log.select(np.arange(50)),
            spoilt.replace(weights=1.0 * (np.arange(60) < 50)),
            spoilt,
        )
    )
    assert abs(ignored - without) < 0.2 * abs(counted - without)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            lambda s: np.random.default_rng().integers(3, size=len(s)),
            "each time; return probabilities",
        ),
        (
            lambda s: 1 * (s[:, 0] > s[:, 0].mean()),
            "in another batch; answer each by itself",
        ),
        (
            lambda s, generator: generator.integers(3, size=len(s)),
            "a generator is for continuous actions",
        ),
    ],
)
def test_a_policy_whose_answers_change_is_refused(policy, message) -> None:
    with pytest.raises(KofflineError, match=message):
        koffline.evaluate(discrete_log(), policy, 0.9, **QUICK)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_finds_the_exact_answer(
    table: EstimateTable, name: str
) -> None:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    estimate = table[name].estimate
    assert estimate is not None, table[name].reason
    tolerance = IMPORTANCE if name in WITHOUT_MODEL else USUAL
    assert estimate.value == pytest.approx(problem.value_at_starts, rel=tolerance)
    assert estimate.interval is not None
    assert estimate.interval.low <= estimate.value <= estimate.interval.high
    assert estimate.interval.assumptions


def test_certified_bounds_hold_the_truth_and_are_labelled(table: EstimateTable) -> None:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    kinds = [bound.kind for bound in table.bounds]
    assert {"kernel-calibrated", "kernel-certified"} <= set(kinds)
    intervals = [bound.interval for bound in table.bounds if bound.interval is not None]
    certified = [interval for interval in intervals if interval.kind in CERTIFIED_KINDS]
    assert all(
        interval.holds(problem.value) and interval.assumptions for interval in certified
    )


def test_logs_without_episodes_and_other_starts_leave_reasons() -> None:
    log = discrete_log()
    alone = estimate_all(log.replace(episode_ids=None, steps=None), SOFT, 0.9, **QUICK)
    starts = estimate_all(
        log, SOFT, 0.9, initial_observations=log.observations[:5], **QUICK
    )
    for name in OVER_EPISODES:
        assert alone[name].estimate is None
        assert "episodes" in str(alone[name].reason)
        assert "start states" in str(starts[name].reason)
    assert all(
        alone[name].estimate is not None
        for name in ESTIMATORS
        if name not in OVER_EPISODES
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kloss", "kernel-calibrated"),
        ("fqe", "bootstrap-pivot"),
        ("mql", "kernel-simultaneous"),
        ("mwl", "bootstrap-pivot"),
        ("lstdq", "kernel-certified"),
        ("pdis", "episodes-t"),
    ],
)
def test_the_interval_asked_for_is_the_interval_given(name: str, kind: str) -> None:
    problem = EXACT_PROBLEMS["chain_on"](2, 400)
    options: dict[str, object] = {**QUICK, "steps": 200}
    options |= {"estimator": name, "interval": kind}
    estimate = koffline.evaluate(
        problem.transitions, problem.policy, problem.gamma, **options
    )
    assert estimate.interval is not None, estimate.warnings
    assert (estimate.interval.kind, estimate.interval.level) == (kind, 0.95)
    assert estimate.interval.holds(problem.value)
    with_norm = ("kernel-certified", "kernel-simultaneous")
    assert (estimate.interval.norm_bound is not None) == (kind in with_norm)


@pytest.mark.parametrize("n", [2, 3])
def test_a_handful_of_rows_gives_reasons_and_never_an_abort(n: int) -> None:
    table = estimate_all(
        discrete_log(n, length=n),
        SOFT,
        0.9,
        **{**QUICK, "steps": 10, "instruments": 60},
    )
    for name in ESTIMATORS:
        assert (table[name].estimate is None) == (table[name].reason is not None)
    assert table["kloss"].estimate is not None
    assert table["pdis"].estimate is not None


def test_exploded_networks_answer_nothing() -> None:
    """Finite but huge: brought within the bounds one by one, all would say the same."""
    estimate = koffline.evaluate(
        discrete_log(300), SOFT, 0.9, **{**QUICK, "learning_rate": 1e5}
    )
    assert (estimate.interval, estimate.verdict.answer) == (
        None,
        "not answerable from this log",
    )
    settings = EvaluationSettings(gamma=0.9, steps=9, learning_rate=1e20)
    with pytest.raises(KofflineError, match="3 of 3 networks diverged"):
        fit_value_function(discrete_log(300), SOFT, settings)


def test_a_network_that_diverges_leaves_the_others() -> None:
    options = {**QUICK, "learning_rate": 1e10, "names": ("kloss", "is", "mql")}
    table = estimate_all(discrete_log(), SOFT, 0.9, **options)
    assert table["kloss"].estimate is None
    assert table["is"].estimate is not None
    assert "diverged" in str(table["kloss"].reason)


def test_settings_may_be_a_mapping() -> None:
    log = discrete_log(60)
    settings = EvaluationSettings(gamma=0.9, **QUICK)
    typed = koffline.evaluate(log, SOFT, settings=settings)
    mapped = koffline.evaluate(log, SOFT, settings={"gamma": 0.9, **QUICK})
    assert mapped.value == typed.value
    with pytest.raises(ConfigError, match="step is unknown"):
        koffline.evaluate(log, SOFT, 0.9, settings={"step": 3})
