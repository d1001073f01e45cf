"""Tables of the pages in docs/evidence and docs/notes, made from docs/results.

    python -m scripts.evidence_tables    # writes every table anew, between its marks

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. A test fails
where a page says something else than the results.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from koffline.ope.names import AVERAGED
from scripts.bench import interval_coverage, memory, pass_cost
from scripts.bench.coverage import clopper_pearson
from scripts.bench.leaderboard_scores import AUTO, scales, score_methods, with_default

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "docs" / "evidence", ROOT / "docs" / "notes")
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.S)
_VERDICTS = ("supported", "with care", "not answerable from this log")
_FAULTS = {
    "reset rows": "dummy rows of resets, before episodes",
    "next observations of resets": (
        "next observation of a cut row is the next episode's first"
    ),
    "terminals that end nothing": "terminal flag in rows that end nothing",
    "limits flagged as ends": "time limits flagged as ends, too",
    "unmarked ends": "episodes glued to the next one",
    "unmarked time limits": "the same at a time limit only",
    "actions late": "actions one row late",
    "actions and rewards late": "actions and rewards one row late",
    "rewards late": "rewards one row late",
    "marks in rewards": "−999 among rewards",
    "marks in observations": "−999 among observations",
    "rows lost inside": "rows lost inside episodes",
    "labels as numbers": "labels of a tabular world as numbers",
}


def results(name: str) -> Any:
    """The content of docs/results/NAME.json."""
    path = ROOT / "docs" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def accuracy() -> str:
    """Errors on the held-out problems, a line for each problem."""
    rows = results("accuracy")["rows"]
    lines = []
    for problem in dict.fromkeys(row["problem"] for row in rows):
        of_problem = [row for row in rows if row["problem"] == problem]
        errors = [
            ", ".join(f"{row['error'][head]:+.3f}" for row in of_problem)
            for head in ("kloss", "fqe", "lstd")
        ]
        widths = [_shown(row["relative_width"], ".3f") for row in of_problem]
        lines.append([problem, *errors, ", ".join(widths), _covered(of_problem)])
    means = []
    medians = []
    for name in ("kloss", "fqe", "lstd"):
        sizes = [abs(row["error"][name]) for row in rows]
        means.append(f"{statistics.fmean(sizes):.4f}")
        medians.append(f"{statistics.median(sizes):.4f}")
    lines.append([r"**mean \|error\|**", *means, "", f"**{_covered(rows)}**"])
    lines.append([r"**median \|error\|**", *medians, "", ""])
    head = ["problem", "K-loss error", "FQE error", "LSTD error", "interval width"]
    return markdown([*head, "covered"], lines)


def coverage() -> str:
    """The default interval on each exact problem."""
    rows = {
        (row["problem"], row["estimator"]): row for row in results("coverage")["rows"]
    }
    names = [name for name, estimator in rows if estimator == "drl" and name != "all"]
    lines = []
    for name in names:
        row = rows[name, "kloss+fqe"]
        efficiency = [
            _shown(rows[name, estimator]["efficiency"], ".2f")
            for estimator in ("kloss+fqe", "lstdq", "drl")
        ]
        lines.append(
            [
                name,
                f"{row['covered']} of {row['draws']}",
                f"{row['median_relative_width']:.2f}",
                f"{row['mean_absolute_relative_error']:.3f}",
                *efficiency,
            ]
        )
    row = rows["all", "kloss+fqe"]
    share = (
        f"{row['covered']} of {row['draws']} = {row['coverage']:.1%}"
        f" [{100 * row['coverage_low']:.1f}, {100 * row['coverage_high']:.1f}]"
    ).replace("%", " %")
    means = [
        _shown(_geometric(rows[name, estimator]["efficiency"] for name in names), ".2f")
        for estimator in ("kloss+fqe", "lstdq", "drl")
    ]
    lines.append(
        [
            "**all**",
            share,
            f"{row['median_relative_width']:.2f}",
            f"{row['mean_absolute_relative_error']:.3f}",
            *means,
        ]
    )
    head = ["problem", "`kloss+fqe` covered", "median relative width"]
    head += ["mean relative error", "MSE · n / bound: `kloss+fqe`", "`lstdq`", "`drl`"]
    return markdown(head, lines)


def larger_logs() -> str:
    """Coverage of `kloss` on logs of 8,000 and 20,000 rows."""
    lines = []
    for title, name in (
        ("8,000", "coverage-8000"),
        ("8,000, networks that saw 2,000", "coverage-8000-sampled"),
        ("20,000", "coverage-20000"),
    ):
        content = results(name)
        rows = [row for row in content["rows"] if row["estimator"] == "kloss"]
        of_problem = [row for row in rows if "efficiency" in row]
        lowest = min(of_problem, key=lambda row: row["covered"])
        whole, supported = (
            next(row for row in rows if row["problem"] == part)
            for part in ("all", "supported")
        )
        efficiency = [
            _geometric(
                row.get("efficiency")
                for row in content["rows"]
                if row["estimator"] == estimator
            )
            for estimator in ("kloss", "drl")
        ]
        counts = [
            f"{row['covered']} of {row['draws']}" for row in (whole, supported, lowest)
        ]
        lines.append([title, *counts, *(f"{value:.2f}" for value in efficiency)])
    head = ["rows", "`kloss` held", "of *supported* answers", "lowest problem"]
    return markdown([*head, "MSE · n / bound: `kloss`", "`drl`"], lines)


def debiased() -> str:
    """The experiments of Shi et al. 2021."""
    lines = [
        [
            f"{row['experiment']} (truth {row['truth']:.2f})",
            f"`{row['estimator']}`",
            f"{row['covered']} of {row['intervals']}",
            f"{row['bias']:+.2f}",
            f"{row['rmse']:.2f}",
            f"{row['width']:.2f}",
            f"{row['width_over_oracle']:.2f}",
        ]
        for row in results("debiased")["rows"]
    ]
    head = ["experiment", "estimator", "covered", "bias", "root mean square error"]
    return markdown([*head, "mean width", "width / oracle"], lines)


def verdicts() -> str:
    """How often the default's intervals held, by verdict: exact problems, and the sets
    of questions of the leaderboard.
    """
    exact = {
        row["problem"]: (row["covered"], row["draws"] - row["without_interval"])
        for row in results("coverage")["rows"]
        if row["problem"] in _VERDICTS
    }
    sets = results("leaderboard-sets")["sets"]
    lines = [["exact problems", *(_of(exact[name]) for name in _VERDICTS)]]
    lines += [
        [
            f"questions, seeds {' and '.join(map(str, question_set['seeds']))}",
            *(_of(question_set["held"][name]) for name in _VERDICTS),
        ]
        for question_set in sets
    ]
    everything = [exact, *(question_set["held"] for question_set in sets)]
    sums = [
        tuple(sum(counts[name][part] for counts in everything) for part in (0, 1))
        for name in _VERDICTS
    ]
    lines.append(["**together**", *map(_of, sums)])
    return markdown(["logs", *(f"*{name}*" for name in _VERDICTS)], lines)


def rare_clicks() -> str:
    """Doubly robust estimates as they are, on logs of rare clicks and on others."""
    return _doubly_robust({"one": ""}, ("dr", "wdr", "magic", "drl", "is"))


def clips() -> str:
    """The same beside two ways to clip Q."""
    titles = {"one": "one Q", "parts": "clipped parts", "bounded": "one bounded Q"}
    return _doubly_robust(titles, ("dr", "drl"))


def _doubly_robust(versions: dict[str, str], names: Sequence[str]) -> str:
    """versions: how Q is limited, with a title for the table."""
    rows = {
        (row["source"], row["estimator"]): row
        for row in results("doubly_robust")["rows"]
    }
    lines = []
    for name in names:
        for version, title in versions.items():
            key = f"{name} {version}"
            if name == "is":  # has no Q
                key = name
            line = [f"`{name}`"]
            if len(versions) > 1:
                line.append(title)
            clicks = rows["rare clicks", key]
            line += [
                f"{100 * clicks['mean_error']:+.1f} %"
                f" ± {100 * clicks['standard_error']:.1f}",
                f"{100 * clicks['root_mean_square']:.0f} %",
                _of([clicks["held"], clicks["intervals"]]),
            ]
            for source in ("development half", "exact problems"):
                row = rows[source, key]
                line.append(f"{100 * row['median_error']:.1f} %")
                line.append(_of([row["held"], row["intervals"]]))
            lines.append(line)
    head = ["estimator"]
    if len(versions) > 1:
        head.append("Q")
    head += ["rare clicks: mean error", "root mean square", "held"]
    head += ["development half: median error", "held"]
    return markdown([*head, "exact problems: median error", "held"], lines)


def rewards_or_kernel_loss() -> str:
    """`dr` on one-step logs by a regression on rewards and by the kernel loss."""
    rows = {
        (row["problem"], row["model"]): row
        for row in results("one_step")["rows"]
        if row["estimator"] == "dr"
    }
    lines = []
    for problem in dict.fromkeys(problem for problem, _ in rows):
        line = [problem, str(rows[problem, "regression"]["logs"])]
        for model in ("regression", "kernel loss"):
            row = rows[problem, model]
            line.append(f"{100 * row['root_mean_square']:.2f} %")
            line.append(_of([row["held"], row["intervals"]]))
            line.append(f"{100 * row['mean_width']:.1f} %")
            line.append(f"{row['seconds']:.1f}")
        lines.append(line)
    head = ["log", "draws"]
    for model in ("regression", "kernel loss"):
        head += [f"{model}: error", "held", "width", "CPU s"]
    return markdown(head, lines)


def open_bandit_pipeline() -> str:
    """Estimators of OBP, intervals of VowpalWabbit, and ours, by squared error."""
    lines = []
    for row in results("obp")["rows"]:
        held = "–"
        width = "–"
        if row["width"] is not None:
            held = _of([row["held"], row["intervals"]])
            width = f"{100 * row['width']:.1f} %"
        lines.append(
            [
                row["estimator"],
                f"{1e6 * row['squared_error']:.0f}"
                f" ± {1e6 * row['squared_error_deviation']:.0f}",
                f"{100 * row['relative_error']:.2f} %",
                f"{100 * row['bias']:+.2f} %",
                held,
                width,
            ]
        )
    head = ["estimator", "squared error, 10⁻⁶", "relative estimation error"]
    return markdown([*head, "mean error", "held", "width"], lines)


def newer_questions() -> str:
    """The questions of the leaderboard that were asked again of fresh logs: the
    default's errors and intervals then and now, and the best single method now.
    """
    newer = with_default(results("leaderboard-newer")["cells"])
    names = {cell["problem"] for cell in newer}
    earlier = [
        cell
        for cell in with_default(results("leaderboard")["cells"])
        if cell["problem"] in names
    ]
    unit = scales(earlier)
    lines = []
    for problem in unit:
        sides = [
            [cell for cell in cells if cell["problem"] == problem]
            for cells in (earlier, newer)
        ]
        lines.append([problem, *_then_and_now(sides[0], sides[1], unit)])
    lines.append(["**together**", *_then_and_now(earlier, newer, unit)])
    head = ["problem", "median error then", "now", "held then", "now"]
    return markdown([*head, "best single method now", "plain FQE now"], lines)


def _then_and_now(
    earlier: list[dict[str, Any]], newer: list[dict[str, Any]], unit: dict[str, float]
) -> list[str]:
    """A row of `newer_questions`: errors are shares of the mean |true value|."""
    earlier_scores = {score.method: score for score in score_methods(earlier, unit)}
    newer_scores = {score.method: score for score in score_methods(newer, unit)}
    singles = [
        score
        for name, score in newer_scores.items()
        if score.family.startswith("koffline, ") and name not in (AUTO, AVERAGED)
    ]
    answered = [score for score in singles if 2 * score.answered > score.asked]
    best = min(answered, key=lambda score: score.median_error or math.inf)
    return [
        _shown(earlier_scores[AUTO].median_error, ".3g"),
        _shown(newer_scores[AUTO].median_error, ".3g"),
        _of((earlier_scores[AUTO].covered, earlier_scores[AUTO].intervals)),
        _of((newer_scores[AUTO].covered, newer_scores[AUTO].intervals)),
        f"`{best.method}` {_shown(best.median_error, '.3g')}",
        _shown(newer_scores["plain FQE"].median_error, ".3g"),
    ]


def all_cores() -> str:
    """What an evaluation takes on one core and on several."""
    rows = results("cores")
    single = rows["1 core"]
    lines = []
    for name, row in rows.items():
        if row["digest"] != single["digest"]:
            raise ValueError(f"{name}: the digits differ from those of 1 core")
        lines.append(
            [
                name,
                f"{row['wall']:.1f}",
                f"{single['wall'] / row['wall']:.2f}",
                f"{row['processor']:.1f}",
                f"{row['memory']:.0f}",
                f"{row['memory'] / single['memory']:.2f}",
                f"{row.get('at once', single['wall']):.1f}",
            ]
        )
    head = ["", "seconds", "times as fast", "processor seconds", "MB", "ratio"]
    head.append("as many at once, seconds")
    return markdown(head, lines)


def stream_pass() -> str:
    """What a row of a log on disk costs, before and now."""
    header, *rows = pass_cost.as_table(results("pass_cost"))
    return markdown(header, rows)


def further_policies() -> str:
    """What a further policy costs `koffline select`."""
    lines = []
    for row in results("select_shares")["rows"]:
        lines.append(
            [
                row["log"],
                f"{row['rows']:,}",
                f"{statistics.fmean(row['seconds_alone']):.1f}",
                f"{statistics.fmean(row['training_alone']):.1f}",
                f"{row['further']:.1f}",
                f"{row['ratio']:.2f}",
            ]
        )
    head = ["log", "rows", "a policy alone, CPU s", "of it training"]
    return markdown([*head, "a further one, CPU s", "ratio"], lines)


def wide_states() -> str:
    """Errors of the default on wide states, by attempt."""
    lines = []
    for row in results("wide_states")["summary"]:
        if row["estimator"] not in ("kloss+fqe", "drl", "wdr"):
            continue
        lines.append(
            [
                row["world"],
                row["attempt"],
                f"`{row['estimator']}`",
                ", ".join(f"{100 * error:+.1f} %" for error in row["errors"]),
                _of([row["covered"], row["intervals"]]),
                f"{100 * row['width']:.0f} %",
            ]
        )
    head = ["world", "networks", "estimator", "errors by draw", "held", "width"]
    return markdown(head, lines)


def wide_states_by_weights() -> str:
    """What weights by earlier visits add, on wide states and where nothing is
    hidden.
    """
    lines = []
    depths = ("1", "2", "4", "8")
    for run in results("wide_states")["runs"]:
        if run["attempt"] != "as it is" or "centred" not in run:
            continue
        line = [run["world"], str(run["draw"])]
        for depth in depths:
            value, error = run["centred"][depth]
            line.append(f"{value:+.3f} ({value / error:+.1f})")
        lines.append(line)
    return markdown(["world", "draw", *(f"{depth} back" for depth in depths)], lines)


def small_logs() -> str:
    """Errors and intervals of small logs, by attempt."""
    lines = []
    for row in results("small_logs")["summary"]:
        least = "–"
        if row["least_error"] is not None:
            least = f"{100 * row['least_error']:.1f} %"
        lines.append(
            [
                row["world"],
                f"{row['rows']:,}",
                row["attempt"],
                f"{100 * row['error']:.1f} %",
                least,
                f"{100 * row['bias']:+.1f} %",
                _of([row["covered"], row["intervals"]]),
                f"{100 * row['width']:.0f} %",
            ]
        )
    head = ["world", "rows", "estimate", "mean error", "least", "bias", "held"]
    return markdown([*head, "width"], lines)


def structure() -> str:
    """How many of the faulty logs the tests of a log's structure noticed."""
    detected = results("structure")["detected"]
    lines = []
    for fault, title in _FAULTS.items():
        counts = [_of(detected[fault][share]) for share in ("0.01", "0.1", "1.0")]
        lines.append([title, *counts])
    return markdown(["fault", "1 %", "10 %", "all"], lines)


