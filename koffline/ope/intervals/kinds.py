"""The kinds of intervals: names that appear in `Interval.kind`, and what each one rests on."""

from __future__ import annotations

BOOTSTRAP = "bootstrap"
BOOTSTRAP_PIVOT = "bootstrap-pivot"
KERNEL_CALIBRATED = "kernel-calibrated"
KERNEL_SIMULTANEOUS = "kernel-simultaneous"
KERNEL_CERTIFIED = "kernel-certified"
KERNEL_CERTIFIED_IID = "kernel-certified-iid"
DUAL = "dual"

# Those that `make_interval` builds on a feature system; BOOTSTRAP is the networks' own.
SYSTEM_KINDS = (
    BOOTSTRAP_PIVOT,
    KERNEL_CALIBRATED,
    KERNEL_SIMULTANEOUS,
    KERNEL_CERTIFIED,
    KERNEL_CERTIFIED_IID,
    DUAL,
)
CERTIFIED_KINDS = (KERNEL_CERTIFIED, KERNEL_CERTIFIED_IID, DUAL)
CALIBRATED_KINDS = (BOOTSTRAP, BOOTSTRAP_PIVOT, KERNEL_CALIBRATED, KERNEL_SIMULTANEOUS)
