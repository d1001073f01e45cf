"""How the interval of an evaluation depends on the norm that its kind assumes."""

from __future__ import annotations

from koffline.ope.intervals.sensitivity import NormSensitivity, norm_sensitivity
from koffline.ope.intervals.settings import KernelIntervalSettings, enough_draws
from koffline.ope.names import CERTIFIED_SYSTEM_KINDS, DUAL, KERNEL_CERTIFIED, KERNEL_SIMULTANEOUS
from koffline.ope.workspace import Workspace


def sensitivity_to_norm(workspace: Workspace, kind: str) -> NormSensitivity | None:
    """Ends of the interval for other ρ; None for a kind that assumes no norm.

    "dual" has the ends of "kernel-certified" at its optimum, so it is shown by those.
    """
    if kind not in (*CERTIFIED_SYSTEM_KINDS, KERNEL_SIMULTANEOUS):
        return None
    settings = workspace.settings
    return norm_sensitivity(
        workspace.held_system if kind == KERNEL_SIMULTANEOUS else workspace.fixed_system,
        kind=KERNEL_CERTIFIED if kind == DUAL else kind,
        settings=KernelIntervalSettings(
            level=settings.level,
            norm_bound=settings.norm_bound,
            reward_bounds=settings.reward_bounds,
            draws=enough_draws(settings.level),
            seed=settings.seed,
        ),
    )
