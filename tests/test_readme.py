"""Every command and code block of the README runs, and its table of the paper points at real symbols."""

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from koffline.cli import cli
from koffline.ope import rounds
from tests.experiments.shrunk import blank_figures, shrink_experiments

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for kind, text in BLOCKS
    if kind == "bash"
    for line in text.splitlines()
    if line.strip()
]
SNIPPETS = [text for kind, text in BLOCKS if kind == "python"]
PAGE_SNIPPETS = [
    text
    for page in sorted((ROOT / "docs").glob("*.md"))
    for text in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
]
TABLE = re.findall(r"^\| .* \| `([a-z]+:\w+)` \| `(koffline[\w.]+)` \|$", README, flags=re.MULTILINE)
QUICK = ["--set", "steps=80", "--set", "full_replicas=1", "--set", "resampled_replicas=2"]
SHORT = ["--set", "train.n_steps=20", "--set", "train.n_steps_per_epoch=10"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("datasets", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "MOST_STEPS", 80)
    return tmp_path


# The claims alone take longer than all the others; tests/experiments/test_reproduce.py has them, and workers.
SLOW = "koffline reproduce claims"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=pytest.mark.slow) if c.startswith(SLOW) else c
        for c in COMMANDS
        if c.startswith("koffline")
    ],
)
def test_koffline_commands_run(command: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = shlex.split(command.replace("model_3000", "model_20"))[1:]  # the run below is shorter
    if "runs/dqn" in command and (arguments[0] != "train" or "--resume" in arguments):
        train = ["train", "configs/kloss_dqn.yaml", *SHORT, "--out", "runs/dqn"]
        assert CliRunner().invoke(cli, train, prog_name="koffline").exit_code == 0
    if "runs/pendulum" in command and arguments[0] != "online":
        config = "configs/online/inverted_pendulum.yaml"
        online = ["online", config, "--set", "steps=1000", "--seed-count", "1", "--out", "runs/pendulum"]
        assert CliRunner().invoke(cli, online, prog_name="koffline").exit_code == 0
    if "shards" in arguments or "runs/shards" in arguments:
        prepare_shards(arguments)
    if arguments[0] in ("train", "sweep"):
        arguments += [*SHORT, *(["--workers", "1"] if arguments[0] == "sweep" else [])]
    if arguments[0] in ("evaluate", "diagnose", "select"):
        arguments += QUICK
    if arguments[0] == "reproduce":
        shrink_experiments(monkeypatch)
        blank_figures(monkeypatch)
    result = CliRunner().invoke(cli, arguments, prog_name="koffline")
    assert result.exit_code == 0, result.output


def prepare_shards(arguments: list[str]) -> None:
    """What the commands above this one in the README have left behind."""
    if arguments[:2] == ["data", "convert"]:
        return
    before = [c for c in COMMANDS if " shards" in c and (" convert " in c or "--out runs/shards" in c)]
    for command in before if arguments[0] == "repeat" else before[:1]:
        words = shlex.split(command)[1:] + (QUICK if "evaluate" in command else [])
        assert CliRunner().invoke(cli, words, prog_name="koffline").exit_code == 0


def test_its_make_targets_exist() -> None:
    commands = [f"make {target}" for target in re.findall(r"`make ([a-z-]+)`", README)]
    for command in commands + [c for c in COMMANDS if c.startswith("make")]:
        done = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quicker = snippet.replace("gamma=0.98, seed=0)", "gamma=0.98, seed=0, steps=1200, resampled_replicas=4)")
    quicker = quicker.replace('mountain_car.hdf5")', 'mountain_car.hdf5").select(range(500))')
    exec(compile(quicker, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    says = {"evaluate(": "bootstrap", "bellman_test(": "rejected", "solve(": "tensor(", "predict(": "[["}
    assert next(said for call, said in says.items() if call in snippet) in printed


@pytest.mark.parametrize("snippet", PAGE_SNIPPETS, ids=range(len(PAGE_SNIPPETS)))
def test_snippets_of_other_pages_run(snippet: str, elsewhere: Path, capsys) -> None:
    exec(compile(snippet, "docs", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("label", "symbol"), TABLE)
def test_symbols_carry_the_label(label: str, symbol: str) -> None:
    module, _, name = symbol.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert f"(Feng et al. 2019, {label})" in (found.__doc__ or "")


def test_the_table_is_there_and_pictures_exist() -> None:
    assert len(TABLE) >= 15
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).is_file()
