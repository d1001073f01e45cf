"""Kinds of words that the shell completes with the Tab key; nothing heavy is imported for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from koffline.ope.names import AUTO, ESTIMATORS, KINDS


class Named(click.types.StringParamType):  # what `targets.named_beside` takes for a possible file
    """Text that the shell completes: some names, else files."""

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]] = tuple) -> None:
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """The names that begin so, after the last comma."""
        before, comma, last = incomplete.rpartition(",")
        fitting = [name for name in self._names() if name.startswith(last)]
        return [CompletionItem(f"{before}{comma}{name}") for name in fitting] or [
            CompletionItem(incomplete, type="file")
        ]


def _environments() -> list[str]:
    import gymnasium

    import koffline.envs  # noqa: F401  (registers ours)

    return sorted(gymnasium.registry)


FILE, POLICY = Named(), Named(lambda: ("uniform", "epsilon:"))
ENVIRONMENT = Named(_environments)
ESTIMATOR, INTERVAL = Named(lambda: (*ESTIMATORS, AUTO, "all")), Named(lambda: KINDS)
