"""Whether a result can be what a trial came to: held against its configuration and its study.

Results come from other processes, machines and files: a worker, a spool, another study, a database.
Each value by itself is checked by the types of `storage.records` when it is read; here they are set
against each other. What the worker measured exactly must agree; what depends on the machine has a
bound that nothing passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, TypeAdapter, ValidationError

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.documents import explain
from qlora_sweep.search_spaces.gpus import MEMORY_TOLERANCE, GpuSpec, gpu_catalogue, match_product
from qlora_sweep.search_spaces.linears import linear_shapes
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudyDefinition
from qlora_sweep.storage.records import (
    Crashed,
    Measurement,
    Outcome,
    TrialRecord,
    held_to_budget,
)

TOKENS_WITHIN = 1e-3
"""Relative: speed times seconds are the tokens of a step, in files of figures that are rounded."""
_SHOWN_MAX = 3
"""Trials that are left out and named with the reason; of more the number is said."""
_outcomes: TypeAdapter[Outcome] = TypeAdapter(Outcome)


def contradicted_tokens(
    config: TrialConfig, *, tokens_per_second: float, step_seconds: float, loss_tokens: float | None
) -> str | None:
    """Return what is wrong with a speed beside the seconds of its step; None where both agree.

    Args:
        config: of the trial.
        tokens_per_second: that carry loss.
        step_seconds: of an optimizer step.
        loss_tokens: in a step on texts; None for full rows.
    """
    tokens = tokens_per_second * step_seconds
    expected: float = config.tokens_per_step
    if loss_tokens is not None:
        expected = loss_tokens
    if abs(tokens - expected) <= TOKENS_WITHIN * expected:
        return None
    return (
        f"tokens_per_second times step_seconds is {tokens:,.0f} tokens, and a step has "
        f"{expected:,.0f}"
    )


def frozen_linear_weights(model: ModelSpec) -> int:
    """Return the weights of the linear layers of all decoder layers; 0 where they are not known."""
    shapes = linear_shapes(model)
    if shapes is None:
        return 0
    return model.hidden_layers * sum(rows * columns for rows, columns in shapes.values())


@dataclass(frozen=True)
class Soundness:
    """What any trial of one study can come to."""

    budget_bytes: int
    memory_bytes: float | None
    """That a GPU of the kind that ran may have; None where the catalogue does not know it."""
    flops_per_second: float
    """Peak of one GPU; of the catalogue's fastest where it is none that is known."""
    weights: int
    """Frozen, that every token is multiplied with; 0 where the architecture is not known."""

    @classmethod
    def of(cls, definition: StudyDefinition) -> Soundness:
        """Return that of a study."""
        target = definition.target
        gpu = None
        if target.is_on_gpu:
            gpu = match_product(target.emulated_on or target.gpu) or gpu_catalogue().get(target.gpu)
        memory_bytes = None
        fastest = list(gpu_catalogue().values())
        if gpu is not None:
            memory_bytes = max(gpu.memory_bytes * (1 + MEMORY_TOLERANCE), target.budget_bytes)
            fastest = [gpu]
        return cls(
            budget_bytes=target.budget_bytes,
            memory_bytes=memory_bytes,
            flops_per_second=max(_peak_flops(one) for one in fastest),
            weights=frozen_linear_weights(ModelSpec.from_json(definition.model)),
        )

    def fault(self, config: TrialConfig, outcome: Outcome) -> str | None:
        """Return why a configuration cannot have come to this; None where it may have."""
        measured = getattr(outcome, "measurement", None)
        peak = getattr(measured or outcome, "peak_allocated_bytes", None)
        if peak is not None and self.memory_bytes is not None and peak > self.memory_bytes:
            return f"peak_allocated_bytes {peak:,} is more than the GPU has"
        if measured is None:
            return None
        return self._fault_of_measured(config, measured)

    def _fault_of_measured(self, config: TrialConfig, measured: Measurement) -> str | None:
        tokens = config.tokens_per_step
        loss_tokens = measured.loss_tokens_per_step
        quality = measured.quality
        if loss_tokens is not None and loss_tokens > tokens * (1 + TOKENS_WITHIN):
            return f"loss_tokens_per_step {loss_tokens:,.0f} is more than the {tokens:,} of a step"
        contradiction = contradicted_tokens(
            config,
            tokens_per_second=measured.tokens_per_second,
            step_seconds=measured.step_seconds,
            loss_tokens=loss_tokens,
        )
        if contradiction is not None:
            return contradiction
        if measured.gpus > config.data_parallel:
            return f"GPUs {measured.gpus:,} is more than data_parallel {config.data_parallel}"
        # The least: each frozen weight forward once, each trained one as well.
        weights = self.weights + measured.trainable_parameters
        computed = loss_tokens or tokens
        least = 2.0 * weights * computed / config.data_parallel / self.flops_per_second
        if measured.step_seconds < least:
            return (
                f"step_seconds {measured.step_seconds:.3g} is less than the {least:.3g} that the "
                "peak FLOP/s allow"
            )
        held_bytes = 2 * measured.trainable_parameters / config.data_parallel
        if measured.peak_allocated_bytes < held_bytes:
            return (
                f"peak_allocated_bytes {measured.peak_allocated_bytes:,} cannot hold "
                f"{measured.trainable_parameters:,} trainable parameters"
            )
        if quality is not None and quality.eval_loss == 0.0 and not config.is_on_pairs:
            return "eval_loss is 0, which no text has"
        return None

    def fault_of_record(self, record: TrialRecord) -> str | None:
        """Return why a record cannot be of a trial of this study; None where it may be.

        A peak above the budget is stored as out of memory, so no record of a fit has one.
        """
        fault = self.fault(record.config, record.outcome)
        if fault is not None:
            return fault
        if held_to_budget(record.outcome, budget_bytes=self.budget_bytes) != record.outcome:
            return "its peak is above the budget, and it is said to fit"
        return None

    def counted(self, config: TrialConfig, reported: object) -> Outcome:
        """Return what an outcome that a runner reported counts as: out of memory where it was
        measured above the budget, and a failure where it cannot be."""
        if isinstance(reported, BaseModel):
            reported = reported.model_dump(warnings=False)
        try:
            outcome = _outcomes.validate_python(reported)
            why = self.fault(config, outcome)
        except ValidationError as error:
            why = explain(error)
        if why is not None:
            detail = f"what it measured cannot be: {why}"
            return Crashed(phase="measure", cause="protocol", detail=detail)
        return held_to_budget(outcome, budget_bytes=self.budget_bytes)