def state_and_drift() -> str:
    """Worlds with memory and worlds that drift."""
    return memory.as_table(results("memory"))


def kernel_intervals() -> str:
    """Coverage and width of `kernel-calibrated` by problem and rows."""
    return interval_coverage.table(results("intervals")["rows"])


def bandwidths() -> str:
    """Rejections of the Bellman test by statistic, a line for each kind of error."""
    rows = results("bellman-bandwidths")["rows"]
    names = ("single", "largest of three", "largest", "smallest p", "sum")
    lines = []
    for row in rows:
        rates = [f"{100 * row['rates'][name]['rate']:.0f}" for name in names]
        lines.append([row["error"], str(row["dimension"]), *rates])
    head = ["error of Q", "dimensions", "one bandwidth", "largest of three"]
    return markdown(
        [*head, "largest of five", "smallest p of five", "sum of five kernels"], lines
    )


def post_hoc() -> str:
    """Errors of a given value function, corrected and replaced."""
    names = ("given", "corrected", "to the median", "on top", "doubly robust", "refit")
    lines = []
    for row in results("post-hoc")["rows"]:
        errors = [f"{100 * row[name]:.1f}" for name in names]
        passed = f"{100 * row['is_feasible']:.0f} %"
        lines.append([row["problem"], row["error"], passed, *errors])
    return markdown(["problem", "error of Q̂", "feasible", *names], lines)


