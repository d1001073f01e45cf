"""Behavior probabilities, estimated where the log has none, and the ratios that they
give.
"""

import json

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

import koffline
from koffline.data.transitions import ActionSpace, Continuous, Discrete, Transitions
from koffline.errors import ConfigError, DataError, PolicyError
from koffline.ope.importance.classifiers import calibration
from koffline.ope.importance.ratios import estimate_behavior, importance_ratios
from koffline.policies import DiscretePolicy
from koffline.policies.builtin import gaussian_log_density
from tests.ope.importance.cases import log_of_steps
from tests.refusals import one_line

ROWS = 1200
LENGTH = 6


def log_of(
    observations: np.ndarray, actions: np.ndarray, space: ActionSpace
) -> Transitions:
    columns = {
        "observations": observations,
        "next_observations": observations,
        "action_space": space,
    }
    return log_of_steps(np.zeros(len(actions)), LENGTH, actions, **columns)


def discrete_case(seed: int = 0) -> tuple[Transitions, np.ndarray]:
    """Three actions, chances that bend with the state; true log probabilities of what
    was taken.
    """
    generator = np.random.default_rng(seed)
    states = generator.uniform(-2.0, 2.0, size=(ROWS, 2))
    logits = np.stack(
        [np.zeros(ROWS), 2.0 * np.sin(2.0 * states[:, 0]), states[:, 1] ** 2 - 1.0],
        axis=1,
    )
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    actions = (generator.random((ROWS, 1)) >= chances.cumsum(axis=1)).sum(axis=1)
    log = log_of(10.0 + 3.0 * states, actions, Discrete(3))
    return log, np.log(chances[np.arange(ROWS), actions])


def gaussian_case(
    seed: int = 1, bound: float = np.inf
) -> tuple[Transitions, np.ndarray]:
    """Two action numbers, mean and deviation bend with the state; cut off at ±
    bound.
    """
    generator = np.random.default_rng(seed)
    states = generator.uniform(-2.0, 2.0, size=(ROWS, 1))
    mean = np.concatenate([np.sin(states), 0.5 * states], axis=1) * 100.0
    deviation = np.exp(0.3 * states) * np.array([[30.0, 50.0]])
    actions = np.clip(
        mean + deviation * generator.standard_normal((ROWS, 2)), -bound, bound
    )
    low, high = (
        (None, None) if np.isinf(bound) else (np.full(2, -bound), np.full(2, bound))
    )
    truth = gaussian_log_density(actions, mean, deviation, low, high)
    return log_of(states, actions, Continuous(2, -bound, bound)), truth


@pytest.mark.parametrize(
    ("make_log", "bound", "share", "model"),
    [
        (discrete_case(), np.inf, 8.0, "multinomial logistic"),
        (gaussian_case(), np.inf, 6.0, "conditional Gaussian"),
        (gaussian_case(bound=120.0), 120.0, 6.0, "conditional Gaussian"),
    ],
    ids=["discrete", "free", "cut off"],
)
def test_probabilities_are_near_the_truth(make_log, bound, share, model) -> None:
    """The lost likelihood is the mean divergence: a small share of what ignoring the
    state would lose.
    """
    log, truth = make_log
    cut_to = None if np.isinf(bound) else (np.full(2, -bound), np.full(2, bound))
    logs, estimated = estimate_behavior(log, cut_to=cut_to)
    constant = estimated["behavior_log_likelihood_constant"]
    assert truth.mean() - logs.mean() < (truth.mean() - constant) / share
    assert estimated["behavior_model"].startswith(model)


def test_no_episode_sees_itself() -> None:
    """Change the actions of one episode: its own model was fitted without it, so only
    other folds move.
    """
    log, _ = discrete_case(4)
    actions = np.asarray(log.actions).copy()
    actions[:LENGTH] = (actions[:LENGTH] + 1) % 3
    here, there = (
        estimate_behavior(log_read)[0]
        for log_read in (log, log.replace(actions=actions))
    )
    moved = np.abs(here - there) > 1e-12
    share = moved.reshape(-1, LENGTH).any(axis=1)[1:].mean()
    assert 0.3 < share < 0.7  # about half of the episodes share no fold with it


def test_images_and_lone_rows_are_refused() -> None:
    log, _ = discrete_case(7)
    with pytest.raises(DataError, match="needs episodes"):
        estimate_behavior(log.replace(episode_ids=None, steps=None))
    images = log_of(
        np.zeros((12, 3, 64, 64), dtype=np.uint8), np.zeros(12, dtype=int), Discrete(2)
    )
    with pytest.raises(DataError, match="store behavior_log_probabilities"):
        estimate_behavior(images)


