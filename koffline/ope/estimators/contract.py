"""What an estimator is: the names under which results show it, what it reads, and one
method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from koffline.ope import names
from koffline.ope.results import PointEstimate

if TYPE_CHECKING:
    from koffline.ope.workspace import Workspace


@runtime_checkable
class Estimator(Protocol):
    """An estimator of a policy's value from a log.

    Pass one to ``koffline.evaluate(..., estimator=...)``, or name it on the command
    line, ``--estimator package.module:name``.

    name: as settings, tables and JSON call it. family: the kind of estimator in tables,
    as "value function".
    interval_kinds: kinds of intervals (``koffline.ope.names``) that can be asked for.
    "default" is the estimator's own, and stands first. Those in ``SYSTEM_KINDS`` are
    made by koffline from the features of the networks; any others are made by the
    estimator, which reads ``workspace.settings.interval``.
    needs: what it reads besides the rows, of ``koffline.ope.names.NEEDS``. It decides
    which checks apply. *networks*: value functions are trained; the coverage of the
    policy's actions, the agreement of the heads, and a doubly robust estimate are
    checked. *episodes*: the value is a mean over logged episodes, whose rewards end
    where recording stops; their effective number is checked. *probabilities*: of the
    logged actions.
    """

    @property
    def name(self) -> str:
        """As settings, tables and JSON call it."""
        ...

    @property
    def family(self) -> str:
        """The kind of estimator."""
        ...

    @property
    def interval_kinds(self) -> tuple[str, ...]:
        """Kinds of intervals that can be asked for, its own first."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """What it reads besides the rows."""
        ...

    def estimate(self, workspace: Workspace) -> PointEstimate:
        """The value J = E_{s0, a~π} Q(s0, a) in units of the return, with the interval.

        Raises KofflineError, in one line, if the estimator does not apply to this log.
        """
        ...


class ListedEstimator:
    """Base of koffline's own estimators, which `koffline.ope.names` lists."""

    name: str

    @property
    def family(self) -> str:
        """The kind of estimator."""
        return names.find(self.name).family

    @property
    def interval_kinds(self) -> tuple[str, ...]:
        """Kinds of intervals that can be asked for, its own first."""
        return names.find(self.name).interval_kinds

    @property
    def needs(self) -> frozenset[str]:
        """What it reads besides the rows."""
        return names.find(self.name).needs
