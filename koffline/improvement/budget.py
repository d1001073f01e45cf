"""What the budget of a search did not reach, and what budget would reach it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from koffline.errors import counted, listed
from koffline.improvement.outcome import KeepReason
from koffline.improvement.portfolio import CandidateSpec
from koffline.store.files import write_text
from koffline.untrusted.limits import read_json

# of a budget until which trainings begin; the rest is for choosing and certifying
SHARE_TO_TRAIN = 0.4
NOT_REACHED = "not reached by the budget"
# A step of a candidate takes 1 to 3 times as long as a step of the clone, for each unit
# of its work (on the bundled log).
_STEPS_OF_CLONE = 2.0
_MARGIN = 1.25  # of an estimated time
_BEFORE = 5.0  # seconds of what comes before training
_SECONDS = "seconds"  # folder, inside that of a search
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Unreached:
    """Candidates that the budget did not reach; ``seconds``: a budget that would reach
    them, an estimate.
    """

    names: tuple[str, ...]
    seconds: float

    @property
    def budget(self) -> str:
        """The budget in the form in which it is given."""
        return budget_of(self.seconds)

    @property
    def text(self) -> str:
        """Why they were not trained, and what would have reached them."""
        return f"{NOT_REACHED}, about {self.budget} would do"

    def reason(self, before: KeepReason) -> KeepReason:
        """Why to keep the present policy, where no finalist was certified on.

        before: the reason by the candidates that were reached.
        """
        names = listed(self.names, _NAMES_SHOWN)
        return KeepReason(
            "budget",
            f"{before.text}, and the budget did not reach"
            f" {counted(len(self.names), 'candidate')} ({names})",
            f"give about {self.budget}: with --budget {self.budget} --resume --force the"
            " same command trains those that are missing",
        )


def budget_of(seconds: float) -> str:
    """A time, rounded up, as a budget is written."""
    if seconds < 90.0:
        return f"{math.ceil(seconds)}s"
    if seconds < 5400.0:
        return f"{math.ceil(seconds / 60.0)}m"
    return f"{math.ceil(seconds / 360.0) / 10.0:g}h"


def note_seconds(folder: Path, name: str, seconds: float) -> None:
    """Keep how long a training took. folder: of the search."""
    path = folder / _SECONDS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(seconds))


def unreached(
    names: Sequence[str],
    folder: Path,
    clone: str,
    specs: Sequence[CandidateSpec],
    steps: int,
    workers: int,
) -> Unreached:
    """What the budget did not reach, with an estimate from the trainings that ended.

    names: of candidates that were not reached. folder: of the search. clone: its name
    there, under which the seconds of one of its steps are kept. specs: of all
    candidates. steps: of each candidate.
    """
    measured = 0.0
    work = 0.0
    for spec in specs:
        seconds = _seconds_of(folder, spec.name)
        if spec.work and seconds is not None:
            measured += seconds
            work += spec.work
    of_clone = (_seconds_of(folder, clone) or 0.0) * steps
    of_work = _STEPS_OF_CLONE * of_clone
    if work:
        of_work = measured / work
    total = of_clone + of_work * sum(spec.work for spec in specs) / workers
    seconds = _BEFORE + _MARGIN * total / SHARE_TO_TRAIN
    return Unreached(tuple(names), seconds)


def _seconds_of(folder: Path, name: str) -> float | None:
    path = folder / _SECONDS / f"{name}.json"
    try:
        return float(read_json(path))
    except (OSError, ValueError, TypeError):
        return None
