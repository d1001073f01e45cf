"""Policies: what is evaluated, with checked outputs; `koffline.policy_specs` finds what a user names."""

from koffline.policies.base import ContinuousPolicy, DiscretePolicy, Policy
from koffline.policies.policy_file import GridPolicy, save_grid_policy, save_mlp_policy

__all__ = [
    "ContinuousPolicy",
    "DiscretePolicy",
    "GridPolicy",
    "Policy",
    "save_grid_policy",
    "save_mlp_policy",
]
