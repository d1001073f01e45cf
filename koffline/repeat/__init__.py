"""A run again from its record, and whether its results are the same."""
