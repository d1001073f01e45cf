"""The grid of a sweep: what is separated by commas, what counts, what is refused before anything."""

import itertools

import pytest

from koffline.errors import ConfigError
from koffline.train.config import load_config, make_plan
from tests.train.small_runs import make_config

RATE, GAMMA = "algo.params.learning_rate", "algo.params.gamma"
UNITS = "algo.params.encoder_factory.params.hidden_units"


def plan_of(*grid, seeds=1, assignments=(), kind="dqn", data=None, **train):
    content = make_config("/nowhere/log.hdf5", kind, **train)
    return make_plan(content, grid, seeds, assignments, data, metric="td_error")


def test_every_combination_with_every_seed():
    plan = plan_of(f"{RATE}=1e-3,3e-4", f"{GAMMA}=0.9,0.98,0.99", seeds=2, seed=7)
    assert plan.seeds == (7, 8)
    rates, gammas = (0.001, 0.0003), (0.9, 0.98, 0.99)
    assert [
        (setting.config.algo.params["learning_rate"], setting.config.algo.params["gamma"])
        for setting in plan.settings
    ] == list(itertools.product(rates, gammas))
    assert plan.settings[4].values == {"learning_rate": "3e-4", "gamma": "0.98"}


def test_commas_in_brackets_do_not_separate():
    plan = plan_of(f"{UNITS}=[4,4],[8]", assignments=["train.n_steps=3"])
    assert [setting.label for setting in plan.settings] == ["hidden_units=[4, 4]", "hidden_units=[8]"]
    alone = load_config(make_config("/nowhere/log.hdf5"), [f"{UNITS}=[4, 4]", "train.n_steps=3"])
    assert plan.settings[0].config == alone


@pytest.mark.parametrize(
    ("grid", "seeds", "message"),
    [
        ([f"{GAMMA}=0.9,,0.8"], 1, f"--grid received '{GAMMA}=0.9,,0.8'; write it as key=value,value"),
        ([f"{UNITS}=[8,8"], 1, r"=\[8,8'; write"),
        ([f"{GAMMA}=0.9", f"{GAMMA}=0.8"], 1, "names algo.params.gamma twice"),
        (["train.seed=1,2"], 1, "say how many with --seeds"),
        ([], 0, "seeds is 0; give a positive number"),
        ([f"{GAMMA}=0.9,0.8"], 90_000, "180,000 runs"),
        ([f"{GAMMA}=0.9,7"], 1, "gamma is 7"),
    ],
)
def test_what_is_refused(grid, seeds, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plan_of(*grid, seeds=seeds)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("evaluators", "name", "expected"),
    [
        ({"environment": {"env": "CartPole-v1"}, "td_error": {}}, None, ("environment", True)),
        ({"score": {"type": "environment", "env": "CartPole-v1"}, "td_error": {}}, None, ("score", True)),
        ({"td_error": {}}, None, ("td_error", False)),
        ({"td_error": {}, "initial_value": {}}, "initial_value", ("initial_value", True)),
    ],
)
def test_which_metric_counts(evaluators, name, expected):
    content = {**make_config("/nowhere"), "evaluators": evaluators}
    plan = make_plan(content, metric=name)
    assert (plan.metric, plan.maximize) == expected
    assert make_plan(content, metric=expected[0], maximize=not expected[1]).maximize != expected[1]
