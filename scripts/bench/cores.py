"""An evaluation on one core against several: wall time, processor time, memory, digits.

    python -m scripts.bench.cores [--cores 1 2] [--rounds 5] [--before CHECKOUT]
        [--out docs/results/cores.json]

The log of the bundled CartPole demo, with 20,000 rows. Every evaluation runs in a fresh
process, after a short one that loads what is loaded once. The numbers of cores (and the
older checkout) take turns; each figure is the least of its rounds, because other work
on a machine only adds to it. Memory is that of all processes of an evaluation, with
shared pages counted once (PSS), in a round of its own.

Two cores of one machine are seldom twice one: they share memory, caches and clock. So
it is also measured how long as many evaluations take that run at once, each on one
core and each in a process of its own. What several cores share could not be faster
than N times the time of one alone, divided by that.

Of one core it is also said which share of the processor time is divided, and two limits
to the speed on 2, 4, 8 and 16 cores, which are no measurements of so many cores:

- Amdahl's law: the divided share takes 1/N of its time.
- The largest pieces: the pieces for N cores are computed one after another on one core,
  and of each division only the piece that takes longest counts. A network alone costs
  more than its share of a stack, and items do not divide evenly. The start of processes
  is not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# also found when run as a plain script; of another checkout when it is measured
sys.path.insert(0, os.environ.get("KOFFLINE_CHECKOUT", str(ROOT)))

ROWS = 20_000
_BETWEEN_SAMPLES = 0.1  # seconds
_LIMITS_OF = (2, 4, 8, 16)  # cores


@dataclass
class Divided:
    """Processor seconds of everything that several cores divide: of all its pieces, and
    of the largest piece of each division.
    """

    all: float = 0.0
    largest: float = 0.0
    is_inside: bool = False

    def count(self, pieces: list[float]) -> None:
        """Add a division by the seconds of its pieces."""
        self.all += sum(pieces)
        self.largest += max(pieces)


def evaluate_once(
    log: str, policy: str, cores: int, steps: int | None, in_turn: bool
) -> None:
    """In a fresh process: evaluate, and print what it took as JSON.

    in_turn: compute the pieces for so many cores one after another in this process.
    """
    import koffline
    from koffline.config import EvaluationSettings
    from koffline.data.sources import open_transitions

    options: dict[str, Any] = {}
    divided = Divided()
    transitions = open_transitions(log)
    if "cores" in EvaluationSettings.model_fields:
        options["cores"] = cores
    if in_turn:
        _compute_in_turn(divided)
    koffline.evaluate(transitions, policy, steps=20, **options)
    if options and cores == 1:
        _time_what_is_divided(divided)
    divided.all = 0.0
    divided.largest = 0.0
    wall = time.perf_counter()
    processor = _processor_seconds()
    estimate = koffline.evaluate(transitions, policy, steps=steps, **options)
    used = _processor_seconds() - processor
    evidence = estimate.evidence
    assert evidence is not None
    digits = repr((estimate.value, estimate.interval, estimate.diagnostics)).encode()
    digest = hashlib.sha256(digits + evidence.replica_values.tobytes()).hexdigest()
    print(
        json.dumps(
            {
                "wall": time.perf_counter() - wall,
                "processor": used,
                "divided": divided.all / used,
                "longest": used - divided.all + divided.largest,
                "digest": digest[:16],
            }
        )
    )


def _time_what_is_divided(divided: Divided) -> None:
    """Count the processor time of everything that several cores would divide, in all
    modules that have been loaded.
    """
    from koffline.jobs import cores

    original = cores.on_cores

    def timed(call: Any, count: int, **options: Any) -> Any:
        if divided.is_inside:  # a piece divides nothing further
            return original(call, count, **options)
        divided.is_inside = True
        before = time.process_time()
        result = original(call, count, **options)
        divided.count([time.process_time() - before])
        divided.is_inside = False
        return result

    for module in list(sys.modules.values()):
        if getattr(module, "on_cores", None) is original:
            module.on_cores = timed  # type: ignore[attr-defined]


def _compute_in_turn(divided: Divided) -> None:
    """Instead of forks, compute the pieces one after another, and count their time."""
    from koffline.jobs import cores

    def compute(call: Any, call_in_fork: Any, pieces: list[slice], hear: Any) -> Any:
        del call, hear
        results = []
        seconds = []
        for piece in pieces:
            before = time.process_time()
            results.append(call_in_fork(piece, lambda news: None))
            seconds.append(time.process_time() - before)
        divided.count(seconds)
        return results

    cores.compute_in_forks = compute


def _processor_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def measure(
    inputs: list[str], checkout: Path, with_memory: bool = False, in_turn: bool = False
) -> dict[str, Any]:
    """Run `evaluate_once` in a fresh process; with the peak of its memory in MB."""
    environment = {**os.environ, "KOFFLINE_CHECKOUT": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve()), "--once", *inputs]
    if in_turn:
        command.append("--in-turn")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    )
    peak = 0.0
    while with_memory and process.poll() is None:
        peak = max(peak, sum(map(_shared_memory, _family(process.pid))))
        time.sleep(_BETWEEN_SAMPLES)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    if with_memory:
        result["memory"] = peak
    return result


def measure_at_once(inputs: list[str], count: int) -> float:
    """Seconds of the slowest of ``count`` evaluations at once, each in a process."""
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(measure, inputs, ROOT) for _ in range(count)]
    return max(float(future.result()["wall"]) for future in running)


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def _shared_memory(pid: int) -> float:
    """A process's memory in MB; of pages that it shares, its share (PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return sum(kilobytes) / 1024.0


