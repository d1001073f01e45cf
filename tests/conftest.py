"""Shapes and types of koffline's own functions are checked at run time while the tests
run.
"""

import functools
import os
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FunctionType

# before torch: two busy threads on two cores collapse
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest
from jaxtyping import install_import_hook

# Otherwise each worker, and each process that a test starts, compiles all of koffline
# and of the tests anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOMS = Path(__file__).parents[1] / "koffline"
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
_ALWAYS = 50
_EVERY = 20
_calls: Counter[CodeType] = Counter()
_check = jaxtyping.jaxtyped


def _check_some(fn=None, *, typechecker):
    """Check the first calls of a function in each test and some of the later ones:
    loops repeat their shapes.

    To check every call takes five times as long as the training itself.
    """
    if fn is None:
        return functools.partial(_check_some, typechecker=typechecker)
    if not isinstance(fn, FunctionType):
        return _check(fn, typechecker=typechecker)
    # A function inside another is made anew at each call of that one, and seldom needs
    # a check of its own.
    checked = (
        None if "<locals>" in fn.__qualname__ else _check(fn, typechecker=typechecker)
    )

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal checked
        _calls[fn.__code__] += 1
        count = _calls[fn.__code__]
        if count > _ALWAYS and count % _EVERY:
            return fn(*args, **kwargs)
        checked = checked or _check(fn, typechecker=typechecker)
        return checked(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def _check_the_first_calls() -> None:
    _calls.clear()


jaxtyping.jaxtyped = _check_some  # what the hook puts above each function
install_import_hook([f"koffline.{name}" for name in _CHECKED], "beartype.beartype")
