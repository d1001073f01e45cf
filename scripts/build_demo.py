"""Build the bundled demo: a CartPole log, the policy to evaluate, its true value, and
the manifest.

    python scripts/build_demo.py [--out datasets]

The log: CartPole-v1 (Gymnasium's dynamics), episodes cut after 100 steps, actions of a
controller that is overruled by a coin four times out of ten. The policy: another linear
controller with a softmax. States are rounded to single precision after every step, so
that neither the log nor the truth depends on the last bit of a processor's cosine. The
bytes of a file are those of the HDF5 version that wrote it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from koffline.data.flat import write_hdf5
from koffline.data.transitions import Discrete, Metadata, Transitions
from koffline.envs.boxes import Outcome
from koffline.policies import DiscretePolicy, save_mlp_policy
from koffline.policy_specs import load_policy
from scripts.bench.classic import CartPole
from scripts.bench.controllers import LinearSoftmax, Mixed
from scripts.bench.rollouts import (
    EpisodeLog,
    as_transitions,
    log_episodes,
    monte_carlo_value,
)

NAME = "cartpole"
GAMMA = 0.98
N_ROWS = 10_000
TIME_LIMIT = 100
LOG_SEED = 20190533
TRUTH_SEED = 20190534
# log-odds of pushing right, per unit of position, velocity, angle and angular velocity
BEHAVIOR = Mixed(0.4, LinearSoftmax((0.2, 0.4, 6.0, 2.0)))
TARGET_WEIGHTS = (0.18, 0.3, 6.0, 1.5)


@dataclass(frozen=True)
class SinglePrecision(CartPole):
    """CartPole whose state is rounded to float32 after every step."""

    def step(
        self, state: np.ndarray, action: np.ndarray, generator: np.random.Generator
    ) -> Outcome:
        following, reward, terminated = super().step(state, action, generator)
        return Outcome(
            following.astype(np.float32).astype(np.float64), reward, terminated
        )


def build_log() -> tuple[EpisodeLog, Transitions]:
    """The log as written by the behaviour policy, and as a record with its
    probabilities.
    """
    world = SinglePrecision()
    log = log_episodes(
        world, BEHAVIOR, N_ROWS, TIME_LIMIT, np.random.default_rng(LOG_SEED)
    )
    taken = BEHAVIOR(log.observations)[np.arange(len(log)), log.actions]
    metadata = Metadata(
        gamma=GAMMA,
        extra={
            "task": "CartPole-v1",
            "time_limit": TIME_LIMIT,
            "made_by": "scripts/build_demo.py",
        },
    )
    record = as_transitions(log, world, metadata=metadata)
    return log, record.replace(
        behavior_log_probabilities=np.log(taken).astype(np.float32)
    )


def build_policy(path: Path) -> DiscretePolicy:
    """Write the target policy and read it back the way a user does."""
    half = np.asarray(TARGET_WEIGHTS)[:, None] / 2.0
    save_mlp_policy(path, [(np.hstack([-half, half]), np.zeros(2))], output="softmax")
    policy = load_policy(path, Discrete(2), (4,))
    assert isinstance(policy, DiscretePolicy)
    return policy


def find_truth(log: EpisodeLog, policy: DiscretePolicy, repeats: int) -> dict[str, Any]:
    """The policy's value from the log's own start states, by rollouts without a time
    limit.
    """
    generator = np.random.default_rng(TRUTH_SEED)
    world = SinglePrecision()
    value = monte_carlo_value(
        world, policy.probabilities, GAMMA, log.start_states, generator, repeats=repeats
    )
    return {
        "value": round(value.value, 4),
        "standard_error": round(value.error_given_starts, 4),
        "gamma": GAMMA,
        "policy": f"{NAME}_policy.npz",
        "data": f"{NAME}.hdf5",
        "how": (
            f"mean discounted return of {value.n_rollouts} Monte-Carlo rollouts of the"
            f" policy, {repeats} from each of the log's {len(log.start_states)} start"
            f" states, without a time limit (cut after {value.horizon} steps, where"
            " gamma^t < 1e-5)"
        ),
        "n_rollouts": value.n_rollouts,
        "horizon": value.horizon,
        "seed": TRUTH_SEED,
    }


def build(folder: Path, repeats: int = 1000) -> dict[str, Any]:
    """Write the four files into the folder and return the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    log, record = build_log()
    write_hdf5(record, folder / f"{NAME}.hdf5", force=True)
    policy = build_policy(folder / f"{NAME}_policy.npz")
    truth = find_truth(log, policy, repeats)
    _write_json(folder / f"{NAME}_truth.json", truth)
    manifest = {
        NAME: {
            "command": "python scripts/build_demo.py",
            "seeds": {"log": LOG_SEED, "truth": TRUTH_SEED},
            "rows": len(record),
            "episodes": record.n_episodes,
            "content_sha256": record.sha256,
            "made_with": {
                "h5py": h5py.version.version,
                "hdf5": h5py.version.hdf5_version,
            },
            "files": {
                name: {
                    "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()
                }
                for name in (f"{NAME}.hdf5", f"{NAME}_policy.npz", f"{NAME}_truth.json")
            },
        }
    }
    _write_json(folder / "manifest.json", manifest)
    return manifest


def main() -> None:
    """Build and print what was built."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parents[1] / "datasets"
    )
    options = parser.parse_args()
    print(json.dumps(build(options.out), indent=2))
    print((options.out / f"{NAME}_truth.json").read_text())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
