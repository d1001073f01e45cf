"""Do lower ends of certificates hold? Fixed policies, fresh logs of a bandit.

A search spends minutes a log; its certificate alone takes a second on one-step logs, so
that the guarantee can be counted. Both policies are as finalists are: not chosen on
these rows. ``better``: truly better by much; ``equal``: every arm pays alike, so that
every lower end above 0 would be a false improvement.
"""

from __future__ import annotations

from typing import Any

from koffline.config import make_settings
from koffline.improvement.certificate import certify
from koffline.improvement.settings import make_improve_settings
from koffline.ope.workspace import SharedByPolicies
from koffline.policies import DiscretePolicy
from scripts.bench import controllers as c
from scripts.bench.improve.logs import equal_arms, offers
from scripts.bench.improve.worlds import Bandit
from scripts.bench.worlds import BestOffer, Clicks

KINDS = ("better", "equal")
LEVEL = 0.95
ROWS = 400


def problem(kind: str, seed: int) -> tuple[Bandit, DiscretePolicy]:
    """The bandit with a fresh log, and the policy to certify."""
    if kind == "better":
        policy = DiscretePolicy(5, c.Mixed(0.3, BestOffer(Clicks(2))), "best offer")
        return offers(f"certificate {seed}", ROWS, 2), policy
    shares = c.Fixed((0.5, 0.2, 0.1, 0.1, 0.1))
    return equal_arms(f"certificate {seed}", ROWS, 5, 0.3), DiscretePolicy(5, shares)


def measure(kind: str, seeds: range) -> list[dict[str, Any]]:
    """A record for each log: uplift with its certificate, and the truth."""
    defaults = make_improve_settings(None)
    records = []
    for seed in seeds:
        world, policy = problem(kind, seed)
        settings = make_settings(
            {
                "gamma": world.gamma,
                "seed": seed,
                "cores": 1,
                "level": LEVEL,
                "full_replicas": defaults.full_replicas,
                "resampled_replicas": defaults.resampled_replicas,
            }
        )
        certificate = certify(
            world.log(), policy, defaults.finalists, settings, SharedByPolicies()
        )
        low = None
        if certificate.interval is not None:
            low = certificate.interval.low
        records.append(
            {
                "kind": kind,
                "seed": seed,
                "uplift": certificate.uplift,
                "low": low,
                "certified": certificate.passes,
                "truth": world.value(policy).value - world.behavior_value().value,
            }
        )
    return records
