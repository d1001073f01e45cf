"""One Q in all places of a doubly robust estimate, against two ways to clip it; the
same networks for all.

    python -m scripts.bench.doubly_robust --runs out/doubly_robust.jsonl --out docs/results/doubly_robust.json

Logs: 40 of a bandit with rare clicks (10,000 rows, 30 actions, one click in 220), one
of each exact problem (2,000 rows), and the development half of the leaderboard without
its robots, one log each. Networks take 400 steps on the bandit and 1,000 on the others;
all else has its default. Each log and policy is one line of ``--runs``: called again,
it goes on.

``one``: what koffline does, no clip. ``parts``: what koffline did before, clips of a
row's mean value over networks and of each network's expectation in start states.
``bounded``: every network's Q(s, a) is clipped to possible returns, before any mean or
expectation: also one Q in all places.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from koffline import Discrete, Transitions
from koffline.config import EvaluationSettings, make_settings
from koffline.errors import KofflineError
from koffline.ope.estimators.doubly_robust import DR, MAGIC, WDR, drl
from koffline.ope.estimators.importance import IS
from koffline.ope.importance.episodes import with_unknown_actions
from koffline.ope.log.row_values import RowValues
from koffline.ope.networks.out_of_bag import RowSums, pass_over_rows
from koffline.ope.networks.resampling import start_values
from koffline.ope.results import PointEstimate
from koffline.ope.workspace import Workspace, open_workspace
from koffline.policies import DiscretePolicy
from scripts.bench.coverage import kept_runs
from scripts.bench.user_logs import problems as user_problems
from tests.exact_problems import EXACT_PROBLEMS

_OVER_EPISODES = {"dr": DR, "wdr": WDR, "magic": MAGIC}
NAMES = (*_OVER_EPISODES, "drl")
VERSIONS = ("one", "parts", "bounded")
RARE = "rare clicks"
EXACT = "exact problems"
USERS = "development half"
_STEPS = {RARE: 400, EXACT: 1000, USERS: 1000}
_DRAWS = {RARE: 40, EXACT: 1, USERS: 1}
_EXACT_ROWS = 2000
_TRUTH_DRAWS = 400_000


@dataclass(frozen=True)
class RareClicks:
    """A bandit: three features, ``actions`` items shown at random, clicks with a chance
    of about 0.005.

    The policy to evaluate shows item k in proportion to (k + 1)^−0.7, to everybody.
    """

    actions: int = 30
    rate: float = 0.005

    def chances(self, states: np.ndarray) -> np.ndarray:
        """Of a click, (N, actions)."""
        generator = np.random.default_rng([52, self.actions])
        slopes = generator.normal(size=(3, self.actions))
        levels = generator.normal(size=self.actions)
        appeal = np.clip(0.5 * states @ slopes + levels, -2.0, 2.0)
        return self.rate * np.exp(appeal) / 1.6

    def shares(self, states: np.ndarray) -> np.ndarray:
        """The policy's probabilities (N, actions)."""
        powers = np.arange(1.0, self.actions + 1.0) ** -0.7
        return np.tile(powers / powers.sum(), (len(states), 1))

    @property
    def policy(self) -> DiscretePolicy:
        """The policy to evaluate."""
        return DiscretePolicy(self.actions, self.shares, "popular")

    def log(self, seed: int, rows: int) -> Transitions:
        """One-step episodes with their probabilities."""
        generator = np.random.default_rng([seed, 52])
        states = generator.normal(size=(rows, 3))
        actions = generator.integers(self.actions, size=rows)
        clicks = generator.random(rows) < self.chances(states)[np.arange(rows), actions]
        return Transitions(
            observations=states,
            actions=actions,
            rewards=clicks.astype(np.float64),
            next_observations=states,
            terminated=np.ones(rows, dtype=bool),
            truncated=np.zeros(rows, dtype=bool),
            action_space=Discrete(self.actions),
            episode_ids=np.arange(rows),
            behavior_log_probabilities=np.full(rows, -np.log(self.actions)),
        )

    def truth(self) -> float:
        """The policy's click rate, by Monte Carlo over users: exact to 0.1 %."""
        states = np.random.default_rng(52).normal(size=(_TRUTH_DRAWS, 3))
        return float((self.chances(states) * self.shares(states)).sum(axis=1).mean())


