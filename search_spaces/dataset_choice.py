"""What is said of a person's dataset: how it is to be read, and what was found in it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from qlora_sweep.search_spaces.documents import Strict

DatasetKind = Literal[
    "text", "instruction", "prompt-completion", "messages", "conversations", "preference"
]
DatasetFormat = Literal["auto", DatasetKind]
"""What an example may be: one text, Alpaca's fields, a prompt with what completes it, a chat as
the hub's ``messages``, a chat as ShareGPT's ``conversations``, a pair of a chosen and a rejected
completion, as texts or as turns."""

TOO_FEW_EXAMPLES = "texts-make-no-micro-batch"
"""The rule of a configuration for which the dataset is too small, or cut too short."""
CUT_MAX = 0.05
"""Of the supervised tokens: a length that cuts off a larger share is for who asks for it.

A twentieth is what is left of most data sets beyond their 95th percentile of lengths. A shorter
length may well be the fastest, and what it is fast at is leaving texts out.
"""

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=0)]


class DatasetChoice(Strict):
    """Which dataset a space or a command names, and how it is to be read."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    texts: Annotated[str, Field(min_length=1)]
    """A file, a directory of files, or a hub id."""
    text_column: Annotated[str, Field(min_length=1)] | None = None
    """The column with the text; None recognises the kind of the examples."""
    prompt_column: Annotated[str, Field(min_length=1)] | None = None
    """The column with what is asked; None recognises it."""
    completion_column: Annotated[str, Field(min_length=1)] | None = None
    """The column with what is answered; named together with the prompt's."""
    format: DatasetFormat = "auto"
    """What an example is; auto recognises it."""
    completions_only: bool | None = None
    """Whether only what the model is to answer carries loss; None as TRL has it: of a prompt and
    its completion (Alpaca's fields too), and not of texts and chats."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """A directory or hub id; None for the model's own."""
    eval_fraction: Share = 0.05
    """Share of the examples that are held out of training."""
    quality_tokens: Annotated[int, Field(ge=1)] | None = None
    """Loss-carrying tokens that each trial trains on for its quality; None chooses."""


class LengthQuantiles(Strict):
    """Tokens of examples: the shortest length that so many in a hundred do not pass."""

    p50: Count
    p90: Count
    p95: Count
    p99: Count
    max: Count


class DatasetSummary(BaseModel):
    """What a dataset holds once a tokenizer has read it, as a study's definition keeps it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str
    """As the person named it."""
    kind: DatasetKind
    """As it was recognised, or given."""
    format: DatasetFormat
    """As it was asked for."""
    text_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    columns_read: dict[str, str] = Field(default_factory=dict)
    """The column of each field that an example of the kind may have."""
    columns: tuple[str, ...] = ()
    """Of the source, in its order."""
    fingerprint: str
    """Of the content, the options and the tokenizer: equal where the tokens are."""
    tokenizer: str
    """Directory or hub id, as it was named."""
    tokenizer_size: Count = 0
    """Tokens that the tokenizer knows."""
    largest_token: Count = 0
    """The largest id that occurs in the dataset."""
    completions_only: bool
    rows: Count
    """Those that can be trained on."""
    broken: Count
    """Rows that cannot, beside them."""
    silenced: Count = 0
    """Rows with turns of the assistant's that say that they carry no loss."""
    tokens: Count
    loss_tokens: Count
    longest: Count
    quantiles: LengthQuantiles
    notes: tuple[str, ...] = ()
    """What a person should know of how they were read."""
    marked_template: str | None = None
    """A chat template that marks the assistant's turns, where they alone carry loss and neither the
    tokenizer's template nor TRL's for it does."""

    @property
    def are_pairs(self) -> bool:
        """Whether each is a chosen and a rejected completion, which are two rows."""
        return self.kind == "preference"
