"""One dimension of a space: choices or a range, the values that it holds, how YAML writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from pydantic import Field, StrictBool, StrictInt, ValidationError, model_validator

from qlora_sweep.search_spaces.config import Number, TrialConfig, number_kind
from qlora_sweep.search_spaces.documents import (
    ContradictionError,
    Document,
    Strict,
    refusal,
    validate,
)
from qlora_sweep.search_spaces.errors import quote

VALUES_MAX = 10_000
"""More values than this in one dimension is a slip."""


class Choices(Strict):
    """A categorical dimension."""

    choices: tuple[Any, ...] = Field(min_length=1)

    @property
    def first(self) -> Any:
        """One of the values."""
        return self.choices[0]

    def values(self) -> tuple[Any, ...]:
        """Return every value."""
        return self.choices


class IntRange(Strict):
    """Whole numbers from ``low`` to ``high``, both included."""

    low: StrictInt
    high: StrictInt
    step: StrictInt = Field(default=1, ge=1)
    log: StrictBool = False

    @model_validator(mode="after")
    def _ordered(self) -> IntRange:
        _check_range(self.low, self.high, self.step)
        if self.log and (self.step != 1 or self.low < 1):
            raise ValueError(
                f"log needs step 1 and low of at least 1, got {self.step} and {self.low}"
            )
        return self

    @property
    def first(self) -> int:
        """One of the values."""
        return self.low

    def values(self) -> tuple[int, ...]:
        """Return every value."""
        return tuple(range(self.low, self.high + 1, self.step))


class FloatRange(Strict):
    """Numbers from ``low`` to ``high``, in steps where ``step`` is given, or on a log scale."""

    low: Number
    high: Number
    step: Number | None = Field(default=None, gt=0)
    log: StrictBool = False

    @model_validator(mode="after")
    def _ordered(self) -> FloatRange:
        _check_range(self.low, self.high, self.step)
        if self.log and (self.step is not None or self.low <= 0):
            got = f"low {self.low:g}"
            if self.step is not None:
                got = f"step {self.step:g}"
            raise ValueError(f"log needs no step and low above 0, got {got}")
        return self

    @property
    def first(self) -> float:
        """One of the values."""
        return self.low

    def values(self) -> tuple[float, ...] | None:
        """Return every value; None where there is no step."""
        if self.step is None:
            return None
        count = int((self.high - self.low) / self.step + 1e-9) + 1
        # Rounded, so that three steps of 0.1 are 0.3 and the last value is never above high.
        steps = (round(self.low + index * self.step, 12) for index in range(count))
        return tuple(min(value, self.high) for value in steps)

    def at(self, share: float) -> float:
        """Return the number so far along the range, from 0 (``low``) to 1 (``high``), on its scale.

        A share beyond either end is that end.
        """
        if share <= 0.0:
            return self.low
        if share >= 1.0:
            return self.high
        if self.log:
            return math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)

    def share_of(self, value: float) -> float:
        """Return how far along the range a number is: `at`, the other way round."""
        if self.low == self.high:
            return 0.0
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _check_range(low: float, high: float, step: float | None) -> None:
    if low > high:
        raise ValueError(f"low must be at most high, got {low} and {high}")
    if step is not None and (high - low) / step >= VALUES_MAX:
        raise ValueError(
            f"{low} to {high} in steps of {step} is more than {VALUES_MAX} values: use a larger "
            "step"
        )


Dimension = Choices | IntRange | FloatRange


def read_dimension(key: str, value: Any) -> Dimension:
    """Return the dimension ``key``: a list, ``{choices: [...]}`` or ``{low, high, step, log}``.

    Raises:
        ContradictionError: another form, an unknown key, or a value that no configuration takes.
    """
    if isinstance(value, Choices | IntRange | FloatRange):
        return value
    values = value
    if isinstance(value, list | tuple):
        values = {"choices": value}
    if not isinstance(values, dict):
        alone = "a single value goes under fixed"
        raise ContradictionError(f"{key} must list its values, got {quote(value)}; {alone}", key)
    kind = number_kind(key)
    model: type[Dimension] = FloatRange
    if kind is int:
        model = IntRange
    if "choices" in values or kind is None:
        model = Choices
    try:
        dimension = model.model_validate(values)
    except ValidationError as error:
        raise refusal(error, model, at=(key,), about=f"{key}: ") from error
    if isinstance(dimension, Choices):
        if value is values:
            return _choices(dimension.choices, key, "choices")
        return _choices(dimension.choices, key)
    for end in ("low", "high"):
        checked_value(key, values[end], key, end)
    return dimension


def checked_value(key: str, value: Any, *at: str | int) -> Any:
    """Return ``value`` as a configuration reads it for ``key``, in plain JSON values.

    Raises:
        ContradictionError: no configuration takes it; it stands at ``at``.
    """
    try:
        config = TrialConfig.model_validate(_alone(key, value))
    except ValidationError as error:
        raise refusal(error, TrialConfig, at=at or (key,)) from error
    return config.model_dump(mode="json", include={key})[key]


def read_value(key: str, value: Any, *, document: Document) -> Any:
    """Return ``value`` as a configuration reads it for ``key``, in plain JSON values.

    Raises:
        InputError: no configuration takes it; the message names document, key and value.
    """
    config = validate(TrialConfig, _alone(key, value), document)
    return config.model_dump(mode="json", include={key})[key]


def _alone(key: str, value: Any) -> dict[str, Any]:
    # Any effective batch is a multiple of a micro-batch of one.
    return {"micro_batch_size": 1, key: value}


def _choices(choices: Sequence[Any], *path: str) -> Choices:
    key = path[0]
    if len(choices) > VALUES_MAX:
        raise ContradictionError(f"{key} has more than {VALUES_MAX} values", key)
    read: dict[str, Any] = {}
    for index, choice in enumerate(choices):
        value = checked_value(key, choice, *path, index)
        # By their JSON text: 1 and true are equal in Python and are not the same value.
        if json.dumps(value) in read:
            raise ContradictionError(f"{key} lists {quote(choice)} twice", *path, index)
        read[json.dumps(value)] = value
    return Choices(choices=tuple(read.values()))
