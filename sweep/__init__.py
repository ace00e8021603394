"""qlora-sweep: how a configuration is tried. The tuner, the runner, the worker, the predictors."""
