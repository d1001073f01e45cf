"""Tables (Parquet, Arrow, CSV, arrays) as logs: columns are given by name and become
transitions.
"""
