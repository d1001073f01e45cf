"""Build a log of episodes of each world: a mixture of its target policy and uniform actions.

    python scripts/build_rollouts.py --out DIR [--episodes 200] [--seed 0] [--policies datasets/policies]

Writes DIR/<world>.hdf5 and their manifest, by the commands that it names (run them in DIR). The policies are
those of learn_policies.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also found when run as a plain script

from scripts.build_uniform import DATASETS, WORLDS, build, policy_of


def main() -> None:
    """One command per world."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", type=Path, default=DATASETS / "policies")
    options = parser.parse_args()
    out = options.out.resolve()
    specs = {world: policy_of(world, options.policies.resolve(), out) for world in WORLDS}
    out.mkdir(parents=True, exist_ok=True)
    for world, env in WORLDS.items():
        policies = ("--policy", specs[world], "--policy", "uniform", "--gamma", "0.98")
        amount = ("--episodes", str(options.episodes), "--seed", str(options.seed))
        build(out, "rollouts", "--env", env, *policies, *amount, "--out", f"{world}.hdf5", "--force")


if __name__ == "__main__":
    main()
