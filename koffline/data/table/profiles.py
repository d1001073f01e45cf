"""Profiles of the columns of a table, and a guess of each column's role with its reason."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from koffline.data.columns import counted
from koffline.data.table.counts import as_days
from koffline.data.table.problems import is_pattern
from koffline.data.table.rows import CLOCK, TEXT_WAYS, TextKind
from koffline.errors import printable

IGNORED, UNFIT = "ignored", "unfit"  # unfit: ignored because the values do not fit the name
_STRICT = {
    "terminal": "give true and false, or 1 and 0",
    "truncated": "give true and false, or 1 and 0",
    "reward": "give numbers",
    "time": "give numbers or times, as in 2024-01-31T12:00:00",
    "behavior_probability": "give probabilities above 0, up to 1",
}
MOST_ONE_HOT = 50  # at most so many categories become features by default
_FLAGS = {"true", "false", "t", "f", "yes", "no", "y", "n", "0", "1", "0.0", "1.0"}
# 31/01/2024, 20240131T1200, 2024-W05-3, 9:00 AM, Wed, 31 Jan 2024 12:00:00
_DATE = r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T ].*)?$|^\d{8}T\d{4}|^\d{4}-?W\d\d|^\d{1,2}:\d\d|\d \d{1,2}:\d\d"
_MIXED = "times in a form that is not read"
DECIMAL_COMMA, TWO_WAYS = "numbers with decimal commas", "numbers with commas, to be read in two ways"
_OLDEST, _LATEST = 2e8, 5e9  # range of numbers that may be seconds since 1970
_MOSTLY = 0.8  # share of numbers above which the texts among them are errors
_SHARED = 0.2  # share of rows: if more share their guessed time with others, it is no time
_DECIMAL_COMMA = r"^[+-]?\d+,\d+$"
_THOUSANDS = r"^[+-]?\d{1,3},\d{3}$"
_NEXT = re.compile(r"(?:next|new)[_. -]?(.+)|(.+)[_. -]next", re.I)
# Words in names, the likeliest first.
_WORDS = {
    "behavior_log_probability": "logprob logp loglikelihood logpropensity",
    "behavior_probability": "probability prob propensity propensities pscore chance behaviour behavior p mu",
    "terminal": "terminal terminals terminated done dones death dead ended end churned",
    "truncated": "truncated truncation timeout timeouts censored cut",
    "reward": "reward rewards rew r payoff profit revenue spend conversion converted clicked click outcome"
    " gain",
    "action": "action actions a act acts treatment arm decision choice offer dose recommendation variant bid",
    "weight": "weight weights w",
    "time": "timestamp time t ts datetime date unixtime timestep step tick hour day week month period visit"
    " when created occurred",
    "episode": "episode episodes trajectory traj rollout session ep patient customer user subject client"
    " account visitor cookie household player subscriber uid guid id",
}  # fmt: skip
_ROLES = {role: words.split() for role, words in _WORDS.items()}


@dataclass
class Profile:
    """One column of the rows looked at. ``values``: as they would be read; ``kind``: in words."""

    name: str
    kind: str
    values: pl.Series
    missing: int
    distinct: int
    low: Any
    high: Any
    example: str
    is_flag: bool
    role: str = IGNORED
    reason: str = ""
    stray: str = ""  # texts in a column of numbers: how many, and one of them
    texts: pl.Series | None = None  # texts of the file, for times that are read from texts

    @property
    def is_number(self) -> bool:
        """Whether values are numbers or yes and no."""
        return bool(self.values.dtype.is_numeric() or self.values.dtype == pl.Boolean)

    @property
    def is_whole(self) -> bool:
        """Whether values are whole numbers."""
        return bool(self.values.dtype.is_integer())

    @property
    def is_time(self) -> bool:
        """Whether values are instants, dates or durations, or meant as such."""
        return self.kind == _MIXED or bool(self.values.dtype.is_temporal())

    @property
    def range(self) -> str:
        """Smallest and largest value as text."""
        if self.is_time:
            return f"{self._read(self.low)} … {self._read(self.high)}"
        numbers = self.is_number and self.values.dtype != pl.Boolean and self.low is not None
        return f"{self.low:.6g} … {self.high:.6g}" if numbers else ""

    def _read(self, value: Any) -> str:
        """Text of a time after parsing."""
        shown = str(value).removesuffix("+00:00") + " UTC" * str(value).endswith("+00:00")
        return shown.removeprefix("1970-01-01 ").removesuffix(" UTC") if self.kind == CLOCK else shown

    def time_rule(self) -> str:
        """Rule by which a column of times is read, with examples; empty if it cannot be read."""
        if self.kind == _MIXED:
            return ""
        if self.values.dtype.is_numeric():
            said, since = "numbers, in the order of their size", ""
            if (days := as_days(self.values.drop_nulls())) is not None:
                since = f"; they look like dates: {self.example} is {days[0]}"
            for unit, per_second in (("seconds", 1.0), ("milliseconds", 1e3), ("microseconds", 1e6)):
                ends = (float(self.low) / per_second, float(self.high) / per_second)
                if ends[0] > _OLDEST and ends[1] < _LATEST:
                    first = datetime.datetime.fromtimestamp(ends[0], datetime.UTC)
                    since = f"; they look like {unit} since 1970: {self.low} is {self._read(first)}"
            return said + since
        rule = f"{self.kind}, in the order of instants"
        if self.texts is None or self.kind == CLOCK:
            return f"{rule}, from {self.range.replace(' … ', ' to ')}"
        both = pl.DataFrame({"text": self.texts, "time": self.values, "end": self.texts.str.tail(6)})
        both = both.drop_nulls().unique(subset="end", keep="first", maintain_order=True).head(3)
        shown = [f"'{printable(text)}' is {self._read(time)}" for text, time, _ in both.iter_rows()]
        return f"{rule}: {', '.join(shown)}"


def profile(column: pl.Series, is_typed: bool) -> Profile:
    """Profile a column; texts get the narrowest type that fits all. is_typed: the file declares types."""
    name, kind = column.name, str(column.dtype).partition("(")[0].lower()
    if column.dtype.is_nested() or column.dtype in (pl.Binary, pl.Object, pl.Unknown, pl.Null):
        shown = printable(str(column.drop_nulls().head(1).to_list())[1:-1])[:24]
        return Profile(name, kind, column, column.null_count(), 0, None, None, shown, False)
    is_flag, stray, missing = column.dtype == pl.Boolean, "", column.null_count()
    texts: pl.Series | None = None
    if column.dtype == pl.String and column.null_count() < len(column):
        found = TextKind(name, False, list(TEXT_WAYS))
        stripped = column.str.strip_chars()
        found.look(stripped, "")
        if found.ways:
            texts, column = stripped, found.read(stripped)
            kind = found.ways[0] if column.dtype.is_temporal() else "numbers" + " as text" * is_typed
        else:
            dates = stripped.drop_nulls().str.contains(_DATE).mean()
            kind = _MIXED if isinstance(dates, float) and dates > 0.5 else "text"
            if stripped.drop_nulls().str.contains(_THOUSANDS).all():
                kind = TWO_WAYS
            elif stripped.drop_nulls().str.contains(_DECIMAL_COMMA).all():
                column, kind = stripped.str.replace(",", ".", literal=True).cast(pl.Float64), DECIMAL_COMMA
            elif kind == "text" and (stray := _strays(stripped)):
                column, kind = stripped.cast(pl.Float64, strict=False), "numbers and texts"
    elif column.dtype.is_numeric():
        kind = f"numbers ({kind})"
    column = column.fill_nan(None) if column.dtype.is_float() else column
    there = column.drop_nulls()
    missing = missing if stray else len(column) - len(there)
    distinct = there.n_unique()
    if 0 < distinct <= 2 and not stray:
        is_flag = (
            is_flag or set(there.unique().cast(pl.String).str.strip_chars().str.to_lowercase()) <= _FLAGS
        )
    low, high = (there.min(), there.max()) if distinct else (None, None)
    texts = texts if column.dtype.is_temporal() else None
    example = printable(str((there if texts is None else texts.drop_nulls())[0]))[:40] if distinct else ""
    fields = (name, kind, column, missing, distinct, low, high, example, is_flag)
    return Profile(*fields, stray=stray, texts=texts)


def _strays(texts: pl.Series) -> str:
    """Message on texts in a column of numbers, "2 of 100 values are no numbers ('?')", or empty."""
    strays = texts.filter(texts.is_not_null() & texts.cast(pl.Float64, strict=False).is_null())
    count = len(texts) - texts.null_count()
    if not len(strays) or len(strays) > (1.0 - _MOSTLY) * count:
        return ""
    are = "is no number" if len(strays) == 1 else "are no numbers"
    return f"{len(strays)} of {count} values {are} ({printable(strays[0])[:24]!r})"


def guess_roles(profiles: Sequence[Profile]) -> None:
    """Set the role of each column and its reason, by its name and by its values."""
    names = {each.name for each in profiles}
    left = [each for each in profiles if each.name and each.distinct]
    for each in profiles:
        each.reason = (
            ""
            if each.distinct
            else "no value in it"
            if each.name and not is_pattern(each.name)
            else "its name; rename it"
        )
        if not each.distinct and each.values.dtype.is_nested() and _is_vector(each.values):
            each.role, each.reason, each.distinct = "observation", "a list of numbers", len(each.values)
    for each in left:
        found = _NEXT.fullmatch(each.name)
        if found and (found[1] or found[2]) in names:
            each.role, each.reason = "next observation", f"{found[1] or found[2]} one step later, by its name"
    for role in _ROLES:
        free = [each for each in left if each.role == IGNORED]
        ranked = sorted(((_rank(each.name, role), each) for each in free), key=lambda pair: pair[0])
        likely = [each for rank, each in ranked if rank < len(_ROLES[role]) and _fits(each, role)]
        if role == "time":
            likely += [each for each in free if each.is_time and each not in likely]
        for each in likely[:1]:
            each.role, each.reason = role, _reason(each, role)
        for rank, each in ranked if not likely else ():
            is_meant = rank < len(_ROLES[role]) and each.name.lower() in _ROLES[role] and role in _STRICT
            if is_meant and role == "time":  # "step 7" is meant as one, "Monday" is a category
                is_meant = each.values.dtype == pl.String and bool(each.values.str.contains(r"\d").all())
            if is_meant:
                each.role, each.reason = UNFIT, f"its name says {role}, its values do not: {_STRICT[role]}"
        if role == "action":  # a vector of actions: action_0, action_1
            stem = re.sub(r"\d+$", "", likely[0].name) if likely else ""
            for each in likely[1:]:
                if stem and re.sub(r"\d+$", "", each.name) == stem != each.name:
                    each.role, each.reason = role, f"beside {likely[0].name}"
    for each in left:
        if each.role == IGNORED:
            each.role, each.reason = _as_observation(each)
    chosen = {each.role: each for each in profiles}
    if {"time", "episode"} <= chosen.keys() and not chosen["time"].is_time:
        both = pl.DataFrame({role: chosen[role].values for role in ("episode", "time")})
        if int(both.is_duplicated().sum()) > _SHARED * both.height:
            chosen["time"].role = "observation"
            chosen["time"].reason = "numbers; rows of an episode share them, so they are no time"
    vectors = [each for each in profiles if each.role == "observation" and each.values.dtype.is_nested()]
    for each in profiles if vectors else ():
        if each.role == "observation" and each is not vectors[0]:
            each.role, each.reason = IGNORED, f"the list {vectors[0].name} stands alone as the observation"


def _is_vector(values: pl.Series) -> bool:
    return bool(getattr(values.dtype, "inner", pl.String()).is_numeric())


def _rank(name: str, role: str) -> int:
    """Rank of a name for a role: the position of its likeliest word in the role's list, 0 the best."""
    words = _ROLES[role]
    parts = [part.lower() for part in re.findall(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])", name)]
    whole = "".join(parts)
    if whole in words or (role == "behavior_log_probability" and whole.endswith(tuple(words))):
        return words.index(whole) if whole in words else 0
    places = [words.index(part) for part in parts if part in words and len(part) > 1]
    return min(places, default=len(words))


