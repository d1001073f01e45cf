"""What the Tab key offers, as a shell asks for it."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from koffline.bundled import ONLINE, bundled_configs
from koffline.cli import cli
from koffline.ope.names import ESTIMATORS, KINDS, kinds_for


def offered(line: str) -> list[tuple[str, str]]:
    """Kinds and values that bash gets for the last word of a line, which may be
    empty.
    """
    environment = {
        "_KOFFLINE_COMPLETE": "bash_complete",
        "COMP_WORDS": f"koffline {line}",
        "COMP_CWORD": str(len(line.split(" "))),
    }
    done = CliRunner().invoke(cli, [], prog_name="koffline", env=environment)
    pairs = []
    for answer in done.output.splitlines():
        kind, _, value = answer.partition(",")
        pairs.append((kind, value))
    return pairs


def values(line: str) -> list[str]:
    return [value for kind, value in offered(line) if kind == "plain"]


def test_estimators() -> None:
    line = "evaluate log.hdf5 --estimator "
    assert values(line) == ["auto", "all", *ESTIMATORS]
    assert values(f"{line}k") == ["kloss+fqe", "kloss"]
    assert values(f"{line}wis,w") == ["wis,wpdis", "wis,wdr"]
    assert values("select log.hdf5 --estimator ma") == ["magic"]


def test_intervals_are_those_that_the_estimator_has() -> None:
    assert values("evaluate log.hdf5 --interval ") == list(KINDS)
    of_one = values("evaluate log.hdf5 --estimator wis --interval ")
    assert of_one == list(kinds_for("wis"))
    assert values("evaluate log.hdf5 --estimator wiss --interval ") == list(KINDS)


@pytest.mark.parametrize(
    "line",
    [
        "evaluate log.hdf5 --policy ",
        "select log.hdf5 --policies ",
        "diagnose log.hdf5 --policy ",
    ],
)
def test_policies_are_names_and_files(line, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("best.d3", "net.pt", "notes.txt"):
        (tmp_path / name).touch()
    assert values(line) == ["uniform", "epsilon:0.1:", "best.d3", "net.pt"]
    assert values(f"{line}b") == ["best.d3"]
    # the shell looks for files itself
    assert offered(f"{line}folder/x") == [("file", "folder/x")]


def test_configs_and_models() -> None:
    assert values("train kloss_c") == ["kloss_cal_ql", "kloss_cql"]
    assert values("sweep dq") == ["dqn"]
    assert values("online ") == list(bundled_configs(ONLINE))
    assert values("diagnose log.hdf5 --model ") == ["kloss", "fqe"]


def test_tab_imports_nothing_heavy() -> None:
    code = (
        "import sys; from koffline.cli import cli\n"
        "try: cli(prog_name='koffline')\n"
        "finally: print(sorted({'torch', 'numpy', 'd3rlpy', 'polars'} &"
        " set(sys.modules)))"
    )
    environment = {
        "_KOFFLINE_COMPLETE": "bash_complete",
        "COMP_WORDS": "koffline evaluate log.hdf5 --estimator wi",
        "COMP_CWORD": "4",
        "PATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines()[0] == "plain,wis"
    assert "torch" not in done.stdout
