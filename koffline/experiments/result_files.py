"""Result files of an experiment, written atomically: final numbers (JSON), curves
(HDF5).

``NAME.json`` holds the records below; ``NAME.curves.h5`` has one group per world and
method.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from pydantic import TypeAdapter

from koffline.errors import ConfigError
from koffline.experiments.seed_statistics import NO_NUMBER, SeedInterval
from koffline.json_types import JsonObject
from koffline.store.files import atomic_file, finite_json, write_text
from koffline.store.run_record import FILE, now
from koffline.untrusted.arrays import open_npz, read_arrays
from koffline.untrusted.hdf5 import new_hdf5, open_hdf5
from koffline.untrusted.limits import read_json

VERSION = 2
_KEPT_BITS = 8  # of the fraction of a number in a curve: 0.2 % of it
Record = TypeVar("Record")


@dataclass(frozen=True)
class ErrorRow:
    """Errors with intervals of one method, learning rate and world, against one truth.

    Errors are mean squares in native reward units; not finite if a seed diverged.
    diverged: number of diverged seeds; diverged_at: their steps, None for the other
    seeds. best_*: whether this learning rate is the method's best by this row's truth,
    or by the held-out kernel loss.
    """

    world: str
    method: str
    learning_rate: float
    seeds: int
    truth: str
    mse: SeedInterval
    bellman_error: SeedInterval = NO_NUMBER
    diverged: int = 0
    diverged_at: tuple[int | None, ...] = ()
    best_by_truth: bool = False
    best_without_truth: bool = False
    held_out_loss: float | None = None
    value_variance: float | None = None
    epochs: int | None = None
    weight_error: SeedInterval = NO_NUMBER
    group: str | None = None  # group and variant of an ablation
    variant: str | None = None

    @property
    def variant_name(self) -> str:
        """The variant without the method name at its end (appended in groups with
        several methods).
        """
        return (self.variant or "").removesuffix(f" {self.method}")

    @property
    def shares(self) -> list[float | None]:
        """The error and its interval divided by the variance of V; None where not
        finite.
        """
        shares: list[float | None] = []
        for end in self.mse:
            share = end and end / (self.value_variance or math.nan)
            if share is not None and not math.isfinite(share):
                share = None
            shares.append(share)
        return shares


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of a loss with an error during training, with its
    interval over seeds.

    networks: "own" (those of the method that minimises this loss) or "both" (those of
    K-loss and RG).
    """

    world: str
    loss: str  # "kloss" or "l2"
    error: str  # "mse" or "bellman_error"
    networks: str
    spearman: SeedInterval
    points: int


@dataclass(frozen=True)
class Claim:
    """One comparison with our measurement. verdict: holds, does not hold, level,
    undecided.
    """

    sentence: str
    where: str
    world: str
    measured: str
    number: SeedInterval
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class ReturnRow:
    """Trust-PCL with one critic in one environment: interquartile means over seeds,
    bootstrap intervals.

    final: last returns of the mean action; sampled: last returns of the sampled policy;
    area: mean height of the learning curve. *_best: mean without the worst seed (the
    paper's best 5 of 6). reached: median number of steps to the threshold (None if at
    most half of the seeds reached it); reached_seeds: how many did.
    """

    environment: str
    part: str
    noise: float
    critic: str
    setting: str
    seeds: int
    steps: int
    final: SeedInterval
    final_best: float | None
    sampled: SeedInterval
    area: SeedInterval
    reached: float | None = None
    reached_seeds: int = 0
    diverged: int = 0


@dataclass(frozen=True)
class ChosenSetting:
    """A setting of `choices`: a world and five choices.

    temperature: of the target policy (None: the random policy). noise: of the world.
    scaling: of the inputs. reward_divisor: of the rewards. fastest: the poles' velocity
    box, None elsewhere.
    """

    world: str
    temperature: float | None
    noise: float
    scaling: str
    reward_divisor: float
    fastest: float | None


