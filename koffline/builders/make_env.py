"""Other people's environments: their errors, whatever they are, in one line."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import gymnasium

from koffline.envs.boxes import WORLDS
from koffline.errors import ConfigError, KofflineError
from koffline.untrusted.code import check_environment_allowed

_log = logging.getLogger(__name__)


def make_env(identifier: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """gymnasium.make with its errors in one line. Raises ConfigError."""
    check_environment_allowed(identifier, options)
    _hush_mujoco(identifier)
    try:
        return gymnasium.make(identifier, **options)
    except gymnasium.error.NameNotFound:
        near = get_close_matches(identifier, [*gymnasium.registry, *WORLDS], 1)
        hint = f"did you mean {near[0]}?" if near else "check its name, or write package:name to import it"
        raise ConfigError(f"there is no environment '{identifier}'; {hint}") from None
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        missing = isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled)
        if missing and re.search("mujoco|imageio", reason.lower()):
            raise ConfigError(
                f"the environment '{identifier}' needs MuJoCo, which is not installed; "
                "pip install mujoco imageio"
            ) from error
        raise ConfigError(
            f"the environment '{identifier}' cannot be made: {reason}; check its name and what it needs"
        ) from error


def _hush_mujoco(identifier: str) -> None:
    """MuJoCo's remarks on Gymnasium's models go to the log, not to stderr and to a file in this folder."""
    spec = gymnasium.registry.get(identifier)
    if spec is None or "mujoco" not in str(spec.entry_point):
        return
    with contextlib.suppress(ImportError):
        import mujoco

        if mujoco.get_mju_user_warning() is None:  # type: ignore[attr-defined, unused-ignore]
            mujoco.set_mju_user_warning(_log.debug)  # type: ignore[attr-defined, unused-ignore]


@contextlib.contextmanager
def playing(name: str, method: str) -> Iterator[None]:
    """Errors of an environment's method as a ConfigError; our own pass as they are."""
    try:
        yield
    except KofflineError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{name} failed in {method} ({reason}); try it alone with gymnasium.make"
        ) from error
