"""Config files: what they may say, what they may not, and which defaults stand behind
them.
"""

import json
import math
from pathlib import Path

import pytest

from koffline.algos.options import algorithm_types, resolve_params
from koffline.algos.training import EVALUATORS
from koffline.data import import_d3rlpy
from koffline.errors import ConfigError
from koffline.train.config import load_config
from koffline.train.run import train
from tests.refusals import one_line

d3rlpy = import_d3rlpy()

from d3rlpy.base import LearnableConfig  # noqa: E402
from d3rlpy.serializable_config import CONFIG_STORAGE  # noqa: E402

VECTOR = {"type": "vector", "params": {"hidden_units": [8]}}


def class_of(kind):
    return CONFIG_STORAGE[LearnableConfig].config_list[kind]


def build(config_class, params):
    return config_class.deserialize_from_dict(dict(params))


def with_algo(kind, **params):
    return {"data": {"source": "log.hdf5"}, "algo": {"type": kind, "params": params}}


@pytest.mark.parametrize("kind", algorithm_types())
def test_defaults_are_d3rlpys_own(kind):
    resolved = resolve_params(kind, {})
    theirs = class_of(kind)().serialize_to_dict()
    theirs.pop("policy", None)
    assert json.loads(json.dumps(resolved)) == json.loads(json.dumps(theirs))
    built = build(class_of(kind), resolved).serialize_to_dict()
    built.pop("policy", None)
    assert json.loads(json.dumps(built)) == json.loads(json.dumps(theirs))


def test_nested_factories_are_laid_over_their_defaults():
    schedule = {"type": "warmup", "params": {"warmup_steps": 9}}
    params = {
        "critic_encoder_factory": {
            "type": "vector",
            "params": {"use_layer_norm": True},
        },
        "actor_optim_factory": {"params": {"lr_scheduler_factory": schedule}},
        "q_func_factory": {"type": "qr", "params": {"n_quantiles": 5}},
    }
    config = build(class_of("sac"), load_config(with_algo("sac", **params)).algo.params)
    encoder = config.critic_encoder_factory
    optimiser = config.actor_optim_factory
    assert (encoder.hidden_units, encoder.use_layer_norm) == ([256, 256], True)
    assert (optimiser.lr_scheduler_factory.warmup_steps, optimiser.betas) == (
        9,
        (0.9, 0.999),
    )
    assert config.q_func_factory.n_quantiles == 5
    assert config.critic_optim_factory.lr_scheduler_factory is None


def test_numbers_that_yaml_takes_for_text():
    config = load_config(
        with_algo("sac"), ["algo.params.actor_learning_rate=1e-3", "train.n_steps=1e4"]
    )
    assert config.algo.params["actor_learning_rate"] == 1e-3
    assert config.train.n_steps == 10_000
    assert (
        load_config(with_algo("kloss_sac"), ["algo.params.bandwidth=5e-1"]).algo.params[
            "bandwidth"
        ]
        == 0.5
    )
    rule = load_config(with_algo("kloss_sac"), ["algo.params.bandwidth=0.7 median"])
    assert rule.algo.params["bandwidth"] == "0.7 median"


def test_later_assignments_win_and_reach_any_depth():
    config = load_config(
        with_algo("sac", gamma=0.5, critic_encoder_factory=VECTOR),
        [
            "algo.params.gamma=0.6",
            "algo.params.critic_encoder_factory.params.hidden_units=[4, 5]",
            "data.split.held_out=0.25",
            "evaluators.td_error.type=td_error",
            "evaluators.environment=null",
        ],
    )
    assert config.algo.params["gamma"] == 0.6
    assert config.algo.params["critic_encoder_factory"]["params"]["hidden_units"] == [
        4,
        5,
    ]
    assert {name: settings.part for name, settings in config.evaluators.items()} == {
        "td_error": "held_out"
    }
    assert load_config(with_algo("sac"), ["algo.params=null"]) == load_config(
        with_algo("sac")
    )


