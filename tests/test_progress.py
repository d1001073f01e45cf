"""What is heard of a long run where stderr is no terminal."""

import time

import pytest

from koffline import progress
from tests.refusals import run_cli


def test_lines_come_early_and_then_at_intervals(monkeypatch, capsys):
    """What is over at once says nothing."""
    with progress.progress_bar("short", None, True) as tell:
        tell(1, 2)
    monkeypatch.setattr(progress, "_FIRST_LINE", 0.05)
    monkeypatch.setattr(progress, "_BETWEEN_LINES", 0.1)
    with progress.progress_bar("evaluating uniform", None, True) as tell:
        for step, wait in ((100, 0.06), (200, 0.0), (300, 0.11), (400, 0.0)):
            time.sleep(wait)
            tell(step, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "evaluating uniform: step 100 of 1",
        "evaluating uniform: step 300 of 1",
    ]


@pytest.mark.parametrize("words", [(), ("--quiet",)])
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            (
                "train configs/dqn.yaml --set train.n_steps=400 --set"
                " train.n_steps_per_epoch=200"
            ),
            "training dqn",
        ),
        (
            (
                "online configs/online/inverted_pendulum.yaml --set env=CartPole-v1"
                " --set steps=2000 --seeds 1"
            ),
            "CartPole-v1",
        ),
        (
            "build rollouts --env CartPole-v1 --policy uniform --episodes 300",
            "playing CartPole-v1",
        ),
        (
            "build control --env CartPole-v1 --kind random --n 4000",
            "playing CartPole-v1",
        ),
    ],
)
def test_long_commands_are_heard_of(command, line, words, monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "_FIRST_LINE", 0.01)
    monkeypatch.setattr(progress, "_BETWEEN_LINES", 0.05)
    out = "--out", str(tmp_path / ("out.npz" if command.startswith("build") else "out"))
    done = run_cli(*command.split(), *out, *words)
    assert done.exit_code == 0, done.output
    lines = [text for text in done.stderr.splitlines() if text.startswith(f"{line}")]
    assert bool(lines) == (words == ())
    assert not [text for text in lines if " s" not in text]
