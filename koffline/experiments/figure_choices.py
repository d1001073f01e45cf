"""choices, shown: where the kernel loss wins, at one look, and what goes with it.

The figure has a row of cells per noise, scaling, reward divisor and velocity box, and a
column per temperature of the target policy. A cell's colour is the error of the K-loss
divided by that of the best other method: blue where the kernel loss wins. Where methods
are not finished, "≥" stands before the ratio to the best finished one. Intervals are
over logs, each log's mean over its seeds. (Feng et al. 2019, fig:pol_demo,
fig:pol_bench)
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from koffline.experiments import choices, style
from koffline.experiments.cells import LAST_RECORDS, TRUTHS, Run
from koffline.experiments.choices import ChoiceResult, Finished, PaperReading
from koffline.experiments.choices_traits import TraitsResult
from koffline.experiments.exact_losses import DIAG_WEIGHTS, ExactResult, write_exact
from koffline.experiments.figure_methods import ERRORS, LOSSES
from koffline.experiments.result_files import (
    ChoiceRow,
    Collected,
    Correlation,
    Curves,
    ExactRow,
    Results,
    SettingRow,
    grouped,
    read_result,
)
from koffline.experiments.seed_statistics import (
    SeedInterval,
    mean_over_seeds,
    ratio_of_means,
    spearman_over_seeds,
    swinging_share,
)
from koffline.json_types import JsonObject

CHOICES = ("world", "temperature", "noise", "scaling", "reward_divisor", "fastest")
OTHERS = ("td0", "fvi", "rg", "gtd2", "sbeed")  # the methods without a kernel
_MOST_RATIO = 10.0  # ratios beyond this, or its inverse, have the colour of the end
_LATE = 2  # the worst error is sought in the last 1/2 of the records
_DIGITS = 6
_FEWEST = 5  # settings of a rank correlation
_WIDEST_CURVE = 30.0  # errors above this many variances of V are off the axes
_TRAITS = {
    "transition_share": "variance of a backup over transitions / Var V",
    "backup_share": "variance of a backup over actions and transitions / Var V",
    "grid_share": "squared error of the paper's grid / Var V",
    "kernel_spread": "kernel loss: largest eigenvalue / 50th",
    "squared_spread": "squared Bellman error: largest eigenvalue / smallest",
    "kernel_depth": "kernel loss: powers of ten between V and the steepest direction",
    "squared_depth": (
        "squared Bellman error: powers of ten between V and the steepest direction"
    ),
}
_ALREADY_LOGARITHMS = (_TRAITS["kernel_depth"], _TRAITS["squared_depth"])
_LEADING = "share of the K-loss's error in the kernel's ten leading eigenvectors"
_WORLD_COLOURS = ("#D55E00", "#0072B2", "#56B4E9", "#009E73")
_MAP_LINE = 0.38  # inches of a line of the map
_MAP_FRAME = 1.2  # of its title and axis
_MAP_LEAST = 2.6  # of a map with few lines
_LABEL_WIDTH = 42  # characters
_TITLE_CHARACTERS = 85  # of the title, per column of the map
_SETTING_HEADER = "T | noise | inputs | rewards / | box"
# the values of CHOICES
Key = tuple[str, float | None, float, str, float, float | None]
# the same without world and temperature: noise, scaling, divisor, box
Line = tuple[float, str, float, float | None]


class ErrorRatio(NamedTuple):
    """The K-loss against the best method without a kernel, in one setting: ratio of
    their errors.

    smallest: the smaller of the two errors, a share of Var V. finished_rivals: how many
    methods without a kernel are finished. With all of them the ratio is final;
    with fewer it can only grow.
    """

    key: Key
    rival: str
    ratio: SeedInterval
    smallest: float
    finished_rivals: int = len(OTHERS)

    @property
    def is_complete(self) -> bool:
        """Whether all methods are finished."""
        return self.finished_rivals == len(OTHERS)

    @property
    def verdict(self) -> str:
        """ "wins", "loses", or "level" if the interval holds 1 or methods are missing."""
        if self.ratio.high < 1.0 and self.is_complete:
            return "wins"
        if self.ratio.low > 1.0:
            return "loses"
        return "level"


def collect_choices(run: Run) -> Collected:
    """Train what is missing, unless only the finished is asked for; return all that is
    finished.
    """
    if not run.only_finished:
        choices.train_choices(run)
    finished, traits, missing = choices.finished_choices(run)
    settings = list(dict.fromkeys(setting for setting, *_ in finished))
    # Seconds each, and so they are measured for whatever is finished.
    run.work_off([choices.exact_of(setting) for setting in settings], write_exact)
    minimisers = []
    for setting in settings:
        exact = read_result(run.path(choices.exact_of(setting)), ExactResult)
        minimisers += exact_rows(setting, exact)
    parts = {
        "rows": (),
        "choices": tuple(choice_row(cell) for cell in finished),
        "traits": tuple(
            _setting_row(setting, measured) for setting, measured in traits.items()
        ),
        "minimisers": tuple(dict.fromkeys(minimisers)),
        "correlations": tuple(temperature_correlations(finished)),
        "extra": {"not_run": missing},
    }
    return parts, dict(_curves(finished))


def exact_rows(setting: PaperReading, exact: ExactResult) -> list[ExactRow]:
    """One row per loss of a setting; equal rows for settings that differ in the rewards'
    divisor.
    """
    fields = _choices_of(setting)
    rows = []
    for place, (method, weight) in enumerate(DIAG_WEIGHTS.items()):
        row = ExactRow(
            world=setting.world,
            temperature=fields["temperature"],
            noise=setting.noise,
            scaling=setting.scaling,
            method=method,
            diag_weight=weight,
            value_variance=_digits(exact.value_variance),
            residual_share=_digits(exact.residual_share),
            error=_digits(exact.errors[place]),
            leading=_digits(exact.leading[place]),
            spread=_digits(exact.spread[place]),
            depth=_digits(exact.depth[place]),
        )
        rows.append(row)
    return rows


def temperature_correlations(finished: Sequence[Finished]) -> Iterator[Correlation]:
    """How each loss ranks the networks of its own method, and those of K-loss and RG,
    at each temperature of the published settings; intervals over logs.
    """
    results: dict[tuple[PaperReading, str], ChoiceResult] = {}
    for setting, cell, result in finished:
        results[setting, cell.method] = result
    settings = dict.fromkeys(setting for setting, _ in results)
    for setting in filter(choices.is_published, settings):
        place = place_of(setting.world, setting.temperature)
        for loss, (_, loss_curve, trained_by) in LOSSES.items():
            for networks, methods in (
                ("own", (trained_by,)),
                ("both", ("kloss", "rg")),
            ):
                if not all((setting, method) in results for method in methods):
                    continue
                trained = [results[setting, method] for method in methods]
                for error, (_, error_curve) in ERRORS.items():
                    x = np.concatenate([_points(part, loss_curve) for part in trained])
                    y = np.concatenate([_points(part, error_curve) for part in trained])
                    count = int(np.isfinite(x * y).sum())
                    rank = spearman_over_seeds(x, y)
                    rounded = SeedInterval(*(_number(float(end)) for end in rank))
                    yield Correlation(place, loss, error, networks, rounded, count)


def _points(result: ChoiceResult, curve: str) -> np.ndarray:
    """All records of all rates and seeds by log, (points, logs)."""
    by_log = np.moveaxis(result.curve[curve], 2, -1)  # (T, L, S, G)
    return by_log.reshape(-1, result.logs)


def place_of(world: str, temperature: float | None) -> str:
    """A world at a temperature, as curves and correlations name it: "puddle_world
    T 3".
    """
    stored = temperature
    if temperature is not None:
        stored = _stored_temperature(temperature)
    return f"{world} {_temperature_text(stored)}"


def _choices_of(setting: PaperReading) -> JsonObject:
    """The setting's fields as stored: JSON has no infinity, so None is the random
    policy's temperature.
    """
    fields = {name: getattr(setting, name) for name in CHOICES}
    fields["temperature"] = _stored_temperature(setting.temperature)
    return fields


def _stored_temperature(temperature: float) -> float | None:
    """The temperature; None for the random policy's, which is infinite."""
    if math.isinf(temperature):
        return None
    return temperature


