"""The report of `koffline improve`: the answer, what was tried, where the new policy
acts differently; its files and its model card.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from koffline.errors import counted, percent
from koffline.improvement.outcome import MARKER, CandidatePolicy, Improvement
from koffline.improvement.parts import CERTIFY
from koffline.improvement.screening import LEVEL
from koffline.policies import save_mixture_policy
from koffline.report import Report, plots, print_table, words
from koffline.store.run_record import shown_command

CARD = "model_card.md"
POLICY = "policy.npz"
_MOST_ROWS = 20  # of candidates on a terminal and in the figure
_FURTHER = "further ones"


def report_improvement(result: Improvement) -> Report:
    """The report of an improvement."""
    rows = [_cells(candidate, result) for candidate in result.candidates]
    context = {
        "columns": list(_HEADINGS),
        "rows": rows,
        "sentences": result.sentences,
        "changes": _change_rows(result),
        "regions": _region_rows(result),
        "examples": _example_rows(result),
        "difference": _difference_words(result),
        "meaning": _meaning(result),
        "trials": _trial_words(result),
    }
    shown_files = {}
    if result.mixture is not None:
        shown_files = {"policy": POLICY, "model card": CARD}
    drawing = partial(_draw, result)
    return Report(
        marker=MARKER,
        result=result,
        figures={"improvement": partial(plots.figure_of, drawing)},
        show=partial(_show, result),
        top_figure="improvement",
        drawing=drawing,
        context=context,
        further=partial(_write_policy, result),
        shown_files=shown_files,
        record=_record_of_rows(result),
    )


def _record_of_rows(result: Improvement) -> dict[str, Any]:
    """Entries of run.json by which `koffline evaluate` knows which rows the policy has
    seen.
    """
    if result.policy is None or result.policy.trained_on is None:
        return {}
    rows = result.policy.trained_on
    return {
        "digests": {"data": rows.sha256},
        "data": {"fingerprints": rows.fingerprints.astype("<u8").tobytes().hex()},
    }


def _meaning(result: Improvement) -> str:
    """What the recommended policy does; empty without one."""
    if result.mixture is None:
        return ""
    if result.folds > 1:
        return (
            f"It draws the {result.folds} policies in proportion to the sizes of their"
            " folds. Each acts as a trained network; one with @0.25 in its name does so"
            " with probability 0.25, otherwise as the learnt copy of the present"
            " policy."
        )
    return f"In every step, {_shares(result)}."


def _trial_words(result: Improvement) -> str:
    """How candidates were compared; empty if there were none."""
    if not result.candidates:
        return ""
    mixtures = counted(len(result.candidates), "policy")
    if len(result.candidates) > 1:
        mixtures = f"{len(result.candidates)} policies"
    text = (
        f"{mixtures}: NAME@0.25 acts as NAME with probability 0.25 in every step, and"
        " else as the learnt copy of the present policy. Each was valued on the part of"
        f" the log to choose on, with intervals of {percent(LEVEL)}"
    )
    if not result.finalists:
        return f"{text}. None went on to the part to certify on."
    if result.folds > 1:
        return (
            f"The log was divided in {result.folds} folds. For each, policies were learnt"
            f" and chosen on the other folds. {text}. The best one (chosen by its lower"
            " end there) was valued on the fold, which it had not seen (clone where none"
            " seemed better); the mixture draws one of them in every row, and its numbers"
            " rest on all folds."
        )
    if len(result.finalists) == 1:
        return (
            f"{text}. The one with the largest lower end there (chosen by) went on to the"
            " part to certify on, and only its numbers count."
        )
    return (
        f"{text}. The {len(result.finalists)} with the largest lower ends there (chosen"
        " by) went on to the part to certify on, and only its numbers count."
    )


_HEADINGS = ("policy", "part", "uplift", "interval", "chosen by", "certified")


def _cells(candidate: CandidatePolicy, result: Improvement) -> list[str]:
    """Cells of a candidate's line."""
    answer = candidate.note
    if candidate.certified:
        answer = "yes"
    elif candidate.stage == CERTIFY and candidate.fold is None:
        answer = f"no: {candidate.note}"
    uplift = "–"
    if candidate.uplift is not None:
        uplift = f"{candidate.uplift:+.4g}"
    ends = "–"
    if candidate.interval is not None:
        ends = words.ends(candidate.interval)
    low = ""
    if candidate.stage == CERTIFY and candidate.chosen_by is not None:
        low = f"{candidate.chosen_by:+.4g}"
    return [candidate.name, _part_of(candidate), uplift, ends, low, answer]


def _part_of(candidate: CandidatePolicy) -> str:
    """The part of the log that its numbers are of, with the fold."""
    if candidate.fold is None:
        return candidate.stage
    return f"{candidate.stage}, fold {candidate.fold}"


def _draw(result: Improvement) -> plots.Drawing:
    """One line for each of the first candidates, finalists on top."""
    lines = []
    for candidate in result.candidates[:_MOST_ROWS]:
        color = plots.SOFT
        if candidate.certified:
            color = plots.ACCENT
        name = f"{candidate.name}\n({_part_of(candidate)})"
        is_value = candidate.stage == CERTIFY
        lines.append(
            plots.Line(name, candidate.uplift, candidate.interval, color, is_value)
        )
    if not lines:
        lines.append(plots.Line("nothing was tried", None, None))
    xlabel = "uplift over the policy that wrote the log"
    whole = sum(candidate.fold is None for candidate in result.finalists)
    return plots.draw_intervals(
        lines, xlabel, [("no change", 0.0)], whole=max(1, whole)
    )


