"""Importance sampling and doubly robust estimates over the episodes of a log."""
