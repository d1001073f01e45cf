"""Functions of the manual say what each of their parameters is, and what they raise."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import koffline

ROOT = Path(__file__).parents[1]
# As mkdocstrings takes them: modules, classes and functions.
SHOWN = sorted(
    {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(
            r"^::: (koffline\.[\w.]+)", page.read_text(encoding="utf-8"), re.M
        )
    }
)
FEWEST = 3  # parameters: of fewer the signature often says all


@dataclass(frozen=True)
class Documented:
    """A public function and the text that has to explain it: its docstring, or its
    class's for a constructor.
    """

    name: str
    node: ast.FunctionDef
    text: str

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that a caller passes."""
        arguments = self.node.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names = [argument.arg for argument in listed]
        return [name for name in names if name not in ("self", "cls")]

    @property
    def errors(self) -> set[str]:
        """Names of the errors that the function itself raises."""
        names = set()
        for node in ast.walk(self.node):
            if not isinstance(node, ast.Raise):
                continue
            match node.exc:
                case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
                    names.add(name)
        return {name for name in names if name.endswith("Error")}


def file_and_object(name: str) -> tuple[Path, str]:
    """The file that holds a dotted name, and the name inside it, empty for all of
    it.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        inside = ".".join(parts[length:])
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py"), inside
        if (path / "__init__.py").is_file():
            return path / "__init__.py", inside
    raise AssertionError(f"no file holds {name}")


def functions_of(
    body: list[ast.stmt], above: str, class_text: str
) -> Iterator[Documented]:
    """Public functions and methods below nodes of a file. above: the dotted name so
    far. class_text: the docstring of the class around.
    """
    for node in body:
        if isinstance(node, ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if node.name == "__init__":
                text = f"{class_text}\n{text}"
            elif node.name.startswith("_"):
                continue
            yield Documented(f"{above}.{node.name}", node, text)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node) or ""
            yield from functions_of(node.body, f"{above}.{node.name}", text)


def functions_shown(name: str) -> list[Documented]:
    """The functions that the manual shows under a name."""
    path, inside = file_and_object(name)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = tree.body
    module = name
    if inside:
        module = name.removesuffix(f".{inside}")
        kinds = (ast.FunctionDef, ast.ClassDef)
        body = [
            node for node in body if isinstance(node, kinds) and node.name == inside
        ]
    return [
        function
        for function in functions_of(body, module, "")
        if not is_overload(function.node)
    ]


def is_overload(node: ast.FunctionDef) -> bool:
    """Whether a definition is one of several signatures, without a body."""
    return any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list)


def test_every_public_name_is_in_the_manual() -> None:
    shown = {name.rpartition(".")[2] for name in SHOWN}
    assert sorted(set(koffline.__all__) - shown) == []


@pytest.mark.parametrize("name", SHOWN)
def test_parameters_are_documented(name: str) -> None:
    functions = functions_shown(name)
    undocumented = {}
    for function in functions:
        parameters = function.parameters
        if len(parameters) < FEWEST:
            continue
        silent = [
            parameter
            for parameter in parameters
            if not re.search(rf"\b{parameter}\b", function.text)
        ]
        if silent:
            undocumented[function.name] = silent
    assert undocumented == {}


@pytest.mark.parametrize("name", SHOWN)
def test_errors_are_documented(name: str) -> None:
    silent = {}
    for function in functions_shown(name):
        errors = [error for error in function.errors if error not in function.text]
        if errors:
            silent[function.name] = sorted(errors)
    assert silent == {}
