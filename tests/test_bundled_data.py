"""Bundled data: the manifests are right, and the logs are built again on other kinds of
processor; the demo's policy is better than its log, and its truth is the policy's
value.

    python -m tests.test_bundled_data FOLDER        # what one setting of the processor is asked to do

Last bits depend on the processor (BLAS's sums, NumPy's exponentials, on ARM fused
multiply-adds); rounding would make such differences rare and large: what is built again
is compared within a tolerance.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from koffline import Transitions, open_transitions
from koffline.cli import cli
from koffline.policy_specs import load_policy
from scripts import build_demo, build_table

ROOT = Path(__file__).resolve().parents[1]
DATASETS = ROOT / "datasets"
TRUTH = json.loads((DATASETS / "cartpole_truth.json").read_text())
MANIFESTS = sorted(
    path.relative_to(DATASETS) for path in DATASETS.rglob("manifest.json")
)
# The other logs of control take a learner, MuJoCo or more seconds.
COMMANDS = {
    "uniform": ("puddle_world", "cart_pole", "mountain_car", "chain"),
    "control": ("cartpole_random", "cartpole_expert"),
}
# The processor least like this one says what the others would. NumPy's names of
# instruction sets are those before version 2.4 and since; what it does not know it
# passes over.
AVX512 = (
    "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL"
)
SSE = {
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": f"X86_V3 AVX2 FMA3 AVX {AVX512}",
}
# Observations and the table's probabilities are stored in single precision: two
# neighbours differ by 1.2e-7.
TOLERANCE = 1e-6


def rebuild(folder: Path) -> None:
    """The bundled logs that take seconds, laid out as the datasets are."""
    (folder / "policies").symlink_to(DATASETS / "policies")
    os.chdir(folder)  # the commands name paths as seen from there
    for kind, names in COMMANDS.items():
        entries = json.loads((DATASETS / kind / "manifest.json").read_text())
        Path(kind).mkdir()
        for name in names:
            cli(
                shlex.split(entries[f"{name}.hdf5"]["command"])[1:],
                standalone_mode=False,
            )
    build_table.build(DATASETS, folder / "tables")
    build_demo.build(folder, repeats=2)


def open_log(path: Path) -> Transitions:
    table = DATASETS / "tables" / "cartpole.yaml"
    return open_transitions(path, mapping=table if path.suffix == ".parquet" else None)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=str)
def test_the_manifests_are_right(manifest):
    folder = (DATASETS / manifest).parent
    entries = json.loads((DATASETS / manifest).read_text())
    named = [name for entry in entries.values() for name in entry["files"]]
    assert {
        path.name for path in (*folder.glob("*.hdf5"), *folder.glob("*.parquet"))
    } <= set(named)
    for entry in entries.values():
        for name, entry_of_file in entry["files"].items():
            content = (folder / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == entry_of_file["sha256"], name
            assert len(content) < 1_000_000
        log = open_log(folder / next(iter(entry["files"])))
        assert (len(log), log.n_episodes) == (entry["rows"], entry["episodes"])
        # where the reader takes logarithms of probabilities
        if manifest.parent.name != "tables":
            assert log.sha256 == entry["content_sha256"]


def test_the_logs_are_built_again_on_another_processor(tmp_path):
    command = [sys.executable, "-m", "tests.test_bundled_data", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | SSE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (
        sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("manifest.json"))
        == MANIFESTS
    )
    for manifest in MANIFESTS:
        bundled, built = (
            json.loads((top / manifest).read_text()) for top in (DATASETS, tmp_path)
        )
        for name, entry in built.items():
            for key in ("command", "rollouts", "seed", "seeds", "rows", "episodes"):
                assert entry.get(key) == bundled[name].get(key), (name, key)
            place = manifest.parent / next(iter(entry["files"]))
            assert_near(open_log(tmp_path / place), open_log(DATASETS / place))
    policy = f"{build_demo.NAME}_policy.npz"
    assert (tmp_path / policy).read_bytes() == (DATASETS / policy).read_bytes()


def assert_near(again: Transitions, log: Transitions) -> None:
    """Numbers to the tolerance, all else exactly.

    A drawn action would change where a random number falls between two cumulated
    probabilities that differ by 1e-13: for all rows together one chance in 10^8.
    """
    for column in ("actions", "terminated", "truncated", "episode_ids", "steps"):
        np.testing.assert_array_equal(
            getattr(again, column), getattr(log, column), err_msg=column
        )
    for column in (
        "observations",
        "next_observations",
        "rewards",
        "behavior_log_probabilities",
    ):
        np.testing.assert_allclose(
            getattr(again, column),
            getattr(log, column),
            rtol=TOLERANCE,
            atol=TOLERANCE,
            err_msg=column,
        )


@pytest.fixture(scope="module")
def demo():
    return open_transitions(DATASETS / "cartpole.hdf5")


def test_truth_is_reached_in_gymnasium_itself(demo):
    """The same policy stepped in Gymnasium's CartPole-v1, without its time limit: four
    standard errors.
    """
    policy = load_policy(
        DATASETS / TRUTH["policy"], demo.action_space, demo.observation_shape
    )
    generator = np.random.default_rng(0)
    copies = [gymnasium.make("CartPole-v1").unwrapped for _ in range(100)]
    observations = np.stack(
        [copy.reset(seed=seed)[0] for seed, copy in enumerate(copies)]
    )
    returns = np.zeros(100)
    running = np.ones(100, dtype=bool)
    for t in range(300):  # γ^300 / (1 − γ) = 0.12
        actions = policy.sample(observations, generator)
        for i in np.flatnonzero(running):
            observations[i], reward, terminated, _, _ = copies[i].step(int(actions[i]))
            returns[i] += TRUTH["gamma"] ** t * reward
            running[i] = not terminated
        if not running.any():
            break
    error = returns.std(ddof=1) / 10
    assert returns.mean() == pytest.approx(TRUTH["value"], abs=4 * error + 0.12)


def test_policy_is_clearly_better_than_the_log(demo):
    returns = demo.returns(TRUTH["gamma"])
    assert TRUTH["value"] > returns.mean() + 10 * returns.std() / np.sqrt(len(returns))


if __name__ == "__main__":
    rebuild(Path(sys.argv[1]))


def test_no_bundled_file_is_larger_than_a_megabyte() -> None:
    places = [DATASETS, ROOT / "docs", ROOT / "configs", ROOT / "koffline"]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert len(files) > 500
    large = [str(path) for path in files if path.stat().st_size > 1_000_000]
    assert not large
