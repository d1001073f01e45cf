"""Looking at finished runs: d3rlpy's commands stats, plot, plot-all, export, record and play."""
