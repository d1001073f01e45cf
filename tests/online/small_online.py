"""Small configs, and what of two runs must be equal, for the tests of koffline
online.
"""

import csv
from pathlib import Path
from typing import Any

from koffline.data.sources import open_transitions

SMALL = {
    "env": "CartPole-v1",
    "steps": 400,
    "batch_size": 8,
    "learning_starts": 8,
    "hidden": [8],
    "evaluation_interval": 100,
    "evaluation_episodes": 1,
    "checkpoint_interval": 150,
    "capacity": 30,
}


def small(**changes: Any) -> dict[str, Any]:
    """A run of 40 iterations; checkpoints between evaluations, a replay that
    overflows.
    """
    return {**SMALL, **changes}


def check_equal(left: Path, right: Path) -> None:
    """Logs, models and replays of two runs are the same, and nothing half-written is
    left.
    """
    logs = [
        {path.relative_to(out): path.read_bytes() for path in out.glob("seed_*/*.csv")}
        for out in (left, right)  # everything logged but the clock
    ]
    assert logs[0]
    assert logs[0] == logs[1]
    models = sorted(path.relative_to(left) for path in left.glob("seed_*/model.d3"))
    assert models
    for model in models:
        assert (left / model).read_bytes() == (right / model).read_bytes(), model
        replay = model.with_name("replay.hdf5")
        assert (
            open_transitions(left / replay).sha256
            == open_transitions(right / replay).sha256
        )
    assert [
        path.name for path in right.rglob("*") if path.name.endswith((".tmp", ".part"))
    ] == []


def rows(path: Path) -> list[dict[str, str]]:
    """A CSV by its header."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
