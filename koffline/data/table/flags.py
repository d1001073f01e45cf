"""Which columns say where episodes end or begin: by what their names mean, tested on
the rows.

A flag that is set in most rows marks no ends: ``not_done``, ``masks`` and ``alive`` are
set where the world went on. If several flags are there, one says that the world ended,
and the others say that an episode ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from koffline.data.table.names import Flag, flag_of, says_end
from koffline.data.table.profiles import IGNORED, Profile
from koffline.data.table.steps import Steps
from koffline.data.table.values import TRUE

_MOST = 0.5  # a flag that is set in a larger share of the rows marks no ends
_CLEAR = 0.2  # difference of shares that tells which value of a flag marks ends
_FEW = 0.01  # share of the set rows that may lie inside episodes
ENDS = (Flag.TERMINAL, Flag.DONE, Flag.OUTCOME, Flag.GOES_ON)


@dataclass
class EndFlag:
    """A column whose rows ``is_set`` (N,) mark ends, in the table's order, and how a
    mapping writes it.
    """

    column: Profile
    meaning: Flag
    is_set: np.ndarray
    text: str

    @property
    def name(self) -> str:
        """The column's name."""
        return self.column.name


@dataclass
class Ends:
    """What the flags of a table say: roles, open questions by key, problems, and what
    is no flag.
    """

    roles: dict[str, EndFlag] = field(default_factory=dict)
    questions: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    no_flags: list[Profile] = field(default_factory=list)


def meaning(column: Profile) -> Flag | None:
    """What a column of two values means by its name; None for other columns."""
    if column.role != IGNORED or column.reason or column.values.dtype.is_nested():
        return None
    found = flag_of(column.name)
    # a discount is 0 where the world ended
    if found is Flag.GOES_ON and column.values.dtype.is_numeric():
        if (column.distinct == 2 and column.low == 0) or column.is_flag:
            return found
        return None
    if column.is_flag:
        return found
    return None


def set_rows(column: Profile) -> np.ndarray:
    """Whether (N,) a flag is set."""
    values = column.values
    if values.dtype.is_numeric():
        return (values != 0).fill_null(False).to_numpy()
    texts = values.cast(pl.String).str.strip_chars().str.to_lowercase()
    return texts.is_in(TRUE).fill_null(False).to_numpy()


def written(column: Profile, is_set: bool) -> str:
    """How a mapping says that a flag is set, or that it is not."""
    if is_set:
        return column.name
    if column.name.isidentifier():
        name = column.name
    else:
        name = f"`{column.name}`"
    if column.values.dtype.is_numeric():
        return f"{name} == 0"
    unset = column.values.filter(~set_rows(column)).drop_nulls()
    if unset.dtype == pl.Boolean:
        text = str(unset[0]).lower()
    else:
        text = str(unset[0])
    return f"{name} == {text!r}"


def find_ends(
    columns: Sequence[tuple[Profile, Flag]], steps: Steps, unlinked: np.ndarray | None
) -> Ends:
    """Settle which flags are the ends, cuts and starts of a mapping.

    unlinked: (N,) whether a row's next observation is not the observation of the row
    below, if that is known.
    """
    found = Ends()
    flags: dict[Flag, list[EndFlag]] = {each: [] for each in Flag}
    for column, says in columns:
        flag = EndFlag(column, says, set_rows(column), written(column, True))
        if (
            says in ENDS
            and (end := _oriented(flag, steps, unlinked, found)) is not None
        ):
            kind = Flag.TERMINAL if says is Flag.GOES_ON else says
            flags[kind].append(end)
        elif says not in ENDS:
            flags[says].append(flag)
    _settle_terminal(flags, found)
    _settle_cuts(flags, found)
    _settle_bounds(flags, steps, found)
    for role, flag in found.roles.items():
        flag.column.role = role
        if flag.text != flag.name:
            flag.column.formula = flag.text
        else:
            flag.column.formula = ""
        flag.column.reason = _reason(flag)
    return found


def _reason(flag: EndFlag) -> str:
    if flag.text != flag.name:
        return f"where {flag.text}; set in {int(flag.is_set.sum())} rows"
    return f"its name; set in {int(flag.is_set.sum())} of {len(flag.is_set)} rows"


def _ignore(flag: EndFlag, reason: str) -> None:
    flag.column.role = IGNORED
    flag.column.reason = reason


def _oriented(
    flag: EndFlag, steps: Steps, unlinked: np.ndarray | None, found: Ends
) -> EndFlag | None:
    """The flag with ``is_set`` at ends, as its name says unless the rows say otherwise;
    None: a question.
    """
    if flag.meaning is Flag.GOES_ON:
        by_name = ~flag.is_set
    else:
        by_name = flag.is_set
    ends = by_name
    other = ~by_name
    fits = _fits(ends, steps, unlinked)
    fits_other = _fits(other, steps, unlinked)
    share = f"{by_name.mean():.0%} of the rows"
    if fits is False and fits_other is True:
        ends = other
        text = written(flag.column, bool((ends == flag.is_set).all()))
        found.problems.append(
            f"{flag.name}: by its name it would mark ends in {share}, which go on; its"
            f" other value marks ends: taken as terminal: {text}"
        )
    elif fits is False and not says_end(flag.name):
        found.no_flags.append(flag.column)
        return None
    elif fits is not True and ends.any() and not ends.all() and ends.mean() > _MOST:
        answers = [
            {"terminal": written(flag.column, is_set)} for is_set in (False, True)
        ]
        found.questions.setdefault("terminal", []).extend(answers)
        found.problems.append(f"{flag.name}: by its name it would mark ends in {share}")
        _ignore(flag, "which of its values marks ends is not clear")
        return None
    is_set = bool((ends == flag.is_set).all())
    return EndFlag(flag.column, flag.meaning, ends, written(flag.column, is_set))


