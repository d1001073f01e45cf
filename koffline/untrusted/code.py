"""Where files decide what runs: `koffline repeat` forbids code that a record names, in all its processes."""

from __future__ import annotations

import os
from typing import Any

from koffline.errors import ConfigError

# In the environment, as workers are processes of their own and inherit it.
WITHOUT_CODE = "KOFFLINE_WITHOUT_CODE"


def check_code_allowed(name: str, how: str) -> None:
    """To be called before code runs that ``name`` stands for. Raises ConfigError where that is forbidden.

    how: what it is, to follow the name: "runs the Python module mine".
    """
    if os.environ.get(WITHOUT_CODE):
        raise ConfigError(
            f"{name} {how}, which a repetition does only when asked; look at it, then add --allow-code"
        )


def check_environment_allowed(identifier: str, options: Any = None) -> None:
    """The same for an environment: `module:Name-v0` imports the module, also as an option of another."""
    for text in (identifier, *texts_in(options)):
        if ":" in text:
            check_code_allowed(f"the environment {text}", f"imports the Python module {text.split(':')[0]}")


def texts_in(value: Any) -> list[str]:
    """Every text within plain values, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in texts_in(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in texts_in(part)]
    return []
