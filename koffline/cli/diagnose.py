"""``koffline diagnose``: does a value function solve a policy's Bellman equation, and where does it not?"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
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
    table_options,
)
from koffline.cli.results import begin, end
from koffline.errors import ConfigError
from koffline.store.run_record import shown_command

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
@click.argument("data")
@click.option("--policy", required=True, help="The policy whose values MODEL should give.")
@click.option("--model", required=True, help="The value function: a file, module:name, kloss or fqe.")
@click.option("--gamma", type=float, help="Discount factor, inside (0, 1); default: the log's own hint.")
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
@click.option("--regions", type=int, default=5, help="How many places of the largest error; default 5.")
@click.option("--trained-on", metavar="LOG", help="The rows MODEL was fitted to, if it cannot say so.")
@click.option("--allow-training-rows", is_flag=True, help="Test rows MODEL was fitted to all the same.")
@click.option("--cross-fit", type=int, metavar="K", help="Folds for kloss and fqe; default 2.")
@click.option("--seed", type=int, default=0, help="Seed of everything random; default 0.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="One setting of kloss or fqe: steps=2000.",
)
@click.option("--threads", type=int, help="Threads of this process; default 1.")
@result_options("diagnosis.json")
@action_space_options
@table_options
@reading_options
def diagnose(
    data: str,
    policy: str,
    model: str,
    out: str | None,
    force: bool,
    as_json: bool,
    discrete: int | None,
    continuous: tuple[float, float] | None,
    mapping: Any,
    reading: Reading,
    **options: Any,
) -> None:
    """Check everything that can be checked before the long part, then diagnose and print."""
    settings = _checked(model, options)
    from koffline.report.diagnosis import MARKER, print_diagnosis, write_diagnosis

    run = begin("diagnose", out, force, MARKER)
    # A user's policy or model may print while it is imported or called: stdout belongs to the result alone.
    with contextlib.redirect_stdout(sys.stderr):
        space = requested_space(discrete, continuous)
        diagnosis = _diagnose(data, policy, model, space, mapping, reading, settings, options)
    end(
        diagnosis,
        run,
        as_json,
        lambda record: write_diagnosis(diagnosis, Path(str(out)), shown_command(), force, record),
        lambda page: print_diagnosis(diagnosis, page),
    )


def _diagnose(
    data: str,
    policy: str,
    model: str,
    space: Any,
    mapping: Any,
    reading: Reading,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Read, load, fit where that is asked for, and look."""
    from koffline.data.disk.samples import sample_units
    from koffline.data.sources import open_transitions
    from koffline.data.table.files import is_table_source
    from koffline.fitting import threads
    from koffline.ope.diagnosis import diagnose as diagnose_value_function
    from koffline.policy_specs import load_policy

    log = open_for_reading(data, space, mapping, reading)
    sample = sample_units(log, _SAMPLE_ROWS, options["seed"], settings=reading.stream.passes)
    transitions = sample.transitions
    loaded = load_policy(policy, transitions.action_space, transitions.observation_shape)
    trained_on = options["trained_on"]
    other = mapping if trained_on is not None and is_table_source(trained_on) else None
    given = ("method", "level", "window", "alternative")
    tested = {name: options[name] for name in given if options[name] is not None}
    with threads(options["threads"] or 1):
        found = diagnose_value_function(
            _fitted(model, transitions, loaded, settings, options) if model in _OWN else model,
            transitions,
            loaded,
            options["gamma"],
            seed=options["seed"],
            trained_on=None if trained_on is None else open_transitions(trained_on, space, mapping=other),
            allow_training_rows=options["allow_training_rows"],
            regions=options["regions"],
            **tested,
            **({"on_policy": True} if options["on_policy"] else {}),
        )
    if sample.is_all:
        return found
    note = f"The log has {len(log):,} rows; {len(transitions):,} of them were judged, whole episodes drawn."
    return dataclasses.replace(found, warnings=(*found.warnings, note))


def _fitted(
    model: str, transitions: Any, policy: Any, settings: dict[str, Any], options: dict[str, Any]
) -> Any:
    """koffline's own value functions, cross-fitted; a bar on stderr where that is a terminal."""
    from koffline.config import make_settings
    from koffline.ope.cross_fit import cross_fit
    from koffline.ope.fitted_function import fit_value_function
    from koffline.progress import progress_bar

    base = {"gamma": transitions.metadata.gamma}
    chosen = make_settings(base, settings, {"gamma": options["gamma"]}, {"estimator": model})
    folds = options["cross_fit"] or _FOLDS
    with progress_bar(f"fitting {model}", folds, sys.stderr.isatty()) as show:
        done = iter(range(1, folds + 1))

        def fit(part: Any) -> Any:
            function = fit_value_function(part, policy, chosen)
            show(next(done))
            return function

        return cross_fit(transitions, fit, folds, options["seed"])


def _checked(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """The settings of kloss or fqe; mistakes are reported before a large log is read."""
    from koffline.config import make_settings, parse_assignments

    level, gamma = options["level"], options["gamma"]
    if level is not None and not 0.0 < level <= _HIGHEST_LEVEL:
        raise ConfigError(f"--level is {level:g}; a test's level is its chance of a false alarm, as in 0.05")
    if gamma is not None and not 0.0 < gamma < 1.0:
        raise ConfigError(f"--gamma is {gamma:.10g}; give a discount factor between 0 and 1")
    for name in ("seed", "threads", "regions", "cross_fit"):
        least = {"seed": 0, "cross_fit": 2}.get(name, 1)
        if options[name] is not None and options[name] < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {options[name]}; give a whole number of at least {least}")
    settings = parse_assignments(options["assignments"])
    if model in _OWN:
        given = {"seed": options["seed"], "threads": options["threads"]}
        make_settings({"gamma": 0.5}, settings, {"estimator": model}, given)
        return {**settings, **{key: value for key, value in given.items() if value is not None}}
    for name, flag in (("cross_fit", "--cross-fit"), ("assignments", "--set")):
        if options[name]:
            raise ConfigError(f"{flag} is for the models kloss and fqe, which are fitted here; leave it out")
    return {}
