"""Profiles of the columns of a table, and a guess of each column's role with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from koffline.data.table.values import (
    DECIMAL_COMMAS,
    FALSE,
    FLAGS_OR_IDS,
    ID_NAME,
    TEXT_WAYS,
    TRUE,
    as_read,
    is_missing_word,
    is_pattern,
    unread,
)
from koffline.errors import counted, printable

IGNORED = "ignored"
MOST_ONE_HOT = 50  # at most so many categories become features by default
# 31/01/2024, 20240131T1200, 2024-W05-3, 9:00 AM, Wed, 31 Jan 2024 12:00:00
_DATE = r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T ].*)?$|^\d{8}T\d{4}|^\d{4}-?W\d\d|^\d{1,2}:\d\d|\d \d{1,2}:\d\d"
_MIXED = "times in a form that is not read"
DECIMAL_COMMA = "numbers with decimal commas"
_MOSTLY = 0.8  # share of numbers above which the texts among them are errors
_SHARED = 0.2  # share of rows: if more share their guessed time with others, it is no time
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?$"  # commas that may mark thousands
_ID = "an id by its name"
_NONE = 1000  # rank of a name without a word of the role
_CODES = 20  # most whole numbers that are taken to be codes
NEXT = re.compile(r"^(?:next|new)[_. -]?(.+)$|^(.+)[_. -]next$", re.I)


@dataclass
class Profile:
    """One column of the inspected rows: its ``values`` as they would be read, and their ``kind`` in words.

    ``texts``: the original texts of a text column; ``problem``: what may be wrong with them, and a remedy.
    """

    name: str
    kind: str
    values: pl.Series
    texts: pl.Series | None = None
    problem: str = ""
    role: str = IGNORED
    reason: str = ""

    def __post_init__(self) -> None:
        there = self.values.drop_nulls()
        is_plain = not there.dtype.is_nested() and there.dtype not in (pl.Binary, pl.Object, pl.Unknown)
        self.missing = (self.texts if self.problem and self.texts is not None else self.values).null_count()
        self.present = len(self.values) - self.missing
        is_vector = getattr(there.dtype, "inner", pl.String()).is_numeric()
        self.distinct = there.n_unique() if is_plain else len(there) * is_vector
        self.low: Any = there.min() if is_plain and self.distinct else None
        self.high: Any = there.max() if is_plain and self.distinct else None
        shown = there if self.texts is None or not self.is_time else self.texts.drop_nulls()
        self.example = printable(str(next(iter(shown.head(1).to_list()), "")))[:40]
        is_pair = 0 < self.distinct <= 2 and is_plain and not self.problem
        self.has_digits = there.dtype == pl.String and there.str.contains(r"\d").all()
        self.is_flag = is_pair and there.cast(pl.String).str.to_lowercase().is_in([*TRUE, *FALSE]).all()

    @property
    def is_number(self) -> bool:
        """Whether values are numbers or booleans."""
        return self.values.dtype.is_numeric() or self.values.dtype == pl.Boolean

    @property
    def is_time(self) -> bool:
        """Whether values are instants, dates or durations, or texts that seem to be meant as times."""
        return self.kind == _MIXED or self.values.dtype.is_temporal()

    @property
    def is_choice(self) -> bool:
        """Whether values are texts, or a few whole numbers other than 0, 1, 2, …"""
        is_code = self.values.dtype.is_integer() and 0 < self.distinct <= _CODES
        return self.values.dtype == pl.String or (is_code and (self.low, self.high) != (0, self.distinct - 1))

    @property
    def range(self) -> str:
        """Smallest and largest value as text."""
        if self.is_time:
            return f"{self._read(self.low)} … {self._read(self.high)}"
        numbers = self.values.dtype.is_numeric() and self.low is not None
        return f"{self.low:.6g} … {self.high:.6g}" if numbers else ""

    def _read(self, value: Any) -> str:
        """Text of a time after parsing."""
        return str(value).removesuffix("+00:00") + " UTC" * str(value).endswith("+00:00")

    def rank(self, role: str) -> int:
        """Position of the likeliest word of the name among the role's words; `_NONE` without one."""
        words = _ROLES[role][0].split()
        parts = [part.lower() for part in re.findall(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])", self.name)]
        whole = "".join(parts)
        if whole in words or (role == "behavior_log_probability" and whole.endswith(tuple(words))):
            return words.index(whole) if whole in words else 0
        return min((words.index(part) for part in parts if part in words and len(part) > 1), default=_NONE)

    def time_rule(self) -> str:
        """How a column of times is read, with an example; empty if it cannot be read."""
        if self.kind == _MIXED:
            return ""
        if self.values.dtype.is_numeric():
            return "numbers, in the order of their size"
        rule = f"{self.kind}, in the order of instants, {self.range.replace(' … ', ' to ')}"
        first = self._read(self.values.drop_nulls()[0])
        return rule if self.texts is None else f"{rule}: '{self.example}' is {first}"


