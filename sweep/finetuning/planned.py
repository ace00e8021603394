"""What a training would take that no trial measured: memory and speed, by the product's forecaster;
and the length at which a dataset is hardly cut.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import CUT_MAX
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.sweep.data.collation import Truncation
from qlora_sweep.sweep.data.lengths import longer_lengths
from qlora_sweep.sweep.data.prepared_dataset import PreparedDataset
from qlora_sweep.sweep.export.record import Record
from qlora_sweep.sweep.finetuning.subject import nearest_that_fits
from qlora_sweep.sweep.predict.forecast import Forecaster, calibrated
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset
from qlora_sweep.sweep.predict.speed.predictor import Calibration


@dataclass(frozen=True)
class Prediction:
    """What one configuration is predicted to take; None where that is not predicted."""

    tokens_per_second: float | None
    """Supervised ones, on the GPU that is here."""
    tokens_per_second_range: tuple[float, float] | None
    """That holds nine in ten."""
    peak_allocated_bytes: int | None
    uncertainty: float
    """How far the peak may be off, relative."""
    fit: Fit
    budget_bytes: int | None
    """None where nothing limits it."""

    @classmethod
    def of(cls, config: TrialConfig, forecaster: Forecaster, *, has_budget: bool) -> Prediction:
        """Return what a forecaster says.

        Args:
            config: what would be trained.
            forecaster: for this model, GPU and dataset.
            has_budget: whether the forecaster's budget limits the training.
        """
        expected = forecaster.expect(config)
        speed = ends = None
        # Of a CPU, and of a GPU that the catalogue does not have, no speed is predicted.
        if forecaster.speed is not None:
            speed = expected.tokens_per_second
            if expected.speed_estimate is not None:
                ends = expected.speed_estimate.ends
        return cls(
            tokens_per_second=speed,
            tokens_per_second_range=ends,
            peak_allocated_bytes=expected.peak_allocated_bytes,
            uncertainty=expected.memory_uncertainty,
            fit=expected.fit,
            budget_bytes=forecaster.budget_bytes if has_budget else None,
        )

    @property
    def peak_allocated_bytes_range(self) -> tuple[float, float] | None:
        """Between what the peak is."""
        peak = self.peak_allocated_bytes
        if peak is None:
            return None
        return peak * (1.0 - self.uncertainty), peak * (1.0 + self.uncertainty)

    def words(self) -> str:
        """Return it as a clause: memory, of which budget, and speed."""
        memory = "memory is not predicted"
        if self.peak_allocated_bytes is not None:
            peak = units.gib(self.peak_allocated_bytes)
            error = units.error(self.uncertainty)
            memory = f"predicted {peak} (within {error})"
        if self.budget_bytes is not None:
            memory += f" of {units.gib(self.budget_bytes)}"
            doubts = {Fit.NO: ", which does not fit", Fit.UNCERTAIN: ", which may not fit"}
            memory += doubts.get(self.fit, "")
        if self.tokens_per_second is None:
            return f"{memory}; speed is not predicted on this device"
        rate = units.rate(self.tokens_per_second)
        interval = units.rate_interval(self.tokens_per_second_range)
        return f"{memory}, {rate} tokens/s ({interval})"


@dataclass(frozen=True)
class Longer:
    """A training at a longer length, with what that cuts off all examples and would take."""

    config: TrialConfig
    truncation: Truncation
    prediction: Prediction

    @property
    def cuts_little(self) -> bool:
        """Whether it needs no confirmation by the person."""
        return self.truncation.supervised_share <= CUT_MAX


def longer(
    config: TrialConfig, forecaster: Forecaster, *, max_positions: int | None, has_budget: bool
) -> Longer | None:
    """Return the training at the shortest length that cuts at most `CUT_MAX` of the supervised
    tokens, or at the longest that fits where that is shorter; None where none fits.

    Args:
        config: what is to be trained.
        forecaster: for this model, GPU and dataset.
        max_positions: of the model; None where its config does not say.
        has_budget: whether the forecaster's budget limits the training.
    """
    assert forecaster.shapes is not None, "only a dataset is cut"
    epochs = forecaster.shapes.epochs

    def truncation_at(length: int) -> Truncation:
        return epochs.truncated_dataset(length).whole

    @cache
    def planned_at(length: int) -> TrialConfig | None:
        return _at_length(config, length, forecaster, has_budget=has_budget)

    lengths = longer_lengths(epochs.longest, above=config.seq_len, max_positions=max_positions)
    # A longer one cuts no more, and needs no less memory.
    enough = bisect_left(
        lengths, True, key=lambda length: truncation_at(length).supervised_share <= CUT_MAX
    )
    wanted = lengths[: enough + 1]
    fitting = bisect_left(wanted, True, key=lambda length: planned_at(length) is None)
    if fitting == 0:
        return None
    length = wanted[fitting - 1]
    planned = planned_at(length)
    assert planned is not None, "it was found to fit"
    prediction = Prediction.of(planned, forecaster, has_budget=has_budget)
    return Longer(planned, truncation_at(length), prediction)


def _at_length(
    config: TrialConfig, length: int, forecaster: Forecaster, *, has_budget: bool
) -> TrialConfig | None:
    """Return a training at another length, with a smaller micro-batch or more recomputation where
    it fits with that alone; None where it does not fit, or a rule forbids it."""
    wanted = config.changed(seq_len=length)
    if not forecaster.is_valid(wanted):
        return None
    if not has_budget or forecaster.expect(wanted).fit is not Fit.NO:
        return wanted
    smaller = nearest_that_fits(wanted, forecaster)
    if smaller is None or smaller.seq_len != length:
        return None
    return smaller


def calibration_of(
    record: Record | None, product: str | None, *, dataset: PreparedDataset, shapes: ShapesOnDataset
) -> Calibration | None:
    """Return what a record's own measurement says of the speed of the GPU that is here; None where
    it is of another GPU or another dataset, or nothing is recorded.

    Args:
        record: of the configuration that was measured.
        product: of the GPU that is here; None on a CPU.
        dataset: that is trained on now.
        shapes: what configurations come to on them.
    """
    if record is None or product is None:
        return None
    gpu = match_product(product)
    if gpu is None or match_product(record.device) is not gpu:
        return None
    if record.texts is None:
        return calibrated([record], model=record.model.spec, gpu=gpu, shapes=None)
    if record.texts.summary.fingerprint != dataset.summary.fingerprint:
        return None
    return calibrated([record], model=record.model.spec, gpu=gpu, shapes=shapes)
