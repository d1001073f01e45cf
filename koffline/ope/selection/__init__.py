"""Which of several policies is best: ranking with intervals, paired differences, quality of the choice."""

from koffline.ope.selection.metrics import SelectionMetrics, TypeErrors, score_selection
from koffline.ope.selection.ranking import PolicyRanking, RankedPolicy
from koffline.ope.selection.selecting import select_policies

__all__ = [
    "PolicyRanking",
    "RankedPolicy",
    "SelectionMetrics",
    "TypeErrors",
    "score_selection",
    "select_policies",
]
