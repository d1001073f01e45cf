"""Replicas against ordinary networks, per replica: ``python scripts/bench/replicas.py
[--device cuda]``.

The ordinary network is what anyone would write: nn.Sequential, autograd, fused Adam,
mini-batches by permutation, one thread. Both sides are timed in turn, several rounds in
one process; medians of ratios. On the CPU it is processor time that is compared, which
a busy neighbour disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from koffline.batches import Table
from koffline.fitting import FitSettings, fit, threads
from koffline.kernels import Gaussian
from koffline.objectives import (
    FittedIteration,
    KernelLoss,
    Objective,
    ResidualGradient,
    TemporalDifference,
    fitted_q,
)
from koffline.replicas import ReplicaPlan, StackedMLP

BANDWIDTH = 0.5


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    objective: Objective
    sizes: tuple[int, ...]
    batch: int
    plan: Callable[[int], ReplicaPlan]
    target: float | None = None  # least ratio at 30 replicas on one CPU thread


def own(replicas: int) -> ReplicaPlan:
    """Every replica draws its own mini-batches."""
    return ReplicaPlan.grid(range(replicas), (1e-3,))


def shared(replicas: int) -> ReplicaPlan:
    """Three learning rates per seed share mini-batches."""
    return ReplicaPlan.grid(
        range(max(1, replicas // 3)), (3e-3, 1e-3, 3e-4)[: min(3, replicas)]
    )


VALUE = (2, 80, 1)
Q = (8, 64, 64, 4)
CASES = (
    Case(
        "kloss, own mini-batches", KernelLoss(Gaussian(BANDWIDTH)), VALUE, 150, own, 6.0
    ),
    Case(
        "kloss, shared mini-batches",
        KernelLoss(Gaussian(BANDWIDTH)),
        VALUE,
        150,
        shared,
        12.0,
    ),
    Case("td0", TemporalDifference(), VALUE, 150, own, 14.0),
    Case("fvi", FittedIteration(), VALUE, 150, own, 14.0),
    Case("rg", ResidualGradient(), VALUE, 150, own, 14.0),
    Case("fqe 8-64-64-4", fitted_q(0.01), Q, 256, own),
)


def make_table(sizes: tuple[int, ...], device: str, rows: int = 5000) -> Table:
    """Rows in the unit cube; four actions where the network has four outputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(rows, sizes[0], generator=generator)
    following = (
        inputs + 0.05 * torch.randn(rows, sizes[0], generator=generator)
    ).clamp(0.0, 1.0)
    readout = next_readout = None
    if sizes[-1] > 1:
        actions = torch.randint(sizes[-1], (rows,), generator=generator)
        readout = nn.functional.one_hot(actions, sizes[-1]).float()
        next_readout = torch.softmax(
            torch.randn(rows, sizes[-1], generator=generator), dim=1
        )
    discounts = torch.full((rows,), 0.98)
    table = Table(
        inputs, following, inputs.sum(dim=1), discounts, readout, next_readout, inputs
    )
    return table.to(device)


def compute_ordinary_loss(
    case: Case, table: Table, rows: Tensor, network: nn.Module, target: nn.Module | None
) -> Tensor:
    """The loss as one would write it for one network."""
    outputs = network(table.inputs[rows])
    following = None
    if case.objective.next_from == "network":
        following = network(table.next_inputs[rows])
    else:
        with torch.no_grad():
            following = (target or network)(table.next_inputs[rows])
    if table.readout is None or table.next_readout is None:
        value = outputs.squeeze(-1)
        next_value = following.squeeze(-1)
    else:
        value = (outputs * table.readout[rows]).sum(dim=-1)
        next_value = (following * table.next_readout[rows]).sum(dim=-1)
    residual = table.rewards[rows] + table.discounts[rows] * next_value - value
    if not isinstance(case.objective, KernelLoss):
        return residual.square().mean()
    x = table.inputs[rows]
    gram = torch.exp(-torch.cdist(x, x).square() / BANDWIDTH**2)
    return (residual @ gram @ residual) / len(rows) ** 2


