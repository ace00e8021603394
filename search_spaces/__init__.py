"""What may be tried, and on what: configurations, spaces, models, GPUs. Imports nothing of ours."""
