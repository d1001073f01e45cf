"""Every command and code block of the README and of the pages in docs/ runs."""

import gzip
import json
import re
import runpy
import shlex
import shutil
import statistics
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import koffline
from koffline.data.sources import write_transitions
from koffline.improvement import procedure as improvement
from koffline.improvement.settings import ImproveSettings
from koffline.ope.networks import fitted_q as training
from tests.experiments.shrunk import blank_figures, shrink_experiments
from tests.refusals import succeed

ROOT = Path(__file__).parents[1]
# The programs of the page of the first result, in its order.
FIRST_FILES = ("make_log.py", "rule.py", "check.py")
FIRST_LINES = tuple(f"# {name}\n" for name in FIRST_FILES)
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    page.relative_to(ROOT / "docs").with_suffix("").as_posix(): page.read_text(
        encoding="utf-8"
    )
    for folder in ("docs", "docs/evidence", "docs/notes")
    for page in sorted((ROOT / folder).glob("*.md"))
}
PAGES_OF_RESULTS = {
    p.stem: p.read_text(encoding="utf-8")
    for p in (ROOT / "docs/reproduce").glob("*.md")
}


def blocks(text: str, *kinds: str) -> list[str]:
    return re.findall(rf"```(?:{'|'.join(kinds)})\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str) -> list[str]:
    lines = re.sub(
        r"\s*\\\n\s*", " ", "\n".join(blocks(text, "bash", "sh"))
    ).splitlines()
    return [line.split("#")[0].strip() for line in lines if line.strip()]


README_COMMANDS = commands(README)
PAGE_COMMANDS = [command for page in PAGES.values() for command in commands(page)]
# a log that nobody has, and one with a test of its own
ALONE = (
    "fresh.hdf5",
    "users.csv",
    "visits.csv",
)
KOFFLINE_COMMANDS = [
    command
    for command in dict.fromkeys(README_COMMANDS + PAGE_COMMANDS)
    if command.startswith("koffline") and not any(log in command for log in ALONE)
]
SNIPPETS = [
    pytest.param(text, id=f"{name}-{number}")
    for name, page in {"README": README, **PAGES}.items()
    for number, text in enumerate(blocks(page, "python"))
    if "users.csv" not in text and not text.startswith(FIRST_LINES)
]
QUICK = [
    "--set",
    "steps=40",
    "--set",
    "full_replicas=1",
    "--set",
    "resampled_replicas=2",
]
QUICK_SEARCH = {
    "candidates": ("clone_mode",),
    "shares": (1.0,),
    "training_steps": 50,
    "choosing_steps": 60,
    "certifying_steps": 60,
    "full_replicas": 1,
    "resampled_replicas": 3,
}
SHORT = ["--set", "train.n_steps=20", "--set", "train.n_steps_per_epoch=10"]
ONLINE = ["--set", "steps=1000", "--seeds", "1"]
TABLE_EPISODES = 60
# What this machine has not, and what would take long.
HERE = {
    "model_3000": "model_20",
    "--workers 2": "",
    "--workers 4": "",
    "--ray 10.0.0.1:6379": "",
    "s3://bucket/shards": "shards",
    "--episodes 100000": "--episodes 20",
    "source=train.hdf5": "source=log.hdf5",
    "evaluate test.hdf5": "evaluate log.hdf5",
}
# Those take longer than all the others; tests/experiments/test_reproduce.py has them,
# and workers.
SLOW = (
    "koffline reproduce claims",
    "koffline reproduce ablation",
    "koffline reproduce figure-bench",
)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, two of them with their shortest episodes alone, and what the pages call
    log.csv and so on.
    """
    shelf = tmp_path_factory.mktemp("shelf") / "files"
    for folder in ("datasets", "configs"):
        shutil.copytree(ROOT / folder, shelf / folder)
    for name, episodes in (("cartpole.hdf5", 80), ("control/cartpole_expert.hdf5", 5)):
        log = koffline.open_transitions(ROOT / "datasets" / name)
        fewer = np.sort(np.argsort(log.episode_lengths, kind="stable")[:episodes])
        write_transitions(
            log.select_episodes(fewer), shelf / "datasets" / name, force=True
        )
    shutil.copy(shelf / "datasets/cartpole.hdf5", shelf / "log.hdf5")
    for name in ("policy.npz", "policy.pt"):  # known by their content
        shutil.copy(shelf / "datasets/cartpole_policy.npz", shelf / name)
    shutil.copy(shelf / "datasets/tables/cartpole.parquet", shelf / "table.parquet")
    table = pl.read_parquet(shelf / "table.parquet")
    first = table["episode"].unique(maintain_order=True)[:TABLE_EPISODES]
    table = table.filter(pl.col("episode").is_in(first.implode()))
    table.write_parquet(shelf / "table.parquet")
    table.write_csv(shelf / "log.csv")
    with gzip.open(shelf / "big.csv.gz", "wb") as file:
        table.write_csv(file)
    for name in ("table.yaml", "columns.yaml"):
        shutil.copy(shelf / "datasets/tables/cartpole.yaml", shelf / name)
    states = [name for name in table.columns if name.startswith(("cart_", "pole_"))]
    other_roles = {"action": "a", "reward": "r", "episode": "id", "t": "t"}
    short = {name: f"x_{number}" for number, name in enumerate(states)} | other_roles
    table.rename(short, strict=False).write_parquet(shelf / "log.parquet")
    (shelf / "mypolicies.py").write_text(
        "def better(states):\n    return (states[:, 2] > 0).astype(int)\n"
    )
    return shelf


@pytest.fixture
def elsewhere(
    shelf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few_features_of_memory: None,
) -> Path:
    """A folder with all of it."""
    for path in shelf.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "MOST_STEPS", 40)
    monkeypatch.setattr(
        improvement, "make_improve_settings", lambda _: ImproveSettings(**QUICK_SEARCH)
    )
    return tmp_path


def after(out: str, *words: str, shelf: Path) -> None:
    """The folder ``out`` as a command leaves it; the command runs once for all that go
    on from there.
    """
    kept = shelf.parent / out
    if not kept.exists():
        succeed(*words)
        shutil.copytree(out, kept)
    else:
        shutil.copytree(kept, out)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=pytest.mark.slow) if c.startswith(SLOW) else c
        for c in KOFFLINE_COMMANDS
    ],
)
def test_koffline_commands_run(
    command: str, shelf: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for written, here in HERE.items():
        command = command.replace(written, here)
    monkeypatch.syspath_prepend(elsewhere)
    arguments = shlex.split(command)[1:]
    if "runs/dqn" in command and (arguments[0] != "train" or "--resume" in arguments):
        after(
            "runs/dqn",
            "train",
            "kloss_dqn",
            *SHORT,
            "--out",
            "runs/dqn",
            shelf=shelf,
        )
    if "--resume" in arguments and arguments[0] == "online":
        succeed(
            "online",
            "inverted_pendulum",
            *ONLINE,
            "--out",
            "runs/pendulum",
        )
    elif arguments[0] == "online":
        arguments += ONLINE
    if "shards" in arguments and "--shard-rows" not in arguments:
        convert = shlex.split(next(c for c in README_COMMANDS if " convert " in c))[1:]
        after("shards", *convert, shelf=shelf)
    if "mapping.yaml" in arguments and arguments[0] == "evaluate":
        succeed("data", "inspect", "log.csv", "--out", "mapping.yaml")
    if arguments[0] in ("train", "sweep"):
        arguments += SHORT
    if any("experiments" in word for word in arguments):
        arguments += ["--set", "evaluators.environment.episodes=1", "--seeds", "2"]
    if arguments[0] in ("evaluate", "diagnose", "select"):
        arguments += QUICK
    if arguments[0] == "reproduce":
        shrink_experiments(monkeypatch)
        blank_figures(monkeypatch)
    succeed(*arguments)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(
    snippet: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quicker = snippet.replace(
        "gamma=0.98, seed=0)", "gamma=0.98, seed=0, steps=500, resampled_replicas=4)"
    )
    quicker = re.sub(r"\bsteps=\d+", "steps=40", quicker)
    quicker = quicker.replace("select(range(2000))", "select(range(800))")
    if "full_replicas" not in snippet:
        quicker = re.sub(
            r"\bresampled_replicas=\d+",
            "resampled_replicas=2, full_replicas=1",
            quicker,
        )
    exec(compile(quicker, "docs", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.strip()


def test_a_bandits_table_is_made_and_read(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(
        compile(blocks(PAGES["bandits"], "python")[0], "docs", "exec"),
        {"__name__": "docs"},
    )
    truth = float(capsys.readouterr().out.split()[-1])
    for command in commands(PAGES["bandits"]):
        succeed(*shlex.split(command)[1:], *QUICK)
    estimate = json.loads(Path("runs/offers/estimate.json").read_text())
    assert estimate["interval"]["low"] < truth < estimate["interval"]["high"]
    assert estimate["estimator"] == "dr"


def test_the_page_of_the_first_result_explains_every_line_of_the_answer(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGES["first_result"]
    for name, text in zip(FIRST_FILES, blocks(page, "python"), strict=True):
        assert text.startswith(f"# {name}\n")
        quicker = text.replace("20_000", "2_000")
        Path(name).write_text(quicker, encoding="utf-8")
    monkeypatch.syspath_prepend(elsewhere)
    runpy.run_path("make_log.py", run_name="__main__")
    inspect, evaluate = commands(page)
    answer = succeed(*shlex.split(inspect)[1:])
    (question,) = re.findall(r"^problem 1: .*$", page, flags=re.MULTILINE)
    assert question in answer
    answer = succeed(*(shlex.split(evaluate)[1:] + QUICK))
    table = page[page.index("| line | meaning |") : page.index("Notes below")]
    meanings = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    lines = re.findall(r"^│ (\S[^│]*?) +│", answer, flags=re.MULTILINE)
    assert [line for line in lines if line != "seed, time"] == meanings
    assert Path("answer/report.html").is_file()
    capsys.readouterr()
    runpy.run_path("check.py", run_name="__main__")
    assert 29 < float(capsys.readouterr().out) < 35


def table_rows(page: str, after: str = "") -> dict[str, list[str]]:
    lines = page[page.index(after) :].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return {row[0].strip("*` "): row for row in reversed(rows) if len(row) > 1}


def test_its_evidence_is_that_of_the_pages() -> None:
    """Who measures anew writes these lines anew."""
    text = " ".join(README.split())
    pairs = re.compile(r"^([+-][\d.]+), ([+-][\d.]+)$")
    rows_of_page = table_rows(PAGES["evidence/accuracy"])
    errors = [
        abs(float(word))
        for row in rows_of_page.values()
        if (pair := pairs.match(row[1]))
        for word in pair.groups()
    ]
    assert (
        f"median error was {100 * statistics.median(errors):.1f} % of the value" in text
    )
    assert f"worst {100 * max(errors):.1f} %" in text
    covered = rows_of_page["mean \\|error\\|"][-1].strip("* |")
    assert f"truth in {covered} logs" in text
    rows_of_page = table_rows(PAGES["evidence/intervals"])
    held, draws = (
        int(number) for number in re.findall(r"\d+", rows_of_page["all"][1])[:2]
    )
    assert (
        f"the squared error was {float(rows_of_page['all'][4]):.1f} times the efficiency bound"
        in text
    )
    assert (
        f"held the truth in {held} of {draws} draws, {held / draws:.0%}".replace(
            "%", " %"
        )
        in text
    )
    held, answers = map(int, re.findall(r"\d+", rows_of_page["together"][1]))
    assert (
        f"Of {answers} answers called supported, the interval held the truth in {held},"
        f" {held / answers:.0%}".replace("%", " %")
        in text
    )
    board = table_rows(PAGES["leaderboard"], "## All questions")
    weighted = min(
        float(row[3])
        for row in board.values()
        if row[1].endswith("importance sampling")
    )
    default, plain = (100 * float(board[name][3]) for name in ("auto", "plain FQE"))
    questions = board["auto"][2].split()[-1]
    assert f"On {questions} questions about logs" in text
    assert f"the default erred by {default:.1f} % at the median" in text
    assert (
        f"evaluation by {plain:.1f} % and importance sampling by {100 * weighted:.1f} %"
        " and more" in text
    )
    assert f"{board['auto'][7]} intervals held" in text
    verdicts = re.search(
        r"(\d+) sentences: (\d+) holds, (\d+) holds under, (\d+) does not hold,"
        r" (\d+) level, (\d+) undecided",
        PAGES_OF_RESULTS["claims"],
    )
    assert verdicts is not None
    sentences, hold, under, fail, level, unclear = verdicts.groups()
    assert level == "0"  # else it is to be named
    assert (
        f"{sentences} sentences on its experiments {hold} hold here, {under} hold under"
        f" a condition, {fail} do not hold, and {unclear} is undecided" in text
    )
    assert (
        f"{sentences} sentences {hold} hold, {under} hold under a condition, {fail} do"
        f" not hold, and {unclear} is undecided" in " ".join(PAGES["reproduce"].split())
    )
