"""``koffline evaluate``: a log and a policy in, a number with an interval out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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

_ALL = "all"  # every estimator
_EXAMPLES = """What is POLICY worth from the initial states of DATA?

DATA is a koffline, D4RL or d3rlpy HDF5 file, a folder of shards, an NPZ archive, a Minari folder or
minari:<id>, or a Parquet, Arrow or CSV table with options that say what its columns are. POLICY is a d3rlpy
.d3 model, a TorchScript, ONNX or koffline .npz file, package.module:name, uniform, or epsilon:0.1:<policy>.

\b
Examples:
  koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99
  koffline evaluate log.hdf5 --policy epsilon:0.1:policy.pt --gamma 0.99 --out runs/a
  koffline evaluate log.npz --policy mypackage.policies:best --gamma 0.95 --json
  koffline evaluate log.hdf5 --policy uniform --config eval.yaml --set steps=2000
  koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99 --estimator all --out runs/all
  koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99 --estimator wpdis --interval episodes-t
  koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99 --interval kernel-certified
  koffline evaluate shards/ --policy policy.d3 --gamma 0.99 --lazy --memory 2GB --workers 4
  koffline evaluate log.parquet --mapping columns.yaml --policy policy.d3 --gamma 0.99
  koffline evaluate log.parquet --mapping columns.yaml --policy policy.d3 --gamma 0.99 --by segment

\b
Estimators: kloss, fqe, lstd (trained networks), mql, lstdq (closed forms), is, wis, pdis, wpdis
(importance sampling), mwl, dualdice (marginal weights), dr, wdr, magic, drl (doubly robust), or all.
auto, the default: kloss, or dr for one-step logs with logged probabilities.
Intervals: bootstrap, bootstrap-pivot, kernel-calibrated, kernel-simultaneous, kernel-certified,
dual; for importance sampling episodes-bootstrap, episodes-t, hoeffding, empirical-bernstein.
What each promises is printed with it.
"""


@click.command(help=_EXAMPLES, no_args_is_help=True)
@click.option("--policy", required=True, help="The policy to evaluate: a file or a name.")
@gamma_option()
@click.option("--estimator", metavar="NAME[,NAME…]|all", help="One or more estimators; default auto.")
@click.option("--interval", metavar="KIND", help="Kind of interval; default: the estimator's own.")
@click.option("--level", type=float, help="Level of the interval; default 0.95.")
@whole("--seed", 0, help="Seed of everything random; default 0.")
@click.option(
    "--truth", metavar="NUMBER|FILE", help="The true value, or a JSON file with 'value', to show beside it."
)
@whole("--sample-rows", 2, help="Train networks on about so many rows; default 200,000.")
@click.option("--device", help="cpu (default) or cuda.")
@click.option("--by", metavar="COLUMN", help="Also a value for each group of start states.")
@settings_options
@result_options("estimate.json")
@log_options("data", reading_options)
def evaluate(
    log: Log,
    policy: str,
    config: str | None,
    assignments: tuple[str, ...],
    initial_states: str | None,
    truth: str | None,
    by: str | None,
    result: Result,
    **options: Any,
) -> None:
    """Check everything that can be checked before the long part, then evaluate and print."""
    from koffline.config import parse_assignments, read_yaml
    from koffline.policy_specs import check_spec

    layers = [read_yaml(config) if config else {}, parse_assignments(assignments), options]
    several = _requested_estimators(layers)
    if by is not None and several is not None:
        raise ConfigError("--by takes one estimator (kloss, fqe or lstd); leave the others out")
    true_value = None if truth is None else _read_truth(truth)
    check_spec(policy)
    marker, write, show = _report_of(several)
    result.present(
        "evaluate",
        marker,
        f"evaluating {policy}",
        lambda bar: _evaluate(log, policy, layers, initial_states, several, by, bar),
        lambda found, out, *others: write(found, out, true_value, *others),
        lambda found, page: show(found, true_value, page),
    )


def _report_of(several: tuple[str, ...] | None) -> tuple[str, Callable[..., Path], Callable[..., None]]:
    """Marker file of a result folder, and the functions that write and print such results."""
    from koffline.report import estimates

    if several is None:
        return estimates.ESTIMATE, estimates.write_estimate, estimates.print_estimate
    return estimates.ESTIMATES, estimates.write_estimates, estimates.print_estimates


def _requested_estimators(layers: list[dict[str, Any]]) -> tuple[str, ...] | None:
    """Names of the estimators if several are requested, which removes them from the layers; else None.

    Options are checked here, before a large log is read; gamma may still come from the log.
    """
    from koffline.config import make_settings
    from koffline.ope.names import DEFAULT, check_interval, kinds_for

    settings = make_settings({"gamma": 0.5}, *layers)
    if settings.estimator.lower() == _ALL != settings.estimator:
        raise ConfigError(f"there is no estimator '{settings.estimator}'; did you mean '{_ALL}'?")
    if settings.estimator != _ALL and "," not in settings.estimator:
        check_interval(settings.estimator, settings.interval)
        return None
    names = _names(settings.estimator)
    if settings.interval != DEFAULT and not any(settings.interval in kinds_for(name) for name in names):
        check_interval(names[0], settings.interval)
    for layer in layers:
        layer.pop("estimator", None)
    return names


def _names(text: str) -> tuple[str, ...]:
    """The estimators of a list, each once. Raises ConfigError for a name that is none."""
    from koffline.ope.names import AUTO, ESTIMATORS, check_estimator

    if text == _ALL:
        return tuple(ESTIMATORS)
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or any(name.lower() == _ALL for name in names):
        raise ConfigError(f"estimator is '{text}'; give names separated by commas, or '{_ALL}' by itself")
    if AUTO in names:
        raise ConfigError(
            f"estimator is '{text}': auto stands by itself; name those that you want, or '{_ALL}'"
        )
    for name in names:
        check_estimator(name)
    return names


def _evaluate(
    log: Log,
    policy: str,
    layers: list[dict[str, Any]],
    starts: str | None,
    several: tuple[str, ...] | None,
    by: str | None,
    progress: Any,
) -> Any:
    """Read the log, load the policy, and evaluate it."""
    from koffline.ope.evaluation import estimate_all
    from koffline.ope.evaluation import evaluate as evaluate_policy
    from koffline.ope.problem import read_initial_states
    from koffline.policy_specs import load_policy

    transitions, groups = log.open_by(by)
    loaded = load_policy(
        policy, transitions.action_space, transitions.observation_shape, transitions.metadata.features
    )
    given: dict[str, Any] = {
        **{name: value for layer in layers for name, value in layer.items() if value is not None},
        "initial_observations": None if starts is None else read_initial_states(starts),
        "stream": log.stream,
        "progress": progress,
    }
    if several is None:
        return evaluate_policy(transitions, loaded, by=groups, **given)
    return estimate_all(transitions, loaded, names=several, **given)


def _read_truth(text: str) -> float:
    """Parse a number, or read the ``value`` of a JSON file."""
    path = Path(text)
    try:
        number = float(json.loads(path.read_text(encoding="utf-8"))["value"] if path.is_file() else text)
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"--truth received '{text}'; give a number or a JSON file with 'value'") from None
    if not math.isfinite(number):
        raise ConfigError(f"--truth received '{text}'; give a finite number")
    return number