def _show(result: Improvement, console: Any) -> None:
    """Print the answer, the finalists and the first of the others."""
    rows = [_cells(candidate, result) for candidate in result.candidates[:_MOST_ROWS]]
    left = len(result.candidates) - len(rows)
    if left > 0:
        rows.append([f"… {left} {_FURTHER}", *[""] * (len(_HEADINGS) - 1)])
    right = ("uplift", "chosen by")
    print_table(console, "What was tried", _HEADINGS, rows, right=right)
    if result.groups:
        columns = (str(result.by), "start states", "value", "together")
        cells = words.cells_of_groups(result.groups)
        print_table(console, f"By {result.by}", columns, cells)
    for line in result.sentences:
        console.print(line, soft_wrap=True)
    for line in result.not_tried:
        console.print(line, soft_wrap=True, style="dim")


def _difference_words(result: Improvement) -> str:
    changes = result.differences
    if changes is None:
        return ""
    if changes.is_discrete:
        return (
            f"In a state of the log, it takes another action than the present policy"
            f" with probability {changes.mean:.0%} on average."
        )
    return (
        f"Its mean action is {changes.mean:.0%} of the half range away from the"
        " present one, on average."
    )


def _change_rows(result: Improvement) -> list[list[str]]:
    if result.differences is None:
        return []
    return [
        [item.action, f"{item.logged:.1%}", f"{item.new:.1%}", str(item.rows)]
        for item in result.differences.actions
    ]


def _region_rows(result: Improvement) -> list[list[str]]:
    if result.differences is None:
        return []
    return [
        [
            f"{item.feature} from {item.low:.4g} to {item.high:.4g}",
            str(item.rows),
            f"{item.difference:.0%}",
            f"{item.supported:.0%}",
        ]
        for item in result.differences.regions
    ]


def _example_rows(result: Improvement) -> list[list[str]]:
    if result.differences is None:
        return []
    return [
        [
            ", ".join(f"{name} {value:g}" for name, value in item.state.items()),
            item.present,
            item.new,
            f"{item.like} of {item.near}",
        ]
        for item in result.differences.examples
    ]


def _write_policy(result: Improvement, folder: Path) -> None:
    """Write the policy in every format, and the model card; nothing if none is
    recommended.
    """
    if result.mixture is None or result.policy is None:
        return
    from koffline.improvement.exports import export_mixture

    save_mixture_policy(folder / POLICY, result.mixture)
    shape = result.policy.observation_shape
    paths = [folder / POLICY, *export_mixture(result.mixture, folder, shape)]
    card = model_card(result, [path.name for path in paths])
    (folder / CARD).write_text(card, encoding="utf-8")


def model_card(result: Improvement, files: list[str]) -> str:
    """A page on the policy for whoever will use it, in Markdown."""
    assert result.mixture is not None
    assert result.interval is not None
    parts = result.parts
    kind = "probabilities of the actions"
    if not result.mixture.is_discrete:
        kind = "actions"
    draws = ""
    if not result.mixture.is_discrete and len(result.mixture.acting) > 1:
        draws = (
            " It draws its actions: `policy.pt` and `policy.onnx` give other ones in"
            " every call, and `koffline evaluate` reads `policy.npz`."
        )
    lines = [
        f"# Policy {result.name}",
        "",
        *result.sentences,
        "",
        f"- verdict: {result.verdict}",
        f"- value {words.number(result.value)}, of the policy that wrote the log"
        f" {words.number(result.behavior_value)}"
        f" ({words.return_words(result)})",
        f"- uplift {words.number(result.uplift)}, lower end"
        f" {words.number(result.interval.low)}: holds{_together(result)} with"
        f" {percent(result.level)}",
    ]
    if result.constraint is not None:
        lines.append(
            f"- constraint {result.constraint['constraint']}: certified upper end"
            f" {words.number(result.constraint['high'])}"
        )
    lines += [
        "",
        "## What it is",
        "",
        f"{_meaning(result)} It takes observations as the log has them and gives"
        f" {kind}.{draws}",
        "",
        f"Files: {', '.join(files)}.",
        "",
        "## What it was learnt from",
        "",
        f"- log {result.source or 'in memory'}, sha256 `{result.data_sha256}`",
    ]
    for name, size in parts.items():
        line = _part_line(name, size, result.kind_of_unit)
        if result.folds > 1 and name != CERTIFY:
            line = f"{line}, in each of {result.folds} folds"
        lines.append(line)
    lines += [
        "",
        "## What to watch",
        "",
        f"- {_difference_words(result)}",
        "- The certificate covers the sampling of the log. It does not cover a world"
        " that has changed since, or states that the log does not hold.",
        "- Start with a part of the decisions, log them, and evaluate again.",
    ]
    lines += [f"- {warning}" for warning in result.warnings]
    lines += ["", "## How to get it again", "", f"    {shown_command()}", ""]
    return "\n".join(lines)


def _together(result: Improvement) -> str:
    """For which policies the lower end holds at once; empty if for one."""
    if result.folds > 1:
        return ""
    return " for all finalists together"


def _part_line(name: str, size: dict[str, int], kind: str) -> str:
    """The size of a part of the log, as a line of the card."""
    rows = counted(size["rows"], "row")
    if kind == "row":
        return f"- to {name}: {rows}"
    return f"- to {name}: {rows} of {counted(size['units'], kind)}"


def _shares(result: Improvement) -> str:
    assert result.mixture is not None
    acting = result.mixture.acting
    if len(acting) == 1:
        return "the trained network acts"
    share = acting[-1][0]
    return (
        f"the trained network acts with probability {share:g}, otherwise the learnt"
        " copy of the present policy"
    )
