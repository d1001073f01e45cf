"""What a run leaves behind, what it learns on, what it refuses."""

import json
import random
import subprocess
import sys

import d3rlpy
import gymnasium
import numpy as np
import pytest
import torch
import yaml

import koffline
import koffline.train.run
from koffline import ColumnarReplayBuffer, Discrete, Transitions
from koffline.algos.options import resolve_params
from koffline.algos.training import (
    LogEvaluator,
    build_networks,
    make_algorithm,
    own_randomness,
)
from koffline.data import quiet
from koffline.data.sources import write_transitions
from koffline.data.splitting import split_log
from koffline.errors import ConfigError, DataError
from koffline.ope.cross_fit import measure_freshness
from koffline.ope.value_functions import as_value_function
from koffline.policies import DiscretePolicy
from koffline.policies.files import read_d3
from koffline.train.config import DataSettings, load_config
from koffline.train.prepare import EnvironmentEvaluator, open_data
from koffline.train.run import train
from tests.refusals import assert_refused, run_cli
from tests.train.small_runs import (
    check_equal,
    is_discrete,
    make_config,
    make_log,
    write_log,
)


def run(folder, kind="dqn", assignments=(), episodes=6, **options):
    source = write_log(folder, is_discrete(kind), episodes=episodes)
    config = load_config(make_config(source, kind), assignments)
    return train(config, folder / "run", **options)


@pytest.mark.parametrize("kind", ["iql", "kloss_sac", "discrete_cql"])
def test_the_folder_is_d3rlpys(kind, tmp_path):
    result = run(tmp_path, kind, ["data.split.held_out=0.34", "train.seed=5"])
    folder = tmp_path / "run"
    log = make_log(is_discrete(kind))
    names = {path.name for path in folder.iterdir()}
    assert {
        "params.json",
        "config.yaml",
        "run.json",
        "td_error.csv",
        "time_step.csv",
    } <= names
    assert {"model_10.d3", "model_20.d3", "model_25.d3"} <= names
    assert result.model == folder / "model_25.d3"
    assert result.steps == 25
    errors = np.loadtxt(folder / "td_error.csv", delimiter=",")
    assert errors[:, :2].tolist() == [[1, 10], [2, 20], [3, 25]]
    assert result.metrics["td_error"] == errors[-1, 2]
    loaded = d3rlpy.load_learnable(str(result.model))
    assert type(loaded).from_json(str(folder / "params.json")).impl is not None
    assert np.isfinite(loaded.predict(log.observations)).all()
    assert koffline.load_policy(result.model, log.action_space, (3,)) is not None
    record = json.loads((folder / "run.json").read_text())
    counts = record["data"]
    assert (counts["rows"], counts["train_rows"], counts["held_out_rows"]) == (
        48,
        32,
        16,
    )
    assert (record["digests"]["data"], record["seed"]) == (log.sha256, 5)
    assert (record["steps"], record["model"]) == (25, "model_25.d3")
    assert record["versions"]["d3rlpy"] == d3rlpy.__version__
    assert record["metrics"]["td_error"] == result.metrics["td_error"]


def test_the_resolved_config_gives_the_same_run(tmp_path):
    run(tmp_path, "sac")
    train(load_config(tmp_path / "run" / "config.yaml"), tmp_path / "again")
    check_equal(tmp_path / "run", tmp_path / "again")


def test_metrics_do_not_change_what_is_learned(tmp_path):
    # draws candidates whenever it acts
    plain = run(tmp_path / "one", "bcq", ["evaluators={}"])
    measured = run(tmp_path / "two", "bcq")
    assert plain.model.read_bytes() == measured.model.read_bytes()


def test_global_generators_are_left_alone(tmp_path):
    def draws():
        return (
            random.random(),
            float(np.random.random()),  # noqa: NPY002
            float(torch.rand(())),
        )

    def seed():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    config = load_config(make_config(write_log(tmp_path)))
    seed()
    expected = draws()
    seed()
    train(config, tmp_path / "run")
    assert draws() == expected


