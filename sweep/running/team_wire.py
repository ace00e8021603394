"""Owns what the first process of a team and the others say to each other, each a line of JSON.

Orders go to the others, messages come from them. The first of them to read is `WorkerSettings`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from search_spaces.config import TrialConfig
from storage.records import Outcome
from sweep.running.wire import read_line
from sweep.training.team import Look


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Begin(_Said):
    """Build this configuration's base, meet the others, and attach."""

    kind: Literal["begin"] = "begin"
    config: TrialConfig
    rank: int
    size: int
    meeting: str
    """File by which the processes of one group find each other; a new one is a new group."""
    micro_steps: int
    """That are really run of an optimizer step."""


class Leave(_Said):
    """Be in no group any more; all of it leave at once."""

    kind: Literal["leave"] = "leave"


class Step(_Said):
    """Queue one optimizer step."""

    kind: Literal["step"] = "step"


class Evaluate(_Said):
    """Take part in a pass without gradients."""

    kind: Literal["evaluate"] = "evaluate"
    batches: int


class LookUp(_Said):
    """Say what there is to see once all steps are done."""

    kind: Literal["look"] = "look"


class End(_Said):
    """Take off what was attached."""

    kind: Literal["end"] = "end"


Order = Annotated[Begin | Leave | Step | Evaluate | LookUp | End, Field(discriminator="kind")]


class FollowerReady(_Said):
    """It has its card, and the budget is in force."""

    kind: Literal["ready"] = "ready"


class Looked(_Said):
    """What there is to see."""

    kind: Literal["looked"] = "looked"
    look: Look


class Ended(_Said):
    """The base is as it was."""

    kind: Literal["ended"] = "ended"
    leak: str | None = None
    """Why it cannot run another; None where it can."""


class Failed(_Said):
    """It cannot go on."""

    kind: Literal["failed"] = "failed"
    outcome: Outcome
    """Of the trial."""


FollowerMessage = Annotated[FollowerReady | Looked | Ended | Failed, Field(discriminator="kind")]

order_adapter: TypeAdapter[Order] = TypeAdapter(Order)
_message_adapter: TypeAdapter[FollowerMessage] = TypeAdapter(FollowerMessage)


def read_follower(line: bytes) -> FollowerMessage:
    """Return the message that a line holds.

    Raises:
        UnreadableError: it holds none.
    """
    return read_line(line, _message_adapter)
