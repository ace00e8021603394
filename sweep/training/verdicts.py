"""Owns what an exception in the middle of a training means as the outcome of a trial.

Knows nothing of how a trial is run, or of who else trains with it.
"""

from __future__ import annotations

from search_spaces.config import TrialConfig
from search_spaces.errors import words_of
from storage.records import NEIGHBOUR, Ineffective, Outcome, OutOfMemory, Stage
from sweep.training.device import Device
from sweep.training.exceptions import knob_of_kernel, lacks_kernel_resources, requested_bytes
from sweep.training.proof import is_from_the_compiler
from sweep.training.step import TrainingLoop

_DETAIL_LENGTH = 600


def verdict_of(
    error: Exception,
    config: TrialConfig,
    *,
    device: Device,
    loop: TrainingLoop | None,
    was_robbed: bool = False,
    doing: str = "",
) -> Outcome | None:
    """Return what an exception means, in strings and numbers alone; None for the unknown.

    Args:
        error: still being handled.
        config: what was trained.
        device: on which.
        loop: whose steps were done; None before there is one.
        was_robbed: whether others hold memory that was promised to this process.
        doing: what else than a training step was being done, to begin a sentence with.
    """
    detail = (doing + words_of(error))[:_DETAIL_LENGTH]
    if lacks_kernel_resources(error):
        return Ineffective(knob=knob_of_kernel(error, config), detail=detail)
    if device.ran_out(error):
        return OutOfMemory(
            stage=_stage(loop, config),
            step=0 if loop is None else loop.micro_step,
            requested_bytes=requested_bytes(error),
            peak_allocated_bytes=device.peak_allocated_bytes(),
            detail=detail,
            flags=(NEIGHBOUR,) if was_robbed else (),
        )
    if config.compile and is_from_the_compiler(error):
        return Ineffective(knob="compile", detail=detail)
    return None


def _stage(loop: TrainingLoop | None, config: TrialConfig) -> Stage:
    """Return the stage of a failure: the base is there, so it is not that of loading it, but where
    the base is sharded, which gets its weights with the adapters."""
    if loop is None and config.is_sharded:
        return "load"
    return "forward" if loop is None or loop.stage == "load" else loop.stage
