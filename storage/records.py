"""What a trial leaves behind: measurement, outcome and record, from the worker into storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.redaction import redact

Detail = Annotated[str, AfterValidator(redact)]
"""What happened, in the words of whatever it happened to: no secret of theirs is ever stored."""


class Verdict(StrEnum):
    """What became of a trial. The last three may be retried; the others never."""

    FITS = "fits"
    OOM = "oom"
    PREDICTED_OOM = "predicted_oom"
    DOMINATED_OOM = "dominated_oom"
    PRUNED_SLOW = "pruned_slow"
    DIVERGED = "diverged"
    INVALID = "invalid"
    INEFFECTIVE = "ineffective"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    LOST = "lost"


RETRYABLE = frozenset({Verdict.TIMED_OUT, Verdict.CRASHED, Verdict.LOST})
OUT_OF_MEMORY = frozenset({Verdict.OOM, Verdict.PREDICTED_OOM, Verdict.DOMINATED_OOM})

Stage = Literal["load", "forward", "backward", "optimizer"]
"""Where a training step was when memory ran out."""

Phase = Literal["start", "build", "attach", "warmup", "measure", "compare", "detach", "quality"]
"""Where a worker is, in the order in which it gets there; each phase has its own deadline."""

CrashCause = Literal[
    "exception", "exit", "signal", "protocol", "host_out_of_memory", "too_few_descriptors"
]
"""How a worker came to a bad end: the training raised something, the process ended by itself or by
a signal, it said what it was not asked, or what nobody can read; the memory of the host, and not of
the GPU, was used up; it could open no further file."""

Purpose = Literal["search", "confirm", "soak", "quality"]
"""Why a configuration is run: to find the best, to measure it again, to keep it running, or to see
what it learns with another seed."""


Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Bytes and steps are counted far below, and a database counts no further."""
NonNegative = Annotated[float, Field(ge=0, lt=1e18)]
"""Such as a loss; none reaches the bound."""
Positive = Annotated[float, Field(gt=0, lt=1e18)]
"""Such as a speed."""
Seconds = Annotated[float, Field(ge=0, lt=2**32)]
"""Of one trial: below a hundred years."""
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(gt=-1e18, lt=1e18)]
"""Such as an end of an interval, which may be below 0."""


_YEARS = range(2000, 2201)


def _moment(text: str) -> str:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or moment.year not in _YEARS:
        raise ValueError("must be a time of this age, with its zone")
    return text


Moment = Annotated[str, AfterValidator(_moment)]
"""ISO 8601, as a rule UTC."""


def moment_now() -> str:
    """Return the present, as a `Moment`.

    Raises:
        EnvironmentFault: the machine's clock is decades off, as one that lost its battery.
    """
    now = datetime.now(UTC)
    text = now.isoformat(timespec="milliseconds")
    if now.year not in _YEARS:
        raise EnvironmentFault(f"the clock of this machine says {text}: set it, then run again")
    return text


class _Frozen(BaseModel):
    """What other processes, machines and files write as well: a value that no trial can have is
    refused when it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


NEIGHBOUR = "neighbour"
"""Flag of what another process had a hand in."""
SPEED_REUSED = "speed_reused"
"""Flag of a speed that was measured of a configuration with another learning rate."""
_NOISY_FLAGS = frozenset({"noisy", NEIGHBOUR})


NOT_SHOWN: Mapping[str, bool | set[str]] = {"soak": True, "quality": {"eval_blocks"}}
"""What of a measurement stays in a study's storage."""


class SoakReport(_Frozen):
    """What a soak did beside its training steps, as a training does now and then."""

    steps: Count
    """Optimizer steps, warm-up included."""
    seconds: Seconds
    """From the first measured step to the last, evaluation and checkpoint included."""
    evaluation_loss: NonNegative
    evaluation_seconds: Seconds
    checkpoint_bytes: Count
    """Of the adapter and the optimizer's state on disk."""
    checkpoint_seconds: Seconds


