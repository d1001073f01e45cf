"""How often is a rightly ordered policy doubted, and a wrongly ordered one found?

    python scripts/bench/action_order.py --logs 3000 --out docs/results/action-order.json

Each log has 6 to 40 named actions and a softmax logger (or one that chooses doses along
a line). False
alarms: its policy is read rightly, and is unrelated to the logger, sharper, its
opposite, a few doses higher, in reverse, partly like it, without regard to the state,
greedy, or the logger under a random renumbering.
Power: a policy like the logger is read in natural order although its columns are in the
order of letters (or the other way round).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import softmax

# also found when run as a plain script
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import koffline
from koffline.data.columns import in_natural_order
from koffline.ope.assumptions.action_order import find_other_order

Array = np.ndarray
_WORDS = [first + second for first in "abcdefgh" for second in "xyzuv"]
_FEWEST_MOVED = 6  # actions in other places, of which the check needs as many


def shares(positive: Array) -> Array:
    """Rows scaled to sums of one."""
    return positive / positive.sum(axis=1, keepdims=True)


def names_of(count: int, generator: np.random.Generator) -> list[str]:
    """Names of actions in natural order, in that of letters, or in any."""
    names = in_natural_order(f"dose_{number}" for number in range(count))
    if generator.random() < 0.4:
        names = in_natural_order(generator.permutation(_WORDS)[:count].tolist())
    order = generator.random()
    if order < 0.3:
        return sorted(names)
    if order < 0.5:
        return generator.permutation(names).tolist()
    return names


def logger_of(states: Array, count: int, generator: np.random.Generator) -> Array:
    """Probabilities of the logged actions."""
    if generator.random() < 0.3:
        along = states[:, :1] - states[:, :1].min()
        place = along / along.max() * (count - 1)
        logits = -((np.arange(count) - place) ** 2) / generator.choice([0.5, 2.0, 10.0])
    else:
        logits = (
            states
            @ generator.normal(size=(states.shape[1], count))
            * generator.choice([0.5, 1.0, 3.0])
        )
    return 0.9 * softmax(logits, axis=1) + 0.1 / count


def other_policy(states: Array, count: int, generator: np.random.Generator) -> Array:
    """Probabilities of a policy that has nothing to do with the logger."""
    return softmax(states @ generator.normal(size=(states.shape[1], count)), axis=1)


Make = Callable[[Array, Array, np.random.Generator], Array]
RIGHT: dict[str, Make] = {
    "unrelated": lambda states, logger, g: other_policy(states, logger.shape[1], g),
    "sharper": lambda states, logger, g: shares(logger**3),
    "opposite": lambda states, logger, g: shares(1.0 / (logger + 0.02)),
    "higher doses": lambda states, logger, g: np.roll(
        logger, int(g.integers(1, 4)), axis=1
    ),
    "reverse": lambda states, logger, g: logger[:, ::-1],
    "partly alike": lambda states, logger, g: shares(
        np.sqrt(logger) * other_policy(states, logger.shape[1], g)
    ),
    "same everywhere": lambda states, logger, g: np.tile(
        g.dirichlet(np.ones(logger.shape[1])), (len(logger), 1)
    ),
    "greedy": lambda states, logger, g: np.eye(logger.shape[1])[
        other_policy(states, logger.shape[1], g).argmax(axis=1)
    ],
    "renumbered at random": lambda states, logger, g: logger[
        :, g.permutation(logger.shape[1])
    ],
}
LIKE_THE_LOGGER: dict[str, Make] = {
    "the logger": lambda states, logger, g: logger,
    "sharper": lambda states, logger, g: shares(logger**2),
    "greedy": lambda states, logger, g: np.eye(logger.shape[1])[logger.argmax(axis=1)],
    "half alike": lambda states, logger, g: (
        0.5 * logger + 0.5 * other_policy(states, logger.shape[1], g)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=int, default=3000)
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    arguments = parser.parse_args()
    alarms, right, noticed, wrong = (Counter[str]() for _ in range(4))
    for seed in range(arguments.logs):
        generator = np.random.default_rng(seed)
        count = int(generator.integers(6, 41))
        rows = int(generator.choice([500, 2000, 10_000]))
        names = names_of(count, generator)
        states = generator.normal(size=(rows, int(generator.integers(1, 6))))
        logger = logger_of(states, count, generator)
        actions = (generator.random((rows, 1)) >= logger.cumsum(axis=1)[:, :-1]).sum(
            axis=1
        )
        units = np.arange(rows) // int(generator.choice([1, 5]))
        kind = str(generator.choice(list(RIGHT)))
        policy = RIGHT[kind](states, logger, generator)
        right[kind] += 1
        alarms[kind] += find_other_order(policy, actions, units, names) is not None
        if sorted(names) != names:
            other = sorted(names)
        else:
            other = in_natural_order(names)
        if (
            sum(name != place for name, place in zip(other, names, strict=True))
            < _FEWEST_MOVED
        ):
            continue
        kind = str(generator.choice(list(LIKE_THE_LOGGER)))
        policy = LIKE_THE_LOGGER[kind](states, logger, generator)[
            :, [names.index(name) for name in other]
        ]
        seen = find_other_order(policy, actions, units, names)
        wrong[kind] += 1
        noticed[kind] += seen is not None and list(seen.names) == other
    rows_of = {
        "false alarms": {kind: [alarms[kind], right[kind]] for kind in right},
        "found": {kind: [noticed[kind], wrong[kind]] for kind in wrong},
    }
    for title, counts in rows_of.items():
        for kind, (noted, of_all) in sorted(counts.items()):
            print(
                f"{title:<14}{kind:<24}{noted:>5} of {of_all:>5}  {noted / of_all:.1%}"
            )
        print(
            f"{title:<38}{sum(a for a, _ in counts.values()):>5} of"
            f" {sum(b for _, b in counts.values()):>5}"
        )
    if arguments.out:
        content = {
            "command": " ".join(sys.argv),
            "koffline": koffline.__version__,
            **rows_of,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
