"""All estimators in one table: each answers or says why not, and shares what it can."""

import json

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.ope.estimate import EstimateTable
from koffline.ope.evaluation import estimate_all
from koffline.ope.importance.behavior import estimate_behavior
from koffline.ope.names import CERTIFIED_KINDS, ESTIMATORS, FITTED, KINDS, check_interval, kinds_for
from tests.exact_problems import EXACT_PROBLEMS
from tests.ope.problems import NOISY, QUICK, SOFT, continuous_log, discrete_log

SHORT = {"steps": 800, "full_replicas": 1, "resampled_replicas": 3}
ROWS = 1500
OVER_EPISODES = ("is", "wis", "pdis", "wpdis", "dr", "wdr", "magic")
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


@pytest.mark.parametrize("name", ["mwl"])
def test_alone_as_in_the_table(table: EstimateTable, name: str) -> None:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    alone = koffline.evaluate(
        problem.transitions, problem.policy, problem.gamma, estimator=name, seed=3, **SHORT
    )
    beside = table[name].estimate
    assert beside is not None
    # Sums over rows may be shared in the table, and added up in another order.
    assert alone.value == pytest.approx(beside.value, rel=1e-9)
    assert alone.interval is not None
    assert beside.interval is not None
    assert alone.interval.low == pytest.approx(beside.interval.low, rel=1e-8)


def test_certified_bounds_hold_the_truth_and_are_labelled(table: EstimateTable) -> None:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    kinds = [bound.kind for bound in table.bounds]
    assert {"kernel-calibrated", "kernel-certified", "kernel-certified-iid", "dual"} <= set(kinds)
    for bound in table.bounds:
        if bound.interval is not None and bound.interval.kind in CERTIFIED_KINDS:
            assert bound.interval.holds(problem.value)
            assert bound.interval.assumptions


def test_json_has_numbers_or_null_everywhere(table: EstimateTable) -> None:
    found = json.loads(table.to_json())  # refuses NaN
    assert [entry["estimator"] for entry in found["estimates"]] == list(ESTIMATORS)
    assert found["estimates"][0]["interval"]["kind"] == "bootstrap"
    assert "chain_off" in str(table)


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


def test_deterministic_policies_have_no_density() -> None:
    log = continuous_log()
    episodes = log.replace(episode_ids=np.arange(50) // 10, steps=np.arange(50) % 10)
    found = estimate_all(episodes, lambda s: np.tanh(s[:, :1]), 0.9, names=("kloss", "pdis"), **QUICK)
    assert found["kloss"].estimate is not None
    assert "densit" in str(found["pdis"].reason)
    with pytest.raises(DataError, match=r"pdis: .*densit"):
        koffline.evaluate(episodes, lambda s: np.tanh(s[:, :1]), 0.9, estimator="pdis", **QUICK)


def test_nothing_applies() -> None:
    log = continuous_log()
    with pytest.raises(KofflineError, match="no estimator applies"):
        estimate_all(log, NOISY, 0.9, names=("is", "wdr"), **QUICK)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_interval_of_another_kind_is_made_or_refused(name: str) -> None:
    for kind in KINDS:
        if kind in kinds_for(name):
            check_interval(name, kind)
        else:
            with pytest.raises(ConfigError, match=f"{name} has no interval of kind '{kind}'"):
                check_interval(name, kind)


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
    assert estimate.interval.kind == kind
    assert estimate.interval.level == 0.95
    assert (estimate.interval.norm_bound is not None) == (
        kind in ("kernel-certified", "dual", "kernel-simultaneous")
    )


def test_a_class_that_cannot_explain_the_log_is_an_alarm_not_an_error() -> None:
    problem = EXACT_PROBLEMS["chain_on"](2, 2000)
    estimate = koffline.evaluate(
        problem.transitions,
        problem.policy,
        problem.gamma,
        estimator="mql",
        interval="kernel-simultaneous",
        feature_source="random",
        features=2,
        feature_width=50.0,
        norm_bound=1e-6,
        **QUICK,
    )
    assert estimate.interval is None
    assert "no interval" in str(estimate)
    assert any("class" in warning for warning in estimate.warnings)


def test_certificates_do_not_see_rewards_through_their_features() -> None:
    log = discrete_log()
    first, second = (
        koffline.evaluate(
            changed, SOFT, 0.9, estimator="mql", interval="kernel-certified", norm_bound=5.0, **QUICK
        ).diagnostics["interval"]["details"]
        for changed in (log, log.replace(rewards=log.rewards[::-1].copy()))
    )
    assert first.keys() == second.keys()


def test_unknown_names_are_refused_with_the_nearest() -> None:
    log = discrete_log()
    with pytest.raises(ConfigError, match="did you mean 'wpdis'"):
        koffline.evaluate(log, SOFT, 0.9, estimator="wpdiss")
    with pytest.raises(ConfigError, match="did you mean 'kernel-certified'"):
        koffline.evaluate(log, SOFT, 0.9, interval="kernel_certified")
    with pytest.raises(ConfigError, match="no estimator 'mqls'"):
        estimate_all(log, SOFT, 0.9, names=("mqls",))


def test_networks_share_one_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import koffline.ope.workspace as workspace

    calls = []
    fit = workspace.fit_value_functions
    monkeypatch.setattr(workspace, "fit_value_functions", lambda *args: calls.append(1) or fit(*args))
    estimate_all(discrete_log(), SOFT, 0.9, names=(*FITTED, "dr", "drl"), bounds=False, **QUICK)
    assert len(calls) == 1


def test_a_single_name_is_a_name(table: EstimateTable) -> None:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    found = estimate_all(
        problem.transitions, problem.policy, problem.gamma, names="wis", bounds=False, seed=3, **SHORT
    )
    assert [row.name for row in found.rows] == ["wis"]


@pytest.mark.parametrize("name", ["wis", "wpdis", "dr", "wdr", "magic"])
def test_certified_kinds_are_for_plain_means_of_episodes(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no interval of kind 'hoeffding'.*is, pdis"):
        check_interval(name, "hoeffding")


def test_families_that_contradict_each_other_are_named(table: EstimateTable) -> None:
    """Behaviour probabilities too large by e^0.2 at every step: importance sampling is far off."""
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    probabilities = estimate_behavior(problem.transitions).log_probabilities
    wrong = problem.transitions.replace(behavior_log_probabilities=np.minimum(probabilities + 0.2, 0.0))
    options = {"names": ["pdis", "mql"], "bounds": False, "seed": 3, **SHORT}
    contradicted = estimate_all(wrong, problem.policy, problem.gamma, **options)
    assert any("Families disagree" in warning for warning in contradicted.warnings)
    assert not any("Families disagree" in warning for warning in table.warnings)


def test_probabilities_next_to_zero_overflow_in_silence() -> None:
    problem = EXACT_PROBLEMS["chain_off"](11, ROWS)
    tiny = np.full(len(problem.transitions), np.log(0.5))
    tiny[::7] = -800.0
    log = problem.transitions.replace(behavior_log_probabilities=tiny)
    found = estimate_all(
        log, problem.policy, problem.gamma, names=OVER_EPISODES, bounds=False, seed=3, **QUICK
    )
    assert {row.name for row in found.rows if row.estimate is None} == {"is", "pdis", "dr"}
