"""The online policy as a .d3 model: what it predicts, draws and exports; koffline's
commands take it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import softmax

import koffline
from koffline import Continuous, Discrete, load_policy
from koffline.online.config import CRITICS, OnlineConfig
from koffline.online.networks import Agent, AgentStack, Shape, trust_pcl_model
from tests.algos.makers import COLUMNS, d3rlpy, fit, make_log
from tests.algos.test_model_files import run_file
from tests.online import lockstep_runs

CONFIG = OnlineConfig(
    "Toy-v0", hidden=(8, 6), window_length=4, critic="td0", adam_epsilon=1e-6
)
BOX = Continuous(3, (-2.0, 0.5, -1.0), (2.0, 3.0, 1.0))
HALF_OPEN = Continuous(3, (-np.inf, 0.5, -np.inf), (np.inf, np.inf, 0.1))


def make_agent(space: Any, seed: int = 0) -> Agent:
    generator = np.random.default_rng(seed)
    shape = Shape(COLUMNS, space, (8, 6))
    flats = generator.normal(size=(2, 1, shape.parts[2].stop))
    flats[..., shape.parts[1]] -= 1.0
    online, target = (
        AgentStack(shape, torch.tensor(flat, dtype=torch.float32)) for flat in flats
    )
    inputs = generator.normal(size=COLUMNS), generator.uniform(0.1, 3, size=COLUMNS)
    return Agent(online, target, *inputs, kl_coef=0.5, entropy_coef=0.1)


def forward(agent: Agent, network: Any, observations: np.ndarray) -> np.ndarray:
    """The network by its definition, in float64."""
    return lockstep_runs.forward(network, (observations - agent.mean) / agent.std)


def rows(n: int = 200) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(n, COLUMNS)).astype(np.float32)


def mean_action(agent: Agent, observations: np.ndarray) -> np.ndarray:
    outputs = forward(agent, agent.online.policy, observations)
    space = agent.online.shape.action_space
    return (
        outputs.argmax(axis=1)
        if isinstance(space, Discrete)
        else np.clip(outputs, space.low, space.high)
    )


@pytest.mark.parametrize("space", [BOX, HALF_OPEN, Continuous(3), Discrete(3)], ids=str)
def test_predict_is_the_mean_action_in_memory_on_disk_and_exported(
    space: Any, tmp_path: Path
) -> None:
    agent = make_agent(space)
    observations = rows()
    expected = mean_action(agent, observations)
    trust_pcl_model(agent, CONFIG).save(str(tmp_path / "model.d3"))
    loaded = koffline.load(tmp_path / "model.d3")
    assert loaded.config.get_type() == (
        "discrete_trust_pcl" if isinstance(space, Discrete) else "trust_pcl"
    )
    answers = [
        trust_pcl_model(agent, CONFIG).predict(observations),
        loaded.predict(observations),
    ]
    answers.append(
        d3rlpy.load_learnable(str(tmp_path / "model.d3")).predict(observations)
    )
    for name in ("policy.pt", "policy.onnx"):
        loaded.save_policy(str(tmp_path / name))
        answers.append(run_file(tmp_path / name, observations))
    policy = load_policy(tmp_path / "model.d3", space, (COLUMNS,))
    if isinstance(space, Discrete):
        probabilities = softmax(
            forward(agent, agent.online.policy, observations), axis=1
        )
        np.testing.assert_allclose(
            policy.probabilities(observations), probabilities, rtol=1e-4, atol=1e-6
        )
    else:
        answers.append(policy.mean(observations))
        clipped = (expected != forward(agent, agent.online.policy, observations)).any(
            axis=0
        )
        finite = np.isfinite(space.low) | np.isfinite(space.high)
        np.testing.assert_array_equal(
            clipped, finite, "the rows of this test reach every limit"
        )
    for answer in answers:
        assert answer.shape == expected.shape
        np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("space", [BOX, HALF_OPEN], ids=str)
def test_draws_are_the_clipped_gaussian(space: Any) -> None:
    """Kolmogorov-Smirnov distance of 4000 draws: below 1.95/√4000 with probability
    0.999.
    """
    agent = make_agent(space)
    model = trust_pcl_model(agent, CONFIG)
    draws = model.sample_action(np.repeat(rows(1), 4000, axis=0))
    mean = forward(agent, agent.online.policy, rows(1))[0]
    for i in range(3):
        low = space.low[i]
        high = space.high[i]
        assert draws[:, i].min() >= low - 1e-6
        assert draws[:, i].max() <= high + 1e-6
        inside = (draws[:, i] > low + 1e-4) & (draws[:, i] < high - 1e-4)
        gaussian = stats.norm(mean[i], np.exp(agent.online.log_std[0, i].item()))
        assert abs(inside.mean() - (gaussian.cdf(high) - gaussian.cdf(low))) < 0.04
        grid = np.linspace(max(low, mean[i] - 5), min(high, mean[i] + 5), 50)[1:-1]
        empirical = (draws[:, i, None] <= grid).mean(axis=0)
        assert np.abs(empirical - gaussian.cdf(grid)).max() < 1.95 / np.sqrt(4000)


@pytest.mark.parametrize("space", [BOX, HALF_OPEN], ids=str)
def test_values_are_those_that_path_consistency_implies(space: Any) -> None:
    """V(s) + (λ + τ) log π − τ log π̃; a scaled box shifts log-densities by the log of
    its volume.
    """
    agent = make_agent(space)
    observations = rows(20)
    actions = np.clip(mean_action(agent, observations) + 0.1, space.low, space.high)

    def log_density(stack: AgentStack) -> np.ndarray:
        log_std = stack.log_std.numpy()
        z = (actions - forward(agent, stack.policy, observations)) / np.exp(log_std)
        return (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(axis=1)

    volume = 0.0
    if space is BOX:
        volume = np.log((np.array(space.high) - np.array(space.low)) / 2).sum()
    here, slow = (log_density(stack) + volume for stack in (agent.online, agent.target))
    expected = (
        forward(agent, agent.online.value, observations)[:, 0] + 0.6 * here - 0.5 * slow
    )
    actual = trust_pcl_model(agent, CONFIG).predict_value(
        observations, actions.astype(np.float32)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["TrustPCL", "DiscreteTrustPCL"])
def test_training_goes_on_from_the_model(name: str, tmp_path: Path) -> None:
    """The values are not shifted before the first step, as those of a fresh model
    are.
    """
    discrete = name.startswith("Discrete")
    agent = make_agent(Discrete(3) if discrete else BOX)
    config = CONFIG.with_changes(learning_rate=0.0, critic="kloss")
    trust_pcl_model(agent, config).save(str(tmp_path / "model.d3"))
    model = koffline.load(tmp_path / "model.d3")
    log = make_log(discrete)
    fit(model, koffline.ColumnarReplayBuffer(log, seed=0), steps=2)
    np.testing.assert_allclose(
        model.predict(rows()), mean_action(agent, rows()), rtol=1e-5, atol=2e-5
    )
    bias = model.impl.modules.q_funcs[0]._fc.bias.item()
    assert bias == pytest.approx(
        agent.online.value.layers(agent.online.value.flat)[-1][1].item()
    )


@pytest.mark.parametrize("name", CRITICS)
def test_every_critic_has_a_model_that_goes_on(name: str, tmp_path: Path) -> None:
    """A remembered kernel loss is the kernel loss with a memory there."""
    model = trust_pcl_model(make_agent(Continuous(3)), CONFIG.with_changes(critic=name))
    model.save(str(tmp_path / "model.d3"))
    config = koffline.load(tmp_path / "model.d3").config
    assert (config.critic, config.memory) == (
        ("kloss", 0.97) if name == "memory" else (name, 0.0)
    )
