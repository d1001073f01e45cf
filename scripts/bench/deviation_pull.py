"""What pulls on the policy's standard deviation? Trust-PCL on InvertedDoublePendulum,
from one replay at one policy, critic by critic.

    python -m scripts.bench.deviation_pull --out docs/results/deviation-pull.json

A run of the kernel loss is stopped every 10,000 steps. Its policy and its replay stay as
they are, and V is fitted to them anew by each critic, from the run's V. Then all
windows of the replay tell how log σ would move:

    pull = E[clip(R, ±1) S],  S = Σ_t γ^t Σ_k (z_tk² − 1),  z = (a − μ(s))/σ,

positive if σ would grow. It is the sum of a level, E[clip R] E[S], and of a covariance.
If actions were drawn from the policy, E[S] would be zero, and the covariance alone would
count. ``true``: what the return of the sampled policy does, d(return)/d(log σ), by
episodes with σ a tenth larger and smaller and the same noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from koffline.envs.make import Copies
from koffline.fitting import threads
from koffline.online import critics
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.learner import Learner
from koffline.online.lockstep import LockStep
from koffline.online.networks import AgentStack, InputMoments, Networks
from koffline.online.paths import Paths
from koffline.replicas import StackedAdam

ENVIRONMENT = "InvertedDoublePendulum-v5"
CRITICS: dict[str, dict[str, Any]] = {
    "K-loss": {"critic": "kloss"},
    "K-loss with a slow copy": {"critic": "kloss_slow", "diag_weight": 0.3},
    "RG": {"critic": "rg"},
    "TD(0)": {"critic": "td0"},
    "FVI": {"critic": "fvi"},
}
STEPS = 60_000
EVERY = 10_000
FITTING_STEPS = 1500
EPISODES = 64
FACTOR = 1.1  # of σ, up and down
_MOST_PATHS = 2000
_NEW_PATHS = 300  # about the last 3,000 steps
WINDOW_LENGTHS = (1,)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A run of the kernel loss as it stands: one agent, its inputs' moments, its
    replay.
    """

    config: OnlineConfig
    agent: Networks
    moments: InputMoments
    paths: Paths
    kl_coef: float


@dataclass(frozen=True, eq=False)
class Episodes:
    """Sampled episodes: the mean return, and the states with their discounted return
    to go, in units of the scaled reward.
    """

    mean_return: float
    states: np.ndarray
    returns_to_go: np.ndarray


def take_snapshot(stack: LockStep) -> Snapshot:
    """Copy what a measurement needs from a stack of one run."""
    now = stack.learner.networks
    copied = [AgentStack(stack.shape, part.flat.clone()) for part in now]
    moments = InputMoments(1, stack.shape.observation_dim, [True])
    moments.mean = stack.moments.mean.copy()
    moments.std = stack.moments.std.copy()
    return Snapshot(
        config=stack.runs[0].config,
        agent=Networks(online=copied[0], target=copied[1]),
        moments=moments,
        paths=stack.replay.held(0),
        kl_coef=float(stack.trust_region.kl_coef[0]),
    )


def repeated(snapshot: Snapshot, count: int) -> tuple[Networks, InputMoments]:
    """The agent and its moments, ``count`` times."""
    stacks = [
        AgentStack(part.shape, part.flat.repeat(count, 1)) for part in snapshot.agent
    ]
    dimension = snapshot.moments.mean.shape[1]
    moments = InputMoments(count, dimension, [True] * count)
    moments.mean = snapshot.moments.mean.repeat(count, axis=0)
    moments.std = snapshot.moments.std.repeat(count, axis=0)
    return Networks(online=stacks[0], target=stacks[1]), moments


@torch.no_grad()
def fit_values(
    snapshot: Snapshot, configs: Sequence[OnlineConfig], steps: int, seed: int
) -> tuple[Networks, InputMoments]:
    """Train V of every critic on the same mini-batches; policies stand still."""
    networks, moments = repeated(snapshot, len(configs))
    learner = Learner(configs, networks)
    policy, deviations, _ = networks.online.shape.parts
    fixed = slice(policy.start, deviations.stop)
    slow_policy = networks.target.flat[:, fixed].clone()
    adam = StackedAdam(networks.online.flat, epsilon=1e-8)
    rates = torch.full((len(configs), 1), configs[0].learning_rate)
    coefficients = coefficients_of(snapshot, len(configs))
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        paths = draw_paths(snapshot, len(configs), configs[0].batch_size, generator)
        window_seed = int(generator.integers(2**31))
        windows = [np.random.default_rng(window_seed) for _ in configs]
        batch = learner.windows.sample(paths, windows, moments)
        learner.move_targets()
        networks.target.flat[:, fixed] = slow_policy
        learner.compute_gradient(batch, coefficients)
        learner.gradient[:, fixed] = 0.0
        adam.update(networks.online.flat, learner.gradient, rates)
    return networks, moments


