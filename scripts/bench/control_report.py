"""The control benchmark's cells as numbers, a table and a figure."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from koffline.builders.control import stem
from koffline.errors import counted
from koffline.store.files import atomic_file

_DRAWS = 2000
_LEVEL = 0.025
# a pair whose scores differ by less is level whatever its interval says
_LEVEL_SCORES = 5.0
# What docs/control.md shows: sections of results by name, in this order.
_SECTIONS = (
    ("control",),
    ("control_halfcheetah", "control_hopper", "control_walkers"),
)
_INTRODUCTION = """\
# Compared with their originals: kernel-loss critics on logs

Do critics of the kernel loss learn control from logs as well as the TD critics of the same algorithms?
Scores are returns of the greedy policy, uniform actions 0, the expert 100; the mean over the last quarter
of the evaluations. Each cell: original → kernel loss, or → its defaults, with a slow copy. **Bold**: the
kernel loss is ahead; *slanted*: behind; else level: less than 5 points apart, or a 95 % bootstrap interval
over seeds that holds zero (too narrow for so few).

{counts}

**Which setting?** If the log shows many actions (replay, random), take the slow copy of s' (`tau`): the
gradient through s' and KLossSAC's conservative term do harm there. If it shows few (expert, medium), take
the defaults: with a slow copy KLossSAC, KLossDQN and KLossDiscreteSAC overestimate actions that nobody
tried, as their originals do. If in doubt, train both and [choose from the log](closed_loop.md).
"""
_TUNED = """\
On each log the better of two settings counts on either side, by its true score. Originals: their own
critic learning rate, or {rates} (CQL: its own only). Kernel-loss critics: their defaults, or a slow copy
(TD3+BC and IQL always have it). **A limit**: these settings were tuned on logs of these environments (the
replay logs, two of the three seeds).
"""
_BY_RULE = """\
Logs of 100,000 rows, such as `koffline build control --env {env} --kind medium --n 100000 --seed 1
--out {name}100k_medium.hdf5`. No setting was tuned on them: originals run at d3rlpy's own settings,
KLossSAC has a slow copy on logs of random actions alone (TD3+BC and IQL always have it).
"""


def collect(
    cells: list[dict[str, Any]],
    scales: dict[str, dict[str, Any]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """All that is reported: settings, references, one entry per log and algorithm, one
    per pair.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        groups[
            Path(cell["log"]).stem,
            cell["algo"],
            json.dumps(cell["assignments"], sort_keys=True),
        ].append(cell)
    variants = [
        _entry(log, algo, group, scales[group[0]["env"]])
        for (log, algo, _), group in groups.items()
    ]
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in variants:
        key = entry["log"], entry["algo"]
        if key not in best or entry["score"] > best[key]["score"]:
            best[key] = entry
    entries = list(best.values())
    settings = {
        name: getattr(options, name)
        for name in (
            "seeds",
            "steps",
            "steps_of",
            "original_rates",
            "evaluate_every",
            "episodes",
            "hidden",
            "batch_size",
            "variants",
            "by_rule",
            "set",
        )
    }
    references = {
        env: {name: scale[name] for name in ("random", "expert")}
        for env, scale in scales.items()
    }
    return {
        "settings": settings,
        "references": references,
        "entries": entries,
        "pairs": _pairs(entries),
        "variants": [
            {
                name: entry[name]
                for name in ("log", "algo", "assignments", "score", "scores_of_seeds")
            }
            for entry in variants
        ],
    }


