"""``koffline evaluate``: from a log and a policy to a value with an interval;
``select``: rank policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from koffline.bundled import PACKAGE
from koffline.cli.completion import (
    complete_estimator,
    complete_estimators,
    complete_intervals,
    complete_policies,
)
from koffline.cli.options import (
    Log,
    LogCommand,
    cores_options,
    gamma_option,
    known_name,
    log_options,
    settings_options,
    whole,
)
from koffline.cli.targets import OptionText, Result, result_options
from koffline.errors import ConfigError
from koffline.untrusted.limits import read_json

_ALL = "all"  # every estimator
_SEVERAL = "--policies"


@click.command(cls=LogCommand, no_args_is_help=True)
@click.option(
    "--policy",
    required=True,
    shell_complete=complete_policies,
    help="The policy to evaluate: a file or a name.",
)
@gamma_option()
@click.option(
    "--estimator",
    metavar="NAME[,NAME…]|all",
    shell_complete=complete_estimators,
    help="One or more estimators; default auto.",
)
@click.option(
    "--interval",
    metavar="KIND",
    shell_complete=complete_intervals,
    help="Kind of interval; default: the estimator's own.",
)
@click.option("--level", type=float, help="Level of the interval; default 0.95.")
@whole("--seed", 0, help="Seed of everything random; default 0.")
@click.option(
    "--truth",
    metavar="NUMBER|FILE",
    help="True value to compare with, or a JSON file's 'value'.",
)
@whole(
    "--sample-rows",
    2,
    help="Train networks on about so many rows at most; default 200,000.",
)
@click.option("--device", help="cpu (default) or cuda.")
@click.option(
    "--by", metavar="COLUMN", help="Also give the value of each group of start states."
)
@cores_options
@settings_options
@result_options("estimate.json")
@log_options("data", with_workers=False)
def evaluate(
    log: Log,
    policy: str,
    settings: Any,
    initial_states: OptionText,
    truth: OptionText,
    by: OptionText,
    result: Result,
) -> None:
    """Estimate what POLICY is worth, from the log DATA alone.

    DATA is a koffline, D4RL or d3rlpy HDF5 file, a folder of shards, an NPZ archive, a
    Minari folder or minari:<id>, or a Parquet, Arrow or CSV table with options that say
    what its columns are. POLICY is a d3rlpy .d3 model, a TorchScript, ONNX or koffline
    .npz file, package.module:name, uniform, or epsilon:0.1:<policy>.

    \b
    Examples:
      koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99
      koffline evaluate log.hdf5 --policy epsilon:0.1:policy.pt --gamma 0.99 --out runs/a
      koffline evaluate log.npz --policy mypackage.policies:best --gamma 0.95 --json
      koffline evaluate log.hdf5 --policy uniform --config eval.yaml --set steps=2000
      koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99 --estimator all --out runs/all
      koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99 --estimator wpdis --interval episodes-t
      koffline evaluate log.hdf5 --policy policy.d3 --gamma 0.99 --interval kernel-certified
      koffline evaluate shards/ --policy policy.d3 --gamma 0.99 --memory 2GB --cores 4
      koffline evaluate log.parquet --mapping columns.yaml --policy policy.d3 --gamma 0.99
      koffline evaluate log.parquet --mapping columns.yaml --policy policy.d3 --gamma 0.99 --by segment

    \b
    Estimators: kloss, fqe, their mean kloss+fqe, lstd (trained networks), mql, lstdq
    (closed forms), is, wis, pdis, wpdis (importance sampling), mwl, dualdice (marginal
    weights), dr, wdr, magic, drl (doubly robust), or all. auto, the default: kloss+fqe
    (kloss if steps are set), or dr for one-step logs with logged probabilities.
    Intervals: bootstrap, bootstrap-pivot, kernel-calibrated, kernel-simultaneous,
    kernel-certified; for importance sampling episodes-bootstrap, episodes-t, hoeffding,
    empirical-bernstein. Each interval is printed with its assumptions.
    """
    from koffline.policy_specs import check_spec

    several = _several_estimators(settings)
    if by is not None and several is not None:
        raise ConfigError("--by takes one estimator; leave the others out")
    true_value = None
    if truth is not None:
        true_value = _read_truth(truth)
    check_spec(policy)
    from koffline.report import estimates  # after the checks: it imports torch

    def find(bar: Any) -> Any:
        from koffline.ope.evaluation import estimate_all
        from koffline.ope.evaluation import evaluate as evaluate_policy

        transitions, groups = log.open_by(by)
        starts = _starts(initial_states, log, transitions)
        options = {"stream": log.stream, "progress": bar, **settings, **starts}
        estimate: Any
        if several is None:
            estimate = evaluate_policy(transitions, policy, by=groups, **options)
        else:
            estimate = estimate_all(transitions, policy, names=several, **options)
        return replace(estimate, truth=true_value)

    report: Callable[[Any], Any] = estimates.report_estimates
    if several is None:
        report = estimates.report_estimate
    result.present(f"evaluating {policy}", find, report)


@click.command()
@click.option(
    "--out",
    metavar="DIR",
    default="out/demo",
    show_default=True,
    help="Folder of the report; one that is there is replaced.",
)
def demo(out: str) -> None:
    """Evaluate a bundled policy from a bundled log, beside its true value.

    The log has 10,000 steps of CartPole by another policy. The answer is a
    table and DIR/report.html.

    \b
    Examples:
      koffline demo
    """
    data = PACKAGE / "datasets"
    options = {
        "--policy": data / "cartpole_policy.npz",
        "--truth": data / "cartpole_truth.json",
        "--out": out,
    }
    words = [str(data / "cartpole.hdf5"), "--force"]
    for option, value in options.items():
        words += [option, str(value)]
    evaluate.main(args=words, prog_name="koffline evaluate", standalone_mode=False)


def _several_estimators(settings: dict[str, Any]) -> tuple[str, ...] | None:
    """Take the estimators out of the settings if several are named; None for a single
    one, which stays.

    Raises ConfigError for an unknown name, and for a kind of interval that none of them
    can have.
    """
    from koffline.ope.names import AUTO, DEFAULT, check_interval, having

    text = settings.get("estimator", AUTO)
    interval = settings.get("interval", DEFAULT)
    if text != _ALL and "," not in text:
        check_interval(known_name(text), interval)
        return None
    del settings["estimator"]
    if text == _ALL:
        return having(interval)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or {_ALL, AUTO} & set(names):
        raise ConfigError(
            f"estimator '{text}': give names separated by commas; '{_ALL}' or '{AUTO}'"
            " alone"
        )
    return having(interval, map(known_name, names))


def _read_truth(text: str) -> float:
    """Parse a number, or read the ``value`` of a JSON file."""
    try:
        value = text
        if Path(text).is_file():
            value = read_json(Path(text))["value"]
        number = float(value)
    except (OSError, ValueError, KeyError, TypeError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(
            f"--truth received '{text}'; give a number or a JSON file whose 'value'"
            " is one"
        )
    return number


def _starts(file: str | None, log: Log, rows: Any) -> dict[str, Any]:
    """Start states from a file, as an option for evaluations. rows: the transitions of
    the log.
    """
    from koffline.data.sources import read_initial_states

    features = rows.metadata.features
    if file is None:
        return {}
    return {"initial_observations": read_initial_states(file, log.mapping, features)}


class _Several(LogCommand):
    """Command whose options take several words: ``--policies A B C``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option's name before every word up to the next option."""
        spread = list[str]()
        is_open = False
        for word in args:
            if is_open and not word.startswith("-"):
                spread += [_SEVERAL, word]
            else:
                is_open = word.partition("=")[0] == _SEVERAL
                if word != _SEVERAL:
                    spread.append(word)
        return super().parse_args(ctx, spread)


