"""claims: the paper's empirical sentences on policy evaluation, each beside our measurement and a verdict.

A comparison is a ratio of mean squared errors against Monte Carlo at each method's best learning rate, with
an interval over seeds: it holds or does not where the interval lies on one side of 1, else undecided. The
figure is a forest plot with a line per sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from koffline.experiments.cells import CellResult, best_rate_by_truth, diverged_seeds, final_values
from koffline.experiments.results import FAILS, HOLDS, UNDECIDED, Claim, Correlation, Curves, Results, Row
from koffline.experiments.statistics import Interval, ratio_of_means
from koffline.experiments.style import INK, LABELS, SOFT, WORLD_NAMES, house_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


GOOD_PROXY = 0.7  # rank correlation from which a loss is called a good proxy
UNSTABLE = 2.0  # a late error this many times the smallest one of the run is called oscillation

Cells = Mapping[tuple[str, str], CellResult]  # (world, method)
_VERDICTS = {"holds": ("#0072B2", "o"), "does not hold": ("#D55E00", "X"), "undecided": ("#7F7F7F", "D")}
_NARROWEST, _WIDEST = 0.05, 100.0


def evaluation_claims(cells: Cells, correlations: tuple[Correlation, ...]) -> Iterator[Claim]:
    """Claims of Section 5.2 on the three worlds."""
    yield from _against(
        cells,
        "puddle_world",
        ("rg",),
        "our method works well while residual gradient converged to inferior solutions",
        "Section 5.2, fig:pol_demo (a, b)",
    )
    yield from _instability(cells)
    yield from _against(
        cells,
        "puddle_world",
        ("gtd2", "sbeed"),
        "GTD2 and SBEED do not find a better solution than our method in terms of MSE",
        "Section 5.2, fig:pol_demo (a)",
    )
    yield from _proxies(correlations)
    for world in ("cart_pole", "mountain_car"):
        yield from _against(
            cells,
            world,
            ("td0", "fvi", "rg", "gtd2", "sbeed"),
            "our method performs better than other methods in general",
            "Section 5.2, fig:pol_bench",
        )
    yield _never_diverges(cells)


def toy_claims(toy: Sequence[Row], extra: Mapping[str, Any]) -> Iterator[Claim]:
    """Claims of Section 5.1 on the chain, from the rows of figure-toy."""
    rows = {row.method: row for row in toy}
    noise = extra["lstd_weight_error"]
    kloss, rg = rows["kloss"], rows["rg"]
    reached = kloss.weight_error_high is not None and kloss.weight_error_high <= 3 * noise
    yield Claim(
        "our method converges to the true weight w*", "Section 5.1, fig:toy_diverge (c)", "chain",
        f"‖w − w*‖ at the end; LSTD on the same tuples: {noise:.3g}",
        kloss.weight_error, kloss.weight_error_low, kloss.weight_error_high,
        HOLDS if reached else FAILS, "the rest is sampling error: LSTD ends at the same weights",
    )  # fmt: skip
    for method in ("fvi", "td0"):
        row = rows[method]
        yield Claim(
            f"{LABELS[method]} diverges", "Section 5.1, fig:toy_diverge (b, c)", "chain",
            "share of seeds whose weights pass 1e7", row.diverged / row.seeds, None, None,
            HOLDS if row.diverged == row.seeds else FAILS,
        )  # fmt: skip
    wrong = rg.weight_error_low is not None and rg.weight_error_low > 3 * noise
    yield Claim(
        "RG converges to a wrong solution", "Section 5.1, fig:toy_diverge (c)", "chain",
        "‖w − w*‖ at the end",
        rg.weight_error, rg.weight_error_low, rg.weight_error_high, HOLDS if wrong else FAILS,
    )  # fmt: skip


def statistic_claims(errors: Mapping[tuple[str, str], np.ndarray]) -> Iterator[Claim]:
    """V against U and the paper's mixture, from the ablation: errors per (world, variant), (S,)."""
    worlds = dict.fromkeys(world for world, _ in errors)
    for world in worlds:
        plain = next(name for where, name in errors if where == world and name.startswith("V of"))
        better = "V-statistics works better than U-statistics"
        pairs = (
            (f"{better} (in a mini-batch)", "U", plain, "Section 3.1"),
            (f"{better} (L_KV, the estimate of all rows' V)", "U", "L_KV", "Appendix B.1"),
            ("a mixture of V and U achieves better performance", "L_KV", "mixture 0.5", "Appendix B.1"),
        )
        for sentence, first, second, where in pairs:
            ratio = ratio_of_means(errors[world, first], errors[world, second])
            yield Claim(
                sentence, where, world, f"MSE of {first} / MSE of {second}",
                ratio.value, ratio.low, ratio.high, verdict_of(ratio, 1.0),
            )  # fmt: skip


