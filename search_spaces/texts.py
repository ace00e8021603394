"""Owns what is said of a person's texts: the choice in a space file, and what was found in them.

Knows nothing of tokenizers or of files' contents; reading texts is `sweep.data`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from search_spaces.documents import exists, home_expanded
from search_spaces.knobs import Number

TextsFormat = Literal[
    "auto", "text", "instruction", "prompt-completion", "messages", "conversations"
]
"""How the rows of texts are written; ``auto`` recognizes it by their fields."""

QUALITY_TOKENS_MIN = 1_000
"""Fewer tokens than this teach nothing that a held-out loss could show."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TextsChoice(_Frozen):
    """Which texts to train on and how to read them: what ``data:`` of a space says."""

    texts: str = Field(min_length=1)
    """A JSONL, Parquet or CSV file, a directory of them, or a hub id."""
    text_column: str | None = Field(default=None, min_length=1)
    """The column that holds the text; None recognizes it."""
    format: TextsFormat = "auto"
    """How a row is written; auto recognizes it by its fields."""
    completions_only: StrictBool = False
    """Whether only the assistant's tokens carry loss."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """A directory or a hub id; None for the model's own."""
    eval_fraction: Number = Field(default=0.05, ge=0, le=0.5)
    """Share of the rows that no training sees: the loss on them is the evaluation's."""
    quality_tokens: StrictInt | None = Field(default=None, ge=QUALITY_TOKENS_MIN)
    """Tokens that every trial trains on where eval_loss is an objective; None for about a minute's
    worth at the baseline's speed."""

    def located(self, beside: Path) -> TextsChoice:
        """Return the same with local names as a file in the directory ``beside`` means them.

        What is not there beside the file is left as it is: a path from where the command runs, or a
        hub id.
        """
        names = {"texts": self.texts, "tokenizer": self.tokenizer}
        found = {key: _located(name, beside=beside) for key, name in names.items() if name}
        return self.model_copy(update=found)


def _located(name: str, *, beside: Path) -> str:
    path = beside / home_expanded(name)
    return str(path.absolute()) if exists(path, label=name) else name


class TextsSummary(_Frozen):
    """What was found in texts, as a study keeps it beside its trials."""

    source: str
    """As the person named it."""
    kind: str
    """What it is: a JSONL, Parquet or CSV file, a directory, a hub data set."""
    format: str
    """How its rows are written, recognized or said."""
    fingerprint: str
    """Of the content, of how it is read, and of the tokenizer."""
    tokenizer: str
    completions_only: bool = False
    rows: int
    """That can be trained on."""
    broken: int = 0
    """That cannot, and were left out."""
    tokens: int
    """Of all rows, uncut."""
    loss_tokens: int
    """Of those, the tokens that carry loss."""
    longest: int
    """Tokens of the longest row."""
    quantiles: dict[str, int]
    """Tokens of a row: ``p50``, ``p90``, ``p95``, ``p99`` and ``max``."""
