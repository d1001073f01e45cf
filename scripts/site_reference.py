"""Reference pages of the site, made when it is built: commands from click, settings
from their records.

MkDocs runs this through mkdocs-gen-files (mkdocs.yml); nothing it makes is committed.
In the repository docs/reference holds short pages of the same names, which say where to
look; those of the site replace them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click
from pydantic import BaseModel

from koffline.cli import cli

# Records of settings, and what a reader calls them.
SETTINGS = (
    (
        "koffline evaluate and select: `--set` and `--config`",
        "koffline.config:EvaluationSettings",
    ),
    (
        "koffline diagnose and `koffline.bellman_test`",
        "koffline.config:BellmanSettings",
    ),
    (
        "Intervals made on features",
        "koffline.ope.intervals.base:KernelIntervalSettings",
    ),
    ("koffline improve: `--set`", "koffline.improvement.settings:ImproveSettings"),
    ("Passes over a log on disk", "koffline.ope.stream_settings:StreamSettings"),
    ("The mapping of a table", "koffline.data.table.mapping:TableMapping"),
    ("koffline train: `data`", "koffline.train.config:DataSettings"),
    ("koffline train: `data.split`", "koffline.train.config:SplitSettings"),
    ("koffline train: `algo`", "koffline.train.config:AlgoSettings"),
    ("koffline train: `train`", "koffline.train.config:TrainSettings"),
    (
        "koffline train: `evaluators`, over logged rows",
        "koffline.train.config:LogEvaluatorSettings",
    ),
    (
        "koffline train: `evaluators`, `soft_opc`",
        "koffline.train.config:SoftOPCSettings",
    ),
    (
        "koffline train: `evaluators`, in an environment",
        "koffline.train.config:EnvironmentSettings",
    ),
    ("koffline train: `logger`", "koffline.train.config:LoggerSettings"),
    (
        "Kernel-loss critics: `algo.params`",
        "koffline.algos.kernel_bellman_loss:KernelCriticConfig",
    ),
    ("Trust-PCL on logs: `algo.params`", "koffline.algos.trust_pcl:TrustPCLConfig"),
    ("koffline online", "koffline.online.config:OnlineConfig"),
    ("koffline build rollouts", "koffline.builders.rollouts:RolloutSettings"),
)
# `name: meaning` or `name, other: meaning` inside a docstring, up to the next such
# name.
_MEANING = re.compile(r"(?:^|(?<=[.)\n]\s)|(?<=[.)]))((?:[a-z_]+, )*[a-z_]+): ")


def meanings(record: type) -> dict[str, str]:
    """What the docstrings of a record and of those it extends say of each field."""
    by_field: dict[str, str] = {}
    for owner in reversed(record.__mro__[:-1]):
        text = " ".join((owner.__dict__.get("__doc__") or "").split())
        _, *parts = _MEANING.split(text)
        for names, meaning in zip(parts[::2], parts[1::2], strict=True):
            if not meaning.startswith("as in `"):  # what is extended says it
                by_field.update(
                    dict.fromkeys(names.split(", "), meaning.strip().rstrip("."))
                )
    return by_field


def fields(record: type) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each field that a user may set."""
    meaning_of = meanings(record)
    if issubclass(record, BaseModel):
        for name, field in record.model_fields.items():
            if field.is_required():
                value = dataclasses.MISSING
            else:
                value = field.get_default(call_default_factory=True)
            yield name, _shown(value), meaning_of.get(name) or field.description or ""
        return
    assert dataclasses.is_dataclass(record)
    for attribute in dataclasses.fields(record):
        if attribute.name in meaning_of:
            yield attribute.name, _shown(attribute.default), meaning_of[attribute.name]


def _shown(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "needed"
    if isinstance(value, BaseModel) or value in ({}, ()):
        return "none"
    if value is None or isinstance(value, bool):
        return {None: "unset", True: "yes", False: "no"}[value]
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value}`"


def first_sentence(record: type) -> str:
    """What a record is, without its fields."""
    text = inspect.getdoc(record) or ""
    return " ".join(text.split("\n\n")[0].split())


def settings_page() -> str:
    """Every setting with its default and its meaning."""
    lines = [
        "# Settings",
        "",
        "Every setting, its default and its meaning, as the program reads them.",
        "",
    ]
    for title, place in SETTINGS:
        module, _, name = place.partition(":")
        record = getattr(import_module(module), name)
        lines += [
            f"## {title}",
            "",
            first_sentence(record),
            "",
            *_head("setting", "default", "meaning"),
        ]
        lines += [
            f"| `{name}` | {default} | {_cell(meaning)} |"
            for name, default, meaning in fields(record)
        ]
        lines += [""]
    return "\n".join(lines)


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its full name, groups before what they hold."""

    def below(
        name: str, command: click.Command, parent: click.Context | None
    ) -> Iterator[Any]:
        context = click.Context(command, info_name=name.split()[-1], parent=parent)
        yield name, command, context
        if not isinstance(command, click.Group):
            return
        for child in command.list_commands(context):
            subcommand = command.get_command(context, child)
            assert subcommand is not None
            yield from below(f"{name} {child}", subcommand, context)

    return below("koffline", cli, None)


COMPLETION = (
    "The Tab key completes commands, options and the names of estimators, intervals,"
    " policies, configs and formats after"
    ' `eval "$(_KOFFLINE_COMPLETE=bash_source koffline)"` (or `zsh_source`,'
    " `fish_source`) in the shell's start file."
)


def commands_page() -> str:
    """Every command as its own --help tells it."""
    lines = ["# Commands", "", "What `koffline COMMAND --help` says, on one page.", ""]
    lines += [COMPLETION, ""]
    for name, command, context in commands():
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        lines += [
            f"## {name}",
            "",
            "```text",
            usage,
            "```",
            "",
            *_prose(command.help or ""),
        ]
        options = [
            option
            for option in command.params
            if isinstance(option, click.Option) and not option.hidden
        ]
        if options:
            lines += _head("option", "what it does")
        for option in options:
            flags, text = option.get_help_record(context) or ("", "")
            lines.append(f"| `{flags}` | {_cell(text)} |")
        lines += [""]
    return "\n".join(lines)


def _prose(text: str) -> Iterator[str]:
    """Paragraphs of a help text; what it keeps unwrapped becomes a block of code."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b"):
            yield from (
                "```text",
                inspect.cleandoc(paragraph.lstrip("\b\n")),
                "```",
                "",
            )
        else:
            yield from (" ".join(paragraph.split()).replace("<", "&lt;"), "")


def _head(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "<run_path>":  # mkdocs-gen-files runs scripts under this name
    import mkdocs_gen_files

    for page, make in (("commands", commands_page), ("settings", settings_page)):
        with mkdocs_gen_files.open(f"reference/{page}.md", "w") as file:
            file.write(make())
