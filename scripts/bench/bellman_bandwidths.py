"""Does the Bellman test gain by several bandwidths? Level and power on random MDPs with
exact values.

    python -m scripts.bench.bellman_bandwidths --out docs/results/bellman-bandwidths.json

Every repetition draws an MDP (100 states in a square, or a cube of six dimensions; 2
actions, γ = 0.9), a policy, a log of independent tuples and a wrong value function. The
same random signs give the null distribution of every statistic:

- ``single``: T of one kernel, bandwidth 0.6 times the median distance;
- ``sum``: T of the mean of the kernels of five bandwidths;
- ``largest``: the largest of the five (T − E T*)/σ(T*), moments given the residuals;
- ``largest of three``: the same with every other bandwidth;
- ``smallest p``: the smallest of the five p-values, calibrated by those of the draws.

The last is the aggregated test with equal weights of Schrab et al. (2023, MMD
Aggregated Two-Sample Test), whose level holds jointly because signs are shared.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata

from koffline.config import make_bellman_settings
from koffline.fitting import threads
from koffline.kernels import Gaussian
from koffline.ope.bellman_test.case import BellmanCase, make_case
from koffline.ope.bellman_test.forms import random_signs
from koffline.ope.value_functions import as_value_function
from koffline.policies import DiscretePolicy
from scripts.bench.bellman_size import as_log, rate_of
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import random_mdp

STATES = 100
ACTIONS = 2
DISCOUNT = 0.9
LEVEL = 0.05
DRAWS = 499
MULTIPLES = (0.15, 0.3, 0.6, 1.2, 2.4)  # of the median distance
THREE = (0, 2, 4)  # places of every other one
ERRORS = (
    "none",
    "constant",
    "smooth",
    "local",
    "one action",
    "wrong gamma",
    "rough",
)
# of the root mean square value
STRENGTHS = {
    "constant": 0.4,
    "smooth": 0.1,
    "local": 0.5,
    "one action": 0.15,
    "rough": 0.15,
}
_LOCAL = 0.1  # share of the states, near a point
_WRONG_GAMMA = 0.75
_LEVEL_REPETITIONS = 500


@dataclass(frozen=True)
class Cell:
    """One line of the study."""

    dimension: int
    error: str
    n: int
    repetitions: int


def draw_case(cell: Cell, seed: int) -> BellmanCase:
    """A log and a value function under test."""
    generator = np.random.default_rng(seed)
    mdp = random_mdp(STATES, ACTIONS, generator)
    points = generator.uniform(-1.0, 1.0, size=(STATES, cell.dimension))
    world = EmbeddedMDP(mdp, points)
    target = generator.dirichlet(np.full(ACTIONS, 2.0), size=STATES)
    sample = mdp.sample_transitions(cell.n, target, generator)
    columns = (sample.states, sample.actions, sample.rewards, sample.next_states)
    log = as_log(world.coordinates, columns, is_episode=False)
    q = mdp.action_values(target, DISCOUNT)
    if cell.error == "wrong gamma":
        table = mdp.action_values(target, _WRONG_GAMMA)
    else:
        size = STRENGTHS.get(cell.error, 0.0) * np.sqrt(np.mean(np.square(q)))
        table = q + size * error_shape(cell.error, points, ACTIONS, generator)
    function = as_value_function(
        lambda s, a: table[world.states_of(s), a],
        log.action_space,
        log.observation_shape,
    )
    policy = DiscretePolicy(ACTIONS, world.policy(target), name="target")
    settings = make_bellman_settings(gamma=DISCOUNT, seed=seed, draws=DRAWS)
    return make_case(function, log, policy, settings)


def error_shape(
    error: str, points: np.ndarray, actions: int, generator: np.random.Generator
) -> np.ndarray:
    """The error (S, A) of a value function, of size about one where it is not zero."""
    shape = np.zeros((len(points), actions))
    if error == "constant":
        shape += 1.0
    if error == "smooth":
        direction = generator.standard_normal(points.shape[1])
        along = points @ direction / np.linalg.norm(direction)
        shape += (along / along.std())[:, None]
    if error == "local":
        distances = np.linalg.norm(
            points - generator.uniform(-1.0, 1.0, points.shape[1]), axis=1
        )
        count = max(1, round(_LOCAL * len(points)))
        shape[np.argsort(distances)[:count]] = 1.0
    if error == "one action":
        shape[:, 0] = 1.0
    if error == "rough":
        shape = generator.standard_normal(shape.shape)
    return shape


def p_values(case: BellmanCase, seed: int) -> dict[str, float]:
    """p of every statistic, from the same signs."""
    scores = case.weights * case.residuals
    signs = random_signs((DRAWS, len(scores)), np.random.default_rng(seed))
    signs = np.vstack([np.ones(len(scores)), signs])  # the observed statistic first
    median = case.kernel.bandwidth / case.settings.bandwidth
    columns = []
    scaled = []
    for multiple in MULTIPLES:
        gram = Gaussian(multiple * median).gram(case.inputs).numpy()
        products = scores[:, None] * gram * scores / len(scores)
        statistics = np.einsum("bg,bg->b", signs @ products, signs)
        diagonal = np.diagonal(products)
        variance = 2.0 * (np.square(products).sum() - np.square(diagonal).sum())
        columns.append(statistics)
        scaled.append((statistics - diagonal.sum()) / np.sqrt(variance))
    several = np.stack(columns)
    studentised = np.stack(scaled)
    # share of all draws, the observed one included, that are at least as large
    shares = rankdata(-several, method="max", axis=1) / several.shape[1]
    return {
        "single": tail(columns[MULTIPLES.index(case.settings.bandwidth)]),
        "sum": tail(several.sum(axis=0)),
        "largest": tail(studentised.max(axis=0)),
        "largest of three": tail(studentised[list(THREE)].max(axis=0)),
        "smallest p": tail(-shares.min(axis=0)),
    } | {
        f"h {multiple}": tail(column)
        for multiple, column in zip(MULTIPLES, several, strict=True)
    }


def tail(statistics: np.ndarray) -> float:
    """Share of the draws, the observed first one included, that reach it."""
    least = statistics[0] - 1e-12 * abs(statistics[0])
    return float(np.mean(statistics >= least))


def study(cell: Cell) -> dict[str, Any]:
    """Rejection rates of one cell."""
    started = time.process_time()
    first = 1000 * zlib.crc32(repr(cell).encode())
    rows = [
        p_values(draw_case(cell, first + number), first + number)
        for number in range(cell.repetitions)
    ]
    rates = {name: rate_of([row[name] for row in rows]) for name in rows[0]}
    spent = round(time.process_time() - started, 1)
    return {**asdict(cell), "rates": rates, "seconds": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--sizes", type=int, nargs="+", default=[500])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--errors", nargs="+", default=list(ERRORS))
    parser.add_argument("--out", type=Path, help="JSON file; other rows stay")
    arguments = parser.parse_args()
    cells = cells_of(arguments)
    rows = kept_rows(arguments.out, cells)
    with threads(1), torch.no_grad():
        for cell in cells:
            rows.append(study(cell))
            rates = rows[-1]["rates"]
            numbers = " ".join(
                f"{name} {100 * rate['rate']:.1f}" for name, rate in rates.items()
            )
            print(
                f"{cell.dimension}-d n={cell.n} {cell.error}: {numbers}"
                f" ({rows[-1]['seconds']} s)",
                flush=True,
            )
            if arguments.out is not None:
                write_rows(arguments.out, rows)


def cells_of(arguments: argparse.Namespace) -> Sequence[Cell]:
    """Cells of the study."""
    cells = []
    for n in arguments.sizes:
        for dimension in arguments.dimensions:
            for error in arguments.errors:
                repetitions = arguments.repetitions
                if error == "none":
                    repetitions = max(repetitions, _LEVEL_REPETITIONS)
                cells.append(Cell(dimension, error, n, repetitions))
    return cells


def kept_rows(path: Path | None, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Rows of an earlier run that this one does not make anew."""
    if path is None or not path.is_file():
        return []
    new = {(cell.dimension, cell.error, cell.n) for cell in cells}
    return [
        row
        for row in json.loads(path.read_text())["rows"]
        if (row["dimension"], row["error"], row["n"]) not in new
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The results so far."""
    content = {
        "command": "python -m scripts.bench.bellman_bandwidths --out"
        " docs/results/bellman-bandwidths.json",
        "level": LEVEL,
        "draws": DRAWS,
        "multiples": list(MULTIPLES),
        "rows": sorted(
            rows,
            key=lambda row: (row["n"], row["dimension"], ERRORS.index(row["error"])),
        ),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
