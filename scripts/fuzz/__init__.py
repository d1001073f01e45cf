"""Fuzzing of every reader: `python -m scripts.fuzz.run --reader NAME --seconds N` (see
SECURITY.md).
"""
