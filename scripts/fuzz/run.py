"""Fuzz one reader, or all, for some time each, in child processes with bounded memory.

    python -m scripts.fuzz.run --reader hdf5 --seconds 600
    python -m scripts.fuzz.run --reader all --seconds 60 --engine blind

With the extra `fuzz` (atheris) mutations are guided by the coverage of koffline,
zipfile, yaml, json and numpy's file formats; without it, or with --engine blind, they
are drawn at random. A finding is anything but a KofflineError: another exception, a
crash of the process, more than 3 GB of memory, or 20 s for one file. Its input is kept
under --out. The script exits with 1 if there is any finding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.fuzz.readers import SCRATCH, readers

_HANGS_SECONDS = 60
_START_SECONDS = 300
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run the children and say what they found."""
    options = _options()
    if options.reader == "all":
        names = list(readers())
    else:
        names = options.reader.split(",")
    options.out.mkdir(parents=True, exist_ok=True)
    findings = 0
    for name in names:
        record = _fuzz(name, options)
        findings += record["findings"]
        print(json.dumps(record), flush=True)
    if findings:
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--reader", default="all", help=f"all, or some of {','.join(readers())}"
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--engine", choices=["guided", "blind"], default="guided")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.gettempdir()) / "koffline-findings"
    )
    options = parser.parse_args()
    if find_spec("atheris") is None:
        options.engine = "blind"
    return options


def _fuzz(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Children one after the other until the time is over: a crash ends only the child
    that found it.
    """
    record: dict[str, int] = {"executions": 0, "accepted": 0, "findings": 0}
    end = time.monotonic() + options.seconds
    round_number = 0
    while (left := end - time.monotonic()) > 1:
        with tempfile.TemporaryDirectory(
            prefix="koffline-fuzz-", dir=SCRATCH
        ) as scratch:
            report = Path(scratch) / "report.json"
            command = [sys.executable, "-m", "scripts.fuzz.child", name, options.engine]
            numbers = [options.seed + round_number, int(left)]
            command += [*map(str, numbers), str(report), str(options.out)]
            code, output = _watched(command, report)
            if report.exists():
                counts = json.loads(report.read_text())
            else:
                counts = {}
        for key in ("executions", "accepted"):
            record[key] += counts.get(key, 0)
        if code:
            record["findings"] += 1
            (options.out / f"{name}-{options.seed + round_number}.log").write_text(
                output[-20_000:]
            )
        else:
            (options.out / f"{name}-{options.seed + round_number}.bin").unlink(
                missing_ok=True
            )
        round_number += 1
        if not counts.get("executions") and code:
            break  # it does not even start
    return {
        "reader": name,
        "engine": options.engine,
        "seconds": options.seconds,
        **record,
    }


def _watched(command: list[str], report: Path) -> tuple[int, str]:
    """Exit code and words of a child; one that reads nothing for a minute hangs in
    native code.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        started = time.time()
        while child.poll() is None:
            time.sleep(0.5)
            if report.exists():
                heard = report.stat().st_mtime
            else:
                heard = started + _START_SECONDS
            if time.time() - heard > _HANGS_SECONDS:
                child.kill()
                log.write("\nit hangs\n")
        log.seek(0)
        return child.wait(), log.read()


if __name__ == "__main__":
    raise SystemExit(main())
