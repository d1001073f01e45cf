"""What a training step costs by the number of networks in a stack, on one core.

    python -m scripts.bench.step_cost [--steps 200]

The networks, rows and objective are those of an evaluation of the bundled CartPole log.
Milliseconds a step, the least of three rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any
from unittest import mock

import koffline
from koffline import fitting

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1, 4, 8, 15)
ROUNDS = 3


def arguments_of_a_fit() -> dict[str, Any]:
    """The arguments of the training of a short evaluation."""
    with mock.patch.object(fitting, "fit", wraps=fitting.fit) as fit:
        koffline.evaluate(
            ROOT / "datasets" / "cartpole.hdf5",
            ROOT / "datasets" / "cartpole_policy.npz",
            gamma=0.98,
            settings={"steps": 20},
            cores=1,
        )
    return dict(fit.call_args_list[0].kwargs)


def seconds_of(arguments: dict[str, Any], networks: int, steps: int) -> float:
    """Seconds to train the first ``networks`` of the stack."""
    stack = arguments["network"]
    changed = {
        **arguments,
        "network": stack.with_flat(stack.flat[:networks]),
        "plan": arguments["plan"].select(slice(0, networks)),
        "settings": dataclasses.replace(arguments["settings"], steps=steps),
    }
    started = time.perf_counter()
    fitting.fit(**changed)
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    arguments = arguments_of_a_fit()
    for networks in SIZES:
        seconds = min(
            seconds_of(arguments, networks, options.steps) for _ in range(ROUNDS)
        )
        print(f"{networks:>3} networks: {1000.0 * seconds / options.steps:.2f} ms")


if __name__ == "__main__":
    main()
