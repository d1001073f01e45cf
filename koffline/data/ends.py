"""Where episodes end, one rule for all readers: two flags on one row, and rows that do
not follow each other.

Files mark the end of an episode in several ways. The rules here are those of
docs/tables.md; the readers of flat files and of tables both apply them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from koffline.data.columns import blocks
from koffline.errors import counted

# Fewer rows with both flags may be chance: the world ended in the step in which
# recording stopped.
_NOT_BY_CHANCE = 3
# Share of the cuts that are flagged terminal if the recorder flags every end terminal.
_NEARLY_ALL = 0.9
# Rows are shuffled if more than this share of those inside episodes is not followed by
# its next observation.
_MOST_UNLINKED = 0.5


@dataclass
class EndFlags:
    """Rows of a log counted by their two flags of ends, to decide what both flags on
    one row say.

    n_terminal: rows flagged terminal; n_truncated: rows flagged truncated; n_both: rows
    with both flags.
    """

    n_terminal: int = 0
    n_truncated: int = 0
    n_both: int = 0

    def add(
        self, terminal: Bool[np.ndarray, " row"], truncated: Bool[np.ndarray, " row"]
    ) -> None:
        """Count the flags (N,) of more rows."""
        self.n_terminal += int(terminal.sum())
        self.n_truncated += int(truncated.sum())
        self.n_both += int((terminal & truncated).sum())

    @property
    def terminal_marks_every_end(self) -> bool:
        """Whether ``terminal`` is set at every end, also where a time limit or the
        logger cut the episode.

        If every cut is flagged terminal, the terminal flag says nothing about cuts, and
        rows with both flags count as cut. A few cuts that are not flagged terminal
        change nothing, if more rows are flagged terminal alone: else it may be
        ``truncated`` that is set at every end.
        """
        if self.n_both < _NOT_BY_CHANCE:
            return False
        if self.n_both == self.n_truncated:
            return True
        is_nearly_every_cut = self.n_both >= _NEARLY_ALL * self.n_truncated
        return is_nearly_every_cut and self.n_terminal > self.n_truncated

    def note(self, truncated: str, terminal: str) -> str:
        """Note on rows that have both flags and were taken to be cut. truncated,
        terminal: names of the flags.
        """
        if self.n_both == self.n_truncated:
            rows = f"all {self.n_both} rows"
        else:
            rows = f"{self.n_both} of {self.n_truncated} rows"
        return (
            f"{rows} flagged {truncated} are flagged {terminal} too: they were taken to"
            " be cut, not to have ended by themselves"
        )


def rows_are_linked(observations: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Whether (N − 1,) a row's next observation equals, up to rounding, the observation
    of the next row.
    """
    if following.shape != observations.shape:
        # Transitions refuses these shapes
        return np.ones(len(observations) - 1, dtype=np.bool_)
    linked = np.empty(len(observations) - 1, dtype=np.bool_)
    for block in blocks(len(linked)):
        below = observations[block.start + 1 : block.stop + 1]
        close = np.isclose(
            following[block], below, rtol=1e-4, atol=1e-6, equal_nan=True
        )
        linked[block] = close.reshape(len(below), -1).all(axis=1)
    return linked


@dataclass
class LinkCounts:
    """Rows of a log without episode ids, counted to decide whether next observations
    show its episodes.

    inside: rows that have no flag and a row below. unlinked: those whose next
    observation is not the observation of the row below. has_cuts: whether a row is
    flagged truncated.
    """

    inside: int = 0
    unlinked: int = 0
    has_cuts: bool = False

    def add(self, ends: np.ndarray, truncated: np.ndarray, linked: np.ndarray) -> None:
        """Add consecutive rows. ends, truncated: (N,) flags; linked: (N − 1,) from
        `rows_are_linked`.
        """
        goes_on = ~ends[: len(linked)]
        self.inside += int(goes_on.sum())
        self.unlinked += int((goes_on & ~linked).sum())
        self.has_cuts = self.has_cuts or bool(truncated.any())

    @property
    def stand_alone(self) -> bool:
        """Whether rows are shuffled: flags then do not say which rows form an
        episode.
        """
        return not self.has_cuts and self.unlinked > _MOST_UNLINKED * self.inside

    @property
    def show_cuts(self) -> bool:
        """Whether an unlinked row is where an unmarked time limit, or the logger, cut
        an episode.
        """
        return not self.has_cuts and not self.stand_alone and self.unlinked > 0

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided, for people."""
        if self.stand_alone:
            return (
                "rows stand alone: next observations are not the observations of the"
                " rows below, so terminals alone do not mark episodes",
            )
        if self.show_cuts:
            rows = counted(self.unlinked, "row", "was", "were")
            return (
                f"{rows} marked as truncated: no timeouts are given, and the row below"
                " begins elsewhere than the next observation",
            )
        if self.unlinked:
            return (
                f"{self.unlinked} of {self.inside} rows inside episodes have a next"
                " observation other than the observation of the row below; the flags"
                " were trusted",
            )
        return ()
