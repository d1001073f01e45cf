"""Figures in settings of our own, as the last step of a run whose results are safe by
then.

matplotlib reads a file ``matplotlibrc`` of the current folder, the user's own one and
MPLBACKEND; none of them reaches our figures. A figure that cannot be drawn costs a
warning and no result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from koffline.untrusted.limits import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BACKEND = "MPLBACKEND"
_NOT_OF_FIGURES = (
    "backend",
    "interactive",
    "toolbar",
    "webagg",
    "tk.",
    "docstring",
    "date.epoch",
)
_LOG = logging.getLogger(__name__)
Saved = TypeVar("Saved")


def load_matplotlib() -> ModuleType:
    """matplotlib, imported without the settings of the current folder, of the user and
    of MPLBACKEND.
    """
    if "matplotlib" not in sys.modules:
        with _in_folder_of_defaults(), _without_backend():
            import matplotlib  # noqa: F401
    return sys.modules["matplotlib"]


@contextlib.contextmanager
def _in_folder_of_defaults() -> Iterator[None]:
    """Context in matplotlib's own folder: settings of the current folder are read
    first.
    """
    spec = find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:  # its import will say so
        yield
        return
    # also of a folder that was deleted
    before = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        os.chdir(Path(spec.submodule_search_locations[0]) / "mpl-data")
        yield
    finally:
        os.fchdir(before)
        os.close(before)


@contextlib.contextmanager
def _without_backend() -> Iterator[None]:
    chosen = os.environ.pop(_BACKEND, None)
    try:
        yield
    finally:
        if chosen is not None:
            os.environ[_BACKEND] = chosen


@contextlib.contextmanager
def drawing(style: Mapping[str, object]) -> Iterator[None]:
    """Context in which figures are made and saved with matplotlib's defaults and
    ``style``.

    Letters that the font lacks are drawn as boxes, without a warning for each.
    """
    matplotlib = load_matplotlib()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*[Gg]lyph", UserWarning)
        with contextlib.ExitStack() as stack:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some settings are deprecated
                defaults = {
                    name: value
                    for name, value in matplotlib.rcParamsDefault.items()
                    if not name.startswith(_NOT_OF_FIGURES)
                }
                stack.enter_context(matplotlib.rc_context({**defaults, **style}))
            yield


def saved(
    name: str,
    draw: Callable[[], Figure | None],
    save: Callable[[Figure], Saved],
    style: Mapping[str, object],
) -> Saved | None:
    """What ``save`` makes of a figure; None if there is nothing to draw, or if it
    fails, with a warning.

    save: should return bytes and write no file, because errors of a disk are not those
    of a figure.
    """
    try:
        with drawing(style):
            figure = draw()
            if figure is None:
                return None
            return save(figure)
    except Exception as error:
        # matplotlib's of any kind, such as a font that cannot be read
        _LOG.warning(
            "the figure %s was not drawn (%s); the results are complete",
            name,
            one_line(error),
        )
    return None