def nystrom() -> str:
    """Errors with Nyström and Fourier features of the same number."""
    rows = results("nystrom")["rows"]
    cells = {
        (row["problem"], row["role"], row["count"], row["features"]): row
        for row in rows
    }
    lines = []
    for problem, role, count, kind in cells:
        if kind != "fourier" or count not in (50, 200):
            continue
        line = [problem, role, str(count)]
        for features in ("fourier", "nystrom"):
            row = cells[problem, role, count, features]
            error = f"{100 * row['error']:.1f}"
            if "from_exact" in row:
                error += f" ({100 * row['from_exact']:.1f})"
            line += [error, f"{1000 * row['seconds']:.0f}"]
        lines.append(line)
    head = ["problem", "features of", "number", "Fourier: error, %", "ms"]
    return markdown([*head, "Nyström: error, %", "ms"], lines)


_PROTOCOL_METHODS = {
    "unsafe": "unsafe",
    "hcpi": "HCPI",
    "spibb": "Π_b-SPIBB",
    "soft_spibb": "Soft-SPIBB",
}
_TAILS = ("mean", "worst 10 %", "worst 1 %")


def improvement_random() -> str:
    """SPIBB's random processes: normalised performance by the size of the log."""
    return _improvement_protocol("random")


def improvement_grid() -> str:
    """The same of its stochastic grid."""
    return _improvement_protocol("grid")


