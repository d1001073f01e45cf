"""What pages name is there: scripts, commands, their options, make targets, files,
links, dotted names.
"""

import ast
import functools
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import gymnasium
import pytest

from koffline.config import EvaluationSettings
from koffline.online.config import OnlineConfig
from scripts import site_reference

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(
        [
            *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / "docs" / "notebooks").glob("*.py"),
        ]
    )
}
# Options of other people's programs that pages name.
FOREIGN_OPTIONS = {
    "--extra",  # uv
    "--extra-index-url",  # pip
    "--rm",  # docker
    "--python-version",
    "--resolution",
}
COMMANDS = {name: command for name, command, _ in site_reference.commands()}
SETTINGS = dict.fromkeys(
    ("koffline evaluate", "koffline select", "koffline diagnose"), EvaluationSettings
)
SETTINGS["koffline online"] = OnlineConfig
TOP_FOLDERS = "configs|datasets|docs|koffline|scripts|tests"


def code_of(text: str) -> list[str]:
    """Lines and spans of a page that are code: what a reader may type."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\s*\\\n\s*", " ", "\n".join(fenced)).splitlines()
    indented = re.findall(r"^(?:    |# *    )(\S.*)$", rest, flags=re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    return [*lines, *indented, *spans]


def words_of(command: str) -> list[str]:
    """Words as a shell sees them, up to a comment, another program or the end of the
    redirected part.
    """
    try:
        words = shlex.split(command, comments=True)
    except ValueError:  # a quotation in a sentence
        words = command.split()
    ends = [
        number
        for number, word in enumerate(words)
        if word in ("|", "&&", ";", ">", "2>")
    ]
    return words[: min(ends, default=len(words))]


CODE = [(page, code) for page, text in PAGES.items() for code in code_of(text)]
LINKS = [
    (page, link)
    for page, text in PAGES.items()
    for link in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    )
    if not re.match(r"[a-z]+:", link)
]


def options_in(words: list[str]) -> list[str]:
    return [match[0] for word in words if (match := re.match(r"--[a-z][a-z-]*", word))]


def script_calls() -> list[tuple[str, str, tuple[str, ...]]]:
    """Page, script and options of every command that runs one of the scripts."""
    calls = []
    for page, code in CODE:
        for match in re.finditer(
            r"python3? (?:-m (scripts[\w.]+)|(scripts/[\w/]+\.py))(.*)", code
        ):
            script = match[2]
            if script is None:
                module = match[1].rstrip(".").replace(".", "/")
                script = f"{module}.py"
                if (ROOT / module / "__main__.py").is_file():
                    script = f"{module}/__main__.py"
            calls.append((page, script, tuple(options_in(words_of(match[3])))))
    return calls


@functools.cache
def options_of(script: Path) -> frozenset[str]:
    """Options that a program adds to its parser, itself or in one of our scripts that
    it imports.
    """
    options = {"--help"}
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            options |= (
                {node.value} if re.fullmatch(r"--[a-z][a-z-]*", node.value) else set()
            )
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "scripts"
        ):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in (str(node.module), *inside):
                path = ROOT / (name.replace(".", "/") + ".py")
                if path.is_file():
                    options |= options_of(path)
    return frozenset(options)


def options_of_d3rlpy() -> frozenset[str]:
    """Options of d3rlpy's commands, which `koffline d3rlpy` hands on."""
    package = find_spec("d3rlpy")
    assert package is not None
    assert package.origin is not None
    return options_of(Path(package.origin).with_name("cli.py"))


CALLS = script_calls()


def test_scripts_of_pages_are_there_with_their_options() -> None:
    assert len(CALLS) > 15
    missing = [
        (page, script) for page, script, _ in CALLS if not (ROOT / script).is_file()
    ]
    assert missing == []
    unknown = [
        (page, script, option)
        for page, script, options in CALLS
        for option in options
        if option not in options_of(ROOT / script)
    ]
    assert unknown == []


def options_of_command(command: click.Command) -> set[str]:
    both = [
        (*parameter.opts, *parameter.secondary_opts) for parameter in command.params
    ]
    return {option for options in both for option in options} | {"--help", "--version"}


def koffline_calls() -> list[tuple[str, str, list[str]]]:
    """Page, full name of the command and further words of every call of koffline."""
    calls = []
    for page, code in CODE:
        words = words_of(code.removeprefix("python -m "))
        if words[:1] != ["koffline"] or len(words) == 1:
            continue
        name = "koffline"
        while len(words) > 1 and f"{name} {words[1]}" in COMMANDS:
            name = f"{name} {words[1]}"
            words = words[1:]
        calls.append((page, name, words[1:]))
    return calls


