"""What a trial is asked for and what it tells on its way, as it passes between processes too."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from qlora_sweep.storage.records import Count, Phase, Positive


class Message(BaseModel):
    """A line of JSON between two processes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class QualityCommand(Message):
    """How much a configuration that fits trains on top, and is then asked what it learned."""

    tokens: int = Field(ge=1)
    """That carry loss; the last optimizer step is a whole one."""
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Of the adapters and of the texts' order, which is the same for every configuration."""
    eval_seq_len: int = Field(ge=2)
    """Tokens to which held-out texts are cut: the same for every configuration of a study."""
    eval_tokens: int = Field(default=65_536, ge=1)
    """Held-out tokens that carry loss and are looked at; all there are where those are fewer."""


class Progress(Message):
    """One sign of life from a running trial."""

    kind: Literal["progress"] = "progress"
    phase: Phase
    step: Count = 0
    """Optimizer steps done in this phase."""
    tokens_per_second: Positive | None = None
    """At the median measured step so far."""
    tokens_per_second_high: Positive | None = None
    """The most that the median step may still turn out to allow: by its 95 % interval, or by a
    generous guess before there is one; None where nothing can be said."""
    allocated_bytes: Count | None = None
