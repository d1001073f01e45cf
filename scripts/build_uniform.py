"""Build the paper's evaluation data: 5000 tuples with uniform states for three worlds, 2000 of the chain.

    python scripts/build_uniform.py [--out datasets]

Writes OUT/policies/<world>.npz and OUT/uniform/<world>.hdf5 with their manifests, by the commands that the
manifests name; the same versions of numpy and h5py give the same bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

WORLDS = {
    "puddle_world": "koffline/PuddleWorld-v0",
    "cart_pole": "koffline/NoisyPole-v0",
    "mountain_car": "koffline/NoisyMountainCar-v0",
}


def koffline(folder: Path, *arguments: str) -> None:
    """Run the command line in a folder, so that manifests name relative paths."""
    subprocess.run([sys.executable, "-m", "koffline", *arguments], cwd=folder, check=True)


def main() -> None:
    """Build policies, then data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "datasets")
    folder = parser.parse_args().out.resolve()
    for part in ("policies", "uniform"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name, env in WORLDS.items():
        policy, log = f"policies/{name}.npz", f"uniform/{name}.hdf5"
        koffline(folder, "build", "policy", "--env", env, "--out", policy, "--force")
        arguments = ("--n", "5000", "--policy", policy, "--seed", "0", "--out", log, "--force")
        koffline(folder, "build", "uniform", "--env", env, *arguments)
    arguments = ("--n", "2000", "--seed", "0", "--out", "uniform/chain.hdf5", "--force")
    koffline(folder, "build", "uniform", "--env", "chain", *arguments)


if __name__ == "__main__":
    main()
