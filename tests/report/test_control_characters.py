"""Names from files, on a terminal, in JSON and on a page: letters of all languages, and
nothing that acts.
"""

import json

import numpy as np
import polars as pl
import pytest

from koffline.errors import escaped_json, without_controls
from tests.refusals import run_cli

pytestmark = pytest.mark.usefixtures("few_features_of_memory")

ATTACKS = {  # a name, and what is shown in place of its characters that act
    "\x1b[2J\x07clear": "�[2J�clear",  # clears the screen and rings
    "\x9b2Jclear": "�2Jclear",  # the same, in one byte for terminals of eight bits
    "\u202eturned": "�turned",  # turns the direction of all that follows
    "back\x08\x7f": "back��",
    "\udcffbyte": "�byte",  # an undecodable byte of a file's name
}
COLUMNS = ("--one-step", "--observations", "x", "--action", "act", "--reward", "rew")
SETTINGS = (
    "--policy",
    "uniform",
    "--set",
    "steps=5",
    "--set",
    "resampled_replicas=2",
    "--quiet",
)


def is_harmless(text: str) -> bool:
    return text.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("name", ATTACKS)
def test_characters_that_act_are_shown_as_a_mark(name):
    assert without_controls(f"{name}\n\tÄ 動") == f"{ATTACKS[name]}\n\tÄ 動"
    escaped = escaped_json(
        json.dumps({name: [name, "Ä"]}, indent=2, ensure_ascii=False)
    )
    assert is_harmless(escaped)
    assert "Ä" in escaped
    assert json.loads(escaped) == {name: [name, "Ä"]}


@pytest.mark.parametrize(
    "name", [name for name in ATTACKS if name.isascii() or "\udcff" not in name]
)
def test_names_of_actions_and_groups_do_not_act(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    n = 200
    pl.DataFrame(
        {
            "x": generator.normal(size=n),
            "act": generator.choice([name, "right"], n),
            "rew": generator.normal(size=n),
            "group": generator.choice([f"{name}1", f"{name}2"], n),
            name: generator.normal(size=n),
        }
    ).write_parquet("log.parquet")
    evaluation = ("evaluate", "log.parquet", *COLUMNS, *SETTINGS)
    for options in (
        ("--by", "group", "--out", "groups"),
        ("--by", "group", "--json"),
        ("--estimator", "is,wis", "--out", "several"),
    ):
        done = run_cli(*evaluation, *options)
        assert done.exit_code == 0, done.output
        assert is_harmless(done.output)
        assert (ATTACKS[name] in done.output) or "--json" in options
    pages = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".json")]
    assert {path.name for path in pages} >= {
        "report.html",
        "estimate.json",
        "estimates.json",
        "run.json",
    }
    for page in pages:
        assert is_harmless(page.read_text(encoding="utf-8")), page
