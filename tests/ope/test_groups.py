"""Values by group of start states: by one set of networks, the same wherever labels
come from.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import koffline
from koffline.errors import ConfigError, DataError
from koffline.ope import evaluation
from koffline.policies import DiscretePolicy
from koffline.report.words import group_rows
from tests.data.logs import in_shards
from tests.ope.problems import AS_OPTIONS, COLUMNS, QUICK, SOFT, discrete_log
from tests.refusals import assert_refused, run_cli, succeed

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

KIND = np.arange(30) % 3 == 0


def log_of_two_kinds(n: int = 300, every: int = 3) -> koffline.Transitions:
    """Episodes of ten rows; the first feature is 2 all along in some of them, where
    rewards are larger.
    """
    log = discrete_log(n)
    rows = np.repeat(np.arange(n // 10) % every == 0, 10)
    states = log.observations.copy()
    following = log.next_observations.copy()
    states[:, 0] = np.where(rows, 2.0, -1.0)
    following[:, 0] = np.where(rows, 2.0, -1.0)
    return log.replace(
        observations=states,
        next_observations=following,
        rewards=log.rewards + 3.0 * rows,
    )


def test_groups_share_networks_and_their_mean_is_the_value() -> None:
    log = log_of_two_kinds()
    plain, by_feature = (
        koffline.evaluate(log, SOFT, 0.9, **QUICK, by=by) for by in (None, 0)
    )
    assert (plain.groups, plain.by) == ((), None)
    # nothing was trained anew
    assert (by_feature.value, by_feature.interval) == (
        plain.value,
        plain.interval,
    )
    small, large = by_feature.groups
    assert (small.group, small.starts, large.group, large.starts) == ("-1", 20, "2", 10)
    assert (20 * small.value + 10 * large.value) / 30 == pytest.approx(by_feature.value)
    assert large.value > small.value + 3.0
    assert by_feature.as_dict()["groups"][1]["interval"]["level"] == 0.95


def test_the_interval_is_bonferronis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups: each at level 0.975, with Student's t and the group's own number of
    start states.
    """
    kept = []
    whole = evaluation.values_by_group
    monkeypatch.setattr(
        evaluation,
        "values_by_group",
        lambda *arguments: kept.append(arguments) or whole(*arguments),
    )
    settings = {**QUICK, "resampled_replicas": 6}
    group = koffline.evaluate(log_of_two_kinds(), SOFT, 0.9, **settings, by=0).groups[1]
    workspace, _, _ = kept[0]
    fitted = workspace.fitted
    network = workspace.fitted.heads["kloss"]
    values = evaluation.start_values(network, fitted.problem).double().numpy()  # (R, E)
    counts = fitted.resampling.start_weights(fitted.problem)[:, 0].numpy() * KIND
    resampled = ((values * counts).sum(axis=1) / counts.sum(axis=1))[
        fitted.resampling.full :
    ]
    resampled = resampled[np.isfinite(resampled)]
    quantile = stats.t.ppf(1.0 - 0.05 / 4, df=min(len(resampled), 10) - 1)
    half = (
        quantile
        * resampled.std(ddof=1)
        * np.sqrt((1 + 1 / fitted.resampling.full) * 10 / 9)
    )
    assert group.interval.width == pytest.approx(2 * half, rel=1e-6)
    assert group.value == pytest.approx(values[:, KIND].mean(), rel=1e-6)


def test_labels_features_and_shards_say_the_same(tmp_path: Path) -> None:
    log = log_of_two_kinds()
    feature = koffline.evaluate(log, SOFT, 0.9, **QUICK, by=0)
    labels = np.where(KIND, "vip", "all others")
    named = koffline.evaluate(log, SOFT, 0.9, **QUICK, by={"segment": labels})
    assert [row.group for row in named.groups] == ["all others", "vip"]
    assert named.by == "segment"
    assert [row.value for row in named.groups] == [row.value for row in feature.groups]
    shards = in_shards(log, tmp_path / "log", 70)
    lazy = koffline.evaluate(shards, SOFT, 0.9, **QUICK, by=0, sample_rows=120)
    held = koffline.evaluate(
        log, SOFT, 0.9, **QUICK, by={"segment": labels}, sample_rows=120
    )
    assert [row.starts for row in lazy.groups] == [20, 10]
    for from_disk, in_memory in zip(lazy.groups, held.groups, strict=True):
        assert from_disk.value == pytest.approx(in_memory.value, rel=1e-9)


