"""Nyström features beside random Fourier features, at the same number of features.

    python -m scripts.bench.nystrom --out docs/results/nystrom.json

ψ(x) = Λ^(−1/2) Uᵀ k(X, x) for m landmarks X, rows of the log drawn uniformly, with
k(X, X) = U Λ Uᵀ (Williams & Seeger 2001), beside `koffline.kernels.FourierFeatures`
of the same Gaussian kernel. They are tried in both places that use features:

- ``class``: the value function is linear in the features; instruments are Fourier's;
- ``instruments``: the kernel loss is ‖ψᵀδ‖²; the value function's features are
  Fourier's. ``from_exact`` is the distance from the value by the exact Gram matrix.

Errors are of the fitted value against the exact one, root mean squares over logs,
relative to it. Processor seconds are of the features and the fit of one log.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from koffline.fitting import threads
from koffline.kernels import Gaussian, median_bandwidth, random_fourier_features
from koffline.ope.intervals.base import RIDGE, ridged_fit
from koffline.ope.intervals.feature_system import FeatureSystem, make_feature_system
from koffline.ope.log.problem import EvaluationProblem
from tests.exact_problems import CASES, ExactProblem
from tests.ope.intervals.systems import prepared

PROBLEMS = ("grid_tuples", "linear_tuples")
COUNTS = (50, 200)
_OTHER = 100  # features in the role that is not compared
_INSTRUMENTS = 200
_MEDIAN_ROWS = 400
_SMALLEST = 1e-10  # relative eigenvalue of k(X, X) that is kept
_BANDWIDTH = 0.6  # of the kernel loss, times the median distance


@dataclass(frozen=True, eq=False)
class NystromFeatures:
    """ψ(x) = Λ^(−1/2) Uᵀ k(X, x); directions of vanishing eigenvalues are zero."""

    kernel: Gaussian
    landmarks: Tensor  # (m, d)

    @cached_property
    def whitening(self) -> Tensor:
        """U Λ^(−1/2), (m, m)."""
        sizes, vectors = torch.linalg.eigh(self.kernel.gram(self.landmarks))
        kept = sizes > _SMALLEST * sizes.max()
        scale = torch.where(kept, sizes.clamp(min=1e-300).rsqrt(), 0.0)
        return vectors * scale

    @property
    def frequencies(self) -> Tensor:
        """Nothing but the shape (d, m / 2), from which a system reads the count."""
        return self.landmarks[: len(self.landmarks) // 2].mT

    def __call__(self, x: Tensor) -> Tensor:
        """Features (N, m)."""
        return self.kernel.gram(x, self.landmarks) @ self.whitening


def draw_features(
    kind: str, kernel: Gaussian, rows: Tensor, count: int, seed: int
) -> Any:
    """A feature map of the kernel for these rows."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "nystrom":
        chosen = torch.randperm(len(rows), generator=generator)[:count]
        return NystromFeatures(kernel, rows[chosen])
    return random_fourier_features(kernel, rows.shape[1], count, generator)


def median_distance(rows: Tensor) -> float:
    """Median distance of 400 rows, to save time."""
    return median_bandwidth(rows, _MEDIAN_ROWS)


def make_system(
    exact: ExactProblem, problem: EvaluationProblem, kinds: dict[str, Any], seed: int
) -> FeatureSystem:
    """The system with the class's features and instruments of ``kinds``."""
    inputs = torch.as_tensor(problem.inputs)
    features = draw_features(
        kinds["class"],
        Gaussian(median_distance(inputs)),
        inputs,
        kinds["class_count"],
        seed,
    )
    system = make_feature_system(
        problem, features, gamma=exact.gamma, instruments=2, seed=seed
    )
    rows = system.kernel_inputs
    instruments = draw_features(
        kinds["instruments"],
        Gaussian(_BANDWIDTH * median_distance(rows)),
        rows,
        kinds["instruments_count"],
        seed + 1,
    )
    return dataclasses.replace(system, instruments=instruments)


def fitted_value(system: FeatureSystem) -> float:
    """The value of the fit."""
    return system.value(ridged_fit(system, RIDGE))


def measure(name: str, rows: int, draws: int) -> list[dict[str, Any]]:
    """Errors on one problem, by role, kind and number of features."""
    case = next(case for case in CASES if case.name == name)
    errors: dict[tuple[str, str, int], list[float]] = {}
    distances: dict[tuple[str, str, int], list[float]] = {}
    seconds: dict[tuple[str, str, int], list[float]] = {}
    for draw in range(draws):
        exact = case(draw, rows)
        problem = prepared(exact, seed=draw)
        of_gram = None
        for role in ("class", "instruments"):
            for kind in ("fourier", "nystrom"):
                for count in COUNTS:
                    key = (role, kind, count)
                    kinds = choices(role, kind, count)
                    started = time.process_time()
                    system = make_system(exact, problem, kinds, draw)
                    value = fitted_value(system)
                    seconds.setdefault(key, []).append(time.process_time() - started)
                    errors.setdefault(key, []).append(value - exact.value)
                    if role == "instruments":
                        if of_gram is None:
                            of_gram = value_by_gram(system)
                        distances.setdefault(key, []).append(value - of_gram)
    results = []
    for key, of_key in errors.items():
        row = {
            "problem": name,
            "n": rows,
            "role": key[0],
            "features": key[1],
            "count": key[2],
            "error": size_of(of_key) / abs(exact.value),
            "seconds": float(np.mean(seconds[key])),
        }
        if key in distances:
            row["from_exact"] = size_of(distances[key]) / abs(exact.value)
        results.append(row)
    return results


def choices(role: str, kind: str, count: int) -> dict[str, Any]:
    """What a system is made of, if one role has this kind and number of features."""
    kinds: dict[str, Any] = {
        "class": "fourier",
        "class_count": _OTHER,
        "instruments": "fourier",
        "instruments_count": _INSTRUMENTS,
    }
    kinds[role] = kind
    kinds[f"{role}_count"] = count
    return kinds


def value_by_gram(system: FeatureSystem) -> float:
    """The value of the fit by the exact kernel: instruments whose products are the Gram
    matrix of all rows.
    """
    kernel = Gaussian(_BANDWIDTH * median_distance(system.kernel_inputs))
    everywhere: Any = NystromFeatures(kernel, system.kernel_inputs)
    return fitted_value(dataclasses.replace(system, instruments=everywhere))


def size_of(numbers: list[float]) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(numbers))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with threads(1), torch.no_grad():
        for name in PROBLEMS:
            rows += measure(name, arguments.rows, arguments.draws)
            for row in rows[-len(COUNTS) * 4 :]:
                distance = row.get("from_exact", np.nan)
                print(
                    f"{name:<18}{row['role']:<13}{row['features']:<9}{row['count']:<5}"
                    f"error {row['error']:.4f} from exact {distance:.4f}"
                    f" {1e3 * row['seconds']:.1f} ms",
                    flush=True,
                )
    if arguments.out is not None:
        command = "python -m scripts.bench.nystrom --out docs/results/nystrom.json"
        content = {"command": command, "draws": arguments.draws, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