def test_paths_are_relative_to_the_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text(
        "data: {source: ../logs/a.hdf5}\nalgo: {type: dqn}\n"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config("../configs/a.yaml").data.source == str(
        tmp_path / "logs" / "a.hdf5"
    )
    for options in ({"data": "b.hdf5"}, {"assignments": ["data.source=b.hdf5"]}):
        source = load_config("../configs/a.yaml", **options).data.source
        assert source == str(tmp_path / "elsewhere" / "b.hdf5")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("algo.type=saac", "algo.type is 'saac'; did you mean 'sac'"),
        ("algo.type=tacr", "algo.type is 'tacr': it acts on histories"),
        ("algo.params.gama=0.9", "algo.params.gama is unknown; did you mean 'gamma'"),
        (
            "algo.params.actor_optim_factory.type=adm",
            "optim_factory.type is 'adm'; did you mean 'adam'",
        ),
        (
            "algo.params.actor_optim_factory.params.betass=1",
            "params.betass is unknown; did you mean",
        ),
        (
            "algo.params.gamma=1.5",
            "algo.params.gamma is 1.5: input should be less than or equal to 1",
        ),
        (
            "algo.params.reward_scaler=clip",
            "algo.params.reward_scaler clips at no bound; give params.low",
        ),
        ("train.n_step=5", "train.n_step is unknown; did you mean 'n_steps'"),
        ("n_steps=5", "n_steps is unknown; did you mean 'train.n_steps'?"),
        ("source=a.hdf5", "source is unknown; did you mean 'data.source'?"),
        ("steps=5", "steps is unknown; known are algo, data, evaluators"),
        ("train.n_steps=true", "train.n_steps is true: a yes or no"),
        (
            "evaluators.td_eror={}",
            "the type 'td_eror' is unknown; did you mean 'td_error'",
        ),
        (
            "evaluators.td_error.part=held_out",
            "nothing is held out; set data.split.held_out",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(assignment, message):
    content = with_algo("sac")
    content["train"] = {"seed": 0}
    with one_line(ConfigError, match=message):
        load_config(content, [assignment])


FOLDER = Path(__file__).parents[2] / "configs"
ALGORITHMS = sorted(FOLDER.glob("*.yaml"))
EXPERIMENTS = sorted((FOLDER / "experiments").glob("*.yaml"))
FEW_STEPS = ["train.n_steps=3", "train.n_steps_per_epoch=2"]
QUICK = ("kloss_sac", "trust_pcl")


def test_there_is_one_per_algorithm():
    assert [path.stem for path in ALGORITHMS] == sorted(algorithm_types())


@pytest.mark.parametrize(
    "path", [*ALGORITHMS, *EXPERIMENTS], ids=lambda path: path.stem
)
def test_it_loads(path):
    config = load_config(path)
    assert Path(config.data.source).is_file()
    assert path in EXPERIMENTS or config.algo.type == path.stem


@pytest.mark.parametrize(
    "path",
    [
        path if path.stem in QUICK else pytest.param(path, marks=pytest.mark.slow)
        for path in (*ALGORITHMS, *EXPERIMENTS)
    ],
    ids=lambda path: path.stem,
)
def test_it_trains(path, tmp_path):
    config = load_config(path, FEW_STEPS)
    options = (
        ["evaluators.environment.episodes=1"]
        if "environment" in config.evaluators
        else []
    )
    if config.algo.type in EVALUATORS:
        policy = load_config(FOLDER / "dqn.yaml", [*FEW_STEPS, "evaluators={}"])
        options.append(f"algo.policy={train(policy, tmp_path / 'policy').model}")
    result = train(load_config(path, [*FEW_STEPS, *options]), tmp_path / "run")
    assert result.steps == 3
    assert all(math.isfinite(value) for value in result.metrics.values())
