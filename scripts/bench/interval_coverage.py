"""How often do the intervals hold the truth, and how wide are they? Exact finite
problems, many draws.

    python scripts/bench/interval_coverage.py --out docs/results/intervals.json --figures docs/images

Finite processes seen through continuous states (and one linear system), on- and
off-policy, independent tuples and episodes. With one-hot features the class holds Q^π
exactly; random Fourier features do not, quite. Certified kinds are given what they
assume: bounds of rewards and values, and ρ = 1.5 times the true norm. Intervals of the
counts are Clopper–Pearson.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import koffline
import koffline.ope.intervals.feature_system as feature_module
from koffline.kernels import median_bandwidth
from koffline.ope.intervals import calibrated_interval, pivot_interval
from koffline.ope.intervals.base import IntervalResult, KernelIntervalSettings
from koffline.ope.intervals.feature_system import FeatureSystem, make_feature_system
from koffline.ope.intervals.kernel_sets import feature_interval
from koffline.ope.names import (
    BOOTSTRAP_PIVOT,
    KERNEL_CALIBRATED,
    KERNEL_CERTIFIED,
    KERNEL_SIMULTANEOUS,
)
from koffline.report.plots import ACCENT, INK, SOFT, WARM, Drawing
from scripts.bench.coverage import clopper_pearson
from tests.exact_problems import (
    _FORWARD,
    _RIGHT,
    CASES,
    ExactProblem,
    FiniteCase,
    LinearCase,
    _line,
    _rooms,
)
from tests.ope.intervals.systems import OneHotStates, prepared

SIZES = (250, 1000, 4000, 16_000, 100_000)
_INSTRUMENTS = 200
# 80,000 distances instead of 4.5 million: most of the time of one draw otherwise
_BANDWIDTH_ROWS = 400
# of values, of rewards
_KNOWN = {
    "chain": ((-0.5, 1.0), (-0.5, 1.0)),
    "grid": ((-2.0, 3.0), (-0.1, 2.9)),
}


@dataclass(frozen=True)
class Study:
    """A problem in features, with the kinds to try up to some number of rows each."""

    problem: FiniteCase | LinearCase
    features: str  # "one-hot" or "fourier"
    kinds: dict[str, int]
    most_rows: int = 100_000

    @property
    def name(self) -> str:
        return f"{self.problem.name}/{self.features}"


_ON_TUPLES = FiniteCase(
    "chain_on_tuples", _line(), _RIGHT, _RIGHT, 0.95, time_limit=None
)
_GRID_ON_TUPLES = FiniteCase(
    "grid_on_tuples", _rooms(True), _FORWARD, _FORWARD, 0.95, time_limit=None
)
_BY_NAME = {case.name: case for case in (*CASES, _ON_TUPLES, _GRID_ON_TUPLES)}
_ALL = {
    KERNEL_CALIBRATED: 100_000,
    BOOTSTRAP_PIVOT: 1000,
    KERNEL_SIMULTANEOUS: 4000,
    KERNEL_CERTIFIED: 100_000,
}
_SOME = {KERNEL_CALIBRATED: 100_000, BOOTSTRAP_PIVOT: 1000, KERNEL_CERTIFIED: 100_000}
_GRID = {KERNEL_CALIBRATED: 100_000, KERNEL_CERTIFIED: 100_000}
_FOURIER = {KERNEL_CALIBRATED: 16_000}
STUDIES = [
    Study(_BY_NAME["chain_tuples"], "one-hot", _ALL),
    Study(_BY_NAME["chain_on_tuples"], "one-hot", _SOME, most_rows=4000),
    Study(_BY_NAME["chain_on"], "one-hot", _SOME, most_rows=4000),
    Study(_BY_NAME["chain_off"], "one-hot", _ALL),
    Study(_BY_NAME["grid_tuples"], "one-hot", _GRID),
    Study(_BY_NAME["grid_on_tuples"], "one-hot", _GRID, most_rows=4000),
    Study(_BY_NAME["grid_off_limited"], "one-hot", _GRID, most_rows=4000),
    Study(_BY_NAME["chain_tuples"], "fourier", _FOURIER, most_rows=4000),
    Study(_BY_NAME["grid_tuples"], "fourier", _FOURIER, most_rows=4000),
    Study(_BY_NAME["linear_tuples"], "fourier", _FOURIER, most_rows=4000),
]


def make_system(study: Study, exact: ExactProblem, seed: int) -> FeatureSystem:
    """The columns of one draw."""
    problem = prepared(exact, seed=seed)
    features = None
    instruments = 2 * _INSTRUMENTS
    if study.features == "one-hot":
        instruments = _INSTRUMENTS
        assert isinstance(study.problem, FiniteCase)
        seen = np.asarray(exact.transitions.observations, dtype=np.float64)
        features = OneHotStates(
            study.problem.world, seen.mean(axis=0), seen.std(axis=0)
        )
    return make_feature_system(
        problem,
        features,
        gamma=exact.gamma,
        constant=features is None,
        instruments=instruments,
        seed=seed,
    )


def known_settings(study: Study, seed: int) -> KernelIntervalSettings:
    """What a certificate assumes, as it is: bounds, and a norm above the true one."""
    assert isinstance(study.problem, FiniteCase)
    case = study.problem
    values, rewards = _KNOWN[study.problem.name.split("_")[0]]
    norm = float(np.linalg.norm(case.world.mdp.action_values(case.target, case.gamma)))
    return KernelIntervalSettings(
        norm_bound=1.5 * norm,
        value_bounds=values,
        reward_bounds=rewards,
        draws=199,
        seed=seed,
    )


def results(
    study: Study, rows: int, seed: int
) -> Iterator[tuple[str, IntervalResult, float]]:
    """Every kind on one draw, with the true value."""
    exact = study.problem(seed, rows)
    system = make_system(study, exact, seed)
    for kind, most in study.kinds.items():
        if rows > most:
            continue
        if kind == KERNEL_CALIBRATED:
            settings = KernelIntervalSettings(draws=999, seed=seed)
            yield (
                kind,
                calibrated_interval(system, settings, check_class=False),
                exact.value,
            )
        elif kind == BOOTSTRAP_PIVOT:
            yield (
                kind,
                pivot_interval(system, KernelIntervalSettings(draws=499, seed=seed)),
                exact.value,
            )
        elif kind == KERNEL_SIMULTANEOUS:
            settings = KernelIntervalSettings(draws=199, seed=seed)
            yield kind, feature_interval(system, kind, settings), exact.value
        else:
            yield (
                kind,
                feature_interval(system, kind, known_settings(study, seed)),
                exact.value,
            )


def run(study: Study, rows: int, repetitions: int) -> list[dict[str, Any]]:
    """Coverage, width and error per kind."""
    by_kind: dict[str, list[tuple[IntervalResult, float]]] = {}
    for repetition in range(repetitions):
        for kind, result, truth in results(study, rows, 1000 + repetition):
            by_kind.setdefault(kind, []).append((result, truth))
    return [_summary(study, rows, kind, draws) for kind, draws in by_kind.items()]


def _summary(
    study: Study, rows: int, kind: str, draws: list[tuple[IntervalResult, float]]
) -> dict[str, Any]:
    intervals = [
        (result.interval, truth)
        for result, truth in draws
        if result.interval is not None
    ]
    covered = sum(interval.holds(truth) for interval, truth in intervals)
    low, high = clopper_pearson(covered, len(draws))
    silent = [
        (r.interval, truth)
        for r, truth in draws
        if r.interval is not None and not r.warnings
    ]
    widths = [interval.width for interval, _ in intervals]
    errors = [r.value - truth for r, truth in draws if r.value is not None]
    summary: dict[str, float | None] = dict.fromkeys(
        ("median_width", "mean_width", "bias", "spread")
    )
    if widths:
        summary["median_width"] = float(np.median(widths))
        summary["mean_width"] = float(np.mean(widths))
    if errors:
        summary["bias"] = float(np.mean(errors))
    if len(errors) > 1:
        summary["spread"] = float(np.std(errors, ddof=1))
    return {
        "problem": study.problem.name,
        "features": study.features,
        "independent": study.problem.time_limit is None,
        "on_policy": np.array_equal(
            np.asarray(study.problem.behavior), np.asarray(study.problem.target)
        ),
        "rows": rows,
        "kind": kind,
        "repetitions": len(draws),
        "covered": covered,
        "coverage": covered / len(draws),
        "coverage_low": low,
        "coverage_high": high,
        "below": sum(truth < interval.low for interval, truth in intervals),
        "above": sum(truth > interval.high for interval, truth in intervals),
        "infeasible": len(draws) - len(intervals),
        "without_warning": len(silent),
        "covered_without_warning": sum(
            interval.holds(truth) for interval, truth in silent
        ),
        "truth": draws[0][1],
        **summary,
    }


def _repetitions(arguments: argparse.Namespace, study: Study, rows: int) -> int:
    """Fewer where one draw takes long."""
    long = arguments.long_repetitions
    if rows < 16_000:
        most = arguments.repetitions
    elif rows < 100_000:
        most = 5 * long
    else:
        most = long
    if study.features == "one-hot":
        return most
    return min(most, arguments.fourier_repetitions)


def main() -> None:
    feature_module.median_bandwidth = partial(
        median_bandwidth, max_rows=_BANDWIDTH_ROWS
    )
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", nargs="*", help="problem/features (default: all)")
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--repetitions", type=int, default=500)
    parser.add_argument(
        "--long-repetitions",
        type=int,
        default=60,
        help="at 100,000 rows; at 16,000 5 times",
    )
    parser.add_argument(
        "--fourier-repetitions", type=int, default=200, help="with Fourier features"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument(
        "--resume", action="store_true", help="keep what --out already holds"
    )
    parser.add_argument("--figures", type=Path, help="folder for the figure")
    arguments = parser.parse_args()
    rows = _read(arguments)
    done = {(row["problem"], row["features"], row["rows"]) for row in rows}
    for size in arguments.sizes:
        for study in STUDIES:
            if size > study.most_rows or (
                arguments.studies and study.name not in arguments.studies
            ):
                continue
            if (study.problem.name, study.features, size) in done:
                continue
            started = time.perf_counter()
            rows += run(study, size, _repetitions(arguments, study, size))
            for row in rows:
                if (row["problem"], row["features"], row["rows"]) == (
                    *study.name.split("/"),
                    size,
                ):
                    _print(row)
            print(f"  {time.perf_counter() - started:.0f} s", flush=True)
            _write(arguments, rows)
    if arguments.figures:
        draw(rows, arguments.figures)


def _read(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of an earlier run that broke off."""
    if not (arguments.resume and arguments.out and arguments.out.exists()):
        return []
    return json.loads(arguments.out.read_text())["rows"]


