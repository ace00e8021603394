"""What was exported, run for some steps and held against what was measured; `runs` does it."""
