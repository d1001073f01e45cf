"""What is installed, and how: extras and their remedies, the wheel's files, the image."""

import json
import re
import sys
from pathlib import Path

import click
import pytest
import yaml

import koffline
from koffline.bundled import PACKAGE
from koffline.cli import cli
from koffline.data import remote
from koffline.errors import ConfigError, DataError, PolicyError, install_command
from koffline.jobs.workers import RayCluster
from koffline.policies.files import load_onnx
from tests.refusals import one_line, succeed

ROOT = Path(__file__).parents[1]
tomllib = pytest.importorskip("tomllib")  # Python 3.11
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_every_extra_that_is_named_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = set()
    for path in [*pages, *(ROOT / "koffline").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"install_command\(['\"](\w+)['\"]\)", text))
        named |= set(re.findall(r"koffline\[(\w+)\]", text))
    named |= set(remote._EXTRAS.values())
    assert {"onnx", "ray", "video", "s3", "gcs"} <= named
    assert named <= set(EXTRAS)
    # shells would read the brackets of a bare one
    for path in pages:
        assert not re.search(r"install koffline\[", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "extra", "kind", "use"),
    [
        ("ray", "ray", ConfigError, lambda: RayCluster("local", 1)),
        ("onnxruntime", "onnx", PolicyError, lambda: load_onnx(Path("policy.onnx"))),
        ("s3fs", "s3", DataError, lambda: remote.exists("s3://bucket/log.parquet")),
        ("gcsfs", "gcs", DataError, lambda: remote.exists("gs://bucket/log.parquet")),
    ],
)
def test_a_missing_package_is_one_line_with_its_command(
    module, extra, kind, use, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with one_line(kind, install_command(extra)):
        use()
    assert any(module.split("-")[0] in need for need in EXTRAS[extra])


def test_a_scheme_that_nobody_knows_has_no_extra() -> None:
    with one_line(DataError, "cannot be read"):
        remote.exists("nowhere://bucket/log.parquet")


def test_the_wheel_holds_what_the_demo_reads() -> None:
    held = PROJECT["tool"]["setuptools"]["package-data"]["koffline"]
    for name in ("cartpole.hdf5", "cartpole_policy.npz", "cartpole_truth.json"):
        assert f"datasets/{name}" in held
        assert (PACKAGE / "datasets" / name).is_file()


def test_the_image_is_made_of_files_that_are_there_and_runs_the_demo() -> None:
    for sources in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, flags=re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[0])
    words = json.loads(re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)[0])
    assert entry == ["koffline"]
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    assert command.name == "demo"


@pytest.mark.slow
def test_the_demo_says_what_the_readme_says(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "The policy is worth 42.7" in succeed("demo")
    assert (tmp_path / "out" / "demo" / "report.html").is_file()


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == koffline.__version__ == PROJECT["project"]["version"]
    assert citation["preferred-citation"]["year"] == 2019
