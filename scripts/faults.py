"""Kill koffline's commands at random moments and look what is left.

    python -m scripts.faults --kills 60 --out docs/results/faults.json
    python -m scripts.faults --only train,online --kills 20 --seed 3

After each SIGKILL: results of before are as they were, or the new ones are whole; every
file under a final name can be read; the command taken up again ends with the same bytes
as one that was never killed; no temporary file stays behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from koffline.store.files import digest_of
from scripts.fault_cases import ROOT, Case, all_cases
from scripts.fault_checks import litter_in, unreadable_in

# What differs from one day to the next (seconds, dates, the machine), and the state to
# go on from.
NO_RESULTS = re.compile(
    r"(^|/)(run\.json|[^/]*\.run\.json|\.[^/]*|timing_[^/]*\.csv|time_[^/]*\.csv|timing\.json|checkpoint\.pt"
    r"|errors\.txt|(checkpoints|cells|packed|errors)/.*)$"
)
_T = TypeVar("_T")
_LONGEST = 300.0  # seconds for one command on a busy machine
_EARLIER = "earlier"
_IN_A_ROW = 3
# share of the kills that wait for a change on the disk, not for a time
_BY_CHANGES = 0.6


@dataclass(frozen=True)
class Reference:
    """A command that was not interrupted: digests of its results, seconds, changes seen
    on the disk.

    ground: the folder as it was before.
    """

    ground: Path
    results: Mapping[str, str]
    seconds: float
    changes: int


@dataclass(frozen=True)
class Kill:
    """One kill and what was found. moment: seconds, or the change on the disk that it
    waited for.
    """

    case: str
    moment: str
    hit: bool
    failures: tuple[str, ...]


def run_campaign(
    cases: Sequence[Case], kills: int, seed: int, root: Path, say: Callable[[str], None]
) -> list[Kill]:
    """At least ``kills`` that hit a running command, in rows, each of one case in a
    folder of its own.
    """
    generator = random.Random(seed)
    references: dict[str, Reference] = {}
    killed: list[Kill] = []
    while sum(kill.hit for kill in killed) < kills:
        case = cases[len(killed) // _IN_A_ROW % len(cases)]
        if case.name not in references:
            references[case.name] = reference_of(case, root / case.name)
        folder = root / case.name / f"kills-{len(killed)}"
        row = kill_in_a_row(case, references[case.name], folder, _IN_A_ROW, generator)
        killed += row
        for kill in row:
            outcome = ", ".join(kill.failures) or "as it should be"
            say(
                f"{sum(kill.hit for kill in killed)}/{kills} {case.name}, {kill.moment}:"
                f" {outcome}"
            )
    return killed


def kill_in_a_row(
    case: Case, reference: Reference, folder: Path, times: int, generator: random.Random
) -> list[Kill]:
    """Start, kill, look; take up again and kill that; at last let it end and
    compare.
    """
    shutil.copytree(reference.ground, folder)
    before = _files(folder, folder)
    killed = []
    for number in range(times):
        if number == 0:
            words = case.words
        else:
            words = case.resume_words(folder)
        moment, hit = _kill_at_random(words, reference, folder, generator)
        killed.append(
            Kill(case.name, moment, hit, tuple(_look(case, folder, before, reference)))
        )
    ended = _start(case.resume_words(folder), folder)
    _, errors = ended.communicate(timeout=_LONGEST)
    failures = []
    if ended.returncode != 0:
        failures.append(
            f"taken up again: exit code {ended.returncode}:"
            f" {errors.decode().strip()[-200:]}"
        )
    failures += _differences(reference.results, _results(case, folder))
    failures += [f"left behind: {name}" for name in litter_in(folder)]
    killed[-1] = replace(killed[-1], failures=(*killed[-1].failures, *failures))
    return killed


def _kill_at_random(
    words: Sequence[str], reference: Reference, folder: Path, generator: random.Random
) -> tuple[str, bool]:
    """The moment in words, and whether the command was still running."""
    process = _start(words, folder)
    if generator.random() < _BY_CHANGES and reference.changes:
        change = generator.randint(1, reference.changes)
        moment = f"change {change} of {reference.changes}"
        _wait_for_change(process, folder, change)
    else:
        seconds = generator.uniform(0.3, 1.1) * reference.seconds
        moment = f"after {seconds:.1f} s"
        _wait(process, seconds)
    hit = process.poll() is None
    _kill(process)
    return moment, hit


def _look(
    case: Case, folder: Path, before: Mapping[str, str], reference: Reference
) -> list[str]:
    """Right after the kill."""
    failures = [f"half-written: {name}" for name in unreadable_in(folder)]
    earlier = {
        name: digest for name, digest in before.items() if name.startswith(_EARLIER)
    }
    failures += [
        f"earlier results: {line}"
        for line in _differences(earlier, _files(folder / _EARLIER, folder))
    ]
    old = _results_among(case, before)
    if old:
        results = _results(case, folder)
        if results not in (old, reference.results):
            failures.append("the results are neither the old nor the new ones")
    return failures


def reference_of(case: Case, folder: Path) -> Reference:
    """The command without any kill."""
    ground = folder / "ground"
    folder = folder / "whole"
    _prepare(case, ground)
    shutil.copytree(ground, folder)
    started = time.perf_counter()
    process = _start(case.words, folder)
    changes = _wait_for_change(process, folder, None)
    _, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(
            f"{case.name} fails without any kill: {errors.decode()[-500:]}"
        )
    return Reference(
        ground, _results(case, folder), time.perf_counter() - started, changes
    )


def _prepare(case: Case, folder: Path) -> None:
    """Earlier results beside, and those that the command is to replace."""
    (folder / _EARLIER).mkdir(parents=True)
    (folder / _EARLIER / "estimate.json").write_text(
        '{"value": 1.0}\n', encoding="utf-8"
    )
    if case.before is not None:
        done = _start(case.before, folder)
        _, errors = done.communicate(timeout=_LONGEST)
        if done.returncode != 0:
            raise SystemExit(f"{case.name}, what it replaces: {errors.decode()[-500:]}")


def _start(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own, one thread."""
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=min(seconds, _LONGEST))


