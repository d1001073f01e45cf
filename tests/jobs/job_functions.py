"""Jobs that tests send to other processes."""

import os
import signal
import sys
import time
from pathlib import Path

from koffline.errors import DataError


def write(path: Path, text: str) -> None:
    path.write_text(text)


def write_surroundings(path: Path, number: int) -> None:
    """The process and its threads."""
    import torch

    path.write_text(f"{number} {os.getpid()} {torch.get_num_threads()}")


def refuse(path: Path) -> None:
    raise DataError("the log is empty; record one")


def stumble(path: Path) -> None:
    raise ZeroDivisionError("by zero")


def forget(path: Path) -> None:
    """Write nothing."""


def die(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_pid_and_wait(path: Path, folder: str) -> None:
    (Path(folder) / f"{path.name}.pid").write_text(str(os.getpid()))
    time.sleep(600)


def main() -> None:
    """A driver for the tests of interrupts: one job that ends, two that do not."""
    from koffline.jobs import Job, run_jobs

    folder = Path(sys.argv[1])
    jobs = [Job("short", write, ("done",), folder / "short")]
    jobs += [Job(f"long{i}", write_pid_and_wait, (str(folder),), folder / f"long{i}") for i in range(2)]
    try:
        run_jobs(jobs, workers=2)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
