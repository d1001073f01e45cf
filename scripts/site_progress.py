"""What the build of the site is doing: MkDocs calls these functions (mkdocs.yml,
hooks).

`make docs` runs MkDocs with --quiet, so these lines and warnings are all that it says.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

_FIRST = 100  # before the plugins that make the reference and run the notebooks
_started = time.monotonic()


def on_startup(**_: Any) -> None:
    """Kernels of notebooks warn of nothing but errors: they run on this machine alone."""
    folder = Path(tempfile.mkdtemp(prefix="koffline-docs-"))
    profile = folder / "profile_default"
    profile.mkdir()
    config = profile / "ipython_kernel_config.py"
    config.write_text("c.IPKernelApp.log_level = 40\n", encoding="utf-8")
    os.environ["IPYTHONDIR"] = str(folder)


@event_priority(_FIRST)
def on_files(files: Any, **_: Any) -> None:
    _say(f"making {len(files.documentation_pages())} pages, and those of the package")


@event_priority(_FIRST)
def on_pre_page(page: Any, **_: Any) -> Any:
    runs = os.environ.get("KOFFLINE_RUN_NOTEBOOKS", "true") == "true"
    if runs and page.file.src_uri.startswith("notebooks/"):
        _say(f"running docs/{page.file.src_uri}")
    return page


def on_env(env: Any, **_: Any) -> Any:
    _say("writing the pages")
    return env


def on_post_build(**_: Any) -> None:
    _say("done")


def _say(event: str) -> None:
    print(f"{time.monotonic() - _started:4.0f} s  {event}", flush=True)
