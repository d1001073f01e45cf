"""A figure into a file, or onto the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from koffline.cli.targets import claim
from koffline.errors import ConfigError
from koffline.runs.figures import STYLE
from koffline.store.files import atomic_file, check_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_SCREEN = {"agg", "cairo", "pdf", "pgf", "ps", "svg", "template"}
_DPI = 150


def check_where(save: str | None, reads: Iterable[str | Path]) -> None:
    """Raise ConfigError or DataError before any work where the figure could be neither saved nor shown."""
    if save is None:
        _pyplot()
    else:
        claim(save, "--save", check=_check_file, reads=reads)


def _check_file(path: Path) -> None:
    _file_format(path)
    check_target(path, force=True)


def save_or_show(draw: Callable[[Figure], None], size: tuple[float, float], save: str | None) -> Path | None:
    """Draw a figure of `size` inches; the path of the file, None when it was shown on the screen.

    An older picture is replaced. Raises ConfigError for an unknown ending and where there is no display,
    DataError for a file that cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        if save is None:
            pyplot = _pyplot()
            draw(pyplot.figure(figsize=size, layout="constrained"))
            pyplot.show()
            return None
        figure, path = Figure(figsize=size, layout="constrained"), Path(save)
        draw(figure)
        format_ = _file_format(path)
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format_)
        with atomic_file(path, force=True) as temporary:
            figure.savefig(temporary, format=format_, dpi=_DPI, metadata=metadata)
    return path


def _file_format(path: Path) -> str:
    from matplotlib.backend_bases import FigureCanvasBase

    ending, known = path.suffix[1:].lower(), FigureCanvasBase.get_supported_filetypes()
    if ending not in known:
        endings = ", ".join(f".{format_}" for format_ in sorted(known))
        raise ConfigError(f"--save {path}: the ending says the format; give one of {endings}")
    return ending


def _pyplot() -> Any:
    """matplotlib.pyplot where it can show something. Raises ConfigError."""
    try:
        import matplotlib.pyplot as pyplot

        backend = pyplot.get_backend().lower()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the plot cannot be shown ({reason}); give --save plot.png") from error
    if backend in _NO_SCREEN:
        raise ConfigError("there is no display to show the plot on; give --save plot.png")
    return pyplot