def write_log(folder: Path) -> tuple[Path, Path]:
    """The log and the policy of the demo, with more rows."""
    from koffline.data.flat import write_hdf5
    from scripts import build_demo

    build_demo.N_ROWS = ROWS
    _, record = build_demo.build_log()
    log = folder / "cartpole.hdf5"
    write_hdf5(record, log)
    return log, ROOT / "datasets" / "cartpole_policy.npz"


def compare(
    counts: list[int], rounds: int, before: Path | None, steps: int | None
) -> dict[str, Any]:
    """Least figures of each number of cores, and of the older checkout."""
    sides = {_name(count): (count, ROOT) for count in counts}
    if before is not None:
        sides = {"before": (1, before.resolve()), **sides}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log, policy = write_log(Path(folder))

        def inputs(cores: int) -> list[str]:
            return [str(log), str(policy), str(cores), str(steps or 0)]

        for number in range(rounds + 1):
            for name, (count, checkout) in sides.items():
                # the last round measures memory
                measured = measure(
                    inputs(count), checkout, with_memory=number == rounds
                )
                if name not in results:
                    results[name] = {"cores": count, **measured}
                    continue
                best = results[name]
                if measured["digest"] != best["digest"]:
                    raise SystemExit(f"{name}: digits differ between rounds")
                if "memory" in measured:
                    best["memory"] = measured["memory"]
                    continue
                for key in ("wall", "processor", "longest"):
                    best[key] = min(best[key], measured[key])
            for count in counts:
                if count > 1:
                    at_once = measure_at_once(inputs(1), count)
                    of_count = results[_name(count)]
                    of_count["at once"] = min(at_once, of_count.get("at once", at_once))
        single = results.get(_name(1))
        if single is not None:
            single["limits"] = {}
            for count in _LIMITS_OF:
                pieces = measure(inputs(count), ROOT, in_turn=True)
                if pieces["digest"] != single["digest"]:
                    raise SystemExit(f"{count} pieces in turn: digits differ")
                single["limits"][str(count)] = {
                    "amdahl": amdahl(single["divided"], count),
                    "largest pieces": single["longest"] / pieces["longest"],
                }
    return results


def amdahl(divided: float, cores: int) -> float:
    """The most times as fast that ``cores`` cores can be if they divide this share of
    the work evenly. (Amdahl 1967)
    """
    return 1.0 / (1.0 - divided + divided / cores)


def _name(cores: int) -> str:
    """What a row of the table is called."""
    if cores == 1:
        return "1 core"
    return f"{cores} cores"


def describe(results: dict[str, dict[str, Any]]) -> str:
    """A table of the results, each relative to the first."""
    first = next(iter(results.values()))
    lines = [
        f"{'':>10} {'wall':>8} {'ratio':>6} {'cpu':>8} {'ratio':>6} {'PSS':>8}"
        f" {'ratio':>6}  digits"
    ]
    for name, result in results.items():
        lines.append(
            f"{name:>10} {result['wall']:7.2f}s {first['wall'] / result['wall']:6.2f}"
            f" {result['processor']:7.2f}s"
            f" {result['processor'] / first['processor']:6.2f}"
            f" {result['memory']:6.0f}MB {result['memory'] / first['memory']:6.2f}"
            f"  {result['digest']}"
        )
    single = results.get(_name(1))
    if single is not None:
        lines.append(f"{single['divided']:.1%} of the work of one core is divided")
        lines.append("limits, not measurements of so many cores: times as fast at most")
        for name, result in results.items():
            if "at once" in result:
                times = result["cores"] * single["wall"] / result["at once"]
                lines.append(
                    f"{name}: {times:.2f} on this machine, where as many evaluations at"
                    f" once take {result['at once']:.2f} s"
                )
        for cores, limits in single["limits"].items():
            lines.append(
                f"{cores:>4} cores: {limits['amdahl']:5.2f} by Amdahl's law,"
                f" {limits['largest pieces']:5.2f} by the largest pieces"
            )
    if len({result["digest"] for result in results.values()}) > 1:
        lines.append("THE DIGITS DIFFER")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="default: until the value settles")
    parser.add_argument("--before", type=Path, help="another checkout of koffline")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        log, policy, cores, steps = options.once
        evaluate_once(log, policy, int(cores), int(steps) or None, options.in_turn)
        return
    results = compare(options.cores, options.rounds, options.before, options.steps)
    print(describe(results))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