@dataclass(frozen=True)
class ChoiceRow(ChosenSetting):
    """One method in one setting of `choices`, at its best learning rate by each truth.

    Errors are mean squares as shares of Var V: by log (None: a seed diverged), and mean
    with the 95 % interval over logs. worst: largest error of a record in the second
    half of training, mean over logs and seeds. leading: share of the final squared
    error in the kernel's ten leading eigenvectors. best_by_paper: the same by the
    paper's grid. diverged: networks at the best rate; diverged_any: at all rates.
    hours: of one core, for all rates. swinging: share of the networks of all rates
    whose late errors exceed twice their smallest one.
    """

    method: str
    logs: int
    seeds: int
    epochs: int
    rates: int
    hours: float
    learning_rate: float
    by_log: tuple[float | None, ...]
    error: SeedInterval
    bellman_error: SeedInterval
    worst: float | None
    leading: SeedInterval
    diverged: int
    diverged_any: int
    learning_rate_by_paper: float
    by_log_by_paper: tuple[float | None, ...]
    error_by_paper: SeedInterval
    swinging: float | None = None


@dataclass(frozen=True)
class SettingRow(ChosenSetting):
    """What the problems of one setting of `choices` are like: `TraitsResult` with
    intervals over logs.
    """

    logs: int
    value_variance: SeedInterval
    transition_share: SeedInterval
    backup_share: SeedInterval
    grid_share: SeedInterval
    kernel_spread: float | None
    squared_spread: float | None
    kernel_depth: float | None
    squared_depth: float | None


@dataclass(frozen=True)
class ExactRow:
    """One loss of one setting of `choices`, minimised exactly: `ExactResult` by loss.

    error and leading: of the minimiser; residual_share: E[δ²] at V^π / Var V.
    """

    world: str
    temperature: float | None
    noise: float
    scaling: str
    method: str
    diag_weight: float
    value_variance: float
    residual_share: float
    error: float
    leading: float
    spread: float
    depth: float


@dataclass(frozen=True)
class Statement:
    """A sentence of the paper, judged by all comparisons that bear on it.

    verdict: holds, holds under (a condition), does not hold, level, or undecided.
    condition: empty but for "holds under". measured: the numbers, in words.
    comparisons: how many comparisons of the appendix it rests on.
    """

    sentence: str
    where: str
    verdict: str
    condition: str
    measured: str
    comparisons: int


@dataclass(frozen=True)
class Results:
    """The content of `NAME.json`."""

    name: str
    command: str
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: tuple[ErrorRow, ...]
    correlations: tuple[Correlation, ...] = ()
    claims: tuple[Claim, ...] = ()
    returns: tuple[ReturnRow, ...] = ()
    choices: tuple[ChoiceRow, ...] = ()
    traits: tuple[SettingRow, ...] = ()
    minimisers: tuple[ExactRow, ...] = ()
    statements: tuple[Statement, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = math.nan  # in NAME.run.json

    def select(self, **wanted: object) -> list[ErrorRow]:
        """Rows whose fields equal the given ones."""
        return [
            row
            for row in self.rows
            if all(getattr(row, key) == part for key, part in wanted.items())
        ]


# some of the fields of `Results`, by name
Fields: TypeAlias = dict[str, Any]
# group ("puddle_world/kloss") -> dataset -> array
Curves = Mapping[str, Mapping[str, np.ndarray]]
Collected: TypeAlias = tuple[Fields, Curves]  # what an experiment computes


def steps_or_none(diverged_at: np.ndarray) -> tuple[int | None, ...]:
    """Steps (S,) at which seeds diverged; None for −1, which stands for never."""
    steps: list[int | None] = diverged_at.tolist()
    for seed in np.flatnonzero(diverged_at < 0):
        steps[seed] = None
    return tuple(steps)


def grouped(records: Iterable[Record], *names: str) -> dict[Any, list[Record]]:
    """Group records by the values of these fields, in order of first appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(attrgetter(*names)(record), []).append(record)
    return groups


def read_curves(path: Path) -> Curves:
    """Read what `write_curves` wrote.

    Raises ConfigError if the file is missing or damaged.
    """
    curves: dict[str, dict[str, np.ndarray]] = {}
    try:
        with open_hdf5(path) as file:
            for name, array in file.arrays(list(file.datasets)).items():
                group, _, key = name.rpartition("/")
                curves.setdefault(group, {})[key] = array
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} holds no curves ({reason}); delete it and run again"
        ) from None
    return curves


def write_results(results: Results, run: JsonObject, path: Path) -> None:
    """Write NAME.json (non-finite numbers as null) and NAME.run.json (how to repeat the
    run).
    """
    content = {"name": results.name, "version": VERSION, **asdict(results)}
    seconds = content.pop("seconds")
    write_text(path, finite_json(content, indent=1))
    write_text(
        path.with_suffix(f".{FILE}"),
        finite_json({**run, "seconds": seconds, "finished": now()}),
    )


def read_results(path: Path) -> Results:
    """Read what `write_results` wrote.

    Raises ConfigError if the version differs or the file is damaged.
    """
    try:
        content = read_json(path)
        if content["version"] != VERSION:
            raise ValueError(
                f"version {content['version']}, this koffline reads {VERSION}"
            )
        return TypeAdapter(Results).validate_python(content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} is no results file ({reason}); delete it and run again"
        ) from None


def finished_results(path: Path, subject: str) -> Results:
    """Results that an earlier run finished, for ``--only-finished``; ``subject`` names
    them in the message.

    Raises ConfigError if there are none, or as `read_results`.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist, so nothing of {subject} is finished; leave out"
            " --only-finished"
        )
    return read_results(path)


