"""``koffline diagnose`` and ``select`` on shards say what they say of the file that was cut into them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import koffline
from koffline.cli.main import cli
from koffline.data.sources import write_transitions
from tests.ope.problems import discrete_log


@pytest.mark.parametrize(
    "command",
    [
        ["diagnose", "--policy", "uniform", "--model", "q:values", "--gamma", "0.9"],
        ["select", "--policies", "uniform", "epsilon:0.5:uniform", "--gamma", "0.9", "--set", "steps=20"],
    ],
    ids=lambda command: command[0],
)
def test_shards_and_their_file(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "q.py").write_text("def values(observations, actions):\n    return observations[:, 0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    log = discrete_log(120)
    write_transitions(log, "log.hdf5")
    with koffline.ShardWriter("shards", shard_rows=30) as writer:
        writer.append(log)
    found = []
    for data in (["log.hdf5"], ["shards"], ["log.hdf5", "--lazy"]):
        done = CliRunner().invoke(cli, [command[0], *data, *command[1:], "--json"], prog_name="koffline")
        assert done.exit_code == 0, done.output
        found.append(_untimed(json.loads(done.stdout)))
    assert found[0] == found[1] == found[2]


def _untimed(record):
    if not isinstance(record, dict):
        return [_untimed(entry) for entry in record] if isinstance(record, list) else record
    return {key: _untimed(entry) for key, entry in record.items() if key not in ("seconds", "source")}
