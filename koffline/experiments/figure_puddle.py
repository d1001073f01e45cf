"""figure-puddle: the paper's figure of Puddle World, under the readings of what it leaves
open that decide it.

The paper does not state the target policy. The figure has a row of panels per
temperature of a softmax policy: at 3 the paper's figure comes out; 0.3 is the policy of
our other figures, nearly deterministic. A full run trains temperature 3 on five logs,
and the six methods at 0.3 on one log with ten seeds; other temperatures are shown if
`choices` has finished them in the same folder. (Feng et al. 2019, fig:pol_demo)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from koffline.experiments import choices, figure_methods, style
from koffline.experiments.cells import Cell, CellResult, Run
from koffline.experiments.choices import ChoiceResult, Finished, PaperReading
from koffline.experiments.figure_choices import (
    choice_row,
    compared_so_far,
    place_of,
    temperature_correlations,
)
from koffline.experiments.result_files import (
    ChoiceRow,
    Collected,
    Curves,
    Fields,
    Results,
    finished_results,
    is_result,
    read_curves,
    read_result,
)

WORLD = "puddle_world"
PAPER_TEMPERATURE = 3.0  # of the target policy: the paper's figure comes out
COMMAND = "koffline reproduce choices --only puddle_world --part temperature --out DIR"
_KEPT_CURVES = ("mse_monte_carlo", "mse_paper", "bellman_error")
_LOSS_CURVES = ("kernel_loss", "l2_loss")


def paper_setting() -> PaperReading:
    """The published setting with the temperature under which the paper's figure comes
    out.
    """
    published = choices.published_settings(WORLD)[0]
    return replace(published, temperature=PAPER_TEMPERATURE)


def collect_puddle(run: Run) -> Collected:
    """The six methods at the published temperature, and what is finished at others.

    Raises ConfigError if only the finished is asked for and the folder has no figure.
    """
    if run.only_finished:
        parts, curves = _stored(run)
    else:
        parts, curves = figure_methods.collect_evaluation(run)
        _train(run)
    finished = _finished(run)
    missing = _missing(finished)
    for cell in finished:
        parts, curves = _with_cell(parts, curves, cell)
    parts["correlations"] = (
        *parts["correlations"],
        *temperature_correlations(finished),
    )
    parts["choices"] = tuple(choice_row(cell) for cell in finished)
    parts["extra"] = {**parts["extra"], "not_run": missing}
    return parts, curves


def _stored(run: Run) -> Collected:
    """Rows, correlations and curves of the published temperature, from the folder."""
    path = run.folder / "figure-puddle.json"
    stored = finished_results(path, subject="the figure")
    curves = read_curves(path.with_suffix(".curves.h5"))
    parts = {
        "rows": tuple(row for row in stored.rows if row.world == WORLD),
        "correlations": tuple(
            part for part in stored.correlations if part.world == WORLD
        ),
        "extra": {"truths": {WORLD: stored.extra["truths"][WORLD]}},
    }
    return parts, {
        group: arrays
        for group, arrays in curves.items()
        if group.startswith(f"{WORLD}/")
    }


def _train(run: Run) -> None:
    """Train the paper's six methods at the paper's temperature."""
    setting = paper_setting()
    run.work_off(choices.problems_of(run.scale, setting), choices.Problem.write)
    cells = [choices.cell_of(run.scale, setting, method) for method in style.METHODS]
    run.work_off(cells, choices.write_choice)


def _settings() -> list[PaperReading]:
    """The paper's temperature, then the others from the softest policy on."""
    published = choices.published_settings(WORLD)
    falling = sorted(published, key=lambda setting: -setting.temperature)
    return list(dict.fromkeys([paper_setting(), *falling]))


def _finished(run: Run) -> list[Finished]:
    """All finished cells of the paper's six methods, by temperature."""
    finished = []
    for setting, method in itertools.product(_settings(), style.METHODS):
        cell = choices.cell_of(run.scale, setting, method)
        if is_result(run.path(cell)):
            result = read_result(run.path(cell), ChoiceResult)
            finished.append(Finished(setting, cell, result))
    return finished


def _missing(finished: Sequence[Finished]) -> list[str]:
    """Temperatures that are shown and lack methods, in words."""
    present = {(setting, cell.method) for setting, cell, _ in finished}
    shown = {setting for setting, *_ in finished} | {paper_setting()}
    lines = []
    for setting in _settings():
        if setting not in shown:
            continue
        absent = [
            style.LABELS[method]
            for method in style.METHODS
            if (setting, method) not in present
        ]
        if absent:
            place = place_of(WORLD, setting.temperature)
            lines.append(f"{style.place_words(place)}: {', '.join(absent)}")
    return lines


def _with_cell(parts: Fields, curves: Curves, finished: Finished) -> Collected:
    """Rows, truths and curves with those of a finished cell, whose world is its place:
    "puddle_world T 3". A log counts as one seed, with the mean of its networks.
    """
    setting, cell, result = finished
    place = place_of(WORLD, setting.temperature)
    named = Cell(
        problem=replace(cell.problems[0], world=place),
        method=cell.method,
        objective=cell.objective,
        training=replace(cell.training, seeds=result.logs),
    )
    merged = by_log(result)
    truth = {
        "value_variance": merged.value_variance,
        "paper_against_monte_carlo_mse": merged.paper_noise,
    }
    if setting == choices.published_settings(WORLD)[0]:
        names: tuple[str, ...] = ()  # the figure shows the ten seeds
    else:
        names = _KEPT_CURVES
    if names and cell.method in ("kloss", "rg"):
        names = (*names, *_LOSS_CURVES)
    arrays = {
        "epochs": result.epochs,
        "learning_rates": result.learning_rates,
        "value_variance": np.asarray(merged.value_variance),
        **{name: result.curve[name].astype(np.float32) for name in names},
    }
    extra = parts["extra"]
    truths = {**extra["truths"], place: truth}
    if names:
        curves = {**curves, f"{place}/{cell.method}": arrays}
    return {
        **parts,
        "rows": (*parts["rows"], *figure_methods.rows_of(named, merged)),
        "extra": {**extra, "truths": truths},
    }, curves


