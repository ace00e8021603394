"""Owns the search space: which dimensions are free, what is fixed, and on what it is searched.

Knows nothing of Optuna; `sweep.samplers` turns dimensions into distributions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

from search_spaces.config import CONFIG_KEYS, Number, TrialConfig, parse_config
from search_spaces.models import Weights

Objective = Literal["tokens_per_second", "peak_memory", "cost", "trainable_parameters"]
SamplerName = Literal["tpe", "gp", "random", "grid"]
Scalar = StrictBool | StrictInt | float | str


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Choices(_Model):
    """A categorical dimension."""

    choices: tuple[Any, ...] = Field(min_length=1)

    def values(self) -> tuple[Any, ...]:
        """Return every value."""
        return self.choices


class IntRange(_Model):
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
        return self

    def values(self) -> tuple[int, ...]:
        """Return every value."""
        return tuple(range(self.low, self.high + 1, self.step))


class FloatRange(_Model):
    """Numbers from ``low`` to ``high``, in steps where ``step`` is given."""

    low: Number
    high: Number
    step: Number | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> FloatRange:
        if self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")
        return self

    def values(self) -> tuple[float, ...] | None:
        """Return every value; None where there is no step."""
        if self.step is None:
            return None
        count = int((self.high - self.low) / self.step + 1e-9) + 1
        return tuple(self.low + index * self.step for index in range(count))


Dimension = Choices | IntRange | FloatRange


class StepBudget(_Model):
    """How long one trial trains: warm-up until steady, then measured steps until the interval is narrow."""

    warmup_min: StrictInt = Field(default=2, ge=1)
    warmup_max: StrictInt = Field(default=6, ge=1)
    measured_min: StrictInt = Field(default=6, ge=2)
    """Six is the fewest steps whose order statistics bound a median at 95 %."""
    measured_max: StrictInt = Field(default=30, ge=2)
    seconds_max: Number = Field(default=30.0, gt=0)
    """Measured steps stop after this long, once the fewest are there."""
    relative_interval: Number = Field(default=0.02, gt=0)
    """Half-width of the 95 % interval of the median step, as a share of it, at which measuring stops."""


class SearchSpace(_Model):
    """What may be tried, on which model and card, and how long to look."""

    name: str = Field(min_length=1)
    description: str = ""
    gpu: str = "auto"
    model: str = "mistral-7b-v0.3"
    weights: Weights = "random"
    budget_gib: Number | None = Field(default=None, gt=0)
    """Memory budget of a device the catalogue does not know (the CPU), or a tighter one than the card's."""
    objectives: tuple[Objective, ...] = Field(default=("tokens_per_second",), min_length=1)
    sampler: SamplerName = "tpe"
    trials: StrictInt = Field(default=40, ge=1)
    time_budget_seconds: Number | None = Field(default=None, gt=0)
    seed: StrictInt = 0
    steps: StepBudget = StepBudget()
    dimensions: dict[str, Annotated[Dimension, Field(union_mode="left_to_right")]]
    fixed: dict[str, Any] = {}
    baseline: dict[str, Any] = {}
    """The configuration that the study's gain is reported over; missing keys take the recipe's defaults."""

    @model_validator(mode="after")
    def _consistent(self) -> SearchSpace:
        both = sorted(set(self.dimensions) & set(self.fixed))
        if both:
            raise ValueError(f"'{both[0]}' is both a dimension and fixed")
        if not self.dimensions:
            raise ValueError("dimensions must name at least one key to search")
        return self

    def config(self, params: Mapping[str, Any]) -> TrialConfig:
        """Return the configuration for one value of each dimension."""
        return parse_config({**self.fixed, **params}, where=f"space '{self.name}'")

    def baseline_config(self) -> TrialConfig:
        """Return the configuration that gains are reported over."""
        return parse_config(self.baseline, where=f"space '{self.name}': baseline")

    def size(self) -> int | None:
        """Return the number of combinations; None where a dimension is continuous."""
        total = 1
        for dimension in self.dimensions.values():
            values = dimension.values()
            if values is None:
                return None
            total *= len(values)
        return total

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of values. Raises `ValueError` where a dimension is continuous."""
        names = list(self.dimensions)
        values = [dimension.values() for dimension in self.dimensions.values()]
        if any(column is None for column in values):
            raise ValueError("a continuous dimension has no combinations to list")
        for row in itertools.product(*[column for column in values if column is not None]):
            yield dict(zip(names, row, strict=True))

    def params_of(self, config: TrialConfig) -> dict[str, Any] | None:
        """Return the value of each dimension that gives ``config``; None where the space does not hold it."""
        values = config.model_dump(mode="python")
        params: dict[str, Any] = {}
        for key, dimension in self.dimensions.items():
            known = dimension.values()
            match = (
                [v for v in known if _same(v, values[key])] if known is not None else [values[key]]
            )
            if not match:
                return None
            params[key] = match[0]
        return params if self.config(params) == config else None


def _same(declared: Any, value: Any) -> bool:
    """Whether a declared value and a configuration's value are the same one (lists are kept sorted)."""
    if isinstance(declared, list | tuple):
        return tuple(sorted(set(declared))) == value
    return bool(declared == value)


__all__ = [
    "CONFIG_KEYS",
    "Choices",
    "Dimension",
    "FloatRange",
    "IntRange",
    "SearchSpace",
    "StepBudget",
]
