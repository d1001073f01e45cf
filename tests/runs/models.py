"""Small models for Puddle World, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from koffline.cli import cli
from tests.algos.makers import d3rlpy, seeded, with_small_networks

WORLD = "koffline/PuddleWorld-v0"


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="koffline")


def refusal(*arguments: str) -> str:
    """The one line of a command that must end with exit code 2."""
    result = command(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def puddle_model(path: Path) -> Any:
    """A DQN with random weights for Puddle World, saved."""
    algo = with_small_networks(d3rlpy.algos.DQNConfig).create()
    with seeded(2):
        algo.create_impl((2,), 4)
    algo.save(str(path))
    return algo
