"""Kinds of words that the shell completes with the Tab key; nothing heavy is imported for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from koffline.ope.names import AUTO, ESTIMATORS, KINDS

# A copy of `koffline.algos.from_config.algorithm_types()`, which would import d3rlpy for seconds.
ALGORITHMS = (
    "awac", "bc", "bcq", "bear", "cal_ql", "cql", "crr", "ddpg", "discrete_bc", "discrete_bcq",
    "discrete_cql", "discrete_sac", "discrete_trust_pcl", "double_dqn", "dqn", "fqe", "iql",
    "kloss_awac", "kloss_bcq", "kloss_cal_ql", "kloss_cql", "kloss_discrete_cql",
    "kloss_discrete_sac", "kloss_dqn", "kloss_fqe", "kloss_iql", "kloss_rebrac", "kloss_sac",
    "kloss_td3_plus_bc", "nfq", "plas", "plas_with_perturbation", "prdc", "rebrac", "sac", "td3",
    "td3_plus_bc", "trust_pcl",
)  # fmt: skip


class Named(click.types.StringParamType):  # what `targets.named_beside` takes for a possible file
    """Text that the shell completes: some names, else files."""

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]] = tuple) -> None:
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """Names that begin with the text after the last comma, else files."""
        before, comma, last = incomplete.rpartition(",")
        fitting = [name for name in self._names() if name.startswith(last)]
        return [CompletionItem(f"{before}{comma}{name}") for name in fitting] or [
            CompletionItem(incomplete, type="file")
        ]


def _environments() -> list[str]:
    import gymnasium

    import koffline.envs  # noqa: F401  (registers ours)

    return sorted(gymnasium.registry)


def _online_settings() -> list[str]:
    from koffline.online.config import CRITICS

    return [f"critic={name}" for name in CRITICS] + [f"env={name}" for name in _environments()]


FILE, POLICY = Named(), Named(lambda: ("uniform", "epsilon:"))
ENVIRONMENT = Named(_environments)
ESTIMATOR, INTERVAL = Named(lambda: (*ESTIMATORS, AUTO, "all")), Named(lambda: KINDS)
SETTING = Named(lambda: [f"algo.type={name}" for name in ALGORITHMS])
ONLINE_SETTING = Named(_online_settings)


class Bash(BashComplete):
    """Completion for bash, which splits words at every ``=``: join them on input, split them on output."""

    _is_broken = False

    def get_completion_args(self) -> tuple[list[str], str]:
        """The complete words, and the word that is being typed."""
        args, incomplete = super().get_completion_args()
        words: list[str] = []
        for word in (*args, incomplete):
            is_part = bool(words) and (word == "=" or words[-1].endswith("=")) and not word.startswith("-")
            words[-1:] = [words[-1] + word] if is_part else [*words[-1:], word]
        *before, last = words
        self._is_broken = "=" in last
        return before, last

    def format_completion(self, item: CompletionItem) -> str:
        """Text of a completion for bash: the part after the last ``=``."""
        return f"{item.type},{item.value.rpartition('=')[2] if self._is_broken else item.value}"


add_completion_class(Bash)
