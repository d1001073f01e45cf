"""Build a log, train on it, evaluate from another log what was trained, play it: commands and a truth."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from click.testing import CliRunner

import koffline
from koffline.cli import cli

ROOT = Path(__file__).parents[1]
GAMMA, LIMIT = 0.95, 100
CONFIG = """
data:
  source: train.hdf5
algo:
  type: kloss_dqn
  params:
    gamma: 0.95
    learning_rate: 1.0e-3
    encoder_factory: {type: vector, params: {hidden_units: [32, 32]}}
train:
  n_steps: 800
  n_steps_per_epoch: 400
"""


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments, prog_name="koffline")
    assert done.exit_code == 0, done.stderr
    return done.stdout


def monte_carlo(model: Path, episodes: int = 40) -> tuple[float, float]:
    """Mean discounted return of the policy and its standard error."""
    policy = koffline.load_policy(model, koffline.Discrete(2), (4,))
    worlds = gymnasium.make_vec("CartPole-v1", num_envs=episodes, vectorization_mode="sync")
    observation, _ = worlds.reset(seed=1234)
    alive, returns = np.ones(episodes, bool), np.zeros(episodes)
    generator = np.random.default_rng(5)
    for step in range(LIMIT):
        chance = policy.probabilities(observation).cumsum(axis=1)
        action = (generator.random((episodes, 1)) > chance).sum(axis=1).clip(max=1)
        observation, reward, terminated, _, _ = worlds.step(action)
        returns += alive * reward * GAMMA**step
        alive &= ~terminated
    worlds.close()
    return float(returns.mean()), float(returns.std() / np.sqrt(episodes))


def test_a_policy_trained_from_a_log_is_worth_what_another_log_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    behaviour = f"epsilon:0.5:{ROOT / 'datasets' / 'cartpole_policy.npz'}"
    for name, seed in (("train", "1"), ("held_out", "2")):
        run(
            *("build", "rollouts", "--env", "CartPole-v1", "--policy", behaviour, "--episodes", "60"),
            *("--time-limit", str(LIMIT), "--seed", seed, "--out", f"{name}.hdf5"),
        )
    (tmp_path / "config.yaml").write_text(CONFIG)
    run("train", "config.yaml", "--out", "run")
    model = tmp_path / "run" / "model_800.d3"
    said = run(
        *("evaluate", "held_out.hdf5", "--policy", str(model), "--gamma", str(GAMMA), "--json"),
        *("--set", "steps=1500", "--set", "resampled_replicas=4", "--set", "full_replicas=2"),
    )
    value = json.loads(said)["value"]
    truth, error = monte_carlo(model)
    assert error < 1.0
    # 60 short episodes and a short training: 15 % of the value is what this budget is good for
    assert abs(value - truth) < 0.15 * truth + 2.0 * error, (value, truth)
