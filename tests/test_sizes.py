"""Settings that ask for more memory than there is are refused before any is taken, in
one line.
"""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import koffline
from koffline.config import make_bellman_settings, make_settings
from koffline.data.transitions import Discrete, Transitions
from koffline.errors import ConfigError
from koffline.online.config import OnlineConfig
from koffline.online.run import train as train_online
from koffline.policies import ContinuousPolicy
from koffline.train.config import load_config, make_plan
from koffline.untrusted import limits
from tests.refusals import assert_refused, run_cli

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "kloss_dqn.yaml"
LOG = ROOT / "datasets" / "cartpole.hdf5"
POLICY = ROOT / "datasets" / "cartpole_policy.npz"
MEMORY = 4 * 10**9  # of the machine that the tests pretend to be


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "machine_memory", lambda: MEMORY)


def peak() -> int:
    """Largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


EVALUATION: list[dict[str, Any]] = [
    {"full_replicas": 1_000_000},
    {"full_replicas": 10**18},
    {"full_replicas": 10_000, "hidden_units": [1024, 1024]},
    {"resampled_replicas": 10_001},
    {"resampled_replicas": 10_000, "hidden_units": [512, 512]},
    {"hidden_units": [65_537]},
    {"hidden_units": [10**9]},
    {"hidden_units": [65_536, 65_536]},
    {"hidden_units": [8] * 65},
    {"batch_size": 10**12},
    {"steps": 10**9},
    {"steps": 10**8, "resampled_replicas": 1000},
    {"instruments": 10**6},
    {"features": 10**6},
    {"action_draws": 10**9},
    {"history": 1000},
    {"threads": 10**6},
    {"seed": 2**31},
]


@pytest.mark.parametrize("settings", EVALUATION, ids=str)
def test_sizes_of_an_evaluation(settings: dict[str, Any]) -> None:
    before = peak()
    with pytest.raises(ConfigError) as caught:
        make_settings({"gamma": 0.9}, settings)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert next(iter(settings)) in message
    assert peak() - before < 10**7


@pytest.mark.parametrize("command", ["evaluate", "select", "diagnose"])
def test_commands_refuse_before_they_read(command: str, tmp_path: Path) -> None:
    """The file is no log; a command that had read it would say so."""
    (tmp_path / "log.hdf5").write_bytes(b"no log")
    rest = {
        "evaluate": ("--policy", "uniform"),
        "select": ("--policies", "uniform", POLICY),
        "diagnose": ("--policy", "uniform", "--model", "fqe"),
    }[command]
    options = ("--gamma", 0.9, "--set", "full_replicas=1000000")
    assert_refused(
        run_cli(command, tmp_path / "log.hdf5", *rest, *options),
        "full_replicas is 1000000",
    )


def test_sizes_that_depend_on_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = koffline.open_transitions(LOG)
    monkeypatch.setattr(limits, "machine_memory", lambda: MEMORY // 4)
    with pytest.raises(
        ConfigError, match=r"resampled_replicas 10000.*that takes at least"
    ):
        koffline.evaluate(
            log, POLICY, 0.98, resampled_replicas=10_000, hidden_units=[1, 1]
        )
    with pytest.raises(ConfigError, match="batch_size 10000"):
        koffline.evaluate(
            log,
            POLICY,
            0.98,
            batch_size=10_000,
            hidden_units=[8192],
            resampled_replicas=20,
        )


def test_draws_of_actions_that_depend_on_the_log() -> None:
    rows = 2000
    log = Transitions(
        observations=np.zeros((rows, 30)),
        next_observations=np.ones((rows, 30)),
        actions=np.linspace(-1.0, 1.0, rows)[:, None],
        rewards=np.arange(float(rows)),
        terminated=np.ones(rows, bool),
        truncated=np.zeros(rows, bool),
        action_space=koffline.Continuous(1),
    )
    policy = ContinuousPolicy(
        1, None, lambda states, generator: generator.normal(size=(len(states), 1))
    )
    with pytest.raises(
        ConfigError,
        match="action_draws is 50000, and the log has 2000 rows of 31 numbers",
    ):
        koffline.evaluate(log, policy, 0.9, action_draws=50_000)


@pytest.mark.parametrize(
    "options",
    [
        {"draws": 10**9},
        {"features": 10**8},
        {"draws": 10**7, "features": 1000},
        {"action_draws": 10**9},
    ],
    ids=str,
)
def test_sizes_of_a_bellman_test(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_bellman_settings(gamma=0.9, **options)


@pytest.mark.parametrize(
    ("rows", "draws", "words"),
    [(500, 10**6, "exact kernel"), (4000, 10**6, "features")],
)
def test_draws_of_a_bellman_test_that_depend_on_the_log(
    rows: int, draws: int, words: str
) -> None:
    log = Transitions(
        observations=np.linspace(0.0, 1.0, rows)[:, None],
        next_observations=np.linspace(0.1, 1.1, rows)[:, None],
        actions=np.arange(rows) % 2,
        rewards=np.arange(rows) % 3.0,
        terminated=np.arange(rows) % 5 == 0,
        truncated=np.zeros(rows, bool),
        action_space=Discrete(2),
    )
    with pytest.raises(ConfigError, match=f"draws is {draws}.*{words}"):
        koffline.bellman_test(
            lambda states, actions: 0.0 * states[:, 0], log, "uniform", 0.9, draws=draws
        )


HUGE = (
    "algo.params.encoder_factory={type: vector, params: {hidden_units: [100000,"
    " 100000]}}"
)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("algo.params.batch_size=1000000000", "batch_size is 1000000000"),
        ("algo.params.n_critics=1000000", "1000000 critics"),
        (HUGE, "[100000, 100000]"),
        ("train.threads=100000", "threads"),
        ("evaluators.environment.episodes=1000000", "episodes"),
    ],
)
def test_sizes_of_a_training(assignment: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, [assignment])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("grid", "seeds"),
    [
        ([], 10**12),
        (["algo.params.batch_size=32,1000000000"], 1),
        (["train.n_steps=1,2"], 10**6),
    ],
)
def test_sizes_of_a_sweep(grid: list[str], seeds: int) -> None:
    with pytest.raises(ConfigError, match=r"batch_size is 1000000000|runs"):
        make_plan(CONFIG, grid, seeds)


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": 10**9},
        {"capacity": 10**6, "path_length": 10_000},
        {"hidden": [65_536, 65_536]},
        {"hidden": [8] * 65},
        {
            "batch_size": 100_000,
            "capacity": 200_000,
            "path_length": 1000,
            "windows_per_path": 0,
        },
        {"num_envs": 10**6},
        {"evaluation_episodes": 10**9},
        {"window_length": 10**9},
    ],
    ids=str,
)
def test_sizes_of_an_online_run(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        OnlineConfig("Pendulum-v1", **settings)


@pytest.mark.parametrize("count", [10_001, 10**6, 10**15])
def test_seeds_of_an_online_run(count: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"seed_count is {count}"):
        train_online(OnlineConfig("Pendulum-v1"), tmp_path / "run", count)
    assert not (tmp_path / "run").exists()


def test_seeds_of_an_online_run_share_one_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seeds 9000"):
        train_online(OnlineConfig("Pendulum-v1"), tmp_path / "run", 9000)
    assert not (tmp_path / "run").exists()


def test_the_defaults_and_the_papers_settings_fit() -> None:
    make_settings({"gamma": 0.9})
    make_bellman_settings(gamma=0.9)
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        load_config(path, ["data.source=log.hdf5"])
