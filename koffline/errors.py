"""Errors that a user can act on: what is wrong, what was received, and the remedy, in
one line.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections.abc import Iterable

# Longer messages quote the content of a file and are cut.
_LONG_WORD = re.compile(r"\S{400,}")  # longer than honest paths
_LONGEST_MESSAGE = 4000
_MOST_NAMES = 8
# groups of words for the same thing, here and elsewhere, that do not look alike
_SAME = (
    "env environment env-id env-name task; num-envs n-envs n-environments; gamma"
    " discount discount-factor horizon; steps n-steps iterations epochs n-epochs"
    " train-steps gradient-steps; learning-rate lr step-size; hidden-units layers"
    " hidden hidden-layers hidden-sizes; out output output-dir out-dir save; estimator"
    " method estimators algorithm; policy policies target-policy agent; observations"
    " observation state states features obs; episode episode-id episodes trajectory"
    " trajectory-id; time step timestep timestamp; terminal terminals done dones"
    " terminated; truncated timeout timeouts; behavior-probability propensity pscore"
    " propensity-score logging-probability; kloss dm direct direct-method kernel-loss"
    " kernel; is ips tis importance-sampling; wis snips sntis; wpdis cwpdis snpdis; dr"
    " doubly-robust; mwl mis; dualdice dice; by group-by groupby group groups segment;"
    " one-step bandit contextual-bandit; interval bootstrap ci"
)
_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


class KofflineError(Exception):
    """Base of every error that koffline raises for bad input; the command line prints
    it and exits with 2.

    Messages are one line without control characters, because names in files may contain
    anything, even terminal commands.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*map(_printable_argument, args))


class DataError(KofflineError):
    """A log that cannot be read or whose columns contradict each other."""


class PolicyError(KofflineError):
    """A policy that cannot be loaded safely or does not fit the log."""


class ConfigError(KofflineError):
    """A setting that is unknown or out of range."""


def _printable_argument(argument: object) -> object:
    """An argument of an error: a text in one line, anything else as it is."""
    if isinstance(argument, str):
        return printable(argument)
    return argument


def printable(text: str) -> str:
    """The text in one line, without control characters; long words and long texts are
    shortened.
    """
    text = _LONG_WORD.sub(lambda word: f"{word[0][:80]}…{word[0][-20:]}", text)
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]}…"
    return "".join(_visible(character) for character in text)


def without_controls(text: str) -> str:
    """The whole text, its lines and tabs kept, without characters that a terminal or a
    browser obeys.

    They may stand in names that come from files: of actions, columns, groups.
    """
    if text.isprintable():
        return text
    return "".join(_visible(character, kept="\n\t") for character in text)


def escaped_json(text: str) -> str:
    """A JSON text in which every character that is no print is an escape: ``\\u001b``,
    ``\\udcff``.

    Texts with letters of all languages stay readable, can be stored as UTF-8, and are
    harmless on a terminal.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    """A character as it stands in JSON: an escape if it is no print."""
    if character == "\n" or character.isprintable():
        return character
    return json.dumps(character)[1:-1]


def _visible(character: str, kept: str = "") -> str:
    """A character, or a blank or � in place of one that is no print and not among the
    ``kept`` ones.
    """
    if character.isprintable() or character in kept:
        return character
    if character.isspace():
        return " "
    return "�"


def is_control(character: str) -> bool:
    """Whether a character controls the terminal, such as escapes and direction
    marks.
    """
    if unicodedata.category(character) == "Cc":
        return character not in "\n\t"
    return unicodedata.bidirectional(character) in _TURNS


def _plain(name: str) -> str:
    return name.strip("-").lower().replace("_", "-").replace(" ", "-")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Remedy for an unknown name: its synonym, the most similar name, or all known
    names.
    """
    names = list(known)
    unknown = _plain(name)
    name_of = {_plain(other): other for other in names}
    name_of_synonym = dict(name_of)
    for synonyms in map(str.split, _SAME.split("; ")):
        for known_name in [name_of[word] for word in synonyms if word in name_of]:
            for word in synonyms:
                name_of_synonym.setdefault(word, known_name)
    # a synonym must be nearly exact; a name of the list itself may be spelt worse
    for candidates, cutoff in ((name_of_synonym, 0.8), (name_of, 0.5)):
        close = difflib.get_close_matches(unknown, candidates, n=1, cutoff=cutoff)
        if close:
            return f"did you mean '{candidates[close[0]]}'?"
    return f"known are {listed(names, _MOST_NAMES) or 'none'}"


def install_command(extra: str) -> str:
    """The command that installs what an extra of pyproject.toml holds; in quotation
    marks, because shells read brackets.
    """
    return f'pip install "koffline[{extra}]"'


def counted(
    count: int, noun: str, singular_verb: str = "", plural_verb: str = ""
) -> str:
    """``1 row``, ``3 rows``; with a verb ``1 row was``, ``3 rows were``.

    count: how many. noun: in the singular; its plural ends in s. singular_verb,
    plural_verb: what follows one, and several.
    """
    verb = singular_verb
    if count != 1:
        noun += "s"
        verb = plural_verb
    return f"{count} {noun} {verb}".rstrip()


def listed(names: Iterable[object], most: int = 20) -> str:
    """Text that lists names or numbers; only the first ones if there are many."""
    words = list(map(str, names))
    text = ", ".join(words[:most])
    if len(words) > most:
        text += f", … ({len(words)} in all)"
    return text


def percent(share: float) -> str:
    """A level as text with all its digits: ``95%``, ``99.99%``."""
    return f"{100.0 * share:.10g}%"


def chance(p_value: float) -> str:
    """A p-value as text: ``p = 0.03``, or ``p < 0.0001`` for all that are smaller."""
    if p_value < 1e-4:
        return "p < 0.0001"
    return f"p = {p_value:.1g}"
