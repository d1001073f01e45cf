"""Files of an experiment, whole or not at all: final numbers as JSON and tables, curves as HDF5.

``NAME.json`` holds the records below, ``NAME.curves.h5`` one group per world and method.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from koffline.errors import ConfigError
from koffline.experiments.statistics import NO_NUMBER, Interval
from koffline.store.files import atomic_file, finite_json, write_text
from koffline.store.run_record import FILE, now
from koffline.untrusted.arrays import open_npz, read_arrays
from koffline.untrusted.hdf5 import new_hdf5
from koffline.untrusted.limits import read_json

VERSION = 2
Record = TypeVar("Record")


@dataclass(frozen=True)
class Row:
    """Errors and their intervals: a method at a learning rate on a world, against one of the two truths.

    Errors are mean squares in native reward units, without a number where a seed diverged.
    diverged: how many seeds; diverged_at: their steps, None for the others. best_*: whether this learning
    rate is the best of the method's by the truth of the row, and by the held-out kernel loss.
    """

    world: str
    method: str
    learning_rate: float
    seeds: int
    truth: str
    mse: Interval
    bellman_error: Interval = NO_NUMBER
    diverged: int = 0
    diverged_at: tuple[int | None, ...] = ()
    best_by_truth: bool = False
    best_without_truth: bool = False
    held_out_loss: float | None = None
    value_variance: float | None = None
    epochs: int | None = None
    weight_error: Interval = NO_NUMBER
    group: str | None = None  # group and variant of an ablation
    variant: str | None = None

    @property
    def variant_name(self) -> str:
        """Name of the variant without the method at its end, which groups of several methods append."""
        return (self.variant or "").removesuffix(f" {self.method}")

    @property
    def shares(self) -> list[float | None]:
        """The error and the ends of its interval over the variance of V; None where they are not finite."""
        shares = (end and end / (self.value_variance or math.nan) for end in self.mse)
        return [share if share is not None and math.isfinite(share) else None for share in shares]


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of a loss with an error along training, and its interval over seeds.

    networks: "own" are those that the method trained by this loss passed through, "both" K-loss's and RG's.
    """

    world: str
    loss: str  # "kloss" or "l2"
    error: str  # "mse" or "bellman_error"
    networks: str
    spearman: Interval
    points: int


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with our measurement. verdict: holds, does not hold, undecided."""

    sentence: str
    where: str
    world: str
    measured: str
    number: Interval
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class ReturnRow:
    """A critic inside Trust-PCL on an environment: interquartile means over seeds with bootstrap intervals.

    final: return of the mean action at the end; sampled: that of the sampled policy; area: mean height of the
    learning curve. *_best: mean without the worst seed (the paper's best 5 of 6). reached: median steps to
    the environment's threshold (None: half of the seeds or fewer), by ``reached_seeds`` of them.
    """

    environment: str
    part: str
    noise: float
    critic: str
    setting: str
    seeds: int
    steps: int
    final: Interval
    final_best: float | None
    sampled: Interval
    area: Interval
    reached: float | None = None
    reached_seeds: int = 0
    diverged: int = 0


@dataclass(frozen=True)
class Results:
    """Everything `NAME.json` holds."""

    name: str
    command: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]
    correlations: tuple[Correlation, ...] = ()
    claims: tuple[Claim, ...] = ()
    returns: tuple[ReturnRow, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = math.nan  # in NAME.run.json

    def select(self, **wanted: Any) -> list[Row]:
        """Rows whose fields equal the given ones."""
        return [row for row in self.rows if all(getattr(row, key) == part for key, part in wanted.items())]


Curves = Mapping[str, Mapping[str, np.ndarray]]  # group ("puddle_world/kloss") -> dataset -> array


def grouped(records: Iterable[Record], *names: str) -> dict[Any, list[Record]]:
    """Records by the values of these fields, in the order in which they first appear."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(attrgetter(*names)(record), []).append(record)
    return found


def write_results(results: Results, run: Mapping[str, Any], path: Path) -> None:
    """Write NAME.json, numbers that are not finite as null, and NAME.run.json: how to run this again."""
    content = {"name": results.name, "version": VERSION, **asdict(results)}
    seconds = content.pop("seconds")
    write_text(path, finite_json(content, indent=1))
    write_text(path.with_suffix(f".{FILE}"), finite_json({**run, "seconds": seconds, "finished": now()}))


def read_results(path: Path) -> Results:
    """Read what `write_results` wrote. Raises ConfigError for another version or a damaged file."""
    try:
        content = read_json(path)
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, this koffline reads {VERSION}")
        return TypeAdapter(Results).validate_python(content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no results file ({reason}); delete it and run again") from None


def digest_of(*settings: Any) -> str:
    """Digest of records of settings, by which the file of a result is named."""
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:12]


def write_result(path: Path, parts: Mapping[str, Any]) -> None:
    """Write arrays and numbers as an .npz, whole or not at all; those of a mapping are named PART.KEY."""
    arrays: dict[str, Any] = {"name": path.stem}
    for name, part in parts.items():
        is_group = isinstance(part, Mapping)
        arrays |= {f"{name}.{key}": array for key, array in part.items()} if is_group else {name: part}
    with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def is_result(path: Path) -> bool:
    """Whether ``path`` is a complete result; anything else is computed again."""
    try:
        with open_npz(path) as archive:
            return archive.text("name") == path.stem
    except Exception:  # any of many types, as in read_result
        return False


def read_result(path: Path, make: Callable[..., Record]) -> Record:
    """Make a result of the parts that `write_result` wrote; any error on the way is a ConfigError."""
    try:
        parts: dict[str, Any] = {}
        for name, array in read_arrays(path).items():
            part, is_grouped, key = name.partition(".")
            if is_grouped:
                parts.setdefault(part, {})[key] = array
            elif part != "name":
                parts[part] = array if array.ndim else array.item()
        return make(**parts)
    except Exception as error:  # numpy and zipfile raise many kinds; all mean that the file is not ours
        raise ConfigError(
            f"{path} is damaged or of another version ({type(error).__name__}); delete it and run again"
        ) from None


def write_curves(curves: Curves, path: Path) -> None:
    """Write every group's arrays, compressed."""
    with atomic_file(path, force=True) as temporary, new_hdf5(temporary) as file:
        for name, datasets in curves.items():
            for key, array in datasets.items():
                options = {"compression": "gzip", "shuffle": True} if np.ndim(array) else {}
                file.create_dataset(f"{name}/{key}", data=array, **options)
