"""Results in plain words: numbers, intervals, diagnostics, settings, estimators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from koffline.errors import percent
from koffline.json_types import JsonObject
from koffline.ope.comparisons import Comparison
from koffline.ope.groups import GroupValue
from koffline.ope.names import CERTIFIED_KINDS
from koffline.ope.results import Estimate, Interval, LogResult, Uplift
from koffline.spread import Spread

CERTIFIED = "certified"
CALIBRATED = "calibrated"
UNCERTAIN = "certified only if bounds read off the log hold"
_LONGEST_LIST = 8
_CHANCE = 0.05
_WORDS = {  # words for diagnostics; others are shown by their key
    "coverage": "share of the policy's actions that lie near logged ones",
    "coverage_of_starts": (
        "share of its actions in start states that lie near logged ones"
    ),
    "n_terminated": "rows where an episode really ended",
    "n_truncated": "rows where only the recording stopped",
    "n_initial_states": "start states",
    "reward_scale": "size of a return (root mean square)",
    "logged_return": "mean return of logged episodes, up to their last row",
    "beyond_cuts": (
        "share of the discounted future that comes after the end of recording"
    ),
    "action_names": (
        "the actions, in the order in which columns of a policy's array are read"
    ),
    "actions": (
        "how often the policy takes each action on the log's rows, and the log itself"
    ),
    "held_out_kernel_ratio": (
        "kernel loss on held-out rows, relative to that of noise alone (1 is perfect)"
    ),
    "memory_shift": "change of the value if earlier rows were part of the state",
    "memory_p_value": (
        "p-value of what happened earlier (small: it matters beyond the state)"
    ),
    "memory_rows": "earlier rows that were tested (0: sums over all of them)",
    "drift_shift": "change of the value if the world were as it is where the log ends",
    "drift_p_value": (
        "p-value of a change of the world along the log (small: it changes)"
    ),
    "behavior_model": "what estimated the chances of the behavior policy's actions",
    "behavior_log_likelihood": "held-out log-likelihood of a logged action under it",
    "behavior_log_likelihood_constant": "the same without looking at the state",
    "behavior_calibration_error": (
        "mean distance of estimated chances from how often such actions were taken"
    ),
    "behavior_calibration": (
        "estimated chance of an action: share taken, of so many pairs of row and action"
    ),
    "correction": (
        "what the residuals of logged rows, weighted as the policy acts, add to the"
        " value"
    ),
    "mass": "mean of the weights of the policy's visits (1 if they fit)",
    "unseen": "share of rows valued by networks that have not seen them",
}


def describe_interval(interval: Interval | None) -> str:
    """Ends, level and kind of an interval."""
    if interval is None:
        return "none; the verdict and the warnings say why"
    return (
        f"{ends(interval)}   ({percent(interval.level)} {interval.kind},"
        f" {promise(interval)})"
    )


def return_words(result: LogResult) -> str:
    """Name of the estimated quantity; rewards of one-step episodes are not
    discounted.
    """
    quantity = "expected discounted return"
    if result.is_one_step:
        quantity = "expected reward"
    return f"{quantity}, {result.discounting}"


def action_shares(actions: Mapping[str, Mapping[str, float]]) -> str:
    """Text of the frequencies of each action on the log's rows, under the policy and in
    the log.
    """
    texts = (
        f"{name} {shares['policy']:.0%} (log {shares['log']:.0%})"
        for name, shares in actions.items()
    )
    return ", ".join(texts)


def uplift(estimate: Uplift | None) -> str:
    """Text of the uplift over the behavior policy; empty if unknown."""
    if estimate is None:
        return ""
    return f"{estimate.value:+.3g}{within(estimate.interval)}"


def group_rows(result: Estimate) -> list[tuple[str, str, str, str]]:
    """Cells for each group of start states: name, start states, value; interval, reason
    for care or none.
    """
    return cells_of_groups(result.groups)


def cells_of_groups(groups: Iterable[GroupValue]) -> list[tuple[str, str, str, str]]:
    """The cells of `group_rows`."""
    cells = []
    for row in groups:
        interval = within(row.interval).strip(" ()")
        text = "; ".join(filter(None, (interval, row.reason)))
        cells.append((row.group, f"{row.starts:,}", number(row.value), text))
    return cells


def within(interval: Interval | None) -> str:
    """Ends of an interval in brackets, to follow a number; empty without an
    interval.
    """
    if interval is None:
        return ""
    return f" ({ends(interval)})"


def ends(interval: Interval | Spread | Comparison) -> str:
    """Low and high end with four significant digits each; a dash if they are
    unknown.
    """
    if math.isnan(interval.low):
        return "–"
    return f"{interval.low:.4g} … {interval.high:.4g}"


def number(value: object) -> str:
    """Number with four significant digits; a dash for None, yes or no for a boolean."""
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def count_of(count: int, noun: str) -> str:
    """``1 episode``, ``2,000 episodes``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def describe_log(result: LogResult) -> str:
    """Text on the source and size of a result's log."""
    if result.n_episodes:
        episodes = count_of(result.n_episodes, "episode")
    else:
        episodes = "no episodes"
    return (
        f"{result.source or 'in memory'}: {count_of(result.n_transitions, 'transition')},"
        f" {episodes}"
    )


def promise(interval: Interval) -> str:
    """Label of an interval: ``calibrated``, ``certified``, or certified provided that
    guessed bounds hold.
    """
    if interval.kind.split(" ")[0] not in CERTIFIED_KINDS:
        return CALIBRATED
    if interval.is_guess:
        return UNCERTAIN
    return CERTIFIED


def described(record: JsonObject) -> list[tuple[str, list[str]]]:
    """Diagnostics in words, each with its lines; no shift whose p-value is not
    small.
    """
    shown = {**record, "actions": action_shares(record.get("actions", {})) or None}
    if "behavior_calibration" in record:
        shown["behavior_calibration"] = {
            f"{chance['predicted']:.3f}:": f"{chance['taken']:.3f} of {chance['pairs']}"
            for chance in record["behavior_calibration"]
        }
    shown["action_names"] = ", ".join(record.get("action_names", ())) or None
    for name in record:
        if name.endswith("_p_value") and (record[name] or 0.0) > _CHANCE:
            shown[name.replace("p_value", "shift")] = None
    return [
        (_WORDS.get(name, name.replace("_", " ")), describe_lines(value))
        for name, value in shown.items()
        if value not in ([], None)
    ]


def setting(name: str) -> str:
    """Description of a setting."""
    from koffline.config import EvaluationSettings

    field = EvaluationSettings.model_fields.get(name)
    if field is None:
        return name.replace("_", " ")
    return str(field.description)


def describe_lines(value: object) -> list[str]:
    """A diagnostic as lines of text: a count for long lists, ends and level for an
    interval.

    Other mappings have a line 'key value' for each part that is not None.
    """
    if isinstance(value, (list, tuple)):
        if len(value) > _LONGEST_LIST:
            return [count_of(len(value), "value")]
        return [", ".join(map(number, value))]
    if isinstance(value, Interval):
        return [f"{number(value.low)} … {number(value.high)} ({percent(value.level)})"]
    if not isinstance(value, Mapping):
        return [number(value)]
    lines = []
    for key, part in value.items():
        if part is not None:
            name = str(key).replace("_", " ")
            lines += [f"{name} {line}" for line in describe_lines(part)]
    return lines or ["–"]
