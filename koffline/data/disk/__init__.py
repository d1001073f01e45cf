"""Logs that stay on disk: shards, blocks of rows, mini-batches and samples from
them.
"""
