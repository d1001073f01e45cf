"""Build the paper's evaluation data: 5000 tuples with uniform states for three worlds,
2000 of the chain.

    python scripts/build_uniform.py [--out datasets/uniform] [--policies datasets/policies]

Writes OUT/<world>.hdf5 and their manifest, by the commands that it names (run them in
the folder above OUT). Processors differ in last bits; rows are the same to 1e-6. The
policies are those of learn_policies.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

DATASETS = Path(__file__).resolve().parents[1] / "datasets"
WORLDS = {
    "puddle_world": "koffline/PuddleWorld-v0",
    "cart_pole": "koffline/NoisyPole-v0",
    "mountain_car": "koffline/NoisyMountainCar-v0",
}


def build(folder: Path, kind: str, *arguments: str) -> None:
    """``koffline build`` in a folder, so that manifests name relative paths; its errors
    end the script.
    """
    done = subprocess.run(
        [sys.executable, "-m", "koffline", "build", kind, *arguments], cwd=folder
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def policy_of(world: str, policies: Path, folder: Path) -> str:
    """The path of a world's target policy as seen from a folder."""
    path = policies / f"{world}.npz"
    if not path.is_file():
        raise SystemExit(
            f"error: {path} is missing; make it with python scripts/learn_policies.py"
        )
    return os.path.relpath(path, folder)


def main() -> None:
    """One command per dataset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DATASETS / "uniform")
    parser.add_argument("--policies", type=Path, default=DATASETS / "policies")
    options = parser.parse_args()
    out = options.out.resolve()
    policies = options.policies.resolve()
    specs = {world: policy_of(world, policies, out.parent) for world in WORLDS}
    out.mkdir(parents=True, exist_ok=True)
    common = ("--seed", "0", "--out")
    for world, env in WORLDS.items():
        target = (*common, f"{out.name}/{world}.hdf5", "--force")
        build(
            out.parent,
            "uniform",
            "--env",
            env,
            "--n",
            "5000",
            "--policy",
            specs[world],
            *target,
        )
    build(
        out.parent,
        "uniform",
        "--env",
        "chain",
        "--n",
        "2000",
        *common,
        f"{out.name}/chain.hdf5",
        "--force",
    )


if __name__ == "__main__":
    main()
