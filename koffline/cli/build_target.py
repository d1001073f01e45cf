"""What the commands that build share: where a dataset goes, its entry in the manifest, a progress bar."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from koffline.cli.targets import claim, named_beside
from koffline.errors import ConfigError, DataError
from koffline.store.run_record import full_command
from koffline.store.targets import check_apart, check_name

if TYPE_CHECKING:
    from koffline.builders.resumable import PartsFolder
    from koffline.data.disk.log import LazyTransitions
    from koffline.data.disk.writer import ShardWriter
    from koffline.data.transitions import Transitions

SHARDS = "shards"


class BuildTarget:
    """Where a dataset goes; whether it may is checked before the long part."""

    def __init__(
        self, out: str, format_: str | None, force: bool, manifest: str | None, shard_rows: int | None = None
    ) -> None:
        from koffline.builders.manifest import NAME, read_manifest
        from koffline.data.sources import target_format

        self._out, self._force = out, force
        self._shard_rows = shard_rows
        if shard_rows is not None:
            self._format = _checked_shards(out, format_, shard_rows)
        else:
            self._format = target_format(out, format_)
        self.path = claim(out, check=self._check)
        self.parts = claim(self.path.with_name(f"{self.path.name}.parts"))
        self._manifest = check_name(manifest or self.path.parent / NAME, "--manifest")
        check_apart([*named_beside("--manifest"), self.path], self._manifest, "--manifest")
        if not self._manifest.parent.is_dir() and manifest is not None:
            raise DataError(f"{self._manifest.parent} does not exist; create it or name another --manifest")
        if self._manifest.resolve() == self.path.resolve():
            raise DataError(f"--manifest {self._manifest} is the dataset's own name; name another file")
        read_manifest(self._manifest)

    def _check(self, folder: Path) -> None:
        """Raise DataError where the dataset would replace something else, or needs --force."""
        from koffline.data.disk.shards import is_shard_folder
        from koffline.data.minari import data_folder
        from koffline.store.files import MINARI, check_target

        if not self._out.startswith(MINARI) or os.path.lexists(folder):  # Minari's are made when written
            check_target(folder, self._force)
        if folder.is_dir() and self._format not in ("minari", SHARDS):
            raise DataError(f"{folder} is a folder; give a file name")
        is_strange = folder.is_dir() and self._format == SHARDS and not is_shard_folder(self._out)
        if is_strange or (
            os.path.lexists(folder) and self._format == "minari" and data_folder(folder) is None
        ):
            raise DataError(f"{folder} holds something else and will not be replaced; choose another name")

    def write(self, log: Any, seed: int) -> None:
        """The dataset, then its entry in the manifest; say what was written."""
        from koffline.data.sources import write_transitions

        if self._format == SHARDS:
            with self.shard_writer() as writer:
                writer.append(log)
        else:
            write_transitions(log, self._out, self._format, self._force)
        self.record(log, seed)

    @property
    def is_shards(self) -> bool:
        """Whether the dataset is to be a folder of shards."""
        return self._format == SHARDS

    def shard_writer(self) -> ShardWriter:
        """What writes the folder of shards; ``record_shards`` follows."""
        from koffline.data.disk.writer import ShardWriter

        assert self._shard_rows is not None
        return ShardWriter(self.path, self._shard_rows, self._force)

    def record_shards(self, seed: int) -> None:
        """The entry of a folder of shards in the manifest; say what was written."""
        from koffline.data.disk.opening import open_lazy

        self.record(open_lazy(self.path), seed)

    def record(self, log: Transitions | LazyTransitions, seed: int) -> None:
        """The entry of the finished dataset in the manifest; say what was written."""
        from koffline.builders.manifest import add_to_manifest

        add_to_manifest(self._manifest, self.path, log, full_command(), seed)
        click.echo(f"{self._out}: {log}")
        click.echo(f"sha256 {log.sha256}, entry in {self._manifest}")


def _checked_shards(out: str, format_: str | None, shard_rows: int) -> str:
    """The name of the format. Raises ConfigError where shards cannot be asked for like that."""
    from koffline.store.files import MINARI

    if shard_rows < 1:
        raise ConfigError(f"--shard-rows is {shard_rows}; give at least one row per shard")
    if format_ is not None or out.startswith(MINARI):
        asked = f"--format {format_}" if format_ is not None else f"--out {out}"
        raise ConfigError(f"{asked} and --shard-rows were both given; shards are HDF5 files, choose one")
    return SHARDS


def checked_seed(seed: int) -> int:
    """The seed. Raises ConfigError for a negative one."""
    if seed < 0:
        raise ConfigError(f"--seed is {seed}; give a number that is not negative")
    return seed


@contextlib.contextmanager
def resumable(parts: PartsFolder, resume: bool, force: bool) -> Iterator[None]:
    """A whole build, the output included, after which its parts go.

    What fails before anything is kept leaves nothing; an interrupt after that says how to go on.
    """
    parts.open(resume, force)
    try:
        yield
    except BaseException as error:
        if not parts.kept:
            parts.remove()
        elif isinstance(error, KeyboardInterrupt):
            click.echo(f"interrupted; finished episodes are in {parts.folder}: --resume goes on", err=True)
            raise SystemExit(130) from None
        raise
    parts.remove()


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A rich bar on stderr; None where that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True, emoji=False), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
