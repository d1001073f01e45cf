"""``koffline diagnose``: is this value function right, and where not?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import click

from koffline.cli.completion import complete_models, complete_policies
from koffline.cli.options import (
    Log,
    LogCommand,
    cores_options,
    gamma_option,
    log_options,
    set_option,
    whole,
)
from koffline.cli.targets import Result, result_options
from koffline.errors import ConfigError

_FITTED_HERE = ("kloss", "fqe")
_FOLDS = 2
_SHARED = ("gamma", "seed")  # of fitting and of testing
_OF_FIT = (*_SHARED, "cores")
_SAMPLE_ROWS = 200_000  # of a larger log whole episodes are judged, about so many rows
_HIGHEST_LEVEL = 0.5
_ALTERNATIVE = (
    "Report power against values off by X times the root mean square return; default"
    " 0.1."
)
_BANDWIDTHS = (
    "Test several kernel bandwidths together, multiples of the median distance:"
    " 0.15,0.6,2.4."
)


@click.command(cls=LogCommand, no_args_is_help=True)
@click.option(
    "--policy",
    required=True,
    shell_complete=complete_policies,
    help="The policy whose values MODEL should give.",
)
@click.option(
    "--model",
    required=True,
    shell_complete=complete_models,
    help="The value function: a file, module:name, kloss or fqe.",
)
@gamma_option()
@click.option("--level", type=float, help="Chance of a false alarm; default 0.05.")
@click.option("--alternative", type=float, metavar="X", help=_ALTERNATIVE)
@click.option("--bandwidths", metavar="X,X,…", help=_BANDWIDTHS)
@whole(
    "--regions", default=5, help="How many regions of large error to list; default 5."
)
@click.option(
    "--trained-on",
    metavar="LOG",
    help="The log MODEL was trained on, if not stored with it.",
)
@click.option(
    "--allow-training-rows",
    is_flag=True,
    help="Test on rows MODEL was trained on, too.",
)
@whole("--cross-fit", 2, metavar="K", help="Folds for kloss and fqe; default 2.")
@whole("--seed", 0, help="Seed of everything random; default 0.")
@set_option("One setting of kloss or fqe: steps=2000.")
@cores_options
@result_options("diagnosis.json")
@log_options("data", with_workers=False)
def diagnose(
    log: Log,
    policy: str,
    model: str,
    trained_on: str | None,
    result: Result,
    assignments: tuple[str, ...],
    cross_fit: int | None,
    **options: Any,
) -> None:
    """Test whether MODEL is the value function of POLICY, and show where it is wrong.

    DATA must hold rows that MODEL was not trained on. MODEL is a d3rlpy .d3 file (FQE,
    SAC, CQL, DQN, …), a TorchScript file, package.module:name of a function
    (observations, actions) -> values, or 'kloss' or 'fqe'. The last two are fitted
    here: each row is tested with a model that has not seen its episode. POLICY and DATA
    are as in 'koffline evaluate'.

    \b
    Examples:
      koffline diagnose fresh.hdf5 --policy policy.d3 --model critic.d3 --gamma 0.99
      koffline diagnose log.hdf5 --policy policy.d3 --model fqe --gamma 0.99 --out runs/why
      koffline diagnose log.npz --policy uniform --model mypackage.values:q --gamma 0.95 --json
      koffline diagnose fresh.hdf5 --policy policy.d3 --model critic.d3 --gamma 0.99 --trained-on log.hdf5

    The exit code is 0 whether the test rejects or not; 'rejects' in the JSON says
    whether it does.
    """
    from koffline.config import ANY_GAMMA, make_settings, parse_assignments
    from koffline.ope.names import check_interval
    from koffline.ope.value_functions import check_named
    from koffline.policy_specs import check_spec

    check_spec(policy)
    settings = parse_assignments(assignments)
    test_options = _options_of_test(options)
    if model in _FITTED_HERE:
        settings |= {
            name: options[name] for name in _OF_FIT if options[name] is not None
        }
        settings["estimator"] = model
        chosen = make_settings({"gamma": ANY_GAMMA}, settings)
        check_interval(model, chosen.interval)
        if trained_on is not None:
            raise ConfigError(
                f"--trained-on is for models fitted elsewhere, {model} is fitted here;"
                " drop it"
            )
        for name in _SHARED:
            if settings.get(name) is not None:
                test_options[name] = getattr(chosen, name)
    elif cross_fit or assignments:
        flag = "--set"
        if cross_fit:
            flag = "--cross-fit"
        raise ConfigError(
            f"{flag} is for the models kloss and fqe, which are fitted here; leave"
            " it out"
        )
    else:
        check_named(model, _FITTED_HERE)
    # after the checks: it imports torch
    from koffline.report.diagnosis import report_diagnosis

    def find(bar: Any) -> Any:
        """Read the log, load or fit the value function, and diagnose it."""
        from koffline.data.kinds import is_table_source
        from koffline.data.late_ends import without_late_ends
        from koffline.data.sources import open_transitions
        from koffline.data.units import sample_units
        from koffline.fitting import threads
        from koffline.ope.cross_fit import cross_fit as fit_by_folds
        from koffline.ope.diagnosis import diagnose as diagnose_value_function
        from koffline.ope.log.facts import usual_gamma
        from koffline.ope.networks.fitted_q import fit_value_function
        from koffline.policy_specs import load_policy

        with threads(1):
            rows = log.open()
            sample = sample_units(
                rows, _SAMPLE_ROWS, test_options["seed"], settings=log.stream
            )
            transitions = without_late_ends(sample.transitions, sample.units)
            space = transitions.action_space
            shape = transitions.observation_shape
            loaded = load_policy(policy, space, shape, rows.metadata.features)
            if trained_on is not None:
                mapping = None
                if is_table_source(trained_on):
                    mapping = log.mapping
                test_options["trained_on"] = open_transitions(
                    trained_on, log.space, mapping=mapping
                )
            function: Any = model
            if model in _FITTED_HERE:
                fit_settings = make_settings(
                    {"gamma": usual_gamma(transitions)}, settings
                )
                fit = partial(
                    fit_value_function,
                    policy=loaded,
                    settings=fit_settings,
                    progress=bar,
                )
                function = fit_by_folds(
                    transitions, fit, cross_fit or _FOLDS, fit_settings.seed
                )
            diagnosis = diagnose_value_function(
                function, transitions, loaded, **test_options
            )
        if sample.is_all:
            return diagnosis
        note = (
            f"The log has {len(rows):,} rows; {len(transitions):,} of them were judged,"
            " whole episodes drawn."
        )
        return dataclasses.replace(diagnosis, warnings=(*diagnosis.warnings, note))

    result.present(f"judging {model}", find, report_diagnosis)


def _options_of_test(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `koffline.diagnose` among those of the command line, checked.

    Raises ConfigError.
    """
    from koffline.config import ANY_GAMMA, make_bellman_settings

    test_options: dict[str, Any] = {"seed": 0}
    test_options |= {
        name: value
        for name, value in options.items()
        if value is not None and name != "cores"
    }
    _check_level(test_options.get("level", _HIGHEST_LEVEL))
    if "bandwidths" in test_options:
        test_options["bandwidths"] = _numbers_in(test_options["bandwidths"])
    make_bellman_settings(
        gamma=ANY_GAMMA,
        level=options["level"],
        alternative=options["alternative"],
        bandwidths=test_options.get("bandwidths"),
    )
    return test_options


def _numbers_in(text: str) -> tuple[float, ...]:
    """Numbers separated by commas. Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--bandwidths is '{text}'; give numbers separated by commas, as in"
            " 0.15,0.6,2.4"
        ) from None


def _check_level(level: float) -> None:
    """Raise ConfigError for what may be meant as the level of an interval."""
    if not 0.0 < level <= _HIGHEST_LEVEL:
        raise ConfigError(
            f"--level is {level:g}; a test's level is its chance of a false alarm, as"
            " in 0.05"
        )
