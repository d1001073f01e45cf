"""A Ray cluster of two nodes on this machine: each has its own scheduler, workers and object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STORE = 80_000_000


@contextmanager
def two_nodes(cores: int = 1) -> Iterator[Any]:
    """``ray.cluster_utils.Cluster`` with a head and another node; its ``address`` is for ``--ray``."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cores, "object_store_memory": _STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=cores, object_store_memory=_STORE)
        yield cluster
    finally:
        cluster.shutdown()