def draw_paths(
    snapshot: Snapshot, runs: int, count: int, generator: np.random.Generator
) -> Paths:
    """Paths (K, count, …) of the replay, the same in all runs, drawn as in training."""
    drawn = draw_rows(snapshot, count, generator)
    return snapshot.paths.flat_rows(np.tile(drawn, (runs, 1)), leading=1)


def draw_rows(
    snapshot: Snapshot, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Numbers of paths in the replay, oldest first, drawn as in training."""
    size = len(snapshot.paths.lengths)
    ages = size - 1 - np.arange(size)
    shares = np.exp(-snapshot.config.recency * ages)
    shares = shares / shares.sum()
    return generator.choice(size, min(count, size), replace=False, p=shares)


def coefficients_of(snapshot: Snapshot, count: int) -> Tensor:
    """τ and λ (2, K, 1)."""
    coefficients = torch.zeros(2, count, 1)
    coefficients[0] = snapshot.kl_coef
    coefficients[1] = snapshot.config.entropy_coef
    return coefficients


@torch.no_grad()
def measure_pulls(
    snapshot: Snapshot,
    configs: Sequence[OnlineConfig],
    networks: Networks,
    moments: InputMoments,
    seed: int,
) -> list[dict[str, float]]:
    """The pull of each critic on log σ, and its parts, over windows of the replay."""
    everywhere = [config.with_changes(windows_per_path=0) for config in configs]
    learner = Learner(everywhere, networks)
    generator = np.random.default_rng(seed)
    drawn = draw_rows(snapshot, _MOST_PATHS, generator)
    paths = snapshot.paths.flat_rows(np.tile(drawn, (len(configs), 1)), leading=1)
    unused = [generator for _ in configs]  # all windows are taken: nothing is drawn
    batch = learner.windows.sample(paths, unused, moments)
    has_slow_end = [config.critic in ("fvi", "kloss_slow") for config in configs]
    slow = None
    if any(has_slow_end):
        slow = torch.tensor(np.flatnonzero(has_slow_end))
    coefficients = coefficients_of(snapshot, len(configs))
    residual = critics.Residual(networks, slow, batch, coefficients).windows
    advantage = critics.Residual(networks, slow, batch, 0.0 * coefficients).windows
    runs, count, steps = batch.rewards.shape
    means = networks.online.policy.forward(batch.inputs[:, :, :-1].flatten(1, 2))
    deviations = networks.online.log_std.exp()[:, None, None]
    z = (batch.actions - means.view(runs, count, steps, -1)) / deviations
    scores = (z.square() - 1.0).sum(dim=3)  # (K, B, T): d log π / d log σ
    of_windows = (batch.weights * scores.unsqueeze(2)).sum(dim=3).flatten(1)
    valid = batch.valid.flatten(1) > 0.0
    is_new = torch.as_tensor(drawn >= len(snapshot.paths.lengths) - _NEW_PATHS)
    is_new = is_new.repeat_interleave(batch.valid.shape[2])
    is_end = (batch.discounts.flatten(1) == 0.0) & valid
    rows = []
    for run in range(runs):
        kept = valid[run]
        delta = residual[run][kept].double()
        of_values = advantage[run][kept].double()
        score = of_windows[run][kept].double()
        clip = configs[run].clip_adv or np.inf
        clipped = delta.clamp(-clip, clip)
        ends = is_end[run][kept]
        new = is_new[kept]
        effect = clipped * score
        rows.append(
            {
                "clipped_pull": float(effect.mean()),
                "clipped_pull_of_new": float(effect[new].mean()),
                "clipped_pull_of_old": float(effect[~new].mean()),
                "mean_score_of_new": float(score[new].mean()),
                "share_of_new": float(new.double().mean()),
                "pull": float((delta * score).mean()),
                "pull_of_values": float((of_values * score).mean()),
                "level_of_values": float(of_values.mean() * score.mean()),
                "at_ends": float((of_values * score * ends).mean()),
                "mean_residual": float(delta.mean()),
                "spread": float(of_values.std()),
                "mean_score": float(score.mean()),
                "advantage_at_ends": float(of_values[ends].mean()),
                "share_of_ends": float(ends.double().mean()),
            }
        )
    return rows


def play(
    snapshot: Snapshot, copies: Copies, factor: float, episodes: int, seed: int
) -> Episodes:
    """Episodes of the sampled policy with σ times ``factor``."""
    online = snapshot.agent.online
    space = online.shape.action_space
    deviation = online.log_std[0].exp().numpy() * factor
    generator = np.random.default_rng(seed)
    seeds = generator.integers(2**31, size=episodes).tolist()
    observations = copies.reset(seeds).reshape(episodes, -1).astype(np.float64)
    active = np.arange(episodes)
    states = []
    rewards = []
    while len(active):
        inputs = snapshot.moments.standardised(observations[None], np.float32)
        with torch.no_grad():
            means = online.policy.forward(torch.from_numpy(inputs))[0].numpy()
        noise = generator.standard_normal(means.shape)
        actions = space.clip(means + deviation * noise)
        states.append((active, inputs[0, active]))
        here = copies.step(active.tolist(), actions[active])
        of_step = np.zeros(episodes)
        of_step[active] = here.rewards
        rewards.append(of_step)
        observations[active] = here.observations.reshape(len(active), -1)
        active = active[~(here.terminated | here.truncated)]
    rewards_by_step = np.stack(rewards)  # (T, E)
    to_go = np.zeros_like(rewards_by_step)
    later = np.zeros(episodes)
    for step in reversed(range(len(rewards))):
        later = rewards_by_step[step] * snapshot.config.reward_scale + (
            snapshot.config.gamma * later
        )
        to_go[step] = later
    return Episodes(
        mean_return=float(rewards_by_step.sum(axis=0).mean()),
        states=np.concatenate([inputs for _, inputs in states]),
        returns_to_go=np.concatenate(
            [to_go[step, who] for step, (who, _) in enumerate(states)]
        ),
    )


@torch.no_grad()
def measure_values(networks: Networks, episodes: Episodes) -> list[dict[str, float]]:
    """V of each critic on the states of sampled episodes, against the returns to go."""
    runs = len(networks.online.flat)
    inputs = torch.from_numpy(episodes.states).expand(runs, -1, -1)
    values = networks.online.value.forward(inputs).squeeze(2).double().numpy()
    returns = episodes.returns_to_go
    rows = []
    for of_run in values:
        rows.append(
            {
                "mean_value": float(of_run.mean()),
                "correlation": float(np.corrcoef(of_run, returns)[0, 1]),
                "error": float(np.mean((of_run - returns) ** 2) / np.var(returns)),
            }
        )
    return rows


def measure_snapshot(
    snapshot: Snapshot, copies: Copies, steps: int, seed: int
) -> dict[str, Any]:
    """One row of the study: a policy, and what each critic makes of it."""
    configs = [snapshot.config.with_changes(**changes) for changes in CRITICS.values()]
    networks, moments = fit_values(snapshot, configs, steps, seed)
    pulls = measure_pulls(snapshot, configs, networks, moments, seed)
    narrower = play(snapshot, copies, 1.0 / FACTOR, EPISODES, seed)
    as_it_is = play(snapshot, copies, 1.0, EPISODES, seed)
    wider = play(snapshot, copies, FACTOR, EPISODES, seed)
    values = measure_values(networks, as_it_is)
    as_trained = snapshot.agent
    in_the_run = {
        **measure_pulls(
            snapshot, [snapshot.config], as_trained, snapshot.moments, seed
        )[0],
        **measure_values(as_trained, as_it_is)[0],
    }
    slope = (wider.mean_return - narrower.mean_return) / (2.0 * np.log(FACTOR))
    return {
        "deviation": float(snapshot.agent.online.log_std.exp().mean()),
        "sampled_return": as_it_is.mean_return,
        "true_slope": float(slope),
        "mean_return_to_go": float(as_it_is.returns_to_go.mean()),
        "critics": {
            "as trained": in_the_run,
        }
        | {
            name: {**pull, **value}
            for name, pull, value in zip(CRITICS, pulls, values, strict=True)
        },
    }


def study(
    window_length: int, seed: int, steps: int, fitting_steps: int
) -> list[dict[str, Any]]:
    """Rows at every 10,000 steps of a run of the kernel loss."""
    config = OnlineConfig(
        ENVIRONMENT, reward_scale=0.1, steps=steps, window_length=window_length
    )
    copies = Copies(ENVIRONMENT)
    rows = []
    with contextlib.closing(LockStep([OnlineRun(config, seed)])) as stack:
        while stack.steps < steps:
            stack.iterate()
            if stack.steps % EVERY == 0:
                row = measure_snapshot(
                    take_snapshot(stack), copies, fitting_steps, stack.steps + seed
                )
                rows.append(
                    {
                        "window_length": window_length,
                        "seed": seed,
                        "step": stack.steps,
                        **row,
                    }
                )
                print_row(rows[-1])
    copies.close()
    return rows


def print_row(row: dict[str, Any]) -> None:
    """A policy in a line, then a line for each critic."""
    print(
        f"d {row['window_length']} seed {row['seed']} step {row['step']}:"
        f" σ {row['deviation']:.2f}, return {row['sampled_return']:.0f},"
        f" slope {row['true_slope']:.0f}, to go {row['mean_return_to_go']:.1f}",
        flush=True,
    )
    for name, numbers in row["critics"].items():
        cells = " ".join(f"{key} {number:.3g}" for key, number in numbers.items())
        print(f"    {name:<24}{cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--fitting-steps", type=int, default=FITTING_STEPS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with threads(1):
        for window_length in WINDOW_LENGTHS:
            for seed in range(arguments.seeds):
                rows += study(
                    window_length, seed, arguments.steps, arguments.fitting_steps
                )
    if arguments.out is not None:
        content = {
            "command": "python -m scripts.bench.deviation_pull --out"
            " docs/results/deviation-pull.json",
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