def _fits(ends: np.ndarray, steps: Steps, unlinked: np.ndarray | None) -> bool | None:
    """Whether rows can be ends of episodes, by ids or by next observations; None if
    neither tells.
    """
    if ends.all() or not ends.any():
        return None
    if steps.has_ids:
        inside = int((ends & ~steps.last_rows).sum())
        return bool(inside <= _FEW * ends.sum())
    if unlinked is not None:
        difference = unlinked[ends].mean() - unlinked[~ends].mean()
        if abs(difference) > _CLEAR:
            return bool(difference > 0)
    return None


def _settle_terminal(flags: Mapping[Flag, list[EndFlag]], found: Ends) -> None:
    """Choose the flag of terminations: the narrowest; what is set at every end of an
    episode is a cut.
    """
    strong = flags[Flag.TERMINAL]
    done = flags[Flag.DONE]
    outcomes = flags[Flag.OUTCOME]
    strong.sort(key=lambda each: each.text != each.name)  # plain flags before formulas
    ranked = [*strong, *done, *outcomes]
    if not ranked or "terminal" in found.questions:
        for each in ranked:
            _ignore(each, "another flag is asked about")
        return
    chosen = ranked[0]
    found.roles["terminal"] = chosen
    if flags[Flag.CUT]:
        cut = flags[Flag.CUT][0].is_set
    else:
        cut = np.zeros_like(chosen.is_set)
    for other in ranked[1:]:
        if (other.is_set == chosen.is_set).all():
            _ignore(other, f"it says the same as {chosen.text}")
        elif (chosen.is_set <= other.is_set).all() and other.meaning is Flag.DONE:
            _settle_every_end(other, chosen, cut, flags, found)
        elif other.meaning is Flag.GOES_ON:
            found.no_flags.append(other.column)
        else:
            _ask(chosen, other, found)
    if "terminal" in found.questions:
        found.roles.pop("terminal", None)
        _ignore(chosen, "which of several flags says that the world ended is asked")


def _settle_every_end(
    every: EndFlag,
    chosen: EndFlag,
    cut: np.ndarray,
    flags: Mapping[Flag, list[EndFlag]],
    found: Ends,
) -> None:
    """Use a flag of all ends of episodes as the flag of cuts, unless another flag tells
    these.
    """
    beyond = every.is_set & ~chosen.is_set
    if not flags[Flag.CUT]:
        found.roles["truncated"] = every
    elif (beyond <= cut).all():
        _ignore(every, f"an end by {chosen.text} or {flags[Flag.CUT][0].text}")
    else:
        _ask(chosen, every, found)


def _ask(chosen: EndFlag, other: EndFlag, found: Ends) -> None:
    answers: list[Mapping[str, Any]] = [
        {"terminal": chosen.text},
        {"terminal": other.text},
    ]
    known = found.questions.setdefault("terminal", [])
    known += [each for each in answers if each not in known]
    found.problems.append(
        f"{chosen.name} and {other.name} mark ends in different rows; say which marks"
        " that the world ended"
    )
    _ignore(other, f"it marks other ends than {chosen.text}")


def _settle_cuts(flags: Mapping[Flag, list[EndFlag]], found: Ends) -> None:
    for i, each in enumerate(flags[Flag.CUT]):
        if i == 0:
            found.roles["truncated"] = each
        else:
            _ignore(each, f"{flags[Flag.CUT][0].name} says what was cut")


def _settle_bounds(
    flags: Mapping[Flag, list[EndFlag]], steps: Steps, found: Ends
) -> None:
    """Use flags of first and of last rows where no ids tell episodes apart."""
    for each in flags[Flag.START]:
        is_new = not steps.has_ids and "starts" not in found.roles
        if is_new and each.is_set.any() and each.is_set.mean() <= _MOST:
            found.roles["starts"] = each
        else:
            _ignore(
                each,
                (
                    "first rows of episodes"
                    if steps.has_ids
                    else "it marks no beginnings of episodes"
                ),
            )
    for each in flags[Flag.LAST]:
        terminal = found.roles.get("terminal")
        if steps.has_ids or "starts" in found.roles or each.is_set.mean() > _MOST:
            _ignore(each, "last rows of episodes")
        elif terminal is None and "terminal" not in found.questions:
            found.questions["terminal"] = [
                {"terminal": each.text},
                {"truncated": each.text},
            ]
            _ignore(each, "last rows of episodes; why they end is asked")
        elif (
            terminal is not None
            and "truncated" not in found.roles
            and (each.is_set & ~terminal.is_set).any()
        ):
            found.roles["truncated"] = each
        else:
            _ignore(each, "last rows of episodes")