def _improvement_protocol(family: str) -> str:
    rows = {
        (row["size"], row["method"]): row
        for row in results("improve_spibb")["rows"]
        if row["family"] == family
    }
    lines = []
    for size in dict.fromkeys(size for size, _ in rows):
        line = [f"{size:,}", str(rows[size, "unsafe"]["draws"])]
        line += [_tails(rows[size, method]) for method in _PROTOCOL_METHODS]
        lines.append(line)
    head = ["episodes", "draws", *_PROTOCOL_METHODS.values()]
    return markdown(head, lines)


def improvement_ours() -> str:
    """Ours beside the others on the same draws of SPIBB's protocol."""
    rows = {
        (row["family"], row["size"], row["method"]): row
        for row in results("improve_spibb")["rows"]
    }
    families = {"random": "random processes", "grid": "grid"}
    lines = []
    for family, size, method in rows:
        if method != "ours":
            continue
        row = rows[family, size, method]
        line = [families[family], f"{size:,}", str(row["draws"]), _tails(row)]
        line.append(f"{100 * row['worse']:.0f} %")
        for name in _PROTOCOL_METHODS:
            other = rows[family, size, f"{name} (ours' draws)"]
            line.append(f"{_tails(other)}; {100 * other['worse']:.0f} %")
        lines.append(line)
    head = ["process", "episodes", "draws", "`koffline.improve`", "worse"]
    return markdown([*head, *_PROTOCOL_METHODS.values()], lines)


