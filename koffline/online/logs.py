"""What a run writes while it trains: a CSV of evaluations and one of metrics per seed, and TensorBoard's."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from os import fsync
from pathlib import Path
from typing import Any

from koffline.errors import ConfigError
from koffline.online.environments import Evaluation
from koffline.online.folder import group_name, seed_folder

EVALUATION, METRICS = "evaluation.csv", "metrics.csv"
EVALUATION_HEADER = "step,return,length,sampled_return"
_TIMING_HEADER = "step,seconds,steps_per_second,environment,acting,learning,evaluation"


class RunLogs:
    """The logs of one stack, opened for every row: what is written is on the disk.

    Files: seed_<k>/evaluation.csv, seed_<k>/metrics.csv and, for what differs from one day to the next,
    timing_seeds_<a>-<b>.csv (seconds, environment steps per second over all seeds, seconds of each part).
    """

    def __init__(self, out: Path, seeds: Sequence[int], tensorboard: bool) -> None:
        self._out, self._seeds = out, tuple(seeds)
        self.timing = out / f"timing_{group_name(seeds)}.csv"
        if tensorboard:
            check_tensorboard()
        self._boards: list[Any] | None = [] if tensorboard else None
        for seed in seeds:
            seed_folder(out, seed).mkdir(exist_ok=True)

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything that is cut back when a run goes on."""
        folders = [seed_folder(self._out, seed) for seed in self._seeds]
        return (*(folder / name for folder in folders for name in (EVALUATION, METRICS)), self.timing)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file that is there, by its path in the run's folder."""
        there = [path for path in self.files if path.exists()]
        return {path.relative_to(self._out).as_posix(): path.stat().st_size for path in there}

    def cut_back(self, sizes: Mapping[str, int], step: int) -> None:
        """Remove what was written after a checkpoint at ``step``.

        Raises ConfigError for a file that lost rows.
        """
        for path in self.files:
            size = sizes.get(path.relative_to(self._out).as_posix(), 0)
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise ConfigError(
                    f"{path} is shorter than its checkpoint says: it was edited; train again elsewhere"
                )
            if found > size:
                os.truncate(path, size)
            if found and not size:
                path.unlink()
        self._open_boards(step)

    def write_evaluation(self, place: int, evaluation: Evaluation) -> None:
        """A row of seed number ``place``."""
        numbers = {
            "return": evaluation.mean_return,
            "length": evaluation.length,
            "sampled_return": evaluation.sampled_return,
        }
        path = seed_folder(self._out, self._seeds[place]) / EVALUATION
        _append(path, EVALUATION_HEADER, [evaluation.step, *map(_short, numbers.values())])
        self._write_board(place, evaluation.step, {f"evaluation/{k}": v for k, v in numbers.items()})

    def write_metrics(self, place: int, step: int, metrics: Mapping[str, float]) -> None:
        """A row of seed number ``place``; the first one decides the columns, NaN is not measured."""
        if not metrics:
            return
        path = seed_folder(self._out, self._seeds[place]) / METRICS
        header = _header(path) or ",".join(["step", *metrics])
        row = [metrics.get(name, math.nan) for name in header.split(",")[1:]]
        _append(path, header, [step, *map(_short, row)])
        self._write_board(place, step, {f"training/{k}": v for k, v in metrics.items()})

    def write_timing(self, step: int, seconds: float, parts: Mapping[str, float], speed: float) -> None:
        """One row for the stack."""
        names = _TIMING_HEADER.split(",")[3:]
        _append(
            self.timing, _TIMING_HEADER, [step, f"{seconds:.3f}", f"{speed:.1f}"]
            + [f"{parts.get(name, 0.0):.3f}" for name in names],
        )  # fmt: skip
        for place in range(len(self._seeds)):
            self._write_board(place, step, {"training/steps_per_second": speed})

    def close(self) -> None:
        """Close what TensorBoard holds open."""
        for board in self._boards or ():
            board.close()

    def _open_boards(self, step: int) -> None:
        if self._boards is None:
            return
        from tensorboardX import SummaryWriter

        folder = self._out / "tensorboard"
        for seed in self._seeds:  # events after the checkpoint are marked as void
            place = str(folder / f"seed_{seed}")
            self._boards.append(SummaryWriter(place, purge_step=step + 1 if step else None))

    def _write_board(self, place: int, step: int, numbers: Mapping[str, float]) -> None:
        if self._boards:
            for name, value in numbers.items():
                self._boards[place].add_scalar(name, value, step)


def check_tensorboard() -> None:
    """Raise ConfigError where the extra is missing."""
    if find_spec("tensorboardX") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboardX; install it with "
            "pip install 'koffline[tensorboard]'"
        )


def read_rows(path: Path) -> list[list[float]]:
    """The rows of a CSV without its header; none where there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [[float(cell) for cell in line.split(",")] for line in lines]


def _append(path: Path, header: str, row: Sequence[Any]) -> None:
    """Raises ConfigError where the disk refuses; half a row is cut off when the run goes on."""
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            if file.tell() == 0:
                file.write(header + "\n")
            file.write(",".join(map(str, row)) + "\n")
            file.flush()
            fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); free the disk, then --resume"
        ) from error


def _header(path: Path) -> str | None:
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as file:
        return file.readline().rstrip("\n") or None


def _short(value: float) -> str:
    """All digits that count."""
    return repr(float(value))
