"""Algorithms on d3rlpy's seam; with data/replay.py the only part that knows d3rlpy."""
