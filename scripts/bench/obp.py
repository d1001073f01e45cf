"""Estimators of the Open Bandit Pipeline and intervals of VowpalWabbit's estimators
beside koffline's, on OBP's own synthetic bandit.

    pip install --no-deps obp==0.4.1 vw-estimators==0.2.2
    pip install mypy_extensions pandas scikit-learn seaborn
    python -m scripts.bench.obp --runs out/obp.jsonl --out docs/results/obp.json

(obp's own pins are of 2021; with the newest packages it works.) One draw is a log of
10,000 rows of 10 actions: OBP's logistic rewards and linear behavior policy. The policy
to evaluate is OBP's own learner (inverse propensity weights, logistic regression), in
its example's settings, from another 10,000 rows; its probabilities are mixed with
a fifth of uniform ones, so that every estimator applies. The measure is OBP's own
evaluation of OPE, `OffPolicyEvaluation.evaluate_performance_of_estimators`: the
squared error, and the relative estimation error |V̂ − V| / V; ours go through the same
formulas. Its DM, DR, SWITCH and DRos share one regression (its example's logistic
regression, or random forest), cross-fitted in three folds; thresholds of SWITCH and
shrinkage of DRos are those of its examples. V is exact to four digits: the mean over
500,000 users.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import koffline
from koffline import Transitions
from koffline.ope.evaluation import estimate_all
from koffline.policies import DiscretePolicy
from scripts.bench.coverage import kept_runs

MISSING = (
    "this benchmark needs the package obp, which is not installed; pip install --no-deps"
    " obp==0.4.1 vw-estimators==0.2.2, then pip install mypy_extensions pandas"
    " scikit-learn seaborn"
)
OURS = ("dr", "wdr", "is", "wis", "drl", "mwl", "kloss", "fqe", "kloss+fqe")
_ROWS = 10_000
_ACTIONS = 10
_CONTEXT = 5
_WORLD_SEED = 12345  # of OBP's examples
_TRUTH_USERS = 500_000
_UNIFORM = 0.2
_GAMMA = 0.9  # makes no difference
_FOLDS = 3


def is_installed() -> bool:
    """Whether obp can be imported."""
    return importlib.util.find_spec("obp") is not None


@dataclass(frozen=True, eq=False)
class Draw:
    """A log as OBP's dictionary of arrays, and as koffline's."""

    feedback: dict[str, Any]
    transitions: Transitions


class World:
    """OBP's synthetic bandit, and the policy that its learner made."""

    def dataset(self, seed: int) -> Any:
        """OBP's generator; rewards and behavior are the same for every seed."""
        from obp.dataset import (
            SyntheticBanditDataset,
            linear_behavior_policy,
            logistic_reward_function,
        )

        dataset = SyntheticBanditDataset(
            n_actions=_ACTIONS,
            dim_context=_CONTEXT,
            reward_function=logistic_reward_function,
            behavior_policy_function=linear_behavior_policy,
            random_state=_WORLD_SEED,
        )
        dataset.random_ = np.random.RandomState(seed)
        return dataset

    def log(self, seed: int, rows: int = _ROWS) -> Draw:
        """A log of ``rows`` users."""
        feedback = self.dataset(seed).obtain_batch_bandit_feedback(rows)
        transitions = Transitions(
            observations=feedback["context"],
            actions=feedback["action"],
            rewards=feedback["reward"].astype(np.float64),
            next_observations=feedback["context"],
            terminated=np.ones(rows, dtype=bool),
            truncated=np.zeros(rows, dtype=bool),
            action_space=koffline.Discrete(_ACTIONS),
            episode_ids=np.arange(rows),
            behavior_log_probabilities=np.log(feedback["pscore"]),
        )
        return Draw(feedback, transitions)

    @cached_property
    def _learner(self) -> Any:
        from obp.policy import IPWLearner
        from sklearn.linear_model import LogisticRegression

        learner = IPWLearner(
            n_actions=_ACTIONS,
            base_classifier=LogisticRegression(C=100, random_state=_WORLD_SEED),
        )
        feedback = self.log(1_000_000).feedback
        learner.fit(
            context=feedback["context"],
            action=feedback["action"],
            reward=feedback["reward"],
            pscore=feedback["pscore"],
        )
        return learner

    def shares(self, observations: np.ndarray) -> np.ndarray:
        """Probabilities (N, n) of the policy to evaluate."""
        learnt = self._learner.predict(context=np.asarray(observations))[:, :, 0]
        return (1.0 - _UNIFORM) * learnt + _UNIFORM / _ACTIONS

    @property
    def policy(self) -> DiscretePolicy:
        """The policy to evaluate."""
        return DiscretePolicy(_ACTIONS, self.shares, "OBP's learner")

    def truth(self) -> float:
        """The policy's value."""
        dataset = self.dataset(2_000_000)
        context = dataset.random_.normal(size=(_TRUTH_USERS, _CONTEXT))
        value = dataset.calc_ground_truth_policy_value(
            expected_reward=dataset.calc_expected_reward(context),
            action_dist=self.shares(context)[:, :, None],
        )
        return float(value)


