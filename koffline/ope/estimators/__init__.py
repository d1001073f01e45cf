"""Estimators of a policy's value, one contract for all."""