@click.command(cls=_Several, no_args_is_help=True)
@click.option(
    "--policies",
    "specs",
    multiple=True,
    required=True,
    metavar="A B …",
    shell_complete=complete_policies,
    help="Two or more.",
)
@gamma_option()
@click.option(
    "--estimator",
    shell_complete=complete_estimator,
    help="kloss+fqe (default), kloss, or another of evaluate's.",
)
@click.option(
    "--level", type=float, help="Level of intervals and comparisons; default 0.95."
)
@whole("--seed", 0, help="Seed of everything random; default 0.")
@cores_options
@settings_options
@result_options("ranking.json")
@log_options("data", with_workers=False)
def select(
    log: Log,
    specs: tuple[str, ...],
    settings: dict[str, Any],
    initial_states: str | None,
    result: Result,
) -> None:
    """Compare several POLICIES on the log DATA, and find the best.

    Policies are evaluated on the same resampled episodes with the same seeds, and
    compared in pairs. So a difference can be significant although the intervals
    overlap.

    \b
    Examples:
      koffline select log.hdf5 --policies a.d3 b.d3 uniform --gamma 0.99
      koffline select log.hdf5 --policies a.d3 b.d3 c.d3 --gamma 0.99 --out runs/choice
      koffline select log.npz --policies a.npz epsilon:0.1:a.npz --json

    DATA comes before --policies.
    """
    from koffline.ope.names import AUTO, DEFAULT, check_interval
    from koffline.policy_specs import check_spec

    if len(specs) < 2 or len(set(specs)) < len(specs):
        raise ConfigError(
            f"--policies names {', '.join(specs)}; give two or more policies, each once"
        )
    check_interval(
        known_name(settings.get("estimator", AUTO)), settings.get("interval", DEFAULT)
    )
    for spec in specs:
        check_spec(spec)
    from koffline.report import estimates  # after the checks: it imports torch

    def find(bar: Any) -> Any:
        from koffline.ope.ranking import select_policies

        rows = log.open()
        starts = _starts(initial_states, log, rows)
        return select_policies(
            rows,
            {spec: spec for spec in specs},
            progress=lambda _: bar,
            stream=log.stream,
            **settings,
            **starts,
        )

    result.present(f"evaluating {len(specs)} policies", find, estimates.report_ranking)
