"""Names that are none: the remedy is one for the same thing, then the nearest, and no
list without an end.
"""

import re
from pathlib import Path

import pytest

from koffline.builders.control import POLICIES, bundled_policy
from koffline.errors import ConfigError, nearest_name
from tests.refusals import assert_refused, run_cli

ROOT = Path(__file__).parents[1]
EVALUATE = ("evaluate", "log.npz", "--policy", "uniform")
ROLLOUTS = (
    "build",
    "rollouts",
    "--policy",
    "uniform",
    "--episodes",
    "1",
    "--out",
    "x.npz",
)


@pytest.mark.parametrize(
    ("name", "known", "remedy"),
    [
        ("lr", ["steps", "learning_rate"], "did you mean 'learning_rate'?"),
        ("--environment", ["--env", "--enter"], "did you mean '--env'?"),
        ("IPS", ["pdis", "is"], "did you mean 'is'?"),
        ("enviroment", ["steps", "env"], "did you mean 'env'?"),
        ("step", ["seed", "steps"], "did you mean 'steps'?"),
        ("xyzzy", ["a", "b"], "known are a, b"),
        ("xyzzy", [f"a{i}" for i in range(30)], "a7, … (30 in all)"),
    ],
)
def test_the_remedy(name: str, known: list[str], remedy: str) -> None:
    assert nearest_name(name, known).endswith(remedy)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (*EVALUATE, "--discount", "0.9"),
            ("no option '--discount'", "'--gamma'? see 'koffline evaluate"),
        ),
        ((*EVALUATE, "--seed", "x"), ("'x' is not a valid integer",)),
        (
            ("online", "--set", "enviroment=Pendulum-v1"),
            ("enviroment is unknown", "'env'?"),
        ),
        (("evalute",), ("no command 'evalute'", "'evaluate'?")),
        (("inspect",), ("did you mean 'data inspect'?",)),
        (("data", "inof"), ("no command 'inof'", "'info'?")),
        ((*EVALUATE, "--set", "lr=0.1"), ("lr is unknown", "'learning_rate'?")),
        ((*ROLLOUTS, "--env", "Cartpole"), ("did you mean CartPole-v1?",)),
    ],
)
def test_a_command_names_what_is_meant(arguments, words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run_cli(*arguments), *words)


def test_bundled_policies_are_in_the_wheel() -> None:
    """They lie in the package, and a pattern of its data takes each."""
    patterns = re.findall(
        r'"(builders/policies/[^"]+)"', (ROOT / "pyproject.toml").read_text()
    )
    packed = {
        path.name for pattern in patterns for path in (ROOT / "koffline").glob(pattern)
    }
    for path in (ROOT / "datasets" / "policies").glob("*_*.npz"):
        stem, level = path.stem.rsplit("_", 1)
        if level in ("medium", "expert"):
            assert path.name in packed
            assert bundled_policy(f"{stem}-v1", level).parent == POLICIES
    with pytest.raises(
        ConfigError, match="no expert policy of Acrobot-v1 is bundled; give one"
    ):
        bundled_policy("Acrobot-v1", "expert")
