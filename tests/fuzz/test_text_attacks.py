"""Settings, manifests and metadata made to do harm."""

import itertools
import json
import os
from pathlib import Path

import pytest

from koffline.config import read_yaml
from koffline.data.sources import open_transitions, read_initial_states
from koffline.errors import ConfigError, DataError, KofflineError
from koffline.policy_specs import load_policy
from scripts.fuzz import seeds
from tests.refusals import one_line


def repeated(first: str, entry: str) -> str:
    """Nine lines, each of which names the one before ten times."""
    lines = [f"a: &a {first}"]
    for before, name in itertools.pairwise("abcdefghi"):
        lines.append(f"{name}: &{name} {entry % ', '.join(['*' + before] * 10)}")
    return "\n".join(lines)


YAML = {
    "a billion laughs": (repeated("[1, 1]", "[%s]"), "it has aliases"),
    "merges of merges": (repeated("{x: 1}", "{<<: [%s]}"), "it has aliases"),
    "a value in itself": ("a: &a [*a]\n", "it has aliases"),
    "depth": ("a: " + "[" * 2000 + "]" * 2000, "nested more than 50 deep"),
    "length": ("a: 1\n" + "# " + "x" * 2**20, "larger than 1.05 MB"),
    "code": ("a: !!python/object/apply:os.system ['true']\n", "or tags"),
    "a time that is none": ("a: 2026-02-30\n", "a value in it cannot be read"),
    "many digits": ("a: " + "9" * 10_000, "a value in it cannot be read"),
    "a key twice": ("a: 1\na: 2\n", "names 'a' twice"),
    "control characters": ("a: \x1b[31m\n", "not valid YAML"),
    "no text": ("a: \udcff\n", "not valid YAML"),
}


@pytest.mark.parametrize("attack", YAML)
def test_hostile_settings_are_one_line(tmp_path: Path, attack):
    text, words = YAML[attack]
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with one_line(ConfigError, words):
        read_yaml(path)


SPACES = {
    "a box larger than memory": {
        "type": "Box",
        "dtype": "float32",
        "shape": [10**6] * 2,
        "low": 0,
    },
    "a box of code": {
        "type": "Box",
        "dtype": "object",
        "shape": [1],
        "low": [0],
        "high": [1],
    },
    "a count without end": {"type": "Discrete", "n": 10**400, "start": 0},
    "an unknown kind": {"type": "os.system"},
    "a list": [],
}


@pytest.mark.parametrize("name", SPACES)
def test_hostile_minari_spaces_are_one_line(tmp_path: Path, name):
    seeds.minari_folder(tmp_path / "log-v0")
    path = tmp_path / "log-v0/data/metadata.json"
    described = json.loads(path.read_text())
    path.write_text(
        json.dumps(described | {"observation_space": json.dumps(SPACES[name])})
    )
    with one_line(DataError, match="observation_space"):
        open_transitions(tmp_path / "log-v0")


def test_minari_data_outside_the_folder_is_not_read(tmp_path: Path):
    seeds.minari_folder(tmp_path / "log-v0")
    data = tmp_path / "log-v0/data/main_data.hdf5"
    data.rename(tmp_path / "elsewhere.hdf5")
    data.symlink_to(tmp_path / "elsewhere.hdf5")
    with pytest.raises(DataError, match="leads out of the folder"):
        open_transitions(tmp_path / "log-v0")


def test_pipes_are_refused_and_never_waited_for(tmp_path: Path):
    from koffline.data.transitions import Discrete

    path = tmp_path / "pipe"
    os.mkfifo(path)
    reads = [
        lambda: open_transitions(path),
        lambda: read_initial_states(str(path)),
        lambda: load_policy(path, Discrete(2), (2,)),
        lambda: read_yaml(path),
    ]
    for read in reads:
        with pytest.raises(KofflineError):
            read()