def choice_row(finished: Finished) -> ChoiceRow:
    """The results row of a finished cell."""
    setting, cell, result = finished
    shares = {truth: result.shares(curve) for truth, curve in TRUTHS.items()}
    best = _best(shares["monte_carlo"])
    by_paper = _best(shares["paper"])
    diverged = result.diverged()
    return ChoiceRow(
        **_choices_of(setting),
        method=cell.method,
        logs=result.logs,
        seeds=cell.training.seeds,
        epochs=cell.training.epochs,
        rates=len(result.learning_rates),
        hours=round(result.process_seconds / 3600.0, 4),
        learning_rate=float(result.learning_rates[best]),
        by_log=_numbers(shares["monte_carlo"][best]),
        error=_interval(shares["monte_carlo"][best]),
        bellman_error=_interval(result.shares("bellman_error")[best]),
        worst=_number(_worst(result, best)),
        leading=_interval(result.leading_share[best].mean(axis=1)),
        diverged=int(diverged[best].sum()),
        diverged_any=int(diverged.sum()),
        learning_rate_by_paper=float(result.learning_rates[by_paper]),
        by_log_by_paper=_numbers(shares["paper"][by_paper]),
        error_by_paper=_interval(shares["paper"][by_paper]),
        swinging=_number(swinging_share(result.curve["mse_monte_carlo"])),
    )


