"""Small sweeps for the tests of koffline sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.train.small_runs import make_config, metric_files, read_model, same, write_log

RATE = "algo.params.learning_rate"
GRID = f"{RATE}=0.001,0.01"


def write_config(folder: Path, kind: str = "dqn", **train: Any) -> str:
    """A config file of a tiny algorithm over a log beside it."""
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(make_config(write_log(folder), kind, **train)))
    return str(path)


def run_folders(out: Path) -> list[Path]:
    return sorted(path for path in (out / "runs").iterdir() if path.is_dir())


def same_runs(left: Path, right: Path) -> bool:
    """Whether two sweeps have the same runs, to the bit: metrics, weights, optimisers."""
    lefts, rights = run_folders(left), run_folders(right)
    return [path.name for path in lefts] == [path.name for path in rights] and all(
        metric_files(one) == metric_files(other) and same(last_model(one), last_model(other))
        for one, other in zip(lefts, rights, strict=True)
    )


def last_model(folder: Path) -> Any:
    return read_model(max(folder.glob("model_*.d3"), key=lambda path: int(path.stem.removeprefix("model_"))))
