"""The three verdicts on a sentence of the paper."""

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
