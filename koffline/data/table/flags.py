"""Which columns say where episodes end or begin: by what their names mean, tested on
the rows.

A flag that is set in most rows marks no ends: ``not_done``, ``masks`` and ``alive`` are
set where the world went on. If several flags are there, one says that the world ended,
and the others say that an episode ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import polars as pl

from koffline.data.table.column_names import Flag, flag_of, says_end
from koffline.data.table.flag_values import TRUE
from koffline.data.table.profiles import IGNORED, ColumnProfile
from koffline.data.table.step_order import Steps

# what to write instead of an open key of a mapping; it has one key
Answer: TypeAlias = Mapping[str, object]
_MOST = 0.5  # a flag that is set in a larger share of the rows marks no ends
_CLEAR = 0.2  # difference of shares that tells which value of a flag marks ends
_FEW = 0.01  # share of the set rows that may lie inside episodes
ENDS = (Flag.TERMINAL, Flag.DONE, Flag.OUTCOME, Flag.GOES_ON)


@dataclass
class EndFlag:
    """A column whose rows ``is_set`` (N,) mark ends, in the table's order, and how a
    mapping writes it.
    """

    column: ColumnProfile
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
    questions: dict[str, list[Answer]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    no_flags: list[ColumnProfile] = field(default_factory=list)


def meaning(column: ColumnProfile) -> Flag | None:
    """What a column of two values means by its name; None for other columns."""
    if column.role != IGNORED or column.reason or column.values.dtype.is_nested():
        return None
    by_name = flag_of(column.name)
    # a discount is 0 where the world ended
    if by_name is Flag.GOES_ON and column.values.dtype.is_numeric():
        if (column.distinct == 2 and column.low == 0) or column.is_flag:
            return by_name
        return None
    if column.is_flag:
        return by_name
    return None


def set_rows(column: ColumnProfile) -> np.ndarray:
    """Whether (N,) a flag is set."""
    values = column.values
    if values.dtype.is_numeric():
        return (values != 0).fill_null(False).to_numpy()
    texts = values.cast(pl.String).str.strip_chars().str.to_lowercase()
    return texts.is_in(TRUE).fill_null(False).to_numpy()


def written(column: ColumnProfile, is_set: bool) -> str:
    """How a mapping says that a flag is set, or that it is not."""
    if is_set:
        return column.name
    if column.values.dtype.is_numeric():
        return f"{column.formula_name} == 0"
    unset = column.values.filter(~set_rows(column)).drop_nulls()
    text = str(unset[0])
    if unset.dtype == pl.Boolean:
        text = text.lower()
    return f"{column.formula_name} == {text!r}"


def find_ends(
    columns: Sequence[tuple[ColumnProfile, Flag]],
    steps: Steps,
    unlinked: np.ndarray | None,
) -> Ends:
    """Settle which flags are the ends, cuts and starts of a mapping, and give their
    columns these roles.

    columns: flags with what their names mean. unlinked: (N,) whether a row's next
    observation is not the observation of the row below, if that is known.
    """
    settled = Ends()
    flags: dict[Flag, list[EndFlag]] = {meaning: [] for meaning in Flag}
    for column, by_name in columns:
        flag = EndFlag(column, by_name, set_rows(column), written(column, True))
        if by_name not in ENDS:
            flags[by_name].append(flag)
            continue
        end = _oriented(flag, steps, unlinked, settled)
        if end is None:
            continue
        # Where the world does not go on, it ended.
        kind = Flag.TERMINAL if by_name is Flag.GOES_ON else by_name
        flags[kind].append(end)
    _settle_terminal(flags, settled)
    _settle_cuts(flags, settled)
    _settle_bounds(flags, steps, settled)
    for role, flag in settled.roles.items():
        flag.column.role = role
        flag.column.formula = ""
        if flag.text != flag.name:
            flag.column.formula = flag.text
        flag.column.reason = _reason(flag)
    return settled


def _reason(flag: EndFlag) -> str:
    if flag.text != flag.name:
        return f"where {flag.text}; set in {int(flag.is_set.sum())} rows"
    return f"its name; set in {int(flag.is_set.sum())} of {len(flag.is_set)} rows"


def _oriented(
    flag: EndFlag, steps: Steps, unlinked: np.ndarray | None, settled: Ends
) -> EndFlag | None:
    """The flag with ``is_set`` at ends, as its name says unless the rows say otherwise;
    None if it is no flag, or a question.

    unlinked: as for `find_ends`. Problems and questions are added to ``settled``.
    """
    ends = flag.is_set
    if flag.meaning is Flag.GOES_ON:
        ends = ~flag.is_set
    fits = _fits(ends, steps, unlinked)
    other_fits = _fits(~ends, steps, unlinked)
    share = f"{ends.mean():.0%} of the rows"
    if fits is False and other_fits is True:
        ends = ~ends
        text = written(flag.column, bool((ends == flag.is_set).all()))
        settled.problems.append(
            f"{flag.name}: by its name it would mark ends in {share}, which go on; its"
            f" other value marks ends: taken as terminal: {text}"
        )
    elif fits is False and not says_end(flag.name):
        settled.no_flags.append(flag.column)
        return None
    elif fits is not True and ends.any() and not ends.all() and ends.mean() > _MOST:
        settled.questions.setdefault("terminal", []).extend(
            {"terminal": written(flag.column, is_set)} for is_set in (False, True)
        )
        settled.problems.append(
            f"{flag.name}: by its name it would mark ends in {share}"
        )
        flag.column.leave_out("which of its values marks ends is not clear")
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


def _settle_terminal(flags: Mapping[Flag, list[EndFlag]], settled: Ends) -> None:
    """Choose the flag of terminations: the narrowest; what is set at every end of an
    episode is a cut.
    """
    strong = flags[Flag.TERMINAL]
    done = flags[Flag.DONE]
    outcomes = flags[Flag.OUTCOME]
    strong.sort(key=lambda flag: flag.text != flag.name)  # plain flags before formulas
    ranked = [*strong, *done, *outcomes]
    if not ranked or "terminal" in settled.questions:
        for flag in ranked:
            flag.column.leave_out("another flag is asked about")
        return
    chosen = ranked[0]
    settled.roles["terminal"] = chosen
    if flags[Flag.CUT]:
        cut = flags[Flag.CUT][0].is_set
    else:
        cut = np.zeros_like(chosen.is_set)
    for other in ranked[1:]:
        if (other.is_set == chosen.is_set).all():
            other.column.leave_out(f"it says the same as {chosen.text}")
        elif (chosen.is_set <= other.is_set).all() and other.meaning is Flag.DONE:
            _settle_every_end(other, chosen, cut, flags, settled)
        elif other.meaning is Flag.GOES_ON:
            settled.no_flags.append(other.column)
        else:
            _ask(chosen, other, settled)
    if "terminal" in settled.questions:
        settled.roles.pop("terminal", None)
        chosen.column.leave_out(
            "which of several flags says that the world ended is asked"
        )


def _settle_every_end(
    every: EndFlag,
    chosen: EndFlag,
    cut: np.ndarray,
    flags: Mapping[Flag, list[EndFlag]],
    settled: Ends,
) -> None:
    """Use a flag of all ends of episodes as the flag of cuts, unless another flag tells
    these.
    """
    beyond = every.is_set & ~chosen.is_set
    if not flags[Flag.CUT]:
        settled.roles["truncated"] = every
    elif (beyond <= cut).all():
        every.column.leave_out(f"an end by {chosen.text} or {flags[Flag.CUT][0].text}")
    else:
        _ask(chosen, every, settled)


def _ask(chosen: EndFlag, other: EndFlag, settled: Ends) -> None:
    """Ask which of two flags says that the world ended, and leave the other out."""
    answers: list[Answer] = [
        {"terminal": chosen.text},
        {"terminal": other.text},
    ]
    known = settled.questions.setdefault("terminal", [])
    known += [answer for answer in answers if answer not in known]
    settled.problems.append(
        f"{chosen.name} and {other.name} mark ends in different rows; say which marks"
        " that the world ended"
    )
    other.column.leave_out(f"it marks other ends than {chosen.text}")


def _settle_cuts(flags: Mapping[Flag, list[EndFlag]], settled: Ends) -> None:
    """Take the first flag of cuts."""
    cuts = flags[Flag.CUT]
    if cuts:
        settled.roles["truncated"] = cuts[0]
    for flag in cuts[1:]:
        flag.column.leave_out(f"{cuts[0].name} says what was cut")


def _settle_bounds(
    flags: Mapping[Flag, list[EndFlag]], steps: Steps, settled: Ends
) -> None:
    """Use flags of first and of last rows where no ids tell episodes apart."""
    for flag in flags[Flag.START]:
        is_new = not steps.has_ids and "starts" not in settled.roles
        if is_new and flag.is_set.any() and flag.is_set.mean() <= _MOST:
            settled.roles["starts"] = flag
        elif steps.has_ids:
            flag.column.leave_out("first rows of episodes")
        else:
            flag.column.leave_out("it marks no beginnings of episodes")
    for flag in flags[Flag.LAST]:
        terminal = settled.roles.get("terminal")
        if steps.has_ids or "starts" in settled.roles or flag.is_set.mean() > _MOST:
            flag.column.leave_out("last rows of episodes")
        elif terminal is None and "terminal" not in settled.questions:
            settled.questions["terminal"] = [
                {"terminal": flag.text},
                {"truncated": flag.text},
            ]
            flag.column.leave_out("last rows of episodes; why they end is asked")
        elif (
            terminal is not None
            and "truncated" not in settled.roles
            and (flag.is_set & ~terminal.is_set).any()
        ):
            settled.roles["truncated"] = flag
        else:
            flag.column.leave_out("last rows of episodes")
