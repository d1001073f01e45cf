"""Tests of what every estimator assumes of the log and the policy."""