def _peak_flops(gpu: GpuSpec) -> float:
    return max(gpu.peak_flops.values())


def left_out_words(left_out: Mapping[int, str], *, of: str) -> tuple[str, ...]:
    """Return in a sentence which trials are left out, and why; nothing where none are.

    Args:
        left_out: what is wrong, by the trial's number.
        of: the study or the file that holds them.
    """
    if not left_out:
        return ()
    named = [f"trial {number}: {fault}" for number, fault in sorted(left_out.items())]
    shown = "; ".join(named[:_SHOWN_MAX])
    more = len(named) - _SHOWN_MAX
    if more > 0:
        shown += f"; and {more} more"
    are = f"{len(named)} trials are"
    if len(named) == 1:
        are = "1 trial is"
    return (f"{are} left out of {of}, as what is stored cannot be: {shown}",)


def sound_records(
    records: Iterable[TrialRecord], soundness: Soundness
) -> tuple[list[TrialRecord], dict[int, str]]:
    """Return the records that are sound, and what is wrong with the others by trial number."""
    kept = list[TrialRecord]()
    left_out = dict[int, str]()
    for record in records:
        fault = soundness.fault_of_record(record)
        if fault is None:
            kept.append(record)
        else:
            left_out[record.number] = fault
    return kept, left_out
