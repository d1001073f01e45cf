"""The manual: its notebooks run, its reference is whole, its tables say what results
say, and it builds.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

import koffline
from koffline.cli import cli
from scripts import evidence_tables, site_glossary, site_reference
from scripts.bench import closed_loop, control_report, leaderboard_report
from tests.forked_commands import ForkedCommands

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAPER = (DOCS / "paper_to_code.md").read_text(encoding="utf-8")
TABLE = re.findall(
    r"^\| .* \| `([a-z]+:\w+)` \| `(koffline[\w.]+)` \|$", PAPER, flags=re.MULTILINE
)


# The same programs, less of everything.
QUICKER = {
    "steps=500": "steps=60",
    "steps=300": "steps=60",
    "steps=200": "steps=40",
    "steps_per_epoch=300": "steps_per_epoch=60",
    "resampled_replicas=5": "resampled_replicas=2, full_replicas=1",
    "resampled_replicas=4": "resampled_replicas=2, full_replicas=1",
    "20_000": "500",
    '{"candidates": portfolio}': (
        '{"candidates": ["clone_mode"], "training_steps": 60, "choosing_steps": 60,'
        ' "certifying_steps": 60}'
    ),
    'cartpole.hdf5")': 'cartpole.hdf5").select_episodes(range(40))',
    'replay.hdf5")': 'replay.hdf5").select_episodes(range(40))',
    'feature_source="random"': (
        'feature_source="random", steps=60, resampled_replicas=2'
    ),
    "reproduce(run)": (
        "import pytest\nfrom tests.experiments import shrunk\n"
        "shrunk.shrink_experiments(pytest.MonkeyPatch())\nshrunk.blank_figures(pytest.MonkeyPatch())\n"
        "reproduce(run)"
    ),
}


SAID = {
    "messy_csv": "proposal: estimate",
    "d3rlpy_day": "DiscreteCQL True",
    "paper_hour": "by chance, RG",
}


AS_PROGRAM = f"""
import sys, warnings
import matplotlib
matplotlib.use("agg")
sys.path.insert(0, {str(ROOT)!r})
warnings.simplefilter("ignore")
with open("notebook.py", encoding="utf-8") as file:
    exec(compile(file.read(), "notebook.py", "exec"))
