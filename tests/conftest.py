"""Shapes and types of koffline's own functions are checked at run time while the tests
run.
"""

import functools
import gc
import io
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType

# before torch: two busy threads on two cores collapse
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("POLARS_MAX_THREADS", "1")

import jaxtyping
import PIL.Image
import pytest
from jaxtyping import install_import_hook

from tests.forked_commands import ForkedCommands

# Otherwise each worker, and each process that a test starts, compiles all of koffline
# and of the tests anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOMS = Path(__file__).parents[1] / "koffline"
LONG_TESTS = Path(__file__).with_name("long_tests.txt")
# pydantic checks the types of `config`; `__main__` makes the process ready for a
# command; `user_code` looks at the frames of its callers; `algos` refuses wrong types
# itself, as d3rlpy's users may give them, and tests do so on purpose.
_UNCHECKED = {
    "__init__",
    "__main__",
    "algos",
    "config",
    "untrusted",
    "untrusted.user_code",
}
_CHECKED = sorted(
    {path.stem for path in ROOMS.glob("*.py")}.union(
        path.parent.name for path in ROOMS.glob("*/__init__.py")
    )
    .union(f"untrusted.{path.stem}" for path in (ROOMS / "untrusted").glob("*.py"))
    .difference(_UNCHECKED)
)
_ALWAYS = 1  # in each test function, whose rows count together
_EVERY = 50
_check = jaxtyping.jaxtyped


class _Calls:
    """How often one function was called in the running test function."""

    __slots__ = ("count", "test")

    def __init__(self) -> None:
        self.test = -1
        self.count = 0


# A function inside another is made anew at each call of that one: it is known by where
# it stands, since the hash of a code object reads all of its code.
_calls: defaultdict[tuple[str, int, str], _Calls] = defaultdict(_Calls)
_running = _Calls()


def _check_some(fn=None, *, typechecker):
    """Check the first call of a function in each test function and each 50th of the
    later ones: loops and the rows of a table repeat their shapes.

    To check every call takes five times as long as the training itself, and to check
    the first call in each row of a table a quarter of the suite.
    """
    if fn is None:
        return functools.partial(_check_some, typechecker=typechecker)
    if not isinstance(fn, FunctionType):
        return _check(fn, typechecker=typechecker)
    code = fn.__code__
    calls = _calls[code.co_filename, code.co_firstlineno, fn.__qualname__]
    # The types are those at import: a test may put something else in a type's place.
    # A function inside another seldom needs a check of its own.
    checked = None
    if "<locals>" not in fn.__qualname__:
        checked = _check(fn, typechecker=typechecker)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal checked
        if calls.test != _running.test:
            calls.test = _running.test
            calls.count = 0
        calls.count += 1
        if calls.count > _ALWAYS and calls.count % _EVERY:
            return fn(*args, **kwargs)
        if checked is None:
            checked = _check(fn, typechecker=typechecker)
        return checked(*args, **kwargs)

    return call


@pytest.fixture(scope="session")
def forked_commands(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Mapping[str, str]], ForkedCommands]]:
    """ForkedCommands of an environment; one process for each environment."""
    servers: dict[tuple[tuple[str, str], ...], ForkedCommands] = {}

    def of(environment: Mapping[str, str]) -> ForkedCommands:
        key = tuple(sorted(environment.items()))
        if key not in servers:
            scratch = tmp_path_factory.mktemp("streams")
            servers[key] = ForkedCommands(environment, scratch)
        return servers[key]

    yield of
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session", autouse=True)
def _pages_without_images() -> Iterator[None]:
    """Figures of pages are drawn and not rendered, which would take longer than to
    evaluate; tests/report renders them.
    """
    pixel = io.BytesIO()
    PIL.Image.new("RGB", (1, 1)).save(pixel, format="png")
    images = report._Images(pixel.getvalue(), "<svg></svg>", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_images", lambda figure: images)
        yield


@pytest.fixture
def few_features_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test for a memory beyond the state draws 20 random features and not 200: for
    tests of other things, whose evaluations it takes half the time of.
    """
    monkeypatch.setattr("koffline.ope.assumptions.markov._FEATURES", 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that `long_tests.txt` names, or whose function it names, are long."""
    lines = LONG_TESTS.read_text(encoding="utf-8").splitlines()
    long = {line for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in long or item.nodeid.partition("[")[0] in long:
            item.add_marker("long")


def pytest_collection_finish() -> None:
    """What collection made stays until the end: the garbage collector need not look at
    it again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _check_the_first_calls(request: pytest.FixtureRequest) -> None:
    _running.test = hash(request.node.nodeid.partition("[")[0])


jaxtyping.jaxtyped = _check_some  # what the hook puts above each function
install_import_hook([f"koffline.{name}" for name in _CHECKED], "beartype.beartype")

from koffline import report  # noqa: E402  (after the hook)