def test_learns_a_bandit(tmp_path):
    """Action 1 pays 1, action 0 nothing; every episode is one step."""
    generator = np.random.default_rng(0)
    observations = generator.normal(size=(200, 2)).astype(np.float32)
    actions = generator.integers(0, 2, 200)
    over = np.ones(200, dtype=bool)
    log = Transitions(
        observations, actions, actions * 1.0, observations, over, ~over, Discrete(2)
    )
    write_transitions(log, tmp_path / "log.hdf5")
    config = make_config(
        str(tmp_path / "log.hdf5"), "dqn", n_steps=300, n_steps_per_epoch=100
    )
    config["evaluators"] = {"average_value": {}, "td_error": {}}
    settings = [
        "algo.params.learning_rate=0.01",
        "algo.params.batch_size=32",
        "data.split.held_out=0.3",
    ]
    result = train(load_config(config, settings), tmp_path / "run")
    assert result.metrics["average_value"] == pytest.approx(1.0, abs=0.05)
    assert result.metrics["td_error"] < 0.01  # on rows it has not seen
    assert (koffline.load(result.model).predict(observations) == 1).all()


@pytest.mark.parametrize("kind", ["fqe", "kloss_fqe"])
def test_evaluation_of_a_saved_policy(kind, tmp_path):
    policy = run(tmp_path / "policy", "dqn").model
    source = write_log(tmp_path)
    content = make_config(source, kind)
    content["algo"] |= {"policy": str(policy)}
    content["algo"]["params"].pop("observation_scaler")
    content["evaluators"] = {"initial_value": {}}
    result = train(load_config(content), tmp_path / "run")
    assert np.isfinite(result.metrics["initial_value"])
    # observations scaled as the policy's, which sees them through the evaluator
    if kind == "fqe":
        scalers = [
            json.loads(read_d3(m).config)["config"]["params"]["observation_scaler"]
            for m in (policy, result.model)
        ]
        assert scalers[0] == scalers[1] != {"type": "none", "params": {}}
        refusals = [
            (make_config(source, kind), [], "fqe evaluates a policy and none is given"),
            (
                make_config(source),
                [f"algo.policy={policy}"],
                "policy is for fqe and kloss_fqe, not for dqn",
            ),
            (
                content,
                ["algo.policy=none.d3"],
                "none.d3, which does not exist; train the policy first",
            ),
            (
                content,
                ["algo.params.observation_scaler=standard"],
                "is set, but fqe scales as its policy",
            ),
        ]
        for wanted, assignments, message in refusals:
            with pytest.raises(ConfigError, match=message):
                train(load_config(wanted, assignments), tmp_path / "other")


def test_an_evaluation_on_the_rows_of_the_training_says_so(tmp_path):
    trained = make_log(episodes=100)
    model = run(tmp_path, "dqn", episodes=100).model
    fresh = make_log(episodes=50, seed=1)
    space = trained.action_space
    shape = trained.observation_shape
    known = koffline.load_policy(model, space, shape).trained_on
    policy = DiscretePolicy(
        2, lambda states: np.full((len(states), 2), 0.5), trained_on=known
    )
    part = koffline.split_transitions(trained, 0.5)[0]
    for rows, count in ((trained, 1), (part, 1), (fresh, 0)):
        estimate = koffline.evaluate(rows, policy, 0.5, steps=200, resampled_replicas=4)
        assert estimate.interval is not None
        reasons = estimate.verdict.because("training")
        assert (
            sum(
                "the policy was trained on 100% of these rows" in reason
                for reason in reasons
            )
            == len(reasons)
            == count
        )
    values = as_value_function(model, space, shape)
    assert measure_freshness(values, fresh) == (True, ())
    with pytest.raises(ConfigError, match=r"was fitted to 100% of these rows"):
        measure_freshness(values, part)


def test_a_split_of_episodes():
    log = make_log(episodes=10, length=4)
    train_part, held_out = split_log(log, 0.3, seed=0)
    assert (train_part.n_episodes, held_out.n_episodes) == (7, 3)
    assert not set(train_part.episode_ids) & set(held_out.episode_ids)
    again = split_log(log, 0.3, seed=0)[1]
    assert again.sha256 == held_out.sha256 != split_log(log, 0.3, seed=1)[1].sha256
    rows = split_log(log.replace(episode_ids=None, steps=None), 0.25, seed=0)
    assert [len(part) for part in rows] == [30, 10]
    with pytest.raises(ConfigError, match="the log has one episode"):
        split_log(make_log(episodes=1), 0.5, seed=0)
    with pytest.raises(DataError, match="choose one"):
        open_data(DataSettings(source="x", discrete=2, continuous=(0, 1)))


DISCRETE = "is for discrete actions, the log has Continuous.*such as"
CONTINUOUS = r"is for continuous actions, the log has Discrete\(2\).*such as"