raise SystemExit
"""


@pytest.mark.parametrize("name", SAID)
def test_notebooks_run_as_programs(
    name: str,
    tmp_path: Path,
    forked_commands: Callable[[Mapping[str, str]], ForkedCommands],
) -> None:
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")
    text = (DOCS / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    for written, here in QUICKER.items():
        text = text.replace(written, here)
    (tmp_path / "notebook.py").write_text(text, encoding="utf-8")
    commands = forked_commands({"LC_ALL": "C.UTF-8"})
    done = commands.run([], tmp_path, before=AS_PROGRAM)
    assert done.returncode == 0, done.stderr
    assert SAID[name] in done.stdout.decode()


def test_every_setting_has_a_meaning() -> None:
    # of those who have no site
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    for title, place in site_reference.SETTINGS:
        assert f"## {title}\n" in page
        module, _, name = place.partition(":")
        rows = list(site_reference.fields(getattr(import_module(module), name)))
        assert rows, place
        assert [row for row in rows if not all(row)] == [], place


def test_every_command_and_option_is_on_the_page() -> None:
    page = site_reference.commands_page()
    for name, command, _ in site_reference.commands():
        assert f"## {name}\n" in page
        options = [
            parameter
            for parameter in command.params
            if isinstance(parameter, click.Option) and not parameter.hidden
        ]
        assert all(option.opts[0] in page for option in options)
    assert set(cli.list_commands(click.Context(cli))) <= set(
        re.findall(r"(?m)^## koffline ([\w-]+)$", page)
    )


def test_every_public_name_is_on_the_page_of_python() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = [
        line.removeprefix("::: ").strip()
        for line in page.splitlines()
        if line.startswith(":::")
    ]
    assert set(koffline.__all__) <= {name.rpartition(".")[2] for name in shown}
    for name in shown:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last), name


@pytest.mark.parametrize(("label", "symbol"), TABLE)
def test_symbols_of_the_paper_carry_the_label(label: str, symbol: str) -> None:
    module, _, name = symbol.rpartition(".")
    symbol_object = getattr(import_module(module), name)
    assert f"(Feng et al. 2019, {label})" in (symbol_object.__doc__ or "")


def test_the_choice_of_estimators_rests_on_the_leaderboard() -> None:
    """Who writes the leaderboard anew reads this page again."""
    page = (DOCS / "trust.md").read_text(encoding="utf-8")
    board = (DOCS / "leaderboard.md").read_text(encoding="utf-8")
    whole = board[board.index("## All questions") : board.index("## By verdict")]
    rows = [
        line.strip("| ").split(" | ")
        for line in whole.splitlines()
        if line.startswith("| `")
    ]
    questions = next(row[2].split()[-1] for row in rows if row[0] == "`auto`")
    whole = {
        row[0].strip("`"): row
        for row in rows
        if row[2] == f"{questions} of {questions}"
    }
    order = sorted(whole, key=lambda name: float(whole[name][3]))
    assert order[:2] == ["auto", "dualdice"]
    assert float(whole["fqe"][3]) < float(whole["kloss"][3])
    assert f"truth in {whole['auto'][7]} questions" in page
    assert f"of {len(rows)} methods" in page
    assert f"{questions} questions about logs" in page
    # machine paths
    assert '": "/' not in (DOCS / "results" / "leaderboard.json").read_text(
        encoding="utf-8"
    )


def test_intervals_of_groups_hold_together_as_often_as_the_page_says() -> None:
    results = json.loads((DOCS / "results" / "groups.json").read_text())
    page = " ".join((DOCS / "evaluate.md").read_text(encoding="utf-8").split())
    for world in results.values():
        low, high = world["starts"]
        assert f"groups of {low} to {high} starts all" in page
        assert f"in {world['held']} of {world['draws']}" in page
        assert world["draws"] >= 60
        assert (
            world["held"] / world["draws"]
            >= 0.95 - 2 * (0.95 * 0.05 / world["draws"]) ** 0.5
        )


def test_files_in_the_layout_exist_and_the_table_of_the_paper_is_there() -> None:
    assert len(TABLE) >= 15
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(
        r"(?<![\w/])([a-z_]+(?:/[a-z_]+)*(?:\.py|/))(?=[\s,`])", page
    ):
        folders = (ROOT / "koffline", ROOT / "koffline" / "ope", ROOT)
        assert any((folder / name).exists() for folder in folders), name


def test_the_site_builds_without_warnings_and_without_the_net(tmp_path: Path) -> None:
    for package in (
        "mkdocs",
        "material",
        "mkdocstrings",
        "mkdocs_gen_files",
        "mkdocs_jupyter",
    ):
        pytest.importorskip(package)
    variables = {
        **os.environ,
        "KOFFLINE_RUN_NOTEBOOKS": "false",  # another test runs them
        "NO_MKDOCS_2_WARNING": "1",
        "DISABLE_MKDOCS_2_WARNING": "true",
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = [
        page for page in (tmp_path / "site").rglob("*.html") if page.name != "404.html"
    ]
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*\ssrc=\"(https?:[^\"]*)|<link[^>]*href=\"(https?:[^\"]*)",
            text,
        )
        assert loaded == [], page
        links = re.findall(
            r"(?:href|src)=\"(?!https?:|data:|mailto:|#|javascript:)([^\"#?]+)", text
        )
        assert [link for link in links if not (page.parent / link).exists()] == [], page
    index = json.loads(
        (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    )
    assert any("target_rate" in entry["text"] for entry in index["docs"])


def test_tables_of_evidence_say_what_results_say() -> None:
    shown = []
    for path in evidence_tables.pages():
        page = path.read_text(encoding="utf-8")
        assert evidence_tables.with_tables(page) == page, path.name
        shown += evidence_tables.marks(page)
    assert sorted(shown) == sorted(evidence_tables.TABLES)


def leaderboard_page() -> str:
    path = DOCS / "results" / "leaderboard.json"
    return leaderboard_report.render_page(json.loads(path.read_text(encoding="utf-8")))


def closed_loop_page() -> str:
    path = DOCS / "results" / "closed_loop.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    return closed_loop.page(content["logs"], content["candidates"])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("control", lambda: control_report.page(DOCS / "results")),
        ("leaderboard", leaderboard_page),
        ("closed_loop", closed_loop_page),
    ],
)
def test_pages_of_benchmarks_say_what_results_say(
    name: str, make: Callable[[], str]
) -> None:
    assert make() == (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_every_term_of_the_glossary_is_two_sentences_at_most() -> None:
    terms = site_glossary.definitions()
    assert set(site_glossary.SPELLINGS) <= set(terms)
    assert len(terms) > 20
    long = [
        term
        for term, text in terms.items()
        if len(re.findall(r"[.?](?= |$)", text)) > 2
    ]
    assert long == []


def test_pages_explain_the_words_that_they_use() -> None:
    def shown(page: str, text: str) -> str:
        where = SimpleNamespace(file=SimpleNamespace(src_uri=page))
        return site_glossary.on_page_markdown(text, page=where)

    explained = shown("trust.md", "The behavior policy wrote the log.")
    assert "*[behavior policy]: The policy that chose the actions" in explained
    assert "*[LSTD]" not in explained
    assert shown("glossary.md", "The behavior policy.") == "The behavior policy."
