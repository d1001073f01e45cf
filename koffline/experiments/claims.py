"""claims: the paper's empirical statements on policy evaluation, each with our
measurement and a verdict.

A comparison is a ratio of mean squared errors against Monte Carlo at each method's best
learning rate, with an interval over seeds. It is decided if the interval lies on one
side of 1, else undecided. The figure is a forest plot of these ratios; the table lists
every statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from koffline.experiments import ablation, figure_methods, style
from koffline.experiments.cells import CellResult, Run
from koffline.experiments.figure_toy import collect_toy, toy_tables
from koffline.experiments.result_files import (
    Claim,
    Correlation,
    Curves,
    ErrorRow,
    Results,
    grouped,
    read_results,
)
from koffline.experiments.seed_statistics import (
    FAILS,
    HOLDS,
    NO_NUMBER,
    UNDECIDED,
    SeedInterval,
    ratio_of_means,
)

GOOD_PROXY = 0.7  # smallest rank correlation of a good proxy
UNSTABLE = 2.0  # a run oscillates if a late error is this many times its smallest one

Cells = Mapping[tuple[str, str], CellResult]  # (world, method)
_VERDICTS = {
    HOLDS: ("#0072B2", "o"),
    FAILS: ("#D55E00", "X"),
    UNDECIDED: ("#7F7F7F", "D"),
}
_NARROWEST = 0.05
_WIDEST = 100.0


def collect_claims(run: Run) -> tuple[dict[str, Any], Curves]:
    """Rows and claims of all policy evaluation experiments, from the cells shared with
    the figures.
    """
    worlds = [world for group in figure_methods.WORLDS.values() for world in group]
    finished = run.train(figure_methods.evaluation_cells(worlds, run.scale))
    cells = {(cell.problem.world, cell.method): result for cell, result in finished}
    statistics = [
        part
        for part in ablation.variants("ablation", run.scale)
        if part[0] == "statistic"
    ]
    trained = zip(statistics, run.train([cell for *_, cell in statistics]), strict=True)
    errors = {
        (cell.problem.world, name): result.best_errors()
        for (_, name, cell), (_, result) in trained
    }
    toy, _ = collect_toy(run)
    parts = figure_methods.parts_of(finished)
    claims = (
        *toy_claims(toy["rows"], toy["extra"]),
        *evaluation_claims(cells, parts["correlations"]),
        *statistic_claims(errors),
        *stored_mujoco_claims(run),
    )
    extra = {**toy["extra"], **parts["extra"]}
    return {
        **parts,
        "rows": (*toy["rows"], *parts["rows"]),
        "claims": claims,
        "extra": extra,
    }, {}


def _verdict(is_true: bool | np.bool_) -> str:
    """The verdict on a claim without an interval."""
    if is_true:
        return HOLDS
    return FAILS


def evaluation_claims(
    cells: Cells, correlations: Sequence[Correlation]
) -> Iterator[Claim]:
    """Claims of Section 5.2 on the paper's worlds."""
    demo = "Section 5.2, fig:pol_demo"
    puddle = "puddle_world"
    inferior = (
        "our method works well while residual gradient converged to inferior solutions"
    )
    yield from _against(cells, puddle, ("rg",), inferior, f"{demo} (a, b)")
    yield from _instability(cells)
    no_better = (
        "GTD2 and SBEED do not find a better solution than our method in terms of MSE"
    )
    yield from _against(cells, puddle, ("gtd2", "sbeed"), no_better, f"{demo} (a)")
    yield from _proxies(correlations)
    for world in figure_methods.WORLDS["figure-bench"]:
        general = "our method performs better than other methods in general"
        rivals = style.METHODS[:-1]
        yield from _against(cells, world, rivals, general, "Section 5.2, fig:pol_bench")
    flags = [
        result.diverged() for (_, method), result in cells.items() if method == "kloss"
    ]
    count = int(sum(part.sum() for part in flags))
    total = sum(part.size for part in flags)
    yield Claim(
        "our method is convergent: no risk of divergence",
        "Abstract, Section 1",
        "all worlds",
        f"diverged runs of {total}",
        SeedInterval(float(count)),
        _verdict(count == 0),
    )


