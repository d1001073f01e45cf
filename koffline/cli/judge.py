"""``koffline diagnose``: is this Q right, and where not? ``koffline select``: which policy is worth most?"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import click

from koffline.cli import options as shared
from koffline.errors import ConfigError

_OWN = ("kloss", "fqe")
_FOLDS = 2
_SAMPLE_ROWS = 200_000  # of a larger log whole episodes are judged, about so many rows
_HIGHEST_LEVEL = 0.5
_ALTERNATIVE = "Report power against values off by X times the rms return; default 0.1."
_NUMBER = re.compile(r"-?[\d.]")
_SEVERAL = ("--policies", "--truths")


@click.command(no_args_is_help=True)
@click.option("--policy", required=True, help="The policy whose values MODEL should give.")
@click.option("--model", required=True, help="The value function: a file, module:name, kloss or fqe.")
@shared.gamma_option()
@click.option("--level", type=float, help="Chance of a false alarm; default 0.05.")
@click.option("--alternative", type=float, metavar="X", help=_ALTERNATIVE)
@shared.whole("--regions", default=5, help="How many places of the largest error; default 5.")
@click.option("--trained-on", metavar="LOG", help="The rows MODEL was fitted to, if it cannot say so.")
@click.option("--allow-training-rows", is_flag=True, help="Test rows MODEL was fitted to all the same.")
@shared.whole("--cross-fit", 2, metavar="K", help="Folds for kloss and fqe; default 2.")
@shared.whole("--seed", 0, default=0, help="Seed of everything random; default 0.")
@shared.set_option("One setting of kloss or fqe: steps=2000.")
@shared.THREADS
@shared.result_options("diagnosis.json")
@shared.log_options("data", shared.reading_options)
def diagnose(
    log: shared.Log,
    model: str,
    result: shared.Result,
    assignments: tuple[str, ...],
    cross_fit: int | None,
    threads: int | None,
    **options: Any,
) -> None:
    """Is MODEL the value function of POLICY, as far as DATA can tell, and where is it wrong?

    MODEL is a d3rlpy .d3 file (FQE of ours, SAC, CQL, DQN, …), a TorchScript file, package.module:name of a
    function (observations, actions) -> values, or 'kloss' or 'fqe': then koffline fits one itself, each row
    judged by a model that has not seen its episode. DATA must hold rows that MODEL was not trained on. POLICY
    and DATA are as in 'koffline evaluate'.

    \b
    Examples:
      koffline diagnose fresh.hdf5 --policy policy.d3 --model critic.d3 --gamma 0.99
      koffline diagnose log.hdf5 --policy policy.d3 --model fqe --gamma 0.99 --out runs/why
      koffline diagnose log.npz --policy uniform --model mypackage.values:q --gamma 0.95 --json
      koffline diagnose fresh.hdf5 --policy policy.d3 --model critic.d3 --gamma 0.99 --trained-on log.hdf5

    Exit code 0 whether the test rejects or not; the verdict is 'rejects' in the JSON.
    """
    from koffline.config import make_settings, parse_assignments
    from koffline.policy_specs import check_spec
    from koffline.report.diagnosis import MARKER, print_diagnosis, write_diagnosis

    check_spec(options["policy"])
    level, settings = options["level"], parse_assignments(assignments)
    if level is not None and not 0.0 < level <= _HIGHEST_LEVEL:
        raise ConfigError(f"--level is {level:g}; a test's level is its chance of a false alarm, as in 0.05")
    if model in _OWN:
        own = {"gamma": options["gamma"], "seed": options["seed"], "threads": threads, "estimator": model}
        settings |= {name: value for name, value in own.items() if value is not None}
        make_settings({"gamma": 0.5}, settings)
    elif cross_fit or assignments:
        flag = "--cross-fit" if cross_fit else "--set"
        raise ConfigError(f"{flag} is for the models kloss and fqe, which are fitted here; leave it out")

    def find(bar: Any) -> Any:
        from koffline import fitting

        with fitting.threads(threads or 1):
            return _diagnose(log, model, settings, cross_fit or _FOLDS, bar, **options)

    result.present("diagnose", MARKER, f"judging {model}", find, write_diagnosis, print_diagnosis)


def _diagnose(
    log: shared.Log,
    model: str,
    settings: dict[str, Any],
    folds: int,
    bar: Any,
    policy: str,
    trained_on: str | None,
    **options: Any,
) -> Any:
    """Read the log, load or fit the value function, and diagnose it."""
    from koffline.data.sources import open_transitions
    from koffline.data.table.files import is_table_source
    from koffline.data.units import sample_units, without_late_ends
    from koffline.ope.diagnosis import diagnose as diagnose_value_function
    from koffline.policy_specs import load_policy

    rows = log.open()
    sample = sample_units(rows, _SAMPLE_ROWS, options["seed"], settings=log.passes)
    transitions = without_late_ends(sample.transitions, sample.units)
    loaded = load_policy(
        policy, transitions.action_space, transitions.observation_shape, rows.metadata.features
    )
    given = {name: value for name, value in options.items() if value is not None}
    if trained_on is not None:
        mapping = log.mapping if is_table_source(trained_on) else None
        given["trained_on"] = open_transitions(trained_on, log.space, mapping=mapping)
    function = _fitted(transitions, loaded, settings, folds, bar) if model in _OWN else model
    found = diagnose_value_function(function, transitions, loaded, **given)
    if sample.is_all:
        return found
    note = f"The log has {len(rows):,} rows; {len(transitions):,} of them were judged, whole episodes drawn."
    return dataclasses.replace(found, warnings=(*found.warnings, note))


def _fitted(transitions: Any, policy: Any, settings: dict[str, Any], folds: int, bar: Any) -> Any:
    """Fit koffline's own value functions with cross-fitting."""
    from koffline.config import make_settings
    from koffline.ope.cross_fit import cross_fit
    from koffline.ope.fitted import fit_value_function

    chosen = make_settings({"gamma": transitions.metadata.gamma}, settings)
    fit = partial(fit_value_function, policy=policy, settings=chosen, progress=bar)
    return cross_fit(transitions, fit, folds, chosen.seed)