def _tails(row: dict[str, Any]) -> str:
    texts = [_shown(row[tail], ".2f") for tail in _TAILS]
    return " / ".join(texts).replace("-0.00", "0.00")


def improvement_logs() -> str:
    """What `koffline.improve` recommended on logs with a known truth."""
    halves = results("improve")["halves"]
    titles = {"test": "not used for tuning", "tuning": "used for tuning"}
    lines = []
    for half, title in titles.items():
        ours = halves[half]["ours"]
        if not ours["logs"]:
            continue
        lines.append(
            [
                title,
                str(ours["logs"]),
                str(ours["recommended"]),
                f"{ours['false']} {_share_interval(ours['false_share_interval'])}",
                _shown(ours["realised_of_best_candidate"], ".0%"),
                _shown(ours["realised_of_optimal"], ".0%"),
                _of([ours["owed_recommended"], ours["owed"]]),
            ]
        )
    protocol = [
        row for row in results("improve_spibb")["rows"] if row["method"] == "ours"
    ]
    draws = sum(row["draws"] for row in protocol)
    worse = round(sum(row["draws"] * row["worse"] for row in protocol))
    searches = draws + halves["both"]["ours"]["logs"]
    false = worse + halves["both"]["ours"]["false"]
    lines.append(
        [
            "all, with the draws of the protocol",
            str(searches),
            "",
            f"{false} {_share_interval(clopper_pearson(false, searches))}",
            "",
            "",
            "",
        ]
    )
    head = ["logs", "number", "recommended", "false improvements"]
    head += ["realised of the best candidate", "of the optimum"]
    return markdown([*head, "recommended where owed"], lines)


