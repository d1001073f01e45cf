"""One process of the fuzzer: reads contents until its time is over or something
escapes.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

_MEMORY = 3 * 2**30
_ALLOWED = 10**8  # what a file may ask for: as much as is read within the time for one
_ONE_FILE_SECONDS = 20


def main() -> None:
    """Arguments: reader, engine, seed, seconds, report, folder for findings."""
    name, engine, seed, seconds, report, out = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KOFFLINE_MAX_BYTES", str(_ALLOWED))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    run = _blind
    if engine == "guided":
        run = _guided
    run(name, int(seed), int(seconds), Path(report), Path(out))


def _bound_memory() -> None:
    """What is in use now, and 3 GB more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))


class _Recorder:
    """Keeps the input that is being read, and counts."""

    def __init__(self, trial: Any, report: Path, kept: Path) -> None:
        self._trial = trial
        self._report = report
        self._kept = kept
        self._next = 0.0

    def __call__(self, content: bytes) -> None:
        self._kept.write_bytes(content)  # a crash of the process leaves it behind
        signal.alarm(_ONE_FILE_SECONDS)
        try:
            self._trial(content)
        finally:
            signal.alarm(0)
            if time.monotonic() > self._next:
                self.write()
                self._next = time.monotonic() + 0.5

    def write(self) -> None:
        """Put the counts on record."""
        counts = {
            "executions": self._trial.executions,
            "accepted": self._trial.accepted,
        }
        self._report.write_text(json.dumps(counts))


def _recorder(
    name: str, seed: int, report: Path, out: Path
) -> tuple[_Recorder, list[bytes]]:
    from scripts.fuzz.readers import Trial, readers

    trial = Trial(name, report.parent)
    kept = out / f"{name}-{seed}.bin"
    seeds = readers()[name].seeds()
    for content in seeds:
        trial(content)
    assert trial.accepted, "not even the seeds can be read"
    _bound_memory()
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _too_slow)
    return _Recorder(trial, report, kept), seeds


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"one file took more than {_ONE_FILE_SECONDS} s")


def _blind(name: str, seed: int, seconds: int, report: Path, out: Path) -> None:
    import numpy as np

    from scripts.fuzz.mutate import mutate

    record, seeds = _recorder(name, seed, report, out)
    generator = np.random.default_rng(seed)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            first, second = (
                seeds[int(i)] for i in generator.integers(len(seeds), size=2)
            )
            record(mutate(first, second, generator))
    finally:
        record.write()


def _guided(name: str, seed: int, seconds: int, report: Path, out: Path) -> None:
    import atheris
    import numpy as np

    from scripts.fuzz.layers import mutate_inside

    parts = ["koffline", "zipfile", "yaml", "json", "numpy.lib", "pickletools"]
    with atheris.instrument_imports(include=parts):
        import zipfile  # noqa: F401

        import yaml  # noqa: F401

        record, seeds = _recorder(name, seed, report, out)
    corpus = report.parent / "corpus"
    corpus.mkdir()
    for i, content in enumerate(seeds):
        (corpus / str(i)).write_bytes(content)

    def one(content: bytes) -> None:
        try:
            record(content)
        except BaseException:
            traceback.print_exc()
            raise

    def bend(content: bytes, most: int, number: int) -> bytes:
        generator = np.random.default_rng(number)
        if generator.random() < 0.5:
            inside = mutate_inside(
                content, lambda part: atheris.Mutate(part, len(part) + 64), generator
            )
            if inside is not None and len(inside) <= most:
                return inside
        return atheris.Mutate(content, most)

    arguments = [
        sys.argv[0],
        str(corpus),
        f"-seed={seed + 1}",
        f"-max_total_time={seconds}",
        "-timeout=40",
        "-rss_limit_mb=0",
        f"-max_len={max(map(len, seeds)) + 4096}",
        "-len_control=0",
        f"-artifact_prefix={out}/{name}-{seed}-",
    ]
    atheris.Setup(arguments, one, custom_mutator=bend)
    try:
        atheris.Fuzz()
    finally:
        record.write()


if __name__ == "__main__":
    main()
