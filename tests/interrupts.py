"""Child processes that can be interrupted, also where the tests run in the background with SIGINT ignored."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """For ``preexec_fn``: a process that a background shell started passes 'ignored' on to its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
