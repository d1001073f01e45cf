"""Idioms that save lines and cost readers, counted for each file; the counts only fall.

    python -m scripts.style_ratchet            # what is new, and the totals
    python -m scripts.style_ratchet --update   # write the lower counts to the table

The table is ``scripts/style_ratchet.json``. A test fails where a file has more of an
idiom than the table says; a file that is not in the table has none. ``--update`` never
writes a total that is higher than before, so that code may move between files and an
idiom may not spread. CONTRIBUTING.md shows what to write instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".json")
FOLDERS = ("koffline", "datasets", "scripts", "tests")

IDIOMS = {
    "tuple display": "`a, b = x(), y()`: one assignment a line",
    "starred local": "`f(*values)` where `values` is a local: name the arguments",
    "walrus": "`:=` outside `while` and the test of an `if`: assign first",
    "conditional expression": "`a if c else b`: an `if` where it has a consequence",
    "boolean arithmetic": "a comparison as a factor or an index: an `if` or a mask",
    "vague name": "a name that does not say what the thing is",
}
VAGUE = frozenset(
    (
        "found",
        "said",
        "own",
        "told",
        "asked",
        "more",
        "given",
        "some",
        "made",
        "one",
        "each",
        "what",
        "these",
        "those",
        "others",
    )
)
# Text between the tokens of code, and what surrounds blocks.
_NO_CODE = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
)


def count_idioms(text: str) -> Counter[str]:
    """How often each of `IDIOMS` stands in a file of Python, by its text."""
    tree = ast.parse(text)
    in_tests = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, (ast.If, ast.While))
        for part in ast.walk(node.test)
    }
    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.NamedExpr) and id(node) in in_tests:
            continue
        for idiom in _idioms_of(node):
            counts[idiom] += 1
    return counts


def _idioms_of(node: ast.AST) -> Iterator[str]:
    """The idioms of one node of the syntax tree, without its children's."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if _is_display(target, node.value):
                yield "tuple display"
    elif isinstance(node, ast.Call):
        for argument in node.args:
            match argument:
                case ast.Starred(value=ast.Name()):
                    yield "starred local"
    elif isinstance(node, ast.NamedExpr):
        yield "walrus"
    elif isinstance(node, ast.IfExp):
        yield "conditional expression"
    elif isinstance(node, ast.BinOp):
        is_product = isinstance(node.op, ast.Mult)
        if is_product and (_is_boolean(node.left) or _is_boolean(node.right)):
            yield "boolean arithmetic"
    elif isinstance(node, ast.Subscript):
        if _is_choice_by_index(node):
            yield "boolean arithmetic"
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Store) and node.id.strip("_") in VAGUE:
            yield "vague name"
    elif isinstance(node, ast.arg) and node.arg.strip("_") in VAGUE:
        yield "vague name"


def _is_display(target: ast.AST, value: ast.AST) -> bool:
    """Whether several values that are more than names are assigned in one statement."""
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    return not all(isinstance(part, (ast.Name, ast.Constant)) for part in value.elts)


def _is_boolean(node: ast.AST) -> bool:
    """Whether an expression is a comparison or a negation."""
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_negation or isinstance(node, ast.Compare)


def _is_choice_by_index(node: ast.Subscript) -> bool:
    """Whether ``pair[x is None]`` stands for an `if`."""
    if not isinstance(node.slice, ast.Compare):
        return False
    if not isinstance(node.value, (ast.Name, ast.Tuple)):
        return False
    return all(isinstance(sign, (ast.Is, ast.IsNot)) for sign in node.slice.ops)


def count_lines(text: str) -> int:
    """Lines of code: without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, documented):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def count_files(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """The idioms of every file below `FOLDERS`, by path; files without any are left
    out.
    """
    table = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            counts = count_idioms(path.read_text(encoding="utf-8"))
            if counts:
                table[path.relative_to(root).as_posix()] = dict(sorted(counts.items()))
    return table


def read_table() -> dict[str, dict[str, int]]:
    """The committed counts, by path."""
    table: dict[str, dict[str, int]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def rises(
    now: dict[str, dict[str, int]], table: dict[str, dict[str, int]]
) -> list[str]:
    """One line for each file that has more of an idiom than the table says."""
    lines = []
    for path, counts in now.items():
        for idiom, count in counts.items():
            before = table.get(path, {}).get(idiom, 0)
            if count > before:
                lines.append(f"{path}: {count} × {idiom}, was {before}")
    return lines


def totals(table: dict[str, dict[str, int]], folder: str = "") -> Counter[str]:
    """Sums over the files of a folder, over all files by default."""
    total: Counter[str] = Counter()
    for path, counts in table.items():
        if path.startswith(folder):
            total.update(counts)
    return total


def _update(now: dict[str, dict[str, int]]) -> str:
    """Write the counts unless a total rises; a sentence on what was done."""
    after = totals(now)
    before = after
    if TABLE.exists():
        before = totals(read_table())
    risen = [idiom for idiom in IDIOMS if after[idiom] > before[idiom]]
    if risen:
        return f"not written: more of {', '.join(risen)} than before"
    TABLE.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    return f"{TABLE.name} holds {sum(after.values())}, was {sum(before.values())}"


def main() -> int:
    """Print what is new and the totals, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    now = count_files()
    if arguments.update:
        message = _update(now)
        print(message)
        return int(message.startswith("not"))
    new = rises(now, read_table())
    for line in new:
        print(line)
    lines = sum(
        count_lines(path.read_text(encoding="utf-8"))
        for path in (ROOT / "koffline").rglob("*.py")
    )
    print(f"koffline/: {lines} lines of code")
    for idiom, count in totals(now, "koffline/").items():
        print(f"{count:6} {1000 * count / lines:6.2f} per 1000  {IDIOMS[idiom]}")
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main())