@pytest.mark.parametrize(
    ("log", "kind", "device", "message"),
    [
        *(
            ("continuous", kind, "cpu", f"{kind} {DISCRETE}")
            for kind in ("dqn", "kloss_discrete_sac")
        ),
        *(
            ("discrete", kind, "cpu", f"{kind} {CONTINUOUS}")
            for kind in ("sac", "kloss_sac", "iql")
        ),
        *(
            ("discrete", "dqn", device, "device is")
            for device in ("gpu", "cuda:77", "mps")
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    log, kind, device, message, tmp_path
):
    config = load_config(make_config(write_log(tmp_path, log == "discrete"), kind))
    with pytest.raises(ConfigError, match=message):
        train(config, tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(make_config(write_log(tmp_path))))
    return str(path)


def test_stdout_belongs_to_the_result_and_out_has_a_default(
    config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = run_cli("train", config, "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "dataset info" not in done.stdout
    assert "25 steps" in done.stdout
    assert (tmp_path / "runs" / "small" / "config.yaml").exists()
    for arguments, words in (
        ((), "go on with it by --resume"),
        (("--data", "no.hdf5"), "does not exist"),
    ):
        assert_refused(run_cli("train", config, *arguments), words)


def test_a_closed_stdout_is_no_error(config, tmp_path):
    command = (
        f"{sys.executable} -m koffline train {config} --out {tmp_path}/run --quiet >&-"
    )
    assert (
        subprocess.run(command, shell=True, check=True, capture_output=True).stderr
        == b""
    )
    assert (tmp_path / "run" / "model_25.d3").exists()


def test_an_interrupt_says_how_to_go_on(config, tmp_path, monkeypatch):
    save = koffline.train.run.save_state

    def interrupted(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(koffline.train.run, "save_state", interrupted)
        done = run_cli("train", config, "--out", tmp_path / "run")
    assert done.exit_code == 130
    assert "go on with --resume" in done.stderr
    assert (
        run_cli("train", config, "--out", tmp_path / "run", "--resume").exit_code == 0
    )


def make(kind, log, seed=1, **params):
    fixed = {
        "observation_scaler": "standard",
        "reward_scaler": "standard",
        "batch_size": 8,
        **params,
    }
    with own_randomness(seed), quiet():
        algo = make_algorithm(kind, resolve_params(kind, fixed))
        build_networks(algo, ColumnarReplayBuffer(log, 0), kind)
    return algo


def test_soft_opc():
    log = make_log()
    algo = make("dqn", log)
    threshold = float(np.median(log.returns()))
    values = algo.predict_value(log.observations, log.actions.reshape(-1, 1))
    good = np.repeat(log.returns() >= threshold, log.episode_lengths)
    measured = LogEvaluator("soft_opc", log, "a", return_threshold=threshold)(algo)
    assert measured == pytest.approx(values[good].mean() - values.mean(), rel=1e-4)
    assert np.isnan(LogEvaluator("soft_opc", log, "a", return_threshold=1e9)(algo))


def test_rows_without_episodes():
    log = make_log().replace(episode_ids=None, steps=None)
    algo = make("dqn", log)
    for kind in ("initial_value", "td_error", "discounted_sum_of_advantage"):
        assert np.isfinite(LogEvaluator(kind, log, "a")(algo))
    with pytest.raises(ConfigError, match="soft_opc needs episodes"):
        LogEvaluator("soft_opc", log, "a", return_threshold=0.0)
    with pytest.raises(ConfigError, match="for other actions"):
        LogEvaluator("continuous_action_diff", log, "a")


def test_mean_return_of_episodes_one_by_one():
    rows = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    flags = np.zeros(20, dtype=bool)
    log = Transitions(
        rows, np.arange(20) % 2, np.ones(20), rows, flags, flags, Discrete(2)
    )
    algo = make("dqn", log, reward_scaler=None)
    evaluator = EnvironmentEvaluator("CartPole-v1", log, episodes=4, seed=7)
    measured = evaluator(algo)
    returns = []
    for episode in range(4):
        env = gymnasium.make("CartPole-v1")
        observation, _ = env.reset(seed=7 + episode)
        over = False
        total = 0.0
        while not over:
            observation, reward, ended, cut, _ = env.step(
                int(algo.predict(observation[None])[0])
            )
            total = total + reward
            over = ended or cut
        returns.append(total)
    assert measured == np.mean(returns)
    assert evaluator(algo) == measured  # the same starts every time
    evaluator.close()