def offers_at_random(rows: int = 300) -> koffline.Transitions:
    """One-step episodes with logged probabilities, of which the default is ``dr``."""
    random = np.random.default_rng(0)
    kinds = (np.arange(rows) % 3 == 0).astype(float)
    offers = random.integers(2, size=rows)
    states = np.column_stack([kinds, random.normal(size=rows)])
    return koffline.Transitions(
        observations=states,
        actions=offers,
        rewards=2.0 * kinds + offers + random.normal(size=rows),
        next_observations=states,
        terminated=np.ones(rows, dtype=bool),
        truncated=np.zeros(rows, dtype=bool),
        episode_ids=np.arange(rows),
        behavior_log_probabilities=np.full(rows, np.log(0.5)),
        action_space=koffline.Discrete(2),
    )


@pytest.mark.parametrize("on_disk", [False, True])
def test_groups_do_not_change_the_answer_of_one_step_logs(
    tmp_path: Path, on_disk: bool
) -> None:
    """Where the whole log is valued without networks, groups are valued by them."""
    log = offers_at_random()
    if on_disk:
        log = in_shards(log, tmp_path / "log", 100)
    settings = {**QUICK, "steps": 300}
    plain = koffline.evaluate(log, "uniform", **settings)
    grouped = koffline.evaluate(log, "uniform", **settings, by=0)
    assert plain.estimator == "dr"
    for name in ("estimator", "value", "interval", "verdict"):
        assert getattr(grouped, name) == getattr(plain, name)
    other, kind = grouped.groups
    assert kind.interval.holds(2.5)
    assert other.interval.holds(0.5)


def test_a_group_that_matters_beyond_the_observations_has_no_value() -> None:
    log = discrete_log(600)
    label = np.arange(60) % 2
    settings = {**QUICK, "steps": 200}
    for paid in (0.0, 3.0):
        rows = log.replace(rewards=log.rewards + paid * np.repeat(label, 10))
        estimate = koffline.evaluate(
            rows, "uniform", 0.5, **settings, by={"it": label}
        ).groups
        assert all((row.value is None) == (paid > 0.0) for row in estimate)
        assert all(
            row.value is not None or "add it to these" in row.reason for row in estimate
        )


@pytest.mark.parametrize(
    ("often", "has_starts", "every"),
    [(1.0, False, 15), (1.0, True, 15), (0.05, False, 15), (1.0, False, 3)],
)
def test_groups_where_the_log_never_acts_as_the_policy_does(
    often: float, has_starts: bool, every: int
) -> None:
    log = log_of_two_kinds(3000, every)
    actions = np.where(log.observations[:, 0] < 0.0, log.actions % 2, 0)
    log = log.replace(actions=actions)
    starts = None
    if has_starts:
        starts = log.observations[::10]
    policy = DiscretePolicy(
        3, lambda s: np.tile([1.0 - often, often, 0.0], (len(s), 1))
    )
    options = {**QUICK, "steps": 400, "by": 0, "initial_observations": starts}
    estimate = koffline.evaluate(log, policy, 0.9, **options)
    first_group, second_group = estimate.groups
    assert (first_group.reason, second_group.starts, second_group.value is None) == (
        None,
        300 // every,
        often > 0.1,
    )
    # of all start states together
    assert every > 3 or "worth: about" in estimate.verdict.sentence
    answer = "with care: about [3-7]"
    if often > 0.1:
        answer = "not answerable: about (9.|100)"
    assert re.match(f"{answer}% of the policy's visits", second_group.reason)
    shown = group_rows(estimate)[1][3]
    assert (second_group.reason in shown, "…" in shown) == (True, often < 0.1)


