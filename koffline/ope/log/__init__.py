"""The log as an evaluation uses it: its rows, the problem they pose, and its limits."""