class QualityReport(_Frozen):
    """What a configuration learned of a study's texts, from fresh adapters on the same base."""

    eval_loss: NonNegative
    """Mean loss of the held-out tokens that carry loss, in nats, each text by itself; of pairs the
    mean over pairs."""
    eval_tokens: Count
    """Held-out tokens that carry loss and were looked at."""
    eval_rows: Count = 0
    """Held-out examples, or pairs, that were looked at."""
    eval_wins: NonNegative | None = None
    """In how many of the pairs the chosen completion gained more; null where none are."""
    reward_accuracy_ci95: tuple[Share, Share] | None = None
    """Wilson's 95 % interval of the share of pairs that are such; null where none are."""
    eval_blocks: tuple[tuple[Finite, Count], ...] | None = None
    """Mean loss and supervised tokens, or pairs, of each block of them, the same ones for every
    configuration: they tell how sure a difference of two losses is. Null outside a study's storage.
    """
    eval_seq_len: Count
    """Tokens to which the held-out texts were cut, whatever the configuration trains at."""
    train_tokens: Count
    """Tokens that carry loss and were trained on."""
    train_loss: NonNegative
    """Mean loss of those, each when its turn came."""
    steps: Count
    """Optimizer steps."""
    seconds: Seconds
    """Of the device, training and evaluation together."""
    seed: Count
    """Of the adapters and of the texts' order."""
    seeds: tuple[Count, ...] = ()
    """Of all runs where this stands for several, whose mean loss it then has."""
    eval_loss_ci95: tuple[Finite, Finite] | None = None
    """Student's 95 % interval of that mean over the seeds; null of a single run."""


class Faithfulness(_Frozen):
    """How close 8-bit compute is to 16-bit compute of the same base, on the same examples and
    adapters. Errors are relative."""

    loss_error: Finite
    loss_error_margin: Finite = 0.0
    """Three standard errors of it, by how micro-batches differ; 0 of a single one."""
    gradient_error: Finite
    """Of the gradients of all adapters together."""
    gradient_cosine: Finite
    accepted_gradient_error: Finite
    """What rounding the weights to NF4 once more does to them, which is the bound."""
    accepted_loss_error: Finite
    """The same of the loss."""


class ProductErrors(_Frozen):
    """How far 8-bit products of layers of one name are off fp32 on the same weights, inputs and
    gradients, relative; and 16-bit products, which people accept."""

    projection: str
    """Such as ``down_proj``."""
    layers: Count
    forward: Finite
    """Of the median layer, as below; the worst has a name of its own."""
    forward_worst: Finite
    forward_16_bit: Finite
    gradient: Finite
    """Of the input's gradient."""
    gradient_worst: Finite
    gradient_16_bit: Finite


class EightBitProducts(_Frozen):
    """What 8-bit compute makes of a model's real weights, on its first examples."""

    errors: tuple[ProductErrors, ...]
    most_error: Finite
    """Of a product forward, over which a layer stays in 16 bits."""
    most_gradient_error: Finite
    """The same of an input's gradient."""
    kept_in_16_bits: tuple[str, ...]
    """Names of those layers."""
    share_in_16_bits: Finite
    """Of the frozen layers' weights. A step is at most that much longer than with none, as a
    product in 16 bits takes twice as long."""
    loss_8_bit: Finite
    """Of the first examples, nats a token, with all products in 8 bits."""
    loss_16_bit: Finite
    """The same with all in 16 bits on the same base."""


