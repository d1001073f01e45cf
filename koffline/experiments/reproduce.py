"""`koffline reproduce`: run an experiment, then write its numbers, curves, figures and
tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import NamedTuple

from matplotlib.figure import Figure

from koffline import figures
from koffline.errors import ConfigError
from koffline.experiments.ablation import (
    ablation_tables,
    collect_ablation,
    draw_ablation,
)
from koffline.experiments.cells import Run
from koffline.experiments.claims import (
    claims_appendix,
    claims_tables,
    collect_claims,
    draw_claims,
)
from koffline.experiments.figure_choices import (
    CHOICES_PAGES,
    choices_tables,
    collect_choices,
    draw_choices,
)
from koffline.experiments.figure_methods import (
    collect_evaluation,
    draw_bench,
    evaluation_tables,
)
from koffline.experiments.figure_mujoco import (
    MUJOCO_PAGES,
    collect_mujoco,
    draw_mujoco,
    mujoco_appendix,
    mujoco_tables,
)
from koffline.experiments.figure_puddle import (
    collect_puddle,
    draw_puddle,
    puddle_appendix,
    puddle_tables,
)
from koffline.experiments.figure_toy import collect_toy, draw_toy, toy_tables
from koffline.experiments.result_files import (
    Collected,
    Curves,
    Results,
    read_results,
    write_curves,
    write_results,
)
from koffline.experiments.style import HOUSE_STYLE, images_of
from koffline.fitting import threads
from koffline.store import locked
from koffline.store.files import atomic_file, write_text
from koffline.store.run_record import start_run

Draw = Callable[[Results, Curves], Figure | None]


class Experiment(NamedTuple):
    """Functions that compute, draw and tabulate an experiment.

    pages: further figures, saved as NAME-PAGE; a function returns None if there is
    nothing to show. appendix: tables too long for the page, in ``NAME.appendix.md``.
    """

    collect: Callable[[Run], Collected]
    draw: Draw
    tables: Callable[[Results], Iterator[str]]
    pages: Mapping[str, Draw] = {}
    appendix: Callable[[Results], Iterator[str]] | None = None


EXPERIMENTS = {
    "figure-toy": Experiment(collect_toy, draw_toy, toy_tables),
    "figure-puddle": Experiment(
        collect_puddle, draw_puddle, puddle_tables, appendix=puddle_appendix
    ),
    "figure-bench": Experiment(collect_evaluation, draw_bench, evaluation_tables),
    "ablation": Experiment(collect_ablation, draw_ablation, ablation_tables),
    "memory": Experiment(collect_ablation, draw_ablation, ablation_tables),
    "choices": Experiment(collect_choices, draw_choices, choices_tables, CHOICES_PAGES),
    "figure-mujoco": Experiment(
        collect_mujoco, draw_mujoco, mujoco_tables, MUJOCO_PAGES, mujoco_appendix
    ),
    "claims": Experiment(
        collect_claims, draw_claims, claims_tables, appendix=claims_appendix
    ),
}


def reproduce(run: Run) -> Results:
    """Run what is missing and write ``NAME.json``, ``.curves.h5``, ``.png``, ``.svg``,
    ``.md`` and, of some experiments, ``.appendix.md``.

    A killed run is continued. Unless ``force`` is set, raises ConfigError if the folder
    holds the experiment at another scale or seed, or output files of another run.
    """
    path = run.folder / f"{run.name}.json"
    experiment = EXPERIMENTS[run.name]
    with locked(path):
        settings = {"quick": run.scale.quick, "seed": run.scale.seed}
        if run.scale.half_epochs:
            settings["half_epochs"] = True
        remedy = "choose another --out or replace it with --force"
        if not run.force and path.exists():
            there = read_results(path).settings
            if there != settings:
                was = _words(there)
                this = _words(settings)
                raise ConfigError(
                    f"{path} was run with {was}, this run has {this}; {remedy}"
                )
        elif not run.force and not run.cells_folder.exists():
            # an interrupted run leaves its cells
            for suffix in (".md", ".png", ".svg", ".curves.h5"):
                if path.with_suffix(suffix).exists():
                    raise ConfigError(
                        f"{path.with_suffix(suffix)} exists already; {remedy}"
                    )
        begun = start_run("reproduce")
        started = time.perf_counter()
        run.cells_folder.mkdir(parents=True, exist_ok=True)
        with threads(1):
            parts, curves = experiment.collect(run)
        versions = {
            package: version(package)
            for package in ("koffline", "torch", "numpy", "scipy")
        }
        seconds = time.perf_counter() - started
        results = Results(
            run.name, run.command, versions, settings, **parts, seconds=seconds
        )
        if curves:
            write_curves(curves, path.with_suffix(".curves.h5"))
        write_text(path.with_suffix(".md"), table_text(results))
        if experiment.appendix is not None:
            write_text(path.with_suffix(".appendix.md"), appendix_text(results))
        write_results(results, begun, path)
        for page, draw in {"": experiment.draw, **experiment.pages}.items():
            name = run.name
            if page:
                name = f"{run.name}-{page}"
            images = figures.saved(
                name, partial(draw, results, curves), images_of, HOUSE_STYLE
            )
            for ending, content in (images or {}).items():
                with atomic_file(
                    run.folder / f"{name}.{ending}", force=True
                ) as temporary:
                    temporary.write_bytes(content)
        return results


def table_text(results: Results) -> str:
    """Text of ``NAME.md``: the results that a reader needs, as Markdown."""
    return _page(results, results.name, EXPERIMENTS[results.name].tables)


def appendix_text(results: Results) -> str:
    """Text of ``NAME.appendix.md``: all other results, for those experiments that have
    an appendix.
    """
    appendix = EXPERIMENTS[results.name].appendix
    assert appendix is not None
    return _page(results, f"{results.name}: appendix", appendix)


def _page(
    results: Results, title: str, tables: Callable[[Results], Iterator[str]]
) -> str:
    how = f"{_words(results.settings)}; {_words(results.versions)}."
    head = (f"# {title}", f"`{results.command}`", how)
    return "\n\n".join([*head, *tables(results)]) + "\n"


def _words(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