def test_logged_probabilities_win_unless_estimates_are_asked_for() -> None:
    log, truth = discrete_case()
    policy = DiscretePolicy(
        3, lambda observations: np.tile([0.5, 0.3, 0.2], (len(observations), 1))
    )
    assert importance_ratios(log, policy).is_estimated
    logged = log.replace(behavior_log_probabilities=truth)
    assert not importance_ratios(logged, policy).is_estimated
    assert importance_ratios(logged, policy, "estimate").is_estimated
    first = DiscretePolicy(
        3, lambda observations: np.zeros(len(observations), dtype=int)
    )
    ratios = importance_ratios(logged, first)
    taken = np.asarray(log.actions) == 0
    assert (ratios.logs[~taken] == -np.inf).all()  # impossible actions
    np.testing.assert_allclose(ratios.logs[taken], -truth[taken])


def test_ratios_average_one_over_rows_as_they_are_weighed() -> None:
    """Half of the rows with action 1 are lost, and those that are left count twice."""
    actions = np.tile([0, 0, 1], ROWS // 3)
    log = log_of(np.zeros((ROWS, 1)), actions, Discrete(2))
    log = log.replace(behavior_log_probabilities=np.full(ROWS, np.log(0.5)))
    policy = DiscretePolicy(2, lambda states: np.tile([0.1, 0.9], (len(states), 1)))
    weights = np.where(actions == 1, 2.0, 1.0)
    warned = [
        bool(importance_ratios(log_read, policy).warnings)
        for log_read in (log, log.replace(weights=weights))
    ]
    assert warned == [True, False]


def as_one_step(log: Transitions) -> Transitions:
    rows = len(log)
    return log.replace(
        episode_ids=np.arange(rows),
        steps=np.zeros(rows, dtype=int),
        terminated=np.ones(rows, dtype=bool),
        truncated=np.zeros(rows, dtype=bool),
    )


FOREST = RandomForestClassifier(30, min_samples_leaf=20)
LOGISTIC = make_pipeline(StandardScaler(), LogisticRegression())


@pytest.mark.parametrize(
    "classifier",
    [
        FOREST,
        LOGISTIC,
        RandomForestClassifier,
        lambda: RandomForestClassifier(30, min_samples_leaf=20),
        "sklearn.linear_model:LogisticRegression",
    ],
    ids=["object", "pipeline", "class", "function", "name"],
)
def test_a_classifier_of_scikit_learn_estimates_them(classifier) -> None:
    log, truth = discrete_case()
    logs, facts = estimate_behavior(log, seed=3, classifier=classifier)
    again, _ = estimate_behavior(log, seed=3, classifier=classifier)
    np.testing.assert_array_equal(logs, again)  # it draws from the seed
    assert np.isfinite(logs).all()
    assert facts["behavior_log_likelihood"] == pytest.approx(logs.mean())
    assert facts["behavior_log_likelihood_constant"] < truth.mean()
    assert "Classifier" in facts["behavior_model"] or "Log" in facts["behavior_model"]


def test_a_forest_beats_no_state_and_is_not_changed() -> None:
    log, truth = discrete_case()
    classifier = RandomForestClassifier(30, min_samples_leaf=20)
    logs, facts = estimate_behavior(log, classifier=classifier)
    lost = truth.mean() - logs.mean()
    assert lost < (truth.mean() - facts["behavior_log_likelihood_constant"]) / 4.0
    assert not hasattr(classifier, "classes_")


def test_its_folds_are_episodes() -> None:
    log, _ = discrete_case(4)
    actions = np.asarray(log.actions).copy()
    actions[:LENGTH] = (actions[:LENGTH] + 1) % 3
    here, _ = estimate_behavior(log, classifier=LOGISTIC)
    there, _ = estimate_behavior(log.replace(actions=actions), classifier=LOGISTIC)
    share = (np.abs(here - there) > 1e-12).reshape(-1, LENGTH).any(axis=1)[1:].mean()
    assert 0.3 < share < 0.7


def test_an_action_that_a_fold_never_took_keeps_a_chance() -> None:
    """A class that one half has not seen, and a tree that says 0: no infinite ratio."""
    log, _ = discrete_case()
    actions = np.zeros(ROWS, dtype=int)
    actions[0] = 2
    actions[1::7] = 1
    rare = log.replace(actions=actions)
    logs, _ = estimate_behavior(rare, classifier=DecisionTreeClassifier())
    # half of the rows, each action once more: the least share of the smoothed chance
    assert logs.min() >= np.log(1.0 / (ROWS + 4)) + np.log(1.0 / (ROWS + 4))
    assert np.isfinite(logs).all()


def test_calibration_counts_pairs_by_their_chance() -> None:
    """By hand: chances 0.95 and 0.05 in four rows, of which three took the first."""
    chances = np.tile([0.95, 0.05], (4, 1))
    facts = calibration(chances, np.array([0, 0, 0, 1]))
    low, high = facts["behavior_calibration"]
    assert low == {"predicted": pytest.approx(0.05), "taken": 0.25, "pairs": 4}
    assert high == {"predicted": pytest.approx(0.95), "taken": 0.75, "pairs": 4}
    assert facts["behavior_calibration_error"] == pytest.approx(0.2)
    certain = calibration(np.eye(2)[[0, 1, 1]], np.array([0, 1, 1]))
    assert certain["behavior_calibration_error"] == 0.0


@pytest.mark.parametrize("classifier", [None, FOREST, LOGISTIC])
def test_true_chances_are_calibrated_and_so_are_estimates(classifier) -> None:
    log, _ = discrete_case()
    _, facts = estimate_behavior(log, classifier=classifier)
    assert 0.0 < facts["behavior_calibration_error"] < 0.08
    assert sum(b["pairs"] for b in facts["behavior_calibration"]) == 3 * ROWS


class Broken(LogisticRegression):
    def fit(self, x, y, sample_weight=None):
        raise ValueError("no\nluck")


@pytest.mark.parametrize(
    ("setting", "kind", "message"),
    [
        ("logistic", ConfigError, "behavior_model is 'logistic': write it as package"),
        (3, ConfigError, "behavior_model is 3: write it as package.module:name"),
        ("sklearn.nothing:Model", PolicyError, "sklearn.nothing"),
        ("sklearn.linear_model:LogisticRegresion", PolicyError, "LogisticRegression"),
        (len, ConfigError, "cannot be made without arguments"),
        (
            "sklearn.linear_model:LinearRegression",
            ConfigError,
            "no fit and predict_pro",
        ),
        (
            Broken(),
            DataError,
            "Broken cannot be fitted to this log (ValueError: no luck)",
        ),
    ],
)
def test_what_is_no_classifier_is_one_line(setting, kind, message) -> None:
    log = as_one_step(discrete_case()[0])
    with one_line(kind, message):
        koffline.evaluate(
            log, "uniform", gamma=0.9, estimator="wis", behavior_model=setting
        )


def test_an_evaluation_says_by_what_and_how_well(tmp_path) -> None:
    log, truth = discrete_case()
    log = as_one_step(log)
    log = log.replace(rewards=(np.asarray(log.actions) == 1).astype(float))
    options = {"gamma": 0.9, "estimator": "wis", "seed": 0}
    estimate = koffline.evaluate(log, "uniform", behavior_model=FOREST, **options)
    (warning,) = [w for w in estimate.warnings if "estimated from the log" in w]
    assert "RandomForestClassifier(min_samples_leaf=20, n_estimators=30" in warning
    assert "% on average (calibration, 2-fold cross-fitted by episode)" in warning
    # the policy takes each action in a third of the states
    assert estimate.value == pytest.approx(1.0 / 3.0, abs=0.08)
    assert "RandomForestClassifier" in estimate.settings["behavior_model"]
    estimate.report(tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "mean distance of estimated chances" in page
    record = json.loads((tmp_path / "report" / "estimate.json").read_text())
    assert record["diagnostics"]["behavior_calibration"][0]["pairs"] > 0
    # it is used though the log knows better, unless the log's are asked for
    logged = log.replace(behavior_log_probabilities=truth)
    second = koffline.evaluate(logged, "uniform", behavior_model=FOREST, **options)
    assert second.value == estimate.value
    with one_line(ConfigError, "leave one of them out"):
        koffline.evaluate(
            logged, "uniform", behavior="log", behavior_model=FOREST, **options
        )


@pytest.mark.parametrize(("classifier", "fits"), [(LOGISTIC, False), (FOREST, True)])
def test_a_classifier_that_does_not_fit_is_a_reason_for_care(classifier, fits) -> None:
    """Chances that jump in the middle of a heavy-tailed state: no logistic curve."""
    generator = np.random.default_rng(0)
    states = np.clip(generator.standard_cauchy(size=(ROWS, 1)), -30.0, 30.0)
    chance = np.where(states[:, 0] > 0.0, 0.9, 0.1)
    actions = (generator.random(ROWS) < chance).astype(int)
    log = as_one_step(log_of(states, actions, Discrete(2)))
    log = log.replace(rewards=actions.astype(float))
    estimate = koffline.evaluate(
        log, "uniform", gamma=0.9, estimator="wis", behavior_model=classifier
    )
    words = " ".join(reason.text for reason in estimate.verdict.reasons)
    assert ("does not fit the behavior policy" not in words) == fits


def test_continuous_actions_have_densities_instead() -> None:
    log, _ = gaussian_case()
    with one_line(ConfigError, "this log's are continuous; leave it out"):
        estimate_behavior(log, classifier=FOREST)
