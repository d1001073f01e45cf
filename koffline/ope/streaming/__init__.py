"""Estimates from a log on disk: networks from a sample of rows, all else from sums of one pass over them."""