def test_commands_of_pages_are_there_with_their_options() -> None:
    calls = koffline_calls()
    assert len(calls) > 60
    wrong: list[Any] = []
    for page, name, words in calls:
        command = COMMANDS[name]
        known = options_of_command(command)
        if name == "koffline d3rlpy":
            known |= options_of_d3rlpy()
        wrong += [
            (page, name, option) for option in options_in(words) if option not in known
        ]
        if (
            isinstance(command, click.Group)
            and words
            and re.fullmatch("[a-z][a-z0-9-]*", words[0])
        ):
            wrong.append((page, name, words[0]))
        fields = SETTINGS[name].model_fields if name in SETTINGS else None
        keys = [word.partition("=")[0] for word in words if re.match(r"[a-z_]+=", word)]
        wrong += [
            (page, name, key)
            for key in keys
            if fields is not None and key not in fields
        ]
    assert wrong == []


def test_options_that_stand_alone_are_of_some_command() -> None:
    of_koffline = {
        option
        for command in COMMANDS.values()
        for option in options_of_command(command)
    }
    of_scripts = {
        o for path in (ROOT / "scripts").rglob("*.py") for o in options_of(path)
    }
    known = of_koffline | of_scripts | options_of_d3rlpy() | FOREIGN_OPTIONS
    alone = [
        (page, option) for page, code in CODE for option in options_in(words_of(code))
    ]
    assert len(alone) > 100
    assert sorted({pair for pair in alone if pair[1] not in known}) == []


def test_make_targets_of_pages_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    wanted = [
        (page, words[1])
        for page, code in CODE
        if (words := words_of(code))[:1] == ["make"] and words[1:]
    ]
    assert len(wanted) > 8
    assert [pair for pair in wanted if pair[1] not in targets] == []


def test_files_that_pages_name_are_there() -> None:
    named = [
        (page, name.rstrip("."))
        for page, text in PAGES.items()
        for name in re.findall(rf"(?<![\w./-])(?:{TOP_FOLDERS})/[\w./*-]+", text)
    ]
    assert len(named) > 100
    absent = {(page, name) for page, name in named if not any(ROOT.glob(name))}
    import_module("koffline.envs")  # registers the worlds, whose names look like files
    worlds = set(gymnasium.registry)
    assert sorted(pair for pair in absent if pair[1] not in worlds) == []


def anchors_of(path: Path) -> set[str]:
    """Anchors of a page's headings, as the site makes them."""
    text = PAGES[path.relative_to(ROOT).as_posix()]
    if path.parent.name == "reference":  # the site's page is made when it is built
        text = (
            site_reference.settings_page()
            if path.stem == "settings"
            else site_reference.commands_page()
        )
    headings = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```", "", text, flags=re.M | re.S),
        flags=re.MULTILINE,
    )
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain} | set(
        re.findall(r'<a id="([\w-]+)">', text)
    )


def test_links_lead_to_files_and_headings() -> None:
    assert len(LINKS) > 150
    broken = []
    for page, link in LINKS:
        name, _, anchor = link.partition("#")
        here = ROOT / page
        # a notebook is read on the site, where pages have other endings
        if here.suffix == ".py":
            name = re.sub(r"\.html$", ".md", name)
        path = (here.parent / name).resolve() if name else here
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            broken.append((page, link))
    assert broken == []


def resolves(name: str) -> bool:
    """Whether a dotted name can be imported and read, part by part."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            fields = getattr(value, "__dataclass_fields__", {}) | getattr(
                value, "model_fields", {}
            )
            if not hasattr(value, part):
                return part in fields
            value = getattr(value, part)
        return True
    return False


NAMES = sorted(
    {
        n
        for _, code in CODE
        for n in re.findall(r"(?<![\w/.:-])koffline(?:\.[A-Za-z_]\w*)+", code)
    }
)


@pytest.mark.parametrize("name", NAMES)
def test_dotted_names_resolve(name: str) -> None:
    assert resolves(name)


def test_results_and_pictures_belong_to_a_page_or_a_script() -> None:
    """A result that no page shows and no script writes is left over."""
    scripts = [
        path.read_text(encoding="utf-8") for path in (ROOT / "scripts").rglob("*.py")
    ]
    texts = [*PAGES.values(), *scripts]
    kept = [
        *(ROOT / "docs" / "results").iterdir(),
        *(ROOT / "docs" / "images").iterdir(),
    ]
    assert len(kept) > 20
    assert [
        path.name for path in kept if not any(path.name in text for text in texts)
    ] == []
