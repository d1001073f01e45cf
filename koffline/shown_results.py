"""How a result finds its figure and its page.

`report/` draws results and lies above them, so that a result cannot import it. It asks
here, and `koffline/__init__.py`, which lies above both, says where the views are.
"""

from __future__ import annotations

# `typing` takes milliseconds; this file is imported with the package
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Protocol

    from matplotlib.axes import Axes

    class Views(Protocol):
        """What `koffline.report.views` offers for every kind of result."""

        def plot(self, result: object, ax: Axes | None) -> Axes:
            """Draw the result on axes, new ones if None."""

        def write(self, result: object, path: str | Path, force: bool) -> Path:
            """Write the report, and return the path of its page."""

        def is_page(self, path: str | Path) -> bool:
            """Whether a report goes to a page alone, not to a folder."""

        def html(self, result: object) -> str:
            """The top of the report's page, for a notebook."""


_load: Callable[[], Views] | None = None


def provide(load: Callable[[], Views]) -> None:
    """Say how the views are imported, which happens when the first one is wanted."""
    global _load
    _load = load


def views() -> Views:
    """The views of results."""
    assert _load is not None, "koffline/__init__.py provides them"
    return _load()
