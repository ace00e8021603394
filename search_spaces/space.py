"""Owns the search space: which dimensions are free, what is fixed, and on what it is searched.

Knows nothing of Optuna; `sweep.sampling.samplers` turns dimensions into distributions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

from search_spaces.config import CONFIG_KEYS, TrialConfig, parse_config
from search_spaces.errors import InputError
from search_spaces.knobs import Number
from search_spaces.models import Weights
from search_spaces.rules import canonical

VALUES_MAX = 10_000
"""More values than this in one dimension is a slip: nobody measures them."""

MICRO_STEPS_TIMED = 2
"""Micro-steps of one optimizer step that a trial really runs, however long the accumulation.

The second has the first one's gradients beside it, as every later one would: the peak is that of
the whole accumulation, and so is the time of a micro-step.
"""

Objective = Literal["tokens_per_second", "peak_memory", "cost", "trainable_parameters"]
SamplerName = Literal["tpe", "gp", "random", "grid"]


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
        if (self.high - self.low) // self.step >= VALUES_MAX:
            raise ValueError(_too_many(self.low, self.high, self.step))
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
        if self.step is not None and (self.high - self.low) / self.step >= VALUES_MAX:
            raise ValueError(_too_many(self.low, self.high, self.step))
        return self

    def values(self) -> tuple[float, ...] | None:
        """Return every value; None where there is no step."""
        if self.step is None:
            return None
        count = int((self.high - self.low) / self.step + 1e-9) + 1
        # Rounded, so that three steps of 0.1 are 0.3 and the last value is never above high.
        steps = (round(self.low + index * self.step, 12) for index in range(count))
        return tuple(min(value, self.high) for value in steps)


def _too_many(low: float, high: float, step: float) -> str:
    return f"{low} to {high} in steps of {step} is more than {VALUES_MAX} values: use a larger step"


Dimension = Choices | IntRange | FloatRange


class StepBudget(_Model):
    """How long one trial trains: warm-up until steady, then steps until the interval is narrow."""

    warmup_min: StrictInt = Field(default=2, ge=1)
    warmup_max: StrictInt = Field(default=6, ge=1)
    measured_min: StrictInt = Field(default=6, ge=2)
    """Six is the fewest steps whose order statistics bound a median at 95 %."""
    measured_max: StrictInt = Field(default=30, ge=2)
    seconds_max: Number = Field(default=30.0, gt=0)
    """Measured steps stop after this long, once the fewest are there."""
    relative_interval: Number = Field(default=0.02, gt=0)
    """Measuring stops when half the 95 % interval of the median step is this share of it."""

    @model_validator(mode="after")
    def _ordered(self) -> StepBudget:
        for phase in ("warmup", "measured"):
            fewest, most = getattr(self, f"{phase}_min"), getattr(self, f"{phase}_max")
            if fewest > most:
                raise ValueError(
                    f"{phase}_min must be at most {phase}_max, got {fewest} and {most}"
                )
        return self


class SearchSpace(_Model):
    """What may be tried, on which model and card, and how long to look."""

    name: str = Field(pattern=r"^[\w][\w.-]{0,63}$")
    """Names the study and its directory too, so it is letters, digits, ``.``, ``_`` and ``-``."""
    description: str = ""
    gpu: str = "auto"
    model: str = "mistral-7b-v0.3"
    weights: Weights = "random"
    budget_gib: Number | None = Field(default=None, gt=0, le=100_000)
    """Budget of a device that the catalogue lacks (the CPU), or a tighter one than the card's."""
    objectives: tuple[Objective, ...] = Field(default=("tokens_per_second",), min_length=1)
    sampler: SamplerName = "tpe"
    trials: StrictInt = Field(default=40, ge=1, le=1_000_000)
    time_budget_seconds: Number | None = Field(default=None, gt=0)
    seed: StrictInt = Field(default=0, ge=0, le=2**32 - 1)
    steps: StepBudget = StepBudget()
    dimensions: dict[str, Annotated[Dimension, Field(union_mode="left_to_right")]]
    fixed: dict[str, Any] = {}
    baseline: dict[str, Any] = {}
    """What the study's gain is reported over: a reference, which the space need not hold.

    Missing keys take the space's fixed values, and the recipe's defaults where nothing is fixed.
    """

    @model_validator(mode="after")
    def _consistent(self) -> SearchSpace:
        both = sorted(set(self.dimensions) & set(self.fixed))
        if both:
            raise ValueError(f"'{both[0]}' is both a dimension and fixed")
        if not self.dimensions:
            raise ValueError("dimensions must name at least one key to search")
        if len(set(self.objectives)) < len(self.objectives):
            raise ValueError(f"objectives lists one twice, got {', '.join(self.objectives)}")
        if self.sampler == "grid" and self.size() is None:
            raise ValueError("sampler grid needs a step in every range of numbers")
        self._check_accumulation()
        return self

    def _check_accumulation(self) -> None:
        """Refuse batches that do not go into each other: a sampler would propose them again."""
        micro, effective = (
            self._values_of("micro_batch_size"),
            self._values_of("effective_batch_size"),
        )
        for whole, part in itertools.product(effective, micro):
            if isinstance(whole, int) and isinstance(part, int) and whole % part:
                raise ValueError(
                    f"effective_batch_size {whole} is not a multiple of micro_batch_size {part}"
                )

    def _values_of(self, key: str) -> tuple[Any, ...]:
        """Return every value that ``key`` can take in this space."""
        if key in self.dimensions:
            return self.dimensions[key].values() or ()
        return (self.fixed.get(key, TrialConfig.model_fields[key].default),)

    def config(self, params: Mapping[str, Any]) -> TrialConfig:
        """Return the configuration for one value of each dimension."""
        return parse_config({**self.fixed, **params}, where=f"space '{self.name}'")

    def baseline_config(self) -> TrialConfig:
        """Return the configuration that gains are reported over.

        Raises:
            InputError: it names an unknown key, a value out of range, or batches that do not go
                into each other.
        """
        where = f"space '{self.name}': baseline"
        # Judged by itself first, so that only what it inherits gives way below.
        parse_config(self.baseline, where=where)
        inherited = _with_whole_batches({**self.fixed, **self.baseline}, named=self.baseline)
        return parse_config(inherited, where=where)

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
        """Yield every combination of values.

        Raises:
            ValueError: a dimension is continuous.
        """
        names = list(self.dimensions)
        values = [dimension.values() for dimension in self.dimensions.values()]
        if any(column is None for column in values):
            raise ValueError("a continuous dimension has no combinations to list")
        for row in itertools.product(*[column for column in values if column is not None]):
            yield dict(zip(names, row, strict=True))

    def params_of(self, config: TrialConfig) -> dict[str, Any] | None:
        """Return each dimension's value that gives ``config``; None where the space lacks it.

        What trains the same way is the same: alpha 32 is alpha left out at rank 16.
        """
        known, wanted = config.model_dump(mode="python"), canonical(config)
        columns = {
            key: _candidates(key, dimension, known[key], getattr(wanted, key))
            for key, dimension in self.dimensions.items()
        }
        for row in itertools.product(*columns.values()):
            params = dict(zip(columns, row, strict=True))
            if self._gives(params, wanted):
                return params
        return None

    def _gives(self, params: Mapping[str, Any], wanted: TrialConfig) -> bool:
        try:
            return canonical(self.config(params)) == wanted
        except InputError:
            return False


