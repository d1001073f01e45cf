"""How often is a quantity taken for labels, and a column of labels found?

    python scripts/bench/label_columns.py --logs 2000 --out docs/results/label-columns.json

Quantities are walks, counts, stocks, clocks, weekdays, levels, scores, floors and the
like, with rewards and actions that do not depend on them, or do so smoothly, by a
threshold, periodically. Labels are states of random graphs, cells of grids and of lines
that were numbered at random, and categories with rewards of their own. Logs have 1,000,
5,000 or 20,000 rows and 7 to 100 values.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import koffline
from koffline.data.structure.labels import find_labels

Array = np.ndarray
Step = Callable[[Array, Array], Array]  # of values and actions, to the next values


class Values(NamedTuple):
    """A column, the actions, the column one step later, and episodes; (N,) each."""

    now: Array
    actions: Array
    later: Array
    episodes: Array


def roll_out(
    generator: np.random.Generator, start: Callable[[int], Array], step: Step
) -> Values:
    """Episodes of 10, 30 or 100 steps with actions at random."""
    rows = int(generator.choice([1000, 5000, 20_000]))
    length = int(generator.choice([10, 30, 100]))
    n_actions = int(generator.choice([2, 4]))
    episodes = rows // length
    values = start(episodes)
    columns = []
    for _ in range(length):
        actions = generator.integers(n_actions, size=episodes)
        following = step(values, actions)
        columns.append((values, actions, following, np.arange(episodes)))
        values = following
    return Values(
        *(np.stack(column, axis=1).ravel() for column in zip(*columns, strict=True))
    )


def quantity(generator: np.random.Generator) -> tuple[str, Values]:
    """A column of a kind drawn at random."""
    g = generator
    k = int(generator.choice([7, 10, 15, 24, 40, 100]))

    def anywhere(count: int) -> Array:
        return g.integers(k, size=count)

    def at_zero(count: int) -> Array:
        return np.zeros(count, dtype=np.int64)

    def within(values: Array) -> Array:
        return np.clip(values, 0, k - 1)

    def wager(v: Array, a: Array) -> Array:
        return within(v + g.choice([-1, 1], size=len(v)) * np.minimum(v, k - 1 - v))

    kinds: dict[str, tuple[Callable[[int], Array], Step]] = {
        "walk": (anywhere, lambda v, a: within(v + g.integers(-1, 2, size=len(v)))),
        "driven walk": (
            anywhere,
            lambda v, a: within(
                v + np.where(a % 2 == 0, 1, -1) * (g.random(len(v)) < 0.8)
            ),
        ),
        "count": (at_zero, lambda v, a: g.binomial(v, 0.7) + g.poisson(2, size=len(v))),
        "stock": (
            anywhere,
            lambda v, a: np.where(
                v < k // 4, k - 1, np.maximum(v - g.poisson(k / 8, size=len(v)), 0)
            ),
        ),
        "ordered stock": (
            anywhere,
            lambda v, a: within(
                v + a * (k // 4) - g.poisson(max(1, k / 6), size=len(v))
            ),
        ),
        "clock": (anywhere, lambda v, a: (v + 1) % k),
        "weekday": (lambda n: g.integers(7, size=n), lambda v, a: (v + 1) % 7),
        "hour at random gaps": (
            lambda n: g.integers(24, size=n),
            lambda v, a: (v + g.integers(1, 5, size=len(v))) % 24,
        ),
        "severity": (
            lambda n: g.integers(7, size=n),
            lambda v, a: np.clip(v + g.choice([-1, 0, 0, 0, 1, 2], size=len(v)), 0, 6),
        ),
        "wear": (
            at_zero,
            lambda v, a: np.where((g.random(len(v)) < 0.1) | (v >= k - 1), 0, v + 1),
        ),
        "drawn anew": (anywhere, lambda v, a: anywhere(len(v))),
        "steps left": (lambda n: at_zero(n) + k - 1, lambda v, a: np.maximum(v - 1, 0)),
        "constant in episodes": (anywhere, lambda v, a: v),
        "oscillating": (
            anywhere,
            lambda v, a: within(k - 1 - v + g.integers(-1, 2, size=len(v))),
        ),
        "floor": (
            anywhere,
            lambda v, a: np.where(g.random(len(v)) < 0.5, 0, anywhere(len(v))),
        ),
        "mean reverting": (
            anywhere,
            lambda v, a: within(
                np.rint(0.5 * v + 0.25 * k + g.normal(size=len(v)) * k / 10)
            ).astype(int),
        ),
        "score": (
            at_zero,
            lambda v, a: np.minimum(v + g.choice([0, 0, 0, 1, 3], size=len(v)), k - 1),
        ),
        "doubled": (
            lambda n: at_zero(n) + 1,
            lambda v, a: np.where(2 * v > k - 1, 1, 2 * v) + g.integers(2, size=len(v)),
        ),
        "two dice": (
            anywhere,
            lambda v, a: g.integers(1, 7, size=(len(v), 2)).sum(axis=1),
        ),
        "strides of a third": (
            anywhere,
            lambda v, a: within(v + g.choice([k // 3, -(k // 3)], size=len(v))),
        ),
        "strides around": (
            anywhere,
            lambda v, a: (v + g.choice([k // 3, -(k // 3)], size=len(v))) % k,
        ),
        "wager": (anywhere, wager),
    }
    kind = str(g.choice(list(kinds)))
    return kind, roll_out(g, *kinds[kind])


def effect(values: Array, generator: np.random.Generator) -> Array:
    """A mean reward of the kinds that quantities have."""
    share = values / max(1, values.max())
    place = generator.random()
    effects = [
        0.0 * share,
        share,
        1.0 * (share > place),
        np.square(share - 0.5),
        np.sin(2.0 * np.pi * share),
        np.abs(share - place),
    ]
    return effects[generator.integers(len(effects))] * generator.choice([0.3, 1.0, 3.0])


def labels(generator: np.random.Generator) -> tuple[str, Values]:
    """A column of labels of a kind drawn at random."""
    g = generator
    k = int(generator.choice([7, 10, 15, 24, 40, 100]))
    name_of = g.permutation(k)
    fan = int(g.choice([1, 2, 4]))
    place_of = np.argsort(name_of)
    reached = g.integers(k, size=(k, 4, fan))
    side = int(np.ceil(np.sqrt(k)))

    def anywhere(count: int) -> Array:
        return g.integers(k, size=count)

    def on_grid(v: Array, a: Array) -> Array:
        cell = place_of[v]
        row, column = np.divmod(cell, side)
        moves = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])[g.integers(4, size=len(v))]
        row = np.clip(row + moves[:, 0], 0, (k - 1) // side)
        following = row * side + np.clip(column + moves[:, 1], 0, side - 1)
        return name_of[np.where(following < k, following, cell)]

    def on_line(v: Array, a: Array) -> Array:
        return name_of[np.clip(place_of[v] + g.integers(-1, 2, size=len(v)), 0, k - 1)]

    kinds: dict[str, Step] = {
        "random graph": lambda v, a: reached[v, a, g.integers(fan, size=len(v))],
        "cells of a grid": on_grid,
        "places on a line": on_line,
        "constant in episodes": lambda v, a: v,
        "drawn anew": lambda v, a: anywhere(len(v)),
    }
    kind = str(g.choice(list(kinds)))
    return kind, roll_out(g, anywhere, kinds[kind])


def is_found(values: Values, means: Array, generator: np.random.Generator) -> bool:
    """Whether the column is reported, beside another column that is a quantity."""
    noise = generator.normal(size=(2, len(means)))
    rewards = means + noise[0] * generator.choice([0.05, 1.0])
    states = np.column_stack([values.now, noise[1]])
    following = np.column_stack([values.later, noise[1]])
    goes_on = np.ones(len(means), dtype=bool)
    labels = find_labels(
        observations=states,
        next_observations=following,
        goes_on=goes_on,
        rewards=rewards,
        actions=values.actions,
        units=values.episodes,
    )
    return any(label.column == 0 for label in labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    arguments = parser.parse_args()
    taken, quantities, noticed, labelled = (Counter[str]() for _ in range(4))
    started = time.perf_counter()
    for seed in range(arguments.logs):
        generator = np.random.default_rng(seed)
        kind, values = quantity(generator)
        means = effect(values.now, generator)
        scaled = values._replace(now=5 * values.now, later=5 * values.later)
        quantities[kind] += 1
        taken[kind] += is_found(scaled if seed % 3 == 0 else values, means, generator)
        kind, values = labels(generator)
        means = generator.normal(size=values.now.max() + 1)[values.now]
        # these show no other structure
        if seed % 2 and kind not in (
            "constant in episodes",
            "drawn anew",
        ):
            means = 0.0 * means
        labelled[kind] += 1
        noticed[kind] += is_found(values, means, generator)
    seconds = (time.perf_counter() - started) / (2 * arguments.logs)
    rows_of = {
        "quantities taken for labels": {
            kind: [taken[kind], quantities[kind]] for kind in quantities
        },
        "labels found": {kind: [noticed[kind], labelled[kind]] for kind in labelled},
    }
    for title, counts in rows_of.items():
        for kind, (count, of_all) in sorted(counts.items()):
            print(
                f"{title:<30}{kind:<24}{count:>5} of {of_all:>5}  {count / of_all:.1%}"
            )
        count, of_all = (sum(pair[i] for pair in counts.values()) for i in range(2))
        print(f"{title:<54}{count:>5} of {of_all:>5}  {count / of_all:.1%}")
    print(f"{seconds:.3f} s each")
    if arguments.out:
        content = {
            "command": " ".join(sys.argv),
            "koffline": koffline.__version__,
            **rows_of,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
