"""SECURITY.md states the bounds that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from koffline.data import minari, spaces
from koffline.untrusted import hdf5, limits, yaml_files

PAGE = " ".join((Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    "words",
    [
        f"`{limits.MAX_BYTES}` bytes",
        {4: "by default a quarter of the memory"}[limits.SHARE],
        f"at a time at most {hdf5.LARGEST_PIECE >> 20} MB",
        f"more than {limits.EXPANSION:,} times the bytes of the file",
        f"JSON longer than {limits.TEXT_BYTES >> 20} MB",
        f"YAML longer than {yaml_files.LARGEST_TEXT >> 20} MB or nested deeper than {yaml_files._DEEPEST}",
        f"more than {yaml_files._MOST_NODES:,} values",
        f"groups nested deeper than {hdf5._DEEPEST}",
        f"spaces of more than {minari.LARGEST_BOX:,} numbers",
        f"at most {spaces.LARGEST_SPACE:,} actions",
    ],
)
def test_the_page_states_the_bounds_of_the_code(words):
    assert words in PAGE
