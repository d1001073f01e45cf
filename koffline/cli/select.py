"""``koffline select``: a log and several policies in, a ranking with intervals out."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from koffline.cli.options import (
    Reading,
    action_space_options,
    open_for_reading,
    reading_options,
    requested_space,
    result_options,
    settings_options,
    table_options,
)
from koffline.cli.results import begin, end
from koffline.errors import ConfigError
from koffline.store.run_record import shown_command
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
@click.argument("data")
@click.option("--policies", "specs", multiple=True, required=True, metavar="A B …", help="Two or more.")
@click.option("--gamma", type=float, help="Discount factor, inside (0, 1); default: the log's own hint.")
@click.option("--estimator", help="kloss (default), fqe, or another of evaluate's.")
@click.option("--level", type=float, help="Level of intervals and comparisons; default 0.95.")
@click.option("--seed", type=int, default=0, help="Seed of everything random; default 0.")
@click.option("--truths", multiple=True, metavar="NUMBERS|FILE", help="True values: adds regret and ranks.")
@click.option("--top-k", type=int, default=5, help="Largest k of regret@k; default 5.")
@click.option("--threshold", type=float, help="A value to exceed: says which intervals lie above it.")
@settings_options
@result_options("ranking.json")
@action_space_options
@table_options
@reading_options
def select(
    data: str,
    specs: tuple[str, ...],
    truths: tuple[str, ...],
    config: str | None,
    assignments: tuple[str, ...],
    initial_states: str | None,
    out: str | None,
    force: bool,
    as_json: bool,
    discrete: int | None,
    continuous: tuple[float, float] | None,
    mapping: Any,
    reading: Reading,
    **options: Any,
) -> None:
    """Check everything that can be checked before the long part, then rank and print."""
    from koffline.config import parse_assignments, read_yaml

    settings = {**(read_yaml(config) if config else {}), **parse_assignments(assignments)}
    settings.update({key: value for key, value in options.items() if value is not None})
    _check(specs, settings)
    true_values = read_truths(truths, specs) if truths else None
    from koffline.report.ranking import MARKER, print_ranking, write_ranking

    run = begin("select", out, force, MARKER)
    # A user's policy may print while it is imported or called: stdout belongs to the result alone.
    with contextlib.redirect_stdout(sys.stderr):
        space = requested_space(discrete, continuous)
        ranking = _select(data, specs, true_values, initial_states, space, mapping, reading, settings)
    end(
        ranking,
        run,
        as_json,
        lambda record: write_ranking(ranking, Path(str(out)), shown_command(), force, record),
        lambda page: print_ranking(ranking, page),
    )


def _select(
    data: str,
    specs: tuple[str, ...],
    truths: dict[str, float] | None,
    starts: str | None,
    space: Any,
    mapping: Any,
    reading: Reading,
    settings: dict[str, Any],
) -> Any:
    """Read, load, rank; bars are on stderr and only on a terminal."""
    from koffline.ope.initial_states import read_initial_states
    from koffline.ope.ranking import select_policies

    transitions = open_for_reading(data, space, mapping, reading)
    initial = None if starts is None else read_initial_states(starts)
    with _progress_bars(len(specs)) as progress:
        return select_policies(
            transitions,
            {spec: spec for spec in specs},
            truths=truths,
            initial_observations=initial,
            stream=reading.stream,
            progress=progress,
            **settings,
        )


def read_truths(words: tuple[str, ...], specs: tuple[str, ...]) -> dict[str, float]:
    """One number per policy, from numbers and JSON files. Raises ConfigError."""
    if len(words) == 1 and Path(words[0]).is_file():
        found = _read_json(words[0])
        if isinstance(found, dict) and "value" not in found:
            _check_names(found, specs, words[0])
            return {spec: _number(found[spec], words[0]) for spec in specs}
        listed = found if isinstance(found, list) else [found]
        numbers = [_number(entry, words[0]) for entry in listed]
    else:
        numbers = [_number(_read_json(word) if Path(word).is_file() else word, word) for word in words]
    if len(numbers) != len(specs):
        raise ConfigError(
            f"--truths gives {len(numbers)} values for {len(specs)} policies; give one each, in order"
        )
    return dict(zip(specs, numbers, strict=True))


def _check(specs: tuple[str, ...], settings: dict[str, Any]) -> None:
    """Mistakes are reported before a large log is read; gamma may still come from the log."""
    from koffline.config import make_settings

    known = {key: value for key, value in settings.items() if key not in ("top_k", "threshold")}
    make_settings({"gamma": 0.5}, known)
    if len(specs) < 2:
        raise ConfigError("--policies names 1 policy; a ranking needs two or more")
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if twice is not None:
        raise ConfigError(f"--policies names '{twice}' twice; give every policy once")
    if settings["top_k"] < 1:
        raise ConfigError(f"--top-k is {settings['top_k']}; give a whole number from 1 on")


def _check_names(found: dict[str, Any], specs: tuple[str, ...], path: str) -> None:
    missing = [spec for spec in specs if spec not in found]
    if missing:
        raise ConfigError(f"--truths {path} has no value for '{missing[0]}'; add it under that name")


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


@contextlib.contextmanager
def _progress_bars(count: int) -> Iterator[Callable[[str], Any] | None]:
    """One bar for all policies; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from koffline.progress import progress_bar

    with progress_bar(f"evaluating {count} policies", count * 1000, show=True) as show:
        done = iter(range(count))

        class Bar:
            def __init__(self) -> None:
                self.before = next(done) * 1000

            def update(self, step: int, steps: int, loss: float) -> None:
                show(self.before + round(1000 * step / steps))

        yield lambda name: Bar()
