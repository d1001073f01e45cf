"""``koffline diagnose``: does a value function solve a policy's Bellman equation, and where does it not?"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import click

from koffline.cli.options import (
    THREADS,
    Log,
    Result,
    gamma_option,
    log_options,
    reading_options,
    result_options,
    set_option,
    whole,
)
from koffline.errors import ConfigError

_OWN = ("kloss", "fqe")
_FOLDS = 2
_SAMPLE_ROWS = 200_000  # of a larger log whole episodes are judged, about so many rows
_HIGHEST_LEVEL = 0.5
_EXAMPLES = """Is MODEL the value function of POLICY, as far as DATA can tell, and where is it wrong?

MODEL is a d3rlpy .d3 file (FQE of ours, SAC, CQL, DQN, …), a TorchScript file, package.module:name of a
function (observations, actions) -> values or of observations alone, or 'kloss' or 'fqe': then koffline fits
one itself, each row judged by a model that has not seen its episode. DATA must hold rows that MODEL was not
trained on. POLICY and DATA are as in 'koffline evaluate'.

\b
Examples:
  koffline diagnose fresh.hdf5 --policy policy.d3 --model critic.d3 --gamma 0.99
  koffline diagnose log.hdf5 --policy policy.d3 --model fqe --gamma 0.99 --out runs/why
  koffline diagnose log.npz --policy uniform --model mypackage.values:q --gamma 0.95 --json
  koffline diagnose fresh.hdf5 --policy policy.d3 --model critic.d3 --gamma 0.99 --trained-on log.hdf5

Exit code 0 whether the test rejects or not; the verdict is 'rejects' in the JSON.
"""


@click.command(help=_EXAMPLES, no_args_is_help=True)
@click.option("--policy", required=True, help="The policy whose values MODEL should give.")
@click.option("--model", required=True, help="The value function: a file, module:name, kloss or fqe.")
@gamma_option()
@click.option("--method", type=click.Choice(["wild", "spectral", "gamma"]), help="Of the test; default wild.")
@click.option("--level", type=float, help="Chance of a false alarm; default 0.05.")
@click.option("--window", type=int, metavar="D", help="Residuals over D steps within an episode; default 1.")
@click.option("--on-policy", is_flag=True, help="POLICY wrote the log: V(s) and windows need no ratios.")
@click.option(
    "--alternative",
    type=float,
    metavar="X",
    help="Report power against values off by X times the rms return; default 0.1.",
)
@whole("--regions", default=5, help="How many places of the largest error; default 5.")
@click.option("--trained-on", metavar="LOG", help="The rows MODEL was fitted to, if it cannot say so.")
@click.option("--allow-training-rows", is_flag=True, help="Test rows MODEL was fitted to all the same.")
@whole("--cross-fit", 2, metavar="K", help="Folds for kloss and fqe; default 2.")
@whole("--seed", 0, default=0, help="Seed of everything random; default 0.")
@set_option("One setting of kloss or fqe: steps=2000.")
@THREADS
@result_options("diagnosis.json")
@log_options("data", reading_options)
def diagnose(log: Log, policy: str, model: str, result: Result, **options: Any) -> None:
    """Check everything that can be checked before the long part, then diagnose and print."""
    settings = _checked(model, options)
    from koffline.report.diagnosis import MARKER, print_diagnosis, write_diagnosis

    def find() -> Any:
        return _diagnose(log, policy, model, settings, **options)

    result.present("diagnose", MARKER, find, write_diagnosis, print_diagnosis)


def _checked(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """The settings of kloss or fqe, taken out; mistakes are reported before a large log is read."""
    from koffline.config import make_settings, parse_assignments

    level, assignments, folds = options["level"], options.pop("assignments"), options["cross_fit"]
    if level is not None and not 0.0 < level <= _HIGHEST_LEVEL:
        raise ConfigError(f"--level is {level:g}; a test's level is its chance of a false alarm, as in 0.05")
    settings = parse_assignments(assignments)
    if model in _OWN:
        own = {name: options[name] for name in ("gamma", "seed", "threads") if options[name] is not None}
        settings |= {**own, "estimator": model}
        make_settings({"gamma": 0.5}, settings)
    elif folds or assignments:
        flag = "--cross-fit" if folds else "--set"
        raise ConfigError(f"{flag} is for the models kloss and fqe, which are fitted here; leave it out")
    return settings


def _diagnose(
    log: Log,
    policy: str,
    model: str,
    settings: dict[str, Any],
    *,
    gamma: float | None,
    seed: int,
    threads: int | None,
    trained_on: str | None,
    cross_fit: int | None,
    on_policy: bool,
    **options: Any,
) -> Any:
    """Read, load, fit where that is asked for, and look."""
    from koffline import fitting
    from koffline.data.disk.samples import sample_units
    from koffline.data.sources import open_transitions
    from koffline.data.table.files import is_table_source
    from koffline.ope.diagnosis import diagnose as diagnose_value_function
    from koffline.policy_specs import load_policy

    rows = log.open()
    sample = sample_units(rows, _SAMPLE_ROWS, seed, settings=log.passes)
    transitions, other = sample.transitions, None
    loaded = load_policy(policy, transitions.action_space, transitions.observation_shape)
    if trained_on is not None:
        mapping = log.mapping if is_table_source(trained_on) else None
        other = open_transitions(trained_on, log.space, mapping=mapping)
    if on_policy:
        options["on_policy"] = True
    with fitting.threads(threads or 1):
        function: Any = model
        if model in _OWN:
            function = _fitted(transitions, loaded, settings, cross_fit or _FOLDS)
        given = {name: value for name, value in options.items() if value is not None}
        found = diagnose_value_function(
            function, transitions, loaded, gamma, seed=seed, trained_on=other, **given
        )
    if sample.is_all:
        return found
    note = f"The log has {len(rows):,} rows; {len(transitions):,} of them were judged, whole episodes drawn."
    return dataclasses.replace(found, warnings=(*found.warnings, note))


def _fitted(transitions: Any, policy: Any, settings: dict[str, Any], folds: int) -> Any:
    """koffline's own value functions, cross-fitted; a bar on stderr where that is a terminal."""
    from koffline.config import make_settings
    from koffline.ope.cross_fit import cross_fit
    from koffline.ope.fitted import fit_value_function
    from koffline.progress import progress_bar

    chosen = make_settings({"gamma": transitions.metadata.gamma}, settings)
    with progress_bar(f"fitting {chosen.estimator}", folds, sys.stderr.isatty()) as show:
        done = iter(range(1, folds + 1))

        def fit(part: Any) -> Any:
            function = fit_value_function(part, policy, chosen)
            show(next(done))
            return function

        return cross_fit(transitions, fit, folds, chosen.seed)
