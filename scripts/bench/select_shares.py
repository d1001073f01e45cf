"""What a further policy costs `koffline select`, beside the first one.

    python -m scripts.bench.select_shares --out docs/results/select_shares.json

Processor seconds of policies evaluated one by one, and of the same policies ranked
together; of which training. ``further`` is the cost of each policy beyond the first,
``ratio`` that over what the same policies cost alone. Values are compared to the last digit.
Logs: 3,000 rows of an offer a visitor (one step), four policies; CartPole's bundled
10,000 rows (178 episodes), two policies. All settings are the defaults but for
``--set``; the estimator is that of `select`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import koffline
from koffline.config import parse_assignments
from koffline.ope.networks.fitted_q import Training
from koffline.policies import DiscretePolicy
from scripts.bench.user_logs import problems as user_problems

_CARTPOLE = Path(__file__).resolve().parents[2] / "datasets" / "cartpole.hdf5"


def _clicks() -> tuple[koffline.Transitions, dict[str, Any], float]:
    """A one-step log, and policies that differ in how often they explore."""
    problem = user_problems("development")["clicks 3000"]
    policies = {name: problem.policy(name) for name in problem.targets}
    uniform = DiscretePolicy(5, lambda states: np.full((len(states), 5), 0.2), "all")
    return problem.log(0, None), {**policies, "all": uniform}, problem.gamma


def _cartpole() -> tuple[koffline.Transitions, dict[str, Any], float]:
    """Episodes, and policies that lean against the pole, more or less firmly."""

    def leaning(firmness: float) -> Callable[[np.ndarray], np.ndarray]:
        def probabilities(states: np.ndarray) -> np.ndarray:
            right = 1.0 / (
                1.0 + np.exp(-firmness * (3.0 * states[:, 2] + states[:, 3]))
            )
            return np.stack([1.0 - right, right], axis=1)

        return probabilities

    policies = {
        f"firmness {firmness:g}": DiscretePolicy(2, leaning(firmness), "leaning")
        for firmness in (1.0, 2.0)
    }
    log = koffline.open_transitions(_CARTPOLE)
    assert isinstance(log, koffline.Transitions)
    return log, policies, 0.99


LOGS = {"clicks, one step": _clicks, "CartPole": _cartpole}


@contextmanager
def training_seconds() -> Iterator[list[float]]:
    """Collects the processor seconds of every run of training inside the context."""
    run = Training.run
    seconds: list[float] = []

    def timed(training: Training) -> Any:
        started = time.process_time()
        record = run(training)
        seconds.append(time.process_time() - started)
        return record

    setattr(Training, "run", timed)  # noqa: B010
    try:
        yield seconds
    finally:
        setattr(Training, "run", run)  # noqa: B010


def measure(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """One log: all its policies one by one, then together."""
    log, policies, gamma = LOGS[name]()
    alone = {}
    seconds_alone = []
    with training_seconds() as training_alone:
        for policy_name, policy in policies.items():
            started = time.process_time()
            alone[policy_name] = koffline.evaluate(
                log, policy, gamma, estimator="kloss+fqe", **options
            )
            seconds_alone.append(time.process_time() - started)
    with training_seconds() as training_together:
        started = time.process_time()
        ranking = koffline.select_policies(
            log, policies, gamma, estimator="kloss+fqe", **options
        )
        together = time.process_time() - started
    values = {policy.name: policy.value for policy in ranking.policies}
    further = (together - seconds_alone[0]) / (len(policies) - 1)
    return {
        "log": name,
        "rows": len(log),
        "policies": len(policies),
        "seconds_alone": seconds_alone,
        "training_alone": training_alone,
        "seconds_together": together,
        "training_together": training_together,
        "first": seconds_alone[0],
        "further": further,
        "ratio": further / float(np.mean(seconds_alone[1:])),
        "equal": all(values[key] == alone[key].value for key in values),
    }


def main() -> None:
    """One line for each log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("logs", nargs="*", help=f"of {', '.join(LOGS)} (default: all)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # processor time is that of this process
    options = {"cores": 1, **parse_assignments(arguments.set)}
    rows = []
    print(
        "| log | rows | policies | alone, CPU s each | of it training | a further one in"
        " `select` | of it training | ratio | equal values |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in arguments.logs or LOGS:
        row = measure(name, options)
        rows.append(row)
        columns = (
            name,
            f"{row['rows']:,}",
            str(row["policies"]),
            f"{np.mean(row['seconds_alone']):.1f}",
            f"{np.mean(row['training_alone']):.1f}",
            f"{row['further']:.1f}",
            f"{np.mean(row['training_together'][1:]):.1f}",
            f"{row['ratio']:.2f}",
            {True: "yes", False: "NO"}[row["equal"]],
        )
        print(f"| {' | '.join(columns)} |", flush=True)
    if arguments.out is not None:
        command = shlex.join(
            ["python", "-m", "scripts.bench.select_shares", *sys.argv[1:]]
        )
        content = {"command": command, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
