"""claims: the paper's empirical statements, each with a verdict, and the comparisons
that they rest on.

A comparison is a ratio of mean squared errors against Monte Carlo at each method's best
learning rate, with an interval over seeds (or over logs, for those of `choices`). It
holds or does not if the interval lies on one side of 1; it is level if the whole
interval is within a tenth of 1, else undecided. The page has one row per sentence of
the paper (`statements`); the appendix has every comparison, also those that the paper
did not make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from koffline.experiments import ablation, choices, figure_methods, style
from koffline.experiments.cells import CellResult, Run
from koffline.experiments.figure_choices import OTHERS, errors_of, place_of
from koffline.experiments.figure_toy import collect_toy, toy_tables
from koffline.experiments.result_files import (
    ChoiceRow,
    Claim,
    Collected,
    Correlation,
    Curves,
    ErrorRow,
    Fields,
    Results,
    finished_results,
    grouped,
    read_results,
)
from koffline.experiments.seed_statistics import (
    FAILS,
    HOLDS,
    HOLDS_UNDER,
    NO_NUMBER,
    TIED,
    UNDECIDED,
    UNSTABLE,
    SeedInterval,
    ratio_of_means,
    swinging_share,
)
from koffline.experiments.statements import (
    CONVERGENT,
    EXPENSIVE,
    IN_GENERAL,
    INFERIOR,
    LSTD_SOLUTION,
    MAGNITUDE,
    MIXTURE,
    NO_BETTER,
    TRUE_WEIGHT,
    UNSTABLE_OTHERS,
    V_IN_BATCH,
    V_OF_LOG,
    WRONG_SOLUTION,
    is_ratio,
    proxy_sentence,
    ratio_words,
    statements_of,
)

GOOD_PROXY = 0.7  # smallest rank correlation of a good proxy
_SUBSTANTIAL = 2.0  # smallest ratio of processor times of a "substantial" cost
_ROUNDING = 1e-9  # largest distance of equal weights

_DEMO = "Section 5.2, fig:pol_demo"

Cells = Mapping[tuple[str, str], CellResult]  # (world, method)
_VERDICTS = {
    HOLDS: ("#0072B2", "o"),
    FAILS: ("#D55E00", "X"),
    TIED: ("#009E73", "s"),
    UNDECIDED: ("#7F7F7F", "D"),
}
_NARROWEST = 0.05
_WIDEST = 100.0


def collect_claims(run: Run) -> Collected:
    """Statements and comparisons of all experiments: policy evaluation from the cells
    shared with the figures, the others from the results of `choices` and figure-mujoco
    in the folder.

    Raises ConfigError if only the finished is asked for and the folder has no claims.
    """
    if run.only_finished:
        parts = _stored_parts(run)
    else:
        parts = _trained_parts(run)
    claims = (
        *toy_claims(parts["rows"], parts["extra"]),
        *parts["compared"],
        *proxy_claims(parts["correlations"]),
        *stored_choice_claims(run),
        *stored_mujoco_claims(run),
    )
    return {
        "rows": parts["rows"],
        "correlations": parts["correlations"],
        "claims": claims,
        "statements": tuple(statements_of(claims)),
        "extra": parts["extra"],
    }, {}


def _trained_parts(run: Run) -> Fields:
    """Rows, correlations and comparisons of policy evaluation; trains what is
    missing.
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
    return {
        "rows": (*toy["rows"], *parts["rows"]),
        "correlations": parts["correlations"],
        "compared": (*evaluation_claims(cells), *statistic_claims(errors)),
        "extra": {**toy["extra"], **parts["extra"]},
    }


