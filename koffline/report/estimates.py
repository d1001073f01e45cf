"""Reports of one estimate, all estimators and a ranking: on a terminal, and as a folder
with a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from koffline.errors import counted, percent
from koffline.ope.log.coverage import describe_coverage
from koffline.ope.names import BANDIT, EPISODES, needs_of
from koffline.ope.ranking import PolicyRanking, RankedPolicy
from koffline.ope.results import Estimate, EstimateRow, EstimateTable
from koffline.report import Report, plots, print_labelled, print_table, words
from koffline.report.words import within

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_FOLDERS = re.compile(r"[^:]*/(?=.)")  # of the names of policies in the figure


def report_estimate(found: Estimate) -> Report:
    """The report of one estimate, with the truth if it is known."""
    figures = {"estimate": partial(_plot_estimate, found)}
    seen = found.evidence
    if seen is not None:
        about = ("mean = the estimate", "V(s) of an initial state", "initial states")
        starts = partial(
            plots.plot_histogram, seen.initial_values, found.value, *about, bins=40
        )
        figures |= {
            "residuals": partial(plots.plot_residuals, seen.residuals),
            "initial_values": starts,
            "coverage": partial(
                plots.plot_coverage, seen.action_support, seen.support_weights
            ),
        }
    return Report("estimate.json", found, figures, partial(_show_estimate, found))


def _plot_estimate(found: Estimate) -> Figure:
    """The estimate beside the logging policy's, or beside the mean return of the log's
    episodes.
    """
    lines = [plots.Line(f"policy ({found.estimator})", found.value, found.interval)]
    logged = found.diagnostics.get("logged_return")
    more = found.uplift
    if more is not None:
        lines.append(
            plots.Line("logging policy", more.behavior_value, more.behavior_interval)
        )
    elif logged is not None:
        if found.diagnostics["beyond_cuts"]:
            cut = ", cut where\nlogging stopped"
        else:
            cut = ""
        lines.append(plots.Line(f"logged return{cut}", logged, None, plots.SOFT))
    return plots.plot_intervals(
        lines, words.return_words(found), [("truth", found.truth)]
    )


def _show_estimate(found: Estimate, console: Any) -> None:
    """Print value, interval and the most important diagnostics, then the groups."""
    print_table(console, f"What {found.policy} is worth", (), _facts(found))
    if found.groups:
        together = f"{percent(found.settings['level'])}, together"
        columns = (str(found.by), "start states", "value", together)
        print_table(console, f"By {found.by}", columns, words.group_rows(found))


def _facts(estimate: Estimate) -> Iterator[tuple[str, str]]:
    """Names and texts of the lines on one estimate."""
    found = estimate.diagnostics
    uplift = estimate.uplift
    own = estimate.diagnostics.get("logged_return")
    is_open = estimate.verdict.is_open
    over_episodes = EPISODES in needs_of(estimate.estimator)
    if is_open:
        about = "no answer: the log does not support this number"
    else:
        about = words.return_words(estimate)
    yield "verdict", str(estimate.verdict)
    yield "value", f"{estimate.value:.4g}   ({about})"
    yield "interval", words.describe_interval(estimate.interval)
    if estimate.truth is not None:
        yield "truth", f"{estimate.truth:.4g}"
    if uplift is not None:
        logger = f"{uplift.behavior_value:.4g}{within(uplift.behavior_interval)}"
        yield "logging policy", f"{logger}   (the policy that wrote the log)"
        yield (
            "uplift",
            (
                f"{uplift.value:+.4g}{within(uplift.interval)}   (over the logging"
                " policy, paired)"
            ),
        )
    elif own is not None and found["beyond_cuts"] and over_episodes:
        yield (
            "uplift",
            (
                "– (it values nothing after a cut: compare with the logged return, or"
                " ask kloss)"
            ),
        )
    if own is not None:
        beyond = found["beyond_cuts"]
        error = found.get("logged_return_se")
        # not for rounding alone
        if error and error > 1e-12 * abs(own):
            spread = f" ± {error:.2g}"
        else:
            spread = ""
        if beyond:
            cut = (
                f"   (what was recorded; {beyond:.0%} of the discounted future comes"
                " later)"
            )
        else:
            cut = ""
        yield "logged return", f"{own:.4g}{spread}{cut}"
    heads = ", ".join(
        f"{name} {value:.4g}"
        for name, value in found.get("estimates_by_head", {}).items()
    )
    yield "estimator", estimate.estimator + (f"   (by head: {heads})" if heads else "")
    if "n_clusters" in found:
        clusters = f", {counted(found['n_clusters'], 'cluster')}"
    else:
        clusters = ""
    yield "log", words.describe_log(estimate) + clusters
    yield "coverage", describe_coverage(found["coverage"])
    if "actions" in found:
        yield "actions", words.action_shares(found["actions"])
    yield "seed, time", f"{estimate.seed}, {estimate.seconds:.1f} s"


def report_estimates(found: EstimateTable) -> Report:
    """The report of all estimators, with the truth if it is known."""
    of_all = [("all", text) for text in found.warnings]
    own = [
        (row.name, text)
        for row in found.rows
        if row.estimate
        for text in row.estimate.warnings
    ]
    interval = f"{percent(found.level)} interval"
    error = () if found.truth is None else ("error",)
    warnings = _collected(
        [*of_all, *(pair for pair in own if pair[1] not in found.warnings)]
    )
    context = {
        "warnings": [f"{', '.join(names)}: {text}" for text, names in warnings.items()],
        "reasons": _collected((row.name, row.reason) for row in found.rows).items(),
        "columns": (
            "estimator",
            "estimate",
            interval,
            "uplift",
            "kind",
            "promise",
            "ESS",
            *error,
        ),
        "rows": [_cells(row, found) for row in found.rows if row.estimate],
    }
    figures = {"forest": partial(_plot_estimates, found)}
    return Report(
        "estimates.json",
        found,
        figures,
        partial(_show_estimates, found, context),
        context,
    )


def _plot_estimates(found: EstimateTable) -> Figure:
    """One line per estimator and per bound; the logging policy and the truth."""
    made = {row.name: row.estimate for row in found.rows if row.estimate}
    lines = [plots.Line(name, each.value, each.interval) for name, each in made.items()]
    lines += [
        plots.Line(bound.kind, None, bound.interval)
        for bound in found.bounds
        if bound.interval
    ]
    logging = next(
        (each.uplift.behavior_value for each in made.values() if each.uplift), None
    )
    marks = [("truth", found.truth), ("logging policy", logging)]
    return plots.plot_intervals(lines, words.return_words(found), marks)


def _show_estimates(
    found: EstimateTable, context: Mapping[str, Any], console: Any
) -> None:
    """Print a line per estimator, then what applies to all: verdict, truth, bounds and
    reasons.
    """
    families = groupby(found.rows, attrgetter("family"))
    parts = [[_cells(row, found) for row in rows] for _, rows in families]
    title = f"What {found.policy} is worth ({words.return_words(found)})"
    print_table(
        console, title, context["columns"], *parts, right=("estimate", "ESS", "error")
    )
    print_labelled(console, "verdict", str(found.verdict), "bold")
    if "actions" in found.diagnostics:
        print_labelled(
            console,
            "actions",
            words.action_shares(found.diagnostics["actions"]),
            "bold",
        )
    if found.truth is not None:
        console.print(f"truth: {found.truth:.4g}")
    for bound in found.bounds:
        if bound.interval is None:
            text = f"none: {bound.reason}"
        else:
            text = words.describe_interval(bound.interval)
        print_labelled(console, bound.kind, text, "bold")
    guessed = [(bound.kind, bound.reason) for bound in found.bounds if bound.interval]
    for reason, names in _collected(guessed).items():
        print_labelled(console, f"note ({', '.join(names)})", reason, "dim")
    for reason, names in context["reasons"]:
        verb = "does" if len(names) == 1 else "do"
        print_labelled(console, f"{', '.join(names)} {verb} not apply", reason, "dim")


def _cells(row: EstimateRow, found: EstimateTable) -> list[str]:
    """Cells of an estimator's line, with its bandit name for one-step logs; a dash if
    it has no estimate.
    """
    if words.is_one_step(found):
        alias = BANDIT.get(row.name)
    else:
        alias = None
    estimate = row.estimate
    name = f"{row.name} ({alias})" if alias else row.name
    if estimate is None:
        return [name, "–"]
    interval = estimate.interval
    size = estimate.effective_sample_size
    ends = "–"
    kind = ""
    promise = ""
    if interval is not None:
        ends = words.ends(interval)
        kind = interval.kind
        promise = words.promise(interval)
    name += " !" if estimate.warnings else ""
    cells = [
        name,
        f"{estimate.value:.4g}",
        ends,
        words.uplift(estimate.uplift),
        kind,
        promise,
    ]
    if found.truth is None:
        error = []
    else:
        error = [f"{estimate.value - found.truth:+.3g}"]
    return [*cells, "" if size is None else f"{size:.0f}", *error]


def _collected(said: Iterable[tuple[str, str | None]]) -> dict[str, list[str]]:
    """Each sentence once, with the names to which it applies."""
    collected: dict[str, list[str]] = {}
    for name, text in said:
        if text:
            collected.setdefault(text, []).append(name)
    return collected


def report_ranking(ranking: PolicyRanking) -> Report:
    """The report of a ranking."""
    rows = [_policy_cells(policy, ranking) for policy in ranking.policies]
    context = {
        "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows],
        "sentences": describe_differences(ranking),
    }
    figures = {"ranking": partial(_plot_ranking, ranking)}
    return Report(
        "ranking.json",
        ranking,
        figures,
        partial(_show_ranking, ranking, context),
        context,
    )


def _show_ranking(
    ranking: PolicyRanking, context: Mapping[str, Any], console: Any
) -> None:
    """Print ranks, intervals and differences."""
    title = f"What the policies are worth (γ = {ranking.gamma:.10g})"
    right = ("", "value")
    print_table(console, title, context["columns"], context["rows"], right=right)
    for line in context["sentences"]:
        console.print(line, soft_wrap=True)
    console.print(ranking.assumptions, soft_wrap=True, style="dim")


def describe_differences(ranking: PolicyRanking) -> list[str]:
    """Two sentences: which policies may be the best, and how many pairs differ."""
    if not ranking.comparisons:
        return ["Which policies differ was not judged."]
    names = [policy.name for policy in ranking.candidates]
    if len(names) == 1:
        who = f"only {names[0]}"
    else:
        who = f"{len(names)} policies: {', '.join(names)}"
    significant = sum(comparison.significant for comparison in ranking.comparisons)
    risk = percent(1.0 - ranking.level)
    return [
        f"May be the best (nothing is significantly better): {who}.",
        (
            f"{significant} of {len(ranking.comparisons)} pairs differ significantly"
            f" (any error: {risk})."
        ),
    ]


def _policy_cells(policy: RankedPolicy, ranking: PolicyRanking) -> dict[str, str]:
    """Cells of a policy's line by column heading; the headings are the same for all
    policies.
    """
    best = ranking.best
    interval = policy.interval
    if best.interval is None:
        head = "interval"
    else:
        head = f"{percent(ranking.level)} {best.interval.kind} interval"
    cells = {
        "": str(policy.rank),
        "policy": policy.name,
        "value": words.number(policy.value),
    }
    if interval is None:
        cells[head] = "–"
    else:
        cells[head] = words.ends(interval)
    if best.uplift is not None:
        cells["uplift"] = words.uplift(policy.uplift)
    unknown = policy.interval is None and best.interval is not None
    if unknown:
        cells["may be best"] = "not known"
    elif policy.maybe_best:
        cells["may be best"] = "yes"
    else:
        cells["may be best"] = "no"
    return {**cells, "verdict": policy.verdict.answer}


def _plot_ranking(ranking: PolicyRanking) -> Figure:
    """One line per policy, the best on top; those significantly worse than another are
    pale.
    """
    lines = [
        plots.Line(
            f"{_NO_FOLDERS.sub('', policy.name)}  {policy.rank}",
            policy.value,
            policy.interval,
            plots.ACCENT if policy.maybe_best else plots.SOFT,
        )
        for policy in ranking.policies
    ]
    return plots.plot_intervals(lines, words.return_words(ranking))
