"""qlora-sweep: what may be tried, and on what. Spaces, models, GPUs; imports nothing of ours."""
