"""The configs and the small logs that come with the package.

In a checkout ``configs`` and ``datasets`` beside this file are links to the folders of
those names; a wheel holds the files that bundled configs name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from koffline.errors import ConfigError, nearest_name

PACKAGE = Path(__file__).parent
CONFIGS = PACKAGE / "configs"
ONLINE = "online"  # the folder of configs for online training
_SUFFIX = ".yaml"


def bundled_configs(folder: str = "") -> dict[str, str]:
    """What each bundled config does, by its name, in alphabetical order.

    folder: "" for training from a log, `ONLINE` for online training. The text is the
    comment in the file's first lines, up to the first full stop or colon.
    """
    files = sorted((CONFIGS / folder).glob(f"*{_SUFFIX}"))
    return {file.stem: _first_sentence(file) for file in files}


def _first_sentence(file: Path) -> str:
    lines: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    text = " ".join(lines)
    for mark in (". ", ": "):
        text = text.partition(mark)[0]
    return text.rstrip(".")


def config_file(source: str | Path, folder: str = "") -> tuple[Path, bool]:
    """The file of a config, and whether it is a bundled one.

    source: a path, or the name of a bundled config; a file of that name in the current
    folder comes first. folder: as in `bundled_configs`. Raises ConfigError where there
    is neither, with the bundled name that may be meant.
    """
    path = Path(source)
    if path.is_file():
        return path, False
    names = bundled_configs(folder)
    text = str(source)
    if text in names:
        return CONFIGS / folder / f"{text}{_SUFFIX}", True
    is_name = len(path.parts) == 1 and path.suffix == ""
    if path.exists() or not (is_name or path.stem in names):
        return path, False  # reading it says what is wrong
    if path.stem in names:
        raise ConfigError(
            f"config file {source} does not exist; the bundled config of that name is"
            f" {path.stem}, without a folder and ending"
        )
    raise ConfigError(
        f"{text!r} is no file, and no bundled config (--list names them);"
        f" {nearest_name(text, names)}"
    )


def path_in_bundled(value: str, config: Path) -> Path:
    """Where a relative path of a bundled config leads: to what the package holds, else
    into the current folder.

    value: the path, relative to the folder of ``config``. In a bundled config
    ``../runs/dqn/model_3000.d3`` is the model that ``koffline train dqn`` leaves in the
    current folder.
    """
    held = Path(os.path.normpath(config.parent / value))
    if held.exists():
        return held
    return Path.cwd() / os.path.relpath(held, PACKAGE)


def as_lines(configs: Mapping[str, str]) -> str:
    """Names and what they do, one a line, for a terminal."""
    width = max(map(len, configs), default=0)
    return "\n".join(f"{name:<{width}}  {about}" for name, about in configs.items())
