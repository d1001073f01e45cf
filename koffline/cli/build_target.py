"""What the commands that build share: where a dataset goes, its entry in the manifest, a progress bar."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from koffline.cli.options import SEED, Command, added, whole
from koffline.cli.targets import claim, named_beside
from koffline.errors import ConfigError, DataError
from koffline.store.files import MINARI, check_target
from koffline.store.run_record import full_command
from koffline.store.targets import check_apart, check_name

if TYPE_CHECKING:
    from koffline.builders.resumable import PartsFolder

SHARDS = "shards"
FORCE = click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
_FORMAT = "Format; else by TARGET's name."
_TARGET = added(
    [
        click.option("--out", required=True, metavar="TARGET", help="An .hdf5 or .npz file, or minari:<id>."),
        click.option("--format", "format_", type=click.Choice(["hdf5", "minari", "npz"]), help=_FORMAT),
        whole("--shard-rows", metavar="N", help="TARGET is a folder of shards of at most N rows each."),
        FORCE,
        click.option(
            "--manifest", metavar="FILE", help="Gets the entry; default: manifest.json beside a file."
        ),
    ]
)


class BuildTarget:
    """Where a dataset goes, its entry in the manifest; whether it may is checked before the long part."""

    def __init__(
        self,
        out: str,
        format_: str | None,
        shard_rows: int | None,
        force: bool,
        manifest: str | None,
        seed: int,
    ) -> None:
        from koffline.builders.resumable import NAME, read_manifest
        from koffline.data.sources import target_format

        self._out, self._shard_rows, self.force, self._seed = out, shard_rows, force, seed
        if shard_rows is None:
            self._format = target_format(out, format_)
        elif format_ is not None or out.startswith(MINARI):
            asked = f"--format {format_}" if format_ is not None else f"--out {out}"
            raise ConfigError(f"{asked} and --shard-rows were both given; shards are HDF5 files, choose one")
        else:
            self._format = SHARDS
        self.path = claim(out, check=self._check)
        self.parts = claim(self.path.with_name(f"{self.path.name}.parts"))
        self._manifest = check_name(manifest or self.path.parent / NAME, "--manifest")
        check_apart([*named_beside("--manifest"), self.path], self._manifest, "--manifest")
        if not self._manifest.parent.is_dir() and manifest is not None:
            raise DataError(f"{self._manifest.parent} does not exist; create it or name another --manifest")
        if self._manifest.resolve() == self.path.resolve():
            raise DataError(f"--manifest {self._manifest} is the dataset's own name; name another file")
        read_manifest(self._manifest)

    def _check(self, place: Any) -> None:
        """Raise DataError where the dataset would replace something else, or needs --force."""
        from koffline.data.disk.shards import is_shard_folder
        from koffline.data.minari import data_folder

        if not self._out.startswith(MINARI) or os.path.lexists(place):  # Minari's are made when written
            check_target(place, self.force)
        if place.is_dir() and self._format not in ("minari", SHARDS):
            raise DataError(f"{place} is a folder; give a file name")
        is_ours = {"minari": lambda: data_folder(place), SHARDS: lambda: is_shard_folder(self._out)}
        if os.path.lexists(place) and self._format in is_ours and not is_ours[self._format]():
            raise DataError(f"{place} holds something else and will not be replaced; choose another name")

    @property
    def is_shards(self) -> bool:
        """Whether the dataset is to be a folder of shards."""
        return self._format == SHARDS

    def shard_writer(self) -> Any:
        """What writes the folder of shards."""
        from koffline.data.disk.writer import ShardWriter

        assert self._shard_rows is not None
        return ShardWriter(self.path, self._shard_rows, self.force)

    def write(self, log: Any) -> None:
        """The dataset, then its entry."""
        from koffline.data.sources import write_transitions

        if self.is_shards:
            with self.shard_writer() as writer:
                writer.append(log)
        else:
            write_transitions(log, self._out, self._format, self.force)
        self.record(log)

    def record(self, log: Any) -> None:
        """The entry of the finished dataset in the manifest; say what was written."""
        from koffline.builders.resumable import add_to_manifest

        add_to_manifest(self._manifest, self.path, log, full_command(), self._seed)
        click.echo(f"{self._out}: {log}")
        click.echo(f"sha256 {log.sha256}, entry in {self._manifest}")


def target_options(command: Command) -> Command:
    """Seed and target; the command gets ``seed`` and ``claim_target``, to be called after its own checks."""

    @functools.wraps(command)
    def run(seed: int, **options: Any) -> Any:
        names = ("out", "format_", "shard_rows", "force", "manifest")
        given = {name: options.pop(name) for name in names}
        return command(seed=seed, claim_target=lambda: BuildTarget(**given, seed=seed), **options)

    return added([SEED, _TARGET])(run)


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
    """A bar on stderr; None where that is not a terminal."""
    from koffline import progress

    is_shown = sys.stderr.isatty()
    with progress.progress_bar(title, total, is_shown) as show:
        yield show if is_shown else None
