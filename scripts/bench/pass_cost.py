"""What passes over a log on disk cost a row, against their matrix products alone.

    python -m scripts.bench.pass_cost [--rounds 2] [--before CHECKOUT]
        [--out docs/results/pass_cost.json]

The log is that of `scripts.bench.streaming`, with 4 floats in a row. A row costs what an
evaluation of a long log takes more than one of a short log, by processor time; training
is the same in both. The products are those that every row needs: hidden layers of its
state and of its next one by all networks, and critics times what stands before the last
layers, in double precision, on arrays that lie ready. Checkouts take turns, each in a
fresh process; each figure is the least of its rounds, because other work on a machine
only adds to it. Also counted: how often all estimators together read each shard.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# also found when run as a plain script; of another checkout when it is measured
sys.path.insert(0, os.environ.get("KOFFLINE_CHECKOUT", str(ROOT)))

# the tiny one loads what is loaded once
ROWS = {"tiny": 8_000, "short": 20_000, "long": 140_000}
_SAMPLE_ROWS = 5_000
_SHARD_ROWS = 20_000
_STEPS = 30
_OPTIONS: dict[str, Any] = {"steps": _STEPS, "sample_rows": _SAMPLE_ROWS, "cores": 1}
_REPLICAS = 15
_HIDDEN = 64
_CRITICS = 300
_INPUTS = 2  # state and action
_BLOCK = 512


def measure_once(folder: Path) -> dict[str, float]:
    """In a fresh process: µs a row of passes and of products, and reads of a shard."""
    import torch

    import koffline
    from koffline.policies import ContinuousPolicy
    from scripts.bench.streaming import GAMMA, make_world

    torch.set_num_threads(1)
    _, _, target = make_world(1)
    policy = ContinuousPolicy(1, target.mean, name="linear")
    seconds = {}
    for name in ROWS:
        log = koffline.open_transitions(folder / name, lazy=True)
        started = time.process_time()
        koffline.evaluate(log, policy, GAMMA, estimator="kloss", **_OPTIONS)
        seconds[name] = time.process_time() - started
    rows = ROWS["long"] - ROWS["short"]
    tiny_log = koffline.open_transitions(folder / "tiny", lazy=True)
    return {
        "pass": 1e6 * (seconds["long"] - seconds["short"]) / rows,
        "products": 1e6 * _seconds_of_products(torch.float64),
        "products in single": 1e6 * _seconds_of_products(torch.float32),
        "reads": _reads_of_all(tiny_log, policy, GAMMA),
    }


def _seconds_of_products(dtype: Any) -> float:
    """Least processor time of the products of a row."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = draw((_REPLICAS, _INPUTS, _BLOCK))
    first = draw((_REPLICAS, _HIDDEN, _INPUTS))
    second = draw((_REPLICAS, _HIDDEN, _HIDDEN))
    terms = draw((_REPLICAS, _HIDDEN + 2, _BLOCK))
    critics = draw((_BLOCK, _CRITICS)).expand(_REPLICAS, -1, -1)
    total = draw((_REPLICAS, _HIDDEN + 2, _CRITICS))

    def products() -> None:
        for _ in range(2):  # the state, and the next one
            torch.bmm(second, torch.bmm(first, rows))
        torch.baddbmm(total, terms, critics, out=total)

    return _least(products, 40) / _BLOCK


def _least(function: Callable[[], None], times: int) -> float:
    """Least processor time of a call."""
    function()
    seconds = []
    for _ in range(times):
        started = time.process_time()
        function()
        seconds.append(time.process_time() - started)
    return min(seconds)


def _reads_of_all(log: Any, policy: Any, gamma: float) -> float:
    """How often the rows of a log are read for all estimators together."""
    from koffline.data.disk.log import LazyTransitions
    from koffline.ope.evaluation import estimate_all

    rows_read = []
    shard_blocks = LazyTransitions.shard_blocks

    def counting(log: Any, shard: int, block_rows: int | None = None) -> Any:
        for block in shard_blocks(log, shard, block_rows):
            rows_read.append(len(block))
            yield block

    LazyTransitions.shard_blocks = counting  # type: ignore[method-assign, assignment]
    try:
        estimate_all(log, policy, gamma, **_OPTIONS)
    finally:
        LazyTransitions.shard_blocks = shard_blocks  # type: ignore[method-assign]
    return float(np.sum(rows_read)) / len(log)


def run(folder: Path, checkout: Path) -> dict[str, float]:
    """`measure_once` of a checkout in a fresh process."""
    environment = {
        **os.environ,
        "KOFFLINE_CHECKOUT": str(checkout),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--once", str(folder)]
    output = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=True
    ).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def write_logs(folder: Path) -> None:
    """The short and the long log."""
    from scripts.bench.streaming import write_log

    for name, rows in ROWS.items():
        write_log(folder / name, rows, 1, _SHARD_ROWS)


def compare(rounds: int, before: Path | None) -> dict[str, dict[str, float]]:
    """Least figures of this checkout, and of an older one."""
    sides = {"now": ROOT}
    if before is not None:
        sides = {"before": before.resolve(), **sides}
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        write_logs(Path(name))
        for _ in range(rounds):
            for side, checkout in sides.items():
                measured = run(Path(name), checkout)
                best = results.setdefault(side, measured)
                for key, value in measured.items():
                    best[key] = min(best[key], value)
    # the same products, whichever process measured them
    for key in ("products", "products in single"):
        least = min(result[key] for result in results.values())
        for result in results.values():
            result[key] = least
    return results


def as_table(results: dict[str, dict[str, float]]) -> list[list[str]]:
    """Cells of a table: a row for each checkout."""
    table = [["", "passes, µs a row", "products, µs", "ratio", "reads for `all`"]]
    for side, result in results.items():
        table.append(
            [
                side,
                f"{result['pass']:.1f}",
                f"{result['products']:.1f}",
                f"{result['pass'] / result['products']:.1f}",
                f"{result['reads']:.0f}",
            ]
        )
    return table


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--before", type=Path, help="another checkout of koffline")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(measure_once(options.once)))
        return
    results = compare(options.rounds, options.before)
    for cells in as_table(results):
        print(" | ".join(cells))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
