"""Where results go: never onto what a command reads or where another writes, and known
before the work.
"""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from koffline.data.sources import convert_to_shards, write_transitions
from koffline.store import LOCK, locked
from koffline.store.files import digest_of
from tests.refusals import assert_refused, run_cli
from tests.train.small_runs import make_log

UNIFORM = ("build", "uniform", "--env", "koffline/PuddleWorld-v0", "--n", "10")
ROLLOUTS = ("build", "rollouts", "--env", "koffline/PuddleWorld-v0", "--episodes", "1")
EVALUATE = ("evaluate", "log.hdf5", "--gamma", "0.9", "--estimator", "is")
POLICY = "p.npz"
COMMANDS = {
    "evaluate": (*EVALUATE, "--policy", "uniform", "--out"),
    "diagnose": (
        "diagnose",
        "log.hdf5",
        "--policy",
        "uniform",
        "--model",
        "fqe",
        "--gamma",
        "0.9",
        "--out",
    ),
    "select": (
        "select",
        "log.hdf5",
        "--policies",
        "uniform",
        "a",
        "--gamma",
        "0.9",
        "--out",
    ),
    "uniform": (*UNIFORM, "--policy", "uniform", "--format", "npz", "--out"),
    "rollouts": (*ROLLOUTS, "--policy", "uniform", "--format", "npz", "--out"),
    "control": (
        "build",
        "control",
        "--env",
        "CartPole-v1",
        "--kind",
        "random",
        "--format",
        "npz",
        "--out",
    ),
    "policy": ("build", "policy", "--env", "koffline/PuddleWorld-v0", "--out"),
    "convert": ("data", "convert", "log.hdf5", "--format", "npz"),
    "export": ("export", "model.d3"),
    "train": ("train", "train.yaml", "--out"),
    "sweep": ("sweep", "train.yaml", "--metric", "loss", "--out"),
    "reproduce": ("reproduce", "figure-toy", "--out"),
}
ADD_TO_FOLDERS = ("train", "sweep", "reproduce")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Logs, and files that are as good as logs or policies: what is refused is never
    opened.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for log in ("log.hdf5", "minari:chain/small-v0"):
        write_transitions(make_log(), log)
    convert_to_shards("log.hdf5", "shards", 20)
    for folder in ("lr=0.1,b", "both", "new.npz.parts", "tables"):
        Path(folder).mkdir()
    for name in (
        POLICY,
        "lr=0.1,b/p.npz",
        "both/p.npz",
        "new.npz.parts/part-p.npz",
        "tables/part.parquet",
    ):
        Path(name).write_bytes(name.encode())
    Path("hard.npz").hardlink_to(POLICY)
    Path("soft.npz").symlink_to(POLICY)
    Path("linked").symlink_to("shards")
    Path("columns.yaml").write_text("observations: [x]\naction: a\nreward: r\n")
    Path("both/estimate.json").write_text('{"value": 1.0}')
    for name, log in (("train.yaml", "log.hdf5"), ("both/train.yaml", "../log.hdf5")):
        Path(name).write_text(
            f"data: {{source: {log}}}\nalgo: {{type: kloss_dqn}}\ntrain: {{n_steps:"
            " 2}\n"
        )
    return tmp_path


@pytest.mark.parametrize(
    ("words", "out", "read"),
    [
        ((*ROLLOUTS, "--policy", POLICY), POLICY, POLICY),
        ((*ROLLOUTS, f"--policy={POLICY}"), f"./{POLICY}", POLICY),
        (
            (*ROLLOUTS, "--policy", "epsilon:0.2:epsilon:0.1:p.npz"),
            POLICY,
            "epsilon:0.2:epsilon:0.1:p.npz",
        ),
        ((*ROLLOUTS, "--policy", "uniform", "--policy", POLICY), POLICY, POLICY),
        ((*ROLLOUTS, "--policy", "hard.npz"), POLICY, "hard.npz"),
        ((*ROLLOUTS, "--policy", POLICY), "soft.npz", POLICY),
        (
            (*ROLLOUTS, "--policy", "new.npz.parts/part-p.npz"),
            "new.npz",
            "new.npz.parts/part-p.npz",
        ),
        ((*ROLLOUTS, "--policy=lr=0.1,b/p.npz"), "lr=0.1,b/p.npz", "lr=0.1,b/p.npz"),
        ((*UNIFORM, "--policy", POLICY), POLICY, POLICY),
        (
            (*EVALUATE, "--policy", "epsilon:0.1:both/p.npz"),
            "both",
            "epsilon:0.1:both/p.npz",
        ),
        (
            (*EVALUATE, "--policy", "uniform", "--initial-states", "both/p.npz"),
            "both",
            "both/p.npz",
        ),
        (
            (*EVALUATE, "--policy", "uniform", "--truth", "both/estimate.json"),
            "both",
            "both/estimate.json",
        ),
        (
            (
                "select",
                "log.hdf5",
                "--policies",
                "uniform",
                "both/p.npz",
                "--gamma",
                "0.9",
            ),
            "both",
            "both/p.npz",
        ),
        (("sweep", "both/train.yaml", "--metric", "loss"), "both", "both/train.yaml"),
        (("export", "soft.npz"), POLICY, "soft.npz"),
        *(
            (("data", "convert", source), target, source)
            for source, target in (
                ("log.hdf5", "log.hdf5"),
                ("file://{place}/log.hdf5", "log.hdf5"),
                ("memory://a/log.npz", "memory://a/log.npz"),
                (POLICY, "hard.npz"),
                ("tables", "tables/part.parquet"),
                ("minari:chain/small-v0", "minari:chain/small-v0"),
            )
        ),
        *(
            (("data", "convert", source, "--shard-rows", "10"), target, source)
            for source, target in (
                ("shards", "shards"),
                ("shards", "linked"),
                ("shards/shard-00000.hdf5", "shards"),
            )
        ),
        (
            (
                "data",
                "convert",
                "tables/part.parquet",
                "--mapping",
                "columns.yaml",
                "--format",
                "npz",
            ),
            "columns.yaml",
            "columns.yaml",
        ),
    ],
)
def test_no_command_replaces_what_it_reads(
    place: Path, words: tuple[str, ...], out: str, read: str
) -> None:
    before = digest_of(place)
    words = [word.format(place=place) for word in words]
    read = read.format(place=place)
    line = (
        f" would replace {read} or a part of it, which this command reads, also with"
        " --force"
    )
    flag = () if words[0] == "export" or words[1] == "convert" else ("--out",)
    assert_refused(run_cli(*words, *flag, out, "--force"), line)
    assert digest_of(place) == before


