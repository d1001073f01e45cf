"""An evaluation on one core against several: wall time, processor time, memory, digits.

    python -m scripts.bench.cores [--cores 1 2] [--rounds 5] [--before CHECKOUT]
        [--out docs/results/cores.json]

The log of the bundled CartPole demo, with 20,000 rows. Every evaluation runs in a fresh
process, after a short one that loads what is loaded once. The numbers of cores (and the
older checkout) take turns; each figure is the least of its rounds, because other work
on a machine only adds to it. Memory is that of all processes of an evaluation, with
shared pages counted once (PSS), in a round of its own. Of one core it is also said
which share of the processor time can be divided.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# also found when run as a plain script; of another checkout when it is measured
sys.path.insert(0, os.environ.get("KOFFLINE_CHECKOUT", str(ROOT)))

ROWS = 20_000
_BETWEEN_SAMPLES = 0.1  # seconds


def evaluate_once(log: str, policy: str, cores: int, steps: int | None) -> None:
    """In a fresh process: evaluate, and print what it took as JSON."""
    import koffline
    from koffline.config import EvaluationSettings
    from koffline.data.sources import open_transitions

    options: dict[str, Any] = {}
    divided = [0.0]
    if "cores" in EvaluationSettings.model_fields:
        options["cores"] = cores
        if cores == 1:
            _time_what_is_divided(divided)
    transitions = open_transitions(log)
    koffline.evaluate(transitions, policy, steps=20, **options)
    divided[0] = 0.0
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
                "divided": divided[0] / used,
                "digest": digest[:16],
            }
        )
    )


def _time_what_is_divided(seconds: list[float]) -> None:
    """Add up the processor time of everything that several cores would divide."""
    from koffline import fitting
    from koffline.ope.assumptions import markov
    from koffline.ope.networks import equations, last_layer

    def timed(function: Any) -> Any:
        def call(piece: Any, count: int, **options: Any) -> Any:
            before = time.process_time()
            result = function(piece, count, **options)
            seconds[0] += time.process_time() - before
            return result

        return call

    for module in (fitting, last_layer, equations, markov):
        module.on_cores = timed(module.on_cores)  # type: ignore[attr-defined]


def _processor_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def measure(
    inputs: list[str], checkout: Path, with_memory: bool = False
) -> dict[str, Any]:
    """Run `evaluate_once` in a fresh process; with the peak of its memory in MB."""
    environment = {**os.environ, "KOFFLINE_CHECKOUT": str(checkout)}
    command = [sys.executable, str(Path(__file__).resolve()), "--once", *inputs]
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
        for number in range(rounds + 1):
            for name, (count, checkout) in sides.items():
                inputs = [str(log), str(policy), str(count), str(steps or 0)]
                # the last round measures memory
                measured = measure(inputs, checkout, with_memory=number == rounds)
                if name not in results:
                    results[name] = measured
                    continue
                best = results[name]
                if measured["digest"] != best["digest"]:
                    raise SystemExit(f"{name}: digits differ between rounds")
                if "memory" in measured:
                    best["memory"] = measured["memory"]
                    continue
                for key in ("wall", "processor"):
                    best[key] = min(best[key], measured[key])
    return results


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
    options = parser.parse_args()
    if options.once:
        log, policy, cores, steps = options.once
        evaluate_once(log, policy, int(cores), int(steps) or None)
        return
    results = compare(options.cores, options.rounds, options.before, options.steps)
    print(describe(results))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
