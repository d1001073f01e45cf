"""Learn the policies of the control logs, say how good they are, and build the logs.

    python scripts/build_control.py [--env Pendulum-v1] [--n 10000] [--out datasets] [--no-learn]

Learns by the recipe of koffline.builders.control_learning and writes
OUT/policies/<name>_medium.npz and _expert.npz, with entries in policies.json: steps,
undiscounted returns of 100 episodes, sha256. Without --env all whose logs are bundled;
of Hopper-v5 and Walker2d-v5 only the policies are. Then OUT/control/<name>_<kind>.hdf5
and their manifest, by the commands that it names (run them in OUT). Learning, and hence
a replay, is the same with the same versions on the same machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from koffline.builders import POLICY_LEVELS
from koffline.builders.control import random_return, stem
from koffline.builders.control_learning import (
    RECIPES,
    learn,
    medium_and_expert,
    policy_returns,
)
from koffline.errors import KofflineError
from koffline.policies import FORMAT, write_arrays
from koffline.policies.builtin import Mlp
from scripts.build_uniform import DATASETS, build
from scripts.learn_policies import write_entries

KINDS = ("random", "replay", "medium", "expert")
WITHOUT_LOGS = ("Hopper-v5", "Walker2d-v5")
ROWS = {"HalfCheetah-v5": 6000}  # of wide rows fewer: files stay below a megabyte
EPISODES = 100
RETURN_SEED = 20190535


def learn_policies(env: str, folder: Path) -> None:
    """Write the medium and the expert policy of an environment, and their entries."""
    recipe = RECIPES[env]
    name = stem(env)

    def show(step: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{env}: {step} of {recipe.learning.steps} steps",
                end="",
                file=sys.stderr,
            )

    snapshots = medium_and_expert(learn(recipe.learning, show), random_return(env))
    uniform = summary(policy_returns(env, "uniform", EPISODES, RETURN_SEED))
    for level, snapshot in snapshots.items():
        path = folder / f"{name}_{level}.npz"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        write_arrays(temporary, FORMAT, policy_arrays(snapshot.network))
        os.replace(temporary, path)
        entry: dict[str, Any] = {
            "command": f"python scripts/build_control.py --env {env}",
            "env": env,
            "seed": recipe.learning.seed,
            "steps": snapshot.step,
            "returns": {
                "policy": summary(policy_returns(env, str(path), EPISODES, RETURN_SEED))
            },
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        entry["returns"]["uniform"] = uniform
        write_entries(folder, {path.name: entry})
        print(f"{path}: {entry['steps']} steps, returns {entry['returns']}")
    if snapshots["medium"].step != recipe.medium_step:
        print(
            f"note: the recipe says that {env} is medium after {recipe.medium_step}"
            " steps; edit it"
        )


def policy_arrays(policy: Mlp) -> dict[str, np.ndarray]:
    """A learned network as the arrays of a policy file."""
    arrays: dict[str, Any] = {"output": policy.output}
    for layer, (weight, bias) in enumerate(
        zip(policy.weights, policy.biases, strict=True)
    ):
        arrays |= {f"W{layer}": weight, f"b{layer}": bias}
    if policy.action_low is not None and policy.action_high is not None:
        arrays |= {"action_low": policy.action_low, "action_high": policy.action_high}
    return {key: np.asarray(value) for key, value in arrays.items()}


def summary(returns: np.ndarray) -> dict[str, float]:
    """Mean undiscounted return over episodes and its standard error."""
    error = returns.std(ddof=1) / np.sqrt(len(returns))
    return {"mean": round(float(returns.mean()), 2), "error": round(float(error), 2)}


def build_logs(env: str, rows: int | None, out: Path) -> None:
    """One command per kind; a replay has the rows that its learner saw, at most as many
    as the others.
    """
    n = rows or ROWS.get(env, 10_000)
    for kind in KINDS:
        amount = str(n)
        if kind == "replay":
            amount = str(min(n, RECIPES[env].medium_step))
        target = f"control/{stem(env)}_{kind}.hdf5"
        settings = ("--env", env, "--kind", kind, "--n", amount, "--seed", "0")
        if out == DATASETS:
            policies = []
        else:
            policies = [f"policies/{stem(env)}_{x}.npz" for x in POLICY_LEVELS[kind]]
        choices = [part for policy in policies for part in ("--policy", policy)]
        build(out, "control", *settings, *choices, "--out", target, "--force")


def main() -> None:
    """Policies, then logs, environment by environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--env",
        action="append",
        choices=tuple(RECIPES),
        help="default: all with bundled logs",
    )
    parser.add_argument(
        "--n", type=int, help="rows of a log; default 10,000, of HalfCheetah-v5 6000"
    )
    parser.add_argument("--out", type=Path, default=DATASETS)
    parser.add_argument(
        "--no-learn", action="store_true", help="keep the policies that are there"
    )
    options = parser.parse_args()
    out = options.out.resolve()
    for folder in (out / "control", out / "policies"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for env in options.env or [env for env in RECIPES if env not in WITHOUT_LOGS]:
            if not options.no_learn:
                learn_policies(env, out / "policies")
            build_logs(env, options.n, out)
    except KofflineError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