def test_copies_and_given_starts_keep_their_groups() -> None:
    log = log_of_two_kinds()
    order = np.r_[np.arange(30), [0, 0, 1]]
    copied = log.select_episodes(order)
    estimate = koffline.evaluate(
        copied, SOFT, 0.9, **QUICK, by={"it": np.where(KIND, "a", "b")[order]}
    )
    assert [(row.group, row.starts) for row in estimate.groups] == [
        ("a", 10),
        ("b", 20),
    ]
    assert "8 " in estimate.groups[0].reason  # (3 + 9 · 1)² / (9 + 9) = 8
    starts = log.observations[:: len(log) // 60][:60]
    at_starts = koffline.evaluate(
        log, SOFT, 0.9, **QUICK, by=0, initial_observations=starts
    )
    assert sum(row.starts for row in at_starts.groups) == 60
    with pytest.raises(ConfigError, match="other start states were given"):
        koffline.evaluate(
            log, SOFT, 0.9, **QUICK, by={"it": KIND}, initial_observations=starts
        )


@pytest.mark.parametrize(
    ("by", "options", "words"),
    [
        (1, {}, "1 has 30 different values among the start states, more than"),
        ("speed", {}, "no feature 'speed'; give a number from 0 to 1"),
        ({"it": [1, 2]}, {}, "it has 2 labels, the log 30 episodes"),
        (
            0,
            {"estimator": "dr"},
            "are those of kloss\\+fqe, kloss, fqe, lstd, not of dr",
        ),
        (
            0,
            {"interval": "kernel-certified"},
            "are of kind bootstrap, not kernel-certified",
        ),
    ],
)
def test_what_cannot_be_a_group_is_said_before_anything_is_trained(
    by, options, words, monkeypatch
) -> None:
    monkeypatch.setattr("koffline.ope.groups._MOST_GROUPS", 20)
    monkeypatch.setattr(evaluation, "run_estimator", None)
    with pytest.raises((ConfigError, DataError), match=words):
        koffline.evaluate(log_of_two_kinds(), SOFT, 0.9, **QUICK, by=by, **options)


def test_a_column_of_a_table_in_the_command(tmp_path: Path) -> None:
    segments = ["new"] * 15 + ["old"] * 20 + ["vip"] * 5  # of 40 users
    rows = []
    for day in reversed(range(10)):
        for user in range(40):
            segment = ""  # only a user's first row says it
            if day == 0:
                segment = segments[user]
            x = (user * 7 + day) % 5
            action = (user + day) % 2
            gain = user % 3 + day % 2
            rows.append(f"{user},{day},{x},{action},{gain},{int(day == 9)},{segment}")
    table = tmp_path / "log.csv"
    report = tmp_path / "report"
    table.write_text("\n".join(["user,day,x,act,gain,end,segment", *rows]))
    arguments = (
        "evaluate",
        table,
        *COLUMNS,
        "--policy",
        "uniform",
        "--gamma",
        0.8,
        "--quiet",
        *AS_OPTIONS,
    )
    shown = succeed(*arguments, "--by", "segment", "--out", report)
    result = json.loads((report / "estimate.json").read_text())
    starts = {row["group"]: row["starts"] for row in result["groups"]}
    assert starts == {"new": 15, "old": 20, "vip": 5}
    few = "too few start states to answer: 5 (at least 10)"
    page = (report / "report.html").read_text()
    assert (result["groups"][2]["value"], result["groups"][2]["reason"]) == (None, few)
    assert few in shown
    assert few in page
    assert "By segment" in page
    assert json.loads(succeed(*arguments, "--json"))["value"] == result["value"]
    message = "has no column 'segmnt' (by); did you mean 'segment'?"
    assert_refused(run_cli(*arguments, "--by", "segmnt"), message)
    assert_refused(run_cli(*arguments, "--by", "x", "--estimator", "all"))
