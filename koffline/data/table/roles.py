"""Names of columns for every part of a transition, found among those a table has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from koffline.data.flat import KEYS
from koffline.data.table.mapping import TableMapping
from koffline.errors import DataError, nearest_name

_MOST_LISTED = 20
# Names by which an example command is filled in; the first match in the table's order counts.
_GUESSES = {
    "action": r"(action|act|a|treatment|arm|dose)$",
    "reward": r"(reward|rew|r|cost|score)$",
    "episode": r"(episode|episode_?id|ep|trajectory|traj|id|user|user_?id|patient|patient_?id|session)$",
    "time": r"(t|time|step|timestep|timestamp|date|index|n)$",
    "terminal": r"(terminal|terminated|done|end)$",
}


@dataclass(frozen=True)
class Roles:
    """Column names by role; ``impute`` is settled per column. Lists of one table, in the mapping's order."""

    observations: tuple[str, ...]
    action: tuple[str, ...]
    reward: str
    next_observations: tuple[str, ...]
    episode: str | None
    time: str | None
    terminal: str | None
    truncated: str | None
    behavior: str | None
    behavior_is_log: bool
    weight: str | None
    impute: dict[str, str | float]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns that must hold numbers."""
        single = [self.reward, self.behavior, self.weight]
        named = [*self.observations, *self.next_observations, *(name for name in single if name)]
        return tuple(dict.fromkeys(named))

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read, each once."""
        others = (self.episode, self.time, self.terminal, self.truncated)
        named = [*self.numbers, *self.action, *(name for name in others if name)]
        return tuple(dict.fromkeys(named))

    @property
    def stands_alone(self) -> bool:
        """Whether every row is a transition by itself."""
        return bool(self.next_observations) and self.episode is None and self.time is None


def resolve_roles(names: Sequence[str], mapping: TableMapping, source: str) -> Roles:
    """Find the mapping's columns. Raises DataError with the nearest name for one that is not there."""
    check_unique(names, source)
    single = {
        role: getattr(mapping, role)
        for role in ("reward", "episode", "time", "terminal", "truncated", "weight")
    }
    single["behavior"] = mapping.behavior_log_probability or mapping.behavior_probability
    for role, name in single.items():
        if name is not None and name not in names:
            raise DataError(_unknown(name, role, names, source))
    taken = {name for name in single.values() if name}
    action = _matches(names, mapping.action, "action", taken, source)
    taken |= set(action)
    following = _matches(names, mapping.next_observations, "next_observations", taken, source)
    observations = _matches(names, mapping.observations, "observations", taken | set(following), source)
    if following and len(following) != len(observations):
        raise DataError(
            f"{source}: {len(following)} columns are next_observations, {len(observations)} observations; "
            "name the same columns in the same order"
        )
    impute = _impute_methods(names, mapping, (*observations, *following), source)
    return Roles(
        observations=observations,
        action=action,
        next_observations=following,
        behavior_is_log=mapping.behavior_log_probability is not None,
        impute=impute,
        **single,
    )


def own_mapping(names: Iterable[str]) -> TableMapping | None:
    """The mapping of a table that koffline wrote, told by its column names; None for any other."""
    present = set(names)

    def several(key: str) -> tuple[str, ...]:
        if key in present:
            return (key,)
        return (f"{key}_*",) if f"{key}_0" in present else ()

    def one(name: str) -> str | None:
        return KEYS[name][0] if KEYS[name][0] in present else None

    if not (several("observations") and several("actions") and one("rewards") and one("terminated")):
        return None
    return TableMapping(
        observations=several("observations"),
        action=several("actions"),
        reward=one("rewards"),
        episode=one("episode_ids"),
        time=one("steps"),
        terminal=one("terminated"),
        truncated=one("truncated"),
        behavior_log_probability=one("behavior_log_probabilities"),
        weight=one("weights"),
        next_observations=several("next_observations"),
    )


def unmapped(names: Sequence[str], source: str, kind: str) -> DataError:
    """The error for a table without a mapping: its columns, and a command with the likely ones filled in."""
    found = {role: next((n for n in names if re.match(p, n, re.I)), None) for role, p in _GUESSES.items()}
    free = [name for name in names if name not in found.values()]
    example = f"--observations '{_common_pattern(free)}' --action {found['action'] or 'ACTION'}"
    example += f" --reward {found['reward'] or 'REWARD'} --episode {found['episode'] or 'EPISODE'}"
    example += f" --time {found['time'] or 'TIME'}"
    example += f" --terminal {found['terminal']}" if found["terminal"] else ""
    return DataError(
        f"{source} is a {kind} table with columns {_listed(names)}; say what they are, e.g. {example} "
        "(or --mapping FILE.yaml; in Python mapping=)"
    )


def natural_key(name: str) -> tuple[Any, ...]:
    """Sorts x_2 before x_10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)
    )


def _common_pattern(names: Sequence[str]) -> str:
    prefixes = [match.group(1) for name in names if (match := re.match(r"(.*?[_.\[]?)\d+\]?$", name))]
    best = max(prefixes, key=Counter(prefixes).__getitem__, default="")
    return f"{best}*" if best else "x_*"


def _matches(
    names: Sequence[str], patterns: Iterable[str], role: str, taken: set[str], source: str
) -> tuple[str, ...]:
    found: dict[str, None] = {}
    present = set(names)
    for pattern in patterns:
        parts = [pattern]
        if pattern not in present and "," in pattern:
            parts = [part.strip() for part in pattern.split(",") if part.strip()]
        for part in parts:
            fitting = [part] if part in present else _match(names, part, role, taken, source)
            found.update(dict.fromkeys(fitting))
    return tuple(found)


def _match(names: Sequence[str], pattern: str, role: str, taken: set[str], source: str) -> list[str]:
    """A column of exactly this name, else those the wildcards fit that have no other role."""
    if pattern in names:
        return [pattern]
    if "*" not in pattern and "?" not in pattern:
        raise DataError(_unknown(pattern, role, names, source))
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    fitting = [n for n in names if n not in taken and re.fullmatch(expression, n, re.S)]
    if not fitting:
        raise DataError(f"{source}: no column fits {role} '{pattern}'; the table has {_listed(names)}")
    return sorted(fitting, key=natural_key)


def _impute_methods(
    names: Sequence[str], mapping: TableMapping, observations: tuple[str, ...], source: str
) -> dict[str, str | float]:
    methods: dict[str, str | float] = {}
    for pattern, method in mapping.impute:
        if pattern is None:
            methods.update(dict.fromkeys(observations, method))
    for pattern, method in mapping.impute:
        if pattern is None:
            continue
        chosen = _match(names, pattern, "impute", set(), source)
        allowed = {*observations, mapping.reward, mapping.weight}
        wrong = [name for name in chosen if name not in allowed]
        if wrong and pattern in names:
            raise DataError(
                f"{source}: impute names {pattern}, but only observations, reward and weight can be imputed; "
                "drop the rows where it is missing"
            )
        methods.update({name: method for name in chosen if name in allowed})
    return methods


def check_unique(names: Sequence[str], source: str) -> None:
    """Raise DataError for a table without columns, or with two of one name."""
    if not names:
        raise DataError(f"{source} has no columns; export the table again with a header")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{source} has more than one column named {_listed(twice)}; rename them")


def _unknown(name: str, role: str, names: Sequence[str], source: str) -> str:
    return f"{source} has no column '{name}' ({role}); {nearest_name(name, names)}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(str(name) for name in names[:_MOST_LISTED])
    return shown + (f", … ({len(names)} in all)" if len(names) > _MOST_LISTED else "")
