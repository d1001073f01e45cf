"""The grid of a sweep: what is separated by commas, what runs are called, what is refused before anything."""

import pytest

from koffline.errors import ConfigError
from koffline.train.config import load_config
from koffline.train.sweep_plan import Axis, make_plan, parse_axis
from tests.train.small_runs import make_config

RATE, GAMMA = "algo.params.learning_rate", "algo.params.gamma"
UNITS = "algo.params.encoder_factory.params.hidden_units"


def plan_of(*grid, seeds=1, assignments=(), **train):
    return make_plan(make_config("/nowhere/log.hdf5", **train), grid, seeds, assignments)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=1e-3,3e-4", ("1e-3", "3e-4")),
        ("k= a , b ", ("a", "b")),
        ("k=[64,64],[8]", ("[64,64]", "[8]")),
        ("k={a: 1, b: [2, 3]},null", ("{a: 1, b: [2, 3]}", "null")),
        ("k='a,b',c", ("'a,b'", "c")),
        ("k=a=b", ("a=b",)),
    ],
)
def test_commas_separate_values_outside_brackets_and_quotes(text, values):
    assert parse_axis(text) == Axis("k", values)


def test_every_combination_with_every_seed():
    plan = plan_of(f"{RATE}=1e-3,3e-4", f"{GAMMA}=0.9,0.98,0.99", seeds=2, seed=7)
    assert plan.seeds == (7, 8)
    assert [setting.label for setting in plan.settings][:4] == [
        "learning_rate=0.001, gamma=0.9",
        "learning_rate=0.001, gamma=0.98",
        "learning_rate=0.001, gamma=0.99",
        "learning_rate=0.0003, gamma=0.9",
    ]
    assert len(plan.runs) == 12
    for run in plan.runs:
        params = run.config.algo.params
        shown = f"learning_rate={params['learning_rate']:g}, gamma={params['gamma']:g}"
        assert (shown, run.config.train.seed) == (run.setting.label, run.seed)
    assert len({run.name for run in plan.runs}) == 12


def test_each_run_is_what_its_assignments_alone_would_give():
    plan = plan_of(f"{UNITS}=[4,4],[8]", assignments=["train.n_steps=3"])
    content = make_config("/nowhere/log.hdf5")
    alone = load_config(content, [f"{UNITS}=[4,4]", "train.n_steps=3", "train.seed=0"])
    assert plan.runs[0].config == alone


def test_no_grid_is_one_setting():
    plan = plan_of(seeds=3)
    assert [setting.label for setting in plan.settings] == ["the config"]
    assert [run.name.rpartition("-")[0] for run in plan.runs] == ["seed0", "seed1", "seed2"]


def test_names_do_not_depend_on_spelling_on_the_rest_of_the_grid_or_on_where_the_log_lies():
    name = plan_of(f"{RATE}=1e-3").runs[0].name
    assert name.startswith("learning_rate=0.001-seed0-")
    assert plan_of(f"{RATE}=0.01,0.001", seeds=4).runs[4].name == name
    moved = make_plan(make_config("/elsewhere/log.hdf5"), [f"{RATE}=0.001"])
    assert moved.runs[0].name == name
    assert plan_of(f"{RATE}=1e-3", assignments=[f"{GAMMA}=0.5"]).runs[0].name != name


def test_keys_are_shortened_as_far_as_they_differ():
    grid = ("train.seed_of_x=1", "data.split.seed=1,2", "evaluators.td_error.part=train")
    with pytest.raises(ConfigError, match="seed_of_x is unknown"):
        plan_of(*grid)
    content = make_config("/nowhere/log.hdf5", "td3_plus_bc")
    grid = [f"algo.params.{who}_encoder_factory.params.hidden_units=[4],[8]" for who in ("actor", "critic")]
    plan = make_plan(content, grid)
    assert [name for name, _ in plan.settings[0].values] == [
        "actor_encoder_factory.params.hidden_units",
        "critic_encoder_factory.params.hidden_units",
    ]
    assert len({run.name for run in plan.runs}) == 4
    assert max(len(run.name) for run in plan.runs) < 100


def test_logs_are_swept_by_their_own_names(tmp_path):
    plan = plan_of("data.source=a/x.hdf5,b/y.hdf5")
    assert [setting.label for setting in plan.settings] == ["source=x", "source=y"]
    assert plan.runs[0].config.data.source.endswith("a/x.hdf5")
    plan = plan_of("data.source=a/x.hdf5,b/x.hdf5")
    assert [setting.label for setting in plan.settings] == ["source=a/x.hdf5", "source=b/x.hdf5"]


def test_a_swept_log_wins_over_the_one_that_is_given():
    plan = make_plan(make_config("/nowhere/log.hdf5"), ["data.source=/a.hdf5,/b.hdf5"], data="/c.hdf5")
    assert [setting.config.data.source for setting in plan.settings] == ["/a.hdf5", "/b.hdf5"]


@pytest.mark.parametrize(
    ("grid", "seeds", "message"),
    [
        (["algo.params.gamma"], 1, "--grid received 'algo.params.gamma'; write it as key=value,value"),
        ([f"{GAMMA}=0.9,,0.8"], 1, "has an empty value"),
        ([f"{GAMMA}="], 1, "has an empty value"),
        ([f"{UNITS}=[8,8"], 1, r"close its \]"),
        ([f"{GAMMA}=0.9", f"{GAMMA}=0.8"], 1, "names algo.params.gamma twice"),
        ([f"{RATE}=0.001,1e-3"], 1, "gives the same run twice"),
        (["logger.gradients=true,false"], 1, "gives the same run twice"),
        (["train.seed=1,2"], 1, "say how many with --seeds"),
        ([], 0, "seeds is 0; give a positive number"),
        ([f"{GAMMA}=0.9,0.8"], 90_000, "180,000 runs"),
        (["algo.params.learning_rat=1"], 1, "did you mean 'learning_rate'"),
        (["algo.type=dqnn,dqn"], 1, "dqn"),
        ([f"{GAMMA}=0.9,7"], 1, "gamma is 7"),
    ],
)
def test_what_is_refused(grid, seeds, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_plan(make_config("/nowhere/log.hdf5"), grid, seeds)
    assert "\n" not in str(caught.value)
