"""Limits on untrusted files (memory, sizes, kinds), and their texts: JSON and plain
YAML.

`Refused` has a sentence without the file's name. `one_line_errors` turns it, and any
other error from reading or calling what others wrote, into one of our errors.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from koffline.errors import ConfigError, DataError, KofflineError

if TYPE_CHECKING:
    import numpy

# Environment variable: bytes of memory that the content of one file may take.
MAX_BYTES = "KOFFLINE_MAX_BYTES"
# Default share of the memory: while columns are checked
# and cast, some exist several times.
SHARE = 4
# Deflate, the strongest compression that honest logs use, cannot do better than
# 1032 : 1.
EXPANSION = 1100
# Descriptions beside the columns: JSON in attributes,
# metadata.json, manifests, records of runs.
TEXT_BYTES = 16 * 2**20
# Columns of so many bytes are announced before they are read: it takes a while.
LARGE_BYTES = 10**9
# Times as much memory as its columns that a log takes while they are checked and cast.
COPIES = 3
# Settings in YAML: their size, and how deep they may be nested.
LARGEST_YAML = 2**20
_DEEPEST = 50
_TORCHSCRIPT = "Traceback of TorchScript"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_TEXT = "tag:yaml.org,2002:str"

_LOG = logging.getLogger(__name__)


class Refused(ValueError):
    """Raised with the reason why a file is not read, worded to follow the file's
    name.
    """


@contextlib.contextmanager
def one_line_errors(
    name: str | Path, fault: str, remedy: str, kind: type[KofflineError] = DataError
) -> Iterator[None]:
    """Turn errors of any type from damaged or hostile content into one of ``kind``:
    ``name: fault (the error); remedy``.

    name: of the file, or of whoever's code runs. Errors of that kind get the name in
    front if they lack it, because readers of the content do not know it; our other
    errors pass unchanged.
    """
    try:
        yield
    except KofflineError as error:
        if not isinstance(error, kind) or str(error).startswith(str(name)):
            raise
        raise kind(f"{name}: {error}") from error.__cause__
    except Refused as error:
        raise kind(f"{name} is not read: {error}") from None
    except (Exception, SystemExit) as error:
        raise kind(f"{name}: {fault} ({one_line(error)}); {remedy}") from error


def one_line(error: BaseException) -> str:
    """Type and beginning of an exception's message in one line; for a TorchScript
    program only its cause.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    kind = type(error).__name__
    if _TORCHSCRIPT in text:
        # torch's errors have their own type
        text = text.splitlines()[-1]
        kind = "RuntimeError"
        text = text.removeprefix("builtins.").removeprefix("RuntimeError: ")
    message = " ".join(text.split())
    if message:
        return f"{kind}: {message[:240]}"
    return kind


def check_memory(declared: int, remedy: str = "") -> None:
    """Raise Refused if ``declared`` bytes exceed what the content of one file may
    take.
    """
    allowed = memory_allowance()
    if declared > allowed:
        raise Refused(
            f"it takes {shown_bytes(declared)} in memory, {shown_bytes(allowed)} are"
            f" allowed; set {MAX_BYTES} to {declared} or more if this machine has"
            f" them{remedy}"
        )


@functools.cache
def announce_large(name: str, size: int | None, needed: int, copies: int) -> None:
    """Say on stderr before a large log is read how much memory that takes, once per log
    and process.

    size: bytes of the file. needed: bytes of its columns in memory. copies: how many
    times as much is in use at most while they are read.
    """
    if needed < LARGE_BYTES:
        return
    if size is None:
        packed = ""
    else:
        packed = f", in the file {shown_bytes(size)}"
    _LOG.warning(
        "%s: its columns take about %s of memory%s; reading and checking them takes a"
        " while and up to %s. Shards are read in parts, within --memory: koffline data"
        " convert LOG FOLDER --shard-rows 100000",
        name,
        shown_bytes(needed),
        packed,
        shown_bytes(copies * needed),
    )


def check_fits(needed: float, settings: str, remedy: str) -> None:
    """Raise ConfigError if settings ask for more memory than this process may use,
    before any is taken.

    needed: bytes, a lower bound. settings: their names and values, for the message.
    remedy: which of them to lower.
    """
    allowed = machine_memory()
    if needed > allowed:
        raise ConfigError(
            f"{settings}: that takes at least {shown_bytes(int(needed))} of memory,"
            f" this process may use {shown_bytes(allowed)}; {remedy}"
        )


def kept_bytes(shape: Sequence[int], dtype: numpy.dtype) -> int:
    """Bytes of an array as a column: vectors with 64 bits, images as they are, others
    as floats.

    A file may declare flags and bytes where a log has floats: the size after conversion
    counts.
    """
    if len(shape) < 2:
        least = 8
    elif len(shape) > 2 and dtype == "uint8":
        least = 1
    else:
        least = 4
    return math.prod(shape) * max(least, int(dtype.itemsize))


