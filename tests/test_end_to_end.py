"""Build a log, train on it, evaluate from another log what was trained, play it:
commands and a truth.
"""

import json
from pathlib import Path

import numpy as np

import koffline
from tests.refusals import succeed

ROOT = Path(__file__).parents[1]
GAMMA = 0.95
LIMIT = 100
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


def build(name: str, policy: str, seed: str) -> None:
    succeed(
        *(
            "build",
            "rollouts",
            "--env",
            "CartPole-v1",
            "--policy",
            policy,
            "--episodes",
            "60",
        ),
        *("--time-limit", str(LIMIT), "--seed", seed, "--out", f"{name}.hdf5"),
    )


def test_a_policy_trained_from_a_log_is_worth_what_another_log_says(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    behaviour = f"epsilon:0.5:{ROOT / 'datasets' / 'cartpole_policy.npz'}"
    for name, seed in (("train", "1"), ("held_out", "2")):
        build(name, behaviour, seed)
    (tmp_path / "config.yaml").write_text(CONFIG)
    succeed("train", "config.yaml", "--out", "run")
    model = tmp_path / "run" / "model_800.d3"
    output = succeed(
        *(
            "evaluate",
            "held_out.hdf5",
            "--policy",
            str(model),
            "--gamma",
            str(GAMMA),
            "--json",
        ),
        *(
            "--set",
            "steps=1500",
            "--set",
            "resampled_replicas=4",
            "--set",
            "full_replicas=2",
        ),
    )
    value = json.loads(output)["value"]
    build("played", str(model), "3")
    returns = koffline.open_transitions("played.hdf5").returns(GAMMA)
    truth = returns.mean()
    error = returns.std() / np.sqrt(len(returns))
    assert error < 1.0
    # 60 short episodes and a short training: 15 % of the value is what this budget is
    # good for
    assert abs(value - truth) < 0.15 * truth + 2.0 * error, (value, truth)
