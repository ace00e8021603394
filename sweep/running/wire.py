"""What the tuner's process and the worker say to each other, each thing a line of JSON.

Commands go to the worker, messages come from it. A message is read as what any process may have
written there: by a library that found the descriptor, or with memory that was overwritten.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.kinds import DEVICES, ComputeDtype, DeviceName
from qlora_sweep.search_spaces.redaction import visible
from qlora_sweep.search_spaces.space import StepBudget, Weights
from qlora_sweep.storage.records import Attempt, Faithfulness, Outcome
from qlora_sweep.sweep.training.messages import Message as Message
from qlora_sweep.sweep.training.messages import Progress as Progress
from qlora_sweep.sweep.training.messages import QualityCommand as QualityCommand

M = TypeVar("M", bound=BaseModel)


class ChildSettings(Message):
    """What a child process is for, as far as starting it goes."""

    device: DeviceName
    """A child for the CPU never sees a GPU."""
    weights: Weights = "random"
    """Random, or loaded with transformers, who may need the hub's token."""
    gpus: tuple[str, ...] = ()
    """Those that it sees, as CUDA names them; none for those of the process that starts it."""
    concurrent_jobs: int = 0
    """Others that share the machine's cores with it."""
    log_path: str | None = None
    """Where it prints from now on; None for where it does."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether it trains on a GPU."""
        return DEVICES[self.device].is_gpu

    @property
    def may_compile(self) -> bool:
        """Whether it may be asked to compile layers."""
        return True


class DatasetSettings(Message):
    """The texts that a worker trains on."""

    directory: str
    """Of the prepared texts."""
    fingerprint: str
    """Of what is in it."""
    eval_fraction: float
    """Share of the rows that is held out, by the worker's seed."""


class WorkerSettings(ChildSettings):
    """What a worker is for; the first line it reads."""

    budget_bytes: int
    """Enforced on this process for real."""
    outcome_path: str | None = None
    """Where an attempt's outcome is left before it is told; None for nowhere."""
    model: dict[str, Any]
    """`ModelSpec.to_json`."""
    seed: int = 0
    """Of weights, adapters, tokens and what is held out of texts."""
    is_emulated: bool
    peak_flops: dict[ComputeDtype, float] = Field(default={})
    """Dense FLOP/s of the GPU that runs, by compute dtype; empty where unknown."""
    dataset: DatasetSettings | None = None
    """What trials train on; None for full-length random rows."""


class TrialRequest(Message):
    """What is asked of a trial, unchanged from the driver to the worker."""

    config: TrialConfig
    steps: StepBudget
    is_soak: bool = False
    """Train until the budget is spent, with an evaluation pass and a checkpoint on the way."""
    attempt: Attempt | None = None
    """Under which its outcome is left on disk; None where it is not kept."""
    quality: QualityCommand | None = None
    """What a configuration that fits is asked on top; None for its speed and memory alone."""
    faithfulness: Faithfulness | None = None
    """Of its 8-bit compute, where an earlier trial of the study compared that."""
    seconds_left: float | None = None
    """After which it is stopped between two steps, counted from when it is asked for; None for no
    limit."""


class RunCommand(Message):
    """Run this trial."""

    kind: Literal["run"] = "run"
    request: TrialRequest
    run_id: str = ""
    """Of this command, for the answer to name."""
    rendezvous: str = ""
    """File by which the ranks that run it find each other; a new one is a new process group."""
    stop_at: float | None = None
    """When it is stopped between two steps, by this machine's monotonic clock; None for never."""


class StopCommand(Message):
    """Stop the running trial: it is slow. Measurements so far are kept."""

    kind: Literal["stop"] = "stop"


Command = Annotated[RunCommand | StopCommand, Field(discriminator="kind")]


class Ready(Message):
    """The worker owns the device, and the budget is in force."""

    kind: Literal["ready"] = "ready"
    device_name: str


class Finished(Message):
    """A trial ended; the next may come unless the worker wants to retire."""

    kind: Literal["finished"] = "finished"
    run_id: str
    """Of the command that this answers."""
    config: TrialConfig
    """That was run."""
    outcome: Outcome
    retire: str | None = None
    """Why a fresh process should run the next trial; None where this one can."""
    is_apart: bool = False
    """Whether other ranks that train it continue, and wait for this one."""


class Unusable(Message):
    """The worker cannot work at all: no device, no driver, a broken installation."""

    kind: Literal["unusable"] = "unusable"
    reason: str


WorkerMessage = Annotated[Ready | Progress | Finished | Unusable, Field(discriminator="kind")]

LINE_BYTES_MAX = 256 * 1024
"""Of a message: a hundred times what the longest takes."""
_WORDS_MAX = 2000
"""Characters of what a message says in words."""


class UnreadableError(ValueError):
    """What came is no message; says why."""


def to_line(message: BaseModel) -> bytes:
    """Return a message as it is written; a number that is not finite stays one, to be refused."""
    return json.dumps(message.model_dump(mode="json")).encode() + b"\n"


def read_line(line: bytes, adapter: TypeAdapter[M]) -> M:
    """Return the message that a line holds; its words with nothing in them that works unseen.

    Raises:
        UnreadableError: it holds none.
    """
    try:
        return adapter.validate_python(_shown(json.loads(line)))
    except RecursionError:
        why = "JSON that is nested too deeply"
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'a message'}: {first['msg']}"
    except ValueError as error:
        why = f"no JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
    said = visible(line[:80].decode("utf-8", errors="replace"))
    raise UnreadableError(f"'{said}{'...' if len(line) > 80 else ''}': {why}")


def _shown(values: Any) -> Any:
    match values:
        case str():
            return visible(values)[:_WORDS_MAX]
        case dict():
            return {key: _shown(value) for key, value in values.items()}
        case list():
            return [_shown(value) for value in values]
        case _:
            return values


command_adapter: TypeAdapter[Command] = TypeAdapter(Command)
worker_message_adapter: TypeAdapter[WorkerMessage] = TypeAdapter(WorkerMessage)
