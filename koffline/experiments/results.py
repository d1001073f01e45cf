"""What an experiment leaves behind: final numbers as JSON, curves as HDF5; both whole or not at all.

``NAME.json`` holds the records below, ``NAME.curves.h5`` one group per world and method.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from koffline.data.hdf5 import new_hdf5
from koffline.errors import ConfigError
from koffline.store.files import atomic_file
from koffline.store.run_record import FILE, StartedRun
from koffline.untrusted.arrays import read_arrays

VERSION = 1
HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
Record = TypeVar("Record")


@dataclass(frozen=True)
class Row:
    """One number and its interval: a method at a learning rate on a world, against one of the two truths.

    Errors are mean squares in native reward units; None where a seed diverged or nothing was measured.
    diverged: how many seeds; diverged_at: their steps, None for the others. best_*: whether this learning
    rate is the best of the method's by the truth of the row, and by the held-out kernel loss.
    """

    world: str
    method: str
    learning_rate: float
    seeds: int
    truth: str
    mse: float | None
    mse_low: float | None
    mse_high: float | None
    bellman_error: float | None
    bellman_error_low: float | None = None
    bellman_error_high: float | None = None
    diverged: int = 0
    diverged_at: tuple[int | None, ...] = ()
    best_by_truth: bool = False
    best_without_truth: bool = False
    held_out_loss: float | None = None
    value_variance: float | None = None
    epochs: int | None = None
    weight_error: float | None = None
    weight_error_low: float | None = None
    weight_error_high: float | None = None
    group: str | None = None  # of an ablation
    variant: str | None = None

    @property
    def variant_name(self) -> str:
        """The variant without the method that groups of several methods put behind it."""
        return (self.variant or "").removesuffix(f" {self.method}")

    @property
    def shares(self) -> list[float | None]:
        """The error and the ends of its interval over the variance of V; None where they are not finite."""
        return [
            end / self.value_variance
            if end is not None and math.isfinite(end) and self.value_variance
            else None
            for end in (self.mse, self.mse_low, self.mse_high)
        ]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of a loss with an error along training, and its interval over seeds.

    networks: "own" are those that the method trained by this loss passed through, "both" K-loss's and RG's.
    """

    world: str
    loss: str  # "kloss" or "l2"
    error: str  # "mse" or "bellman_error"
    networks: str
    spearman: float
    low: float
    high: float
    points: int


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper beside our measurement. verdict: holds, does not hold, undecided."""

    sentence: str
    where: str
    world: str
    measured: str
    value: float | None
    low: float | None
    high: float | None
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class ReturnRow:
    """A critic inside Trust-PCL on an environment: interquartile means over seeds with bootstrap intervals.

    final: return of the mean action at the end; sampled: that of the sampled policy; area: mean height of the
    learning curve. *_best: mean without the worst seed (the paper's best 5 of 6). reached: median steps to
    the environment's threshold (None: not half of the seeds), by ``reached_seeds`` of them.
    """

    environment: str
    part: str
    noise: float
    critic: str
    setting: str
    seeds: int
    steps: int
    final: float
    final_low: float | None
    final_high: float | None
    final_best: float
    sampled: float
    sampled_low: float | None
    sampled_high: float | None
    sampled_best: float
    area: float
    area_low: float | None
    area_high: float | None
    sampled_area: float
    length: float
    reached: float | None = None
    reached_seeds: int = 0
    diverged: int = 0


@dataclass(frozen=True)
class SearchRow:
    """A setting of a critic in a search, judged by the area under its curve (mean over seeds)."""

    environment: str
    search: str
    critic: str
    setting: str
    seeds: int
    steps: int
    area: float
    final: float
    sampled: float
    rank: int  # 0 is the best of its critic


@dataclass(frozen=True)
class Results:
    """Everything `NAME.json` holds."""

    name: str
    seconds: float
    command: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    correlations: tuple[Correlation, ...] = ()
    claims: tuple[Claim, ...] = ()
    returns: tuple[ReturnRow, ...] = ()
    searches: tuple[SearchRow, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def select(self, **wanted: Any) -> list[Row]:
        """Rows whose fields equal the given ones."""
        return [row for row in self.rows if all(getattr(row, key) == part for key, part in wanted.items())]


_RECORDS: dict[str, type] = {
    "rows": Row, "correlations": Correlation, "claims": Claim, "returns": ReturnRow, "searches": SearchRow
}  # fmt: skip
_CLOCK = ("training_seconds", "steps_per_second", "shares")  # of `extra`; no two runs share them
Curves = Mapping[str, Mapping[str, np.ndarray]]  # group ("puddle_world/kloss") -> dataset -> array


def grouped(records: Iterable[Record], *names: str) -> dict[Any, list[Record]]:
    """Records by the values of these fields, in the order in which they first appear."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(attrgetter(*names)(record), []).append(record)
    return found


def write_results(results: Results, path: Path) -> None:
    """Write the JSON file; numbers that are not finite become null, seconds are for `write_clock`."""
    content = {"name": results.name, "version": VERSION, **asdict(results)}
    del content["seconds"]
    content["extra"] = {key: part for key, part in content["extra"].items() if key not in _CLOCK}
    _write_json(content, path, indent=1)


def write_clock(results: Results, run: StartedRun, folder: Path) -> None:
    """NAME.run.json: how to run this again, and what differs from one day to the next."""
    clock = {key: results.extra[key] for key in _CLOCK if key in results.extra}
    _write_json(run.finish(seconds=results.seconds, **clock), folder / f"{results.name}.{FILE}", indent=2)


def _write_json(content: Any, path: Path, indent: int) -> None:
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(_plain(content), indent=indent) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """Plain JSON values; NaN and infinities are null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_results(path: Path) -> Results:
    """Read what `write_results` wrote. Raises ConfigError for another version or a damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("version", None)
        if version == VERSION:
            content.setdefault("seconds", math.nan)
            for name, kind in _RECORDS.items():
                content[name] = tuple(_record(kind, item) for item in content.get(name, ()))
            return Results(**content)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no results file ({reason}); delete it and run again") from None
    raise ConfigError(
        f"{path} is of version {version}, this koffline reads {VERSION}; delete it and run again"
    )


def _record(kind: type, item: dict[str, Any]) -> Any:
    return kind(**{name: tuple(part) if isinstance(part, list) else part for name, part in item.items()})


@contextlib.contextmanager
def reading_result(path: Path) -> Iterator[None]:
    """Whatever is wrong with a file of results is a ConfigError."""
    try:
        yield
    except Exception as error:  # numpy and zipfile raise many kinds; all mean that the file is not ours
        raise ConfigError(
            f"{path} is damaged or of another version ({type(error).__name__}); delete it and run again"
        ) from None


def is_archive(path: Path) -> bool:
    """Whether a whole .npz of that name lies there; half a file or another's is computed again."""
    try:
        arrays = read_arrays(path, ("name",))
    except Exception:  # as in reading_result
        return False
    return "name" not in arrays or str(arrays["name"]) == path.stem


def write_curves(curves: Curves, path: Path) -> None:
    """Write every group's arrays, compressed."""
    with atomic_file(path, force=True) as temporary, new_hdf5(temporary) as file:
        file.attrs["koffline_curves"] = VERSION
        for name, datasets in curves.items():
            group = file.create_group(name)
            group.attrs["world"], _, group.attrs["method"] = name.partition("/")
            for key, array in datasets.items():
                options = {"compression": "gzip", "shuffle": True} if np.ndim(array) else {}
                group.create_dataset(key, data=array, **options)
