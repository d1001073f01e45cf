"""All estimators in one table: each answers or says why not."""

import pytest

import koffline
from koffline.errors import ConfigError
from koffline.ope.evaluation import estimate_all
from koffline.ope.names import CERTIFIED_KINDS, ESTIMATORS, OVER_EPISODES
from koffline.ope.results import EstimateTable
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.problems import QUICK, SOFT, discrete_log

SHORT = {"steps": 800, "full_replicas": 1, "resampled_replicas": 3}
ROWS = 1500
# Twice the largest error of each estimator over five other seeds (measured at these settings and sizes).
TOLERANCES = {"is": 0.2, "pdis": 0.2, "wis": 0.2, "wpdis": 0.2}
USUAL = 0.12


@pytest.fixture(scope="module")
def table() -> EstimateTable:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    return estimate_all(problem.transitions, problem.policy, problem.gamma, seed=3, **SHORT)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_finds_the_exact_answer(table: EstimateTable, name: str) -> None:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    estimate = table[name].estimate
    assert estimate is not None, table[name].reason
    tolerance = TOLERANCES.get(name, USUAL)
    assert estimate.value == pytest.approx(problem.value_at_starts, rel=tolerance)
    assert estimate.interval is not None
    assert estimate.interval.low <= estimate.value <= estimate.interval.high
    assert estimate.interval.assumptions


def test_certified_bounds_hold_the_truth_and_are_labelled(table: EstimateTable) -> None:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    kinds = [bound.kind for bound in table.bounds]
    assert {"kernel-calibrated", "kernel-certified", "dual"} <= set(kinds)
    for bound in table.bounds:
        if bound.interval is not None and bound.interval.kind in CERTIFIED_KINDS:
            assert bound.interval.holds(problem.value)
            assert bound.interval.assumptions


def test_logs_without_episodes_and_other_starts_leave_reasons() -> None:
    log = discrete_log()
    rows = log.replace(episode_ids=None, steps=None)
    alone = estimate_all(rows, SOFT, 0.9, **QUICK)
    starts = estimate_all(log, SOFT, 0.9, initial_observations=log.observations[:5], **QUICK)
    for name in OVER_EPISODES:
        assert alone[name].estimate is None
        assert "episodes" in str(alone[name].reason)
        assert "start states" in str(starts[name].reason)
    assert all(alone[name].estimate is not None for name in ESTIMATORS if name not in OVER_EPISODES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kloss", "kernel-calibrated"),
        ("fqe", "bootstrap-pivot"),
        ("mql", "kernel-simultaneous"),
        ("mwl", "bootstrap-pivot"),
        ("lstdq", "kernel-certified"),
        ("lstdq", "dual"),
        ("pdis", "episodes-t"),
    ],
)
def test_the_interval_asked_for_is_the_interval_given(name: str, kind: str) -> None:
    problem = EXACT_PROBLEMS["chain_on"](2, 400)
    given = {**QUICK, "steps": 200}
    estimate = koffline.evaluate(
        problem.transitions, problem.policy, problem.gamma, estimator=name, interval=kind, **given
    )
    assert estimate.interval is not None, estimate.warnings
    assert (estimate.interval.kind, estimate.interval.level) == (kind, 0.95)
    assert estimate.interval.holds(problem.value)
    with_norm = ("kernel-certified", "dual", "kernel-simultaneous")
    assert (estimate.interval.norm_bound is not None) == (kind in with_norm)


@pytest.mark.parametrize("n", [2, 3])
def test_a_handful_of_rows_gives_reasons_and_never_an_abort(n: int) -> None:
    table = estimate_all(discrete_log(n, length=n), SOFT, 0.9, **{**QUICK, "steps": 10, "instruments": 60})
    for name in ESTIMATORS:
        assert (table[name].estimate is None) == (table[name].reason is not None)
    assert table["kloss"].estimate is not None
    assert table["pdis"].estimate is not None


def test_a_network_that_diverges_leaves_the_others() -> None:
    options = {**QUICK, "learning_rate": 1e10, "names": ("kloss", "is", "mql")}
    table = estimate_all(discrete_log(), SOFT, 0.9, **options)
    assert table["kloss"].estimate is None
    assert table["is"].estimate is not None
    assert "diverged" in str(table["kloss"].reason)
    with pytest.raises(ConfigError, match="no estimator 'mqls'"):
        estimate_all(discrete_log(), SOFT, 0.9, names=("mqls",))
