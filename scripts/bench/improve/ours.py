"""What `koffline.improve` says of a log, and what is true."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from koffline import Transitions
from koffline.errors import DataError
from scripts.bench.improve.answers import Refusal, ends_of, number_of, text_of
from scripts.bench.improve.worlds import Value, World

ROOT = Path(__file__).resolve().parents[3]
_PRECISE_OF_BEST = 3


def measure(
    world: World, improve: Callable[..., Any], work: Path | None = None, seed: int = 0
) -> dict[str, Any]:
    """Run it with its defaults, and ask the world about its policy and its candidates.

    improve: `koffline.improve`, or what is tested in its place. work: a folder in which
    a search that was cut goes on; it is removed afterwards. Every candidate is valued
    by few rollouts, the best few and the recommended one by many.
    """
    log = world.log()
    behavior = world.behavior_value()
    result: Any
    try:
        result = search(log, world.gamma, seed, improve, work)
    except DataError as error:
        result = Refusal(str(error))
    value = behavior
    if result.recommended:
        value = world.value(result.policy)
    candidates = [_candidate(world, candidate) for candidate in result.candidates]
    valued = [number for number, record in enumerate(candidates) if record["value"]]
    valued.sort(key=lambda number: candidates[number]["value"][0], reverse=True)
    for number in valued[:_PRECISE_OF_BEST]:
        policy = result.candidates[number].policy
        candidates[number]["value"] = list(world.value(policy))
        candidates[number]["precise"] = True
    return {
        "code": code_digest(),
        "rows": len(log),
        "episodes": log.n_episodes,
        "recommended": bool(result.recommended),
        "name": result.name,
        "uplift": number_of(result.uplift),
        "interval": ends_of(result.interval),
        "reason": text_of(result.reason),
        "behavior": list(behavior),
        "value": list(value),
        "best": world.best_value(),
        "candidates": candidates,
    }


def search(
    log: Transitions,
    gamma: float,
    seed: int,
    improve: Callable[..., Any],
    work: Path | None,
) -> Any:
    """What improve says on one core; with ``work`` it can be cut and goes on."""
    if work is None:
        return improve(log, gamma=gamma, seed=seed, cores=1)
    result = improve(
        log, gamma=gamma, seed=seed, cores=1, out=work, resume=True, force=True
    )
    shutil.rmtree(work, ignore_errors=True)
    return result


def code_digest() -> str:
    """Digest of the code that searches: work of other code is not gone on with."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "koffline" / "improvement").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _candidate(world: World, candidate: Any) -> dict[str, Any]:
    value = None
    if candidate.policy is not None:
        value = list(world.value(candidate.policy, precise=False))
    return {
        "name": candidate.name,
        "stage": str(candidate.stage),
        "uplift": number_of(candidate.uplift),
        "interval": ends_of(candidate.interval),
        "value": value,
        "precise": False,
    }


def uplift(cell: dict[str, Any]) -> Value:
    """True value of what would run, less the behavior policy's, and its error."""
    return difference(Value(*cell["value"]), Value(*cell["behavior"]))


def difference(value: Value, behavior: Value) -> Value:
    """The difference of two independent values."""
    error = math.hypot(value.error, behavior.error)
    return Value(value.value - behavior.value, error)
