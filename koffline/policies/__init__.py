"""Policies: what is evaluated. Loaders for files, Python objects and built-ins, all with checked outputs."""

from koffline.policies.base import ContinuousPolicy, DiscretePolicy, Policy
from koffline.policies.grid_policy import GridPolicy, save_grid_policy
from koffline.policies.loading import as_policy, load_policy
from koffline.policies.policy_file import save_mlp_policy

__all__ = [
    "ContinuousPolicy",
    "DiscretePolicy",
    "GridPolicy",
    "Policy",
    "as_policy",
    "load_policy",
    "save_grid_policy",
    "save_mlp_policy",
]