class Measurement(_Frozen):
    """What was measured of one configuration on one device; null where unknown."""

    tokens_per_second: Positive
    """Tokens that carry loss per second, at the median step; of all GPUs together."""
    gpus: Annotated[Count, Field(ge=1)] = 1
    """GPUs that trained it together. Peaks are of the GPU that needed most."""
    samples_per_second: Positive
    step_seconds: Positive
    """Median seconds of an optimizer step, accumulation included."""
    step_seconds_ci95: tuple[Positive, Positive] | None
    """Distribution-free 95 % interval of that median, from order statistics.

    Null where fewer than six steps were measured: nothing bounds a median at 95 % then.
    """
    steps_measured: Annotated[Count, Field(ge=1)]
    """On texts each is a pass over micro-batches that stand for the epoch, of some steps; the
    seconds are those of one step."""
    steps_warmup: Count
    peak_allocated_bytes: Annotated[Count, Field(ge=1)]
    """Most bytes that live tensors held at once, base model included."""
    peak_reserved_bytes: Count | None = None
    """Most bytes that the caching allocator held; null on a CPU."""
    peak_device_bytes: Count | None = None
    """Most bytes in use on the device as NVML saw it, every process counted; null on a CPU."""
    trainable_parameters: Count
    flops_utilization: Share | None = None
    """Model FLOP/s over the GPU's dense peak for the compute dtype; null where that is unknown."""
    final_loss: NonNegative
    setup_seconds: Seconds
    """Seconds to build what was missing, attach, warm up to the first measured step, and detach."""
    measured_seconds: Seconds
    allocator_retries: Count = 0
    """Times the allocator gave cached blocks back to serve a request."""
    flags: tuple[str, ...] = ()
    """``throttled``, ``noisy``, ``neighbour``, ``remeasured``, ``emulated``, ``allocator_retries``,
    ``accumulation_extrapolated`` (the step's seconds were derived from fewer micro-steps),
    ``round_extrapolated`` (an epoch's mean step was derived from micro-batches of other sizes),
    ``documents_together`` (the texts of a packed row see each other), ``speed_reused`` (measured at
    another learning rate), ``no_room_to_evaluate`` (the held-out texts), ..."""
    sm_clock_mhz: Count | None = None
    throttle_reasons: tuple[str, ...] = ()
    quantized_share: Share | None = None
    """Of the weights that QLoRA means to hold in 4 bits, how many were; null for a 16-bit base."""
    training_seconds: Seconds | None = None
    """Seconds inside training steps, warm-up included; what is left of the trial is overhead."""
    compile_seconds: Seconds | None = None
    """Seconds that compiling took, or fetching what was compiled before; null where nothing was."""
    joules_per_token: NonNegative | None = None
    """Energy of the whole GPU over the measured steps, by NVML's counter; null where unknown."""
    soak: SoakReport | None = None
    """Of a soak alone."""
    loss_tokens_per_step: Positive | None = None
    """Tokens that carry loss in an optimizer step, as a mean of the texts; null without texts."""
    padding_waste: Share | None = None
    """Of the tokens that are computed in an epoch of the texts, the share of pads; null without."""
    documents_apart: bool | None = None
    """Whether the texts of a packed row were seen not to see each other; null where none are."""
    batch_wait_share: Share | None = None
    """Share of the measured time in which the host got its next micro-batch; null without texts."""
    faithfulness: Faithfulness | None = None
    eight_bit: EightBitProducts | None = None
    """What 8-bit compute makes of the real weights; null on random ones and in 16 bits."""
    """Of 8-bit compute alone."""
    quality: QualityReport | None = None
    """What it learned, where that was asked for; of a study on texts alone."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        low, high = self.step_seconds_ci95 or (self.step_seconds, self.step_seconds)
        if not low <= self.step_seconds <= high:
            raise ValueError(f"step_seconds {self.step_seconds:g} is outside {low:g} to {high:g}")
        return self

    @property
    def speed_interval(self) -> tuple[float, float] | None:
        """Tokens per second at both ends of the median step's 95 % interval, low first."""
        if self.step_seconds_ci95 is None:
            return None
        tokens = self.tokens_per_second * self.step_seconds
        low, high = self.step_seconds_ci95
        return tokens / high, tokens / low

    @property
    def is_noisy(self) -> bool:
        """Whether the speed is too unsure to be set against another.

        Its steps were uneven, too few to say, or shared the GPU with another process. A GPU that
        its power limit slows down does so steadily: such a speed counts.
        """
        return self.step_seconds_ci95 is None or not _NOISY_FLAGS.isdisjoint(self.flags)


