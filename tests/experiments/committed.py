"""The results of the full runs, as they lie in docs/reproduce."""

from functools import cache
from pathlib import Path

import h5py
import numpy as np

from koffline.experiments.results import Curves, Results, read_results

FOLDER = Path(__file__).parents[2] / "docs" / "reproduce"


@cache
def committed(name: str) -> tuple[Results, Curves]:
    """Results and curves; whoever changes them changes a copy."""
    curves: dict[str, dict[str, np.ndarray]] = {}
    path = FOLDER / f"{name}.curves.h5"
    if path.exists():
        with h5py.File(path) as file:
            curves = {
                f"{world}/{method}": {key: part[()] for key, part in group.items()}
                for world, methods in file.items()
                for method, group in methods.items()
            }
    return read_results(FOLDER / f"{name}.json"), curves
