"""`koffline data …` as a user meets it: stdout, stderr, exit codes; of files and of
folders of shards.
"""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from koffline.data.sources import open_transitions, write_transitions
from koffline.data.statistics import summarise
from koffline.data.transitions import Discrete, Metadata
from tests.data.logs import d4rl_arrays, leaves, roll_out
from tests.refusals import assert_refused, run_cli

ROLLOUT = roll_out(("truncated", "terminated") * 6, (5, 3) * 6)
LAYOUTS = {
    "log.hdf5": "HDF5 file with an array for each column of a log",
    "shards": "folder of shards",
}
LOG = ROLLOUT.transitions(
    metadata=Metadata(gamma=0.9, notes=("made for 1 test", "by hand"))
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_transitions(LOG, tmp_path / "log.hdf5")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shards(folder):
    run_cli("data", "convert", "log.hdf5", "shards", "--shard-rows", "20")
    return sorted((folder / "shards").glob("*.hdf5"))


def info(*arguments):
    result = run_cli("data", "info", *arguments, "--json")
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    return json.loads(result.stdout)


def spoil(files, row, value):
    for path in files:
        with h5py.File(path, "a") as file:
            file["rewards"][row] = value


def test_info_is_that_of_the_log_wherever_it_lies(folder, shards):
    expected = json.loads(json.dumps(summarise(LOG)))
    for source, options in (
        ("log.hdf5", ()),
        ("shards", ()),
        ("shards", ("--workers", "2")),
    ):
        summary = info(source, *options)
        assert summary.pop("source") == source
        assert summary.pop("layout") == LAYOUTS[source]
        assert summary.pop("shards", 1) == (3 if source == "shards" else 1)
        rest = {
            key: value
            for key, value in expected.items()
            if key not in ("source", "shards")
        }
        assert leaves(summary) == pytest.approx(leaves(rest))
    assert (summary["rows"], summary["time_limit"], summary["sha256"]) == (
        48,
        5,
        LOG.sha256,
    )
    assert "shards" in run_cli("data", "info", "shards").stdout
    spoil(shards[:1], 2, np.nan)
    assert_refused(run_cli("data", "info", "shards"), "shard-00000.hdf5", "row 2")


def test_validation_lists_all_errors(folder, shards):
    for source in ("log.hdf5", "shards"):
        printed = run_cli("data", "validate", source).stdout
        assert printed.endswith(f"{source}: 48 rows, no errors, no warnings\n")
    rows = np.arange(48)
    bad = d4rl_arrays(
        ROLLOUT,
        rewards=np.where(rows < 3, np.nan, LOG.rewards),
        actions=np.where(rows == 5, 9, LOG.actions),
        terminals=np.where(rows == 2, 2, LOG.terminated),
        weights=-np.ones(48),
    )
    np.savez("bad.npz", **bad)
    result = run_cli("data", "validate", "bad.npz", "--discrete", "3")
    assert result.exit_code == 2
    assert [
        line for line in result.stderr.splitlines() if line.startswith("error: ")
    ] == [
        (
            "error: rewards: no finite number in 3 rows (first: row 0); drop or mend"
            " such rows"
        ),
        (
            "error: actions: outside Discrete(3) in row 5; declare the space anew or"
            " mend such rows"
        ),
        "error: terminated: neither true nor false in row 2; give 0 or 1",
        (
            "error: weights: negative in 48 rows (first: row 0); give weights of at"
            " least 0"
        ),
    ]
    spoil(shards, 1, np.inf)
    result = run_cli("data", "validate", "shards")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert [line.count("rewards: no finite number in row 1") for line in lines] == [
        1
    ] * 3
    shards[1].write_bytes(shards[1].read_bytes()[:3000])
    lines = run_cli("data", "validate", "shards").stderr.splitlines()
    assert ["rewards: no finite" in line for line in lines] == [True, False, True]
    assert "shard-00001.hdf5" in lines[1]


def test_a_log_becomes_a_folder_of_shards_and_a_file_again(folder):
    result = run_cli("data", "convert", "log.hdf5", "shards", "--shard-rows", "20")
    notes = "note: made for 1 test\nnote: by hand\n"
    assert result.stdout.startswith(
        f"{notes}shards (shards): LazyTransitions(48 rows in 3 shards"
    )
    assert (
        run_cli("data", "convert", "shards", "again.npz", "--discrete", "7").exit_code
        == 0
    )
    again = open_transitions("again.npz")
    assert (again.sha256, again.action_space) == (LOG.sha256, Discrete(7))


REFUSALS = [
    (("info", "log.hdf5", "--discrete", "2", "--continuous", "0", "1"), "choose one"),
    (("info", "log.hdf5", "--discrete", "0"), "Discrete"),
    (("info", "log.hdf5", "--continuous", "1", "0"), "low"),
    (("convert", "log.hdf5", "out.xls"), "--format"),
    (("convert", "log.hdf5", "absent/out.npz"), "does not exist; create it"),
    (("convert", "log.hdf5", "out.npz", "--discrete", "1"), "outside Discrete(1)"),
    (
        ("convert", "log.hdf5", "s", "--shard-rows", "0"),
        "Invalid value for '--shard-rows'",
    ),
    (
        ("convert", "log.hdf5", "s", "--shard-rows", "9", "--format", "npz"),
        "--format npz and --shard-rows",
    ),
    (
        ("convert", "log.hdf5", "precious", "--shard-rows", "9", "--force"),
        "precious holds x, which --force would",
    ),
    (("convert", "shards", "out.npz"), "shard-00001.hdf5: a truncated or corrupt"),
    (
        ("convert", "shards", "finer", "--shard-rows", "5"),
        "shard-00001.hdf5: a truncated or corrupt",
    ),
]


def test_refusals_are_one_line_and_leave_nothing(folder, shards):
    (folder / "precious").mkdir()
    (folder / "precious" / "x").touch()
    shards[1].write_bytes(b"")
    before = sorted(folder.rglob("*"))
    for arguments, words in REFUSALS:
        assert_refused(run_cli("data", *arguments), words)
    assert (
        run_cli("data", "convert", "log.hdf5", "out", "--format", "xls").exit_code == 2
    )
    assert sorted(folder.rglob("*")) == before
    assert open_transitions("log.hdf5").sha256 == LOG.sha256


def test_split_writes_both_parts_or_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_transitions(LOG, "log.hdf5")
    Path("d").mkdir()
    done = run_cli("data", "split", "log.hdf5", "a.npz", "b.hdf5", "--held-out", "0.2")
    assert (done.exit_code, "note: made for 1 test\n" in done.stdout) == (0, True)
    parts = [open_transitions(name) for name in ("a.npz", "b.hdf5")]
    assert [part.n_episodes for part in parts] == [10, 2]
    assert {part.metadata.notes for part in parts} == {
        ("made for 1 test (in the whole log)", "by hand")
    }
    assert sorted(np.concatenate([part.rewards for part in parts])) == sorted(
        LOG.rewards
    )
    assert_refused(
        run_cli("data", "split", "log.hdf5", "c.npz", "b.hdf5"), "b.hdf5 exists already"
    )
    assert_refused(run_cli("data", "split", "log.hdf5", "c.npz", "d/../c.npz"), "both")
    done = run_cli("data", "split", "log.hdf5", "c.npz", "d.npz", "--held-out", "nan")
    assert_refused(done, "a share of nan")
    assert not Path("c.npz").exists()
