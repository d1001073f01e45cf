"""What killed processes leave, and folders that take the place of others in one step."""

import os
import subprocess
import sys

import pytest

from koffline.store import files
from koffline.store.files import atomic_folder, remove_abandoned, temporary_beside


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_only_what_is_ours_and_abandoned_goes(tmp_path):
    target = tmp_path / "a"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = temporary_beside(target)
    gone = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-")
    elsewhere = tmp_path / gone.name.replace(files._this_place(), "00000000")
    of_another = tmp_path / gone.name.replace(".a.", ".a.b.")
    for path in (mine, gone, elsewhere, of_another, tmp_path / ".a.user.tmp", tmp_path / "a.tmp"):
        path.touch()
    remove_abandoned(target)
    assert gone.name not in names(tmp_path)
    assert len(names(tmp_path)) == 5


def test_a_folder_that_was_set_aside_gets_its_name_back(tmp_path):
    target = tmp_path / "results"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    aside = temporary_beside(target, files._RETIRED)
    aside = aside.with_name(aside.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    aside.mkdir()
    (aside / "estimate.json").write_text("{}")
    remove_abandoned(target)
    assert names(tmp_path) == ["results"]
    assert (target / "estimate.json").read_text() == "{}"


def test_nothing_is_missing_between_the_old_folder_and_the_new(tmp_path, monkeypatch):
    """Killed right after the swap: the new one is there, the old one is litter."""
    target = tmp_path / "set"
    target.mkdir()
    (target / "old").touch()
    monkeypatch.setattr(files, "_discard", lambda path: 1 / 0)
    monkeypatch.setattr("koffline.store.files.shutil.rmtree", lambda *args, **kwargs: None)
    with pytest.raises(ZeroDivisionError), atomic_folder(target, True, lambda path: True) as temporary:
        (temporary / "new").touch()
    if sys.platform == "linux":
        assert names(target) == ["new"]