def theirs(draw: Draw, shares: np.ndarray, truth: float, seed: int) -> dict[str, Any]:
    """Value, squared and relative error, and seconds of OBP's estimators.

    shares: probabilities (N, n) of the policy to evaluate.
    """
    from obp import ope
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    action_dist = shares[:, :, None]
    regressions = {
        "logistic": LogisticRegression(C=100, random_state=_WORLD_SEED),
        "forest": RandomForestClassifier(
            n_estimators=10, min_samples_leaf=10, random_state=_WORLD_SEED
        ),
    }
    feedback = draw.feedback
    weighted = [
        ope.InverseProbabilityWeighting(estimator_name="IPS"),
        ope.SelfNormalizedInverseProbabilityWeighting(estimator_name="SNIPS"),
    ]
    answers = _answers_of(feedback, action_dist, truth, weighted, None)
    for name, base_model in regressions.items():
        started = time.process_time()
        model = ope.RegressionModel(n_actions=_ACTIONS, base_model=base_model)
        predicted = model.fit_predict(
            context=feedback["context"],
            action=feedback["action"],
            reward=feedback["reward"],
            n_folds=_FOLDS,
            random_state=seed,
        )
        fitting = time.process_time() - started
        estimators = [
            ope.DirectMethod(estimator_name=f"DM, {name}"),
            ope.DoublyRobust(estimator_name=f"DR, {name}"),
            ope.SelfNormalizedDoublyRobust(estimator_name=f"SNDR, {name}"),
        ]
        for limit in (1.0, 100.0):
            estimators.append(
                ope.SwitchDoublyRobust(
                    tau=limit, estimator_name=f"SWITCH {limit:g}, {name}"
                )
            )
            estimators.append(
                ope.DoublyRobustWithShrinkage(
                    lambda_=limit, estimator_name=f"DRos {limit:g}, {name}"
                )
            )
        of_model = _answers_of(feedback, action_dist, truth, estimators, predicted)
        for answer in of_model.values():
            answer["seconds"] += fitting
        answers |= of_model
    return answers


def _answers_of(
    feedback: dict[str, Any],
    action_dist: np.ndarray,
    truth: float,
    estimators: list[Any],
    predicted: np.ndarray | None,
) -> dict[str, Any]:
    """Answers of OBP's estimators that share a regression (N, n, 1), if they need
    one.
    """
    from obp.ope import OffPolicyEvaluation

    answers = {}
    for estimator in estimators:
        started = time.process_time()
        evaluation = OffPolicyEvaluation(
            bandit_feedback=feedback, ope_estimators=[estimator]
        )
        inputs = {
            "action_dist": action_dist,
            "estimated_rewards_by_reg_model": predicted,
        }
        name = estimator.estimator_name
        values = evaluation.estimate_policy_values(**inputs)
        seconds = time.process_time() - started
        of_metric = {
            metric: evaluation.evaluate_performance_of_estimators(
                ground_truth_policy_value=truth, metric=metric, **inputs
            )[name]
            for metric in ("se", "relative-ee")
        }
        answers[name] = {
            "value": float(values[name]),
            "squared_error": float(of_metric["se"]),
            "relative_error": float(of_metric["relative-ee"]),
            "interval": None,
            "seconds": seconds,
        }
    return answers


def of_vowpal_wabbit(draw: Draw, shares: np.ndarray, truth: float) -> dict[str, Any]:
    """Intervals of vw-estimators at 95 %, and its values; nothing if it is missing.

    Bounds of the importance ratios are those that both policies allow.
    """
    if importlib.util.find_spec("estimators") is None:
        return {}
    from estimators.bandits import cressieread, gaussian, ips, snips

    feedback = draw.feedback
    rows = np.arange(len(shares))
    taken = shares[rows, feedback["action"]]
    largest = 1.0 / float(feedback["pscore"].min())
    makers = {
        "VW Cressie-Read": (
            cressieread.Estimator(wmin=0.0, wmax=largest),
            cressieread.Interval(wmin=0.0, wmax=largest, rmin=0.0, rmax=1.0),
        ),
        "VW IPS, Gaussian": (ips.Estimator(), gaussian.Interval()),
        "VW SNIPS": (snips.Estimator(), None),
    }
    examples = list(
        zip(
            feedback["pscore"].tolist(),
            feedback["reward"].tolist(),
            taken.tolist(),
            strict=True,
        )
    )
    answers = {}
    for name, (estimator, interval) in makers.items():
        started = time.process_time()
        for probability, reward, of_policy in examples:
            estimator.add_example(probability, reward, of_policy)
            if interval is not None:
                interval.add_example(probability, reward, of_policy)
        ends = None
        if interval is not None:
            ends = [float(end) for end in interval.get(alpha=0.05)]
        answers[name] = _answer(
            estimator.get(), ends, truth, time.process_time() - started
        )
    return answers


