"""`koffline reproduce`: run an experiment's jobs, then write its numbers, curves, figures and table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

from matplotlib.figure import Figure

from koffline.errors import ConfigError
from koffline.experiments import results as records
from koffline.experiments.ablation import collect_ablation, draw_ablation
from koffline.experiments.cells import Run
from koffline.experiments.claims import collect_claims, draw_claims
from koffline.experiments.evaluation import collect_evaluation, draw_bench, draw_puddle
from koffline.experiments.figure_mujoco import collect_mujoco, draw_mujoco
from koffline.experiments.figure_toy import collect_toy, draw_toy
from koffline.experiments.results import Curves, Results
from koffline.experiments.style import save_figure
from koffline.experiments.tables import table_text
from koffline.fitting import threads
from koffline.store.files import atomic_file
from koffline.store.run_record import start_run
from koffline.store.targets import locked

Draw = Callable[[Results, Curves], Figure | None]


@dataclass(frozen=True)
class Experiment:
    """How the parts of the results and the curves come about, and how they are drawn.

    pages: further figures, NAME-PAGE; None where there is nothing to show.
    """

    collect: Callable[[Run], tuple[dict[str, Any], Curves]]
    draw: Draw
    pages: Mapping[str, Draw] = field(default_factory=dict)


EXPERIMENTS = {
    "figure-toy": Experiment(collect_toy, draw_toy),
    "figure-puddle": Experiment(collect_evaluation, draw_puddle),
    "figure-bench": Experiment(collect_evaluation, draw_bench),
    "ablation": Experiment(collect_ablation, draw_ablation),
    "figure-mujoco": Experiment(
        collect_mujoco,
        draw_mujoco,
        {
            "sampled": partial(draw_mujoco, curve="sampled_return"),
            "paper": partial(draw_mujoco, part="paper"),
        },
    ),
    "claims": Experiment(collect_claims, draw_claims),
}


def reproduce(run: Run) -> Results:
    """Run what is missing, write ``NAME.json``, ``.curves.h5``, ``.png``, ``.svg`` and ``.md``.

    A killed run continues where it was. Raises ConfigError where the folder holds the same experiment at
    another scale (unless ``force``).
    """
    path, experiment = run.folder / f"{run.name}.json", EXPERIMENTS[run.name]
    with locked(path):
        settings = {"quick": run.scale.quick, "seed": run.scale.seed}
        if not run.force:
            _check_folder(run, settings)
        begun, started = start_run("reproduce"), time.perf_counter()
        run.cells_folder.mkdir(parents=True, exist_ok=True)
        with threads(1):
            parts, curves = experiment.collect(run)
        seconds = time.perf_counter() - started
        versions = {package: version(package) for package in ("koffline", "torch", "numpy", "scipy")}
        results = Results(run.name, seconds, run.command, versions, settings, **parts)
        if curves:
            records.write_curves(curves, path.with_suffix(".curves.h5"))
        for name, draw in {"": experiment.draw, **experiment.pages}.items():
            figure = draw(results, curves)
            if figure is not None:
                save_figure(figure, run.folder / (f"{run.name}-{name}" if name else run.name))
        with atomic_file(path.with_suffix(".md"), force=True) as temporary:
            temporary.write_text(table_text(results), encoding="utf-8")
        records.write_results(results, path)  # last: where it is, everything is
        records.write_clock(results, begun, run.folder)
        return results


def _check_folder(run: Run, settings: Mapping[str, Any]) -> None:
    path, remedy = run.folder / f"{run.name}.json", "choose another --out or replace it with --force"
    if path.exists():
        there = records.read_results(path).settings
        if there != settings:
            was, this = (", ".join(f"{k} {v}" for k, v in part.items()) for part in (there, settings))
            raise ConfigError(f"{path} was run with {was}, this run has {this}; {remedy}")
    elif not run.cells_folder.exists():  # an interrupted run of ours has left its cells
        for suffix in (".md", ".png", ".svg", ".curves.h5"):
            if path.with_suffix(suffix).exists():
                raise ConfigError(f"{path.with_suffix(suffix)} exists already; {remedy}")
