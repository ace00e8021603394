"""What a training is and what its process says while it runs, each thing a line of JSON.

The job goes to the child, events come from it, the last of them an end. Light to import, as both
sides read it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from sweep.running.wire import ChildSettings

CHECKPOINT_SECONDS = 600.0
"""About so often a checkpoint is written; a kill loses no more than that."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Promise(_Frozen):
    """What a study measured of the configuration, to be held against what is reached."""

    tokens_per_second: float
    """Tokens that carry loss per second, at the median step."""
    peak_allocated_bytes: int
    source: str
    """In words: ``trial 12 of study 'a10'``."""
    device: str
    """What it was measured on: the product's name, or ``CPU``."""
    texts: str | None = None
    """Fingerprint of the texts that it was measured on; None for full rows of random tokens."""
    flags: tuple[str, ...] = ()
    """Of the measurement."""
    is_confirmed: bool = True
    """Whether it was measured again; True too where nothing says."""
    environment: dict[str, Any] = Field(default_factory=dict)
    """`storage.environment.fingerprint` of the machine that measured, as far as it is known."""


class TrainingJob(ChildSettings):
    """One training, whole: two equal ones train the same."""

    config: TrialConfig
    model: dict[str, Any]
    """`ModelSpec.to_json`."""
    texts: str | None = None
    """Directory of prepared texts; None trains on full rows of random tokens."""
    fingerprint: str | None = None
    """Of those texts."""
    tokenizer: str | None = None
    """Directory or hub id of what they were tokenized by."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rows that is held out, and never trained on."""
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
    checkpoint_seconds: float = Field(default=CHECKPOINT_SECONDS, gt=0)
    resume_from: str | None = None
    """A whole checkpoint to go on from."""
    promise: Promise | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return ModelSpec.from_json(self.model)


class Alive(_Frozen):
    """A sign of life, where nothing else is to be told."""

    kind: Literal["alive"] = "alive"
    doing: str
    """What it is at, in words."""


class Started(_Frozen):
    """The model is built, the rows are counted: the first step begins."""

    kind: Literal["started"] = "started"
    device_name: str
    steps: int
    """Of the whole training."""
    steps_done: int = 0
    """By earlier runs, up to the checkpoint that this one goes on from."""
    rows: int
    """Trained on in an epoch, as micro-batches have them: those that texts are packed into, where
    they are."""
    texts_rows: int | None = None
    """Of the texts that are trained on; None for random rows."""
    rows_held_out: int
    rows_left_out: int
    """None of whose tokens that carry loss are within the length."""
    trainable_parameters: int
    documents_apart: bool | None = None
    """Whether the texts of a packed row do not see each other, as the model was asked; None where
    no row has two."""


class Progressed(_Frozen):
    """Some steps ended."""

    kind: Literal["progressed"] = "progressed"
    step: int
    loss: float
    """Mean over the tokens of the newest step."""
    tokens_per_second: float | None
    """Tokens that carry loss, over the newest steps."""
    seconds_left: float | None


class Evaluated(_Frozen):
    """The held-out rows, or the first of them, were evaluated."""

    kind: Literal["evaluated"] = "evaluated"
    step: int
    loss: float


class Saved(_Frozen):
    """A whole checkpoint is on the disk."""

    kind: Literal["saved"] = "saved"
    step: int


class NotSaved(_Frozen):
    """A checkpoint could not be written; the training goes on, and the one before it is whole."""

    kind: Literal["not_saved"] = "not_saved"
    step: int
    reason: str


class TrainingResult(_Frozen):
    """What a training came to. Tokens are those that carry loss."""

    kind: Literal["result"] = "result"
    steps: int
    tokens: int
    tokens_computed: int
    """Padding and what carries no loss included."""
    tokens_per_second: float | None
    """As a trial measures it: at the median step, or of the median stretch of steps where texts
    make steps of many sizes; over the steps after the first where the warm-up is all there is."""
    run_tokens_per_second: float
    """Over the whole run: warm-up, evaluations and checkpoints included."""
    step_seconds: float | None
    """Of the median step."""
    steps_measured: int
    """Behind the warm-up; 0 where the speed is that of the warm-up itself."""
    seconds: float
    """Of all runs that made this training, from the first step on."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None = None
    trainable_parameters: int
    train_loss: float
    """Mean over all steps, as Trainer gives it."""
    final_train_loss: float
    """Mean over the last tenth of the steps."""
    eval_loss: float | None = None
    """Of the held-out rows at the end: mean over their tokens."""
    eval_tokens: int = 0
    rows: int
    """Trained on in an epoch, as micro-batches have them."""
    texts_rows: int | None = None
    """Of the texts that are trained on; None for random rows."""
    packed_rows: int | None = None
    """That those are packed into; None where they are not."""
    rows_held_out: int
    rows_left_out: int
    epochs: float
    checkpoints: int
    """Written by all runs."""
    checkpoint_seconds: float
    """That writing them took, and evaluating on the way."""
    data_wait_seconds: float
    """That the host waited for batches; while it does not fall behind, the device waits for none of
    it."""
    device_name: str
    documents_apart: bool | None = None
    """Whether the texts of a packed row did not see each other; None where no row has two."""
    checkpoint: str | None = None
    """The last one, which has the adapter."""


class Stopped(_Frozen):
    """Somebody asked it to stop."""

    kind: Literal["stopped"] = "stopped"
    step: int
    checkpoint_step: int | None
    """Where `--resume` goes on."""


class NotFinite(_Frozen):
    """The loss is no number any more; what was saved before is sound."""

    kind: Literal["not_finite"] = "not_finite"
    step: int
    what: str
    """``loss nan``, ``gradient norm inf``."""
    checkpoint_step: int | None


class RanOut(_Frozen):
    """Memory ran out."""

    kind: Literal["ran_out"] = "ran_out"
    step: int
    """Steps done by then."""
    doing: str
    """``loading the base``, ``a training step``."""
    detail: str
    peak_allocated_bytes: int
    checkpoint_step: int | None


class Refused(_Frozen):
    """Something that was typed or named cannot be trained."""

    kind: Literal["refused"] = "refused"
    reason: str


class Unable(_Frozen):
    """The machine is at fault: no device, a full disk, a broken installation, a crash."""

    kind: Literal["unable"] = "unable"
    reason: str
    checkpoint_step: int | None = None


Event = Alive | Started | Progressed | Evaluated | Saved | NotSaved
End = TrainingResult | Stopped | NotFinite | RanOut | Refused | Unable
Message = Annotated[
    Alive
    | Started
    | Progressed
    | Evaluated
    | Saved
    | NotSaved
    | TrainingResult
    | Stopped
    | NotFinite
    | RanOut
    | Refused
    | Unable,
    Field(discriminator="kind"),
]
message_adapter: TypeAdapter[Message] = TypeAdapter(Message)

STOP = b"stop\n"
"""Said to the child: save, and end."""
