"""Imports go downward only (the architecture in the README), and heavy ones stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "koffline"
FLOORS = {
    "errors": 0,
    "untrusted": 0,
    "kernels": 0,
    "bellman": 0,
    "kernel_loss": 0,
    "objectives": 0,
    "dual_objectives": 0,
    "data": 1,
    "envs": 1,
    "jobs": 1,  # passes over logs are jobs
    "policies": 1,
    "spread": 1,
    "batches": 2,
    "checkpoints": 2,
    "fit_records": 2,
    "stacked_adam": 2,
    "stacked_module": 2,
    "stacked_tangents": 2,
    "dual_steps": 2,
    "stacked_products": 2,
    "training": 2,
    "replicas": 2,
    "steps": 2,
    "fitting": 2,
    "progress": 2,
    "run_folders": 1,
    "run_record": 1,  # of data too
    "targets": 1,
    "solvers": 2,
    "config": 2,  # settings are read by floor 3 and made by floor 4
    "builders": 3,
    "ope": 3,
    "algos": 3,
    "online": 3,
    "runs": 4,
    "train": 4,
    "report": 4,
    "experiments": 4,
    "cli": 4,
    "__main__": 4,
    "__init__": 4,
}
# What may be reached upward, and why.
EXCEPTIONS = {
    ("policies", "algos"): "loading a .d3 file needs d3rlpy, which only algos and data/replay.py know",
    ("online", "runs"): "films of what a run learned are made where all films are made, after the run",
}
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    here = room(path)
    assert here in FLOORS, f"{here} has no floor; add it to FLOORS and to the README"
    for module in imported_modules(path):
        parts = module.split(".")
        if parts[0] != "koffline" or len(parts) == 1 or here == "__init__" or parts[1] not in FLOORS:
            continue
        allowed = FLOORS[parts[1]] <= FLOORS[here] or (here, parts[1]) in EXCEPTIONS
        # koffline.ope's command is floor 4 by nature: it may call the report.
        allowed |= path.name == "command.py" and parts[1] == "report"
        assert allowed, f"{path.name} (floor {FLOORS[here]}) imports {module} (floor {FLOORS[parts[1]]})"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_seams_know_d3rlpy(path: Path) -> None:
    if room(path) == "algos" or path.name in ("replay.py", "d3rlpy_import.py"):
        return
    assert not {m for m in imported_modules(path) if m.split(".")[0] == "d3rlpy"}


def test_import_is_silent_and_light() -> None:
    code = (
        "import sys, koffline; print(sorted({'torch', 'd3rlpy', 'matplotlib', 'minari'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_every_public_name_is_there() -> None:
    import koffline

    for name in koffline.__all__:
        assert getattr(koffline, name) is not None
    assert set(koffline.__all__) <= set(dir(koffline))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = koffline.nonsense
