"""One update of every kernel-loss critic against the d3rlpy algorithm it is made from: ratios, side by side.

    python scripts/bench/kernel_critics.py [--updates 200] [--batch 256] [--hidden 256] [--device cpu]

Both algorithms of a pair see the same mini-batches in turn within one run; what counts is the ratio of the
medians. Trust ratios, not milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

import numpy as np
import torch

import koffline.algos as ours
from koffline import ColumnarReplayBuffer, Continuous, Discrete, Transitions
from koffline.data.d3rlpy_import import import_d3rlpy

d3rlpy = import_d3rlpy()
COLUMNS, ACTIONS, CHOICES = 17, 6, 4


def make_log(discrete: bool, rows: int = 5000) -> Transitions:
    generator = np.random.default_rng(0)
    return Transitions(
        observations=generator.normal(size=(rows, COLUMNS)).astype(np.float32),
        actions=(
            generator.integers(0, CHOICES, rows) if discrete else generator.uniform(-1, 1, (rows, ACTIONS))
        ),
        rewards=generator.normal(size=rows),
        next_observations=generator.normal(size=(rows, COLUMNS)).astype(np.float32),
        terminated=generator.random(rows) < 0.01,
        truncated=np.zeros(rows, bool),
        action_space=Discrete(CHOICES) if discrete else Continuous(ACTIONS, -1.0, 1.0),
    )


def make_pairs(arguments: argparse.Namespace) -> dict[str, tuple[bool, Any, Any]]:
    """name -> (discrete?, d3rlpy's, ours), built."""
    algos, ope = d3rlpy.algos, d3rlpy.ope
    encoder = d3rlpy.models.VectorEncoderFactory([arguments.hidden, arguments.hidden])

    def sized(config_class: Any, **settings: Any) -> Any:
        encoders = {f.name: encoder for f in dataclasses.fields(config_class) if "encoder_factory" in f.name}
        return config_class(**encoders, batch_size=arguments.batch, **settings)

    def created(config_class: Any, **settings: Any) -> Any:
        return sized(config_class, **settings).create(arguments.device)

    greedy, stochastic = created(algos.DQNConfig), created(algos.SACConfig)
    greedy.create_impl((COLUMNS,), CHOICES)
    stochastic.create_impl((COLUMNS,), ACTIONS)
    fqe, kfqe = sized(ope.FQEConfig), sized(ours.KLossFQEConfig)
    device = arguments.device
    pairs = {
        "FQE": (False, ope.FQE(stochastic, fqe, device), ours.KLossFQE(stochastic, kfqe, device)),
        "DiscreteFQE": (
            True,
            ope.DiscreteFQE(greedy, fqe, device),
            ours.DiscreteKLossFQE(greedy, kfqe, device),
        ),
        "DQN": (True, created(algos.DQNConfig), created(ours.KLossDQNConfig)),
        "DiscreteSAC": (True, created(algos.DiscreteSACConfig), created(ours.KLossDiscreteSACConfig)),
        "DiscreteCQL": (True, created(algos.DiscreteCQLConfig), created(ours.KLossDiscreteCQLConfig)),
        "SAC": (False, created(algos.SACConfig), created(ours.KLossSACConfig)),
        "TD3+BC": (False, created(algos.TD3PlusBCConfig), created(ours.KLossTD3PlusBCConfig)),
        "IQL": (False, created(algos.IQLConfig), created(ours.KLossIQLConfig)),
        "CQL": (False, created(algos.CQLConfig), created(ours.KLossCQLConfig)),
    }
    for discrete, stock, own in pairs.values():
        for algo in (stock, own):
            algo.create_impl((COLUMNS,), CHOICES if discrete else ACTIONS)
    return pairs


def measure(stock: Any, own: Any, batches: list[Any], device: str) -> tuple[float, float]:
    """Median milliseconds of one update of each, taken in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for batch in batches:
        for algo, times in zip((stock, own), seconds, strict=True):
            start = time.perf_counter()
            algo.update(batch)
            if "cuda" in device:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    warm = len(batches) // 10 + 1
    return float(np.median(seconds[0][warm:])) * 1e3, float(np.median(seconds[1][warm:])) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--device", default="cpu:0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"2x{arguments.hidden} ReLU, batch {arguments.batch}, {arguments.device}, one thread")
    print(f"{'':14} {'d3rlpy ms':>10} {'K-loss ms':>10} {'ratio':>6}")
    for name, (discrete, stock, own) in make_pairs(arguments).items():
        buffer = ColumnarReplayBuffer(make_log(discrete), seed=0)
        count = arguments.updates // 8 if name == "CQL" else arguments.updates
        batches = [buffer.sample_transition_batch(arguments.batch) for _ in range(max(count, 5))]
        stock_ms, own_ms = measure(stock, own, batches, arguments.device)
        print(f"{name:14} {stock_ms:10.2f} {own_ms:10.2f} {own_ms / stock_ms:6.2f}", flush=True)


if __name__ == "__main__":
    main()