def _against(cells: Cells, world: str, others: tuple[str, ...], sentence: str, where: str) -> Iterator[Claim]:
    """The error of each other method over that of the K-loss."""
    ours = best_errors(cells[world, "kloss"])
    for other in others:
        ratio = ratio_of_means(best_errors(cells[world, other]), ours)
        verdict = verdict_of(ratio, 1.0)
        yield Claim(
            sentence, where, world, f"MSE of {LABELS[other]} / MSE of K-loss",
            ratio.value, ratio.low, ratio.high, verdict, _reason(cells, world, other, verdict),
        )  # fmt: skip


def _reason(cells: Cells, world: str, other: str, verdict: str) -> str:
    ours, theirs = cells[world, "kloss"], cells[world, other]
    share = best_errors(ours).mean() / ours.value_variance
    if verdict != FAILS:
        return "" if share < 1.0 else f"and yet K-loss is worse than a constant: MSE / Var V = {share:.2f}"
    own, their = (
        final_values(r, "bellman_error")[best_rate_by_truth(r, "monte_carlo")].mean() for r in (ours, theirs)
    )
    if own < their and share > 0.5:
        return (
            f"K-loss has the smaller Bellman error ({own:.2g} against {their:.2g}) and the larger value "
            "error: an error that is nearly constant costs only (1 − γ) of itself in every residual"
        )
    if other == "rg":
        return "the transitions are nearly deterministic here: residual gradient has little bias to lose by"
    return "the bandwidth 0.5 smooths the residual over a quarter of the state space; see the ablation"


def _instability(cells: Cells) -> Iterator[Claim]:
    sentence = "FVI and TD(0) exhibit unstable/oscillating behaviour, and can even diverge"
    ours = _swinging_share(cells["puddle_world", "kloss"])
    for method in ("fvi", "td0"):
        result = cells["puddle_world", method]
        share, diverged = _swinging_share(result), int(diverged_seeds(result).sum())
        yield Claim(
            sentence, "Section 5.2, fig:pol_demo (a)", "puddle_world",
            f"share of {result.held_out.size} runs of {LABELS[method]} whose error in the last fifth exceeds "
            f"{UNSTABLE:g} times its smallest (K-loss: {ours:.2g}); {diverged} diverged",
            share, None, None, HOLDS if share > max(0.5, ours) else FAILS,
        )  # fmt: skip


