"""The command line: ``koffline evaluate``, ``koffline data …``; bad input ends in one line, exit code 2."""

from koffline.cli.main import cli, main

__all__ = ["cli", "main"]
