"""The residual of windows, against loops over windows and steps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.online import reference_trust_pcl as reference
from tests.online import stacks

SETTINGS = reference.Settings(gamma=0.9, entropy_coef=0.3, kl_coef=0.7)
LENGTHS = [1, 3, 10, 25]  # the last is longer than any path
FLAGS = [
    {},
    {"legacy_timeouts": True},
    {"legacy_discount": True},
    {"legacy_timeouts": True, "legacy_discount": True},
]
CRITICS = ["kloss", "fvi", "td0", "rg"]


def check(agents, settings, per_run, starts=None, **others):
    step, batch = stacks.compute(agents, settings, per_run, starts, **others)
    valid = batch.valid.flatten(1).bool()
    for run, (agent, one, paths) in enumerate(zip(agents, settings, per_run, strict=True)):
        windows = stacks.windows_of(paths, None if starts is None else starts[run])
        naive = [float(reference.residual(agent, path, start, one).detach()) for path, start in windows]
        found = step.residual[run][valid[run]]
        np.testing.assert_allclose(found.numpy(), naive, rtol=1e-11, atol=1e-11)
        assert len(found) == len(naive)


@pytest.mark.parametrize("discrete", [False, True], ids=["box", "discrete"])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_window_of_every_critic(length, discrete):
    """Cut, terminated and truncated paths of 1, 5 and 10 steps; the four critics in one stack."""
    settings = [replace(SETTINGS, critic=critic, window_length=length) for critic in CRITICS]
    check(stacks.make_agents(4, discrete), settings, stacks.draw(4, discrete, seed=length))


@pytest.mark.parametrize("length", LENGTHS)
def test_oddities_of_the_original(length):
    settings = [replace(SETTINGS, window_length=length, **flags) for flags in FLAGS]
    paths = stacks.draw(1, seed=length) * len(FLAGS)
    check(stacks.make_agents(len(FLAGS)), settings, paths)


def test_runs_of_different_settings_in_one_stack():
    settings = [
        replace(SETTINGS, window_length=length, gamma=gamma, kl_coef=kl_coef, critic=critic, **flags)
        for length, gamma, kl_coef, critic, flags in zip(
            LENGTHS, (0.5, 0.9, 0.995, 1.0), (0.0, 0.1, 5.0, 500.0), CRITICS, FLAGS, strict=True
        )
    ]
    check(stacks.make_agents(4), settings, stacks.draw(4))


@pytest.mark.parametrize("length", LENGTHS)
def test_one_drawn_window_on_each_path(length):
    """V is evaluated at the windows' ends alone; starts cover every step of some path."""
    settings = [replace(SETTINGS, critic=critic, window_length=length) for critic in CRITICS]
    per_run = stacks.draw(4)
    rng = np.random.default_rng(length)
    for _ in range(4):
        starts = [[int(rng.integers(len(path))) for path in paths] for paths in per_run]
        check(stacks.make_agents(4), settings, per_run, starts, windows_per_path=1)


def test_what_lies_past_a_paths_end_is_never_read():
    settings = [replace(SETTINGS, critic=critic) for critic in CRITICS]
    agents, per_run = stacks.make_agents(4), stacks.draw(4)
    step, batch = stacks.compute(agents, settings, per_run)
    other, _ = stacks.compute(agents, settings, per_run, filler=9.0)
    valid = batch.valid.flatten(1).bool()
    assert torch.equal(step.residual[valid], other.residual[valid])
    torch.testing.assert_close(step.gradient, other.gradient, rtol=1e-11, atol=1e-13)
    for name, number in step.diagnostics.items():
        torch.testing.assert_close(number, other.diagnostics[name], rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize(
    ("ending", "flags", "follows"),
    [
        ({}, {}, 0.5**2),
        ({"terminated": True}, {}, 0.0),
        ({"truncated": True}, {}, 0.5**2),
        ({"truncated": True}, {"legacy_timeouts": True}, 0.0),
        ({}, {"legacy_timeouts": True}, 0.5**2),
        ({}, {"legacy_discount": True}, 0.5),
        ({"terminated": True}, {"legacy_discount": True}, 0.0),
    ],
)
def test_by_hand(ending, flags, follows):
    """Two steps, V = 3 everywhere, standard normal policy, slow policy with deviation e, γ = 1/2."""
    agent = reference.Agent(stacks.STATE, stacks.ACTIONS, False)
    with torch.no_grad():
        for module in (agent.policy, agent.slow_policy, agent.value, agent.slow_value):
            for part in module.parameters():
                part.zero_()
        agent.value[-1].bias.fill_(3.0)
        agent.log_std.zero_()
        agent.slow_log_std.fill_(1.0)
    actions, rewards = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([10.0, 20.0])
    path = reference.Path(np.zeros((3, stacks.STATE)), actions, rewards, **ending)
    settings = reference.Settings(
        "rg", gamma=0.5, entropy_coef=0.25, kl_coef=0.5, window_length=5, diag_weight=0.1, **flags
    )
    log_policy = [-0.5 - math.log(2.0 * math.pi), -2.0 - math.log(2.0 * math.pi)]
    squeezed = math.exp(-2.0)
    log_slow = [
        -0.5 * squeezed - 2.0 - math.log(2.0 * math.pi),
        -2.0 * squeezed - 2.0 - math.log(2 * math.pi),
    ]
    expected = -3.0 + follows * 3.0
    for t in range(2):
        expected += 0.5**t * (rewards[t] - 0.75 * log_policy[t] + 0.5 * log_slow[t])
    assert float(reference.residual(agent, path, 0, settings).detach()) == pytest.approx(expected)
    step, _ = stacks.compute([agent], [settings], [[path]], [[0]], windows_per_path=1)
    assert step.residual.item() == pytest.approx(expected, rel=1e-12)


def test_rewards_are_scaled():
    settings = [replace(SETTINGS, entropy_coef=0.0)]
    agents, [paths] = stacks.make_agents(1), stacks.draw(1)
    scaled = [replace(path, rewards=path.rewards * 0.125) for path in paths]
    step, batch = stacks.compute(agents, settings, [paths], reward_scale=0.125)
    other, _ = stacks.compute(agents, settings, [scaled])
    valid = batch.valid.flatten(1).bool()
    torch.testing.assert_close(step.residual[valid], other.residual[valid], rtol=1e-12, atol=1e-12)
