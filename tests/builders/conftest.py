"""``koffline build`` in an empty folder, where the odd environments are known."""

import pytest

from tests.builders import environments  # noqa: F401 (it registers them)
from tests.refusals import run_cli


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_cli("build", *arguments)
