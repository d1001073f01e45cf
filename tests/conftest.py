"""Shapes and types of koffline's own functions are checked at run time while the tests run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two busy threads on two cores collapse

from jaxtyping import install_import_hook

_CHECKED = (
    "batches",
    "bellman",
    "builders",
    "checkpoints",
    "data",
    "dual_objectives",
    "dual_steps",
    "envs",
    "experiments",
    "fitting",
    "kernel_loss",
    "kernels",
    "objectives",
    "online.critics",
    "online.learner",
    "online.trust_region",
    "online.windows",
    "ope",
    "policies",
    "replicas",
    "runs",
    "solvers",
    "stacked_adam",
    "stacked_module",
    "stacked_products",
    "stacked_tangents",
    "steps",
    "training",
)
install_import_hook([f"koffline.{name}" for name in _CHECKED], "beartype.beartype")
