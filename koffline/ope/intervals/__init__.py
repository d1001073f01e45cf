"""Intervals for a policy's value, each labelled with what it promises."""
