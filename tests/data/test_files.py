"""Whole or not at all: nothing ever stands under the final name but a finished file;
litter goes.
"""

import errno
import os

import pytest

from koffline.errors import DataError
from koffline.store import files
from koffline.store.files import (
    atomic_file,
    atomic_folder,
    remove_abandoned,
    temporary_beside,
)
from tests.interrupts import ended_process


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_name_taken_meanwhile_is_not_replaced(tmp_path):
    with atomic_file(tmp_path / "free", force=False) as temporary:
        temporary.write_text("mine")
    assert (tmp_path / "free").read_text() == "mine"
    target = tmp_path / "taken"

    def lose_the_race():
        with atomic_file(target, force=False) as temporary:
            temporary.write_text("mine")
            target.write_text("theirs")

    with pytest.raises(DataError, match="exists already"):
        lose_the_race()
    assert target.read_text() == "theirs"
    assert names(tmp_path) == ["free", "taken"]


def test_the_old_folder_returns_if_the_new_one_cannot_take_its_place(
    tmp_path, monkeypatch
):
    target = tmp_path / "set"
    target.mkdir()
    (target / "old").touch()
    rename = os.rename
    calls = []

    def second_fails(source, destination):
        calls.append(source)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", second_fails)
    with (
        pytest.raises(DataError, match="Input/output error"),
        atomic_folder(target, force=True, own_files=("old",)) as temporary,
    ):
        (temporary / "new").touch()
    assert names(tmp_path) == ["set"]
    assert (target / "old").exists()


def test_only_what_is_ours_and_abandoned_goes(tmp_path):
    target = tmp_path / "a"
    mine = temporary_beside(target)
    gone = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{ended_process()}-")
    elsewhere = tmp_path / gone.name.replace(files._this_place(), "00000000")
    of_another = tmp_path / gone.name.replace(".a.", ".a.b.")
    for path in (
        mine,
        gone,
        elsewhere,
        of_another,
        tmp_path / ".a.user.tmp",
        tmp_path / "a.tmp",
    ):
        path.touch()
    remove_abandoned(target)
    assert gone.name not in names(tmp_path)
    assert len(names(tmp_path)) == 5


def test_a_folder_that_was_set_aside_gets_its_name_back(tmp_path):
    target = tmp_path / "results"
    aside = temporary_beside(target, files._RETIRED)
    aside = aside.with_name(
        aside.name.replace(f"-{os.getpid()}-", f"-{ended_process()}-")
    )
    aside.mkdir()
    (aside / "estimate.json").write_text("{}")
    remove_abandoned(target)
    assert names(tmp_path) == ["results"]
    assert (target / "estimate.json").read_text() == "{}"
