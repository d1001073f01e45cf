"""What the texts of a table are taken for: words for missing values, texts that
formulas compare with.
"""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from koffline.data.table.mapping import Formula, TableMapping, equals_text
from koffline.data.table.missing import is_missing_word
from koffline.errors import counted, listed

_FLAGS = ("true", "false")
_MOST_SHOWN = 5  # texts of a column
_LONGEST = 40  # letters of a text that is shown


def one_spelling(
    values: Iterable[object], declared: Collection[object] = ()
) -> dict[str, str]:
    """How labels are meant that are written in several ways: in other letters, or with
    blanks around them.

    Only what is certain: a single declared label is meant by its other spellings, and
    true and false are two labels, however they are written.
    """
    groups = _by_key(values)
    names = _by_key(declared)
    meant = {key: next(iter(known)) for key, known in names.items() if len(known) == 1}
    if any(len(groups.get(key, ())) > 1 for key in _FLAGS) and not names:
        meant |= {key: key for key in _FLAGS}
    pairs = {
        text: meant[key]
        for key, texts in groups.items()
        if key in meant
        for text in texts
    }
    return {text: label for text, label in sorted(pairs.items()) if text != label}


def doubtful_spellings(
    values: Iterable[object], declared: Collection[object] = ()
) -> list[list[str]]:
    """Groups of labels that are one label in other letters, or with blanks, or several:
    who knows.
    """
    meant = one_spelling(values, declared)
    groups = _by_key(
        value for value in values if value not in meant and value not in declared
    )
    doubtful = [sorted(texts) for texts in groups.values() if len(texts) > 1]
    return sorted(doubtful)


def _by_key(values: Iterable[object]) -> dict[str, set[str]]:
    """Texts by what they are without case and blanks; values that are no texts have one
    spelling.
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for value in values:
        if isinstance(value, str):
            groups[unicodedata.normalize("NFC", value).strip().casefold()].add(value)
    return groups


def spelling_note(column: str, meant: Mapping[str, str]) -> str:
    """A note on spellings that were taken for one label."""
    shown = listed(
        [f"{text!r} as {label!r}" for text, label in meant.items()], _MOST_SHOWN
    )
    return (
        f"labels of {column} that differ in case or blanks alone were taken for one:"
        f" {shown}"
    )


def _count_missing_words(column: pl.Series) -> int:
    """How many texts are words for a missing value, with or without blanks around."""
    is_word = is_missing_word(pl.col(column.name).str.strip_chars())
    return int(column.to_frame().select(is_word).to_series().sum())


@dataclass
class TextCensus:
    """Counts of texts in the rows as they are stored, before anything is computed from
    them.

    numbers: columns of texts that are read as numbers; NaN stands where they had a word
    for missing.
    read: columns of texts in which such words are missing values, and which are still
    texts.
    labels: columns of labels, in which such words are labels like others.
    listed: by column, the labels that the mapping lists; of these nothing is noted.
    By column: how often such words are ``missing`` values, and how often they are
    labels (``as_labels``); ``examples`` of its texts. By column and text of a formula:
    those that were ``seen``, and another spelling of those that were not
    (``spelled``).
    """

    numbers: Collection[str]
    read: Collection[str]
    labels: Collection[str]
    formulas: Sequence[Formula]
    listed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    missing: Counter[str] = field(default_factory=Counter)
    as_labels: Counter[str] = field(default_factory=Counter)
    seen: set[tuple[str, str]] = field(default_factory=set)
    spelled: dict[tuple[str, str], str] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def look(self, frame: pl.DataFrame) -> None:
        """Count the texts of some rows."""
        for name in self.numbers:
            self.missing[name] += int(frame[name].is_nan().sum())
        for name in self.read:
            self.missing[name] += _count_missing_words(frame[name])
        for name in self.labels:
            is_listed = pl.col(name).str.strip_chars().is_in(self.listed.get(name, ()))
            unlisted = frame.filter(~is_listed)
            self.as_labels[name] += _count_missing_words(unlisted[name])
        for column, text in self._comparisons():
            self._look_for(frame, column, text)

    def _comparisons(self) -> Iterable[tuple[str, str]]:
        return dict.fromkeys(
            pair for formula in self.formulas for pair in formula.comparisons
        )

    def _look_for(self, frame: pl.DataFrame, column: str, text: str) -> None:
        """Look for a text of a formula, for another spelling of it, and for examples of
        what is there.
        """
        texts = pl.col(column).cast(pl.String).str.strip_chars()
        is_equal = equals_text(column, text)
        if (column, text) not in self.seen and frame.select(is_equal.any()).item():
            self.seen.add((column, text))
        if (column, text) not in self.spelled:
            alike = (texts.str.to_lowercase() == text.lower()) & ~is_equal
            spelling = frame.select(texts.filter(alike).first()).item()
            if spelling is not None:
                self.spelled[column, text] = spelling
        shown = self.examples.setdefault(column, [])
        if len(shown) < _MOST_SHOWN:
            distinct = frame.select(texts.drop_nulls().unique(maintain_order=True))
            shortened = distinct.to_series().str.head(_LONGEST).head(2 * _MOST_SHOWN)
            new = [example for example in shortened if example not in shown]
            shown.extend(new[: _MOST_SHOWN - len(shown)])

    def problems(self, roles: TableMapping) -> Iterator[str]:
        """Sentences on texts of formulas that no row holds: misspelt ones, and all that
        a reward has.
        """
        for formula in self.formulas:
            for column in dict.fromkeys(column for column, _ in formula.comparisons):
                texts = [text for name, text in formula.comparisons if name == column]
                absent = self._absent(column, texts)
                wrong = [text for text in absent if (column, text) in self.spelled]
                if formula.text == roles.reward and len(absent) == len(texts):
                    wrong = absent
                if wrong:
                    yield (
                        f"no row holds {listed(map(repr, wrong))} in {column}, with"
                        f" which {formula.text} compares it; it holds"
                        f" {self._shown(column, wrong)}: write one of these, or leave"
                        " it out"
                    )

    def notes(self) -> Iterator[str]:
        """Sentences on words taken for missing values, on ids that look like one, and
        on texts not found.
        """
        counts = {name: count for name, count in sorted(self.missing.items()) if count}
        if counts:
            shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
            yield (
                "words such as NA, null and nan were taken for missing values"
                f" ({shown})"
            )
        for name, count in sorted(self.as_labels.items()):
            if count:
                rows = counted(count, "row")
                yield (
                    f"in {rows} {name} is a word such as NA or null, and was taken for"
                    " a label like others"
                )
        for column, text in self._comparisons():
            if self._absent(column, [text]):
                yield (
                    f"no row holds {text!r} in {column}, with which a formula"
                    " compares it"
                )
            elif (column, text) in self.spelled:
                other = self.spelled[column, text][:_LONGEST]
                yield (
                    f"{column} also holds {other!r}, which a formula's {text!r} does"
                    " not equal"
                )

    def _absent(self, column: str, texts: Iterable[str]) -> list[str]:
        """Texts that no row holds; that no cell is empty is no mistake of a formula."""
        return [text for text in texts if text and (column, text) not in self.seen]

    def _shown(self, column: str, texts: Iterable[str]) -> str:
        """Examples of what a column holds, first what looks like one of these texts."""
        alike = [
            self.spelled[column, text][:_LONGEST]
            for text in texts
            if (column, text) in self.spelled
        ]
        shown = dict.fromkeys((*alike, *self.examples.get(column, [])))
        return listed(map(repr, shown), _MOST_SHOWN) or "no text"
