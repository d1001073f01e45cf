"""Build the bundled table: CartPole rollouts of a mixture, as a Parquet file with
columns named by people.

    python scripts/build_table.py [--out datasets]

Plays the episodes by the ``koffline build rollouts`` command that the manifest names,
then writes OUT/tables/cartpole.parquet (one row per step, episodes named by texts,
actions left and right, no next observations) and the manifest, with the rows that
readers get by the mapping. The mapping, cartpole.yaml, is written by hand. Processors
differ in last bits; rows are the same to 1e-6.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from koffline.cli import cli
from koffline.data.sources import open_transitions
from koffline.data.transitions import Transitions

ROOT = Path(__file__).resolve().parents[1]
NAME = "cartpole"
EPISODES = 120
SEED = 20190536
STATE = ("cart_position", "cart_velocity", "pole_angle", "pole_velocity")
ACTIONS = ("left", "right")
# Paths as seen from the folder of datasets, where the command is run.
COMMAND = (
    "koffline build rollouts --env CartPole-v1 --policy"
    " epsilon:0.3:cartpole_policy.npz --policy epsilon:0.6:cartpole_policy.npz"
    f" --policy uniform --episodes {EPISODES} --time-limit 100 --seed {SEED} --out"
    " {out} --force"
)


def play(datasets: Path) -> Transitions:
    """The rollouts, by the command."""
    before = Path.cwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        out = str(Path(folder) / "rollouts.hdf5")
        arguments = [
            out if word == "{out}" else word for word in shlex.split(COMMAND)[1:]
        ]
        os.chdir(datasets)  # the command names its policies as seen from there
        try:
            cli(arguments, standalone_mode=False)
        finally:
            os.chdir(before)
        return open_transitions(out)


def write_table(log: Transitions, path: Path) -> None:
    """One row per step, as a recorder would keep it."""
    import pyarrow as pa
    import pyarrow.parquet

    assert log.steps is not None
    assert log.episode_ids is not None
    assert log.behavior_log_probabilities is not None
    columns: dict[str, Any] = {
        "episode": (
            pa.array(
                [f"run-{episode:03d}" for episode in log.episode_ids]
            ).dictionary_encode()
        ),
        "t": pa.array(log.steps.astype(np.int32)),
        **{
            name: pa.array(log.observations[:, i].astype(np.float32))
            for i, name in enumerate(STATE)
        },
        "action": (
            pa.array([ACTIONS[action] for action in log.actions]).dictionary_encode()
        ),
        "probability": pa.array(
            np.exp(log.behavior_log_probabilities).astype(np.float32)
        ),
        "reward": pa.array(log.rewards.astype(np.float32)),
        "done": pa.array(log.terminated),
    }
    pyarrow.parquet.write_table(
        pa.table(columns), path, compression="zstd", row_group_size=2000
    )


def build(datasets: Path, out: Path) -> dict[str, Any]:
    """Write the table and the manifest, and return the manifest; policies are read from
    ``datasets``.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NAME}.parquet"
    write_table(play(datasets), path)
    log = open_transitions(path, mapping=datasets / "tables" / f"{NAME}.yaml")
    entry = {
        "command": "python scripts/build_table.py",
        "rollouts": COMMAND.format(out="rollouts.hdf5"),
        "seed": SEED,
        "rows": len(log),
        "episodes": log.n_episodes,
        "made_with": {
            package: version(package)
            for package in ("koffline", "numpy", "gymnasium", "pyarrow")
        },
        "files": {path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}},
    }
    manifest = {path.name: entry}
    (out / "manifest.json").write_text(
        json.dumps(manifest, indent=2) + "\n", encoding="utf-8"
    )
    return manifest


def main() -> None:
    """Build and print what was built."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "datasets")
    options = parser.parse_args()
    print(json.dumps(build(ROOT / "datasets", options.out / "tables"), indent=2))


if __name__ == "__main__":
    main()
