"""d3rlpy without its log lines, which go to stdout."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from koffline.data.d3rlpy_import import import_d3rlpy

_LOCK = threading.Lock()
_DEPTH = 0
_BEFORE: dict[str, Any] = {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing but critical messages inside; may be nested, and entered from several threads at once.

    The configuration found by the first to come in is what the last one to leave puts back.
    """
    import_d3rlpy()  # it configures structlog while it is imported
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    import structlog

    global _DEPTH, _BEFORE
    with _LOCK:
        if _DEPTH == 0:
            _BEFORE = structlog.get_config()
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        _DEPTH += 1


def _leave() -> None:
    import structlog

    global _DEPTH
    with _LOCK:
        _DEPTH -= 1
        if _DEPTH == 0:
            structlog.configure(**_BEFORE)
