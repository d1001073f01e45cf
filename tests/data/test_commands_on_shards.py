"""`data info` and `data validate` on logs that stay on disk."""

import json

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from koffline.cli.data import data
from koffline.data.disk.writer import ShardWriter
from koffline.data.sources import open_transitions
from koffline.data.summary import summarise
from tests.data.shards_in_memory import numbered_shards


@pytest.fixture
def folder(tmp_path):
    with ShardWriter(tmp_path / "log", shard_rows=150) as writer:
        writer.append(numbered_shards().load())
    return tmp_path / "log"


def run(*arguments):
    return CliRunner().invoke(data, [str(argument) for argument in arguments])


def test_info_is_that_of_the_log_in_memory(folder):
    done = run("info", folder, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found.pop("shards") == len(list(folder.glob("*.hdf5")))
    expected = summarise(open_transitions(folder))
    assert found == json.loads(json.dumps(expected.to_json()))
    assert "shards" in run("info", folder).stdout


def test_info_of_one_file_left_on_disk(folder):
    file = min(folder.glob("*.hdf5"))
    lazy, eager = (json.loads(run("info", file, "--json", *more).stdout) for more in (["--lazy"], []))
    assert lazy == eager


def test_a_bad_shard_is_named_and_skipped_on_request(folder):
    first = min(folder.glob("*.hdf5"))
    with h5py.File(first, "a") as file:
        file["rewards"][2] = np.nan
    from koffline.errors import DataError

    with pytest.raises(DataError, match=f"{first.name}.*row 2"):
        CliRunner().invoke(data, ["info", str(folder)], catch_exceptions=False)
    done = run("info", folder, "--json", "--skip-bad-shards")
    assert done.exit_code == 0
    assert first.name in done.stderr
    found = json.loads(done.stdout)
    assert found["shards"] == len(list(folder.glob("*.hdf5"))) - 1
    assert found["sha256"] is None
    assert "unknown: shards were left out" in " ".join(
        run("info", folder, "--skip-bad-shards").stdout.split()
    )


def test_validate(folder):
    done = run("validate", folder)
    assert done.exit_code == 0
    assert "24 episodes end without a flag, the first in row 8" in done.stdout
    assert done.stdout.endswith("449 rows, no errors, 1 warning\n")
    for file in folder.glob("*.hdf5"):
        with h5py.File(file, "a") as opened:
            opened["rewards"][1] = np.inf
    done = run("validate", folder)
    assert done.exit_code == 2
    lines = done.stderr.splitlines()
    assert len(lines) == len(list(folder.glob("*.hdf5")))
    assert all("rewards: NaN or infinite in row 1" in line for line in lines)
