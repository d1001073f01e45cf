"""An estimator that cannot speak about a log, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unavailable:
    """No estimate, because of ``reason``: one line for a person, with the remedy where there is one."""

    name: str
    reason: str