def ours(draw: Draw, policy: DiscretePolicy, truth: float, seed: int) -> dict[str, Any]:
    """Answers of koffline's estimators, with default settings."""
    started = time.process_time()
    options: dict[str, Any] = {"bounds": False, "seed": seed, "cores": 1}
    table = estimate_all(draw.transitions, policy, _GAMMA, names=["dr"], **options)
    seconds_of_dr = time.process_time() - started
    table = estimate_all(draw.transitions, policy, _GAMMA, names=OURS, **options)
    answers = {}
    for row in table.rows:
        estimate = row.estimate
        if estimate is None:
            continue
        ends = None
        if estimate.interval is not None:
            ends = [estimate.interval.low, estimate.interval.high]
        seconds = None
        if row.name == "dr":
            seconds = seconds_of_dr
        answers[f"koffline {row.name}"] = _answer(estimate.value, ends, truth, seconds)
    return answers


def _answer(
    value: float, interval: list[float] | None, truth: float, seconds: float | None
) -> dict[str, Any]:
    """A record with the two errors of OBP's evaluation of OPE."""
    return {
        "value": float(value),
        "squared_error": (value - truth) ** 2,
        "relative_error": abs((value - truth) / truth),
        "interval": interval,
        "seconds": seconds,
    }


class Measure:
    """Measures draws of one world, whose policy and truth are made once."""

    def __init__(self) -> None:
        self._world = World()
        self._truth = self._world.truth()

    def __call__(self, seed: int) -> dict[str, Any]:
        """Answers of all estimators on one log."""
        world = self._world
        truth = self._truth
        draw = world.log(seed)
        shares = world.shares(draw.feedback["context"])
        answers = {
            **theirs(draw, shares, truth, seed),
            **of_vowpal_wabbit(draw, shares, truth),
            **ours(draw, world.policy, truth, seed),
        }
        print(f"draw {seed}", flush=True)
        return {"seed": seed, "truth": truth, "answers": answers}


def summarise(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Errors of one estimator over the draws, and how many intervals held the
    truth.
    """
    answered = [
        (run["truth"], run["answers"][name]) for run in runs if name in run["answers"]
    ]
    answers = [answer for _, answer in answered]
    squares = np.array([answer["squared_error"] for answer in answers])
    relative = np.array([answer["relative_error"] for answer in answers])
    biases = np.array([(answer["value"] - truth) / truth for truth, answer in answered])
    intervals = [
        (truth, *answer["interval"])
        for truth, answer in answered
        if answer["interval"] is not None
    ]
    widths = [(high - low) / truth for truth, low, high in intervals]
    times = [answer["seconds"] for answer in answers if answer["seconds"] is not None]
    width = None
    if widths:
        width = float(np.mean(widths))
    seconds = None
    if times:
        seconds = float(np.mean(times))
    return {
        "estimator": name,
        "draws": len(answers),
        "squared_error": float(squares.mean()),
        "squared_error_deviation": float(squares.std(ddof=1) / len(squares) ** 0.5),
        "relative_error": float(relative.mean()),
        "bias": float(biases.mean()),
        "held": sum(low <= truth <= high for truth, low, high in intervals),
        "intervals": len(intervals),
        "width": width,
        "seconds": seconds,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """A Markdown table, smallest squared error first."""
    print(
        "| estimator | squared error × 10⁶ | relative estimation error | bias | 95 %"
        " intervals held | width | CPU s |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        held = "–"
        width = "–"
        if row["width"] is not None:
            held = f"{row['held']} of {row['intervals']}"
            width = f"{row['width']:.1%}"
        seconds = ""
        if row["seconds"] is not None:
            seconds = f"{row['seconds']:.1f}"
        columns = (
            row["estimator"],
            f"{1e6 * row['squared_error']:.0f}"
            f" ± {1e6 * row['squared_error_deviation']:.0f}",
            f"{row['relative_error']:.2%}",
            f"{row['bias']:+.2%}",
            held,
            width,
            seconds,
        )
        print(f"| {' | '.join(columns)} |")


def main() -> None:
    """Make the draws that are missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="JSON lines")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for the summary")
    arguments = parser.parse_args()
    if not is_installed():
        parser.error(MISSING)
    torch.set_num_threads(1)
    seeds = [(seed,) for seed in range(arguments.draws)]
    runs = kept_runs(arguments.runs, ("seed",), seeds, Measure())
    names = dict.fromkeys(name for run in runs for name in run["answers"])
    rows = [summarise(runs, name) for name in names]
    rows.sort(key=lambda row: row["squared_error"])
    print_table(rows)
    if arguments.out is not None:
        command = shlex.join(["python", "-m", "scripts.bench.obp", *sys.argv[1:]])
        content = {"command": command, "truth": runs[0]["truth"], "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
