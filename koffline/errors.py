"""Errors that a user can act on: what is wrong, what was received, and the remedy, in one line."""


class KofflineError(Exception):
    """Base of every error koffline raises for bad input; the command line prints it and exits with 2."""


class DataError(KofflineError):
    """A log that cannot be read or whose columns contradict each other."""


class PolicyError(KofflineError):
    """A policy that cannot be loaded safely or does not fit the log."""


class ConfigError(KofflineError):
    """A setting that is unknown or out of range."""
