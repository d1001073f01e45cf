"""Learn the policies whose values the evaluation problems ask for, and say how good
they are.

    python scripts/learn_policies.py [--out datasets/policies]

The grid's policies (value iteration, then a softmax) are the ones of the experiments.
Their values are rounded to 1e-6 and none is nearer than 1e-10 to a boundary, while
processors differ by 3e-14: hence the same bytes on all of them. Beside each file
policies.json takes an entry: the command, the file's sha256, and discounted returns
from uniform states of the policy, of its greedy version and of the uniform policy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from koffline.builders.uniform import learn_grid_policy
from koffline.data.transitions import Discrete
from koffline.envs.boxes import WORLDS, make_world, uniform_states, world_name
from koffline.errors import KofflineError
from koffline.policies import DiscretePolicy, save_grid_policy
from koffline.policy_specs import load_policy
from scripts.bench.rollouts import monte_carlo_value

GAMMA = 0.98
STARTS = 1000
REPEATS = 10
RETURN_SEED = 20190535
_COLD = 1e-9  # a temperature at which the softmax is the argmax

Function = Callable[[np.ndarray], np.ndarray]


def learn_grid(name: str, folder: Path) -> dict[str, Any]:
    """Write folder/<name>.npz and return its entry."""
    path = folder / f"{name}.npz"
    policy = learn_grid_policy(name, GAMMA)
    save_grid_policy(path, policy)
    greedy = replace(policy, temperature=_COLD)
    return entry_of(name, path, {"temperature": policy.temperature}, {"greedy": greedy})


def entry_of(
    name: str,
    path: Path,
    settings: dict[str, Any],
    other_functions: dict[str, Function],
) -> dict[str, Any]:
    """What policies.json says of a file; the policy is read back the way a user
    does.
    """
    world = make_world(name)
    assert world.n_actions is not None
    loaded = load_policy(path, Discrete(world.n_actions), (len(world.low),))
    uniform = load_policy("uniform", Discrete(world.n_actions), (len(world.low),))
    assert isinstance(loaded, DiscretePolicy)
    assert isinstance(uniform, DiscretePolicy)
    functions = {
        "policy": loaded.probabilities,
        **other_functions,
        "uniform": uniform.probabilities,
    }
    generator = np.random.default_rng(RETURN_SEED)
    starts = uniform_states(world, STARTS, generator)
    returns = {}
    for kind, function in functions.items():
        value = monte_carlo_value(
            world, function, GAMMA, starts, np.random.default_rng(0), REPEATS
        )
        returns[kind] = {
            "mean": round(value.value, 4),
            "error": round(value.error_given_starts, 4),
        }
    return {
        "world": name,
        "gamma": GAMMA,
        **settings,
        "entropy": round(mean_entropy(loaded.probabilities(world.observe(starts))), 3),
        "returns": returns,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def mean_entropy(probabilities: np.ndarray) -> float:
    """Mean entropy over the rows (N, A), as a share of the largest, log A."""
    terms = np.where(
        probabilities > 0,
        probabilities * np.log(np.maximum(probabilities, 1e-300)),
        0.0,
    )
    return float(-terms.sum(axis=1).mean() / np.log(probabilities.shape[1]))


def write_entries(folder: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Add entries to policies.json or replace them; the others stay."""
    path = folder / "policies.json"
    if path.exists():
        known = json.loads(path.read_text(encoding="utf-8"))
    else:
        known = {}
    path.write_text(json.dumps(known | entries, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Learn, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--env",
        action="append",
        help="world or Gymnasium id; may be repeated (default: all)",
    )
    parser.add_argument("--out", type=Path, default=Path("datasets/policies"))
    options = parser.parse_args(arguments)
    try:
        names = [world_name(env) for env in options.env or WORLDS]
        options.out.mkdir(parents=True, exist_ok=True)
        for name in names:
            entry = learn_grid(name, options.out)
            file = f"{name}.npz"
            entry = {
                "command": f"python scripts/learn_policies.py --env {name}",
                **entry,
            }
            write_entries(options.out, {file: entry})
            shown = ", ".join(
                f"{k} {v['mean']} ± {v['error']}" for k, v in entry["returns"].items()
            )
            print(
                f"{options.out / file}: entropy {entry['entropy']} of the largest;"
                f" returns: {shown}"
            )
    except KofflineError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
