"""Imports go downward only (docs/architecture.md), and heavy ones stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "koffline"
# From the ground up; each room imports only rooms below its own.
FLOORS = (
    "errors", "progress", "untrusted", "store", "jobs", "data",
    "kernels", "kernel_loss", "objectives", "config",
    "replicas", "batches", "steps", "checkpoints", "fitting",
    "spread", "envs", "policies", "algos", "policy_specs", "builders",
    "online", "ope", "report", "train", "experiments", "cli", "__init__", "__main__",
)  # fmt: skip
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def imported_modules(path: Path) -> set[str]:
    """Every module that a file names in an import, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "koffline":
                found |= {f"koffline.{alias.name}" for alias in node.names}
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_imports_go_strictly_downward() -> None:
    wrong = []
    for path in FILES:
        here = room(path)
        assert here in FLOORS, f"{here} has no floor; add it to FLOORS and to docs/architecture.md"
        for module in imported_modules(path):
            there = module.split(".")[1:2]
            if module.split(".")[0] != "koffline" or not there or there[0] in (here, "__version__"):
                continue
            if there[0] in FLOORS and FLOORS.index(there[0]) >= FLOORS.index(here):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert wrong == []


def test_only_the_seams_know_d3rlpy() -> None:
    seams = [PACKAGE / "data" / name for name in ("replay.py", "__init__.py")]
    others = [path for path in FILES if room(path) != "algos" and path not in seams]
    assert [path for path in others if any(m.split(".")[0] == "d3rlpy" for m in imported_modules(path))] == []


def test_import_is_silent_and_light() -> None:
    code = "import sys, koffline; print({'torch', 'd3rlpy', 'matplotlib', 'minari'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert done.stderr == ""


def test_every_public_name_is_there() -> None:
    import koffline

    for name in koffline.__all__:
        assert getattr(koffline, name) is not None
    assert set(koffline.__all__) <= set(dir(koffline))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = koffline.nonsense
