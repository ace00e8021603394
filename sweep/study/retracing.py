"""Memory profiles of other versions of the libraries, compared with own ones behind the trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from optuna.samplers import BaseSampler

from qlora_sweep.search_spaces.errors import in_percent
from qlora_sweep.sweep.predict.memory.predictor import one_of_each_kind
from qlora_sweep.sweep.sampling.guided import GuidedSampler
from qlora_sweep.sweep.study.driver import Driver
from qlora_sweep.sweep.study.events import Event, TrialFinished


@contextmanager
def retraced_behind(
    driver: Driver, sampler: BaseSampler, *, warn: Callable[[str], None]
) -> Iterator[None]:
    """Trace inside the ``with`` what the study's memory is predicted from and other versions have
    traced; what is predicted between two trials once that is done, is by own profiles.

    Args:
        driver: of the study, whose memory is predicted already.
        sampler: of the study.
        warn: told where they differ.
    """
    memory, told = driver.forecaster.tracing, driver.on_event
    tracing, others = None, "" if memory is None else memory.other_versions
    # Where there is no process to be had, the next run tries again.
    with suppress(OSError):
        tracing = None if memory is None else memory.retrace()
    if tracing is None:
        yield
        return

    def on_event(event: Event) -> None:
        told(event)
        if isinstance(event, TrialFinished) and tracing.has_ended():
            driver.on_event = told
            if tracing.end().status == 0 and (difference := _renewed(driver)):
                if isinstance(sampler, GuidedSampler):
                    sampler.forget()
                warn(f"Memory was predicted from profiles of {others}. {difference}")

    driver.on_event = on_event
    try:
        yield
    finally:
        tracing.end()


def _renewed(driver: Driver) -> str:
    """Predict from own profiles from now on; return what that changes in words, or nothing."""
    forecaster = driver.forecaster
    kinds = list(filter(forecaster.is_valid, one_of_each_kind(driver.space)))
    before = forecaster.whole_memory(kinds).peak_allocated_bytes
    forecaster.renew_memory()
    after = forecaster.whole_memory(kinds).peak_allocated_bytes
    changed, known = before != after, (before > 0) & (after > 0)
    if not changed.any():
        return ""
    most = np.abs(after[known] / before[known] - 1).max(initial=0.0)
    return (
        f"Traced with what is installed, the peaks of {changed.sum()} of {len(kinds)} kinds of "
        f"configurations are others, by up to {in_percent(most)}; those are used from now on."
    )