def _stored_parts(run: Run) -> Fields:
    """The same from the folder's claims.json; nothing is trained, ratios are judged
    again.
    """
    stored = finished_results(run.folder / "claims.json", subject="the claims")
    measured = (
        INFERIOR,
        UNSTABLE_OTHERS,
        NO_BETTER,
        IN_GENERAL,
        CONVERGENT,
        V_IN_BATCH,
        V_OF_LOG,
        MIXTURE,
    )
    compared = []
    for claim in stored.claims:
        if claim.sentence not in measured or " " in claim.world.replace(
            "all worlds", ""
        ):
            continue  # made anew from the results of other experiments
        verdict = claim.verdict
        if is_ratio(claim):
            verdict = claim.number.judged_ratio()
        compared.append(replace(claim, verdict=verdict, reason=""))
    return {
        "rows": stored.rows,
        "correlations": stored.correlations,
        "compared": tuple(compared),
        "extra": stored.extra,
    }


def _verdict(is_true: bool | np.bool_) -> str:
    """The verdict on a claim without an interval."""
    if is_true:
        return HOLDS
    return FAILS


def evaluation_claims(cells: Cells) -> Iterator[Claim]:
    """Claims of Section 5.2 on the paper's worlds."""
    puddle = "puddle_world"
    yield from _against(cells, puddle, ("rg",), INFERIOR, f"{_DEMO} (a, b)")
    yield from _instability(cells)
    yield from _against(cells, puddle, ("gtd2", "sbeed"), NO_BETTER, f"{_DEMO} (a)")
    for world in figure_methods.WORLDS["figure-bench"]:
        rivals = style.METHODS[:-1]
        where = "Section 5.2, fig:pol_bench"
        yield from _against(cells, world, rivals, IN_GENERAL, where)
    flags = [
        result.diverged() for (_, method), result in cells.items() if method == "kloss"
    ]
    count = int(sum(part.sum() for part in flags))
    total = sum(part.size for part in flags)
    yield Claim(
        CONVERGENT,
        "Abstract, Section 1",
        "all worlds",
        f"diverged runs of {total}",
        SeedInterval(float(count)),
        _verdict(count == 0),
    )