def _best(shares: np.ndarray) -> int:
    """The learning rate with the smallest mean error; those with a diverged seed come
    last.
    """
    means = shares.mean(axis=1)
    return int(np.where(np.isfinite(means), means, np.inf).argmin())


def _worst(result: ChoiceResult, rate: int) -> float:
    """Largest error of a record in the second half of training: mean over logs and
    seeds, share of Var V.
    """
    curve = result.curve["mse_monte_carlo"][:, rate].astype(np.float64)  # (T, G, S)
    late = curve[len(curve) // _LATE :]
    return float((late.max(axis=0) / result.value_variance[:, None]).mean())


def _setting_row(setting: PaperReading, traits: TraitsResult) -> SettingRow:
    return SettingRow(
        **_choices_of(setting),
        logs=len(traits.value_variance),
        value_variance=_interval(traits.value_variance),
        transition_share=_interval(traits.transition_share),
        backup_share=_interval(traits.backup_share),
        grid_share=_interval(traits.grid_share),
        kernel_spread=_number(traits.kernel_spread),
        squared_spread=_number(traits.squared_spread),
        kernel_depth=_number(traits.kernel_depth),
        squared_depth=_number(traits.squared_depth),
    )


def _number(value: float) -> float | None:
    """Six digits, for small files; None if not finite."""
    if math.isfinite(value):
        return _digits(value)
    return None


def _digits(value: float) -> float:
    """The number with six digits."""
    return float(f"{value:.{_DIGITS}g}")


def _numbers(values: np.ndarray) -> tuple[float | None, ...]:
    return tuple(_number(float(value)) for value in values)


def _interval(values: np.ndarray) -> SeedInterval:
    """Mean over logs with Student's interval."""
    return SeedInterval(*(_number(float(end)) for end in mean_over_seeds(values)))


def _curves(
    finished: Sequence[Finished],
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Errors by epoch, as shares of Var V (T, logs), for the settings that differ in
    temperature alone.
    """
    published: set[PaperReading] = set()
    for world in choices.WORLDS:
        published.update(choices.published_settings(world))
    for setting, cell, result in finished:
        if setting in published:
            best = _best(result.shares("mse_monte_carlo"))
            curve = (
                result.curve["mse_monte_carlo"][:, best].mean(axis=-1)
                / result.value_variance
            )
            group = f"{place_of(setting.world, setting.temperature)}/{cell.method}"
            yield group, {"epochs": result.epochs, "error": curve.astype(np.float32)}


def _temperature_text(temperature: float | None) -> str:
    if temperature is None:
        return "random"
    return f"T {temperature:.3g}"


def compared(rows: Sequence[ChoiceRow], truth: str = "monte_carlo") -> list[ErrorRatio]:
    """The K-loss against the best other method, for each setting in which all six
    methods are finished.
    """
    return [
        comparison
        for comparison in compared_so_far(rows, truth)
        if comparison.is_complete
    ]


def compared_so_far(
    rows: Sequence[ChoiceRow], truth: str = "monte_carlo"
) -> list[ErrorRatio]:
    """The K-loss against the best finished other method, for each setting that has
    both.
    """
    comparisons = []
    for key, group in _by_setting(rows).items():
        errors = {row.method: errors_of(row, truth) for row in group}
        rivals = [method for method in OTHERS if method in errors]
        if "kloss" not in errors or not rivals:
            continue
        means = {method: _mean(errors[method]) for method in rivals}
        rival = min(means, key=lambda method: means[method])
        ratio = ratio_of_means(errors["kloss"], errors[rival])
        smallest = min(means[rival], _mean(errors["kloss"]))
        comparisons.append(ErrorRatio(key, rival, ratio, smallest, len(rivals)))
    return comparisons


def errors_of(row: ChoiceRow, truth: str = "monte_carlo") -> np.ndarray:
    """Errors by log; NaN where a seed diverged."""
    values = row.by_log_by_paper
    if truth == "monte_carlo":
        values = row.by_log
    return np.array(values, dtype=np.float64)  # None becomes NaN


def _mean(errors: np.ndarray) -> float:
    if np.isfinite(errors).all():
        return float(errors.mean())
    return math.inf


def draw_choices(
    results: Results, _: Curves, truth: str = "monte_carlo"
) -> Figure | None:
    """A map per world: colour, ratio of errors; text, ratio and rival.

    None if no setting has the K-loss and another method.
    """
    comparisons = {
        comparison.key: comparison
        for comparison in compared_so_far(results.choices, truth)
    }
    worlds = [
        world for world in choices.WORLDS if any(key[0] == world for key in comparisons)
    ]
    if not worlds:
        return None
    lines = {world: _lines_of(world, comparisons) for world in worlds}
    columns = min(2, len(worlds))
    pages = -(-len(worlds) // columns)
    most = max(map(len, lines.values()))
    height = max(_MAP_LINE * most + _MAP_FRAME, _MAP_LEAST)
    figure = Figure(
        figsize=(6.4 * columns + 0.8, height * pages + 0.7), layout="constrained"
    )
    panels = figure.subplots(pages, columns, squeeze=False)
    for axes, world in zip(panels.ravel(), worlds, strict=False):
        _draw_map(axes, world, lines[world], comparisons)
    for axes in panels.ravel()[len(worlds) :]:
        axes.axis("off")
    bar = figure.colorbar(
        ScalarMappable(_norm(), "RdBu_r"), ax=panels, shrink=0.75, extend="both"
    )
    ticks = (0.1, 0.3, 1.0, 3.0, 10.0)
    bar.set_ticks(list(ticks), labels=[f"{tick:g}" for tick in ticks])
    bar.ax.minorticks_off()
    bar.ax.set_title("below 1\nK-loss wins", loc="center", fontsize=8)
    if truth == "monte_carlo":
        by = "Monte Carlo"
    else:
        by = "the paper's grid"
    title = (
        "Error of the K-loss / error of the best other method, which is named; truth:"
        f" {by}. Bold: decided by the interval over logs. ≥: the best of those that are"
        " finished, whose number stands below. Hatched: both worse than a constant."
    )
    width = int(_TITLE_CHARACTERS * columns)
    figure.suptitle("\n".join(textwrap.wrap(title, width)), fontsize=9)
    return figure


def _norm() -> LogNorm:
    return LogNorm(1.0 / _MOST_RATIO, _MOST_RATIO)


def _lines_of(world: str, comparisons: Mapping[Key, ErrorRatio]) -> list[Line]:
    """Combinations of the choices other than temperature, (noise, scaling, divisor,
    box), for which there is a comparison.
    """
    stages = itertools.chain.from_iterable(
        choices.settings_of(chapter)
        for chapter in choices.CHAPTERS
        if chapter.world == world
    )
    keys = {tuple(_choices_of(setting).values())[2:]: None for setting in stages}
    usual = next(iter(keys))
    shown = {key[2:] for key in comparisons if key[0] == world}
    return sorted(
        [key for key in keys if key in shown],
        key=lambda key: sum(a != b for a, b in zip(key, usual, strict=True)),
    )


def _draw_map(
    axes: Axes,
    world: str,
    lines: Sequence[Line],
    comparisons: Mapping[Key, ErrorRatio],
) -> None:
    """Cells of one world.

    Bold: decided. Hatched: both errors above a constant's. A dash: not finished.
    """
    temperatures = [
        _stored_temperature(temperature)
        for temperature in choices.temperatures_of(world)
    ]
    places = itertools.product(enumerate(lines), enumerate(temperatures))
    ratios = np.full((len(lines), len(temperatures)), np.nan)
    for (line, key), (column, temperature) in places:
        comparison = comparisons.get((world, temperature, *key))
        if comparison is None:
            axes.text(
                column,
                line,
                "–",
                ha="center",
                va="center",
                color=style.SOFT,
                fontsize=7,
            )
            continue
        ratio = float(np.clip(comparison.ratio.value, 1e-9, 1e9))
        ratios[line, column] = np.clip(ratio, 1.0 / _MOST_RATIO, _MOST_RATIO)
        color = style.INK
        if abs(math.log10(ratios[line, column])) > 0.7:  # on a dark ground
            color = "white"
        weight = "bold"
        if comparison.verdict == "level":
            weight = "normal"
        number = style.number_text(float(f"{ratio:.2g}"))
        text = f"{number}  {style.LABELS[comparison.rival]}"
        if not comparison.is_complete:
            text = f"≥ {text}\n{comparison.finished_rivals} of {len(OTHERS)} others"
        axes.text(
            column,
            line,
            text,
            ha="center",
            va="center",
            fontsize=7,
            color=color,
            fontweight=weight,
        )
        if comparison.smallest > 1.0:
            corner = (column - 0.5, line - 0.5)
            hatched = Rectangle(
                corner,
                width=1.0,
                height=1.0,
                fill=False,
                hatch="////",
                edgecolor=style.SOFT,
                alpha=0.6,
                lw=0,
            )
            axes.add_patch(hatched)
    axes.imshow(ratios, norm=_norm(), cmap="RdBu_r", aspect="auto")
    axes.set_title(style.WORLD_NAMES[world])
    axes.set_xticks(
        range(len(temperatures)), [_temperature_text(t) for t in temperatures]
    )
    axes.set_yticks(range(len(lines)), [_line_text(key) for key in lines], fontsize=7)
    axes.set_xlabel("temperature of the target policy")
    axes.grid(visible=False)


def _line_text(line: Line) -> str:
    noise, scaling, divisor, fastest = line
    text = f"noise {noise:g}, {_scaling_text(scaling)}, r/{divisor:g}"
    if fastest is not None:
        text += f", ±{fastest:g}"
    return text


def _scaling_text(scaling: str) -> str:
    return {"unit": "unit", "z": "z-scores"}[scaling]


def draw_temperatures(results: Results, curves: Curves) -> Figure | None:
    """Errors by epoch, a row of panels per world and a column per temperature; None if
    there are none.
    """
    groups: dict[str, list[str]] = {}
    for group in curves:
        place, _, method = group.partition("/")
        groups.setdefault(place, []).append(method)
    worlds = [
        world
        for world in choices.WORLDS
        if any(place.startswith(f"{world} ") for place in groups)
    ]
    if not worlds:
        return None
    figure = Figure(figsize=(13.0, 2.9 * len(worlds) + 0.5), layout="constrained")
    columns = len(choices.temperatures_of(worlds[0]))
    panels = figure.subplots(len(worlds), columns, squeeze=False, sharex="row")
    for line, world in zip(panels, worlds, strict=True):
        for axes, temperature in zip(line, choices.temperatures_of(world), strict=True):
            name = _temperature_text(_stored_temperature(temperature))
            methods = groups.get(f"{world} {name}", [])
            axes.set_title(f"{style.WORLD_NAMES[world]}, {name}")
            if not methods:
                axes.set_title(f"{style.WORLD_NAMES[world]}, {name}: not run")
                axes.axis("off")
                continue
            series = {}
            for method in methods:
                if method in style.METHODS:
                    curve = curves[f"{world} {name}/{method}"]
                    series[method] = (
                        np.asarray(curve["epochs"]),
                        np.asarray(curve["error"]),
                    )
            if series:
                style.draw_errors(axes, series, _WIDEST_CURVE)
            axes.axhline(1.0, color=style.INK, **style.DOTTED, zorder=1)
            axes.set_xlabel("epoch")
        line[0].set_ylabel("MSE / Var V")
    level = {"best constant": {"color": style.INK, **style.DOTTED}}
    style.method_legend(figure, style.METHODS, level)
    return figure


def draw_reasons(results: Results, _: Curves) -> Figure | None:
    """The ratio of errors against each measured quantity, a point per setting; None for
    few settings.
    """
    if len(compared(results.choices)) < _FEWEST:
        return None
    pairs = _measured(results)
    columns = 4
    figure = Figure(figsize=(13.0, 5.6), layout="constrained")
    panels = figure.subplots(-(-len(pairs) // columns), columns, sharey=True)
    for axes, (words, points) in zip(panels.ravel(), pairs.items(), strict=True):
        for (world, name), colour, marker in zip(
            style.WORLD_NAMES.items(), _WORLD_COLOURS, "oD^s", strict=True
        ):
            here = [
                (x, y)
                for place, x, y in points
                if place == world and x > 0.0 and math.isfinite(y)
            ]
            if here:
                quantities = [quantity for quantity, _ in here]
                ratios = [ratio for _, ratio in here]
                axes.plot(
                    quantities,
                    ratios,
                    marker,
                    color=colour,
                    ms=4,
                    mew=0,
                    label=name,
                )
        axes.axhline(1.0, color=style.INK, **style.DOTTED, zorder=1)
        axes.set(yscale="log")
        axes.set_xlabel("\n".join(textwrap.wrap(words, _LABEL_WIDTH)), fontsize=8)
        if words not in _ALREADY_LOGARITHMS:
            axes.set(xscale="log")
            style.tidy_log_ticks(axes.xaxis)
    for axes in panels[:, 0]:
        axes.set_ylabel("K-loss / best other")
    named = {
        name: handle
        for axes in panels.ravel()
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        named.values(),
        named,
        loc="outside lower center",
        ncols=max(1, len(named)),
        frameon=False,
    )
    return figure


CHOICES_PAGES: dict[str, Any] = {
    "paper": partial(draw_choices, truth="paper"),
    "temperatures": draw_temperatures,
    "reasons": draw_reasons,
}


def choices_tables(results: Results) -> Iterator[str]:
    """What is finished, where the K-loss wins, what goes with it, every row, and what
    was not run.
    """
    yield _finished_text(results)
    for truth, words in (("monte_carlo", "Monte Carlo"), ("paper", "the paper's grid")):
        yield _winners(results, truth, words)
    if len(compared(results.choices)) >= _FEWEST:
        yield _correlations(results)
    yield _minimisers_table(results)
    for world, rows in grouped(results.choices, "world").items():
        yield _errors_table(world, rows)
    for world, traits in grouped(results.traits, "world").items():
        yield _traits_table(world, traits)
    yield _missing_text(results)


def _finished_text(results: Results) -> str:
    rows = results.choices
    settings = len(_by_setting(rows))
    networks = sum(row.logs * row.seeds * row.rates for row in rows)
    hours = sum(row.hours for row in rows)
    about = (
        f"{len(rows)} cells (settings: {settings}), {networks} networks, {hours:.3g}"
        " hours of one core. Errors are mean squares over the training states divided"
        " by Var V (1 is the best constant), at each method's best learning rate; a"
        f" network's error is the mean of its last {LAST_RECORDS} records. Intervals"
        " are 95 %, Student's over logs; each log counts with the mean of its seeds,"
        " and no two logs share a seed."
    )
    text = f"## What is finished\n\n{about}"
    missing = len(results.extra["not_run"])
    if missing:
        text += (
            f"\n\n{missing} settings lack some or all methods; they are listed at the"
            " end."
        )
    return text


def _missing_text(results: Results) -> str:
    """Settings that lack methods; those that lack all are counted, and listed in the
    results file.
    """
    ending = ": all methods"
    missing = results.extra["not_run"]
    lines = [f"- {setting}" for setting in missing if not setting.endswith(ending)]
    for world in choices.WORLDS:
        whole = sum(
            setting.startswith(f"{world}:") and setting.endswith(ending)
            for setting in missing
        )
        if whole:
            lines.append(f"- {world}: {whole} settings, all methods")
    return "## Not run\n\n" + "\n".join(lines or ["- nothing"])


def _winners(results: Results, truth: str, words: str) -> str:
    """Counts of settings by world in which the K-loss wins, loses, or is level.

    truth: a key of `TRUTHS`. words: the truth's name.
    """
    lines = []
    for world in choices.WORLDS:
        comparisons = [
            comparison
            for comparison in compared(results.choices, truth)
            if comparison.key[0] == world
        ]
        if not comparisons:
            continue
        counts = [
            sum(comparison.verdict == verdict for comparison in comparisons)
            for verdict in ("wins", "level", "loses")
        ]
        rivals = grouped(comparisons, "rival")
        best = ", ".join(
            f"{style.LABELS[m]} {len(rivals[m])}" for m in OTHERS if m in rivals
        )
        useless = sum(comparison.smallest > 1.0 for comparison in comparisons)
        lines.append(
            [
                style.LONG_NAMES[world],
                *map(str, (len(comparisons), *counts, useless)),
                best,
            ]
        )
    note = (
        "The K-loss (bandwidth 0.5, the batch's V-statistic) against the best of the"
        " five methods without a kernel, in each setting where all are finished: it"
        " wins or loses where the 95 % interval over logs of the ratio of errors does"
        " not hold 1. Choosing the best of five favours these."
    )
    header = (
        "world | settings | K-loss wins | level | loses | both worse than a constant |"
        " best other method"
    )
    return style.section(
        f"## Where the kernel loss wins, by {words}", note, header, lines
    )


def _correlations(results: Results) -> str:
    """Rank correlations over settings of each trait with the ratio of errors."""
    lines = []
    for words, points in _measured(results).items():
        by_world = [
            [(x, y) for place, x, y in points if place == world]
            for world in choices.WORLDS
        ]
        every = [(x, y) for _, x, y in points]
        lines.append([words, *map(_rank_text, (*by_world, every))])
    note = (
        "Spearman's rank correlation, over settings, of a measured quantity with the"
        " ratio of errors (K-loss / best other, Monte Carlo), and the number of"
        " settings. Negative: the K-loss does better where the quantity is large. The"
        " settings are chosen and share factors; there is no interval."
    )
    header = " | ".join(
        ("quantity", *(style.WORLD_NAMES[world] for world in choices.WORLDS), "all")
    )
    return style.section("## What goes with it", note, header, lines)


def _measured(results: Results) -> dict[str, list[tuple[str, float, float]]]:
    """By quantity, for each setting that is compared: its world, the quantity, the
    ratio of errors.
    """
    traits = {_key(row): row for row in results.traits}
    leading = {
        _key(row): row.leading.value for row in results.choices if row.method == "kloss"
    }
    points: dict[str, list[tuple[str, float, float]]] = {
        words: [] for words in (*_TRAITS.values(), _LEADING)
    }
    for comparison in compared(results.choices):
        key = comparison.key
        quantities = {_LEADING: leading[key]}
        if key in traits:
            for name, words in _TRAITS.items():
                quantities[words] = _trait(traits[key], name)
        for words, quantity in quantities.items():
            if quantity is not None:
                points[words].append((key[0], quantity, float(comparison.ratio.value)))
    return points


def _trait(row: SettingRow, name: str) -> float | None:
    value = getattr(row, name)
    if isinstance(value, SeedInterval):
        return value.value
    return value


def _rank_text(pairs: Sequence[tuple[float, float]]) -> str:
    good = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    firsts = {a for a, _ in good}
    seconds = {b for _, b in good}
    if len(good) < _FEWEST or len(firsts) < 2 or len(seconds) < 2:
        return f"– ({len(good)})"
    from scipy.stats import spearmanr  # takes a second to import

    columns = np.transpose(good)  # (2, settings)
    rank: Any = spearmanr(columns[0], columns[1]).statistic
    return f"{rank:.2f} ({len(good)})"


def _key(row: ChoiceRow | SettingRow) -> Key:
    return (
        row.world,
        row.temperature,
        row.noise,
        row.scaling,
        row.reward_divisor,
        row.fastest,
    )


def _by_setting(rows: Iterable[ChoiceRow]) -> dict[Key, list[ChoiceRow]]:
    """Rows by the values of CHOICES, in order of first appearance."""
    groups: dict[Key, list[ChoiceRow]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return groups


def _setting_cells(row: ChoiceRow | SettingRow) -> list[str]:
    box = "–"
    if row.fastest is not None:
        box = f"±{row.fastest:g}"
    temperature = "random"
    if row.temperature is not None:
        temperature = f"{row.temperature:.3g}"
    return [
        temperature,
        f"{row.noise:g}",
        _scaling_text(row.scaling),
        f"{row.reward_divisor:g}",
        box,
    ]


def _errors_table(world: str, rows: Sequence[ChoiceRow]) -> str:
    """Every method in every finished setting; the smallest error of a setting in
    bold.
    """
    lines = []
    for group in _by_setting(rows).values():
        means = {row.method: _mean(errors_of(row, "monte_carlo")) for row in group}
        smallest = min(means.values())
        for row in group:
            text = style.interval_text(row.error)
            if math.isfinite(smallest) and means[row.method] == smallest:
                text = f"**{text}**"
            lines.append(
                [
                    *_setting_cells(row),
                    style.LABELS[row.method],
                    text,
                    f"{row.learning_rate:g}",
                    style.number_text(row.worst),
                    style.interval_text(row.error_by_paper),
                    style.interval_text(row.bellman_error),
                    style.interval_text(row.leading),
                    f"{row.diverged}/{row.logs * row.seeds}, {row.diverged_any}",
                    f"{row.logs} × {row.seeds}",
                    str(row.epochs),
                    f"{row.hours:.2g}",
                ]
            )
    note = (
        "Error: against Monte Carlo; worst: largest error of a record in the second"
        " half of training; leading: share of the final squared error in the kernel's"
        " ten leading eigenvectors at 500 states; diverged: networks at the best rate,"
        " and at all rates; hours of one core for all rates, logs and seeds."
    )
    header = (
        f"{_SETTING_HEADER} | method | error | rate | worst | error, paper's grid |"
        " Bellman error | leading | diverged | logs × seeds | epochs | hours"
    )
    return style.section(f"## Errors: {style.LONG_NAMES[world]}", note, header, lines)


def _minimisers_table(results: Results) -> str:
    """What each loss would reach, and at which cost, if training were perfect."""
    trained = {
        (*_key(row)[:4], row.method): row.error.value
        for row in reversed(results.choices)  # the first divisor is the published one
    }
    lines = []
    for row in results.minimisers:
        key = (row.world, row.temperature, row.noise, row.scaling)
        temperature = "random"
        if row.temperature is not None:
            temperature = f"{row.temperature:.3g}"
        lines.append(
            [
                style.LONG_NAMES[row.world],
                temperature,
                f"{row.noise:g}",
                _scaling_text(row.scaling),
                style.number_text(row.residual_share),
                style.LABELS[row.method],
                style.number_text(row.error),
                style.number_text(row.leading),
                style.number_text(row.spread),
                style.number_text(row.depth),
                style.number_text(trained.get((*key, row.method))),
            ]
        )
    note = (
        "No training: values on a grid of 500 cells, transitions of the world itself,"
        " one linear solve per loss. Noise: E[δ²] at V^π, a share of Var V. Error: of"
        " the values with the smallest loss, a share of Var V. Leading: share of this"
        " error in the kernel's ten leading eigenvectors. Spread: largest eigenvalue of"
        " the loss / smallest. Depth: powers of ten between the steepest direction and"
        " V. Trained: the error of the networks above."
    )
    header = (
        "world | T | noise | inputs | noise of residuals | loss | error | leading |"
        " spread | depth | trained"
    )
    return style.section(
        "## What each loss reaches if training is perfect", note, header, lines
    )


def _traits_table(world: str, rows: Sequence[SettingRow]) -> str:
    """Measures of the settings' problems."""
    lines = []
    for row in rows:
        shares = (
            row.value_variance,
            row.transition_share,
            row.backup_share,
            row.grid_share,
        )
        numbers = (
            row.kernel_spread,
            row.squared_spread,
            row.kernel_depth,
            row.squared_depth,
        )
        texts = [*map(style.interval_text, shares), *map(style.number_text, numbers)]
        lines.append([*_setting_cells(row), *texts, str(row.logs)])
    note = (
        "Variance of a backup r + γV(s') over transitions, and over actions and"
        " transitions, and squared error of the paper's grid, as shares of Var V."
        " Spread: largest eigenvalue by the 50th (kernel loss) or the smallest (squared"
        " Bellman error) of the loss as a quadratic form of the error of V, on 500"
        " cells. Depth: by how many powers of ten the eigenvalues of the directions in"
        " which V lies are below the largest, V's squared parts as weights. These do"
        " not depend on the divisor of the rewards."
    )
    header = (
        f"{_SETTING_HEADER} | Var V | transitions | backups | grid | spread, kernel |"
        " spread, squared | depth, kernel | depth, squared | logs"
    )
    return style.section(
        f"## The problems: {style.LONG_NAMES[world]}", note, header, lines
    )
