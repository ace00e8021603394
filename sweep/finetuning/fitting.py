"""Whether a training is predicted to fit, and what would be the next smaller one.

How memory is predicted, for which rows, is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.errors import NothingFits, SweepError
from sweep.predict.memory.prediction import Fit
from sweep.predict.memory.predictor import MemoryPredictor


@dataclass(frozen=True)
class Smaller:
    """A configuration that needs less memory than another."""

    config: TrialConfig
    peak_allocated_bytes: int | None
    """As predicted; None where nothing predicts it."""

    def words(self, than: TrialConfig) -> str:
        """Return it as what is to be changed."""
        changed = self.config.changes_from(than)
        settings = ", ".join(f"{key} {value}" for key, value in changed.items())
        known = self.peak_allocated_bytes
        predicted = "not predicted" if known is None else f"predicted: {units.gib(known)}"
        return f"{settings} ({predicted})"


def candidates(config: TrialConfig) -> Iterator[TrialConfig]:
    """Yield configurations that need less memory, the nearest first.

    Smaller micro-batches train the same, as accumulation makes up for them; so does recomputing
    every layer, more slowly. Shorter rows cut more of the texts, and come last.
    """
    samples = config.samples_per_step
    smaller = [n for n in range(config.micro_batch_size - 1, 0, -1) if samples % n == 0]
    sizes = [{"micro_batch_size": n, "effective_batch_size": samples} for n in smaller]
    yield from (config.model_copy(update=size) for size in sizes)
    if config.checkpoint_fraction < 1:
        whole = {"checkpoint_fraction": 1.0}
        yield from (config.model_copy(update={**size, **whole}) for size in ({}, *sizes))
    last = {**(sizes[-1] if sizes else {}), "checkpoint_fraction": 1.0}
    length = config.seq_len // 2
    while length >= 1:
        yield config.model_copy(update={**last, "seq_len": length})
        length //= 2


def next_smaller(
    config: TrialConfig,
    *,
    predictor: MemoryPredictor | None,
    budget_bytes: int,
    is_valid: Callable[[TrialConfig], bool] = lambda _: True,
    has_run_out: bool = False,
) -> Smaller | None:
    """Return the nearest smaller configuration that fits; None where none is predicted to.

    Without a prediction it is the nearest one, which may not fit either.

    Args:
        config: that is too large.
        predictor: of memory on the GPU, for the texts; None where nothing predicts it.
        budget_bytes: of the GPU.
        is_valid: whether a configuration can be trained but for its memory.
        has_run_out: whether it ran out of memory, whatever had been predicted of it.
    """
    try:
        room = _room(config, predictor, budget_bytes) if has_run_out else budget_bytes
        for smaller in filter(is_valid, candidates(config)):
            if predictor is None:
                return Smaller(smaller, None)
            predicted = predictor.predict(smaller)
            if predicted.fits(room) is Fit.YES:
                return Smaller(smaller, predicted.peak_allocated_bytes)
    except SweepError:
        return next_smaller(config, predictor=None, budget_bytes=budget_bytes, is_valid=is_valid)
    return None


def _room(config: TrialConfig, predictor: MemoryPredictor | None, budget_bytes: int) -> int:
    """Return under what others are to be predicted where a configuration ran out of memory.

    What is predicted of it is too little, and as much of another would be no better.
    """
    if predictor is None:
        return budget_bytes
    return min(budget_bytes, predictor.predict(config).peak_allocated_bytes - 1)


def refuse_too_large(
    config: TrialConfig,
    *,
    predictor: MemoryPredictor,
    budget_bytes: int,
    is_valid: Callable[[TrialConfig], bool] = lambda _: True,
    warn: Callable[[str], None],
) -> None:
    """Refuse what is predicted not to fit, before anything is loaded.

    Raises:
        NothingFits: with the prediction, and the next smaller configuration that fits.
    """
    try:
        predicted = predictor.predict(config)
    except SweepError as error:
        warn(f"memory is not predicted, so the device decides: {error}")
        return
    if predicted.fits(budget_bytes) is not Fit.NO:
        return
    needed = units.gib(predicted.needed_bytes(budget_bytes))
    smaller = next_smaller(
        config, predictor=predictor, budget_bytes=budget_bytes, is_valid=is_valid
    )
    then = f"the next smaller one that fits: {smaller.words(config)}" if smaller else "none fits"
    raise NothingFits(
        f"predicted not to fit: it needs {needed}, and the budget is {units.gib(budget_bytes)}; "
        f"{then}"
    )