def _fits(each: Profile, role: str) -> bool:
    """Whether the values suit the role that the name suggests."""
    rows = len(each.values)
    if role == "behavior_probability":
        return each.is_number and each.low is not None and each.low > 0 and each.high <= 1
    if role == "behavior_log_probability":
        return each.is_number and each.low is not None and each.high <= 0
    if role in ("terminal", "truncated"):
        return each.is_flag
    if role == "weight":
        return each.is_number and each.low >= 0
    if role == "reward":
        return each.is_number
    if role == "action":
        return each.is_number or each.distinct <= MOST_ONE_HOT
    if role == "time":
        return each.is_time or each.values.dtype.is_numeric()
    is_id = not each.is_time and each.values.dtype != pl.Boolean
    return is_id and 1.5 * each.distinct <= rows - each.missing


def _reason(each: Profile, role: str) -> str:
    if role == "episode":
        return f"its name; {counted(each.distinct, 'value')} in {len(each.values)} rows"
    if role == "time" and each.is_time:
        return "its values are times"
    if role == "action":
        return f"its name; {counted(each.distinct, 'value')}"
    return "its name and its values" if role != "reward" else "its name"


def _as_observation(each: Profile) -> tuple[str, str]:
    """Role of a column without a telling name, observation or ignored, and the reason."""
    rows = len(each.values) - each.missing
    if each.distinct == 1:
        return IGNORED, "the same value in every row"
    if each.is_time:
        return IGNORED, "times; export what matters of them as numbers"
    if each.values.dtype == pl.String:
        if each.distinct > min(MOST_ONE_HOT, rows // 2):
            return IGNORED, f"{each.distinct} different texts; encode it (one-hot, ordinal) if they matter"
        return "observation", counted(each.distinct, "categor").replace("categors", "categories")
    if each.is_whole and each.distinct == rows > 2 and each.high - each.low == rows - 1:
        return IGNORED, "it counts the rows"
    if each.is_whole and each.distinct == rows > 20 and _rank(each.name, "episode") < len(_ROLES["episode"]):
        return IGNORED, "a different value in every row"
    return "observation", "numbers"


def likely_keys(profiles: Iterable[Profile]) -> list[Profile]:
    """Columns that may tell episodes apart though their names do not say so."""
    fitting = [each for each in profiles if each.name and each.distinct and _fits(each, "episode")]
    return [each for each in fitting if not each.values.dtype.is_float() and each.distinct > MOST_ONE_HOT]