def profile(column: pl.Series, is_typed: bool) -> Profile:
    """Profile a column; texts get the narrowest type that fits all. is_typed: the file declares types."""
    name, kind = column.name, str(column.dtype).partition("(")[0].lower()
    if column.dtype != pl.String or column.null_count() == len(column):
        column = column.fill_nan(None) if column.dtype.is_float() else column
        return Profile(name, f"numbers ({kind})" if column.dtype.is_numeric() else kind, column)
    texts = column.str.strip_chars()
    is_word = texts.to_frame().select(is_missing_word(pl.col(name))).to_series()
    there = texts.filter(~is_word)  # in numbers, times and flags such words are missing values
    if way := next((way for way, missed in unread(texts, TEXT_WAYS).items() if not missed.any()), None):
        values = texts.to_frame().select(as_read(name, way)).to_series()
        kind = way if values.dtype.is_temporal() else "numbers" + " as text" * is_typed
        return Profile(name, kind, values.fill_nan(None) if values.dtype.is_float() else values, texts)
    without_words = texts.to_frame().select(as_read(name, FLAGS_OR_IDS)).to_series()
    if there.str.to_lowercase().is_in([*TRUE, *FALSE]).all():
        return Profile(name, "text", without_words, without_words)
    with_commas = there.filter(there.str.contains(",", literal=True))
    if len(with_commas) and with_commas.str.contains(_THOUSANDS).all() and _are_all_numbers(there):
        said = f"'{with_commas[0]}' may be a thousand or a number with decimals; write it without the comma"
        kind = "numbers with commas, to be read in two ways"
        return Profile(name, kind, texts, texts, f"{printable(said)}, or say decimal_comma: true")
    if len(with_commas) and not unread(texts, [DECIMAL_COMMAS])[DECIMAL_COMMAS].any():
        numbers = texts.to_frame().select(as_read(name, DECIMAL_COMMAS)).to_series()
        return Profile(name, DECIMAL_COMMA, numbers, without_words)
    if there.str.contains(_DATE).sum() > len(there) / 2:
        return Profile(name, _MIXED, without_words, without_words)
    strays = there.filter(there.cast(pl.Float64, strict=False).is_null())
    if len(strays) > (1.0 - _MOSTLY) * len(there):
        return Profile(name, "text", texts, texts)
    are = "is no number" if len(strays) == 1 else "are no numbers"
    said = f"{len(strays)} of {len(there)} values {are} ({printable(strays[0])[:24]!r})"
    said += "; write a number there, or leave it empty"
    return Profile(name, "numbers and texts", texts.cast(pl.Float64, strict=False), texts, said)


def _are_all_numbers(texts: pl.Series) -> bool:
    """Whether all texts are numbers if their commas are taken away."""
    plain = texts.str.replace_all(",", "", literal=True)
    return not plain.cast(pl.Float64, strict=False).has_nulls()


_FLAGGED = "give true and false, or 1 and 0"
# By role: words in names, the likeliest first; whether values suit; what to do where they do not, if said.
_ROLES: dict[str, tuple[str, Callable[[Profile], bool], str]] = {
    "behavior_log_probability": (
        "logprob logp loglikelihood logpropensity", lambda it: it.is_number and it.high <= 0, ""
    ),
    "behavior_probability": (
        "probability prob propensity propensities pscore chance behaviour behavior p mu",
        lambda it: it.is_number and it.low > 0 and it.high <= 1, "give probabilities above 0, up to 1",
    ),
    "terminal": (
        "terminal terminals terminated done dones death dead died ended end churned",
        lambda it: it.is_flag, _FLAGGED,
    ),
    "truncated": ("truncated truncation timeout timeouts censored cut", lambda it: it.is_flag, _FLAGGED),
    "reward": (
        "reward rewards rew r payoff profit revenue spend conversion converted clicked click outcome gain",
        lambda it: it.is_number, "give numbers, or a formula, as in reward: clicked == 'yes'",
    ),
    "action": (
        "action actions a act acts treatment treated arm decision choice offer dose recommendation variant"
        " bid",
        lambda it: it.is_number or it.distinct <= MOST_ONE_HOT, "",
    ),
    "weight": ("weight weights w", lambda it: it.is_number and it.low >= 0, ""),
    "time": (
        "timestamp time t ts datetime date unixtime timestep step tick hour day week month period visit when"
        " created occurred",
        lambda it: it.is_time or it.values.dtype.is_numeric(),
        "give numbers or times, as in 2024-01-31T12:00:00",
    ),
    "episode": (
        "episode episodes trajectory traj rollout session ep patient customer user subject client account"
        " visitor cookie household player subscriber uid guid id",
        lambda it: not it.is_time and it.values.dtype != pl.Boolean and 1.5 * it.distinct <= it.present, "",
    ),
}  # fmt: skip


