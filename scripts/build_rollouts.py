"""Build a log of episodes of each world: a mixture of its target policy and uniform actions.

    python scripts/build_rollouts.py --out DIR [--episodes 200] [--seed 0]

Writes DIR/<world>.hdf5 and the manifest. Target policies: datasets/policies (build_uniform.py).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also found when run as a plain script

from scripts.build_uniform import WORLDS

POLICIES = Path(__file__).resolve().parents[1] / "datasets" / "policies"


def main() -> None:
    """One log per world."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, env in WORLDS.items():
        policies = ("--policy", str(POLICIES / f"{name}.npz"), "--policy", "uniform", "--gamma", "0.98")
        amount = ("--episodes", str(options.episodes), "--seed", str(options.seed))
        target = ("--out", str(options.out / f"{name}.hdf5"), "--force")
        call = ("build", "rollouts", "--env", env, *policies, *amount, *target)
        subprocess.run([sys.executable, "-m", "koffline", *call], check=True)


if __name__ == "__main__":
    main()