def _print(row: dict[str, Any]) -> None:
    if row["median_width"] is None:
        width = float("nan")
    else:
        width = row["median_width"]
    print(
        f"{row['problem']:<18}{row['features']:<9}{row['rows']:>7}"
        f" {row['kind']:<22}{row['covered']:>4}/{row['repetitions']}"
        f" [{row['coverage_low']:.3f}, {row['coverage_high']:.3f}]  width {width:8.4f} "
        f" below {row['below']} above {row['above']} none {row['infeasible']}",
        flush=True,
    )


def _write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "command": " ".join(sys.argv),
            "koffline": koffline.__version__,
            "level": 0.95,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


_COLOURS = {
    "kernel-calibrated": ACCENT,
    "bootstrap-pivot": "#0f766e",
    "kernel-simultaneous": "#7c3aed",
    "kernel-certified": WARM,
    "dual": "#be185d",  # of earlier versions, in rows that were measured then
}


def plot_coverage_evidence(rows: Sequence[dict[str, Any]]) -> Figure:
    """Coverage (with binomial intervals) and relative width against rows, a pair of
    panels per problem.

    rows: records of ``scripts/bench/interval_coverage.py``.
    """
    names = list(dict.fromkeys((row["problem"], row["features"]) for row in rows))

    def draw(whole: Axes) -> None:
        from matplotlib.lines import Line2D

        figure = whole.figure
        whole.remove()
        axes = figure.subplots(len(names), 2, squeeze=False, sharex=True)
        for row in axes[1:]:
            row[1].sharey(axes[0][1])  # widths compare across problems
        for (left, right), name in zip(axes, names, strict=True):
            mine = [row for row in rows if (row["problem"], row["features"]) == name]
            _draw_coverage(left, mine)
            _draw_width(right, mine)
            left.set_title(
                f"{name[0]}, {name[1]} features: coverage", loc="left", fontsize=9
            )
            right.set_title("median width / |truth|", loc="left", fontsize=9)
        for bottom in axes[-1]:
            bottom.set_xlabel("rows")
        kinds = list(dict.fromkeys(row["kind"] for row in rows))
        handles = [
            Line2D([], [], color=_COLOURS.get(kind, INK), marker="o", ms=4)
            for kind in kinds
        ]
        figure.legend(
            handles,
            kinds,
            loc="outside upper center",
            ncols=3,
            fontsize=8,
            frameon=False,
        )

    return Drawing(draw, width=8.4, height=2.1 * len(names) + 0.8).figure()


