"""The rows that a model of ``koffline train`` was fitted to, from what its run folder says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from koffline.data.disk.samples import split_log
from koffline.data.sources import open_transitions
from koffline.data.spaces import Bounds, Discrete
from koffline.errors import KofflineError
from koffline.ope.provenance import Provenance
from koffline.untrusted.limits import read_json

_RECORD = "run.json"
_LOG = logging.getLogger(__name__)


def rows_of_run(model: Path) -> Provenance | None:
    """The training rows of a model file in a run folder, None where the folder or its log is not there.

    The log is read again and must have the digest that the run wrote down.
    """
    try:
        record = read_json(model.parent / _RECORD)
        settings, digest = record["config"]["data"], record["digests"]["data"]
        source, split = settings["source"], settings["split"]
        held_out, seed = float(split["held_out"]), int(split["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if "://" in str(source):
        return None  # a record that came with a model must not make this machine call another one
    try:
        log = open_transitions(source, _declared(settings))
        if log.sha256 != digest:
            _LOG.warning("%s has changed since %s was trained on it", source, model)
            return None
        rows, _ = split_log(log, held_out, seed)
    except (OSError, KofflineError, TypeError):
        return None
    return Provenance.of(rows, f"{source} (training part)" if held_out else source)


def _declared(settings: dict[str, Any]) -> Discrete | Bounds | None:
    """The action space as the run's config declares it."""
    if settings.get("continuous") is not None:
        return Bounds(*settings["continuous"])
    return Discrete(settings["discrete"]) if settings.get("discrete") else None
