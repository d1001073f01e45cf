"""Imports go downward only, as docs/architecture.md draws it, and heavy ones stay where
they belong.
"""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")
PICTURE = BLOCKS[3]
PICTURE_OF_OPE = BLOCKS[5]
ROOMS = re.findall(r"(\w+)(?:/|\.py)", PICTURE)  # from the top down
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in (ROOT / "koffline").rglob("*.py")
}


def names_in(module: str) -> set[str]:
    """Every dotted name that a file imports, or spells as `import_module` takes it,
    also inside functions.
    """
    names = set()
    package = module if FILES[module].stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        # `import koffline.data` gives `koffline`, with all its lazy names
        if isinstance(node, ast.Import):
            names |= {
                alias.name if alias.asname else alias.name.split(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{home}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"koffline\.[\w.]*", str(node.value)
        ):
            names.add(node.value)
    return names - {"koffline.__version__"}


@functools.cache
def all_names() -> dict[str, set[str]]:
    """`names_in` of every file; only the worker that needs them reads them all."""
    return {module: names_in(module) for module in FILES}


def file_of(name: str) -> str:
    """The file of ours that holds a name: of ``koffline.evaluate`` the package
    itself.
    """
    return name if name in FILES else file_of(name.rpartition(".")[0])


def floor(file: str) -> int:
    return ROOMS.index((*file.split("."), "__init__")[1])


def test_imports_go_strictly_downward() -> None:
    ours = {
        file: [name for name in names if name.startswith("koffline")]
        for file, names in all_names().items()
    }
    graph = {file: set(map(file_of, names)) - {file} for file, names in ours.items()}
    pairs = [(file, other) for file, imported in graph.items() for other in imported]
    assert [
        (file, "imports", other) for file, other in pairs if floor(other) < floor(file)
    ] == []
    TopologicalSorter(
        graph
    ).prepare()  # raises CycleError where files import each other


def test_the_rooms_of_ope_import_downward() -> None:
    """Rooms in one line of the picture may import each other, though not in a circle
    of files.
    """
    lines = [
        re.findall(r"(\w+)(?:/|\.py)", line) for line in PICTURE_OF_OPE.split("\n")
    ]
    floors = {room: number for number, rooms in enumerate(lines) for room in rooms}
    rooms = {
        path.relative_to(ROOT / "koffline" / "ope").parts[0].removesuffix(".py")
        for path in FILES.values()
        if path.is_relative_to(ROOT / "koffline" / "ope")
    }
    assert rooms - {"__init__"} == set(floors)
    upward = [
        (file, "imports", name)
        for file, names in all_names().items()
        for name in names
        if file.startswith("koffline.ope.")
        and name.split(".")[2:3] != [""]
        and name.startswith("koffline.ope.")
        and floors[name.split(".")[2]] < floors[file.split(".")[2]]
    ]
    assert upward == []


def test_only_the_seams_know_d3rlpy_and_import_by_name() -> None:
    d3rlpy = {
        file
        for file, names in all_names().items()
        if any(name.split(".")[0] == "d3rlpy" for name in names)
    }
    assert {file for file in d3rlpy if "koffline.algos" not in file} == {
        "koffline.data"
    }
    by_name = (
        "cli",
        "cli.models",
        "data",
        "envs.make",
        "online",
        "ope.estimators.registry",
        "ope.stream_settings",
        "policy_specs",
        "train",
    )
    users = {
        file
        for file, path in FILES.items()
        if "import_module" in path.read_text(encoding="utf-8")
    }
    assert users == {"koffline", *(f"koffline.{file}" for file in by_name)}


WORLD = (
    "import gymnasium; gymnasium.make('koffline.envs:koffline/PuddleWorld-v0').reset()"
)


@pytest.mark.parametrize("code", ["import koffline", WORLD])
def test_import_is_silent_and_light(code) -> None:
    code += (
        "; import sys; print({'torch', 'd3rlpy', 'matplotlib', 'minari', 'pygame'} &"
        " set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_every_public_name_is_there() -> None:
    import koffline

    for name in koffline.__all__:
        assert getattr(koffline, name) is not None
    assert set(koffline.__all__) <= set(dir(koffline))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = koffline.nonsense


@pytest.mark.parametrize(
    ("room", "other"),
    [
        ("koffline.ope.thresholds", "koffline"),
        ("koffline.ope.importance", "koffline.ope.intervals"),
        ("koffline.ope.importance", "koffline.ope.networks"),
        ("koffline.ope.networks", "koffline.ope.importance"),
    ],
)
def test_rooms_of_estimation_stay_apart(room, other) -> None:
    """Thresholds are a leaf that all may read; importance sampling needs no engine."""
    files = [file for file in FILES if f"{file}.".startswith(f"{room}.")]
    imports = [
        (file, name)
        for file in files
        for name in all_names()[file]
        if f"{name}.".startswith(f"{other}.")
    ]
    assert files
    assert imports == []