def _draw_coverage(axes: Axes, rows: list[dict[str, Any]]) -> None:
    axes.axhspan(0.93, 0.97, color=SOFT, alpha=0.3, lw=0)
    axes.axhline(0.95, color=INK, lw=0.8)
    for shift, (kind, mine) in enumerate(_by_kind(rows)):
        counts = np.array([row["rows"] for row in mine]) * 1.05**shift
        shares = np.array([row["coverage"] for row in mine])
        error = np.abs(
            np.array([(row["coverage_low"], row["coverage_high"]) for row in mine]).T
            - shares
        )
        axes.errorbar(
            counts,
            shares,
            error,
            fmt="o-",
            ms=3.5,
            lw=1.0,
            color=_COLOURS.get(kind, INK),
        )
    axes.set_xscale("log")
    axes.set_ylim(min(0.88, *(row["coverage_low"] for row in rows)) - 0.01, 1.01)


def _draw_width(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for kind, mine in _by_kind(rows):
        with_width = [row for row in mine if row["median_width"] is not None]
        widths = [row["median_width"] / abs(row["truth"]) for row in with_width]
        axes.plot(
            [row["rows"] for row in with_width],
            widths,
            "o-",
            ms=3.5,
            lw=1.0,
            color=_COLOURS.get(kind, INK),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")


def _by_kind(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return [
        (
            kind,
            sorted(
                (row for row in rows if row["kind"] == kind),
                key=lambda row: row["rows"],
            ),
        )
        for kind in kinds
    ]


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """The coverage figure."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_coverage_evidence(rows).savefig(
        folder / "interval-coverage.png", dpi=110, metadata={"Software": None}
    )


def table(rows: list[dict[str, Any]]) -> str:
    """`kernel-calibrated` alone: coverage in percent and median width in units of
    |truth|, a line per problem and a column per number of rows.
    """
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        if row["kind"] == KERNEL_CALIBRATED:
            width = row["median_width"] / abs(row["truth"])
            cells.setdefault((row["problem"], row["features"]), {})[row["rows"]] = (
                f"{100 * row['coverage']:.1f}, {width:.2g}"
            )
    lines = [
        "| problem, features | "
        + " | ".join(f"{size:,} rows" for size in SIZES)
        + " |",
        "| " + " | ".join(["---"] * (len(SIZES) + 1)) + " |",
    ]
    for (problem, features), by_size in cells.items():
        texts = [by_size.get(size, "–") for size in SIZES]
        lines.append(f"| {problem}, {features} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