class _Bounded:
    """Networks whose outputs are clipped."""

    def __init__(self, network: Any, low: float, high: float) -> None:
        self._network = network
        self._low = low
        self._high = high

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Clipped outputs."""
        return self._network.forward(inputs).clamp(self._low, self._high)


def values_by_version(workspace: Workspace) -> dict[str, RowValues]:
    """Values of all rows by the same networks, for each version."""
    fitted = workspace.fitted
    problem = workspace.problem
    kept = np.flatnonzero(fitted.alive).tolist()
    network = fitted.network_of("kloss").select(kept)
    chosen = fitted.resampling.select(kept)
    resampled = replace(chosen, full=0)
    duals = fitted.duals[kept][chosen.full :]
    row_values = workspace.row_values

    low, high = workspace.facts.bounds()
    left_out = resampled.row_counts(problem)[:, problem.episode_starts] == 0
    share = np.where(left_out.any(axis=0), left_out, 1.0)
    starts = np.clip(start_values(network, problem).numpy()[chosen.full :], low, high)
    parts = replace(
        row_values,
        now=np.clip(row_values.now, low, high),
        later=np.clip(row_values.later, low, high),
        starts=(starts * share / share.sum(axis=0)).sum(axis=0),
    )

    scaled: Any = _Bounded(
        network, low / problem.reward_scale, high / problem.reward_scale
    )
    passed = pass_over_rows(
        scaled, chosen.full, resampled, fitted.instruments, duals, problem
    )
    return {"one": row_values, "parts": parts, "bounded": passed.values}


def _estimate(workspace: Workspace, name: str, values: RowValues) -> PointEstimate:
    settings = workspace.settings
    if name == "drl":
        sums = RowSums.of(workspace.problem, values)
        return drl(
            sums, workspace.fitted.half_width, settings.level, workspace.problem.kind
        )
    if workspace.known_actions is not None:
        values = with_unknown_actions(
            values, workspace.transitions, workspace.known_actions
        )
    estimator = _OVER_EPISODES[name]
    return estimator.from_episodes(
        workspace.episodes, values, level=settings.level, seed=settings.seed
    )


def measure_log(
    log: Transitions, policy: Any, settings: EvaluationSettings
) -> dict[str, Any]:
    """Value and interval of each estimator in each version, and of importance
    sampling.
    """
    answers: dict[str, Any] = {}
    with open_workspace(log, policy, settings) as workspace, torch.no_grad():
        cases: dict[str, Callable[[], PointEstimate]] = {
            f"{name} {version}": partial(_estimate, workspace, name, values)
            for version, values in values_by_version(workspace).items()
            for name in NAMES
        }
        cases["is"] = lambda: IS.from_episodes(workspace.episodes, level=settings.level)
        for name, case in cases.items():
            try:
                estimate = case()
            except KofflineError as error:
                answers[name] = {"reason": str(error)}
                continue
            if estimate.interval is None:
                interval = None
            else:
                interval = [estimate.interval.low, estimate.interval.high]
            answers[name] = {"value": estimate.value, "interval": interval}
    return answers


def measure(source: str, problem: str, policy: str, seed: int) -> dict[str, Any]:
    """One line: a log and a policy."""
    target: Any
    if source == RARE:
        world = RareClicks()
        log = world.log(seed, 10_000)
        target = world.policy
        gamma = 0.9
        truth = world.truth()
    elif source == EXACT:
        exact = EXACT_PROBLEMS[problem](1000 + seed, _EXACT_ROWS)
        log = exact.transitions
        target = exact.policy
        gamma = exact.gamma
        truth = exact.value
    else:
        known = user_problems("development")[problem]
        log = known.log(seed, None)
        target = known.policy(policy)
        gamma = known.gamma
        truth, _ = known.truth(policy)
    settings = make_settings({"gamma": gamma, "steps": _STEPS[source], "seed": seed})
    answers = measure_log(log, target, settings)
    record = {
        "source": source,
        "problem": problem,
        "policy": policy,
        "seed": seed,
        "truth": truth,
    }
    print(source, problem, policy, seed, flush=True)
    return {**record, "answers": answers}


def cells(sources: list[str]) -> Iterator[tuple[str, str, str, int]]:
    """Source, problem, policy, seed."""
    for source in sources:
        for seed in range(_DRAWS[source]):
            if source == RARE:
                yield source, "", "", seed
            elif source == EXACT:
                for problem in EXACT_PROBLEMS:
                    yield source, problem, "", seed
            else:
                for name, known in user_problems("development").items():
                    if not any(
                        robot in name
                        for robot in ("Hopper", "Walker", "Cheetah", "lander")
                    ):
                        for policy in known.targets:
                            yield source, name, policy, seed


def summarise(source: str, name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors relative to the truth, and how many intervals held it."""
    answered = [
        (run["truth"], run["answers"][name]) for run in runs if run["source"] == source
    ]
    answered = [(truth, answer) for truth, answer in answered if "value" in answer]
    errors = np.array(
        [(answer["value"] - truth) / abs(truth) for truth, answer in answered]
    )
    intervals = [
        (truth, *answer["interval"]) for truth, answer in answered if answer["interval"]
    ]
    summary: dict[str, Any] = dict.fromkeys(
        ("mean_error", "standard_error", "root_mean_square", "median_error")
    )
    if answered:
        summary["mean_error"] = float(errors.mean())
        summary["root_mean_square"] = float(np.sqrt(np.square(errors).mean()))
        summary["median_error"] = float(np.median(np.abs(errors)))
    if len(answered) > 1:
        summary["standard_error"] = float(errors.std(ddof=1) / len(answered) ** 0.5)
    return {
        "source": source,
        "estimator": name,
        "answers": len(answered),
        **summary,
        "held": sum(low <= truth <= high for truth, low, high in intervals),
        "intervals": len(intervals),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "sources", nargs="*", help=f"of {', '.join(_DRAWS)} (default: all)"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        required=True,
        help="JSON lines, one for each log and policy",
    )
    parser.add_argument("--out", type=Path, help="JSON file for the summary")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sources = arguments.sources or list(_DRAWS)
    runs = kept_runs(
        arguments.runs, ("source", "problem", "policy", "seed"), cells(sources), measure
    )
    names = [f"{name} {version}" for name in NAMES for version in VERSIONS]
    rows = [
        summarise(source, name, runs) for source in sources for name in [*names, "is"]
    ]
    print(
        "| logs | estimator | answers | mean error | root mean square | median |"
        " intervals held |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        if row["answers"]:
            if row["standard_error"] is None:
                spread = ""
            else:
                spread = f" ± {row['standard_error']:.3f}"
            columns = (
                row["source"],
                f"`{row['estimator']}`",
                str(row["answers"]),
                f"{row['mean_error']:+.3f}{spread}",
                f"{row['root_mean_square']:.3f}",
                f"{row['median_error']:.3f}",
                f"{row['held']} of {row['intervals']}",
            )
            print(f"| {' | '.join(columns)} |")
    if arguments.out:
        command = shlex.join(
            ["python", "-m", "scripts.bench.doubly_robust", *sys.argv[1:]]
        )
        content = {"command": command, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
