"""Two files or two classes of one name mean one thing; where a name stands twice, the
reason is here.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "koffline"
FILES = sorted(ROOT.rglob("*.py"))
# Modules and packages of one name, by what they share.
SHARED_MODULES = {
    "base": "the base classes of a room",
    "config": "settings: of estimators, of online runs, of training",
    "data": "the room, and the command of its name",
    "diagnosis": "the procedure, and its page",
    "files": "files: of policies; written and read by all rooms",
    "importance": "importance ratios of episodes, and the estimators that use them",
    "improvement": "the room, and its page",
    "labels": "columns of labels, and the test that finds them",
    "log": "the log on disk, and the room that holds it for an evaluation",
    "networks": "the networks of online runs, and those of estimators",
    "options": "options: of algorithms, of commands",
    "paths": "sub-paths of episodes, from a log or from play",
    "policies": "the room, and algorithms of d3rlpy as such policies",
    "run": "a training run: offline, online",
}


def homonyms_of_modules() -> dict[str, list[str]]:
    """Paths below koffline/ of modules and packages by name, where a name stands
    twice.
    """
    paths = defaultdict(list)
    for path in FILES:
        name = path.stem
        if name == "__init__":
            name = path.parent.name
        paths[name].append(path.relative_to(ROOT).as_posix())
    return {name: places for name, places in paths.items() if len(places) > 1}


def homonyms_of_classes() -> dict[str, list[str]]:
    """Paths below koffline/ of classes by name, without underscores before it, where a
    name stands twice.
    """
    paths = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                name = node.name.lstrip("_")
                paths[name].append(path.relative_to(ROOT).as_posix())
    return {name: places for name, places in paths.items() if len(places) > 1}


# Classes of one name, by what they share.
SHARED_CLASSES: dict[str, str] = {}


@pytest.mark.parametrize(
    ("find", "reasons"),
    [
        pytest.param(homonyms_of_modules, SHARED_MODULES, id="modules"),
        pytest.param(homonyms_of_classes, SHARED_CLASSES, id="classes"),
    ],
)
def test_a_name_that_stands_twice_has_a_reason(find, reasons) -> None:
    homonyms = find()
    unexplained = {
        name: places for name, places in homonyms.items() if name not in reasons
    }
    assert unexplained == {}
    assert sorted(reasons) == sorted(homonyms), "a reason without its names"
