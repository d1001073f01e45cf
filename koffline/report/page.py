"""One self-contained HTML page and a folder with everything behind it, written as a whole or not at all."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from koffline.errors import ConfigError
from koffline.ope.estimate import Estimate
from koffline.report import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKER = "estimate.json"


def check_output_directory(out: Path, force: bool) -> None:
    """ConfigError before any work when ``out`` is a file, holds something, or cannot be made."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a directory")
    occupied = out.is_dir() and any(out.iterdir())
    if occupied and not force:
        raise ConfigError(f"--out {out} is not empty; name another directory or add --force to replace it")
    if occupied and not (out / _MARKER).is_file():
        raise ConfigError(
            f"--out {out} holds no {_MARKER}, so --force will not replace it; name another directory"
        )
    parent = next(folder for folder in [out.absolute(), *out.absolute().parents] if folder.exists())
    if not parent.is_dir():
        raise ConfigError(f"--out {out}: {parent} is a file; name a directory")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"--out {out}: {parent} is not writable; name a directory that is")


def write_report(
    estimate: Estimate, out: Path, truth: float | None, command: str, force: bool = False
) -> Path:
    """``estimate.json``, ``plots/*.png`` and ``report.html`` in ``out``; returns the page's path.

    All is written to a temporary directory beside ``out`` and renamed; an earlier report is replaced only
    with ``force`` and only once the new one is complete.
    """
    check_output_directory(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    try:
        os.chmod(part, 0o777 & ~_umask())
        figures = _figures(estimate, truth)
        (part / "plots").mkdir()
        for name, figure in figures.items():
            figure.savefig(part / "plots" / f"{name}.png", dpi=144)
        (part / _MARKER).write_text(estimate.to_json() + "\n", encoding="utf-8")
        (part / "report.html").write_text(render_page(estimate, figures, truth, command), encoding="utf-8")
        _put_in_place(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return out / "report.html"


def render_page(estimate: Estimate, figures: dict[str, Figure], truth: float | None, command: str) -> str:
    """The page as text; figures are inline SVG, nothing is loaded from elsewhere."""
    from jinja2 import Environment

    template = resources.files("koffline.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _number
    return environment.from_string(template).render(
        estimate=estimate,
        truth=truth,
        command=command,
        figures={name: _svg(figure) for name, figure in figures.items()},
    )


def _figures(estimate: Estimate, truth: float | None) -> dict[str, Figure]:
    figures = {"estimate": plots.plot_estimate(estimate, truth)}
    evidence = estimate.evidence
    if evidence is not None:
        figures["values"] = plots.plot_values(evidence, estimate.value, truth)
        figures["objective"] = plots.plot_objective(evidence)
        figures["residuals"] = plots.plot_residuals(evidence)
        figures["initial_values"] = plots.plot_initial_values(evidence, estimate.value)
        figures["coverage"] = plots.plot_coverage(evidence)
    return figures


def _svg(figure: Figure) -> str:
    """The figure as an inline element, without the XML prologue."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _number(value: object) -> str:
    """Four significant digits; a dash for what is not there."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _put_in_place(part: Path, out: Path) -> None:
    """Rename ``part`` to ``out``; what was there goes away only after the new one has its name."""
    if not out.exists():
        part.rename(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent)) / out.name
    out.rename(old)
    try:
        part.rename(out)
    except BaseException:
        old.rename(out)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
