"""A study's life: resolved, driven trial by trial, pruned, stopped, and told to storage."""
