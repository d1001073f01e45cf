"""The benchmark of online runs: it measures what it says, and the plain side is the same algorithm."""

import contextlib

import pytest
import torch

from scripts.bench.online import make_config
from scripts.bench.plain_trust_pcl import BATCH, DISCOUNT, PlainRun, PlainSettings
from tests.online import reference_trust_pcl as reference

CRITICS = ("kloss", "fvi", "td0", "rg")


def as_reference(run):
    """A naive agent with the plain run's networks."""
    agent = reference.Agent(3, 1, False, hidden=(64, 64))
    for name in ("policy", "slow_policy", "value", "slow_value"):
        getattr(agent, name).load_state_dict(getattr(run, name).state_dict())
    with torch.no_grad():
        agent.log_std.copy_(run.log_std)
        agent.slow_log_std.copy_(run.slow_log_std)
    agent.mean, agent.std = torch.as_tensor(run.moments.mean), torch.as_tensor(run.moments.scale)
    return agent


def as_paths(window):
    """Naive paths of exactly the drawn windows; those without a bootstrap end in a terminal state."""
    paths = []
    for row in range(BATCH):
        length = int(window.mask[row].sum())
        observations = torch.cat((window.observations[row, :length], window.ends[row : row + 1])).double()
        paths.append(
            reference.Path(
                observations.numpy(),
                window.actions[row, :length].double().numpy(),
                window.rewards[row, :length].double().numpy(),
                terminated=float(window.discounts[row]) == 0.0,
            )
        )
    return paths


def test_the_librarys_side_takes_every_setting_of_the_plain_one() -> None:
    config = make_config(PlainSettings("Pendulum-v1", "fvi"))
    assert (config.env, config.critic, config.batch_size) == ("Pendulum-v1", "fvi", BATCH)


@pytest.mark.parametrize("critic", CRITICS)
def test_plain_gradients_are_the_algorithms(critic):
    """In float32 against the naive float64 version, in Pendulum-v1 after a little learning."""
    with contextlib.closing(PlainRun(PlainSettings("Pendulum-v1", critic), seed=1)) as run:
        while run.steps < 900:
            run.iterate()
        window = run.draw_windows()
    settings = reference.Settings(
        critic, DISCOUNT, 10, kl_coef=run.kl_coef, diag_weight=1.0 / BATCH, bandwidth_scale=1.0
    )
    agent, windows = as_reference(run), [(path, 0) for path in as_paths(window)]
    residuals = reference.residuals_of(agent, windows, settings)
    expected = [
        *reference.policy_gradient(agent, windows, settings, residuals),
        *reference.critic_gradient(agent, windows, settings, residuals)[0],
    ]
    run.adam.zero_grad()
    run.compute_loss(window).backward()
    found = [part.grad for part in (*run.policy.parameters(), run.log_std, *run.value.parameters())]
    for here, there in zip(found, expected, strict=True):
        scale = float(there.abs().max())
        torch.testing.assert_close(here.double(), there, rtol=2e-3, atol=2e-4 * scale)
