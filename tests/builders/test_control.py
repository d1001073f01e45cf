"""Control logs: who plays, how many rows, what the bundled ones are, the command;
learning by playing.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import koffline
from koffline.algos.training import own_randomness
from koffline.builders import POLICY_LEVELS
from koffline.builders import control_learning as learning
from koffline.builders.control import (
    POLICIES,
    ControlSettings,
    build_control,
    noisy,
    replay_log,
    stem,
)
from koffline.builders.control_learning import RECIPES, Learned, LearningSettings, learn
from koffline.data.transitions import Continuous, Discrete
from koffline.errors import ConfigError
from koffline.policies.base import ContinuousPolicy, DiscretePolicy
from koffline.policies.builtin import Mlp
from scripts.build_control import WITHOUT_LOGS
from tests.refusals import assert_refused

LOGS = Path(__file__).parents[2] / "datasets" / "control"


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        *(
            ("CartPole-v1", kind)
            for kind in ("random", "medium", "expert", "medium-expert")
        ),
        ("Pendulum-v1", "expert"),
    ],
)
def test_a_log_has_its_rows_and_says_who_played(env, kind):
    log = build_control(ControlSettings(env, kind, n=600, seed=3))
    assert len(log) == 600
    assert (log.terminated | log.truncated)[log.episode_ends].all()
    assert log.metadata.gamma == 0.99
    extra = log.metadata.extra
    assert (extra["task"], extra["kind"]) == (env, kind)
    assert extra["policies"] == [
        f"{stem(env)}_{level}.npz" for level in POLICY_LEVELS[kind]
    ] or ["uniform"]
    again = build_control(ControlSettings(env, kind, n=400, seed=3))
    np.testing.assert_array_equal(again.actions, log.actions[:400])
    other = build_control(ControlSettings(env, kind, n=400, seed=4))
    assert not np.array_equal(other.observations, again.observations)


def test_noise_of_discrete_actions_is_a_share_of_uniform_ones():
    greedy = DiscretePolicy(4, lambda s: np.ones(len(s), dtype=np.int64), "greedy")
    table = noisy(greedy, 0.2, Discrete(4)).probabilities(np.zeros((3, 2)))
    np.testing.assert_allclose(table, np.tile([0.05, 0.85, 0.05, 0.05], (3, 1)))
    assert noisy(greedy, 0.0, Discrete(4)) is greedy


def test_noise_of_continuous_actions_is_gaussian_and_stays_in_the_box():
    space = Continuous(2, (-1.0, 0.0), (1.0, 10.0))
    base = ContinuousPolicy(2, lambda s: np.tile([0.0, 5.0], (len(s), 1)), None, "base")
    policy = noisy(base, 0.1, space)
    generator = np.random.default_rng(0)
    states = np.zeros((20_000, 1))
    drawn = policy.sample(states, generator)
    # standard errors of 20,000 draws: 0.7 % of a deviation for the mean, 0.5 % for the
    # deviation
    np.testing.assert_allclose(
        drawn.mean(axis=0), [0.0, 5.0], atol=4 * 0.5 / np.sqrt(20_000)
    )
    np.testing.assert_allclose(drawn.std(axis=0), [0.1, 0.5], rtol=0.03)
    np.testing.assert_array_equal(policy.mean(states[:2]), base.mean(states[:2]))
    assert not policy.deterministic
    wide = noisy(base, 5.0, space).sample(states[:500], generator)
    assert (wide >= space.low).all()
    assert (wide <= space.high).all()


def learned_rows(lengths):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    steps = np.concatenate([np.arange(length) for length in lengths])
    n = len(ids)
    place = np.arange(n, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    flags = np.zeros(n, dtype=bool)
    rows = {
        "observations": place,
        "next_observations": place + 1,
        "actions": np.zeros(n, dtype=np.int64),
    }
    rows |= {
        "rewards": np.ones(n),
        "terminated": flags.copy(),
        "truncated": flags,
        "episode_ids": ids,
    }
    rows["terminated"][np.cumsum(lengths)[:-1] - 1] = True  # the last episode was cut
    return Learned({**rows, "steps": steps})


@pytest.mark.parametrize("seed", range(6))
def test_a_smaller_replay_is_whole_episodes_and_a_cut_one(seed):
    lengths = [3, 5, 2, 7, 4]
    learned = learned_rows(lengths)
    settings = LearningSettings(env="CartPole-v1", steps=21, seed=seed)
    whole = replay_log(learned, settings, None)
    assert (len(whole), whole.n_episodes, bool(whole.truncated[-1])) == (21, 5, True)
    log = replay_log(learned, settings, 11)
    assert len(log) == 11
    assert (np.diff(log.observations[:, 0]) > 0).all()  # in time order
    assert (log.terminated | log.truncated)[log.episode_ends].all()
    kept = np.add.reduceat(np.ones(11), log.episode_starts).astype(int)
    starts = np.searchsorted(
        np.cumsum(lengths), log.observations[log.episode_starts, 0], side="right"
    )
    shorter = [kept[i] < lengths[episode] for i, episode in enumerate(starts)]
    assert sum(shorter) <= 1
    with pytest.raises(ConfigError, match="saw 21 rows"):
        replay_log(learned, settings, 22)


def test_medium_is_half_way():
    network = Mlp((np.zeros((4, 2)),), (np.zeros(2),), "argmax")
    learner = network, DiscretePolicy(2, network.discrete)
    returns = [-9.0, -7.0, -4.0, 0.0, -5.0]
    learned = Learned(
        {},
        [
            learning.Snapshot(step, *learner, value)
            for step, value in enumerate(returns)
        ],
    )
    snapshots = learning.medium_and_expert(learned, -10.0)
    assert (snapshots["medium"].step, snapshots["expert"].step) == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (
                "--env",
                "Pendulum-v1",
                "--kind",
                "medium",
                "--policy",
                "uniform",
                "--policy",
                "uniform",
            ),
            "has 1",
        ),
        (("--env", "Acrobot-v1", "--kind", "expert"), "--train-steps"),
        (("--env", "Pendulm-v1", "--kind", "random"), "did you mean Pendulum-v1"),
        (("--env", "koffline-tests/Endless-v0", "--kind", "random"), "time limit"),
        (
            ("--env", "CartPole-v1", "--kind", "medium", "--noise", "2"),
            "give a probability in [0, 1]",
        ),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(run, tmp_path, arguments, message):
    assert_refused(run("control", *arguments, "--out", "log.hdf5"), message)
    assert list(tmp_path.iterdir()) == []


def test_the_command_learns_where_nothing_is_bundled(run, tmp_path):
    common = (
        "--env",
        "MountainCar-v0",
        "--train-steps",
        "2",
        "--n",
        "2",
        "--seed",
        "1",
    )
    for kind, name in (
        ("expert", "expert"),
        ("replay", "replay"),
        ("replay", "replay-again"),
    ):
        done = run("control", *common, "--kind", kind, "--out", f"{name}.hdf5")
        assert done.exit_code == 0, done.output
        log = koffline.open_transitions(tmp_path / f"{name}.hdf5")
        assert (len(log), log.metadata.extra["kind"]) == (2, kind)
    assert (tmp_path / "replay.hdf5").read_bytes() == (
        tmp_path / "replay-again.hdf5"
    ).read_bytes()
    (name,) = koffline.open_transitions(tmp_path / "expert.hdf5").metadata.extra[
        "policies"
    ]
    assert name.startswith("learned in ")
    assert not list(tmp_path.glob("*.parts"))
    assert len(json.loads((tmp_path / "manifest.json").read_text())) == 3


@pytest.mark.parametrize("env", [env for env in RECIPES if env not in WITHOUT_LOGS])
def test_bundled_logs_are_in_order_and_medium_is_in_the_middle(env):
    kinds = ("random", "replay", "medium", "expert")
    means = {}
    for kind in kinds:
        log = koffline.open_transitions(LOGS / f"{stem(env)}_{kind}.hdf5")
        means[kind] = log.returns()[:-1].mean()  # the last episode was cut
    assert sorted(kinds, key=means.__getitem__) == list(kinds)
    share = (means["medium"] - means["random"]) / (means["expert"] - means["random"])
    assert 0.3 < share < 0.7


WALKERS = [
    f"{stem(env)}_{level}.npz" for env in WITHOUT_LOGS for level in ("medium", "expert")
]


@pytest.mark.parametrize("name", WALKERS)
def test_bundled_walkers_are_as_good_as_said(name):
    entry = json.loads((POLICIES / "policies.json").read_text())[name]
    assert hashlib.sha256((POLICIES / name).read_bytes()).hexdigest() == entry["sha256"]
    returns = learning.policy_returns(entry["env"], str(POLICIES / name), 5, 7)
    stated = entry["returns"]["policy"]
    # of one episode; the error is that of the mean of 100
    spread = stated["error"] * 10.0
    assert returns.mean() == pytest.approx(stated["mean"], abs=4 * spread / 5**0.5)
    assert returns.mean() > 20 * entry["returns"]["uniform"]["mean"]


SMALL = {
    "hidden": (8,),
    "batch_size": 16,
    "random_steps": 40,
    "evaluate_every": 100,
    "episodes": 2,
}


def test_rows_are_the_environments_own():
    played = {
        "env": "CartPole-v1",
        "steps": 160,
        "exploration_steps": 80,
        "target_interval": 20,
    }
    rows = learn(LearningSettings(**played, **SMALL)).rows
    goes_on = ~(rows["terminated"] | rows["truncated"])[:-1]
    np.testing.assert_array_equal(
        rows["next_observations"][:-1][goes_on], rows["observations"][1:][goes_on]
    )
    np.testing.assert_array_equal(
        rows["steps"][1:][goes_on], rows["steps"][:-1][goes_on] + 1
    )
    assert (rows["steps"][1:][~goes_on] == 0).all()
    assert (np.diff(rows["episode_ids"]) == ~goes_on).all()
    assert set(rows["actions"]) == {0, 1}
    pendulum = learn(
        LearningSettings(env="Pendulum-v1", steps=200, update_every=20, **SMALL)
    ).rows
    assert pendulum["truncated"].sum() == 1
    assert (np.abs(pendulum["actions"]) <= 2.0).all()


@pytest.mark.parametrize(
    "space", [Discrete(3), Continuous(2, (-1.0, 0.0), (3.0, 1.0))], ids=str
)
def test_the_network_is_what_the_learner_predicts(space):
    generator = np.random.default_rng(0)
    observations = generator.normal(size=(50, 4)).astype(np.float32)
    actions = (
        generator.integers(3, size=50)
        if isinstance(space, Discrete)
        else generator.random((50, 2))
    )
    batch = {
        "observations": observations,
        "next_observations": observations[::-1].copy(),
        "actions": actions,
        "rewards": generator.normal(size=50),
        "terminated": generator.random(50) < 0.1,
    }
    with own_randomness(0):
        settings = LearningSettings(env="any", steps=1, hidden=(8, 8), batch_size=50)
        learner = learning.OnlineLearner(space, (4,), settings)
        for _ in range(30):
            learner.update(batch)
        policy = learner.policy()
        predicted = learner._algo.predict(observations)
        if isinstance(space, Discrete):
            np.testing.assert_array_equal(policy.discrete(observations), predicted)
            np.testing.assert_array_equal(learner.act(observations), predicted)
        else:
            np.testing.assert_allclose(policy.mean(observations), predicted, atol=1e-5)
            drawn = learner.act(observations)
            assert (drawn >= space.low).all()
            assert (drawn <= space.high).all()
            assert not np.allclose(drawn, predicted)