def test_words_that_are_names_by_chance_are_no_inputs(place: Path) -> None:
    """A second answer of the estimator `is` into the folder `is`; folders named as
    words and numbers.
    """
    words = (
        *EVALUATE,
        "--policy",
        "uniform",
        "--interval",
        "episodes-t",
        "--out",
        "is",
    )
    assert run_cli(*words).exit_code == 0
    assert run_cli(*words, "--force").exit_code == 0
    Path("uniform").mkdir()
    assert (
        run_cli(
            *UNIFORM, "--policy", "uniform", "--out", "uniform/x.npz", "--force"
        ).exit_code
        == 0
    )


@pytest.mark.parametrize(
    ("words", "foreign"),
    [
        ((*EVALUATE, "--policy", "uniform", "--out", "new"), "plots/mine/a.png"),
        (("data", "convert", "log.hdf5", "new", "--shard-rows", "20"), "notes.txt"),
    ],
)
def test_force_replaces_results_and_never_deletes_what_others_put_beside_them(
    place: Path, words: tuple[str, ...], foreign: str
) -> None:
    for flag in ((), ("--force",)):
        assert run_cli(*words, *flag).exit_code == 0
    (place / "new" / foreign).parent.mkdir(exist_ok=True)
    (place / "new" / foreign).write_text("mine")
    before = digest_of(place)
    assert_refused(
        run_cli(*words, "--force"), f"new holds {foreign}, which --force would delete"
    )
    assert digest_of(place) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_names_that_are_none_are_refused_before_the_work(
    place: Path, name: str
) -> None:
    before = digest_of(place)
    words = COMMANDS[name]
    cases = [
        ("  ", "is empty"),
        ("x" * 300, "File name too long"),
        ("a\x1bb", "holds control characters"),
    ]
    if name in ADD_TO_FOLDERS:
        cases.append((POLICY, "is a file; name a folder"))
    else:
        cases += [
            (above, "is the current folder or holds it")
            for above in (".", "/", "both/..")
        ]
    for target, reason in cases:
        assert_refused(run_cli(*words, target), reason)
    assert digest_of(place) == before
    assert not any(path.name.endswith(LOCK) for path in place.iterdir())


@pytest.mark.parametrize(
    "word",
    [
        "\x1b[31mred",
        "a\rb",
        "bell\x07",
        "c1\x9b31m",
        "\u202egnp.exe",
        "\u2066x",
        "\x7f",
        "\x00",
    ],
)
def test_no_word_reaches_a_terminal_that_would_obey_it(place: Path, word: str) -> None:
    for words in (
        ("data", "info", word),
        (*EVALUATE, "--policy", word),
        (word,),
        ("data", word),
    ):
        done = run_cli(*words)
        assert_refused(done, "holds control characters; rename the file or drop them")
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066]", done.stderr)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes to the target until it is told to end."""
    code = (
        "import pathlib, sys; from koffline.store import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('locked', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(target)], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "locked\n"
        try:
            yield other
        finally:
            if other.poll() is None:
                other.communicate("\n")


@pytest.mark.parametrize(
    ("words", "out", "file"),
    [
        (COMMANDS["rollouts"], "t/q.npz", "t/q.npz.parts"),
        (COMMANDS["train"], "t", "t/run.json"),
        (COMMANDS["sweep"], "t", "t/run.json"),
        (COMMANDS["reproduce"], "t", "t/figure-toy.json"),
    ],
)
def test_a_second_command_ends_and_the_first_is_not_disturbed(place, words, out, file):
    Path("t").mkdir()
    with writing(Path(file)):
        line = (
            f"error: another process is writing to {file}; wait for it or choose"
            " another --out\n"
        )
        assert_refused(run_cli(*words, out), line)
    assert not list(Path("t").iterdir())
    assert not any(path.name.endswith(LOCK) for path in place.rglob("*"))


def test_a_killed_process_leaves_no_lock_that_counts(tmp_path: Path) -> None:
    with writing(tmp_path / "a" / "b") as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".b.lock"]
    with locked(tmp_path / "a" / "b"):
        pass
    assert not list((tmp_path / "a").iterdir())


def test_one_of_many_at_a_time(tmp_path: Path) -> None:
    """Each adds one to a number, reading and writing apart; removing the file of the
    lock loses none.
    """
    code = (
        "import pathlib, sys; from koffline.store import locked\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "for _ in range(200):\n"
        "    with locked(place / 'sub' / 'x', wait=True):\n"
        "        (place / 'n').write_text(str(int((place / 'n').read_text()) + 1))"
    )
    (tmp_path / "n").write_text("0")
    many = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)
    ]
    assert [process.wait() for process in many] == [0, 0, 0, 0]
    assert (tmp_path / "n").read_text() == "800"
    assert not list(tmp_path.rglob("*.lock"))
