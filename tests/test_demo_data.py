"""The bundled demo: a real log, a better policy, and its truth is the policy's value."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from koffline.data.sources import open_transitions
from koffline.policy_specs import load_policy

DATASETS = Path(__file__).resolve().parents[1] / "datasets"
MANIFEST = json.loads((DATASETS / "manifest.json").read_text())["cartpole"]
TRUTH = json.loads((DATASETS / "cartpole_truth.json").read_text())


@pytest.fixture(scope="module")
def log():
    return open_transitions(DATASETS / "cartpole.hdf5")


def test_truth_is_reached_in_gymnasium_itself(log):
    """The same policy stepped in Gymnasium's CartPole-v1, without its time limit: four standard errors."""
    policy = load_policy(DATASETS / TRUTH["policy"], log.action_space, log.observation_shape)
    generator = np.random.default_rng(0)
    copies = [gymnasium.make("CartPole-v1").unwrapped for _ in range(100)]
    observations = np.stack([copy.reset(seed=seed)[0] for seed, copy in enumerate(copies)])
    returns, running = np.zeros(100), np.ones(100, dtype=bool)
    for t in range(300):  # γ^300 / (1 − γ) = 0.12
        actions = policy.sample(observations, generator)
        for i in np.flatnonzero(running):
            observations[i], reward, terminated, _, _ = copies[i].step(int(actions[i]))
            returns[i] += TRUTH["gamma"] ** t * reward
            running[i] = not terminated
        if not running.any():
            break
    error = returns.std(ddof=1) / 10
    assert returns.mean() == pytest.approx(TRUTH["value"], abs=4 * error + 0.12)


def test_policy_is_clearly_better_than_the_log(log):
    returns = log.returns(TRUTH["gamma"])
    assert TRUTH["value"] > returns.mean() + 10 * returns.std() / np.sqrt(len(returns))
