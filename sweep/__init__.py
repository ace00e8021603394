"""How a configuration is tried: the tuner, the runner, the worker and the predictors."""
