"""koffline: off-policy evaluation and learning from logged transitions with the kernel
Bellman loss.

Names are imported when first used, so that ``import koffline`` stays fast and silent.
"""

from __future__ import annotations

import sys
from importlib import import_module

from koffline import shown_results as _shown_results

# `typing` takes milliseconds, in which Ctrl-C would end a command with a traceback
TYPE_CHECKING = False
# what type checkers see; `_NAMES_IN` says the same when koffline runs
if TYPE_CHECKING:
    from typing import Any

    from koffline import errors, kernel_loss, kernels
    from koffline.algos.model_files import load
    from koffline.data.disk.log import LazyTransitions
    from koffline.data.disk.writer import ShardWriter
    from koffline.data.replay import ColumnarReplayBuffer
    from koffline.data.sources import open_transitions, write_transitions
    from koffline.data.splitting import split_transitions
    from koffline.data.table.inspection import Inspection, inspect
    from koffline.data.table.mapping import TableMapping
    from koffline.data.transitions import Continuous, Discrete, Transitions
    from koffline.improvement.outcome import Improvement
    from koffline.improvement.procedure import improve
    from koffline.ope.bellman_test import BellmanTest, bellman_test
    from koffline.ope.cross_fit import cross_fit
    from koffline.ope.diagnosis import diagnose
    from koffline.ope.evaluation import estimate_all, evaluate
    from koffline.ope.ranking import PolicyRanking, select_policies
    from koffline.ope.results import Estimate, EstimateTable, Interval
    from koffline.ope.stream_settings import StreamSettings
    from koffline.policies.frames import frame_policy
    from koffline.policies.outputs import greedy_policy, softmax_policy
    from koffline.policy_specs import load_policy

    __version__: str

_NAMES_IN = {
    "koffline.algos.model_files": ["load"],
    "koffline.data.disk.log": ["LazyTransitions"],
    "koffline.data.disk.writer": ["ShardWriter"],
    "koffline.data.replay": ["ColumnarReplayBuffer"],
    "koffline.data.sources": ["open_transitions", "write_transitions"],
    "koffline.data.table.inspection": ["Inspection", "inspect"],
    "koffline.data.table.mapping": ["TableMapping"],
    "koffline.data.transitions": ["Continuous", "Discrete", "Transitions"],
    "koffline.data.splitting": ["split_transitions"],
    "koffline.improvement.procedure": ["improve"],
    "koffline.improvement.outcome": ["Improvement"],
    "koffline.ope.bellman_test": ["BellmanTest", "bellman_test"],
    "koffline.ope.cross_fit": ["cross_fit"],
    "koffline.ope.diagnosis": ["diagnose"],
    "koffline.ope.results": ["Estimate", "EstimateTable", "Interval"],
    "koffline.ope.evaluation": ["estimate_all", "evaluate"],
    "koffline.ope.ranking": ["PolicyRanking", "select_policies"],
    "koffline.ope.stream_settings": ["StreamSettings"],
    "koffline.policies.frames": ["frame_policy"],
    "koffline.policies.outputs": ["greedy_policy", "softmax_policy"],
    "koffline.policy_specs": ["load_policy"],
}
_HOME_OF = {name: home for home, names in _NAMES_IN.items() for name in names}
_MODULES = {
    "errors",
    "fitting",
    "kernel_loss",
    "kernels",
    "objectives",
    "online",
    "policies",
}
_MODULES |= {"replicas"}

__all__ = ["errors", "kernel_loss", "kernels", *_HOME_OF]


def _import_views() -> Any:
    """The views of results, which need matplotlib and jinja2."""
    return import_module("koffline.report.views")


_shown_results.provide(_import_views)

if "gymnasium" in sys.modules:  # gym.make should know our worlds
    import_module("koffline.envs")


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"koffline.{name}")
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("koffline")
        except metadata.PackageNotFoundError:
            # used from a source tree that was never installed
            return "0.0.0+source"
    raise AttributeError(f"module 'koffline' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
