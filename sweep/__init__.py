"""qlora-sweep: how a configuration is tried. The tuner, the runner, the worker, the predictors."""

from qlora_sweep.sweep.namesakes import refuse_namesakes

# Every process of ours comes by here first: the command and each child.
refuse_namesakes()
