"""Code that the user names: where its modules are looked for, and what it may change of
this process.

The current folder is never on ``sys.path``: a folder of data may hold files with the
names of modules that some library looks for, such as ``org.py``, and nobody means
these. `UserModules` finds there only the module that the user named, and what the
modules of this folder themselves import or unpickle, now or later.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from koffline.errors import KofflineError
from koffline.untrusted.limits import one_line, one_line_errors

if TYPE_CHECKING:
    import torch

# the method with which unpicklers of all libraries import
_FINDS_CLASSES = "find_class"


def current_folder() -> str | None:
    """The current folder; None if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return None


class UserModules(MetaPathFinder):
    """Finds modules in the user's folder for the user, and for modules that were found
    so.

    A folder without ``__init__.py`` is found only where there is no such module
    elsewhere, as Python does it.
    """

    def __init__(self) -> None:
        # folders by the first part of names that the user gave
        self._named: dict[str, str] = {}
        # folders by the first part of names of modules that were found
        self.folders: dict[str, str] = {}

    @contextlib.contextmanager
    def named(self, *modules: str, folder: str | None = None) -> Iterator[None]:
        """Context in which these modules are imported from ``folder``, whoever imports
        them.

        folder: by default the current one; if it was deleted, there is nothing to find.
        """
        folder = folder or current_folder()
        before = self._named
        if folder is not None:
            self._named = before | {_top(module): folder for module in modules}
        if self not in sys.meta_path:
            # as with `python -m`, the folder comes before installed packages
            sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            self._named = before

    def remember(self, folders: Mapping[str, str]) -> None:
        """At a worker: find these modules for everybody, because values that use them
        are unpickled there.
        """
        self._named = {**self._named, **folders}
        if folders and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """How to import the module ``name``; None if it is not ours to find. As
        Python's import system asks.
        """
        if path is not None:  # a part of a package, which knows its place
            return None
        folder = self._named.get(name) or self._folder_of_importer(sys._getframe(1))
        if folder is None:
            return None
        spec = PathFinder.find_spec(name, [folder], target)
        if spec is None:
            return None
        if spec.loader is None and PathFinder.find_spec(name) is not None:
            return None
        self.folders[name] = folder
        return spec

    def _folder_of_importer(self, frame: FrameType | None) -> str | None:
        """The folder of the module whose code imports now; None for code of anybody
        else.
        """
        is_unpickling = False
        while frame is not None:
            importer = str(frame.f_globals.get("__name__")).partition(".")[0]
            if importer in self.folders:
                return self.folders[importer]
            is_unpickling = is_unpickling or frame.f_code.co_name == _FINDS_CLASSES
            if importer != "importlib" and not is_unpickling:
                return None
            frame = frame.f_back
        return None


def _top(module: str) -> str:
    """First part of a module's name, also of ``package.module:name``."""
    return module.partition(":")[0].partition(".")[0]


user_modules = UserModules()


def modules_in(code: str) -> list[str]:
    """Names of the modules that a text of Python imports; none if it is no Python."""
    names: list[str] = []
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
    return names


@dataclass(frozen=True)
class _Process:
    """What code can change for a whole process: the current folder and torch's
    defaults; None: not known.
    """

    folder: str | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @classmethod
    def now(cls) -> _Process:
        """The state of this process."""
        torch = sys.modules.get("torch")
        # not imported, or only in part
        if torch is None or not hasattr(torch, "get_default_device"):
            return cls(current_folder())
        return cls(
            current_folder(), torch.get_default_dtype(), torch.get_default_device()
        )

    def restore(self, now: _Process) -> None:
        """Change this process, whose state is ``now``, back to this state."""
        if self.folder not in (None, now.folder):
            with contextlib.suppress(OSError):  # it was deleted meanwhile
                os.chdir(str(self.folder))
        if now.dtype is None:
            return
        torch = sys.modules["torch"]
        dtype = self.dtype or torch.float32
        if dtype != now.dtype:
            torch.set_default_dtype(dtype)
        device = self.device or torch.device("cpu")
        if device != now.device:
            if device.type == "cpu":
                device = None  # a default device, even the usual one, slows every call
            torch.set_default_device(device)


# whether user code has a current folder and torch defaults of its own
_is_separate = False
_theirs: _Process | None = None  # what user code had set when it ended last


@contextlib.contextmanager
def separate_process_state() -> Iterator[None]:
    """Context of a command: user code that moves to another folder moves alone, and so
    do torch's defaults.

    All paths of the command keep the meaning that they had when it began.
    """
    global _is_separate, _theirs
    before = _is_separate, _theirs
    _is_separate = True
    _theirs = None
    try:
        yield
    finally:
        _is_separate, _theirs = before


def separate_state_for_good() -> None:
    """As `separate_process_state`, for the rest of this process: a worker."""
    global _is_separate
    _is_separate = True


@contextlib.contextmanager
def user_code(
    name: str | Path, fault: str, remedy: str, kind: type[KofflineError]
) -> Iterator[None]:
    """Context of calls of user code; arguments and errors as in `one_line_errors`.

    Also exceptions that are no errors, such as SystemExit and GeneratorExit, become one
    of ours; an interrupt passes. In a command the current folder and torch's defaults
    are ours again afterwards, and theirs when user code is called the next time.
    """
    with one_line_errors(name, fault, remedy, kind), _their_state(name, kind):
        try:
            yield
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise kind(f"{name}: {fault} ({one_line(error)}); {remedy}") from error


@contextlib.contextmanager
def _their_state(name: str | Path, kind: type[KofflineError]) -> Iterator[None]:
    global _theirs
    if not _is_separate:
        yield
        return
    ours = _Process.now()
    entered = _theirs or ours
    entered.restore(ours)
    try:
        yield
    finally:
        after = _Process.now()
        is_meta = after.device is not None and after.device.type == "meta"
        if is_meta:
            _theirs = None
        elif after != entered:
            # by this code, not by user code that it called and that is accounted for
            _theirs = after
        ours.restore(after)
    if is_meta:
        raise kind(
            f"{name}: it makes torch's default device 'meta', on which tensors hold no"
            " numbers; leave the default, or choose cpu"
        )
