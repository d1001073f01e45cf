"""Functions that take a frame of named columns in place of an array of observations."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from koffline.errors import PolicyError

if TYPE_CHECKING:
    import numpy as np
    import polars as pl

Library = Literal["polars", "pandas"]
_TEXT = re.compile(r"^(pl|polars|pd|pandas)\.(?:[\w.]+\.)?DataFrame$")
_LIBRARIES: dict[str, Library] = {
    "pl": "polars",
    "polars": "polars",
    "pd": "pandas",
    "pandas": "pandas",
}


class FramePolicy:
    """A function that is called with a frame of the log's named columns.

    ``frame_library``: whose frame, polars or pandas.
    """

    def __init__(self, function: Callable[..., object], library: Library) -> None:
        self._function = function
        self.frame_library = library
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        self.__doc__ = function.__doc__
        with suppress(TypeError, ValueError):  # a callable without a signature
            self.__signature__ = inspect.signature(function)
        density = getattr(function, "log_density", None)
        if density is not None:
            self.log_density = density

    def __call__(self, frame: object, **options: object) -> object:
        """Call the function."""
        return self._function(frame, **options)


def frame_policy(function: object, library: Any = "polars") -> FramePolicy:
    """Say that a policy function takes a frame with the columns of the log's table, as
    `koffline.evaluate` takes it.

    Also a decorator. Not needed where the function's first parameter is named `table`
    or annotated as ``polars.DataFrame`` or ``pandas.DataFrame``. The frame has the
    columns of the observations, categories as texts, a row per decision. library:
    polars, or pandas for a pandas frame. Raises PolicyError for another library.
    """
    if not callable(function):
        raise PolicyError(
            f"frame_policy takes a function of a frame, and received a"
            f" {type(function).__name__}"
        )
    if library not in _LIBRARIES.values():
        raise PolicyError(
            f"frame_policy knows polars and pandas, and received {library!r}"
        )
    return FramePolicy(function, library)


def library_of(
    function: Callable[..., object], parameters: Mapping[str, inspect.Parameter]
) -> Library | None:
    """Whose frame a function takes; None if it takes an array.

    parameters: of the function. It says so by `frame_policy`, by the annotation of its
    first parameter, or by the name `table` of that parameter.
    """
    library = getattr(function, "frame_library", None)
    if library is not None:
        return library
    first = next(iter(parameters.values()), None)
    if first is None:
        return None
    annotation = first.annotation
    if isinstance(annotation, str):
        annotation = _evaluated(function, first.name, annotation)
    annotated = _annotated_library(annotation)
    if annotated is None and first.name == "table":
        return "polars"
    return annotated


def _evaluated(function: Callable[..., object], name: str, text: str) -> object:
    """The annotation that a text stands for, or the text if it cannot be told."""
    # whatever the names in an annotation may raise
    with suppress(Exception):
        return inspect.signature(function, eval_str=True).parameters[name].annotation
    return text


def _annotated_library(annotation: object) -> Library | None:
    """The library of a frame's class, of its name, or of a union that holds one."""
    if isinstance(annotation, str):
        match = _TEXT.match(annotation.strip())
        if match is None:
            return None
        return _LIBRARIES[match.group(1)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            library = _annotated_library(part)
            if library is not None:
                return library
        return None
    if getattr(annotation, "__name__", "") != "DataFrame":
        return None
    module = str(getattr(annotation, "__module__", "")).partition(".")[0]
    return _LIBRARIES.get(module)


def as_library(frame: pl.DataFrame, library: Library, name: str) -> Any:
    """The frame as one of the library. name: of the policy, for messages.

    Raises PolicyError if pandas is not installed.
    """
    if library == "polars":
        return frame
    try:
        import pandas
    except ImportError:
        raise PolicyError(
            f"{name}: it takes a pandas frame, and pandas is not installed; `pip"
            " install pandas`, or take a polars frame"
        ) from None
    columns: dict[str, np.ndarray | list[object]] = {}
    for column in frame:
        if column.dtype.is_numeric():
            columns[column.name] = column.to_numpy(writable=True)
        else:
            columns[column.name] = column.to_list()
    return pandas.DataFrame(columns)
