"""What may be tried, and on what: configurations, spaces, models and GPUs. Imports nothing of ours."""
