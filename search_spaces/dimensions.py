"""Owns one dimension of a space: choices or a range, the values that it holds, how YAML writes it.

Knows nothing of the other dimensions.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

from search_spaces.config import TrialConfig
from search_spaces.documents import Document, KeyPath
from search_spaces.errors import InputError, quote
from search_spaces.knobs import KNOBS, Number
from search_spaces.validation import validate

VALUES_MAX = 10_000
"""More values than this in one dimension is a slip: nobody measures them."""


class Strict(BaseModel):
    """A frozen part of a space that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
        if self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")
        if self.log and (self.step != 1 or self.low < 1):
            raise ValueError(
                f"log needs step 1 and low of at least 1, got {self.step} and {self.low}"
            )
        if (self.high - self.low) // self.step >= VALUES_MAX:
            raise ValueError(_too_many(self.low, self.high, self.step))
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
        if self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")
        if self.log and (self.step is not None or self.low <= 0):
            got = f"step {self.step:g}" if self.step is not None else f"low {self.low:g}"
            raise ValueError(f"log needs no step and low above 0, got {got}")
        if self.step is not None and (self.high - self.low) / self.step >= VALUES_MAX:
            raise ValueError(_too_many(self.low, self.high, self.step))
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
        if share <= 0:
            return self.low
        if share >= 1:
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


def _too_many(low: float, high: float, step: float) -> str:
    return f"{low} to {high} in steps of {step} is more than {VALUES_MAX} values: use a larger step"


Dimension = Choices | IntRange | FloatRange


def read_dimension(document: Document, key: str, value: Any) -> Dimension:
    """Return the dimension ``key``: a list, ``{choices: [...]}`` or ``{low, high, step, log}``.

    Raises:
        InputError: another form, an unknown key, or a value that no configuration takes.
    """
    where = document.where("dimensions", key)
    match value:
        case list():
            return _choices(document, ("dimensions", key), value)
        case {"choices": list() as choices} if len(value) == 1:
            return _choices(document, ("dimensions", key, "choices"), choices)
        case {"choices": _}:
            raise InputError(
                f"{where}: {key}: choices must be a list and stand alone, got {quote(value)}"
            )
        case dict():
            return _range(document, key, value)
        case _:
            raise InputError(
                f"{where}: {key} must list its values, got {quote(value)}; "
                "a single value goes under fixed"
            )


def read_value(key: str, value: Any, *, document: Document, at: KeyPath = ()) -> Any:
    """Return ``value`` as a configuration reads it for ``key``, in plain JSON values.

    Raises:
        InputError: no configuration takes it; the message names document, line, key and value.
    """
    # Any effective batch is a multiple of a micro-batch of one.
    alone = {"micro_batch_size": 1, key: value}
    config = validate(TrialConfig, alone, document, moved={key: at})
    return config.model_dump(mode="json")[key]


def _choices(document: Document, path: KeyPath, choices: list[Any]) -> Choices:
    key = str(path[1])
    if not choices:
        raise InputError(f"{document.where(*path)}: {key} has no values: list at least one")
    read: dict[str, Any] = {}
    for index, choice in enumerate(choices):
        value = read_value(key, choice, document=document, at=(*path, index))
        # By their JSON text: 1 and true are equal in Python and are not the same value.
        if json.dumps(value) in read:
            raise InputError(f"{document.where(*path, index)}: {key} lists {quote(choice)} twice")
        read[json.dumps(value)] = value
    return Choices(choices=tuple(read.values()))


def _range(document: Document, key: str, value: dict[str, Any]) -> Dimension:
    path = ("dimensions", key)
    kind: type[IntRange | FloatRange] = IntRange if KNOBS[key].kind is int else FloatRange
    if KNOBS[key].kind not in (int, float):
        raise InputError(
            f"{document.where(*path)}: {key} is not a number: list its values, got {quote(value)}"
        )
    dimension = validate(kind, value, document, at=path, about=f"{key}: ")
    for end in ("low", "high"):
        read_value(key, value[end], document=document, at=(*path, end))
    return dimension
