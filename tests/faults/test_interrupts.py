"""Ctrl-C at any moment of a long command: the line says what is there, and its remedy
works.
"""

import re
import shlex

import pytest

from koffline.data.sources import write_transitions
from tests.train.small_runs import make_log

HIT = """
import os, signal
place, name = {!r}.split()
module = __import__(place, fromlist=["_"])
owner, _, name = name.rpartition(".")
owner = getattr(module, owner) if owner else module
whole = getattr(owner, name)
def hit(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return whole(*arguments, **options)
setattr(owner, name, hit)
"""
TRAIN = "train train.yaml --out {out} --quiet"
ONLINE = (
    "online --set env=Pendulum-v1 --set steps=200 --set critic=td0 --seeds 1 --out"
    " {out} --quiet"
)
SWEEP = "sweep train.yaml --seeds 1 --metric td_error --out {out} --quiet"
BUILD = (
    "build rollouts --env CartPole-v1 --policy uniform --episodes 4 --out {out}.npz"
    " --quiet"
)
MOMENTS = {  # the command, where the interrupt comes, what is said
    "train, before the run": (
        TRAIN,
        "koffline.train.prepare _record",
        "no epoch had ended; begin again",
    ),
    "train, first epoch": (
        TRAIN,
        "koffline.train.run _train_epoch",
        "no epoch had ended; begin again",
    ),
    "train, last epoch": (
        TRAIN,
        "koffline.train.run now",
        "the epochs that had ended are in my run; go on",
    ),
    "online, before the run": (
        ONLINE,
        "koffline.online.run start_run",
        "nothing was finished",
    ),
    "online, running": (
        ONLINE,
        "koffline.online.run _train_all",
        "go on with koffline online --resume",
    ),
    "sweep, before the runs": (
        SWEEP,
        "koffline.train.sweep _name_runs",
        "nothing was finished",
    ),
    "build, before an episode": (
        BUILD,
        "koffline.builders.rollouts RolloutPlayer.play",
        "no episodes were",
    ),
}


@pytest.mark.parametrize(("words", "moment", "said"), MOMENTS.values(), ids=MOMENTS)
def test_an_interrupt_names_what_is_there(
    words, moment, said, tmp_path, forked_commands
):
    write_transitions(make_log(), tmp_path / "log.hdf5")
    (tmp_path / "train.yaml").write_text(
        "data: {source: log.hdf5}\nalgo: {type: kloss_dqn, params: {batch_size: 8}}\n"
        "train: {n_steps: 4, n_steps_per_epoch: 2}\nevaluators: {td_error: {}}\n"
    )
    line = words.format(out="'my run'")
    commands = forked_commands({"LC_ALL": "C.UTF-8"})
    done = commands.run(shlex.split(line), tmp_path, before=HIT.format(moment))
    message = done.stderr.decode()
    assert (done.returncode, done.stdout) == (130, b""), message
    assert message.startswith(f"interrupted; {said}")
    assert message.count("\n") == 1
    for name in re.findall(r" in (my run\S*?):", message):
        assert (tmp_path / name).exists()
    again = f"{line} --resume" if words is TRAIN else line
    if "go on with koffline " in message:
        again = message.strip().partition("go on with koffline ")[2] + " --quiet"
    ended = commands.run(shlex.split(again), tmp_path)
    assert ended.returncode == 0, ended.stderr
