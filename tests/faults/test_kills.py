"""SIGKILL at random moments; docs/results/faults.json has a larger campaign over all
commands.
"""

import random

import pytest

from scripts.fault_cases import all_cases
from scripts.fault_checks import litter_in, unreadable_in
from scripts.faults import kill_in_a_row, main, reference_of

CASES = {case.name: case for case in all_cases()}


@pytest.mark.parametrize(
    "name", [pytest.param("build", marks=pytest.mark.slow), "convert"]
)
def test_killed_commands_lose_nothing(tmp_path, name):
    case = CASES[name]
    generator = random.Random(0)
    reference = reference_of(case, tmp_path / "whole")
    assert reference.results
    kills = kill_in_a_row(case, reference, tmp_path / "killed", 2, generator)
    assert [kill.failures for kill in kills] == [(), ()]


@pytest.mark.slow
def test_a_campaign_over_all_commands():
    assert main(["--kills", "50", "--seed", "11"]) == 0


def test_what_is_half_written_is_seen(tmp_path):
    (tmp_path / "a.json").write_text('{"value": ')
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    (tmp_path / "d.hdf5").write_bytes(b"\x89HDF")
    (tmp_path / "e.html").write_text("<html>")
    (tmp_path / "f.md").write_text("")
    (tmp_path / ".g.json.x.tmp").write_text("{")
    (tmp_path / "h.csv").write_text("step\n1")
    names = [name.split()[0] for name in unreadable_in(tmp_path)]
    assert names == ["a.json", "b.npz", "c.png", "d.hdf5", "e.html", "f.md"]
    assert litter_in(tmp_path) == [".g.json.x.tmp"]
