"""The exact V-statistic of many rows against its floor: ``scripts/bench/blockwise.py [--device cuda]``.

The floor is what any exact method must pay: the matrix products and the exponentials of the upper triangle of
the Gram matrix, in the same blocks, and nothing else. Both are timed in turn, several rounds in one process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from koffline.fitting import threads
from koffline.kernel_loss import blockwise_v_statistic
from koffline.kernels import Gaussian, median_bandwidth

TARGET = 2.0


def compute_floor(columns: Tensor, block_size: int, power: Callable[[Tensor], Tensor]) -> None:
    """Products of `columns` (N, d) with themselves and their exponentials, upper triangle, one buffer."""
    rows = len(columns)
    block = columns.new_empty(block_size, block_size)
    for start in range(0, rows, block_size):
        here = columns[start : start + block_size]
        for other_start in range(start, rows, block_size):
            there = columns[other_start : other_start + block_size]
            part = block.view(-1)[: len(here) * len(there)].view(len(here), len(there))
            power(torch.mm(here, there.T, out=part))


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Processor time on the CPU (one thread), elapsed time elsewhere."""
    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print seconds, ratios and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="default: 100 000; on cuda 1 000 000")
    parser.add_argument("--columns", type=int, default=23)
    parser.add_argument("--block-size", type=int, help="default: 1024; on cuda 16 384")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    rows = arguments.rows or (100_000 if on_cpu else 1_000_000)
    block_size = arguments.block_size or (1024 if on_cpu else 16_384)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, arguments.columns, generator=generator)
    residual = torch.randn(rows, generator=generator).to(arguments.device)
    kernel = Gaussian(median_bandwidth(x))
    x = x.to(arguments.device)
    columns = x / x.norm(dim=1, keepdim=True)  # exponents within ±1: no special values in the floor
    measured: dict[str, list[float]] = {"floor, exp": [], "floor, exp2": [], "blockwise": []}
    value = torch.zeros(())
    with threads(1):
        for _ in range(arguments.rounds):
            for name, power in (("floor, exp", torch.Tensor.exp_), ("floor, exp2", torch.Tensor.exp2_)):
                work = lambda p=power: compute_floor(columns, block_size, p)  # noqa: E731
                measured[name].append(seconds_of(work, arguments.device))

            def work() -> None:
                nonlocal value
                value = blockwise_v_statistic(x, residual, kernel, block_size)

            measured["blockwise"].append(seconds_of(work, arguments.device))
    report(measured, rows, arguments.columns, float(value), on_cpu)


def report(measured: dict[str, list[float]], rows: int, columns: int, value: float, on_cpu: bool) -> None:
    """Print one line per thing measured."""
    print(f"n = {rows}, d = {columns}, float32 blocks, V = {value:.6e}")
    for name, times in measured.items():
        ratio = statistics.median(b / t for b, t in zip(measured["blockwise"], times, strict=True))
        print(f"{name:12s} {statistics.median(times):8.2f} s   blockwise / this = {ratio:5.2f}")
    print(f"target: at most {TARGET:.0f} times the floor")
    if on_cpu:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
        print(f"peak memory of the process, torch included: {peak:.0f} MiB")
    else:
        print(f"peak memory on the device: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
