"""Rollouts played in several processes or on a Ray cluster: workers play whole batches of episodes.

An episode depends on the seed and its own number alone, and batches come back in their order, so rows are
those of a build in one process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koffline.builders.rollouts import Columns, RolloutPlayer, RolloutSettings
from koffline.jobs.mapping import PassSettings

_EPSILON = "epsilon:"


@dataclass(frozen=True)
class PolicyFile:
    """A policy in a file, with its content, which other machines do not see. prefix: "epsilon:0.1:" or ""."""

    prefix: str
    name: str
    content: bytes


@dataclass(frozen=True, eq=False)
class RolloutWork:
    """What a worker needs to play any batch. policies: `PolicyFile`, or anything that a player takes."""

    settings: RolloutSettings
    policies: tuple[Any, ...]


def batches_elsewhere(
    settings: RolloutSettings, policies: Sequence[Any], where: PassSettings
) -> Callable[[Iterable[int]], Iterator[Columns]] | None:
    """What plays the batches of given numbers, in their order; None where that is this process.

    It raises ConfigError, PolicyError as `RolloutPlayer` does, and JobError for workers that keep dying.
    """
    if where.ray is None and where.workers == 1:
        return None
    work = RolloutWork(settings, tuple(_packed(policy) for policy in policies))

    def play(numbers: Iterable[int]) -> Iterator[Columns]:
        for mapped in where.map(play_batch, numbers, work, name=lambda number: f"batch {number} of episodes"):
            yield mapped.value

    return play


_last: tuple[RolloutWork, RolloutPlayer] | None = None


def play_batch(work: RolloutWork, number: int) -> Columns:
    """At the worker: one batch. Its player is made once and kept for the next batches."""
    global _last
    if _last is None or _last[0] is not work:
        with contextlib.ExitStack() as stack:
            policies = [_unpacked(policy, stack) for policy in work.policies]
            _last = work, RolloutPlayer(work.settings, policies)
    return _last[1].play_batch(number)


def _packed(policy: Any) -> Any:
    """A name of a file, also behind "epsilon:…:", with the file's content; anything else as it is."""
    if not isinstance(policy, str | Path):
        return policy
    prefix, name = "", str(policy)
    while name.startswith(_EPSILON) and name.count(":") > 1:
        _, number, name_left = name.split(":", 2)
        prefix, name = f"{prefix}{_EPSILON}{number}:", name_left
    path = Path(os.path.expanduser(name))
    return PolicyFile(prefix, path.name, path.read_bytes()) if path.is_file() else policy


def _unpacked(policy: Any, stack: contextlib.ExitStack) -> Any:
    """The policy for a player; a file lies in a folder of its own until the stack is left."""
    if not isinstance(policy, PolicyFile):
        return policy
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="koffline-"))
    path = Path(folder) / policy.name
    path.write_bytes(policy.content)
    return f"{policy.prefix}{path}"