class _Detailed(_Frozen):
    detail: Detail = ""
    """What happened, in the words of whatever it happened to."""


class Measured(_Frozen):
    """The configuration ran within the budget and was measured."""

    verdict: Literal[Verdict.FITS] = Verdict.FITS
    measurement: Measurement


class PrunedSlow(_Frozen):
    """It ran and was stopped early, as it could not be the fastest. The measurement is partial."""

    verdict: Literal[Verdict.PRUNED_SLOW] = Verdict.PRUNED_SLOW
    measurement: Measurement


class OutOfMemory(_Detailed):
    """A real allocation failed."""

    verdict: Literal[Verdict.OOM] = Verdict.OOM
    stage: Stage
    step: Count = 0
    """Micro-step that failed, from 0."""
    requested_bytes: Count | None = None
    peak_allocated_bytes: Count | None = None
    """Most that had been allocated when it failed: a lower bound of the need."""
    flags: tuple[str, ...] = ()
    """``neighbour`` where another process had taken what the trial was to have."""


class PredictedOutOfMemory(_Detailed):
    """Predicted not to fit, beyond the prediction's uncertainty; never launched."""

    verdict: Literal[Verdict.PREDICTED_OOM] = Verdict.PREDICTED_OOM
    predicted_bytes: Count
    """The least budget that it would run under; above the peak where memory is cut up."""


class DominatedOutOfMemory(_Frozen):
    """At least as large in every dimension as a trial that ran out of memory; never launched."""

    verdict: Literal[Verdict.DOMINATED_OOM] = Verdict.DOMINATED_OOM
    by: Count
    """Number of the trial that ran out of memory."""


class Diverged(_Detailed):
    """The loss was not finite."""

    verdict: Literal[Verdict.DIVERGED] = Verdict.DIVERGED
    step: Count


class Invalid(_Detailed):
    """A validity rule forbids it on this model or GPU."""

    verdict: Literal[Verdict.INVALID] = Verdict.INVALID
    rule: str


class Ineffective(_Detailed):
    """A setting did not take effect, so the run does not count as this configuration."""

    verdict: Literal[Verdict.INEFFECTIVE] = Verdict.INEFFECTIVE
    setting: str


class TimedOut(_Detailed):
    """A phase outlasted its deadline; the worker was killed."""

    verdict: Literal[Verdict.TIMED_OUT] = Verdict.TIMED_OUT
    phase: Phase


class Crashed(_Detailed):
    """The worker ended or raised something that is neither the device's memory nor a rule."""

    verdict: Literal[Verdict.CRASHED] = Verdict.CRASHED
    phase: Phase
    cause: CrashCause | None = None
    """None where that is unknown."""


class Lost(_Detailed):
    """The driver ended while the trial ran, or somebody ended the trial; nothing is known of it."""

    verdict: Literal[Verdict.LOST] = Verdict.LOST
    is_kept: bool = False
    """Whether it ended well and its result is in the spool alone: to run it again is in vain."""
    is_interrupted: bool = False
    """Whether it was ended from outside, by a driver that lived to say so: that was no attempt of
    its configuration, which is tried again however often it happens."""


INTERRUPTED = Lost(detail="interrupted", is_interrupted=True)
"""Of a trial that was cancelled."""
OUT_OF_TIME = Lost(detail="cut short, as the time of the run was over", is_interrupted=True)
"""Of a trial that was stopped by its `TrialRequest.seconds_left` before it was measured."""

Outcome = Annotated[
    Measured
    | PrunedSlow
    | OutOfMemory
    | PredictedOutOfMemory
    | DominatedOutOfMemory
    | Diverged
    | Invalid
    | Ineffective
    | TimedOut
    | Crashed
    | Lost,
    Field(discriminator="verdict"),
]
"""How a trial ended, by verdict. Match it to the end."""


