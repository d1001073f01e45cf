"""Remedies for a policy that grows wider while its returns fall: Trust-PCL with the
kernel loss on InvertedDoublePendulum, short runs.

    python -m scripts.bench.deviation_remedies --out docs/results/deviation-remedies.json
    python -m scripts.bench.deviation_remedies --only "recency 0.003" --steps 120000

Two seeds of each variant. What no setting of `koffline online` does is done here: σ cut
at a bound after each step; the policy's residual centred on the mini-batch; the policy's
residual ended by the slow copy of V, while V itself is learned without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from koffline.fitting import threads
from koffline.online import critics
from koffline.online.config import OnlineConfig, OnlineRun
from koffline.online.lockstep import LockStep
from koffline.online.paths import Minibatch
from scripts.bench.deviation_pull import ENVIRONMENT

STEPS = 60_000
EVERY = 10_000
SEEDS = (0, 1)


@dataclass(frozen=True)
class Variant:
    """Settings that differ from the defaults, and changes that are no settings.

    bound: largest σ. centred: the policy's residual minus its mean. slow_end: the
    policy's residual ends in the slow copy of V.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    bound: float = math.inf
    centred: bool = False
    slow_end: bool = False


_SLOW = {"critic": "kloss_slow", "diag_weight": 0.3}
VARIANTS: dict[str, Variant] = {
    "K-loss": Variant(),
    "σ at most 0.35": Variant(bound=0.35),
    "σ at most 0.2": Variant(bound=0.2),
    "centred residual": Variant(centred=True),
    "slow copy for the policy": Variant(slow_end=True),
    "batch 256": Variant({"batch_size": 256, "learning_starts": 256}),
    "U, batch 256": Variant(
        {"batch_size": 256, "learning_starts": 256, "diag_weight": 0.0}
    ),
    "no clipping": Variant({"clip_adv": 0.0}),
    "diag_weight 0.3": Variant({"diag_weight": 0.3}),
    "kl_coef 10": Variant({"kl_coef": 10.0, "clip_adv": 10.0}),
    "recency 0.003": Variant({"recency": 0.003}),
    "recency 0.01": Variant({"recency": 0.01}),
    "recency 0.003, σ at most 0.35": Variant({"recency": 0.003}, bound=0.35),
    "TD(0)": Variant({"critic": "td0"}),
    "TD(0), recency 0.003": Variant({"critic": "td0", "recency": 0.003}),
    "RG": Variant({"critic": "rg"}),
    "RG, recency 0.003": Variant({"critic": "rg", "recency": 0.003}),
    "K-loss with a slow copy": Variant(_SLOW),
    "K-loss with a slow copy, recency 0.003": Variant({**_SLOW, "recency": 0.003}),
}


class Remedied:
    """Replaces the policy's gradient of a stack's learner after it was computed."""

    def __init__(self, stack: LockStep, variants: Sequence[Variant]) -> None:
        self._learner = stack.learner
        self._compute = stack.learner.compute_gradient
        self._clip = torch.tensor(
            [[run.config.clip_adv or math.inf] for run in stack.runs]
        )
        self._is_centred = torch.tensor([[variant.centred] for variant in variants])
        self._has_slow_end = torch.tensor([[variant.slow_end] for variant in variants])
        self._by_slow_copies = torch.tensor(
            [
                run
                for run, variant in enumerate(variants)
                if variant.slow_end or variant.settings.get("critic") == "kloss_slow"
            ],
            dtype=torch.int64,
        )

    def compute_gradient(
        self, batch: Minibatch, coefficients: Tensor
    ) -> dict[str, Tensor]:
        """As `Learner.compute_gradient`, with the policy's part by its own residual."""
        diagnostics = self._compute(batch, coefficients)
        learner = self._learner
        evaluated = critics.Residual(
            learner.networks, self._by_slow_copies, batch, coefficients
        )
        residual = evaluated.windows
        valid = evaluated.values.valid
        mean = (residual * valid).sum(dim=1, keepdim=True) / valid.sum(
            dim=1, keepdim=True
        )
        residual = torch.where(self._is_centred, residual - mean, residual)
        bounded = residual.clamp(-self._clip, self._clip) * valid
        of_windows = bounded.view_as(batch.discounts).unsqueeze(3)
        share = (of_windows * batch.weights).sum(dim=2)
        share = share / batch.valid.amax(dim=2).sum(dim=1)[:, None, None]
        slope = share.flatten(1).gather(1, batch.rows) * -batch.covered
        gradients = evaluated.density.gradients(slope, evaluated.pull_policy)
        is_changed = self._is_centred | self._has_slow_end
        for place, part in zip(learner.online.shape.parts[:2], gradients, strict=True):
            before = learner.gradient[:, place]
            learner.gradient[:, place] = torch.where(is_changed, part, before)
        return diagnostics


def run_variants(names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Train the seeds of variants that share a stack; a row every 10,000 steps."""
    base = OnlineConfig(ENVIRONMENT, reward_scale=0.1, steps=steps, window_length=1)
    runs = []
    variants = []
    for name in names:
        for seed in SEEDS:
            config = base.with_changes(**VARIANTS[name].settings)
            runs.append(OnlineRun(config, seed))
            variants.append(VARIANTS[name])
    widest = torch.tensor([[math.log(variant.bound)] for variant in variants])
    rows = []
    with contextlib.closing(LockStep(runs)) as stack:
        if any(variant.centred or variant.slow_end for variant in variants):
            remedied = Remedied(stack, variants)
            stack.learner.compute_gradient = remedied.compute_gradient  # type: ignore[method-assign]
        while stack.steps < steps:
            stack.iterate()
            deviations = stack.learner.online.log_std
            deviations.copy_(torch.minimum(deviations, widest.to(deviations)))
            if stack.steps % EVERY == 0:
                rows += rows_of(stack, names)
    return rows


def rows_of(stack: LockStep, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each run, printed."""
    metrics = stack.take_metrics()
    evaluated = stack.evaluate()
    rows = []
    for place, run in enumerate(stack.runs):
        rows.append(
            {
                "variant": names[place // len(SEEDS)],
                "seed": run.seed,
                "step": stack.steps,
                "sampled_return": float(evaluated["sampled_return"][place]),
                "greedy_return": float(evaluated["return"][place]),
                "deviation": float(metrics["policy_std"][place]),
                "mean_residual": float(metrics["residual_mean"][place]),
                "residual_std": float(metrics["residual_std"][place]),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def stacks_of(names: Sequence[str]) -> list[list[str]]:
    """Variants that can share a stack: those of one size of mini-batches."""
    by_size: dict[int, list[str]] = {}
    for name in names:
        size = VARIANTS[name].settings.get("batch_size", 64)
        by_size.setdefault(size, []).append(name)
    return list(by_size.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--out", type=Path, help="JSON file; rows of other runs stay")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with threads(1):
        for names in stacks_of(arguments.only):
            rows += run_variants(names, arguments.steps)
    if arguments.out is None:
        return
    kept: list[dict[str, Any]] = []
    if arguments.out.is_file():
        new = {row["variant"] for row in rows}
        kept = [
            row
            for row in json.loads(arguments.out.read_text())["rows"]
            if row["variant"] not in new
        ]
    content = {
        "command": "python -m scripts.bench.deviation_remedies [--only VARIANT]"
        " [--steps N] --out docs/results/deviation-remedies.json",
        "rows": kept + rows,
    }
    arguments.out.write_text(
        json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