def toy_claims(toy: Sequence[ErrorRow], extra: Mapping[str, Any]) -> Iterator[Claim]:
    """Claims of Section 5.1 on the chain, from the rows of figure-toy."""
    rows = {row.method: row for row in toy}
    noise = extra["lstd_weight_error"]
    where = "fig:toy_diverge"
    kloss = rows["kloss"].weight_error
    rg = rows["rg"].weight_error
    yield Claim(
        "our method converges to the true weight w*",
        f"Section 5.1, {where} (c)",
        "chain",
        f"‖w − w*‖ at the end; LSTD on the same tuples: {noise:.3g}",
        kloss,
        _verdict(kloss.high is not None and kloss.high <= 3 * noise),
        "the rest is sampling error: LSTD ends at the same weights",
    )
    for method in ("fvi", "td0"):
        share = rows[method].diverged / rows[method].seeds
        yield Claim(
            f"{style.LABELS[method]} diverges",
            f"Section 5.1, {where} (b, c)",
            "chain",
            "share of seeds whose weights pass 1e7",
            SeedInterval(share),
            _verdict(share == 1.0),
        )
    yield Claim(
        "RG converges to a wrong solution",
        f"Section 5.1, {where} (c)",
        "chain",
        "‖w − w*‖ at the end",
        rg,
        _verdict(rg.low is not None and rg.low > 3 * noise),
    )


def statistic_claims(errors: Mapping[tuple[str, str], np.ndarray]) -> Iterator[Claim]:
    """Claims on V- and U-statistics and mixtures, from the ablation. errors: (S,) by
    (world, variant).
    """
    better = "V-statistics works better than U-statistics"
    for world in dict.fromkeys(world for world, _ in errors):
        plain = next(
            name for where, name in errors if where == world and name.startswith("V of")
        )
        for sentence, first, second, where in (
            (f"{better} (in a mini-batch)", "U", plain, "Section 3.1"),
            (
                f"{better} (L_KV, the estimate of all rows' V)",
                "U",
                "L_KV",
                "Appendix B.1",
            ),
            (
                "a mixture of V and U achieves better performance",
                "L_KV",
                "mixture 0.5",
                "Appendix B.1",
            ),
        ):
            ratio = ratio_of_means(errors[world, first], errors[world, second])
            measured = f"MSE of {first} / MSE of {second}"
            yield Claim(
                sentence,
                where,
                world,
                measured,
                ratio,
                ratio.verdict(1.0),
                ratio.cost(1.0, np.log),
            )


def stored_mujoco_claims(run: Run) -> Sequence[Claim]:
    """Claims stored by figure-mujoco in this folder; its hours of training are not
    repeated.
    """
    path = run.folder / "figure-mujoco.json"
    if path.exists():
        return [
            claim
            for claim in read_results(path).claims
            if not claim.sentence.startswith("K-loss with ")  # not the paper's
        ]
    sentence = "K-loss consistently outperforms FVI, TD(0) and RG inside Trust-PCL"
    measured = "not in this folder: run `koffline reproduce figure-mujoco` first"
    return [
        Claim(
            sentence,
            "Section 5.3, fig:mujoco_bench",
            "MuJoCo",
            measured,
            NO_NUMBER,
            UNDECIDED,
        )
    ]


def _against(
    cells: Cells, world: str, rivals: Sequence[str], sentence: str, where: str
) -> Iterator[Claim]:
    """Claims on the error of each rival method divided by the K-loss's.

    sentence, where: the paper's words, and their place in it.
    """
    ours = cells[world, "kloss"]
    for other in rivals:
        ratio = ratio_of_means(cells[world, other].best_errors(), ours.best_errors())
        verdict = ratio.verdict(1.0)
        measured = f"MSE of {style.LABELS[other]} / MSE of K-loss"
        reason = ratio.cost(1.0, np.log) or _reason(
            ours, cells[world, other], other, verdict
        )
        yield Claim(sentence, where, world, measured, ratio, verdict, reason)


def _reason(ours: CellResult, theirs: CellResult, other: str, verdict: str) -> str:
    """Why a comparison ended so; empty if it needs no explanation.

    ours, theirs: results of the K-loss and of the method `other`.
    """
    share = ours.best_errors().mean() / ours.value_variance
    if verdict != FAILS:
        if share < 1.0:
            return ""
        return f"and yet K-loss is worse than a constant: MSE / Var V = {share:.2f}"
    our_error = _bellman_error(ours)
    their_error = _bellman_error(theirs)
    if our_error < their_error and share > 0.5:
        return (
            f"K-loss has the smaller Bellman error ({our_error:.2g} against"
            f" {their_error:.2g}) and"
            " the larger value error: where states lead to one another, a level that"
            " is off by c costs only (1 − γ) c"
        )
    if other == "rg":
        return (
            "the transitions are nearly deterministic here: residual gradient has"
            " little bias to lose by"
        )
    return (
        "the bandwidth 0.5 smooths the residual over a quarter of the state space; see"
        " the ablation"
    )


def _bellman_error(result: CellResult) -> float:
    """Mean Bellman error over seeds at the learning rate with the smallest MSE."""
    best = result.best_by_truth("monte_carlo")
    return float(result.final("bellman_error")[best].mean())


