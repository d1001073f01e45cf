"""Says, once per policy, that what is loaded runs code by nature."""

from __future__ import annotations

import logging
import multiprocessing

from koffline.untrusted.code import check_code_allowed

_LOG = logging.getLogger(__name__)
_SAID: set[str] = set()


def say_it_runs_code(name: str, how: str) -> None:
    """A warning in the log, which Python writes to stderr unless the program decides otherwise.

    Once per name and process; worker processes stay silent, their parent has said it.
    Raises ConfigError in a repetition that may not run code.
    """
    check_code_allowed(name, how)
    if name in _SAID or multiprocessing.parent_process() is not None:
        return
    _SAID.add(name)
    _LOG.warning("%s %s; load it only if you trust its author", name, how)
