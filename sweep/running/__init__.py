"""Where a configuration runs: the runner seam, the supervised child behind it, and the GPU."""