def guess_roles(profiles: Sequence[Profile]) -> None:
    """Set the role of each column, with a reason, from its name and values."""
    names = {each.name for each in profiles}
    for each in profiles:
        if not each.name or is_pattern(each.name):
            each.reason = "its name; rename it"
        elif not each.distinct:
            each.reason = "no value in it"
        elif each.values.dtype.is_nested():
            each.role, each.reason = "observations", "a list of numbers"
        elif (now := NEXT.sub(r"\1\2", each.name)) in names - {each.name}:
            each.role, each.reason = "next_observations", f"{now} one step later, by its name"
    left = [each for each in profiles if not each.reason]
    for role, (words, suits, remedy) in _ROLES.items():
        free = [each for each in left if not each.reason]
        named = sorted((each for each in free if each.rank(role) < _NONE), key=lambda each: each.rank(role))
        likely = [each for each in named if suits(each)]
        if role == "time":
            likely += [each for each in free if each.is_time and each not in likely]
        for each in likely[:1]:
            said = "its values are times" if role == "time" and each.is_time else "its name"
            each.role, each.reason = role, f"{said}; {counted(each.distinct, 'value')}"
        for each in named if remedy and not likely else ():
            # "step 7" is meant as a time, "Monday" is a category
            if each.name.lower() in words.split() and (role != "time" or each.has_digits):
                each.reason = f"its name says {role}, its values do not: {remedy}"
                each.problem = f"{each.problem}; {each.reason}".removeprefix("; ")
        for each in likely[1:] if role == "action" else ():  # a vector of actions: action_0, action_1
            stem, first = (re.sub(r"\d+$", "", one.name) for one in (each, likely[0]))
            if stem and first == stem != each.name:
                each.role, each.reason = role, f"beside {likely[0].name}"
    for each in left:
        if not each.reason:
            each.role, each.reason = _as_observation(each)
    _settle_episodes(profiles)
    observed = [each for each in profiles if each.role == "observations"]
    vectors = [each for each in observed if each.values.dtype.is_nested()]
    for each in observed if vectors else ():
        if each is not vectors[0]:
            each.role, each.reason = IGNORED, f"the list {vectors[0].name} stands alone as the observation"


def _settle_episodes(profiles: Sequence[Profile]) -> None:
    """Take ids inside the guessed episodes if these share times or end often; what is shared is no time."""
    chosen = {each.role: each for each in profiles}
    if (whole := chosen.get("episode")) is None:
        return
    texts = [chosen[n].values.to_physical().cast(pl.String) for n in ("time", "terminal") if n in chosen]
    marks = [each.str.to_lowercase().replace(FALSE, None) for each in texts]
    inner = [
        each
        for each in profiles
        if each.reason.startswith(_ID) and _ROLES["episode"][1](each)
        if pl.DataFrame([each.values, whole.values]).n_unique() == each.distinct
        if any(_are_shared(whole, mark) and not _are_shared(each, mark) for mark in marks)
    ]
    for each in sorted(inner, key=lambda each: each.distinct)[-1:]:
        whole.role, whole.reason = "cluster", f"each has several {each.name}"
        each.role, each.reason, whole = "episode", f"each has one {whole.name}", each
    time = chosen.get("time")
    if time is not None and not time.is_time and _are_shared(whole, time.values):
        time.role = "observations"
        time.reason = "numbers; rows of an episode share them, so they are no time"


def _are_shared(ids: Profile, marks: pl.Series) -> bool:
    """Whether many marks of rows are those of other rows with the same id."""
    both = pl.DataFrame({"id": ids.values, "mark": marks}).drop_nulls()
    return int(both.is_duplicated().sum()) > _SHARED * both.height


def _as_observation(each: Profile) -> tuple[str, str]:
    """Role (observation or ignored) and reason for a column whose name does not tell its role."""
    if each.distinct == 1:
        return IGNORED, "the same value in every row"
    if each.is_time:
        return IGNORED, "times; export what matters of them as numbers"
    is_counted = each.values.dtype.is_numeric() and (each.values == each.values.floor()).all()
    if ID_NAME.search(each.name) and (is_counted or each.has_digits):
        return IGNORED, f"{_ID}; {counted(each.distinct, 'value')}"
    if each.values.dtype == pl.String:
        if each.distinct > min(MOST_ONE_HOT, each.present // 2):
            return IGNORED, f"{each.distinct} different texts; encode it (one-hot, ordinal) if they matter"
        return "observations", counted(each.distinct, "categor").replace("categors", "categories")
    is_whole = each.values.dtype.is_integer() and each.distinct == each.present
    if is_whole and each.present > 2 and each.high - each.low == each.present - 1:
        return IGNORED, "it counts the rows"
    if is_whole and each.present > 20 and each.rank("episode") < _NONE:
        return IGNORED, "a different value in every row"
    return "observations", "numbers"
