"""An evaluation on several cores gives every digit of one on a single core."""

import os
import signal
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import koffline
from koffline import fitting
from koffline.config import make_settings
from koffline.jobs import cores as module
from koffline.ope.assumptions import markov
from koffline.ope.log import coverage
from koffline.ope.networks import equations, last_layer, resampling
from tests.ope.problems import NOISY, SOFT, continuous_log, discrete_log
from tests.refusals import run_cli

SHORT = {
    "steps": 30,
    "full_replicas": 2,
    "resampled_replicas": 3,
    "hidden_units": (32, 32),
    "instruments": 100,
}
ROWS = 300
WEIGHTS = np.linspace(0.5, 2.0, ROWS)
divide = module.on_cores
needs_forks = pytest.mark.skipif(
    not module.can_fork(), reason="pieces are sent to workers here"
)


def one_step_log() -> koffline.Transitions:
    return discrete_log(
        ROWS,
        terminated=np.ones(ROWS, dtype=bool),
        truncated=np.zeros(ROWS, dtype=bool),
        episode_ids=np.arange(ROWS),
        steps=None,
    )


LOGS = {
    "dense": (lambda: discrete_log(ROWS), SOFT),
    "weighted": (lambda: discrete_log(ROWS, weights=WEIGHTS), SOFT),
    "clusters": (lambda: discrete_log(ROWS, clusters=np.arange(ROWS) // 30), SOFT),
    "one step": (one_step_log, SOFT),
    "continuous": (continuous_log, NOISY),
}


@dataclass
class Counted:
    """`on_cores` of a module, and in how many pieces it computed several items."""

    pieces: list[int]

    def __call__(self, call: Any, count: int, **options: Any) -> list[Any]:
        results = divide(call, count, **options)
        if count > 1:
            self.pieces.append(len(results))
        return results


@pytest.fixture
def counted(monkeypatch) -> Counted:
    """Everything that can be divided is, however short, and is counted."""
    monkeypatch.setattr(module, "_WORTH_IF_CHOSEN", 0.0)
    monkeypatch.setattr(module, "_FORK_SECONDS", 1e-12)
    monkeypatch.setattr(markov, "_FEATURES", 20)
    monkeypatch.setattr(resampling, "_MOST_ROWS", 80)  # of a block: several blocks
    monkeypatch.setattr(coverage, "_AT_ONCE", 8)
    calls = Counted([])
    for user in (module, fitting, last_layer, equations):
        monkeypatch.setattr(user, "on_cores", calls)
    return calls


def everything_of(log, policy, **options: Any) -> tuple[Any, ...]:
    """All numbers of an evaluation, as text where they may be NaN, and its progress."""
    lines = []
    estimate = koffline.evaluate(
        log, policy, 0.9, progress=lambda *line: lines.append(line), **SHORT, **options
    )
    evidence = estimate.evidence
    assert evidence is not None
    arrays = (
        evidence.replica_values,
        evidence.residuals,
        evidence.initial_values,
    )
    numbers = (
        estimate.value,
        estimate.interval,
        estimate.uplift,
        estimate.diagnostics,
        estimate.settings,
        estimate.verdict,
    )
    return (repr(numbers), *[array.tobytes() for array in arrays], lines)


@pytest.mark.parametrize("kind", LOGS)
def test_any_number_of_cores_gives_the_same_digits(kind, counted) -> None:
    make, policy = LOGS[kind]
    log = make()
    expected = everything_of(log, policy, cores=1)
    assert set(counted.pieces) == {1}
    for count in (2, 3):
        counted.pieces.clear()
        assert everything_of(log, policy, cores=count) == expected
        # products of a network on fifty rows are too small to stand alone
        assert {count}.issuperset(counted.pieces) or kind == "continuous"


@needs_forks
def test_a_killed_process_changes_no_digit(counted, tmp_path, monkeypatch) -> None:
    log = discrete_log(ROWS)
    expected = everything_of(log, SOFT, cores=1)
    main_process = os.getpid()
    first_try = tmp_path / "first"

    def die_once() -> None:
        if os.getpid() != main_process and not first_try.exists():
            first_try.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    tell_means = fitting._tell_means

    def tell_and_die(tell: Any, done: int, means: Any) -> None:
        tell_means(tell, done, means)
        die_once()

    monkeypatch.setattr(fitting, "_tell_means", tell_and_die)
    assert everything_of(log, SOFT, cores=2) == expected
    assert first_try.exists()


def test_workers_that_share_no_memory_give_the_same_digits(monkeypatch) -> None:
    """As on systems whose processes cannot be forked."""
    log = discrete_log(ROWS)
    *expected, _ = everything_of(log, SOFT, cores=1)
    monkeypatch.setattr(module, "can_fork", lambda: False)
    *numbers, lines = everything_of(log, SOFT, cores=2)
    assert numbers == expected
    assert lines[-1] == (SHORT["steps"], SHORT["steps"], "solving last layers")


def test_by_default_one_core_computes_under_continuous_integration(
    counted, monkeypatch
) -> None:
    log = discrete_log(ROWS)
    monkeypatch.setattr(module, "_WORTH_A_FORK", 0.0)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "_busy_cores", lambda: 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    expected = everything_of(log, SOFT, cores=1)
    for environment, pieces in (("true", 1), ("", 2)):
        monkeypatch.setenv("CI", environment)
        counted.pieces.clear()
        assert everything_of(log, SOFT) == expected
        assert set(counted.pieces) == {pieces}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"cores": "auto"}, None),
        ({"cores": 3}, 3),
        ({"cores": "3"}, 3),
        ({"threads": 1}, None),
        ({"threads": 2}, 2),  # the older name
        ({"threads": 2, "cores": 4}, 4),
    ],
)
def test_settings_of_cores(settings, expected) -> None:
    complete = make_settings({"gamma": 0.9}, settings)
    assert complete.chosen_cores == expected


@pytest.mark.parametrize(
    ("typed", "notes"),
    [
        (["--cores=2"], []),
        (["--cores=auto"], []),
        (["--threads=2"], ["--threads is an older name of --cores; write --cores 2"]),
        (["--workers=2"], ["--workers is an older name of --cores; write --cores 2"]),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "select", "diagnose"])
def test_options_of_cores(command, typed, notes, tmp_path) -> None:
    log = tmp_path / "log.npz"
    koffline.write_transitions(discrete_log(120), log)
    words = {
        "evaluate": ["--policy=uniform"],
        "select": ["--policies", "uniform", "epsilon:0.5:uniform"],
        "diagnose": ["--policy=uniform", "--model=fqe"],
    }
    done = run_cli(
        *[command, log, *words[command], "--gamma=0.9", "--set=steps=20"],
        *["--set=full_replicas=1", "--set=resampled_replicas=2", "--json", *typed],
    )
    assert done.exit_code == 0, done.stderr
    shown = [line for line in done.stderr.splitlines() if line.startswith("note: --")]
    assert shown == [f"note: {note}" for note in notes]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--cores=0", "'0' is no number of cores; give 1, 2 … or auto"),
        ("--cores=all", "'all' is no number of cores; give 1, 2 … or auto"),
        ("--cores=100000", "cores is 100000: input should be less than or equal to"),
        ("--set=cores=0", "cores is 0: input should be greater than or equal to 1"),
    ],
)
def test_wrong_numbers_of_cores_are_refused(typed, message, tmp_path) -> None:
    log = tmp_path / "log.npz"
    koffline.write_transitions(discrete_log(40), log)
    done = run_cli("evaluate", log, "--policy=uniform", "--gamma=0.9", typed)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
