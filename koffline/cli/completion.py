"""What the Tab key offers: names of estimators, intervals, policies, configs, formats.

Nothing heavy is imported here. A shell learns of it by one line,
``eval "$(_KOFFLINE_COMPLETE=bash_source koffline)"``, or the same with zsh or fish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
_POLICY_FILES = (".d3", ".pt", ".onnx", ".npz")
_POLICY_NAMES = ("uniform", "epsilon:0.1:")


def _fitting(names: Iterable[str], begun: str) -> list[CompletionItem]:
    """The names that go on from what was typed."""
    return [CompletionItem(name) for name in names if name.startswith(begun)]


def _names_or_files(names: Iterable[str], begun: str) -> list[CompletionItem]:
    """Names that go on from what was typed; where none does, the shell's own files."""
    fitting = _fitting(names, begun)
    if fitting:
        return fitting
    return [CompletionItem(begun, type="file")]


def complete_estimators(
    ctx: click.Context, param: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Estimators, also after a comma, without those that were typed already."""
    from koffline.ope.names import AUTO, ESTIMATORS

    typed, comma, last = begun.rpartition(",")
    names = [name for name in ESTIMATORS if name not in typed.split(",")]
    if not comma:
        names = [AUTO, "all", *names]
    return [
        CompletionItem(f"{typed}{comma}{item.value}") for item in _fitting(names, last)
    ]


def complete_estimator(
    ctx: click.Context, param: click.Parameter, begun: str
) -> list[CompletionItem]:
    """One estimator."""
    from koffline.ope.names import AUTO, ESTIMATORS

    return _fitting([AUTO, *ESTIMATORS], begun)


def complete_intervals(
    ctx: click.Context, param: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Kinds of intervals; those that the estimator on the same line can have."""
    from koffline.errors import ConfigError
    from koffline.ope.names import KINDS, kinds_for

    kinds: Iterable[str] = KINDS
    estimator = ctx.params.get("estimator")
    if estimator and estimator != "all" and "," not in estimator:
        try:
            kinds = kinds_for(estimator)
        except ConfigError:  # of a user's own, or misspelt
            kinds = KINDS
    return _fitting(kinds, begun)


def complete_policies(
    ctx: click.Context, param: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Named policies and files of policies in the current folder, else any file."""
    files = [
        path.name for path in sorted(Path().iterdir()) if path.suffix in _POLICY_FILES
    ]
    return _names_or_files([*_POLICY_NAMES, *files], begun)


def complete_models(
    ctx: click.Context, param: click.Parameter, begun: str
) -> list[CompletionItem]:
    """The value functions that ``diagnose`` fits itself, else any file."""
    return _names_or_files(["kloss", "fqe"], begun)


def complete_tools(
    ctx: click.Context, param: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Tools whose logs are known by name."""
    from koffline.data.table.tools import tool_names

    return _fitting(tool_names(), begun)


def complete_configs(folder: str) -> Completion:
    """Bundled configs of a folder (`koffline.bundled`), else any file."""

    def complete(
        ctx: click.Context, param: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        from koffline.bundled import bundled_configs

        return _names_or_files(bundled_configs(folder), begun)

    return complete


def list_option(folder: str) -> Callable[[Any], Any]:
    """``--list``: print the bundled configs of a folder, and end."""

    def show(ctx: click.Context, param: click.Parameter, is_wanted: bool) -> None:
        from koffline.bundled import as_lines, bundled_configs
        from koffline.cli.output import say

        if is_wanted and not ctx.resilient_parsing:
            say(as_lines(bundled_configs(folder)))
            ctx.exit()

    return click.option(
        "--list",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="List the bundled configs.",
    )
