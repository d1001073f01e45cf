"""Versions of what decides the numbers."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def package_versions() -> dict[str, str]:
    """Versions that decide the numbers."""
    from koffline import __version__

    found = {"koffline": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "d3rlpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