class _Several(click.Command):
    """Command whose options take several words: ``--policies A B C``."""

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


@click.command(cls=_Several, no_args_is_help=True)
@click.option("--policies", "specs", multiple=True, required=True, metavar="A B …", help="Two or more.")
@shared.gamma_option()
@click.option("--estimator", help="kloss (default), fqe, or another of evaluate's.")
@click.option("--level", type=float, help="Level of intervals and comparisons; default 0.95.")
@shared.whole("--seed", 0, default=0, help="Seed of everything random; default 0.")
@click.option("--truths", multiple=True, type=float, metavar="NUMBERS", help="True values: adds regret.")
@shared.settings_options
@shared.result_options("ranking.json")
@shared.log_options("data", shared.reading_options)
def select(
    log: shared.Log,
    specs: tuple[str, ...],
    truths: tuple[float, ...],
    config: str | None,
    assignments: tuple[str, ...],
    initial_states: str | None,
    result: shared.Result,
    **options: Any,
) -> None:
    """Which of several POLICIES is worth most from the initial states of DATA?

    All policies are evaluated from the same resampled episodes with the same seeds, so their differences are
    compared in pairs: a difference can be significant although the intervals overlap.

    \b
    Examples:
      koffline select log.hdf5 --policies a.d3 b.d3 uniform --gamma 0.99
      koffline select log.hdf5 --policies a.d3 b.d3 c.d3 --gamma 0.99 --out runs/choice
      koffline select log.npz --policies a.npz epsilon:0.1:a.npz --truths 61.2 55.0 --json

    DATA comes before --policies. --truths takes one number per policy, in their order.
    """
    from koffline.config import make_settings, parse_assignments, read_yaml
    from koffline.report.ranking import MARKER, print_ranking, write_ranking

    settings = {**(read_yaml(config) if config else {}), **parse_assignments(assignments)}
    settings |= {key: value for key, value in options.items() if value is not None}
    make_settings({"gamma": 0.5}, settings)  # mistakes are reported before a large log is read
    if len(specs) < 2 or len(set(specs)) < len(specs):
        raise ConfigError(f"--policies names {', '.join(specs)}; give two or more policies, each once")
    if truths and len(truths) != len(specs):
        raise ConfigError(f"--truths gives {len(truths)} values for {len(specs)} policies; give one each")

    def find(bar: Any) -> Any:
        from koffline.ope.problem import read_initial_states
        from koffline.ope.ranking import select_policies

        transitions = log.open()
        starts = None if initial_states is None else read_initial_states(initial_states)
        return select_policies(
            transitions,
            {spec: spec for spec in specs},
            truths=truths or None,
            initial_observations=starts,
            stream=log.stream,
            progress=None if bar is None else lambda name: bar,
            **settings,
        )

    result.present("select", MARKER, f"evaluating {len(specs)} policies", find, write_ranking, print_ranking)
