"""The library's learner with the parameters of naive agents, in float64."""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import torch

from koffline.data.transitions import Continuous, Discrete
from koffline.online.config import OnlineConfig
from koffline.online.critics import Residual
from koffline.online.learner import Learner
from koffline.online.networks import AgentStack, InputMoments, Networks, Shape
from koffline.online.paths import Paths
from tests.online import reference_trust_pcl as reference

STATE = 3
ACTIONS = 2
HIDDEN = (7, 5)
LONGEST = 10


def make_config(settings, **options):
    """The library's settings of a naive run. windows_per_path 0 (all) unless given."""
    shared = {
        name: value for name, value in asdict(settings).items() if name != "kl_coef"
    }
    fixed = {"hidden": HIDDEN, "path_length": LONGEST, "windows_per_path": 0}
    return OnlineConfig("none", **{**shared, **fixed, **options})


def make_agents(count, discrete=False):
    """Naive agents that differ in everything, also in how they standardise."""
    return [
        reference.Agent(
            STATE, ACTIONS, discrete, seed=run, mean=0.1 * run, std=1.0 + 0.2 * run
        )
        for run in range(count)
    ]


def make_learner(agents, configs):
    """Learner and input moments that stand where the agents stand."""
    space = Discrete(ACTIONS) if agents[0].discrete else Continuous(ACTIONS)
    shape = Shape(STATE, space, HIDDEN)
    seeds = [(0, 0)] * len(agents)
    stacks = [
        AgentStack.initialise(shape, seeds, dtype=torch.float64)
        for _ in ("online", "slow")
    ]
    for run, agent in enumerate(agents):
        fill(stacks[0], run, agent.policy, agent.log_std, agent.value)
        fill(stacks[1], run, agent.slow_policy, agent.slow_log_std, agent.slow_value)
    moments = InputMoments(len(agents), STATE, [True] * len(agents))
    moments.mean = np.stack([agent.mean.numpy() for agent in agents])
    moments.std = np.stack([agent.std.numpy() for agent in agents])
    return Learner(configs, Networks(*stacks)), moments


def fill(stack, run, policy, log_std, value):
    """Copy the modules' numbers into one row."""
    with torch.no_grad():
        for network, module in ((stack.policy, policy), (stack.value, value)):
            layers = [part for part in module if isinstance(part, torch.nn.Linear)]
            for (weight, bias), layer in zip(
                network.layers(network.flat), layers, strict=True
            ):
                weight[run].copy_(layer.weight.T)
                bias[run, 0].copy_(layer.bias)
        if log_std is not None:
            stack.log_std[run].copy_(log_std)


def flat_row(gradients, value_gradients):
    """Gradients of policy parameters (and log_std), then of value parameters, as one
    row lies.
    """
    *networks, log_std = gradients if len(gradients) % 2 else (*gradients, None)
    parts = [part.T if part.ndim == 2 else part for part in networks]
    parts += [] if log_std is None else [log_std]
    parts += [part.T if part.ndim == 2 else part for part in value_gradients]
    return torch.cat([part.reshape(-1) for part in parts]).detach()


def stack_paths(per_run):
    """Naive paths of K runs, equally many each, as one record (K, B, …)."""
    whole = [[pad(path) for path in paths] for paths in per_run]
    names = vars(whole[0][0])
    return Paths(
        **{
            n: np.stack([[getattr(path, n) for path in paths] for paths in whole])
            for n in names
        }
    )


def pad(path, filler=9.0):
    """One path in arrays of the longest length; what lies past its end must never be
    read.
    """
    length = len(path)
    observations = np.full((LONGEST + 1, STATE), filler)
    actions = np.zeros((LONGEST, *path.actions.shape[1:]), dtype=path.actions.dtype)
    rewards = np.full(LONGEST, filler)
    if actions.dtype.kind == "f":
        actions[:] = filler
    observations[: length + 1] = path.observations
    actions[:length] = path.actions
    rewards[:length] = path.rewards
    number = np.array(length)
    zero = np.array(0)
    terminated = np.array(path.terminated)
    truncated = np.array(path.truncated)
    return Paths(
        observations, actions, rewards, number, terminated, truncated, zero, zero, zero
    )


def draw(runs, discrete=False, seed=0):
    """Naive paths of each run."""
    rng = np.random.default_rng(seed)
    return [
        reference.random_paths(rng, STATE, ACTIONS, discrete, LONGEST)
        for _ in range(runs)
    ]


def prepare(agents, settings, per_run, starts=None, **options):
    """Learner, mini-batch and coefficients; every window of every path, or one each at
    starts (K, B).
    """
    learner, moments = make_learner(
        agents, [make_config(setting, **options) for setting in settings]
    )
    paths = stack_paths(per_run)
    if starts is None:
        batch = learner.windows.sample(
            paths, [np.random.default_rng(0)] * len(agents), moments
        )
    else:
        batch = learner.windows.cut(paths, np.asarray(starts)[..., None], moments)
    numbers = [
        [setting.kl_coef for setting in settings],
        [setting.entropy_coef for setting in settings],
    ]
    return learner, batch, torch.tensor(numbers, dtype=torch.float64).unsqueeze(2)


def compute(agents, settings, per_run, starts=None, **options):
    """The library's step and the mini-batch it was taken on."""
    learner, batch, coefficients = prepare(agents, settings, per_run, starts, **options)
    residual = Residual(learner.networks, learner._slow, batch, coefficients).windows
    diagnostics = learner.compute_gradient(batch, coefficients)
    return (
        SimpleNamespace(
            gradient=learner.gradient, residual=residual, diagnostics=diagnostics
        ),
        batch,
    )
