"""Logged transitions: the record, its readers and writers, and the bridge to d3rlpy."""
