"""Parts of small logs: is more to certify on, or more to learn from, recommended more?

    python -m scripts.bench.improve.small_splits    # 7 processor minutes

Wards and random processes of 2,000 rows (`scripts.bench.improve.logs`), in each of which
much better policies exist: `koffline.improve` with 40, 20 and 40 % of the episodes to
learn, choose and certify on, as it has them for fewer than 150, and with 20 % (and 20
episodes at least) to certify on and the more to learn from. Two candidates and short
trainings, which are the same on both sides. Every search is kept in
docs/results/improve_small_splits.json when it ends, and made once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import koffline
from koffline.improvement import parts
from scripts.bench.embedded import EmbeddedMDP
from scripts.bench.finite_worlds import random_mdp
from scripts.bench.improve.logs import icu_world, softened
from scripts.bench.improve.worlds import FiniteWorld, generator_of

RESULTS = (
    Path(__file__).resolve().parents[3]
    / "docs"
    / "results"
    / "improve_small_splits.json"
)
SHARES = (0.4, 0.2)  # of the episodes to certify on
DRAWS = 4
KINDS = ("ward", "random process")
_SETTINGS = {
    "candidates": ("kernel_policy_iteration-1", "discrete_cql-alpha_4"),
    "shares": (0.5, 1.0),
    "training_steps": 1000,
    "choosing_steps": 400,
    "certifying_steps": 1000,
    "full_replicas": 2,
    "resampled_replicas": 12,
}


def world_of(kind: str, draw: int) -> FiniteWorld:
    """The world of a draw, with its log."""
    name = f"small {kind} {draw}"
    if kind == "ward":
        ward = icu_world(100 + draw)
        behavior = softened(ward.mdp, 0.99, 0.5, generator_of(name, 1))
        return FiniteWorld(name, ward, behavior, 2000, 0.99, 60)
    generator = np.random.default_rng(100 + draw)
    mdp = random_mdp(30, 4, generator, branching=3, ending=0.05)
    points = np.stack(np.meshgrid(*[np.arange(4)] * 3), axis=-1).reshape(-1, 3)
    process = EmbeddedMDP(mdp, generator.permutation(points)[:30] / 4.0)
    behavior = softened(process.mdp, 0.95, 0.5, generator_of(name, 1))
    return FiniteWorld(name, process, behavior, 2000, 0.95, 50)


def measure(kind: str, draw: int, share: float) -> dict[str, Any]:
    """One search: whether it recommends, and what that is truly worth."""
    world = world_of(kind, draw)
    log = world.log()
    with mock.patch.object(parts, "CERTIFY_SHARE_OF_FEW", share):
        result = koffline.improve(
            log, gamma=world.gamma, seed=draw, cores=1, settings=_SETTINGS
        )
    uplift = 0.0
    if result.policy is not None:
        uplift = world.value(result.policy).value - world.behavior_value().value
    return {
        "world": kind,
        "draw": draw,
        "share": share,
        "episodes": log.n_episodes,
        "certified": result.parts["certify"]["units"],
        "recommended": result.recommended,
        "uplift": round(uplift, 4),
        "optimum": round(world.best_value() - world.behavior_value().value, 4),
        "reason": str(result.reason or ""),
    }


def main() -> None:
    """Measure what is missing."""
    content: dict[str, Any] = {
        "command": "python -m scripts.bench.improve.small_splits",
        "rows": [],
    }
    if RESULTS.exists():
        content = json.loads(RESULTS.read_text(encoding="utf-8"))
    done = {(row["world"], row["draw"], row["share"]) for row in content["rows"]}
    for draw in range(DRAWS):
        for kind in KINDS:
            for share in SHARES:
                if (kind, draw, share) in done:
                    continue
                content["rows"].append(measure(kind, draw, share))
                text = json.dumps(content, indent=1) + "\n"
                RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
