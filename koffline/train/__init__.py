"""Training any d3rlpy algorithm, stock or ours, over a log, from one config file."""