def digest_of(*settings: object) -> str:
    """Digest of settings, used in the names of result files."""
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:12]


def write_result(path: Path, parts: Mapping[str, Any]) -> None:
    """Write arrays and numbers as an .npz, atomically; entries of a mapping are named
    PART.KEY.
    """
    arrays: dict[str, Any] = {"name": path.stem}
    for name, part in parts.items():
        if isinstance(part, Mapping):
            arrays |= {f"{name}.{key}": array for key, array in part.items()}
        else:
            arrays[name] = part
    with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def is_result(path: Path) -> bool:
    """Whether ``path`` is a complete result."""
    try:
        with open_npz(path) as archive:
            return archive.text("name") == path.stem
    except Exception:  # any of many types, as in read_result
        return False


def read_result(path: Path, make: Callable[..., Record]) -> Record:
    """Call ``make`` with the parts that `write_result` wrote.

    Any error becomes a ConfigError.
    """
    try:
        parts: dict[str, Any] = {}
        for name, array in read_arrays(path).items():
            part, is_grouped, key = name.partition(".")
            if is_grouped:
                parts.setdefault(part, {})[key] = array
            elif part != "name":
                if not array.ndim:
                    array = array.item()
                parts[part] = array
        return make(**parts)
    except Exception as error:
        # numpy and zipfile raise many kinds; all mean that the file is not ours
        raise ConfigError(
            f"{path} is damaged or of another version ({type(error).__name__}); delete"
            " it and run again"
        ) from None


def write_curves(curves: Curves, path: Path) -> None:
    """Write the arrays of every group, compressed; single-precision ones to
    `_KEPT_BITS`, which halves the file.
    """
    with atomic_file(path, force=True) as temporary, new_hdf5(temporary) as file:
        for name, datasets in curves.items():
            for key, array in datasets.items():
                options = {}
                if np.ndim(array):
                    options = {"compression": "gzip", "compression_opts": 9}
                    options["shuffle"] = True
                rounded = _rounded(np.asarray(array))
                file.create_dataset(f"{name}/{key}", data=rounded, **options)


def _rounded(array: np.ndarray) -> np.ndarray:
    """Single-precision numbers with the last bits of their fraction 0; others as they
    are.
    """
    if array.dtype != np.float32:
        return array
    fraction, exponent = np.frexp(array)
    steps = np.float32(2.0**_KEPT_BITS)
    return np.ldexp(np.rint(fraction * steps) / steps, exponent).astype(np.float32)
