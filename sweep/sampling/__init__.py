"""What is tried next: a space in Optuna's words, and the samplers that draw from it."""
