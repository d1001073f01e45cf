"""Small configs and logs for the tests of koffline.train."""

from pathlib import Path
from typing import Any

import pytest

import koffline.train.run
from koffline import Transitions
from koffline.algos.options import resolve_params
from koffline.algos.training import EVALUATORS
from koffline.data.sources import write_transitions
from koffline.train.run import train
from tests.algos import makers
from tests.interrupts import Hit


def make_log(
    discrete: bool = True, episodes: int = 6, length: int = 8, seed: int = 0
) -> Transitions:
    return makers.make_log(discrete, episodes * length, length, seed, columns=3, k=2)


def write_log(folder: Path, discrete: bool = True, **options: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"log_{'discrete' if discrete else 'continuous'}.hdf5"
    write_transitions(make_log(discrete, **options), path, force=True)
    return str(path)


def is_discrete(kind: str) -> bool:
    return "discrete" in kind or kind in ("dqn", "double_dqn", "nfq", "kloss_dqn")


def make_config(source: str, kind: str = "dqn", **train: Any) -> dict[str, Any]:
    """Three epochs of a tiny network, the last one shorter; two metrics."""
    params: dict[str, Any] = {}
    for name in resolve_params(kind, {}):
        if name.endswith("encoder_factory"):
            params[name] = {"type": "vector", "params": {"hidden_units": [8]}}
        if name == "batch_size":
            params[name] = 8
        if name in ("target_update_interval", "warmup_steps", "rl_start_step"):
            # in the middle of an epoch
            params[name] = 7 if name.startswith("target") else 22
        if name == "observation_scaler":
            params[name] = {"type": "standard"}
    has_values = kind not in ("bc", "discrete_bc", *EVALUATORS)
    return {
        "data": {"source": source},
        "algo": {"type": kind, "params": params},
        "train": {"n_steps": 25, "n_steps_per_epoch": 10, **train},
        "evaluators": {"td_error": {}, "average_value": {}} if has_values else {},
    }


def metric_files(folder: Path) -> dict[str, bytes]:
    """Everything logged but the clock."""
    return {
        p.name: p.read_bytes()
        for p in folder.glob("*.csv")
        if not p.name.startswith("time_")
    }


def check_equal(left: Path, right: Path) -> None:
    """Two folders of one run: metrics, models, nothing half-written."""
    assert metric_files(left) == metric_files(right)
    models = sorted(path.name for path in left.glob("*.d3"))
    assert models == sorted(path.name for path in right.glob("*.d3"))
    for name in models:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    assert not list(right.glob(".*.tmp"))


def check_killed_run(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends before its second checkpoint and goes on equals one that does not
    end.
    """
    whole = train(config, tmp_path / "whole").out
    save = koffline.train.run.save_state

    def save_once(folder, fingerprint, parts, progress):
        if progress.epochs == 2:
            raise Hit
        save(folder, fingerprint, parts, progress)

    with monkeypatch.context() as patch:
        patch.setattr(koffline.train.run, "save_state", save_once)
        with pytest.raises(Hit):
            train(config, tmp_path / "hit")
    train(config, tmp_path / "hit", resume=True)
    check_equal(whole, tmp_path / "hit")