def _entry(
    log: str, algo: str, group: list[dict[str, Any]], scale: dict[str, Any]
) -> dict[str, Any]:
    returns = np.array([cell["returns"] for cell in group])  # (seed, evaluation)
    scores = 100.0 * (returns - scale["random"]) / (scale["expert"] - scale["random"])
    late = scores[:, -max(1, scores.shape[1] // 4) :]
    return {
        "log": log,
        "algo": algo,
        "env": group[0]["env"],
        "assignments": group[0]["assignments"],
        "score": round(float(late.mean()), 2),
        "scores_of_seeds": [round(float(value), 2) for value in late.mean(axis=1)],
        "worst_late": round(float(late.min()), 2),
        "best_ever": round(float(scores.max(axis=1).mean()), 2),
        "steps": group[0]["steps"],
        "curves": np.round(scores, 2).tolist(),
        "seconds": round(float(np.mean([cell["seconds"] for cell in group])), 1),
    }


def _pairs(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = {(entry["log"], entry["algo"]): entry for entry in entries}
    pairs = []
    for (log, algo), entry in known.items():
        other = known.get((log, algo.removeprefix("kloss_")))
        if not algo.startswith("kloss_") or other is None:
            continue
        ours = np.array(entry["scores_of_seeds"])
        theirs = np.array(other["scores_of_seeds"])
        low, high = _difference_interval(ours, theirs)
        difference = float(ours.mean() - theirs.mean())
        pairs.append(
            {
                "log": log,
                "original": other["algo"],
                "original_score": other["score"],
                "kernel_loss_score": entry["score"],
                "difference": round(difference, 2),
                "interval": [round(low, 2), round(high, 2)],
                "verdict": _verdict(difference, low, high),
            }
        )
    return pairs


def _verdict(difference: float, low: float, high: float) -> str:
    if abs(difference) < _LEVEL_SCORES or low <= 0.0 <= high:
        return "level"
    if difference > 0.0:
        return "kernel loss"
    return "original"


def _difference_interval(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """95 % percentile bootstrap of the difference of means over seeds; with few seeds
    it is too narrow.
    """
    generator = np.random.default_rng(0)
    first = ours[generator.integers(len(ours), size=(_DRAWS, len(ours)))].mean(axis=1)
    second = theirs[generator.integers(len(theirs), size=(_DRAWS, len(theirs)))].mean(
        axis=1
    )
    low, high = np.quantile(first - second, [_LEVEL, 1.0 - _LEVEL])
    return float(low), float(high)


def print_table(results: dict[str, Any]) -> None:
    """Every entry, then every pair."""
    print(
        f"{'log':28}{'algorithm':22}{'score':>8}{'worst':>8}{'best':>8}{'s':>7}  seeds"
    )
    for entry in sorted(results["entries"], key=_order):
        seeds = " ".join(f"{value:.0f}" for value in entry["scores_of_seeds"])
        numbers = (
            f"{entry['score']:8.1f}{entry['worst_late']:8.1f}"
            f"{entry['best_ever']:8.1f}{entry['seconds']:7.0f}"
        )
        print(f"{entry['log']:28}{entry['algo']:22}{numbers}  {seeds}")
    for pair in results["pairs"]:
        low, high = pair["interval"]
        print(
            f"{pair['log']}, {pair['original']}: {pair['kernel_loss_score']:.1f} with"
            f" the kernel loss, {pair['original_score']:.1f} without, difference"
            f" {pair['difference']:+.1f} ({low:+.1f} … {high:+.1f}): {pair['verdict']}"
        )


def write_results(results: dict[str, Any], path: Path) -> None:
    """The JSON file and its figure. In docs/results the page is written anew too."""
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    folder = path.parent
    if folder.name == "results":
        folder = folder.parent
    images = folder
    if (folder / "images").is_dir():
        images = folder / "images"
    draw(results, images / f"{path.stem}.png")
    if path.parent.name == "results" and any(path.stem in part for part in _SECTIONS):
        with atomic_file(folder / "control.md", force=True) as temporary:
            temporary.write_text(page(path.parent), encoding="utf-8")


def page(folder: Path) -> str:
    """docs/control.md, from the results in the folder."""
    counts = ["| logs | kernel loss ahead | level | behind |", "|---|---|---|---|"]
    sections = []
    for names in _SECTIONS:
        parts = {
            name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            for name in names
        }
        for results in parts.values():
            verdicts = [pair["verdict"] for pair in results["pairs"]]
            counts.append(
                f"| {_title([results])} | {verdicts.count('kernel loss')}"
                f" | {verdicts.count('level')} | {verdicts.count('original')} |"
            )
        sections.append(_section(parts))
    return _INTRODUCTION.format(counts="\n".join(counts)) + "\n" + "\n".join(sections)


def _title(parts: Iterable[dict[str, Any]]) -> str:
    names = [env.partition("-")[0] for part in parts for env in part["references"]]
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + " and " + names[-1]


def _section(parts: dict[str, dict[str, Any]]) -> str:
    """Results that have the same settings, as one table."""
    first = next(iter(parts.values()))
    settings = first["settings"]
    if settings.get("by_rule"):
        env = next(iter(first["references"]))
        rule = _BY_RULE.format(env=env, name=stem(env))
    else:
        rule = _TUNED.format(rates=settings["original_rates"].replace(",", ", "))
    references = "; ".join(
        f"{env}: uniform {scale['random']:.1f}, expert {scale['expert']:.1f}"
        for results in parts.values()
        for env, scale in results["references"].items()
    )
    networks = "×".join(map(str, settings["hidden"]))
    lines = [
        f"## {_title(parts.values())}",
        "",
        rule,
        f"{counted(settings['seeds'], 'seed')}, {settings['steps']} gradient steps "
        + "".join(f"({steps} on {env}) " for env, steps in settings["steps_of"])
        + f"of {settings['batch_size']} rows, networks {networks},"
        f" {settings['episodes']} episodes. Returns: {references}.",
        "",
        *_pair_table(parts.values(), slow_copy=settings["variants"]),
        "",
        *(f"![Scores over gradient steps](images/{name}.png)\n" for name in parts),
        "Numbers and curves, by `scripts/bench/control.py`: "
        + ", ".join(f"`docs/results/{name}.json`" for name in parts)
        + ".",
        "",
    ]
    return "\n".join(lines)


def _pair_table(parts: Iterable[dict[str, Any]], slow_copy: bool) -> list[str]:
    """A line for each log, a cell for each pair: the original's score, that of the
    kernel loss, and with ``slow_copy`` that of its other setting.
    """
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for results in parts:
        scores = {
            (entry["log"], entry["algo"], "tau" in entry["assignments"]): entry["score"]
            for entry in results["variants"]
        }
        for pair in results["pairs"]:
            algo = pair["original"]
            ours = [pair["kernel_loss_score"]]
            if slow_copy:
                keys = [(pair["log"], f"kloss_{algo}", copy) for copy in (False, True)]
                ours = [scores[key] for key in keys if key in scores]
            numbers = [str(round(score)) for score in (pair["original_score"], *ours)]
            text = f"{numbers[0]} → {', '.join(numbers[1:])}"
            if pair["verdict"] == "kernel loss":
                text = f"**{text}**"
            elif pair["verdict"] == "original":
                text = f"*{text}*"
            cells[pair["log"]][algo] = text
    algos = sorted({algo for by_algo in cells.values() for algo in by_algo})
    lines = [["log", *algos], ["---"] * (len(algos) + 1)]
    lines += [
        [log, *(by_algo.get(algo, "") for algo in algos)]
        for log, by_algo in sorted(cells.items())
    ]
    return [f"| {' | '.join(line)} |" for line in lines]


def draw(results: dict[str, Any], path: Path) -> None:
    """Logs downward, pairs across: score over gradient steps, each seed thin and their
    mean thick.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_log: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for entry in sorted(results["entries"], key=_order):
        by_log[entry["log"]][entry["algo"].removeprefix("kloss_")].append(entry)
    across = max(len(pairs) for pairs in by_log.values())
    size = (2.6 * across + 0.6, 1.9 * len(by_log) + 0.6)
    figure, axes = plt.subplots(
        len(by_log), across, figsize=size, squeeze=False, layout="constrained"
    )
    for row, (log, pairs) in zip(axes, by_log.items(), strict=True):
        for axis in row[len(pairs) :]:
            axis.axis("off")
        for axis, (name, entries) in zip(row, pairs.items(), strict=False):
            for entry in entries:
                _draw_entry(axis, entry)
            axis.set_title(f"{log}: {name}", fontsize=8)
            axis.axhline(100.0, color="0.8", linewidth=0.8, zorder=0)
            axis.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
            axis.set_ylim(-30, 140)
            axis.tick_params(labelsize=7)
        row[0].set_ylabel("score", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("gradient steps", fontsize=8)
    handles = [
        plt.Line2D([], [], color=color, label=label) for label, color in _COLORS.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    with atomic_file(path, force=True) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png", dpi=110)
    plt.close(figure)


_COLORS = {"original": "#777777", "kernel loss": "#c0392b"}


def _draw_entry(axis: Any, entry: dict[str, Any]) -> None:
    color = _COLORS["kernel loss" if entry["algo"].startswith("kloss_") else "original"]
    curves = np.clip(np.array(entry["curves"]), -1000.0, 1000.0)
    axis.plot(entry["steps"], curves.T, color=color, linewidth=0.5, alpha=0.5)
    axis.plot(entry["steps"], curves.mean(axis=0), color=color, linewidth=1.6)


def _order(entry: dict[str, Any]) -> tuple[str, str, bool]:
    return (
        entry["log"],
        entry["algo"].removeprefix("kloss_"),
        entry["algo"].startswith("kloss_"),
    )
