"""The search space: which settings are searched, what is fixed, and on what it is searched."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SkipValidation,
    StrictInt,
    field_validator,
    model_validator,
)

from qlora_sweep.search_spaces.config import (
    BATCH_KEYS,
    CONFIG_KEYS,
    SETTINGS,
    Number,
    TrialConfig,
    canonical,
    parse_config,
)
from qlora_sweep.search_spaces.dataset_choice import DatasetChoice
from qlora_sweep.search_spaces.dimensions import (
    Choices,
    Dimension,
    FloatRange,
    checked_value,
    read_dimension,
)
from qlora_sweep.search_spaces.documents import (
    EXPLAINED,
    ContradictionError,
    Document,
    Strict,
    known_key,
    validate,
)
from qlora_sweep.search_spaces.errors import InputError, listed, quote
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.search_spaces.kinds import EIGHT_BIT

MICRO_STEPS_TIMED = 2
"""Micro-steps of one optimizer step that a trial really runs, however long the accumulation.

The second has the first one's gradients beside it, as every later one would: the peak is that of
the whole accumulation, and so is the time of a micro-step.
"""

TOGETHER_MAX = 1_000_000
"""Combinations of settings of which only some go together, which are gone through one by one."""
DEFAULT_MODEL = "mistral-7b-v0.3"
"""What is trained where no model is named."""

Objective = Literal["tokens_per_second", "peak_memory", "trainable_parameters", "eval_loss"]
SamplerName = Literal["guided", "tpe", "gp", "random", "grid"]
Weights = Literal["random", "pretrained"]


def _name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]{0,63}", name):
        raise ValueError(
            f"must be letters, digits, '.', '_' and '-', at most 64, got {quote(name)}; without "
            "it the space is called like its file, and --study names the study"
        )
    return name


_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_duration(text: object) -> float:
    """Return the seconds that ``10m``, ``90s``, ``1h30m`` or ``600`` stands for.

    Raises:
        InputError: it is none of these, or no time at all.
    """
    written = text
    if isinstance(text, int | float) and not isinstance(text, bool):
        written = str(text)
    seconds = 0.0
    if isinstance(written, str):
        match = _DURATION.fullmatch(written.strip().lower().replace(" ", ""))
        if match is not None:
            hours, minutes, rest = (float(part or 0) for part in match.groups())
            seconds = hours * 3600 + minutes * 60 + rest
    if not 0 < seconds < math.inf:
        raise InputError(f"a duration is written like 10m, 90s, 1h30m or 600, got {quote(written)}")
    return seconds


Values = Annotated[tuple[Any, ...], Field(min_length=1)]
ConfigKey = Annotated[str, AfterValidator(partial(known_key, known=CONFIG_KEYS))]


class StepBudget(Strict):
    """How long one trial trains: warm-up until steady, then steps until the interval is narrow."""

    model_config = EXPLAINED

    warmup_min: StrictInt = Field(default=2, ge=1)
    """Fewest steps that are not measured."""
    warmup_max: StrictInt = Field(default=6, ge=1)
    """Most of them, where they do not become steady sooner."""
    measured_min: StrictInt = Field(default=6, ge=2)
    """Six is the fewest steps whose order statistics bound a median at 95 %."""
    measured_max: StrictInt = Field(default=30, ge=2)
    """Most steps that are measured."""
    seconds_max: Number = Field(default=30.0, gt=0)
    """Measured steps stop after this long, once the fewest are there."""
    relative_interval: Number = Field(default=0.02, gt=0)
    """Measuring stops when half the 95 % interval of the median step is this share of it."""

    @property
    def fewest(self) -> int:
        """The fewest steps of a trial that is measured."""
        return self.warmup_min + self.measured_min

    @model_validator(mode="after")
    def _ordered(self) -> StepBudget:
        for phase in ("warmup", "measured"):
            fewest = getattr(self, f"{phase}_min")
            most = getattr(self, f"{phase}_max")
            if fewest > most:
                raise ValueError(
                    f"{phase}_min must be at most {phase}_max, got {fewest} and {most}"
                )
        return self


class ConfirmBudget(Strict):
    """How far the winner of a search is measured again; none of it is one of the space's trials."""

    model_config = EXPLAINED

    seconds: Number = Field(default=15.0, gt=0)
    """Of the device, for measuring again the winner and what may be as fast. The winner and what
    its gain is stated over are measured twice whatever that takes. So is what was begun."""
    repeats: StrictInt = Field(default=3, ge=2)
    """Runs of a configuration after which a tie is a tie. Intervals hold for looks after each."""
    # Six steps of half a second, a winning 7B's slowest, before an evaluation and a checkpoint, and
    # six after them.
    soak_seconds: Number = Field(default=6.0, ge=0)
    """How long the recommended one then trains in one go; 0 for no soak."""
    soak_steps: StrictInt = Field(default=500, ge=10)
    """Steps after which it has trained long enough, sooner than that."""
    quality_seeds: StrictInt = Field(default=3, ge=1, le=10)
    """With how many seeds the few are trained that the choice is between, where eval_loss is an
    objective."""


