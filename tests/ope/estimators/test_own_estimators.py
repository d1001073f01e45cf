"""Estimators that users bring: in Python, on the command line, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import koffline
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.ope import names
from koffline.ope.estimators.registry import name_of, register_estimator
from koffline.ope.evaluation import estimate_all
from koffline.ope.results import Interval, PointEstimate
from tests.ope.estimators.test_contract import GAMMA, QUICK, mostly_right, walk
from tests.refusals import assert_refused, run_cli, succeed


class MeanReturn:
    """The mean return of the logged episodes: the value of the behavior policy."""

    name = "mean-return"
    family = "baseline"
    interval_kinds = ("default",)
    needs = frozenset({"episodes"})

    def estimate(self, workspace):
        returns = workspace.facts.returns
        half = 2.0 * returns.standard_error
        mean = float(returns.mean)
        interval = Interval(mean - half, mean + half, 0.95, "two standard errors")
        return PointEstimate(name=self.name, value=mean, interval=interval)


class FirstReplica:
    """The first network's value, with an interval from the library."""

    name = "first-replica"
    family = "value function"
    interval_kinds = ("default", *names.SYSTEM_KINDS)
    needs = frozenset({"networks"})

    def estimate(self, workspace):
        values = workspace.fitted.values_of("kloss")
        return PointEstimate(name=self.name, value=float(values[0, 1]))


def test_an_object_is_evaluated_and_judged() -> None:
    estimate = koffline.evaluate(
        walk(), mostly_right, GAMMA, estimator=MeanReturn(), **QUICK
    )
    assert estimate.estimator == "mean-return"
    assert estimate.interval.kind == "two standard errors"
    assert estimate.value == pytest.approx(estimate.diagnostics["logged_return"])
    assert str(estimate.verdict)
    assert json.loads(estimate.to_json())["estimator"] == "mean-return"


def test_no_network_is_trained_for_one_that_needs_none() -> None:
    huge = {**QUICK, "steps": 10**7}  # would take hours
    estimate = koffline.evaluate(
        walk(), mostly_right, GAMMA, estimator=MeanReturn(), **huge
    )
    assert estimate.estimator == "mean-return"


def test_it_stands_beside_koffline_s_in_a_table() -> None:
    table = estimate_all(
        walk(),
        mostly_right,
        GAMMA,
        names=[FirstReplica(), "kloss", MeanReturn],
        bounds=False,
        **QUICK,
    )
    families = {row.name: row.family for row in table.rows}
    assert families == {
        "first-replica": "value function",
        "kloss": "value function",
        "mean-return": "baseline",
    }


def test_the_library_makes_the_interval_where_the_contract_says_so() -> None:
    estimate = koffline.evaluate(
        walk(),
        mostly_right,
        GAMMA,
        estimator=FirstReplica(),
        interval="bootstrap-pivot",
        **QUICK,
    )
    assert estimate.interval.kind == "bootstrap-pivot"
    with pytest.raises(ConfigError, match="mean-return has no interval of kind"):
        koffline.evaluate(
            walk(),
            mostly_right,
            GAMMA,
            estimator=MeanReturn(),
            interval="bootstrap-pivot",
            **QUICK,
        )


CODE = """
from koffline.ope.results import Interval, PointEstimate

class Half:
    name = "half"
    family = "baseline"
    interval_kinds = ("default",)
    needs = frozenset({"episodes"})

    def estimate(self, workspace):
        value = 0.5 * float(workspace.facts.returns.mean)
        interval = Interval(value - 1.0, value + 1.0, 0.95, "by guess")
        return PointEstimate(name="half", value=value, interval=interval)

number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    koffline.write_transitions(walk(), tmp_path / "log.npz")
    (tmp_path / "my_estimators.py").write_text(CODE)
    return tmp_path


COMMAND = ("evaluate", "log.npz", "--policy", "uniform", "--gamma", "0.8")


def test_the_command_line_takes_it_alone_and_in_a_table(folder) -> None:
    alone = succeed(*COMMAND, "--estimator", "my_estimators:Half", "--json")
    assert json.loads(alone)["estimator"] == "half"
    several = succeed(
        *COMMAND,
        "--estimator",
        "my_estimators:Half,pdis",
        "--json",
        "--set",
        "steps=50",
    )
    rows = {row["estimator"]: row for row in json.loads(several)["estimates"]}
    assert rows["half"]["family"] == "baseline"
    assert rows["half"]["value"] == pytest.approx(
        0.5 * rows["pdis"]["uplift"]["behavior_value"]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "my_estimators:number",
            "has no name, family, interval_kinds, needs, estimate",
        ),
        ("my_estimators:Hulf", "has no 'Hulf'"),
        ("no_such_module:Half", "importing no_such_module failed"),
    ],
)
def test_the_command_line_refuses_in_one_line(folder, text, message) -> None:
    assert_refused(run_cli(*COMMAND, "--estimator", text), message)


def broken(**parts):
    """An object with the contract's parts, some of them changed."""
    usual = {
        "name": "broken",
        "family": "baseline",
        "interval_kinds": ("default",),
        "needs": frozenset(),
        "estimate": lambda workspace: PointEstimate(name="broken", value=1.0),
    }
    return SimpleNamespace(**{**usual, **parts})


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (broken(name="kloss"), "is that of an estimator of koffline"),
        (broken(name="auto"), "is that of an estimator of koffline"),
        (broken(name=""), "its name is ''; give a text"),
        (broken(name="a:b"), "without colons"),
        (broken(family=None), "its family is None; give a text"),
        (broken(interval_kinds="default"), "give a tuple of kinds"),
        (broken(interval_kinds=("bootstrap",)), "give a tuple of kinds"),
        (broken(needs="networks"), "give a set out of"),
        (broken(needs={"gpu"}), "give a set out of"),
        (broken(estimate=3), "give estimate"),
        (3, "has no name"),
    ],
)
def test_an_object_without_the_contract_is_refused(estimator, message) -> None:
    with pytest.raises(ConfigError, match=message):
        register_estimator(estimator)


def test_a_class_with_arguments_is_refused() -> None:
    class Needy(MeanReturn):
        def __init__(self, window):
            self.window = window

    with pytest.raises(ConfigError, match=r"needs arguments.*give an instance"):
        name_of(Needy)


def fails(workspace):
    raise ZeroDivisionError("no rows")


def does_not_apply(workspace):
    raise DataError("this log has no prices; add them")


@pytest.mark.parametrize(
    ("estimate", "kind", "message"),
    [
        (fails, ConfigError, r"estimator broken: it failed \(.*no rows"),
        (does_not_apply, DataError, "this log has no prices; add them"),
        (lambda workspace: 1.0, ConfigError, "returned a float"),
        (
            lambda workspace: PointEstimate(name="broken", value=np.nan),
            DataError,
            "has the value nan",
        ),
    ],
)
def test_what_goes_wrong_in_it_is_one_line(estimate, kind, message) -> None:
    with pytest.raises(KofflineError, match=message) as raised:
        koffline.evaluate(
            walk(), mostly_right, GAMMA, estimator=broken(estimate=estimate), **QUICK
        )
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)
