"""Episodes of a log with their importance ratios: means over them, and intervals."""