class PredictionRecord(_Frozen):
    """What was predicted before the trial ran, kept beside what was measured."""

    peak_allocated_bytes: Annotated[Count, Field(ge=1)]
    peak_reserved_bytes: Count
    tokens_per_second: Positive | None = None


class EpochRecord(_Frozen):
    """One pass over the texts of a study as one configuration trains on them.

    Of the rows that are trained on: those held out for the evaluation are none of them.
    """

    rows: Count
    """Texts, or pairs, that are trained on."""
    rows_cut: Count
    """Of those, the longer ones, which are cut to the sequence length; of a pair one is enough."""
    rows_left_out: Count
    """Texts of which the cut leaves no token that carries loss."""
    tokens: Count
    """That are read, cut; without pads."""
    tokens_cut: Share
    """Share of the texts' tokens that are cut off the rows that are trained on, 0 to 1."""
    tokens_left_out: Share
    """Share of the texts' tokens that are in rows that are left out, 0 to 1."""
    supervised_tokens_cut: Share | None = None
    """Share of the texts' supervised tokens that are cut off or in rows that are left out, 0 to 1;
    None where an earlier version did not count them."""
    padded_tokens: Count
    """That are computed, pads among them."""
    loss_tokens: Count
    """That carry loss."""
    steps: Count
    """Optimizer steps."""

    @property
    def is_whole(self) -> bool:
        """Whether it has every text from its first token to its last."""
        return not self.rows_cut and not self.rows_left_out


class RunKind(_Frozen):
    """Why a configuration is run."""

    purpose: Purpose = "search"
    """Only what a search asked for is one of the study's trials."""
    series: Count = 0
    """Which confirmation of the study it belongs to, from 1; 0 for a trial of the search."""
    confirms: Count | None = None
    """Number of the trial whose configuration is measured again; None where it is of no trial but
    the baseline's in the winner's capacity class."""


SEARCH = RunKind()


class Attempt(RunKind):
    """One run of a configuration as its study began it: what a result is a result of."""

    id: str
    """Of this attempt alone; a number may come to stand for another, in a restored copy."""
    study: str
    """Identity of the study, whatever that is called."""
    number: Count
    started_at: Moment


class Carried(_Frozen):
    """Where a trial was measured that another study took over."""

    study: str
    """Name of the study that ran it."""
    identity: str
    """Of that study, whatever is called so today."""
    number: Count
    """What it was called there."""


class TrialRecord(RunKind):
    """One trial as storage keeps it."""

    number: Count
    config: TrialConfig
    outcome: Outcome
    is_baseline: bool = False
    attempt: Annotated[Count, Field(ge=1)] = 1
    """1 for the first try; a retry of a lost, crashed or timed-out trial counts on."""
    attempt_id: str | None = None
    """Of this one try, whatever its number; None where it was never begun here."""
    started_at: Moment | None = None
    """UTC, ISO 8601."""
    wall_seconds: Seconds = 0.0
    """From the ask to the tell, worker start-up included."""
    device_seconds: Seconds = 0.0
    """Time the worker spent on it."""
    prediction: PredictionRecord | None = None
    carried: Carried | None = None
    """Where it was measured, if not by this study: then none of its time is this study's."""
    epoch: EpochRecord | None = None
    """What an epoch of the study's texts is to it; None where its rows are random."""
    ran_on: str | None = None
    """Which of several GPUs, or machines, it ran on; None where there is but one."""

    @property
    def verdict(self) -> Verdict:
        """The outcome's verdict."""
        return self.outcome.verdict

    @property
    def run_seconds(self) -> float:
        """Seconds that its worker took for it, without its start; of a trial that came to no
        measurement those of the device."""
        measured = self.measurement
        if measured is None:
            return self.device_seconds
        return measured.setup_seconds + measured.measured_seconds

    @property
    def is_interrupted(self) -> bool:
        """Whether it was ended from outside, so that it counts as no attempt."""
        return isinstance(self.outcome, Lost) and self.outcome.is_interrupted

    @property
    def measurement(self) -> Measurement | None:
        """The measurement, also a pruned trial's partial one; None where nothing ran to it."""
        outcome = self.outcome
        return outcome.measurement if isinstance(outcome, Measured | PrunedSlow) else None