class OrdinaryRun:
    """One ordinary network with fused Adam."""

    def __init__(self, case: Case, table: Table) -> None:
        self._case = case
        self._table = table
        self._network = self._build()
        self._target = None
        if case.objective.next_from == "target":
            self._target = self._build()
            self._target.load_state_dict(self._network.state_dict())
        self._adam = torch.optim.Adam(self._network.parameters(), lr=1e-3, fused=True)
        self._order = torch.empty(0, dtype=torch.int64)
        self._start = 0

    def run(self, steps: int) -> None:
        """Train on."""
        for _ in range(steps):
            if self._start + self._case.batch > len(self._order):
                self._order = torch.randperm(len(self._table))
                self._start = 0
                self._order = self._order.to(self._table.inputs.device)
                fitted = (
                    isinstance(self._case.objective, FittedIteration)
                    and self._case.sizes == VALUE
                )
                if fitted and self._target is not None:
                    self._target.load_state_dict(self._network.state_dict())
            rows = self._order[self._start : self._start + self._case.batch]
            self._start += self._case.batch
            loss = compute_ordinary_loss(
                self._case, self._table, rows, self._network, self._target
            )
            self._adam.zero_grad()
            loss.backward()
            self._adam.step()
            if self._case.sizes != VALUE and self._target is not None:
                with torch.no_grad():
                    torch._foreach_lerp_(
                        list(self._target.parameters()),
                        list(self._network.parameters()),
                        0.01,
                    )

    def _build(self) -> nn.Module:
        parts: list[nn.Module] = []
        for fan_in, fan_out in zip(
            self._case.sizes, self._case.sizes[1:], strict=False
        ):
            parts += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*parts[:-1]).to(self._table.inputs.device)


def measure(
    case: Case, replicas: int, device: str, steps: int, rounds: int
) -> tuple[float, float, float]:
    """Median microseconds per step and replica of both sides, and the median ratio."""
    table = make_table(case.sizes, device)
    plan = case.plan(replicas)
    network = StackedMLP.initialise(case.sizes, plan.batch_seeds, device=device)
    ordinary = OrdinaryRun(case, table)
    settings = FitSettings(steps=steps, batch_size=case.batch)
    fit(
        table,
        network,
        case.objective,
        plan,
        FitSettings(steps=5, batch_size=case.batch),
    )
    ordinary.run(5)
    pairs = []
    for _ in range(rounds):
        single = timed(lambda: ordinary.run(steps), device) / steps
        stacked = (
            timed(lambda: fit(table, network, case.objective, plan, settings), device)
            / steps
        )
        pairs.append((single * 1e6, stacked / len(plan) * 1e6))
    ratio = statistics.median(single / stacked for single, stacked in pairs)
    return (
        statistics.median(p[0] for p in pairs),
        statistics.median(p[1] for p in pairs),
        ratio,
    )


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds."""
    if device == "cpu":
        clock = time.process_time
    else:
        clock = time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    """Print one line per case and number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--replicas", type=int, nargs="*", help="default: 30; on cuda 30 300 3000"
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--case", default="", help="only cases whose name contains this"
    )
    arguments = parser.parse_args()
    counts = arguments.replicas or (
        [30] if arguments.device == "cpu" else [30, 300, 3000]
    )
    heads = f"{'ordinary':>10s} {'replica':>10s} {'ratio':>7s} {'target':>7s}"
    print(f"{'case':28s} {'R':>5s} {heads}   (µs per step)")
    with threads(1):
        for case in CASES:
            if arguments.case not in case.name:
                continue
            for replicas in counts:
                single, stacked, ratio = measure(
                    case, replicas, arguments.device, arguments.steps, arguments.rounds
                )
                target = "" if case.target is None else f"{case.target:.0f}"
                print(
                    f"{case.name:28s} {replicas:5d} {single:10.1f} {stacked:10.2f}"
                    f" {ratio:7.1f} {target:>7s}"
                )


if __name__ == "__main__":
    main()
