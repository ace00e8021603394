"""A study's life: settled, driven trial by trial, pruned, stopped, and told to storage."""