def toy_claims(toy: Sequence[ErrorRow], extra: Mapping[str, Any]) -> Iterator[Claim]:
    """Claims of Section 5.1 on the chain, from the rows of figure-toy."""
    rows = {row.method: row for row in toy if row.world == "chain"}
    noise = extra["lstd_weight_error"]
    where = "fig:toy_diverge"
    kloss = rows["kloss"].weight_error
    rg = rows["rg"].weight_error
    yield Claim(
        TRUE_WEIGHT,
        f"Section 5.1, {where} (c)",
        "chain",
        f"‖w − w*‖ at the end; LSTD on the same tuples: {noise:.3g}",
        kloss,
        _verdict(kloss.high is not None and kloss.high <= 3 * noise),
    )
    distance = extra["largest_distance_from_lstd"]["kloss"]
    yield Claim(
        LSTD_SOLUTION,
        "Section 5.1, cor:same_as_td",
        "chain",
        "largest distance of the weights from LSTD on the same tuples",
        SeedInterval(distance),
        _verdict(distance is not None and distance <= _ROUNDING),
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
        WRONG_SOLUTION,
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
    for world in dict.fromkeys(world for world, _ in errors):
        plain = next(
            name for where, name in errors if where == world and name.startswith("V of")
        )
        for sentence, first, second, where in (
            (V_IN_BATCH, "U", plain, "Section 3.1"),
            (V_OF_LOG, "U", "L_KV", "Appendix B.1"),
            (MIXTURE, "L_KV", "mixture 0.5", "Appendix B.1"),
        ):
            ratio = ratio_of_means(errors[world, first], errors[world, second])
            measured = f"MSE of {first} / MSE of {second}"
            yield Claim(
                sentence,
                where,
                world,
                measured,
                ratio,
                ratio.judged_ratio(),
            )


def stored_choice_claims(run: Run) -> Iterator[Claim]:
    """Comparisons of the temperatures of the target policy, from the results of
    `choices` in this folder; none without them.
    """
    path = run.folder / "choices.json"
    if path.exists():
        results = read_results(path)
        yield from choice_claims(results.choices, results.correlations)


def choice_claims(
    rows: Sequence[ChoiceRow], correlations: Sequence[Correlation]
) -> Iterator[Claim]:
    """Claims of Section 5.2 on Puddle World at each temperature, all else as published;
    intervals over logs.
    """
    for setting in choices.published_settings("puddle_world"):
        place = place_of(setting.world, setting.temperature)
        by_method = {
            row.method: row
            for row in rows
            if place_of(row.world, row.temperature) == place
            and (row.noise, row.scaling) == (setting.noise, setting.scaling)
            and row.reward_divisor == setting.reward_divisor
        }
        if "kloss" not in by_method:
            continue
        ours = by_method["kloss"]
        for method in OTHERS:
            if method in by_method:
                yield from _claims_against(ours, by_method[method], place)
        if "sbeed" in by_method:
            times = by_method["sbeed"].hours / max(ours.hours, _ROUNDING)
            yield Claim(
                EXPENSIVE,
                "Section 3.2",
                place,
                "processor time of SBEED / of K-loss, equal networks and epochs",
                SeedInterval(times),
                _verdict(times >= _SUBSTANTIAL),
            )
    yield from proxy_claims(correlations)


def _claims_against(ours: ChoiceRow, theirs: ChoiceRow, place: str) -> Iterator[Claim]:
    """Claims on the K-loss's row and another method's, at one temperature."""
    sentence = IN_GENERAL
    if theirs.method == "rg":
        sentence = INFERIOR
    elif theirs.method in ("gtd2", "sbeed"):
        sentence = NO_BETTER
    ratio = ratio_of_means(errors_of(theirs), errors_of(ours))
    yield Claim(
        sentence,
        f"{_DEMO} (a, b)",
        place,
        ratio_words(theirs.method),
        ratio,
        ratio.judged_ratio(),
    )
    if theirs.method in ("fvi", "td0") and theirs.swinging is not None:
        ours_swinging = ours.swinging or 0.0
        networks = theirs.logs * theirs.seeds * theirs.rates
        yield _instability_claim(
            theirs.method,
            place,
            share=theirs.swinging,
            runs=networks,
            diverged=theirs.diverged_any,
            ours=ours_swinging,
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
        verdict = ratio.judged_ratio()
        yield Claim(sentence, where, world, ratio_words(other), ratio, verdict)


def _instability(cells: Cells) -> Iterator[Claim]:
    curve = "mse_monte_carlo"
    ours = swinging_share(cells["puddle_world", "kloss"].curve[curve])
    for method in ("fvi", "td0"):
        result = cells["puddle_world", method]
        yield _instability_claim(
            method,
            "puddle_world",
            share=swinging_share(result.curve[curve]),
            runs=result.held_out.size,
            diverged=int(result.diverged().sum()),
            ours=ours,
        )


def _instability_claim(
    method: str, world: str, *, share: float, runs: int, diverged: int, ours: float
) -> Claim:
    """The claim that a method's runs swing. share, ours: of its runs, and the
    K-loss's.
    """
    return Claim(
        UNSTABLE_OTHERS,
        f"{_DEMO} (a)",
        world,
        f"share of {runs} runs of {style.LABELS[method]} whose error in the last fifth"
        f" exceeds {UNSTABLE:g} times its smallest (K-loss: {ours:.2g}); {diverged}"
        " diverged",
        SeedInterval(share),
        _verdict(share > max(0.5, ours)),
    )


def proxy_claims(correlations: Sequence[Correlation]) -> Iterator[Claim]:
    """Claims on what the losses tell about the errors: of the networks of their own
    method, and the K-loss also of K-loss and RG together.
    """
    for correlation in correlations:
        rank = correlation.spearman
        where = f"{_DEMO} (c, d)"
        error = "the Bellman error"
        if correlation.error == "mse":
            error = "MSE"
        verdict = UNDECIDED
        if rank.low is not None and rank.high is not None:
            verdict = rank.verdict(GOOD_PROXY)
        measured = (
            f"Spearman's rank correlation over {correlation.points} networks (good: ≥"
            f" {GOOD_PROXY})"
        )
        if correlation.networks == "own":
            sentence = proxy_sentence(correlation.loss, error)
            if correlation.loss == "l2":
                verdict = {HOLDS: FAILS, FAILS: HOLDS}.get(verdict, UNDECIDED)
        elif (correlation.loss, correlation.error) == ("kloss", "mse"):
            sentence = MAGNITUDE
            where = "Section 3.1"
            measured += " of K-loss and RG"
        else:
            continue
        yield Claim(sentence, where, correlation.world, measured, rank, verdict)


def draw_claims(results: Results, curves: Curves) -> Figure:
    """Ratios of errors on a logarithmic axis.

    Right of 1: the K-loss (or V) has the smaller error.
    """
    drawn = sorted(
        [claim for claim in results.claims if is_ratio(claim)],
        key=lambda claim: choices.WORLDS.index(claim.world.partition(" ")[0]),
    )
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
        f"{style.place_words(x.world)}: {x.measured.replace('MSE of ', '')}"
        for x in drawn
    ]
    axes.set_yticks(range(len(drawn)), names, fontsize=8)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    handles = [
        Line2D([], [], color=colour, marker=marker, ls="", ms=6, label=verdict)
        for verdict, (colour, marker) in _VERDICTS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def claims_tables(results: Results) -> Iterator[str]:
    """One row per sentence of the paper."""
    yield statements_table(results)


def claims_appendix(results: Results) -> Iterator[str]:
    """Every comparison, and the numbers they are based on."""
    yield claims_table(results)
    yield from toy_tables(results)
    yield from figure_methods.evaluation_tables(results)


def statements_table(results: Results) -> str:
    """Table with one row per sentence of the paper."""
    lines = []
    for statement in results.statements:
        verdict = f"**{statement.verdict}**"
        if statement.condition:
            verdict += f" {statement.condition}"
        lines.append(
            [
                f"“{statement.sentence}”",
                statement.where,
                verdict,
                statement.measured,
            ]
        )
    kinds = (HOLDS, HOLDS_UNDER, FAILS, TIED, UNDECIDED)
    by_verdict = grouped(results.statements, "verdict")
    summary = ", ".join(f"{len(by_verdict.get(kind, ()))} {kind}" for kind in kinds)
    comparisons = sum(statement.comparisons for statement in results.statements)
    note = (
        f"{len(results.statements)} sentences: {summary}. They rest on"
        f" {comparisons} comparisons, with 95 % intervals over seeds, or over five logs"
        " for Puddle World at a temperature T of the target policy, which the paper"
        " does not state. Level: the interval allows no difference above a tenth. All"
        f" {len(results.claims)} comparisons, also those that the paper did not make,"
        " are in [the appendix](claims.appendix.md), with the numbers."
    )
    header = "the paper | section | here | measured"
    return style.section("## Claims", note, header, lines)


def claims_table(results: Results) -> str:
    """Table with one row per comparison."""
    cells = []
    has_reasons = any(claim.reason for claim in results.claims)
    for claim in results.claims:
        value = "–"
        if claim.number != NO_NUMBER:
            value = style.interval_text(claim.number)
        line = [
            f"“{claim.sentence}”",
            claim.where,
            style.place_words(claim.world),
            claim.measured,
            value,
            f"**{claim.verdict}**",
        ]
        if has_reasons:
            line.append(claim.reason)
        cells.append(line)
    by_verdict = grouped(results.claims, "verdict")
    summary = ", ".join(f"{len(by_verdict.get(kind, ()))} {kind}" for kind in _VERDICTS)
    header = "claim | where | world | measured | value | verdict"
    if has_reasons:
        header += " | beside it"
    return style.section(
        "## Comparisons",
        f"{len(results.claims)} comparisons: {summary}.",
        header,
        cells,
    )
