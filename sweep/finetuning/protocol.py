"""A training as it goes to its process, and what comes from there besides `sweep.running.wire`'s
messages: rows counted, held-out losses, checkpoints, and how it ended.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage import records
from qlora_sweep.storage.confirmations import binomial_ci95
from qlora_sweep.sweep.running.wire import ChildSettings, Message, Progress, Ready, Unusable

REFERENCE = "reference.safetensors"
"""In the output, the reference's log-probabilities where they are worked out once."""
CHECKPOINT_SECONDS = 600.0
"""About so often a checkpoint is written; a kill loses no more than that."""


class TrainingJob(ChildSettings):
    """One training, whole: two equal ones train the same."""

    config: TrialConfig
    model: dict[str, Any]
    """`ModelSpec.to_json`."""
    dataset: str | None = None
    """Directory of prepared texts; None trains on full sequences of random tokens."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the examples that is held out, and never trained on."""
    epochs: float = Field(default=1.0, gt=0)
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps after which it ends, however many epochs that is."""
    seed: int = 0
    """Of weights, adapters, order and dropout."""
    budget_bytes: int | None = None
    """Enforced on the process for real; None for all that the device has."""
    output: str
    """Directory for checkpoints, and for the log of what libraries print."""
    keeps_checkpoints: bool = True
    """False where only the figures are wanted: nothing but the log is written."""
    checkpoint_steps: int | None = Field(default=None, ge=1)
    """Steps between two checkpoints; None leaves it to the time that passes."""
    resume_from: str | None = None
    """A whole checkpoint to resume from."""
    rendezvous: str = ""
    """File by which the ranks that train together find each other; none of the first."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec.from_json(self.model)

    @property
    def may_compile(self) -> bool:
        """See `ChildSettings.may_compile`."""
        return self.config.compile


class TrainingProgress(Progress):
    """A sign of life of a training, with its newest figures."""

    loss: float | None = None
    """Mean over the tokens of the newest step; None before there is one."""
    seconds_left: float | None = None


class Setup(Message):
    """What trains on how much."""

    device_name: str
    steps: int
    """Of the whole training."""
    rows: int
    """Trained on in an epoch, as micro-batches have them: packed ones, where texts are packed."""
    dataset_rows: int | None = None
    """Examples that are trained on; None for random tokens."""
    rows_held_out: int
    rows_left_out: int
    """None of whose supervised tokens are within the length."""
    trainable_parameters: int
    eight_bit: records.EightBitProducts | None = None
    """What 8-bit compute makes of the real weights; None on random ones and in 16 bits."""
    documents_apart: bool | None = None
    """Whether the examples of a packed sequence do not see each other, as the model was asked; None
    where no sequence has two."""


class TrainingStarted(Setup):
    """The model is built, the rows are counted: the first step begins."""

    kind: Literal["started"] = "started"
    steps_done: int = 0
    """By earlier runs, up to the checkpoint that this one resumes from."""


class Saved(Message):
    """A whole checkpoint is on the disk, or the disk does not take it."""

    kind: Literal["saved"] = "saved"
    step: int
    eval_loss: float | None = None
    """Of the first held-out examples; None where none were evaluated."""
    refusal: str | None = None
    """Why there is none; the training continues, and the one before it is whole."""


class TrainingResult(Setup):
    """What a training came to. Tokens are supervised ones."""

    verdict: Literal["trained"] = "trained"
    tokens: int
    tokens_computed: int
    """With padding and what carries no loss."""
    tokens_per_second: float | None
    """As a trial measures it; see `course.Steps.median_rate`."""
    run_tokens_per_second: float
    """Over the whole run: warm-up, evaluations and checkpoints included."""
    step_seconds: float | None
    """Of the median step."""
    steps_measured: int
    """After the warm-up; 0 where the speed is that of the warm-up itself."""
    seconds: float
    """Of all runs that made this training, from the first step on."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None = None
    train_loss: float
    """Mean over all steps, as Trainer gives it."""
    final_train_loss: float
    """Mean over the last tenth of the steps."""
    eval_loss: float | None = None
    """Of the held-out examples at the end: mean over their tokens, or over pairs."""
    eval_tokens: int = 0
    eval_pairs: int = 0
    """Held-out pairs; 0 of a training on texts."""
    eval_wins: int = 0
    """Of which the policy prefers the chosen completion more than the reference does."""

    packed_rows: int | None = None
    """That the examples are packed into; None where they are not."""
    epochs: float
    checkpoints: int
    """Written by all runs."""
    checkpoint_seconds: float
    """That writing them took, and evaluating on the way."""
    checkpoint: str | None = None
    """The last one, which has the adapter."""

    @property
    def reward_accuracy_ci95(self) -> tuple[float, float] | None:
        """The share of held-out pairs that all there are would win, at 95 % (Wilson's interval);
        None of a training on texts."""
        return binomial_ci95(self.eval_wins, self.eval_pairs) if self.eval_pairs else None


TrainingOutcome = Annotated[
    TrainingResult
    | records.OutOfMemory
    | records.Diverged
    | records.Invalid
    | records.Ineffective
    | records.TimedOut
    | records.Crashed
    | records.Lost,
    Field(discriminator="verdict"),
]
"""How a training ended: with its result, or as a trial can end. Match it to the end."""


class TrainingFinished(Message):
    """The last message."""

    kind: Literal["finished"] = "finished"
    outcome: TrainingOutcome


Event = TrainingProgress | TrainingStarted | Saved
TrainingMessage = Annotated[
    Ready | TrainingProgress | TrainingStarted | Saved | TrainingFinished | Unusable,
    Field(discriminator="kind"),
]
message_adapter: TypeAdapter[TrainingMessage] = TypeAdapter(TrainingMessage)
