"""Memory and time: hostile files are read in a process that may take 256 MB more, and
soon be done.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from koffline.checkpoints import read_checkpoint
from koffline.data.sources import open_transitions, write_transitions
from koffline.errors import KofflineError
from koffline.policies.files import read_d3
from scripts.fuzz import seeds
from tests.fuzz import hostile

READ = """
import os, resource, sys, warnings
import h5py, numpy, zipfile
from koffline.data.sources import open_transitions
from koffline.errors import DataError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for path in sys.argv[1:]:
    try:
        lazy = os.path.isdir(path)
        log = open_transitions(path, lazy=lazy)
        for block in log.blocks(100) if lazy else ():
            pass
    except DataError as error:
        assert str(error).isprintable()
    else:
        print("read", path)
print("done")
"""


def test_bombs_are_refused_in_256_megabytes_without_a_byte_on_disk(tmp_path: Path):
    paths = []
    for build in (
        hostile.gzip_twice,
        hostile.one_huge_column,
        hostile.one_huge_chunk,
        hostile.same_data_many_times,
        hostile.a_description_without_end,
    ):
        (tmp_path / build.__name__).mkdir()
        for name in ("whole.hdf5", "shard.hdf5"):
            build(tmp_path / build.__name__ / name)
        paths.append(tmp_path / build.__name__ / "whole.hdf5")
        if build in hostile.SHARDS:
            paths.append(hostile.in_a_folder(tmp_path / build.__name__ / "shard.hdf5"))
    paths.append(tmp_path / "bomb.npz")
    paths[-1].write_bytes(hostile.bomb(2**28))
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "done\n", done.stdout + done.stderr


BUILDERS = {
    "dump": (
        lambda path: write_transitions(seeds.log(), path, "d3rlpy"),
        open_transitions,
    ),
    "minari": (
        lambda path: write_transitions(seeds.log(), path, "minari"),
        open_transitions,
    ),
    "shards": (seeds.shard_folder, open_transitions),
    "checkpoint": (
        lambda path: path.write_bytes(seeds.checkpoint_seeds()[0]),
        lambda path: read_checkpoint(path, "f"),
    ),
    "model": (lambda path: path.write_bytes(b"\x80" + bytes(200)), read_d3),
}


@pytest.mark.parametrize("kind", BUILDERS)
def test_every_format_keeps_to_the_figure(tmp_path: Path, kind, monkeypatch):
    build, read = BUILDERS[kind]
    build(tmp_path / "input")
    monkeypatch.setenv("KOFFLINE_MAX_BYTES", "100")
    with pytest.raises(
        KofflineError, match=r"input.* it takes .*B in memory, 100 B are allowed"
    ):
        read(tmp_path / "input")
