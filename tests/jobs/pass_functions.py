"""Calls of passes that tests send to other processes and machines."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import DataError, KofflineError


class RareError(KofflineError):
    """A kind of its own, as modules define them."""


def double(shared: Any, item: int) -> int:
    return 2 * item


def slow_first(shared: Any, item: int) -> int:
    """The first item ends last."""
    time.sleep(0.3 if item == 0 else 0.0)
    return item


def slow_later(shared: Any, item: int) -> int:
    """All but the first items would take ten minutes."""
    time.sleep(600.0 if item else 0.0)
    return item


def sums(shared: np.ndarray, item: int) -> np.ndarray:
    """float64 sums of a part of the rows: their last bits tell the order in which they were added."""
    part = np.array_split(shared, 5)[item]
    return part.T @ part


def surroundings(shared: Any, item: int) -> tuple[int, str]:
    """The process and the threads that it is allowed."""
    time.sleep(0.1)
    return os.getpid(), os.environ["OMP_NUM_THREADS"]


def refuse_third(kind: str, item: int) -> int:
    if item == 2:
        raise {"data": DataError("the shard is damaged; copy it again"), "rare": RareError("odd; mend it")}[
            kind
        ]
    return item


def stumble(shared: Any, item: int) -> float:
    return 1 / (item - 1)


@dataclass(frozen=True)
class Deaths:
    """How often workers die over item 1: each leaves a file in ``folder`` before."""

    folder: Path
    times: int


def die(deaths: Deaths, item: int) -> int:
    if item == 1 and (number := len(list(deaths.folder.iterdir()))) < deaths.times:
        (deaths.folder / str(number)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def slowly(shared: Any, item: int) -> tuple[int, str]:
    """Long enough to be lost in the middle; the machine."""
    import ray

    time.sleep(1.0)
    return item, ray.get_runtime_context().get_node_id()