def memory_allowance() -> int:
    """Bytes that the content of one file may take: KOFFLINE_MAX_BYTES, else a quarter
    of the memory.

    Raises ConfigError if the variable is no number of bytes.
    """
    setting = os.environ.get(MAX_BYTES)
    if setting is None:
        return machine_memory() // SHARE
    is_number = setting.isascii() and setting.isdigit() and len(setting) <= 18
    if not is_number or int(setting) < 1:
        raise ConfigError(
            f"{MAX_BYTES} is {setting[:40]!r}; set it to a number of bytes, as in"
            " 4000000000"
        )
    return int(setting)


def machine_memory() -> int:
    """Bytes available to this process: physical memory, or a lower limit of its
    container or process.
    """
    limits = [2**62]
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # both generations of control groups
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text(encoding="ascii")))
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limits += [
            limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit > 0
        ]
    return min(limit for limit in limits if limit > 0)


def check_regular(path: Path) -> None:
    """Raise Refused for pipes, devices and system files, whose reading may never end.

    Raises OSError as the system does.
    """
    status = path.stat()
    is_of_system = any(
        os.path.isdir(root) and os.stat(root).st_dev == status.st_dev
        for root in ("/proc", "/sys")
    )
    if is_of_system or not stat.S_ISREG(status.st_mode):
        raise Refused(
            "it is no regular file (a pipe, device or folder); copy its content into a"
            " file"
        )


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes.

    Raises Refused and OSError.
    """
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Refused(
            f"it is larger than {shown_bytes(most)}, the most that such a file may have"
        )
    return content


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises OSError, and Refused also for invalid JSON."""
    return parse_json(read_bytes(path, TEXT_BYTES))


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text. Raises Refused for any text that cannot be parsed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            reason = "nested too deeply"
        else:
            reason = " ".join(str(error).split())
        raise Refused(
            f"its JSON cannot be read ({reason[:120]}); write it again"
        ) from None


def shown_bytes(count: int) -> str:
    """Number of bytes as text for messages, such as 12.3 GB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return "more than 1000 PB"


def check_inside(folder: Path, path: Path) -> None:
    """Raise Refused if ``path`` is no regular file, or leads out of ``folder`` by a
    link or ``..``.
    """
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Refused(f"{path.name} leads out of the folder; copy the file into it")
    check_regular(path)


def read_yaml_file(path: Path, name: str, kind: type[KofflineError]) -> dict[Any, Any]:
    """Top-level mapping of a YAML file. name, kind: the file's name in errors, and
    their type.
    """
    remedy = "write lines of 'key: value'"
    with one_line_errors(name, "cannot be read", "check the path", kind):
        content = read_bytes(path, LARGEST_YAML)
    with one_line_errors(name, "not valid YAML", remedy, kind):
        value = parse_yaml(content)
    if value is None or isinstance(value, dict):
        return value or {}
    raise kind(f"{name} holds a {type(value).__name__}; {remedy}")


def parse_yaml(text: str | bytes) -> Any:
    """Value of a YAML text with plain values.

    Raises Refused for texts that are too deep, repeat keys, or use aliases or tags, and
    yaml.YAMLError for invalid YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise Refused(f"it is nested more than {_DEEPEST} deep; settings are flat")
        has_tag = getattr(event, "tag", None) not in (None, "!")
        if has_tag or isinstance(event, yaml.AliasEvent):
            raise Refused(
                "it has aliases (*name) or tags (!name); write the values out"
            )
    try:
        return yaml.load(text, _Loader)  # a child of SafeLoader
    except Refused:
        raise
    except ValueError as error:
        # for example a number of ten thousand digits, or the 40th of a month
        raise Refused(
            f"a value in it cannot be read ({str(error)[:120]}); write plain numbers"
        ) from None


class _Loader(yaml.SafeLoader):
    """The safe loader, except that it refuses duplicate keys and reads 1:30 as text.

    YAML 1.1 reads numbers with colons in base 60, in a time that grows with the square
    of their length.
    """

    def resolve(
        self, kind: type[yaml.Node], value: str | None, implicit: object
    ) -> str:
        """The tag of a node without an explicit tag; arguments as in PyYAML."""
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if tag in (_INT, _FLOAT) and value is not None and ":" in value:
            return _TEXT
        return tag

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Any, Any]:
        """The mapping; raises Refused for a key that occurs twice."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise Refused(f"it names '{key.value}' twice; keep one of them")
            seen.add(key.value)
        return super().construct_mapping(node, deep)