def by_log(result: ChoiceResult) -> CellResult:
    """The result with the means over each log's networks in the place of seeds."""
    first_divergence = np.where(
        result.diverged_at < 0, np.iinfo(np.int64).max, result.diverged_at
    ).min(axis=2)
    return CellResult(
        epochs=result.epochs,
        learning_rates=result.learning_rates,
        curve={name: curve.mean(axis=-1) for name, curve in result.curve.items()},
        diverged_at=np.where(
            (result.diverged_at >= 0).any(axis=2), first_divergence, -1
        ),
        held_out=result.held_out.mean(axis=2),
        paper_noise=float(result.paper_noise.mean()),
        value_variance=float(result.value_variance.mean()),
        largest_return=float(result.largest_return.max()),
    )


def draw_puddle(results: Results, curves: Curves) -> Figure:
    """Panels a–d of the paper's figure, a row per temperature, the paper's first."""
    published = place_of(WORLD, choices.published_settings(WORLD)[0].temperature)
    rows = [place_of(row.world, row.temperature) for row in results.choices]
    rows = [place for place in dict.fromkeys(rows) if place != published]
    rows.append(WORLD)
    figure = Figure(figsize=(15.0, 3.7 * len(rows) + 0.5), layout="constrained")
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, place in zip(parts, rows, strict=True):
        part.suptitle(_row_title(place, curves), x=0.01, ha="left", fontsize=11)
        figure_methods.draw_row(list(part.subplots(1, 4)), results, curves, place)
    figure_methods.draw_legend(figure, curves)
    return figure


def _row_title(place: str, curves: Curves) -> str:
    """What a row of panels shows."""
    methods = [group for group in curves if group.startswith(f"{place}/")]
    if place == WORLD:
        temperature = choices.published_settings(WORLD)[0].temperature
        return (
            f"Target policy of temperature {temperature:g}, nearly deterministic: one"
            " log, ten seeds"
        )
    name = place.partition(" ")[2]
    policy = f"Target policy of {name.replace('T ', 'temperature ')}"
    if name == "random":
        policy = "Random target policy"
    text = f"{policy}: five logs, two seeds each"
    if len(methods) < len(style.METHODS):
        text += f"; {len(methods)} of {len(style.METHODS)} methods are finished"
    return text


def puddle_tables(results: Results) -> Iterator[str]:
    """Errors by temperature, and what is missing."""
    yield _readings(results)


def puddle_appendix(results: Results) -> Iterator[str]:
    """All numbers: both truths, both rules for the learning rate, correlations."""
    yield from figure_methods.evaluation_tables(results)


def _readings(results: Results) -> str:
    """Errors of the six methods at each temperature, and what they say of the paper's
    ordering.
    """
    by_place: dict[str, dict[str, ChoiceRow]] = {}
    for row in results.choices:
        by_place.setdefault(place_of(row.world, row.temperature), {})[row.method] = row
    lines = []
    for method in style.METHODS:
        texts = [style.LABELS[method]]
        for methods in by_place.values():
            text = "not run"
            if method in methods:
                text = style.interval_text(methods[method].error)
            texts.append(text)
        lines.append(texts)
    header = " | ".join(
        ("MSE / Var V", *(place.partition(" ")[2] for place in by_place))
    )
    note = (
        "The paper does not state the target policy. Here it is a softmax policy of"
        " temperature T, on five logs with two seeds each; errors are against Monte"
        " Carlo, at each method's best learning rate, with 95 % intervals over logs (1"
        f" is the best constant). {_orderings(results.choices)}"
    )
    missing = results.extra.get("not_run", ())
    if missing:
        note += (
            f" Not run: {'; '.join(missing)}. `{COMMAND}` runs them, and `koffline"
            " reproduce figure-puddle --only-finished --out DIR` makes this page"
            " again."
        )
    note += (
        " Both truths, Bellman errors and rank correlations are in [the"
        " appendix](figure-puddle.appendix.md)."
    )
    title = "## Which target policy gives the paper's figure"
    return style.section(title, note, header, lines)


def _orderings(rows: Sequence[ChoiceRow]) -> str:
    """A sentence per temperature: where the K-loss stands among the finished
    methods.
    """
    sentences = []
    for comparison in compared_so_far(rows):
        temperature = comparison.key[1]
        place = place_of(WORLD, temperature).partition(" ")[2]
        rival = style.LABELS[comparison.rival]
        ratio = style.interval_text(comparison.ratio)
        rivals = "the best of the others that are finished"
        if comparison.is_complete:
            rivals = "the best of the others"
        if comparison.ratio.high < 1.0:
            text = "K-loss has the smallest error, as in the paper"
        elif comparison.ratio.low > 1.0:
            text = f"{rival} has a smaller error than K-loss"
        else:
            text = f"K-loss and {rival} are not told apart"
        sentences.append(f"At {place} {text}: {ratio} times that of {rival}, {rivals}.")
    return " ".join(sentences)
