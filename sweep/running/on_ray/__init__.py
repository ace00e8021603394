"""Trials on the machines of a Ray cluster: who they are, and a runner for each of their cards."""