def _swinging_share(result: CellResult) -> float:
    """Share of runs whose late error is far above the smallest of the run; a broken run counts."""
    curves = result.curves["mse_monte_carlo"]  # (T, L, S)
    late = curves[-max(1, len(curves) // 5) :]
    with np.errstate(invalid="ignore"):
        steady = late.max(axis=0) <= UNSTABLE * np.nanmin(curves, axis=0)
    return float(1.0 - steady.mean())


def _proxies(correlations: tuple[Correlation, ...]) -> Iterator[Claim]:
    for found in correlations:
        if found.networks != "own":
            continue
        good = found.low >= GOOD_PROXY
        bad = found.high < GOOD_PROXY
        if found.loss == "kloss":
            sentence = f"our kernel loss is a good proxy for {_error_name(found.error)}"
            verdict = HOLDS if good else FAILS if bad else UNDECIDED
        else:
            sentence = f"the L2 loss does not correlate well with {_error_name(found.error)}"
            verdict = HOLDS if bad else FAILS if good else UNDECIDED
        yield Claim(
            sentence, "Section 5.2, fig:pol_demo (c, d)", found.world,
            f"Spearman's rank correlation over {found.points} networks (good: ≥ {GOOD_PROXY})",
            found.spearman, found.low, found.high, verdict,
        )  # fmt: skip


def _error_name(error: str) -> str:
    return "MSE" if error == "mse" else "the Bellman error"


def _never_diverges(cells: Cells) -> Claim:
    flags = [diverged_seeds(result) for (_, method), result in cells.items() if method == "kloss"]
    count, total = int(sum(f.sum() for f in flags)), sum(f.size for f in flags)
    return Claim(
        "our method is convergent: no risk of divergence", "Abstract, Section 1", "all three",
        f"diverged runs of {total}", float(count), None, None, HOLDS if count == 0 else FAILS,
    )  # fmt: skip


def best_errors(result: CellResult) -> np.ndarray:
    """Errors (S,) against Monte Carlo at the best learning rate."""
    return final_values(result, "mse_monte_carlo")[best_rate_by_truth(result, "monte_carlo")]


def verdict_of(found: Interval, border: float) -> str:
    """Whether a number is larger than the border."""
    if found.low > border:
        return HOLDS
    return FAILS if found.high < border else UNDECIDED


def not_measured() -> Iterator[Claim]:
    """Section 5.3, where figure-mujoco has not been run in the same folder."""
    yield Claim(
        "K-loss consistently outperforms FVI, TD(0) and RG inside Trust-PCL", "Section 5.3, fig:mujoco_bench",
        "MuJoCo", "not in this folder: run `koffline reproduce figure-mujoco` first", None, None, None,
        UNDECIDED,
    )  # fmt: skip


def draw_claims(results: Results, curves: Curves) -> Figure:
    """Ratios of errors on a logarithmic axis: right of 1 the K-loss (or V) has the smaller error."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    ratios = [claim for claim in results.claims if is_ratio(claim)]
    others = [claim for claim in results.claims if not is_ratio(claim)]
    with house_style():
        height = 0.27 * (len(ratios) + len(others)) + 1.6
        figure = Figure(figsize=(12.5, height), layout="constrained")
        panels = figure.subplots(2, 1, height_ratios=(len(ratios) + 1.0, len(others) + 1.0))
        _draw_ratios(panels[0], ratios)
        _draw_others(panels[1], others)
        handles = [
            Line2D([], [], color=colour, marker=marker, ls="", ms=6, label=verdict)
            for verdict, (colour, marker) in _VERDICTS.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        return figure


def is_ratio(claim: Claim) -> bool:
    """Whether the measurement is a ratio of two errors."""
    return claim.measured.count("MSE of") == 2


def _draw_ratios(axes: Axes, claims: Sequence[Claim]) -> None:
    for line, claim in enumerate(claims):
        colour, marker = _VERDICTS[claim.verdict]
        low, value, high = (
            float(np.clip(_WIDEST if end is None else end, _NARROWEST, _WIDEST))
            for end in (claim.low, claim.value, claim.high)
        )
        axes.plot([low, high], [line, line], color=colour, lw=2.0, alpha=0.5)
        axes.plot(value, line, marker, color=colour, ms=6)
    axes.set_xscale("log")
    axes.set_xlim(_NARROWEST / 1.2, _WIDEST * 1.2)
    axes.axvline(1.0, color=INK, lw=0.9)
    axes.set_xlabel("ratio of mean squared errors, 95 % interval over seeds; right of 1 as the paper says")
    _label_lines(axes, [f"{WORLD_NAMES.get(c.world, c.world)}: {c.measured}" for c in claims])


def _draw_others(axes: Axes, claims: Sequence[Claim]) -> None:
    for line, claim in enumerate(claims):
        colour, marker = _VERDICTS[claim.verdict]
        axes.plot(0.0, line, marker, color=colour, ms=6)
        axes.text(0.03, line, in_numbers(claim), va="center", color=INK, fontsize=8)
    axes.set_xlim(-0.02, 1.0)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    _label_lines(axes, [f"{WORLD_NAMES.get(c.world, c.world)}: {c.sentence}" for c in claims])


def _label_lines(axes: Axes, texts: Sequence[str]) -> None:
    axes.set_yticks(range(len(texts)), [shorten(text, 62, placeholder=" …") for text in texts], fontsize=8)
    axes.set_ylim(len(texts) - 0.4, -0.6)


def in_numbers(claim: Claim) -> str:
    """The measurement in words: 0.93 [0.9, 0.95], what was measured."""
    if claim.value is None:
        return claim.measured
    interval = "" if claim.low is None or claim.high is None else f" [{claim.low:.3g}, {claim.high:.3g}]"
    return f"{claim.value:.3g}{interval}   {shorten(claim.measured, 90, placeholder=' …')}"
