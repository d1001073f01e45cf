"""Tables, page and figure of the leaderboard, from the rows that `leaderboard.py`
keeps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from koffline.ope.names import AVERAGED
from scripts.bench.leaderboard_scores import (
    AUTO,
    FEWEST_RANKED,
    PEERS,
    Score,
    common_cells,
    scales,
    score_methods,
    with_default,
)

_NAMES = """\
- Hopper, Walker2d, HalfCheetah, Swimmer: robots, with the number of steps that trained their policies. Two
  policies wrote the log; 20 % of the actions of the first and 10 % of those of the second were uniform
  instead. Asked are both without this noise, the mean action of the first, and a policy that wrote nothing.
- shift: CartPole. At 0 the log's writer would steer as the best policy asked does, at 0.5 it acts at random,
  at 1 it steers the other way.
- Other numbers count rows. *continuing*: only a time limit ends episodes.
"""
_COMMAND = (
    "python -m scripts.bench.leaderboard --half test --first-seed {first} --seeds"
    " {seeds} --out docs/results/leaderboard.json --page docs/leaderboard.md"
)
_SHOWN = (AUTO, "fqe", "lstd", "drl", "wdr", "wpdis", "plain FQE", "d3rlpy FQE")


def print_table(content: dict[str, Any]) -> None:
    header = f"{'method':<26}{'answered':>10}{'median':>9}{'mean':>9}{'rank':>7}{'regret':>8}"
    print(header + f"{'covered':>11}{'width':>8}{'seconds':>9}")
    for score in score_methods(with_default(content["cells"])):
        line = f"{score.method:<26}{score.answered:>6}/{score.asked:<3}"
        numbers = (
            score.median_error,
            score.mean_error,
            score.rank_correlation,
            score.regret,
        )
        line += "".join(
            f"{_text(value):>{size}}"
            for value, size in zip(numbers, (9, 9, 7, 8), strict=True)
        )
        line += f"{_covered(score):>11}{_text(score.width):>8}{_text(score.seconds):>9}"
        print(line)


def write_page(content: dict[str, Any], page: Path) -> None:
    """The Markdown page, with the figure in images/ beside it."""
    figure = draw(content)
    (page.parent / "images").mkdir(parents=True, exist_ok=True)
    figure.savefig(page.parent / "images" / "leaderboard.png", dpi=120)
    page.write_text(render_page(content), encoding="utf-8")


def render_page(content: dict[str, Any]) -> str:
    cells = with_default(content["cells"])
    unit = scales(cells)
    seeds = {cell["seed"] for cell in cells}
    logs = {(cell["problem"], cell["seed"]) for cell in cells}
    settings = ", ".join(f"{key} {value}" for key, value in content["settings"].items())
    if settings:
        ran = f"koffline ran with {settings}."
    else:
        ran = "koffline ran at its defaults."
    everything = score_methods(cells, unit)
    parts = [
        "# Leaderboard\n",
        f"`{_COMMAND.format(first=min(seeds), seeds=len(seeds))}`\n",
        (
            f"{len(unit)} problems, {len(logs)} logs, {len(cells)} questions (a log and"
            " a policy) with known answers. The columns:\n"
        ),
        (
            "- *median error*, *mean error*, *width*: relative to the mean |true"
            " value| of a problem's policies.\n- *rank*: Spearman's correlation of"
            " estimates and true values over the policies of a log. *regret@1*: how"
            " much worse the policy ranked first is than the best one, 0 the best and"
            f" 1 the worst choice. For methods that answered about {FEWEST_RANKED}"
            " policies or more.\n- *covered*: 95 % intervals that hold the true"
            " value.\n"
        ),
        (
            f"{ran} d3rlpy's FQE has as many hidden units and rows a step,"
            f" {content['fqe_steps']} steps, and a learning rate and target updates"
            " chosen on development problems (`scripts/bench/leaderboard_d3rlpy.py`)."
            " It evaluates greedy policies only. The plain FQE"
            " (`scripts/bench/leaderboard_fqe.py`) is one network of that size with a"
            f" slow target, {3 * content['fqe_steps']} steps, its settings chosen on"
            " the development half. scope-rl evaluates discrete actions only; episodes"
            " were padded to one length.\n"
        ),
        "![Relative errors by method](images/leaderboard.png)\n",
        "## What it says\n",
        _says(cells, unit),
        "\n## All questions\n",
        _table(score for score in everything if score.median_error is not None),
        "\n## By verdict\n",
        _by_verdict(cells, unit),
        "\n## Bounds and other intervals\n",
        _bounds(everything),
        "\n## By problem\n",
        "Median error of some methods, and how often the default's interval held.\n",
        _by_problem(cells, unit),
        "",
        _NAMES,
        (
            "All problems were [asked again of fresh"
            " logs](evidence/accuracy.md#the-leaderboards-questions-asked-again).\n\n"
            "Every answer, the true values, and why a method does not apply to a"
            " question are in `docs/results/leaderboard.json`.\n"
        ),
    ]
    return "\n".join(parts)


def _says(cells: list[dict[str, Any]], unit: dict[str, float]) -> str:
    """The main points, with their numbers; nothing where the methods are not there."""
    scores = {score.method: score for score in score_methods(cells, unit)}
    if not {AUTO, "plain FQE", "kernel-certified"} <= set(scores):
        return "Too few methods to compare."
    logs = {(cell["problem"], cell["seed"]) for cell in cells}
    rivals = [score for name, score in scores.items() if name not in (AUTO, AVERAGED)]
    single = [score for score in rivals if 2 * score.answered > score.asked]
    best = min(single, key=lambda score: score.median_error or math.inf)
    lines = [
        (
            f"The default (`auto`) has median error {_text(scores[AUTO].median_error)}"
            f" and mean error {_text(scores[AUTO].mean_error)}; `{best.method}`, the"
            f" best single method here, has {_text(best.median_error)} and"
            f" {_text(best.mean_error)}. {_ratio(cells, unit, best.method)}"
        ),
        f"The plain FQE, {_beside(cells, unit, 'plain FQE')}.",
        f"d3rlpy's FQE, {_beside(cells, unit, 'd3rlpy FQE')}.",
        (
            f"Certified intervals held the true value in {_covered(scores['kernel-certified'])}, but"
            f" are {_text(scores['kernel-certified'].width)} times as wide as the"
            " values: no use at these sizes."
        ),
        (
            f"Answers from one log are not independent: {len(logs)} logs are not"
            f" {len(cells)} trials."
        ),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _ratio(cells: list[dict[str, Any]], unit: dict[str, float], other: str) -> str:
    """The default's median error over another's, with the bootstrap interval over
    problems.
    """
    problems = list(unit)
    index = np.array([problems.index(cell["problem"]) for cell in cells])
    errors = np.full((2, len(cells)), np.nan)
    for at, cell in enumerate(cells):
        values = {
            answer["method"]: answer.get("value", math.nan)
            for answer in cell["answers"]
        }
        errors[:, at] = [
            abs(values[name] - cell["truth"]) / unit[cell["problem"]]
            for name in (AUTO, other)
        ]
    rows = [np.flatnonzero(index == problem) for problem in range(len(problems))]
    rng = np.random.default_rng(0)
    drawn = [
        np.concatenate([rows[i] for i in rng.integers(len(rows), size=len(rows))])
        for _ in range(2000)
    ]
    ratios = [np.divide(*np.nanmedian(errors[:, sample], axis=1)) for sample in drawn]
    low, high = np.quantile(ratios, (0.025, 0.975))
    smaller = int(np.sum(errors[0] < errors[1]))
    return (
        f"The ratio of the medians is {np.divide(*np.nanmedian(errors, axis=1)):.2f}"
        f" (95 % bootstrap interval over problems {low:.2f} to {high:.2f}); `auto` is"
        f" nearer to the true value on {smaller} questions, `{other}` on"
        f" {int(np.sum(errors[1] < errors[0]))}."
    )


def _beside(cells: list[dict[str, Any]], unit: dict[str, float], peer: str) -> str:
    """A peer and the default on the questions that the peer answered."""
    scores = {
        score.method: score for score in score_methods(common_cells(cells, peer), unit)
    }
    if not {peer, AUTO} <= set(scores):
        return "no answer"
    theirs = scores[peer]
    ours = scores[AUTO]
    return (
        f"on the {theirs.answered} questions that it answered, has median error"
        f" {_text(theirs.median_error)} and mean error {_text(theirs.mean_error)};"
        f" `auto` has {_text(ours.median_error)} and {_text(ours.mean_error)}"
    )


def draw(content: dict[str, Any]) -> Any:
    """Quartiles of the errors of every method, on a logarithmic axis."""
    from matplotlib.figure import Figure

    cells = with_default(content["cells"])
    unit = scales(content["cells"])
    order = [s.method for s in score_methods(cells, unit) if s.median_error is not None]
    errors: dict[str, list[float]] = defaultdict(list)
    for cell in cells:
        for answer in cell["answers"]:
            if "value" in answer:
                errors[answer["method"]].append(
                    abs(answer["value"] - cell["truth"]) / unit[cell["problem"]]
                )
    figure = Figure(figsize=(8.0, 1.2 + 0.27 * len(order)), layout="constrained")
    axes = figure.add_subplot()
    for place, method in enumerate(order):
        low, middle, high = np.maximum(
            np.quantile(errors[method], [0.25, 0.5, 0.75]), 1e-4
        )
        color = "#c2410c" if method.startswith(PEERS) else "#1769aa"
        axes.hlines(place, low, high, color=color, lw=5, alpha=0.35)
        axes.plot(middle, place, "o", color=color, ms=6)
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlabel("error / mean |true value| of the problem: median and quartiles")
    axes.grid(color="#e4e7eb")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _table(scores: Iterable[Score]) -> str:
    titles = ["method", "family", "answered", "median error", "mean error"]
    titles += ["rank", "regret@1", "covered", "width"]
    rows = []
    for score in scores:
        row = [f"`{score.method}`", score.family, f"{score.answered} of {score.asked}"]
        row += [_text(score.median_error), _text(score.mean_error)]
        row += [_text(score.rank_correlation), _text(score.regret)]
        rows.append([*row, _covered(score), _text(score.width)])
    return _markdown(titles, rows)


def _bounds(scores: list[Score]) -> str:
    rows = [
        [
            f"`{score.method}`",
            f"{score.intervals} of {score.asked}",
            _covered(score),
            _text(score.width),
        ]
        for score in scores
        if score.median_error is None and score.intervals
    ]
    return _markdown(["kind", "given", "covered", "width"], rows)


def _by_verdict(cells: list[dict[str, Any]], unit: dict[str, float]) -> str:
    """How far off the answers were, and how often the intervals held."""
    rows: dict[str, list[tuple[float, bool | None]]] = defaultdict(list)
    for cell in cells:
        for answer in cell["answers"]:
            if answer["method"] == AUTO and "verdict" in answer:
                if "low" in answer:
                    holds = answer["low"] <= cell["truth"] <= answer["high"]
                else:
                    holds = None
                error = abs(answer["value"] - cell["truth"]) / unit[cell["problem"]]
                rows[answer["verdict"]].append((error, holds))
    table = []
    for verdict, pairs in sorted(rows.items(), key=lambda pair: -len(pair[1])):
        held = [holds for _, holds in pairs if holds is not None]
        errors = [error for error, _ in pairs]
        covered = "–"
        if held:
            covered = f"{sum(held)} of {len(held)}"
        table.append(
            [
                verdict,
                str(len(pairs)),
                covered,
                _text(float(np.median(errors))),
                _text(max(errors)),
            ]
        )
    return _markdown(
        ["verdict", "answers", "intervals that hold", "median error", "largest"], table
    )


def _by_problem(cells: list[dict[str, Any]], unit: dict[str, float]) -> str:
    """A line for each problem."""
    lines = []
    for problem in unit:
        of_problem = [cell for cell in cells if cell["problem"] == problem]
        scores = {score.method: score for score in score_methods(of_problem, unit)}
        rows = sorted({cell["n_rows"] for cell in of_problem})
        line = [problem, " to ".join(f"{count:,}" for count in rows)]
        if AUTO in scores:
            line.append(_covered(scores[AUTO]))
        else:
            line.append("–")
        for method in _SHOWN:
            if method in scores:
                line.append(_text(scores[method].median_error))
            else:
                line.append("–")
        lines.append(line)
    titles = ["problem", "rows", "held", *(f"`{method}`" for method in _SHOWN)]
    return _markdown(titles, lines)


def _markdown(titles: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _covered(score: Score) -> str:
    if score.intervals:
        return f"{score.covered} of {score.intervals}"
    return "–"


def _text(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}"
