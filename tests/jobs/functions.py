"""Jobs and calls of passes that tests send to other processes and machines."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from koffline.errors import DataError, KofflineError
from koffline.jobs import Job, run_jobs


def write(path: Path, text: str) -> None:
    path.write_text(text)


def write_surroundings(path: Path, number: int) -> None:
    """The process and its threads."""
    import torch

    path.write_text(f"{number} {os.getpid()} {torch.get_num_threads()}")


def refuse(path: Path) -> None:
    raise DataError("the log is empty; record one")


def stumble(shared: Any, item: Any = 1) -> float:
    return 1 / (item - 1)


def forget(path: Path) -> None:
    """Write nothing."""


def perish(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_pid_and_wait(path: Path, folder: str) -> None:
    (Path(folder) / f"{path.name}.pid").write_text(str(os.getpid()))
    time.sleep(600)


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
    """float64 sums of a part of the rows: their last bits tell the order in which they
    were added.
    """
    part = np.array_split(shared, 5)[item]
    return part.T @ part


def surroundings(shared: Any, item: int) -> tuple[int, str]:
    """The process and the threads that it is allowed."""
    time.sleep(0.1)
    return os.getpid(), os.environ["OMP_NUM_THREADS"]


def refuse_third(kind: str, item: int) -> int:
    if item == 2:
        raise (
            DataError("the shard is damaged; copy it again")
            if kind == "data"
            else RareError("odd; mend it")
        )
    return item


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
    """Long enough to be lost in the middle."""
    import ray

    time.sleep(1.0)
    return item, ray.get_runtime_context().get_node_id()


def main() -> None:
    """A driver for the tests of interrupts: one job that ends, two that do not."""
    folder = Path(sys.argv[1])
    jobs = [Job("short", write, ("done",), folder / "short")]
    jobs += [
        Job(f"long{i}", write_pid_and_wait, (str(folder),), folder / f"long{i}")
        for i in range(2)
    ]
    try:
        run_jobs(jobs, workers=2)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