def improvement_certificates() -> str:
    """Lower ends of certificates of fixed policies on fresh logs."""
    titles = {"better": "a truly better policy", "equal": "all policies are equal"}
    lines = []
    for row in results("improve")["certificates"]:
        lines.append(
            [
                titles[row["kind"]],
                str(row["logs"]),
                f"{row['truth']:+.3f}",
                f"{row['mean_low']:+.3f}",
                f"{row['above_truth']} {_share_interval(row['above_truth_interval'])}",
                str(row["certified"]),
            ]
        )
    head = ["policy", "logs", "true uplift", "mean lower end"]
    return markdown([*head, "lower end above the truth", "certified better"], lines)


def improvement_peers() -> str:
    """Other ways to choose, on the logs that were not used for tuning."""
    halves = results("improve")["halves"]
    lines = []
    for title, counts in halves["test"]["peers"].items():
        lines.append(
            [
                title,
                str(counts["logs"]),
                str(counts["runs"]),
                f"{counts['false']} {_share_interval(counts['false_share_interval'])}",
                _shown(counts["median_share_of_best"], ".0%"),
            ]
        )
    head = ["choice", "logs", "runs another policy", "which is not better"]
    return markdown([*head, "median share of the best candidate's uplift"], lines)


def improvement_by_log() -> str:
    """Each log: what was recommended and what is true."""
    lines = []
    for row in results("improve")["rows"]:
        claimed = "keep"
        uplift = "–"
        if row["recommended"]:
            claimed = f"{row['claimed']:+.3g}"
            if row["interval"] is not None:
                low, high = row["interval"]
                claimed += f" [{low:.3g}, {high:.3g}]"
            uplift = f"{row['uplift']:+.3g} ± {2.0 * row['uplift_error']:.2g}"
        lines.append(
            [
                row["log"],
                row["half"],
                f"{row['rows']:,}",
                claimed,
                uplift,
                _shown(row["best_uplift"], "+.3g"),
                _shown(row["optimal_uplift"], "+.3g"),
            ]
        )
    head = ["log", "half", "rows", "recommended, claimed uplift", "true uplift"]
    return markdown([*head, "best candidate", "optimum"], lines)


def improvement_few_units() -> str:
    """False lower ends by law and number of units."""
    rows = results("improve_few_units")["rows"]
    sizes = list(dict.fromkeys(row["units"] for row in rows))
    lines = []
    for law in dict.fromkeys(row["law"] for row in rows):
        by_size = {row["units"]: row for row in rows if row["law"] == law}
        cells = [
            f"{100 * by_size[size]['student']:.0f} / "
            f"{100 * by_size[size]['resampled']:.0f}"
            for size in sizes
        ]
        lines.append([law, *cells])
    return markdown(["uplift of a unit", *map(str, sizes)], lines)


