"""Reports of one estimate, all estimators and a ranking: on a terminal, and as a folder
with a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from koffline.errors import counted, percent
from koffline.ope.groups import GroupValues
from koffline.ope.log.coverage import describe_coverage
from koffline.ope.names import BANDIT, EPISODES, needs_of
from koffline.ope.ranking import PolicyRanking, RankedPolicy
from koffline.ope.results import Estimate, EstimateRow, EstimateTable
from koffline.report import Context, Report, plots, print_labelled, print_table, words
from koffline.report.words import within

if TYPE_CHECKING:
    from rich.console import Console

_NO_FOLDERS = re.compile(r"[^:]*/(?=.)")  # of the names of policies in the figure


def report_estimate(estimate: Estimate) -> Report:
    """The report of one estimate, with the truth if it is known."""
    drawing = partial(_draw_estimate, estimate)
    figures = {"estimate": partial(plots.figure_of, drawing)}
    evidence = estimate.evidence
    if evidence is not None:
        figures["residuals"] = partial(plots.plot_residuals, evidence.residuals)
        figures["initial_values"] = partial(
            plots.plot_histogram,
            evidence.initial_values,
            mark=estimate.value,
            about_mark="mean = the estimate",
            xlabel="V(s) of an initial state",
            ylabel="initial states",
            bins=40,
        )
        figures["coverage"] = partial(
            plots.plot_coverage, evidence.action_support, evidence.support_weights
        )
    return Report(
        marker="estimate.json",
        result=estimate,
        figures=figures,
        show=partial(_show_estimate, estimate),
        top_figure="estimate",
        drawing=drawing,
    )


def _draw_estimate(estimate: Estimate) -> plots.Drawing:
    """The estimate beside the behavior policy's, or beside the mean return of the log's
    episodes.
    """
    name = f"policy ({estimate.estimator})"
    is_answer = not estimate.verdict.is_open
    color = None
    if not is_answer:
        color = plots.SOFT
    lines = [plots.Line(name, estimate.value, estimate.interval, color, is_answer)]
    logged = estimate.diagnostics.get("logged_return")
    uplift = estimate.uplift
    if uplift is not None:
        lines.append(
            plots.Line(
                "behavior policy", uplift.behavior_value, uplift.behavior_interval
            )
        )
    elif logged is not None:
        label = "logged return"
        if estimate.diagnostics["beyond_cuts"]:
            label += ", cut where\nlogging stopped"
        lines.append(plots.Line(label, logged, None, plots.SOFT))
    xlabel = _quantity(estimate)
    return plots.draw_intervals(lines, xlabel, [("truth", estimate.truth)])


def _quantity(result: Estimate | EstimateTable) -> str:
    """What the axis of a figure shows; without an answer, that it shows none."""
    quantity = words.return_words(result)
    if result.verdict.is_open:
        return f"no answer: estimators' numbers for the {quantity}"
    return quantity


def _show_estimate(estimate: Estimate, console: Console) -> None:
    """Print value, interval and the most important diagnostics, then the groups."""
    print_table(console, f"What {estimate.policy} is worth", (), _facts(estimate))
    if estimate.groups:
        together = f"{percent(estimate.settings['level'])}, together"
        columns = (str(estimate.by), "start states", "value", together)
        print_table(console, f"By {estimate.by}", columns, words.group_rows(estimate))


def _facts(estimate: Estimate) -> Iterator[tuple[str, str]]:
    """Names and texts of the lines on one estimate."""
    diagnostics = estimate.diagnostics
    if estimate.verdict.is_open:
        about = "no answer: the log does not support this number"
    else:
        about = words.return_words(estimate)
    yield "verdict", str(estimate.verdict)
    yield "value", f"{estimate.value:.4g}   ({about})"
    yield "interval", words.describe_interval(estimate.interval)
    if estimate.truth is not None:
        yield "truth", f"{estimate.truth:.4g}"
    yield from _comparison_with_log(estimate)
    by_head = diagnostics.get("estimates_by_head", {})
    heads = ", ".join(f"{name} {value:.4g}" for name, value in by_head.items())
    estimator = estimate.estimator
    if heads:
        estimator += f"   (by head: {heads})"
    yield "estimator", estimator
    log = words.describe_log(estimate)
    if "n_clusters" in diagnostics:
        log += f", {counted(diagnostics['n_clusters'], 'cluster')}"
    yield "log", log
    yield "coverage", describe_coverage(diagnostics["coverage"])
    if "actions" in diagnostics:
        yield "actions", words.action_shares(diagnostics["actions"])
    yield "seed, time", f"{estimate.seed}, {estimate.seconds:.1f} s"


def _comparison_with_log(estimate: Estimate) -> Iterator[tuple[str, str]]:
    """Lines on the behavior policy's value, the uplift and the logged return, as far as
    they are known.
    """
    diagnostics = estimate.diagnostics
    uplift = estimate.uplift
    logged = diagnostics.get("logged_return")
    if uplift is not None:
        value = f"{uplift.behavior_value:.4g}{within(uplift.behavior_interval)}"
        yield "behavior policy", f"{value}   (the policy that wrote the log)"
        difference = f"{uplift.value:+.4g}{within(uplift.interval)}"
        yield "uplift", f"{difference}   (over the behavior policy, paired)"
    if logged is None:
        return
    beyond = diagnostics["beyond_cuts"]
    if uplift is None and beyond and EPISODES in needs_of(estimate.estimator):
        yield (
            "uplift",
            (
                "– (it values nothing after a cut: compare with the logged return, or"
                " ask kloss)"
            ),
        )
    text = f"{logged:.4g}"
    error = diagnostics.get("logged_return_se")
    if error and error > 1e-12 * abs(logged):  # not for rounding alone
        text += f" ± {error:.2g}"
    if beyond:
        text += (
            f"   (what was recorded; {beyond:.0%} of the discounted future comes later)"
        )
    yield "logged return", text


def report_estimates(table: EstimateTable) -> Report:
    """The report of all estimators, with the truth if it is known."""
    said_by = [("all", warning) for warning in table.warnings]
    for row in table.rows:
        if row.estimate:
            said_by += [
                (row.name, warning)
                for warning in row.estimate.warnings
                if warning not in table.warnings
            ]
    columns = [
        "estimator",
        "estimate",
        f"{percent(table.level)} interval",
        "uplift",
        "kind",
        "promise",
        "ESS",
    ]
    if table.truth is not None:
        columns.append("error")
    context = {
        "warnings": [
            f"{', '.join(names)}: {warning}"
            for warning, names in _collected(said_by).items()
        ],
        "reasons": _collected((row.name, row.reason) for row in table.rows).items(),
        "columns": tuple(columns),
        "rows": [_cells(row, table) for row in table.rows if row.estimate],
    }
    drawing = partial(_draw_estimates, table)
    return Report(
        marker="estimates.json",
        result=table,
        figures={"forest": partial(plots.figure_of, drawing)},
        show=partial(_show_estimates, table, context),
        top_figure="forest",
        drawing=drawing,
        context=context,
    )


def _draw_estimates(table: EstimateTable) -> plots.Drawing:
    """One line per estimator and per bound; the behavior policy and the truth."""
    is_answer = not table.verdict.is_open
    color = None
    if not is_answer:
        color = plots.SOFT
    lines = []
    behavior_value = None  # the same for all estimators that know it
    for row in table.rows:
        estimate = row.estimate
        if not estimate:
            continue
        lines.append(
            plots.Line(row.name, estimate.value, estimate.interval, color, is_answer)
        )
        if estimate.uplift and behavior_value is None:
            behavior_value = estimate.uplift.behavior_value
    lines += [
        plots.Line(bound.kind, None, bound.interval)
        for bound in table.bounds
        if bound.interval
    ]
    marks = [("truth", table.truth), ("behavior policy", behavior_value)]
    return plots.draw_intervals(lines, _quantity(table), marks)


def _show_estimates(table: EstimateTable, context: Context, console: Console) -> None:
    """Print a line per estimator, then what applies to all: verdict, truth, bounds and
    reasons.
    """
    families = groupby(table.rows, attrgetter("family"))
    title = f"What {table.policy} is worth ({words.return_words(table)})"
    print_table(
        console,
        title,
        context["columns"],
        *([_cells(row, table) for row in rows] for _, rows in families),
        right=("estimate", "ESS", "error"),
    )
    print_labelled(console, "verdict", str(table.verdict), "bold")
    if "actions" in table.diagnostics:
        print_labelled(
            console,
            "actions",
            words.action_shares(table.diagnostics["actions"]),
            "bold",
        )
    if table.truth is not None:
        console.print(f"truth: {table.truth:.4g}")
    for bound in table.bounds:
        if bound.interval is None:
            text = f"none: {bound.reason}"
        else:
            text = words.describe_interval(bound.interval)
        print_labelled(console, bound.kind, text, "bold")
    guessed = [(bound.kind, bound.reason) for bound in table.bounds if bound.interval]
    for reason, names in _collected(guessed).items():
        print_labelled(console, f"note ({', '.join(names)})", reason, "dim")
    for reason, names in context["reasons"]:
        verb = "do"
        if len(names) == 1:
            verb = "does"
        print_labelled(console, f"{', '.join(names)} {verb} not apply", reason, "dim")


def _cells(row: EstimateRow, table: EstimateTable) -> list[str]:
    """Cells of an estimator's line, with its bandit name for one-step logs; a dash if
    it has no estimate.
    """
    name = row.name
    if table.is_one_step and row.name in BANDIT:
        name += f" ({BANDIT[row.name]})"
    estimate = row.estimate
    if estimate is None:
        return [name, "–"]
    if estimate.warnings:
        name += " !"
    ends = "–"
    kind = ""
    promise = ""
    interval = estimate.interval
    if interval is not None:
        ends = words.ends(interval)
        kind = interval.kind
        promise = words.promise(interval)
    size = ""
    if estimate.effective_sample_size is not None:
        size = f"{estimate.effective_sample_size:.0f}"
    value = f"{estimate.value:.4g}"
    cells = [name, value, ends, words.uplift(estimate.uplift), kind, promise, size]
    if table.truth is not None:
        cells.append(f"{estimate.value - table.truth:+.3g}")
    return cells


def _collected(
    sentences: Iterable[tuple[str, str | None]],
) -> dict[str, list[str]]:
    """Each sentence once, with the names to which it applies."""
    collected: dict[str, list[str]] = {}
    for name, sentence in sentences:
        if sentence:
            collected.setdefault(sentence, []).append(name)
    return collected


def report_ranking(ranking: PolicyRanking) -> Report:
    """The report of a ranking."""
    rows = [_policy_cells(policy, ranking) for policy in ranking.policies]
    context = {
        "columns": list(rows[0]),
        "rows": [list(row.values()) for row in rows],
        "sentences": ranking.sentences,
    }
    drawing = partial(_draw_ranking, ranking)
    return Report(
        marker="ranking.json",
        result=ranking,
        figures={"ranking": partial(plots.figure_of, drawing)},
        show=partial(_show_ranking, ranking, context),
        top_figure="ranking",
        drawing=drawing,
        context=context,
    )


def draw_groups(groups: GroupValues) -> plots.Drawing:
    """One line per group with a value; the others are named without one."""
    lines = []
    for row in groups:
        name = row.group
        if row.value is None:
            name = f"{row.group}: no value"
        lines.append(plots.Line(name, row.value, row.interval))
    intervals = [row.interval for row in groups if row.interval is not None]
    xlabel = "expected return from the group's start states"
    if intervals:
        level = percent(intervals[0].level)
        xlabel = f"{xlabel}, {level} intervals together"
    return plots.draw_intervals(lines, xlabel)


def _show_ranking(ranking: PolicyRanking, context: Context, console: Console) -> None:
    """Print ranks, intervals and differences."""
    title = f"What the policies are worth ({ranking.discounting})"
    right = ("", "value")
    print_table(console, title, context["columns"], context["rows"], right=right)
    for line in context["sentences"]:
        console.print(line, soft_wrap=True)
    console.print(ranking.assumptions, soft_wrap=True, style="dim")


def _policy_cells(policy: RankedPolicy, ranking: PolicyRanking) -> dict[str, str]:
    """Cells of a policy's line by column heading; the headings are the same for all
    policies.
    """
    best = ranking.best
    heading = "interval"
    if best.interval is not None:
        heading = f"{percent(ranking.level)} {best.interval.kind} interval"
    cells = {
        "": str(policy.rank),
        "policy": policy.name,
        "value": words.number(policy.value),
        heading: "–",
    }
    if policy.interval is not None:
        cells[heading] = words.ends(policy.interval)
    if best.uplift is not None:
        cells["uplift"] = words.uplift(policy.uplift)
    if policy.interval is None and best.interval is not None:
        cells["may be best"] = "not known"
    elif policy.maybe_best:
        cells["may be best"] = "yes"
    else:
        cells["may be best"] = "no"
    return {**cells, "verdict": policy.verdict.answer}


def _draw_ranking(ranking: PolicyRanking) -> plots.Drawing:
    """One line per policy, the best on top; those significantly worse than another are
    pale.
    """
    lines = []
    for policy in ranking.policies:
        color = plots.SOFT
        if policy.maybe_best:
            color = plots.ACCENT
        is_answer = not policy.verdict.is_open
        name = f"{_NO_FOLDERS.sub('', policy.name)}  {policy.rank}"
        if not is_answer:
            name = f"{name}\n(no answer)"
        lines.append(plots.Line(name, policy.value, policy.interval, color, is_answer))
    return plots.draw_intervals(lines, words.return_words(ranking))
