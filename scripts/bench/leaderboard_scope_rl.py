"""scope-rl's estimators on the leaderboard, when it is installed (version 0.2.1; the
`dev` extra has it).

It knows discrete actions and episodes of one length alone. Shorter episodes are filled
up with rows of reward zero and of equal probabilities, which changes none of its sums.
Its doubly robust estimator needs a value
function: d3rlpy's FQE where that can be had (greedy policies), as scope-rl's own
pipeline takes it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from koffline.data import quiet
from koffline.data.transitions import Discrete, Transitions
from koffline.policies import DiscretePolicy, Policy

ESTIMATORS = {
    "TIS": "TrajectoryWiseImportanceSampling",
    "PDIS": "PerDecisionImportanceSampling",
    "SNTIS": "SelfNormalizedTIS",
    "SNPDIS": "SelfNormalizedPDIS",
    "DR": "DoublyRobust",
    "SNDR": "SelfNormalizedDR",
}
WITH_MODEL = ("DR", "SNDR")


def is_installed() -> bool:
    return importlib.util.find_spec("scope_rl") is not None


def pad_episodes(
    log: Transitions, policy: DiscretePolicy, gamma: float, q_values: Any = None
) -> dict[str, Any]:
    """Its arguments: flat arrays (E·T, …), episode by episode, all of length T.

    q_values: observations (N, …) to (N, n), or None.
    """
    assert isinstance(log.action_space, Discrete)
    n = log.action_space.n
    episodes = log.n_episodes
    starts = log.episode_starts
    lengths = np.diff(np.append(starts, len(log)))
    horizon = int(lengths.max())
    at = (
        np.repeat(np.arange(episodes) * horizon, lengths)
        + np.arange(len(log))
        - np.repeat(starts, lengths)
    )

    def padded(rows: np.ndarray, fill: float) -> np.ndarray:
        whole = np.full((episodes * horizon, *rows.shape[1:]), fill, dtype=rows.dtype)
        whole[at] = rows
        return whole

    columns = {
        "step_per_trajectory": horizon,
        "action": padded(np.asarray(log.actions), 0),
        "reward": padded(np.asarray(log.rewards, dtype=np.float64), 0.0),
        "pscore": padded(
            np.exp(np.asarray(log.behavior_log_probabilities, dtype=np.float64)),
            1.0 / n,
        ),
        "evaluation_policy_action_dist": padded(
            policy.probabilities(log.observations), 1.0 / n
        ),
        "gamma": gamma,
    }
    if q_values is not None:
        columns["state_action_value_prediction"] = padded(
            q_values(log.observations), 0.0
        )
    return columns


def estimate(
    name: str, columns: dict[str, Any], level: float, seed: int
) -> tuple[float, float, float]:
    """Value and its bootstrap interval, scope-rl's default kind."""
    with silent():
        from scope_rl.ope import discrete

        estimator = getattr(discrete, ESTIMATORS[name])()
        value = float(estimator.estimate_policy_value(**columns))
        ends = estimator.estimate_interval(
            **columns,
            alpha=1.0 - level,
            ci="bootstrap",
            n_bootstrap_samples=1000,
            random_state=seed,
        )
    low = next(end for key, end in ends.items() if "lower" in key)
    high = next(end for key, end in ends.items() if "upper" in key)
    return value, float(low), float(high)


def refusal(name: str, log: Transitions, policy: Policy, has_model: bool) -> str | None:
    """Why it does not apply; None where it does."""
    if not isinstance(policy, DiscretePolicy):
        return (
            "continuous actions: scope-rl has kernel estimators for deterministic"
            " policies only"
        )
    if log.behavior_log_probabilities is None or not log.has_episodes:
        return "needs episodes with behaviour probabilities"
    if name in WITH_MODEL and not has_model:
        return "needs a value function; d3rlpy's FQE has none of a stochastic policy"
    return None


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Without d3rlpy's notices, tqdm's bars and warnings of what scope-rl imports."""
    with quiet(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