def without_repeated(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return trials, in their order, without failed attempts of a configuration that has others.

    A configuration that failed whenever it was tried stays once, as it did last.
    """
    records = tuple(records)
    known = {record.config for record in records if record.verdict not in RETRYABLE}
    kept: list[TrialRecord] = []
    for record in reversed(records):
        if record.verdict not in RETRYABLE or record.config not in known:
            kept.append(record)
        known.add(record.config)
    return tuple(reversed(kept))


def over_budget(peak_bytes: int, *, budget_bytes: int, stage: Stage) -> OutOfMemory | None:
    """Return out of memory where a measured peak is above the budget; None where it is within."""
    if peak_bytes <= budget_bytes:
        return None
    return OutOfMemory(
        stage=stage,
        peak_allocated_bytes=peak_bytes,
        detail=f"measured {peak_bytes:,} bytes, over the budget of {budget_bytes:,} bytes",
    )


def held_to_budget(outcome: Outcome, *, budget_bytes: int) -> Outcome:
    """Return what the outcome of a trial counts as: out of memory where it was measured above the
    budget."""
    match outcome:
        case Measured(measurement=measured) | PrunedSlow(measurement=measured):
            peak = measured.peak_allocated_bytes
            return over_budget(peak, budget_bytes=budget_bytes, stage="optimizer") or outcome
        case _:
            return outcome


@dataclass(frozen=True)
class Need:
    """What a configuration that did not fit needs."""

    allocated_bytes: int
    is_lower_bound: bool
    """Whether it may need more: it, or a smaller one, ran out before the peak was seen.

    Else it is a prediction, which may be off either way.
    """
    is_predicted: bool
    """Whether the number is the prediction's and not the budget's or the observed peak's."""


def need_of(record: TrialRecord, *, budget_bytes: int) -> Need | None:
    """Return what a trial that did not fit needs; None for every other.

    What ran out of memory needs more than the budget, whatever the allocation that happened to
    fail: the peak until then is a bound from below, and so is a prediction that is larger. The
    failed request is not added to the peak: the two need not have been there at once.
    """
    predicted = predicted_need(record)
    match record.outcome:
        case PredictedOutOfMemory(predicted_bytes=predicted_bytes):
            return Need(predicted_bytes, is_lower_bound=False, is_predicted=True)
        case OutOfMemory(peak_allocated_bytes=peak):
            seen = max(budget_bytes, peak or 0)
        case DominatedOutOfMemory():
            seen = budget_bytes
        case _:
            return None
    is_predicted = predicted is not None and predicted > seen
    return Need(max(seen, predicted or 0), is_lower_bound=True, is_predicted=is_predicted)


def predicted_need(record: TrialRecord) -> int | None:
    """Return the predicted peak of a trial; None where nothing predicted it."""
    if isinstance(record.outcome, PredictedOutOfMemory):
        return record.outcome.predicted_bytes
    return None if record.prediction is None else record.prediction.peak_allocated_bytes


def nearest_to_fitting(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return what is predicted to miss the budget by the least, nearest first; each configuration
    once, by its last trial.

    By the prediction, never by the allocation that happened to fail: that says where a training
    was, not what it needs.
    """
    unfit = {canonical(r.config): r for r in records if r.verdict in OUT_OF_MEMORY}
    predicted = [(need, r) for r in unfit.values() if (need := predicted_need(r)) is not None]
    return tuple(r for _, r in sorted(predicted, key=lambda pair: (pair[0], pair[1].number)))
