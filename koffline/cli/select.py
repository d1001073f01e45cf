"""``koffline select``: a log and several policies in, a ranking with intervals out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from koffline.cli.options import (
    Log,
    Result,
    gamma_option,
    log_options,
    reading_options,
    result_options,
    settings_options,
    whole,
)
from koffline.errors import ConfigError
from koffline.untrusted.limits import read_json

_EXAMPLES = """Which of several POLICIES is worth most from the initial states of DATA?

All policies are evaluated from the same resampled episodes with the same seeds, so their differences are
compared in pairs: a difference can be significant although the intervals overlap.

\b
Examples:
  koffline select log.hdf5 --policies a.d3 b.d3 uniform --gamma 0.99
  koffline select log.hdf5 --policies a.d3 b.d3 c.d3 --gamma 0.99 --out runs/choice
  koffline select log.npz --policies a.npz epsilon:0.1:a.npz --truths 61.2 55.0 --json
  koffline select log.npz --policies a.npz b.npz --truths truths.json --threshold 50

DATA comes before --policies. --truths takes one number (or JSON file with 'value') per policy, or one JSON
file with a list of numbers or an object from policy to number.
"""
_NUMBER = re.compile(r"-?[\d.]")
_SEVERAL = ("--policies", "--truths")


class _Several(click.Command):
    """``--policies A B C`` is ``--policies A --policies B --policies C``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option's name before every word up to the next option; numbers may be negative."""
        spread: list[str] = []
        name: str | None = None
        for word in args:
            is_value = not word.startswith("-") or _NUMBER.match(word) is not None
            if name is not None and is_value:
                spread += [name, word]
                continue
            option, assigned, _ = word.partition("=")
            name = option if option in _SEVERAL else None
            if name is None or assigned:
                spread.append(word)
        return super().parse_args(ctx, spread)


@click.command(cls=_Several, help=_EXAMPLES, no_args_is_help=True)
@click.option("--policies", "specs", multiple=True, required=True, metavar="A B …", help="Two or more.")
@gamma_option()
@click.option("--estimator", help="kloss (default), fqe, or another of evaluate's.")
@click.option("--level", type=float, help="Level of intervals and comparisons; default 0.95.")
@whole("--seed", 0, default=0, help="Seed of everything random; default 0.")
@click.option("--truths", multiple=True, metavar="NUMBERS|FILE", help="True values: adds regret and ranks.")
@whole("--top-k", default=5, help="Largest k of regret@k; default 5.")
@click.option("--threshold", type=float, help="A value to exceed: says which intervals lie above it.")
@settings_options
@result_options("ranking.json")
@log_options("data", reading_options)
def select(
    log: Log,
    specs: tuple[str, ...],
    truths: tuple[str, ...],
    config: str | None,
    assignments: tuple[str, ...],
    initial_states: str | None,
    result: Result,
    **options: Any,
) -> None:
    """Check everything that can be checked before the long part, then rank and print."""
    from koffline.config import make_settings, parse_assignments, read_yaml

    settings = {**(read_yaml(config) if config else {}), **parse_assignments(assignments)}
    settings |= {key: value for key, value in options.items() if value is not None}
    judged = {key: settings.pop(key) for key in ("top_k", "threshold") if key in settings}
    make_settings({"gamma": 0.5}, settings)  # mistakes are reported before a large log is read
    if len(specs) < 2:
        raise ConfigError("--policies names 1 policy; a ranking needs two or more")
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if twice is not None:
        raise ConfigError(f"--policies names '{twice}' twice; give every policy once")
    true_values = read_truths(truths, specs) if truths else None
    from koffline.report.ranking import MARKER, print_ranking, write_ranking

    def find() -> Any:
        from koffline.ope.problem import read_initial_states
        from koffline.ope.ranking import select_policies
        from koffline.progress import training_bar

        transitions = log.open()
        with training_bar(f"evaluating {len(specs)} policies") as bar:
            return select_policies(
                transitions,
                {spec: spec for spec in specs},
                truths=true_values,
                initial_observations=None if initial_states is None else read_initial_states(initial_states),
                stream=log.stream,
                progress=None if bar is None else lambda name: bar,
                **settings,
                **judged,
            )

    result.present("select", MARKER, find, write_ranking, print_ranking)


def read_truths(words: tuple[str, ...], specs: tuple[str, ...]) -> dict[str, float]:
    """One number per policy, from numbers and JSON files. Raises ConfigError."""
    found = [_read_json(word) if Path(word).is_file() else word for word in words]
    if len(words) == 1 and isinstance(found[0], list):
        found = found[0]
    elif len(words) == 1 and isinstance(found[0], dict) and "value" not in found[0]:
        missing = [spec for spec in specs if spec not in found[0]]
        if missing:
            raise ConfigError(f"--truths {words[0]} has no value for '{missing[0]}'; add it under that name")
        found = [found[0][spec] for spec in specs]
    if len(found) != len(specs):
        raise ConfigError(
            f"--truths gives {len(found)} values for {len(specs)} policies; give one each, in order"
        )
    return {spec: _number(entry, " ".join(words)) for spec, entry in zip(specs, found, strict=True)}


def _read_json(path: str) -> Any:
    try:
        return read_json(Path(path))
    except ValueError:
        raise ConfigError(f"--truths {path} is not valid JSON; write numbers by policy, or a list") from None


def _number(entry: Any, where: str) -> float:
    """A finite number, or the ``value`` of an object."""
    try:
        number = float(entry["value"] if isinstance(entry, dict) else entry)
    except (ValueError, KeyError, TypeError):
        number = float("nan")
    if not -float("inf") < number < float("inf"):
        raise ConfigError(f"--truths received '{where}' with no finite number; give one number per policy")
    return number
