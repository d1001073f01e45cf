"""What the name of a column says: words, negations, flags of ends, earlier and later
values of columns.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Sequence


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Parts of names: `nextObs`, `obs_next` and `OBS.next` have the parts next and obs.
_PART = re.compile(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])|\d+")
_NEGATIONS = ("not", "non", "no")
STATE_WORDS = _set("obs observation observations ob state states s")
# tm1 is t - 1, and tp1 is t + 1.
EARLIER_WORDS = _set("prev previous last lag lagged prior old past before tm")
LATER_WORDS = _set("next new following future lead after post prime tp")
# next_obs, or obs_next
_NEXT = re.compile(
    r"^(?:next|new|following|future)[_. -]?(.+)$"
    r"|^(.+?)[_. -](?:next|new|prime|tp1|t\+1)$",
    re.I,
)
_SHORT_NEXT = {
    "s2": ("s", "s1"),
    "sp": ("s",),
    "ns": ("s",),
    "s_": ("s",),
    "s'": ("s",),
    "o2": ("o", "o1"),
}
_SHORT_NEXT |= {
    "obs2": ("obs", "obs1"),
    "state2": ("state", "state1"),
    "obsp": ("obs",),
}
# Words beside `action` in names of what is no action: its probability, which ones are
# legal, their number.
_ABOUT_ACTIONS = _set(
    "prob probs probability probabilities logit logits log logp mask masks legal valid"
    " possible available allowed num count n space dim"
)
# A name that ends in a word for an id: user_id, userId, customer.
ID_NAME = re.compile(
    r"(?:^|[_. -])"
    r"(?i:id|uid|guid|uuid|user|customer|patient|client|visitor|subscriber)$"
    r"|[a-z]I[dD]$"
)


class Flag(enum.Enum):
    """What a flag says where it is set."""

    TERMINAL = "the world ended"
    DONE = "the episode ended, perhaps at a time limit"
    OUTCOME = "how it ended"
    GOES_ON = "the world went on"
    CUT = "the recording stopped"
    START = "an episode begins"
    LAST = "an episode's last row"


_FLAG_WORDS = {
    Flag.TERMINAL: (
        "terminal terminals terminated terminateds terminates terminate termination"
        " terminations absorbing"
    ),
    Flag.DONE: "done dones end ended ends finished",
    Flag.OUTCOME: "death dead died deceased mortality morta hospmort churned",
    Flag.GOES_ON: (
        "mask masks alive continue continues continuing continuation discount discounts"
    ),
    Flag.CUT: (
        "truncated truncateds truncates truncation truncations timeout timeouts"
        " censored cut"
    ),
}
_WHOLE_NAMES = {
    Flag.START: (
        "isfirst first firststep isfirststep episodestart episodestarts isstart start"
        " starts episodebegin episodebegins begin begins newepisode reset resets"
        " isreset"
    ),
    Flag.LAST: (
        "islast last laststep islaststep episodeend episodeends endofepisode"
        " episodeterminal episodeterminals isend eoe lastrow"
    ),
    Flag.CUT: "timelimit timelimits timelimitreached",
}
# Words of texts that say why an episode ended.
_CUT_WORDS = _set(
    "timeout timeouts timelimit limit limits maxsteps max maximum horizon cutoff"
    " interrupted expired elapsed censored cut stopped"
)
_NEGATED = {
    Flag.TERMINAL: Flag.GOES_ON,
    Flag.DONE: Flag.GOES_ON,
    Flag.OUTCOME: Flag.GOES_ON,
}
_NEGATED[Flag.GOES_ON] = Flag.TERMINAL
# A mask of actions or of a loss says nothing about ends.
_OTHER_MASKS = _set(
    "action actions attention loss valid legal train test obs observation"
)


def parts(name: str) -> list[str]:
    """The words and numbers of a name, in small letters."""
    return [part.lower() for part in _PART.findall(name)]


def joined(name: str) -> str:
    """The words of a name as one word: `is_first` and `isFirst` are `isfirst`."""
    return "".join(part for part in parts(name) if not part.isdecimal())


def flag_of(name: str) -> Flag | None:
    """What the name says of a flag; None if it says nothing.

    ``not_done`` and ``nonterminal`` are negated.
    """
    whole = joined(name)
    for flag, names in _WHOLE_NAMES.items():
        if whole in names.split():
            return flag
    words = parts(name)
    if _OTHER_MASKS.intersection(words) and Flag.GOES_ON is _of_words(words):
        return None
    meaning = _of_words([word for word in words if word not in _NEGATIONS])
    if meaning is not None:
        if set(words) & set(_NEGATIONS):
            return _NEGATED.get(meaning)
        return meaning
    for negation in _NEGATIONS:  # nonterminal, notdone
        meaning = _of_words([whole.removeprefix(negation)])
        if whole.startswith(negation) and meaning is not None:
            return _NEGATED.get(meaning)
    return None


def says_end(name: str) -> bool:
    """Whether a name can hardly mean anything but a flag of ends."""
    words = {*_FLAG_WORDS[Flag.TERMINAL].split(), "done", "dones"}
    return bool(words.intersection(parts(name)))


def says_cut(text: str) -> bool:
    """Whether a text, such as the reason of an end, names a limit or the end of the
    recording: timeout, max_steps, time limit.
    """
    words = parts(text)
    return flag_of(text) is Flag.CUT or bool(_CUT_WORDS.intersection(words))


def _of_words(words: Sequence[str]) -> Flag | None:
    for flag, names in _FLAG_WORDS.items():
        if any(word in names.split() for word in words):
            return flag
    return None


def earlier_name(name: str, names: Collection[str]) -> str | None:
    """The column whose next value a column holds by its name: `obs` for `obs_next`;
    None if there is none. names: of all columns.
    """
    other_names = set(names) - {name}
    match = _NEXT.match(name)
    if match is not None:
        base = match.group(1) or match.group(2)
        candidates = [base, f"{base}_t", f"{base}s"]
    else:
        base = name.lower()
        candidates = list(_SHORT_NEXT.get(base, ()))
        if is_numbered(base) and _has_other_numbers(base, other_names):
            # s0, s1, s2 or s1, s2, s3 are numbers of one state
            candidates = []
    for candidate in candidates:
        if candidate in other_names:
            return candidate
    if match is None or joined(base) not in STATE_WORDS:
        return None
    states = [other for other in other_names if joined(other) in STATE_WORDS]
    if len(states) == 1:
        return states[0]
    return None


def is_numbered(name: str) -> bool:
    """Whether a name is a word and a number: s2, obs1."""
    return re.fullmatch(r"[a-z]+\d+", name.lower()) is not None


def _has_other_numbers(name: str, names: Collection[str]) -> bool:
    """Whether names have the same word with a number other than 1 and that of
    ``name``."""
    stem = name.rstrip("0123456789")
    numbers = {"1", name.removeprefix(stem)}
    return any(
        is_numbered(other)
        and other.lower().rstrip("0123456789") == stem
        and other.lower().removeprefix(stem) not in numbers
        for other in names
    )


def is_later(name: str) -> bool:
    """Whether a name says that the value is one of later."""
    return bool(LATER_WORDS.intersection(parts(name)))


def is_earlier(name: str) -> bool:
    """Whether a name says that the value is one of before."""
    return bool(EARLIER_WORDS.intersection(parts(name)))


def is_about_actions(name: str) -> bool:
    """Whether a name with the word of an action says something about actions:
    probabilities, a mask.
    """
    return bool(_ABOUT_ACTIONS.intersection(parts(name)))


def is_pattern(name: str) -> bool:
    """Whether polars reads a column's name as a pattern of names; such columns get no
    role.
    """
    return name == "*" or (name.startswith("^") and name.endswith("$"))
