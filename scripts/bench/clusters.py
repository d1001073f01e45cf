"""Users with several rows: how often intervals hold the truth with and without their
clusters.

    python -m scripts.bench.clusters --seeds 30        # hours; prints a table

bandit: 120 users, 2,400 one-step rows, uneven numbers of visits. sessions: 40 users,
ten sessions each, of ten steps. A user's own level of reward is no part of the state.
The truth is that of an average user.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import koffline

GAMMA = 0.9
STEPS = 10
_WEIGHTS = np.array([[0.0, 0.0], [1.0, -1.0], [-0.5, 1.0]])
ESTIMATORS = {"bandit": ("auto", "kloss"), "sessions": ("kloss", "wdr")}


def softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities (N, 3)."""
    raised = np.exp(scores)
    return raised / raised.sum(axis=1, keepdims=True)


def behavior(states: np.ndarray) -> np.ndarray:
    """Probabilities of the behavior policy."""
    return softmax(states @ np.array([[0.0, 0.5, -0.3], [0.0, -0.3, 0.5]]))


def target(states: np.ndarray) -> np.ndarray:
    """Probabilities of the policy that is asked about; further columns of the state are
    a clock.
    """
    return 0.9 * softmax(2.0 * states[:, :2] @ _WEIGHTS.T) + 0.1 / 3.0


def draw(chances: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """One action a row."""
    return (
        (chances.cumsum(axis=1) < random.random((len(chances), 1)))
        .sum(axis=1)
        .clip(0, 2)
    )


def gain(states: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Mean reward of an average user."""
    return np.take_along_axis(
        np.tanh(states @ _WEIGHTS.T) + 0.5, actions[:, None], axis=1
    )[:, 0]


def bandit(seed: int) -> tuple[dict[str, Any], np.ndarray]:
    """Columns of a log of one-step rows, and the user of each."""
    random = np.random.default_rng([seed, 5])
    rows = 2400
    users = 120
    user = np.sort(
        random.choice(users, size=rows, p=random.dirichlet(np.full(users, 3.0)))
    )
    states = random.normal(size=(rows, 2))
    chances = behavior(states)
    actions = draw(chances, random)
    levels = random.normal(size=users)
    columns = {"observations": states, "next_observations": states, "actions": actions}
    columns["rewards"] = (
        gain(states, actions) + levels[user] + 0.5 * random.normal(size=rows)
    )
    logs = np.log(chances[np.arange(rows), actions])
    ends = {"terminated": np.ones(rows, bool), "truncated": np.zeros(rows, bool)}
    return {
        **columns,
        **ends,
        "steps": np.zeros(rows, int),
        "behavior_log_probabilities": logs,
    }, user


def play(
    random: np.random.Generator, policy: Callable[..., Any], levels: np.ndarray
) -> dict[str, Any]:
    """Sessions of ten steps, (T, N, …)."""
    states = random.normal(size=(len(levels), 2))
    steps = []
    for step in range(STEPS):
        chances = policy(states)
        actions = draw(chances, random)
        rewards = (
            0.3 * gain(states, actions)
            + 0.3 * levels
            + 0.2 * random.normal(size=len(levels))
        )
        moved = np.array([[0.0, 0.0], [0.4, 0.0], [0.0, 0.4]])[actions]
        following = 0.8 * states + moved + 0.3 * random.normal(size=states.shape)
        clock = np.full((len(levels), 1), step / STEPS)
        rows = {
            "observations": np.hstack([states, clock]),
            "actions": actions,
            "rewards": rewards,
        }
        rows["next_observations"] = np.hstack([following, clock + 1.0 / STEPS])
        rows["behavior_log_probabilities"] = np.log(
            chances[np.arange(len(actions)), actions]
        )
        steps.append(rows)
        states = following
    return {name: np.stack([rows[name] for rows in steps]) for name in steps[0]}


def sessions(seed: int) -> tuple[dict[str, Any], np.ndarray]:
    """Columns of a log of sessions, and the user of each row."""
    random = np.random.default_rng([seed, 6])
    user = np.repeat(np.arange(40), 10)
    played = play(random, behavior, random.normal(size=40)[user])
    steps = np.tile(np.arange(STEPS), len(user))
    columns = {
        name: np.concatenate(np.swapaxes(part, 0, 1)) for name, part in played.items()
    }
    ends = {
        "terminated": steps == STEPS - 1,
        "truncated": np.zeros(len(steps), bool),
        "steps": steps,
    }
    return {**columns, **ends}, np.repeat(user, STEPS)


def truth_of(kind: str) -> float:
    """By a million states, or 400,000 sessions."""
    if kind == "bandit":
        states = np.random.default_rng(7).normal(size=(1_000_000, 2))
        return float(
            (target(states) * (np.tanh(states @ _WEIGHTS.T) + 0.5)).sum(axis=1).mean()
        )
    played = play(np.random.default_rng(3), target, np.zeros(400_000))
    return float((GAMMA ** np.arange(STEPS) @ played["rewards"]).mean())


def main() -> None:
    """Print a line for each kind of log, estimator and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| log | estimator | clusters | intervals that hold | mean width"
        " |\n|---|---|---|---|---|"
    )
    for kind, make in (("bandit", bandit), ("sessions", sessions)):
        truth = truth_of(kind)
        for estimator in ESTIMATORS[kind]:
            for is_clustered in (False, True):
                intervals = []
                for seed in range(arguments.seeds):
                    columns, user = make(seed)
                    clusters = None
                    if is_clustered:
                        clusters = user
                    log = koffline.Transitions(
                        **columns, clusters=clusters, action_space=koffline.Discrete(3)
                    )
                    intervals.append(
                        koffline.evaluate(
                            log, target, GAMMA, estimator=estimator
                        ).interval
                    )
                held = sum(
                    interval is not None and interval.holds(truth)
                    for interval in intervals
                )
                width = np.mean(
                    [interval.width for interval in intervals if interval is not None]
                )
                print(
                    f"| {kind} | {estimator} | {is_clustered} | {held} of {len(intervals)} |"
                    f" {width:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
