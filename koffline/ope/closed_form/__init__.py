"""Estimators that are one linear solve: MQL, LSTD-Q, MWL, DualDICE, and the doubly robust combination."""