def improvement_cross_fitting() -> str:
    """Recommendations from three parts, and from five folds."""
    rows = results("improve_cross_fitting")["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for effect, size in dict.fromkeys((row["effect"], row["rows"]) for row in rows):
        cells = []
        for way in ways:
            (row,) = (
                row
                for row in rows
                if (row["effect"], row["rows"], row["way"]) == (effect, size, way)
            )
            cells.append(
                f"{row['recommended']:.0%}, {row['false']:.0%} false,"
                f" {row['uplift']:.4f}"
            )
        lines.append([f"{effect:g}", f"{size:,}", *cells])
    return markdown(["effect of the offers", "rows", *ways], lines)


def improvement_folds() -> str:
    """Whole searches of the same logs in three parts and in five folds."""
    lines = []
    for row in results("improve_folds")["rows"]:
        lines.append(
            [
                f"{row['kind']}, {row['rows']:,} rows, {row['portfolio']} portfolio",
                row["way"],
                f"{row['recommended']} of {row['logs']}",
                str(row["false"]),
                f"{row['uplift']:.3f} ± {row['error']:.3f}",
                f"{row['seconds']:.0f}",
            ]
        )
    headings = ["logs", "way", "recommended", "false", "mean true uplift", "seconds"]
    return markdown(headings, lines)


def improvement_pooled_ends() -> str:
    """False lower ends, and recommendations, by the way in which folds are pooled."""
    rows = results("improve_pooled_ends")["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    cases = dict.fromkeys((row["law"], row["effect"], row["rows"]) for row in rows)
    lines = []
    for case in cases:
        cells = []
        for way in ways:
            (row,) = (
                row
                for row in rows
                if (row["law"], row["effect"], row["rows"], row["way"]) == (*case, way)
            )
            cells.append(f"{row['false']:.1%}, {row['recommended']:.0%}")
        law, effect, size = case
        lines.append([law, f"{effect:g}", f"{size:,}", *cells])
    return markdown(["chances", "effect of the offers", "rows", *ways], lines)


def improvement_small_splits() -> str:
    """Recommendations on small logs by the share to certify on."""
    rows = results("improve_small_splits")["rows"]
    lines = []
    for world in dict.fromkeys(row["world"] for row in rows):
        cells = []
        for share in dict.fromkeys(row["share"] for row in rows):
            of_share = [
                row for row in rows if row["world"] == world and row["share"] == share
            ]
            gains = [row["uplift"] / row["optimum"] for row in of_share]
            recommended = sum(row["recommended"] for row in of_share)
            cells.append(
                f"{recommended} of {len(of_share)}, {statistics.fmean(gains):.0%}"
            )
        lines.append([world, *cells])
    head = ["log", "40 % to certify on", "20 % (20 episodes at least)"]
    return markdown(head, lines)


def _share_interval(interval: Sequence[float] | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    return f"({100 * low:.1f} % to {100 * high:.1f} %)"


def _shown(value: float | None, form: str) -> str:
    """A number in a format of Python; a dash for None."""
    if value is None:
        return "–"
    return format(value, form)


TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "coverage": coverage,
    "larger-logs": larger_logs,
    "debiased": debiased,
    "verdicts": verdicts,
    "rare-clicks": rare_clicks,
    "clips": clips,
    "rewards-or-kernel-loss": rewards_or_kernel_loss,
    "open-bandit-pipeline": open_bandit_pipeline,
    "further-policies": further_policies,
    "newer-questions": newer_questions,
    "cores": all_cores,
    "stream-pass": stream_pass,
    "wide-states": wide_states,
    "wide-states-by-weights": wide_states_by_weights,
    "small-logs": small_logs,
    "structure": structure,
    "state-and-drift": state_and_drift,
    "kernel-intervals": kernel_intervals,
    "bandwidths": bandwidths,
    "post-hoc": post_hoc,
    "nystrom": nystrom,
    "improvement-random": improvement_random,
    "improvement-grid": improvement_grid,
    "improvement-ours": improvement_ours,
    "improvement-logs": improvement_logs,
    "improvement-peers": improvement_peers,
    "improvement-certificates": improvement_certificates,
    "improvement-few-units": improvement_few_units,
    "improvement-cross-fitting": improvement_cross_fitting,
    "improvement-folds": improvement_folds,
    "improvement-pooled-ends": improvement_pooled_ends,
    "improvement-small-splits": improvement_small_splits,
    "improvement-by-log": improvement_by_log,
}


def with_tables(page: str) -> str:
    """The page with every marked table made from the results."""
    return _MARKED.sub(lambda mark: mark[1] + TABLES[mark[2]]() + "\n" + mark[3], page)


def marks(page: str) -> list[str]:
    """Names of the tables of a page."""
    return [name for _, name, _ in _MARKED.findall(page)]


def pages() -> list[Path]:
    """The pages that may hold marked tables."""
    return sorted(path for folder in FOLDERS for path in folder.glob("*.md"))


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _covered(rows: list[dict[str, Any]]) -> str:
    judged = [row["covered"] for row in rows if row["relative_width"] is not None]
    return f"{sum(judged)} of {len(judged)}"


def _of(counts: Sequence[int]) -> str:
    if counts[1] == 0:
        return "–"
    return f"{counts[0]} of {counts[1]}"


def _geometric(values: Iterable[float | None]) -> float:
    kept = [math.log(value) for value in values if value is not None]
    return math.exp(statistics.fmean(kept))


if __name__ == "__main__":
    for path in pages():
        path.write_text(with_tables(path.read_text("utf-8")), encoding="utf-8")
        print(path.relative_to(ROOT))