def _with_whole_batches(values: dict[str, Any], *, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a baseline's values with an effective batch that its micro-batch goes into.

    What the baseline names stays. An inherited micro-batch becomes the largest that goes into the
    effective batch and is no larger itself; an inherited effective batch becomes the multiple of
    the micro-batch that is nearest to it.
    """
    effective = _count(values.get("effective_batch_size"))
    default = TrialConfig.model_fields["micro_batch_size"].default
    micro = _count(values.get("micro_batch_size", default))
    if effective is None or micro is None or effective % micro == 0:
        return values
    if "micro_batch_size" not in named:
        smaller = range(min(micro, effective), 0, -1)
        fitting = next(size for size in smaller if effective % size == 0)
        return values | {"micro_batch_size": fitting}
    # Both named and contradictory were refused before.
    return values | {"effective_batch_size": max(1, (effective + micro // 2) // micro) * micro}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _candidates(key: str, dimension: Dimension, value: Any, resolved: Any) -> list[Any]:
    """Return the dimension's values that may stand for a configuration's, those as written first.

    A value left out stands for what it resolves to: whether it really does depends on the other
    keys, so only the whole configuration tells.
    """
    declared = dimension.values()
    if declared is None:
        assert isinstance(dimension, FloatRange), "only a range of numbers has no list of values"
        number = resolved if value is None else value
        is_inside = isinstance(number, int | float) and dimension.low <= number <= dimension.high
        return [number] if is_inside else []
    as_written = [known for known in declared if _same(known, value)]
    # Without quantization either value of double_quant does nothing.
    others = [
        known
        for known in declared
        if known not in as_written
        and (known is None or key == "double_quant" or _same(known, resolved))
    ]
    return as_written + others


def _same(declared: Any, value: Any) -> bool:
    """Whether a declared value is a configuration's value (which keeps lists sorted)."""
    if isinstance(declared, list | tuple):
        return bool(tuple(sorted(set(declared))) == value)
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
