"""What a merge is asked for and what is told of it: values that both processes read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from sweep.merging.plan import MergedDtype, Piece

_NEAR = 0.05
"""Of the logits' spread: what rounding weights and activations to 16 bits moves them by is a
hundredth or two; a wrong factor, or another base, moves them by much more."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MergeOrder(_Value):
    """What the child is to do."""

    base: str
    """Directory of the base's weights."""
    adapter: str
    weights: str
    """The adapter's file."""
    directory: str
    """Where the merged weights go; config and tokenizer are there."""
    dtype: MergedDtype
    pieces: list[Piece]
    rows: int
    """To compare on; 0 compares nothing."""


class Trained(_Value):
    """The merged model beside the quantized base with the adapter, which is what was trained."""

    quantization: str
    double_quant: bool
    max_abs: float
    mean_abs: float
    argmax_agreement: float


class Comparison(_Value):
    """Logits of the merged model beside those of base plus adapter, in the merged type."""

    rows: int
    tokens_per_row: int
    device: str
    max_abs: float
    mean_abs: float
    argmax_agreement: float
    """Share of positions whose likeliest token is the same, 0..1."""
    logits_spread: float
    """Standard deviation of the logits, to hold the differences against."""
    adapter_mean_abs: float
    """By which the adapter itself moves the base's logits."""
    trained: Trained | None = None
    trained_failed: str | None = None
    """Why the quantized base could not be looked at, where it was to be; else None."""

    @property
    def is_near(self) -> bool:
        """Whether no more than rounding lies between the two."""
        return self.mean_abs <= _NEAR * self.logits_spread


class MergeReport(_Value):
    """What came of a merge."""

    output: str
    adapter: str
    base: str
    dtype: MergedDtype
    weights_merged: int
    """Layers that the adapter's product was added to."""
    weights_replaced: int
    """Tensors that the adapter brought whole."""
    shards: int
    weights_bytes: int
    merge_seconds: float
    seconds: float
    """In all, the comparison included."""
    peak_host_bytes: int
    """Of the child, mapped files included."""
    comparison: Comparison | None
    not_compared: str | None = None
    """Why there is no comparison."""
    tokenizer: str | None
    """Where the tokenizer's files come from: adapter or base; None where neither has any."""


class MergeDone(_Value):
    """What the child answers."""

    shards: int
    merge_seconds: float
    peak_host_bytes: int
    comparison: Comparison | None
    not_compared: str | None
