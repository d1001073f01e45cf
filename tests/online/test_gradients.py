"""Residuals and gradients of policy and critics, against autograd and loops over
windows.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from koffline.checkpoints import restored, state_of
from koffline.kernels import Gaussian
from koffline.online.critics import gaussian_gram
from tests.online import reference_trust_pcl as reference
from tests.online import stacks

SETTINGS = reference.Settings(gamma=0.9, entropy_coef=0.2, kl_coef=0.4, clip_adv=0.8)
CRITICS = ["kloss", "fvi", "td0", "rg", "kloss_slow"]
REMEMBERED = {"critic": "memory", "diag_weight": 0.1, "bandwidth_scale": 0.7}
LENGTHS = [1, 3, 10, 25]


def check(agents, settings, per_run, starts=None, **options):
    """Residuals, loss and both gradients of every run."""
    step, batch = stacks.compute(agents, settings, per_run, starts, **options)
    valid = batch.valid.flatten(1).bool()
    for run, (agent, setting, paths) in enumerate(
        zip(agents, settings, per_run, strict=True)
    ):
        windows = reference.all_windows(paths)
        if starts is not None:
            windows = list(zip(paths, starts[run], strict=True))
        residuals = reference.residuals_of(agent, windows, setting)
        actual = step.residual[run][valid[run]]
        torch.testing.assert_close(actual, residuals.detach(), rtol=1e-11, atol=1e-11)
        policy = reference.policy_gradient(agent, windows, setting, residuals)
        value, loss = reference.critic_gradient(agent, windows, setting, residuals)
        naive = stacks.flat_row(policy, value)
        torch.testing.assert_close(step.gradient[run], naive, rtol=1e-9, atol=1e-11)
        assert float(step.diagnostics["loss"][run]) == pytest.approx(loss)


@pytest.mark.parametrize("count", [0, 1], ids=["all windows", "one on each path"])
@pytest.mark.parametrize("discrete", [False, True], ids=["box", "discrete"])
@pytest.mark.parametrize("length", [1, 3, pytest.param(10, marks=pytest.mark.slow), 25])
def test_every_critic(length, discrete, count):
    settings = [
        replace(SETTINGS, critic=critic, window_length=length) for critic in CRITICS
    ]
    per_run = stacks.draw(5, discrete, seed=length)
    rng = np.random.default_rng(length)
    starts = (
        [[int(rng.integers(len(path))) for path in paths] for paths in per_run]
        if count
        else None
    )
    check(
        stacks.make_agents(5, discrete),
        settings,
        per_run,
        starts,
        windows_per_path=count,
    )


STACKS = {
    "windows and weights": {
        "window_length": (*LENGTHS, 3),
        "gamma": (0.5, 0.9, 0.995, 1.0, 0.9),
        "kl_coef": (0.0, 0.1, 5.0, 500.0, 0.1),
        "critic": CRITICS,
    },
    # nothing is clipped, everything, what is beyond
    "clips": {"clip_adv": (0.0, 1e-3, 0.5, 1e-3, 0.1), "critic": CRITICS},
    # U-statistic, mixture, residual gradient, V-statistic; wide and narrow kernels
    "kernel losses": {
        "diag_weight": (0.0, 0.3, 1.0, None, 0.3),
        "bandwidth_scale": (1.0, 0.5, 0.1, 2.0, 0.5),
        "kernel_inputs": (
            "state_action",
            "state",
            "state_action",
            "state",
            "state_action",
        ),
        "critic": (*["kloss"] * 4, "kloss_slow"),
    },
}


@pytest.mark.parametrize("name", STACKS)
def test_other_settings_in_one_stack(name):
    rows = zip(*STACKS[name].values(), strict=True)
    settings = [
        replace(SETTINGS, **dict(zip(STACKS[name], row, strict=True))) for row in rows
    ]
    check(stacks.make_agents(5), settings, stacks.draw(5))


@pytest.mark.parametrize("largest", [0.05, 40.0])
def test_three_steps_of_the_optimiser(largest):
    """Common norm clip, torch's Adam, and slow copies that move before each step."""
    changes = {
        "max_grad_norm": largest,
        "learning_rate": 0.01,
        "adam_epsilon": 1e-3,
        "target_decay": 0.9,
    }
    settings = [replace(SETTINGS, critic=critic) for critic in CRITICS]
    agents = stacks.make_agents(5)
    per_run = stacks.draw(5)
    learner, batch, coefficients = stacks.prepare(agents, settings, per_run, **changes)
    parameters = [
        [*agent.policy_parameters(), *agent.value_parameters()] for agent in agents
    ]
    copies = [
        [
            *agent.slow_policy.parameters(),
            agent.slow_log_std,
            *agent.slow_value.parameters(),
        ]
        for agent in agents
    ]
    optimisers = [
        torch.optim.Adam(weights, lr=0.01, eps=1e-3) for weights in parameters
    ]
    for _ in range(3):
        learner.move_targets()
        diagnostics = learner.update(batch, coefficients)
        for run, (agent, setting, paths) in enumerate(
            zip(agents, settings, per_run, strict=True)
        ):
            with torch.no_grad():
                for slow, now in zip(copies[run], parameters[run], strict=True):
                    slow.copy_(0.9 * slow + 0.1 * now)
            windows = reference.all_windows(paths)
            residuals = reference.residuals_of(agent, windows, setting)
            policy = reference.policy_gradient(agent, windows, setting, residuals)
            value, _ = reference.critic_gradient(agent, windows, setting, residuals)
            norm = math.sqrt(sum(float((part**2).sum()) for part in (*policy, *value)))
            assert (norm > largest) == (largest < 1.0), (
                "the case does not clip as it is meant to"
            )
            both = math.hypot(
                diagnostics["grad_norm_policy"][run],
                diagnostics["grad_norm_value"][run],
            )
            assert both == pytest.approx(norm)
            for parameter, gradient in zip(
                parameters[run], (*policy, *value), strict=True
            ):
                parameter.grad = gradient * min(1.0, largest / norm)
            optimisers[run].step()
    for run, agent in enumerate(agents):
        online = stacks.flat_row(agent.policy_parameters(), agent.value_parameters())
        slow = stacks.flat_row(
            copies[run][: len(agent.policy_parameters())], agent.slow_value.parameters()
        )
        torch.testing.assert_close(
            learner.online.flat[run], online, rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(learner.target.flat[run], slow, rtol=1e-9, atol=1e-9)


def test_a_run_that_broke_never_moves_again():
    """Neither by what Adam remembers, nor by finite gradients later, nor after a
    checkpoint.
    """
    settings = [replace(SETTINGS, critic=critic) for critic in CRITICS]
    case = stacks.make_agents(5), settings, stacks.draw(5)
    learner, batch, coefficients = stacks.prepare(*case)
    learner.update(batch, coefficients)
    sound = batch.rewards[1, 0, 0].clone()
    batch.rewards[1, 0, 0] = torch.inf
    before = learner.online.flat.clone()
    learner.update(batch, coefficients)
    batch.rewards[1, 0, 0] = sound
    learner.update(batch, coefficients)
    assert torch.equal(learner.online.flat[1], before[1])
    resumed = restored(stacks.prepare(*case)[0], state_of(learner))
    resumed.update(batch, coefficients)
    assert torch.equal(resumed.online.flat[1], before[1])
    assert not torch.equal(resumed.online.flat[0], before[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_states_are_equal(dtype: torch.dtype) -> None:
    """Fifty of 64 rows are one state: the median is zero, and rounding must not take
    its place.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 64, 3, generator=generator, dtype=dtype)
    rows[:, :50] = rows[:, :1]
    gram = gaussian_gram(
        rows, torch.ones(1, 64, dtype=dtype), torch.full((1, 1), 0.5, dtype=dtype)
    )
    assert gram[0, :50, :50].min() == 1.0
    assert gram[0, 50:, :50].max() == 0.0


@pytest.mark.parametrize(
    ("ending", "follows"),
    [({}, 0.5**2), ({"terminated": True}, 0.0), ({"truncated": True}, 0.5**2)],
)
def test_by_hand(ending, follows):
    """Two steps, V = 3 everywhere, standard normal policy, slow policy with deviation
    e, γ = 1/2.
    """
    agent = reference.Agent(stacks.STATE, stacks.ACTIONS, False)
    with torch.no_grad():
        for module in (agent.policy, agent.slow_policy, agent.value, agent.slow_value):
            for part in module.parameters():
                part.zero_()
        agent.value[-1].bias.fill_(3.0)
        agent.log_std.zero_()
        agent.slow_log_std.fill_(1.0)
    actions = np.array([[1.0, 0.0], [0.0, 2.0]])
    rewards = np.array([10.0, 20.0])
    path = reference.Path(np.zeros((3, stacks.STATE)), actions, rewards, **ending)
    settings = reference.Settings(
        "rg",
        gamma=0.5,
        entropy_coef=0.25,
        kl_coef=0.5,
        window_length=5,
        diag_weight=0.1,
    )
    level = math.log(2.0 * math.pi)
    squeezed = math.exp(-2.0)
    log_policy = [-0.5 - level, -2.0 - level]
    log_slow = [-0.5 * squeezed - 2.0 - level, -2.0 * squeezed - 2.0 - level]
    expected = -3.0 + follows * 3.0
    for t in range(2):
        expected += 0.5**t * (rewards[t] - 0.75 * log_policy[t] + 0.5 * log_slow[t])
    assert float(
        reference.residual(agent, path, 0, settings).detach()
    ) == pytest.approx(expected)
    step, _ = stacks.compute([agent], [settings], [[path]], [[0]], windows_per_path=1)
    assert step.residual.item() == pytest.approx(expected, rel=1e-12)


def test_rewards_are_scaled():
    settings = [replace(SETTINGS, entropy_coef=0.0)]
    agents = stacks.make_agents(1)
    [paths] = stacks.draw(1)
    scaled = [replace(path, rewards=path.rewards * 0.125) for path in paths]
    step, batch = stacks.compute(agents, settings, [paths], reward_scale=0.125)
    other, _ = stacks.compute(agents, settings, [scaled])
    valid = batch.valid.flatten(1).bool()
    torch.testing.assert_close(
        step.residual[valid], other.residual[valid], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("inputs", ["state", "state_action"])
def test_the_remembered_loss_follows_the_networks(inputs):
    """Three mini-batches: m by loops over windows, at each step's networks, slow copies
    and coefficients.
    """
    settings = replace(SETTINGS, **REMEMBERED, kernel_inputs=inputs)
    (agent,), per_run = stacks.make_agents(1), stacks.draw(3)
    learner, _, _ = stacks.prepare(
        [agent], [settings], per_run[:1], memory=0.6, learning_rate=0.01
    )
    columns = stacks.STATE + stacks.ACTIONS * (inputs == "state_action")
    draws = Gaussian(1.0).draw_frequencies(
        columns, 100, torch.Generator().manual_seed(0)
    )
    bandwidth = 0.7 * math.sqrt(2.0 * columns)
    parameters = [*agent.policy_parameters(), *agent.value_parameters()]
    optimiser = torch.optim.Adam(parameters, lr=0.01)
    remembered = None
    before = None
    for step, paths in enumerate(per_run):
        windows = reference.all_windows(paths)
        settings_of_step = replace(settings, kl_coef=settings.kl_coef + step)
        residuals = reference.residuals_of(agent, windows, settings_of_step)
        points = torch.tensor(
            reference.kernel_points(agent, windows, settings_of_step),
            dtype=torch.float64,
        )
        phases = points @ draws / bandwidth
        psi = torch.cat((phases.cos(), phases.sin()), dim=1) / 10.0
        now = sum(r * p for r, p in zip(residuals, psi, strict=True)) / len(windows)
        if before is None:
            first = now.detach()
            m = now.detach()
        else:
            residuals_before = reference.residuals_of(before[0], windows, before[1])
            old = sum(r * p for r, p in zip(residuals_before, psi, strict=True))
            first = (remembered + now - old / len(windows)).detach()
            keep = min(0.6, step / (step + 1))
            m = keep * first + (1.0 - keep) * now.detach()
        loss = 2.0 * 0.9 * first @ now + 0.1 * (residuals**2).mean()
        policy = reference.policy_gradient(agent, windows, settings_of_step, residuals)
        value = torch.autograd.grad(loss, agent.value_parameters())
        _, moments = stacks.make_learner([agent], [stacks.make_config(settings)])
        generators = [np.random.default_rng(0)]
        batch = learner.windows.sample(stacks.stack_paths([paths]), generators, moments)
        learner.update(
            batch,
            torch.tensor(
                [[[settings_of_step.kl_coef]], [[settings_of_step.entropy_coef]]],
                dtype=torch.float64,
            ),
        )
        remembered = m
        before = (agent.copy(), settings_of_step)
        for parameter, gradient in zip(parameters, (*policy, *value), strict=True):
            parameter.grad = gradient
        optimiser.step()
        online = stacks.flat_row(agent.policy_parameters(), agent.value_parameters())
        torch.testing.assert_close(learner.online.flat[0], online, rtol=1e-9, atol=1e-9)
