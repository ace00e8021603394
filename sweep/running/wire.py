"""Owns what the tuner's process and the worker say to each other, each thing a line of JSON.

Commands go to the worker, messages come from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from search_spaces.config import TrialConfig
from search_spaces.knobs import ComputeDtype
from search_spaces.space import StepBudget, Weights
from storage.records import Outcome, Phase


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerSettings(_Message):
    """What a worker is for; the first line it reads."""

    device: Literal["cuda", "cpu"]
    budget_bytes: int
    """Enforced on this process for real."""
    model: dict[str, Any]
    """`ModelSpec.to_json`."""
    weights: Weights
    seed: int
    is_emulated: bool
    peak_flops: dict[ComputeDtype, float] = {}
    """Dense FLOP/s of the card that runs, by compute dtype; empty where unknown."""


class RunCommand(_Message):
    """Try this configuration."""

    kind: Literal["run"] = "run"
    config: TrialConfig
    steps: StepBudget
    is_soak: bool = False
    """Train until the budget is spent, with an evaluation pass and a checkpoint on the way."""


class StopCommand(_Message):
    """Stop the running trial: it is slow. Measurements so far are kept."""

    kind: Literal["stop"] = "stop"


Command = Annotated[RunCommand | StopCommand, Field(discriminator="kind")]


class Ready(_Message):
    """The worker owns the device, and the budget is in force."""

    kind: Literal["ready"] = "ready"
    device_name: str


class Alive(_Message):
    """A sign of life."""

    kind: Literal["alive"] = "alive"
    phase: Phase
    step: int = 0
    tokens_per_second: float | None = None
    tokens_per_second_high: float | None = None
    allocated_bytes: int | None = None


class Finished(_Message):
    """A trial ended; the next may come unless the worker wants to retire."""

    kind: Literal["finished"] = "finished"
    outcome: Outcome
    retire: str | None = None
    """Why a fresh process should run the next trial; None where this one can."""


class Unusable(_Message):
    """The worker cannot work at all: no device, no driver, a broken installation."""

    kind: Literal["unusable"] = "unusable"
    reason: str


WorkerMessage = Annotated[Ready | Alive | Finished | Unusable, Field(discriminator="kind")]

command_adapter: TypeAdapter[Command] = TypeAdapter(Command)
worker_message_adapter: TypeAdapter[WorkerMessage] = TypeAdapter(WorkerMessage)