class SearchSpace(Strict):
    """What may be tried, on which model and GPU, and how long to look."""

    model_config = EXPLAINED

    name: Annotated[str, AfterValidator(_name)]
    """Names the study and its directory too, so it is letters, digits, ``.``, ``_`` and ``-``."""
    description: str = ""
    """One line for the list of presets."""
    gpu: str = "auto"
    """A name of `sweep gpus`, auto for the GPU that is there, or cpu."""
    model: str = DEFAULT_MODEL
    """A name of `sweep models`, a directory with a config.json, or a hub id."""
    weights: Weights = "random"
    """Speed and memory do not depend on them; pretrained loads the real ones."""
    budget_gib: Annotated[Number, Field(gt=0, le=100_000)] | None = None
    """Budget of a device that the catalogue lacks (the CPU), or a tighter one than the GPU's."""
    data: DatasetChoice | None = None
    """Dataset to train on: its path, or a section; without it sequences are random and full."""
    objectives: tuple[Objective, ...] = Field(default=("tokens_per_second",), min_length=1)
    """What is searched for; of several the best compromises are shown."""
    sampler: SamplerName = "guided"
    """What is tried next: guided weighs what is predicted and measured of the whole space."""
    trials: StrictInt = Field(default=40, ge=1, le=1_000_000)
    """At most so many; a guided search ends sooner where it knows."""
    time_budget_seconds: Annotated[Number, Field(gt=0)] | None = None
    """After which a run stops; the same command resumes."""
    max_dollars: Annotated[Number, Field(gt=0)] | None = None
    """What all runs of the study may cost, at the price of the GPU that runs it."""
    stop_below_gain: Number = Field(default=0.02, ge=0, lt=1)
    """A guided search ends where no further trial is expected to gain this share; 0 goes on."""
    seed: StrictInt = Field(default=0, ge=0, le=2**32 - 1)
    """Of the sampler, the weights and the tokens."""
    steps: StepBudget = StepBudget()
    """How long one trial trains."""
    confirm: ConfirmBudget | None = ConfirmBudget()
    """How far the winner is measured again; false for not at all."""
    dimensions: dict[ConfigKey, SkipValidation[Dimension]] = Field(
        default={}, validate_default=True
    )
    """What is searched: a list of values, or low and high. Batches that do not go into any other
    are left out."""
    fixed: dict[ConfigKey, Any] = Field(default={})
    """What is the same in every trial."""
    numerics: Literal["any", "16-bit"] = "any"
    """16-bit leaves compute in 8 bits out, and not a base that is stored in them."""
    leave_out: tuple[Annotated[dict[ConfigKey, Values], Field(min_length=1)], ...] = ()
    """What is not searched: a configuration that has one of the values of every setting that an
    entry names."""
    baseline: dict[ConfigKey, Any] = Field(default={})
    """What the study's gain is reported over: a reference, which the space need not hold.

    Missing keys take the space's fixed values, and the recipe's defaults where nothing is fixed.
    """

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """Read a duration in place of seconds, a dataset's path in place of a section, and true,
        false or 0 for ``confirm``; a section with nothing under it is not there."""
        if not isinstance(values, dict):
            return values
        for key in values:
            if key in CONFIG_KEYS and key not in cls.model_fields:
                message = f"{key} is a setting: write it under fixed, or under dimensions"
                raise ContradictionError(f"{message} with what is searched", key)
        values = dict(values)
        for section in ("dimensions", "fixed", "baseline", "steps"):
            if section in values and values[section] is None:
                del values[section]
        if isinstance(values.get("data"), str):
            values["data"] = {"texts": values["data"]}
        if values.get("confirm") in (True, False):
            # 0 and 1 are equal to these.
            has_confirmation = values.pop("confirm")
            values["confirm"] = None
            if has_confirmation:
                values["confirm"] = ConfirmBudget()
        objectives = values.get("objectives")
        if isinstance(objectives, list | tuple) and "cost" in objectives:
            message = (
                "objectives cannot hold cost: on one GPU at one price it is 1 / speed. Ask for "
            )
            shown = "tokens_per_second; plan, report and best show what tokens cost"
            raise ContradictionError(message + shown, "objectives")
        if "time_budget" in values:
            if "time_budget_seconds" in values:
                message = "time_budget and time_budget_seconds are both given: keep one"
                raise ContradictionError(message, "time_budget")
            try:
                values["time_budget_seconds"] = parse_duration(values.pop("time_budget"))
            except InputError as error:
                raise ContradictionError(f"time_budget: {error}", "time_budget") from error
        return values

    @field_validator("dimensions")
    @classmethod
    def _searches_something(cls, dimensions: dict[str, Any]) -> dict[str, Dimension]:
        if not dimensions:
            raise ValueError("must name at least one key to search, with its values")
        return {key: read_dimension(key, value) for key, value in dimensions.items()}

    @field_validator("fixed", "baseline")
    @classmethod
    def _as_configured(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {key: checked_value(key, value) for key, value in values.items()}

    @field_validator("leave_out")
    @classmethod
    def _as_left_out(cls, entries: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        checked = []
        for at, entry in enumerate(entries):
            read = {}
            for key, values in entry.items():
                read[key] = tuple(checked_value(key, value, at, key) for value in values)
            checked.append(read)
        return tuple(checked)

    @model_validator(mode="after")
    def _consistent(self) -> SearchSpace:
        for message, *path in self._contradictions():
            raise ContradictionError(message, *path)
        for key, column in zip(BATCH_KEYS, zip(*self.batches, strict=True), strict=False):
            values = self.values_of(key)
            if key in self.dimensions and not set(values) <= set(column):
                kept = filter(set(column).__contains__, values)
                self.dimensions[key] = Choices(choices=tuple(kept))
        return self

    def _contradictions(self) -> Iterator[tuple[str, ...]]:
        """Yield what contradicts itself, with the key on whose line it stands."""
        for key in sorted(self.dimensions.keys() & self.fixed.keys()):
            yield f"'{key}' is fixed and also a dimension: keep one", "fixed", key
        if "method" in self.dimensions:
            message = "speeds of one method say nothing of another's: fix one, as --method dpo"
            yield message, "dimensions", "method"
        if "image_size" in self.dimensions:
            message = (
                "speeds with one size of image say nothing of another's: fix one, as --image-size "
                "1024 (`sweep plan` says what others take)"
            )
            yield message, "dimensions", "image_size"
        if self.baseline.get("method", self.values_of("method")[0]) not in self.values_of("method"):
            yield "the baseline has the space's method: leave it out", "baseline", "method"
        for key in ("loss_type", "dpo_beta"):
            for place in ("dimensions", "baseline"):
                if key in getattr(self, place) and "eval_loss" in self.objectives:
                    message = f"losses of another {key} do not compare as eval_loss: fix it"
                    yield message, place, key
        if len(set(self.objectives)) < len(self.objectives):
            yield f"objectives lists one twice, got {', '.join(self.objectives)}", "objectives"
        if "learning_rate" in self.dimensions and "eval_loss" not in self.objectives:
            message = (
                "neither speed nor memory depends on learning_rate, so nothing that is searched"
            )
            instead = "for does: fix it, or search for eval_loss too"
            yield f"{message} {instead}", "dimensions", "learning_rate"
        if self.numerics == "16-bit" and self.baseline.get("compute_dtype") in EIGHT_BIT:
            message = "numerics 16-bit leaves the baseline's compute_dtype out: name another"
            yield message, "baseline", "compute_dtype"
        named_out = set().union(*self.leave_out)
        if not named_out.isdisjoint(BATCH_KEYS):
            yield f"leave_out cannot name {listed(BATCH_KEYS)}", "leave_out"
        named = sorted(self._named_to_leave_out)
        for keys, entries in ((BATCH_KEYS, 1), (named, len(self._left_out))):
            ways = entries
            for key in keys:
                ways *= len(self.values_of(key)) or 1
            if ways > TOGETHER_MAX:
                message = f"{', '.join(keys)} go together in too many ways: list fewer values"
                yield message, "dimensions"
        micro, gpus, effective = map(self.values_of, BATCH_KEYS)
        if not self.batches and micro and gpus and effective:
            times = ""
            got = [_listed_values(effective), _listed_values(micro)]
            if set(gpus) != {1}:
                times = " times data_parallel"
                got.append(_listed_values(gpus))
            message = f"effective_batch_size must be a multiple of micro_batch_size{times}, got"
            section = "dimensions"
            if "effective_batch_size" in self.fixed:
                section = "fixed"
            yield f"{message} {' and '.join(got)}", section, "effective_batch_size"
        if not self.together:
            key = "leave_out"
            if self.numerics != "any":
                key = "numerics"
            got = []
            for name in self._named_to_leave_out:
                values = self.values_of(name)
                if values:
                    got.append(f"{name} is {_listed_values(values)}")
            yield f"{key} leaves nothing to search: {', '.join(got)}", key
        if self.sampler == "grid" and self.is_continuous:
            yield "sampler grid needs a step in every range of numbers", "sampler"

    @property
    def is_continuous(self) -> bool:
        """Whether a dimension is a range of numbers without steps."""
        return any(dimension.values() is None for dimension in self.dimensions.values())

    def budget_gib_on(self, gpu: str) -> float | None:
        """Return the budget on a device named over the space's own; None for all that a GPU has.

        A GPU has its own budget, unless the space is for that GPU or for whichever is there.
        """
        meant = match_product(self.gpu) or self.gpu
        named = match_product(gpu) or gpu
        if meant == named or self.gpu == "auto" or gpu == "cpu":
            return self.budget_gib
        return None

    def values_of(self, key: str) -> tuple[Any, ...]:
        """Return every value that ``key`` can take in this space."""
        if key in self.dimensions:
            return self.dimensions[key].values() or ()
        return (self.fixed.get(key, TrialConfig.model_fields[key].default),)

    @property
    def gpus_per_trial(self) -> int:
        """GPUs that the widest of its trials trains on together, the baseline's among them."""
        searched = self.values_of("data_parallel")
        return int(max(*searched, self.baseline_config().data_parallel))

    @cached_property
    def batches(self) -> tuple[tuple[Any, ...], ...]:
        """Values of `BATCH_KEYS` in the space that go into each other."""
        each = itertools.product(*map(self.values_of, BATCH_KEYS))
        return tuple(values for values in each if _is_whole(*values))

    @cached_property
    def columns(self) -> tuple[tuple[Mapping[str, Any], ...], ...] | None:
        """One part of each column makes a combination; None where a dimension is continuous.

        A column is a dimension, or several together where only some of their values go together:
        those of `BATCH_KEYS`, and those that `leave_out` names.
        """
        if self.is_continuous:
            return None
        searched = [key for key in BATCH_KEYS if key in self.dimensions]
        whole: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for values in self.batches:
            batch = dict(zip(BATCH_KEYS, values, strict=True))
            part = {key: batch[key] for key in searched}
            whole[tuple(part.values())] = part
        is_partial = len(whole) < math.prod(map(len, map(self.values_of, searched)))
        columns: dict[str, tuple[Mapping[str, Any], ...]] = {}
        for key in self.dimensions:
            if key in searched and is_partial:
                columns[BATCH_KEYS[0]] = tuple(whole.values())
            elif key in self.together[0]:
                columns["leave_out"] = self.together
            else:
                columns[key] = tuple({key: value} for value in self.values_of(key))
        return tuple(columns.values())

    @cached_property
    def _left_out(self) -> tuple[Mapping[str, Sequence[Any]], ...]:
        entries: list[Mapping[str, Sequence[Any]]] = list(self.leave_out)
        if self.numerics == "16-bit":
            entries.append({"compute_dtype": EIGHT_BIT})
        left_out = []
        for entry in entries:
            left_out.append({key: tuple(map(_written, values)) for key, values in entry.items()})
        return tuple(left_out)

    @cached_property
    def together(self) -> tuple[Mapping[str, Any], ...]:
        """Values of the dimensions that anything is left out by, without what is left out."""
        values = {}
        for key in self.dimensions:
            if key in self._named_to_leave_out and self.values_of(key):
                values[key] = self.values_of(key)
        together = []
        for row in itertools.product(*values.values()):
            params = dict(zip(values, row, strict=True))
            if not self.leaves_out(params):
                together.append(params)
        return tuple(together)

    @cached_property
    def _named_to_leave_out(self) -> Mapping[str, None]:
        """The settings by which anything is left out."""
        named: dict[str, None] = {}
        for entry in self._left_out:
            named |= dict.fromkeys(entry)
        return named

    def leaves_out(self, params: Mapping[str, Any]) -> bool:
        """Whether the values of some dimensions are left out, whatever the others' are."""
        for entry in self._left_out:
            for key, values in entry.items():
                value = params.get(key)
                if key not in params:
                    value = next(iter(self.values_of(key)), None)
                if _written(value) not in values:
                    break
            else:
                return True
        return False

    def holds_batches_of(self, params: Mapping[str, Any]) -> bool:
        """Return whether the micro-batches of ``params`` go into their effective batch."""
        return _is_whole(*(params.get(key, self.values_of(key)[0]) for key in BATCH_KEYS))

    def goes_together(self, params: Mapping[str, Any]) -> bool:
        """Return whether the space has the values of ``params`` together."""
        return self.holds_batches_of(params) and not self.leaves_out(params)

    def changed(
        self, changes: Mapping[str, Any], *, names: Mapping[str, str] = MappingProxyType({})
    ) -> SearchSpace:
        """Return the space with other values of some keys.

        Args:
            changes: values by key.
            names: what a person typed for a key, where that is not the key itself.

        Raises:
            InputError: what it comes to is no space.
        """
        document = Document(f"space '{self.name}'", names=names)
        return validate(SearchSpace, {**self.model_dump(), **changes}, document)

    def config(self, params: Mapping[str, Any]) -> TrialConfig:
        """Return the configuration for one value of each dimension."""
        return parse_config({**self.fixed, **params}, where=f"space '{self.name}'")

    def baseline_config(self) -> TrialConfig:
        """Return the configuration that gains are reported over.

        Raises:
            InputError: it names an unknown key, a value out of range, or a micro-batch that does
                not go into the effective batch. An inherited one is lowered until it does.
        """
        where = f"space '{self.name}': baseline"
        # Judged by itself first, so that only what it inherits gives way below.
        named = parse_config(self.baseline, where=where)
        values = self.fixed | self.baseline
        micro = named.micro_batch_size
        effective = values.get("effective_batch_size")
        gpus = values.get("data_parallel", 1)
        if "micro_batch_size" not in self.baseline:
            micro = values.get("micro_batch_size", micro)
            if effective is not None:
                micro = largest_whole(micro, effective // gpus)
        elif not _is_whole(micro, gpus, effective):
            of_all = ""
            if gpus != 1:
                of_all = f" on each of {gpus} GPUs"
            raise InputError(
                f"{where}: micro_batch_size {micro}{of_all} does not go into effective_batch_size "
                f"{effective}, which is fixed: name an effective_batch_size under baseline too"
            )
        return parse_config({**values, "micro_batch_size": micro}, where=where)

    def size(self) -> int | None:
        """Return the number of combinations; None where a dimension is continuous."""
        if self.columns is None:
            return None
        return math.prod(map(len, self.columns))

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of values.

        Raises:
            ValueError: a dimension is continuous.
        """
        if self.columns is None:
            raise ValueError("a continuous dimension has no combinations to list")
        for row in itertools.product(*self.columns):
            params: dict[str, Any] = {}
            for part in row:
                params |= part
            yield params

    def params_of(self, config: TrialConfig) -> dict[str, Any] | None:
        """Return each dimension's value that gives ``config``; None where the space lacks it.

        What trains the same way is the same: alpha 32 is alpha left out at rank 16.
        """
        wanted = canonical(config)
        columns = {}
        for key, dimension in self.dimensions.items():
            value = getattr(config, key)
            columns[key] = _candidates(key, dimension, value, getattr(wanted, key))
        for row in itertools.product(*columns.values()):
            params = dict(zip(columns, row, strict=True))
            try:
                if not self.leaves_out(params) and canonical(self.config(params)) == wanted:
                    return params
            except InputError:
                continue
        return None

    def holds(self, config: TrialConfig) -> bool:
        """Whether the space has ``config``, however it is written."""
        is_held = self._held.get(config)
        if is_held is None:
            is_held = self.params_of(config) is not None
            self._held[config] = is_held
        return is_held

    @cached_property
    def _held(self) -> dict[TrialConfig, bool]:
        """What was asked before: every ranking of a study asks it of every trial."""
        return {}


def largest_whole(micro: int, effective: int) -> int:
    """Return the largest micro-batch of ``micro`` or fewer that goes into an effective batch."""
    return next(size for size in range(micro, 0, -1) if effective % size == 0)


def _is_whole(micro: Any, gpus: Any, effective: Any) -> bool:
    """Whether the GPUs' micro-batches go into an effective batch; None is one of each GPU."""
    if not all(isinstance(value, int) for value in (micro, gpus, effective)):
        return True
    return bool(micro > 0 and gpus > 0 and effective % (micro * gpus) == 0)


def _candidates(key: str, dimension: Dimension, value: Any, resolved: Any) -> list[Any]:
    """Return the dimension's values that may stand for a configuration's, those as written first.

    What a value comes to may depend on the other keys, so only the whole configuration tells.
    """
    declared = dimension.values()
    if declared is None:
        assert isinstance(dimension, FloatRange), "only a range of numbers has no list of values"
        number = value
        if value is None:
            number = resolved
        if isinstance(number, int | float) and dimension.low <= number <= dimension.high:
            return [number]
        return []
    possible = declared
    if SETTINGS[key].resolved is None:
        possible = tuple(each for each in declared if _written(each) in (value, resolved))
    return sorted(possible, key=lambda known: _written(known) != value)


def _written(value: Any) -> Any:
    """Return a value as a configuration writes it: it keeps lists sorted."""
    if isinstance(value, list | tuple):
        return tuple(sorted(set(value)))
    return value


def _listed_values(values: Sequence[Any]) -> str:
    return listed(map(quote, values))