def _instability(cells: Cells) -> Iterator[Claim]:
    sentence = (
        "FVI and TD(0) exhibit unstable/oscillating behaviour, and can even diverge"
    )
    ours = _swinging_share(cells["puddle_world", "kloss"])
    for method in ("fvi", "td0"):
        result = cells["puddle_world", method]
        share = _swinging_share(result)
        diverged = int(result.diverged().sum())
        yield Claim(
            sentence,
            "Section 5.2, fig:pol_demo (a)",
            "puddle_world",
            f"share of {result.held_out.size} runs of {style.LABELS[method]} whose"
            f" error in the last fifth exceeds {UNSTABLE:g} times its smallest (K-loss:"
            f" {ours:.2g}); {diverged} diverged",
            SeedInterval(share),
            _verdict(share > max(0.5, ours)),
        )


def _swinging_share(result: CellResult) -> float:
    """Share of runs whose late error is far above their smallest error; diverged runs
    count.
    """
    curves = result.curve["mse_monte_carlo"]  # (T, L, S)
    late = curves[-max(1, len(curves) // 5) :]
    with np.errstate(invalid="ignore"):
        steady = late.max(axis=0) <= UNSTABLE * np.nanmin(curves, axis=0)
    return float(1.0 - steady.mean())


def _proxies(correlations: Sequence[Correlation]) -> Iterator[Claim]:
    for correlation in correlations:
        if correlation.networks != "own":
            continue
        rank = correlation.spearman
        error = "the Bellman error"
        if correlation.error == "mse":
            error = "MSE"
        verdict = rank.verdict(GOOD_PROXY)
        sentence = f"our kernel loss is a good proxy for {error}"
        if correlation.loss == "l2":
            sentence = f"the L2 loss does not correlate well with {error}"
            verdict = {HOLDS: FAILS, FAILS: HOLDS}.get(verdict, UNDECIDED)
        measured = (
            f"Spearman's rank correlation over {correlation.points} networks (good: ≥"
            f" {GOOD_PROXY})"
        )
        cost = rank.cost(GOOD_PROXY, np.arctanh)
        where = "Section 5.2, fig:pol_demo (c, d)"
        yield Claim(sentence, where, correlation.world, measured, rank, verdict, cost)


def draw_claims(results: Results, curves: Curves) -> Figure:
    """Ratios of errors on a logarithmic axis.

    Right of 1: the K-loss (or V) has the smaller error.
    """
    drawn = [claim for claim in results.claims if claim.measured.count("MSE of") == 2]
    figure = Figure(figsize=(11.0, 0.27 * len(drawn) + 1.3), layout="constrained")
    axes = figure.subplots()
    for line, claim in enumerate(drawn):
        colour, marker = _VERDICTS[claim.verdict]
        value, low, high = np.clip(
            [_WIDEST if x is None else x for x in claim.number], _NARROWEST, _WIDEST
        )
        axes.plot([low, high], [line, line], color=colour, lw=2.0, alpha=0.5)
        axes.plot(value, line, marker, color=colour, ms=6)
    axes.set_xscale("log")
    axes.set_xlim(_NARROWEST / 1.2, _WIDEST * 1.2)
    axes.axvline(1.0, color=style.INK, lw=0.9)
    axes.set_xlabel(
        "ratio of mean squared errors, 95 % interval; right of 1: as the paper says"
    )
    names = [
        f"{style.WORLD_NAMES.get(x.world, x.world)}:"
        f" {x.measured.replace('MSE of ', '')}"
        for x in drawn
    ]
    axes.set_yticks(range(len(drawn)), names, fontsize=8)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    handles = [
        Line2D([], [], color=colour, marker=marker, ls="", ms=6, label=verdict)
        for verdict, (colour, marker) in _VERDICTS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def claims_tables(results: Results) -> Iterator[str]:
    """Table of all claims, and the numbers they are based on."""
    yield claims_table(results)
    yield from toy_tables(results)
    yield from figure_methods.evaluation_tables(results)


def claims_table(results: Results) -> str:
    """Table with one row per claim."""
    cells = []
    for claim in results.claims:
        value = "–"
        if claim.number != NO_NUMBER:
            value = style.interval_text(claim.number)
        cells.append(
            [
                f"“{claim.sentence}”",
                claim.where,
                style.LONG_NAMES.get(claim.world, claim.world),
                claim.measured,
                value,
                f"**{claim.verdict}**",
                claim.reason,
            ]
        )
    by_verdict = grouped(results.claims, "verdict")
    summary = ", ".join(f"{len(by_verdict.get(kind, ()))} {kind}" for kind in _VERDICTS)
    header = "claim | where | world | measured | value | verdict | reason"
    return style.section(
        "## Claims", f"{len(results.claims)} sentences: {summary}.", header, cells
    )