def _wait_for_change(
    process: subprocess.Popen[bytes], folder: Path, number: int | None
) -> int:
    """Until that many changes on the disk were seen, or the process has ended; how many
    there were.
    """
    seen = 0
    last = _sizes(folder)
    end = time.monotonic() + _LONGEST
    while (
        process.poll() is None
        and time.monotonic() < end
        and (number is None or seen < number)
    ):
        now = _sizes(folder)
        seen = seen + (now != last)
        last = now
        time.sleep(0.001)
    return seen


def _sizes(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            try:
                sizes[path] = os.stat(path).st_size
            except FileNotFoundError:
                continue
    return sizes


def _files(folder: Path, root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): digest_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _results(case: Case, folder: Path) -> dict[str, str]:
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {name: digest_of(files[name]) for name in _results_among(case, files)}


def _results_among(case: Case, files: Mapping[str, _T]) -> dict[str, _T]:
    return {
        name: digest
        for name, digest in files.items()
        if re.match(case.names, name) and not NO_RESULTS.search(name)
    }


def _differences(wanted: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    names = sorted({*wanted, *present})
    return [
        f"{name} is not the same"
        for name in names
        if wanted.get(name) != present.get(name)
    ]


def _summary(killed: Sequence[Kill], kills: int, seed: int) -> dict[str, object]:
    """late: kills that came after the command had ended; they are no kills."""
    return {
        "command": f"python -m scripts.faults --kills {kills} --seed {seed}",
        **_counts(killed),
        "by_command": {
            name: _counts([kill for kill in killed if kill.case == name])
            for name in dict.fromkeys(kill.case for kill in killed)
        },
        "all": [asdict(kill) for kill in killed],
    }


def _counts(killed: Sequence[Kill]) -> dict[str, int]:
    hits = sum(kill.hit for kill in killed)
    return {
        "kills": hits,
        "late": len(killed) - hits,
        "failures": sum(bool(kill.failures) for kill in killed),
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the campaign; 1 where anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="Names of commands, separated by commas.")
    parser.add_argument("--out", help="JSON file of what was found.")
    options = parser.parse_args(words)
    cases = [
        case
        for case in all_cases()
        if not options.only or case.name in options.only.split(",")
    ]
    with tempfile.TemporaryDirectory(prefix="koffline-faults-") as scratch:
        killed = run_campaign(cases, options.kills, options.seed, Path(scratch), print)
    summary = _summary(killed, options.kills, options.seed)
    if options.out:
        Path(options.out).write_text(
            json.dumps(summary, indent=1) + "\n", encoding="utf-8"
        )
    print(f"{summary['kills']} kills, {summary['failures']} with a failure")
    if summary["failures"]:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
