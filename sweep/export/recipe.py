"""Owns what every export tells: a study's winner, what it runs on, and what was measured of it.

Knows nothing of any format. Names are people's own text: here they become single printable lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from reports import objectives, uncertainty, units
from reports.confirmation import status_words
from reports.summary import emulation_note
from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, NothingFits, quote
from search_spaces.linears import resolve_targets
from search_spaces.models import ModelSpec
from search_spaces.space import Objective
from storage.definition import StudySnapshot, Target
from storage.objectives import measured_of
from storage.ranking import Ranking, rank_study
from storage.records import Measurement, TrialRecord, Verdict

WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
SCHEDULE = "linear"
"""What a measured step does beside the configuration; none of it changes memory or speed."""

_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel")
_COMMENT_WIDTH = 96


@dataclass(frozen=True)
class Recipe:
    """The winner of a study or another trial of it, with all that an export of it says."""

    study: str
    number: int
    config: TrialConfig
    measurement: Measurement
    model: ModelSpec
    target: Target
    environment: dict[str, Any]
    objectives: tuple[Objective, ...] = ("tokens_per_second",)
    """What it is the best by."""
    is_confirmed: bool = False
    """Whether it was measured again after the search."""
    certainty: str = ""
    """That in words, and what to type where it was not."""
    is_best: bool = True
    """Whether it is the study's winner."""

    @property
    def model_type(self) -> str:
        """What transformers calls the architecture."""
        return self.model.model_type

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.model.hidden_layers

    @property
    def target_modules(self) -> tuple[str, ...] | None:
        """Names of the layers with an adapter; None for every linear layer."""
        if self.config.target_modules == "all-linear":
            return None
        return resolve_targets(self.config, self.model)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Decoder layers whose activations are recomputed, in order."""
        return tuple(sorted(self.config.checkpointed_layers(self.layers)))

    @property
    def weights(self) -> str | None:
        """Where the weights are, a directory or a hub id; None for a shipped architecture."""
        if self.model.source == "shipped":
            return None
        if self.model.source == "directory" and self.model.path is not None:
            return str(self.model.path)
        return self.model.name

    def facts(self) -> tuple[str, ...]:
        """Return what was measured, of what and on what, a sentence or two each."""
        return (
            f"{self._role}, of study {quote(self.study)}: "
            f"trial {self.number}{f', {self.certainty}' if self.certainty else ''}.",
            _numbers(self.measurement),
            emulation_note(self.target) or f"Measured on {self._device()}.",
            f"Model: {self.model.name}. Libraries: {self._libraries()}.",
        )

    @property
    def _role(self) -> str:
        if self.is_best:
            return objectives.best(self.objectives)
        return "One of the configurations that fit, not the best"

    def _device(self) -> str:
        if self.target.device == "cpu":
            return "a CPU"
        return str(self.environment.get("gpu") or self.target.gpu)

    def _libraries(self) -> str:
        versions = self.environment.get("versions") or {}
        known = [f"{name} {versions[name]}" for name in _LIBRARIES if versions.get(name)]
        return ", ".join(known) or "not recorded"


def recipe_of(snapshot: StudySnapshot, *, number: int | None = None) -> Recipe:
    """Return the recipe of a study's winner, or of the trial of that number.

    Raises:
        NothingFits: nothing that was tried was measured to fit.
        InputError: there is no trial of that number, or it was not measured to fit.
    """
    ranking = rank_study(snapshot)
    best = ranking.winner
    chosen = best if number is None else _trial(snapshot, ranking, number)
    if chosen is None:
        raise NothingFits(
            f"study {quote(snapshot.name)} has nothing to export: no trial of its space was "
            "measured to fit"
        )
    is_best = best is not None and chosen.number == best.number
    again = ranking.is_measured_again(chosen)
    return Recipe(
        study=snapshot.name,
        number=chosen.number,
        config=chosen.config,
        measurement=measured_of(chosen),
        model=ModelSpec.from_json(snapshot.definition.model),
        target=snapshot.definition.target,
        environment=snapshot.environment,
        objectives=snapshot.definition.space.objectives,
        is_confirmed=ranking.is_confirmed if is_best else again,
        certainty=status_words(ranking, study=snapshot.name)
        if is_best
        else f"{'' if again else 'not '}measured again",
        is_best=is_best,
    )


def _trial(snapshot: StudySnapshot, ranking: Ranking, number: int) -> TrialRecord:
    """Return a trial as it is ranked: what was measured again with the speed of those runs."""
    known = {record.number: record for record in ranking.records}
    tried = {record.number for record in snapshot.records}
    unreadable = {trial.number: trial.reason for trial in snapshot.unreadable}
    if number in unreadable:
        raise InputError(
            f"trial {number} of study {quote(snapshot.name)} cannot be read: {unreadable[number]}"
        )
    if number not in tried:
        raise InputError(
            f"study {quote(snapshot.name)} has no trial {number}; `sweep report` shows all of them"
        )
    record = known.get(number)
    if record is None or record.verdict is not Verdict.FITS:
        raise InputError(
            f"trial {number} of study {quote(snapshot.name)} was not measured to fit, so there is "
            "no recipe of it"
        )
    return record


def _numbers(measured: Measurement) -> str:
    reserved = measured.peak_reserved_bytes
    also = "" if reserved is None else f", {units.gib(reserved)} reserved"
    flags = f" Flags: {', '.join(measured.flags)}." if measured.flags else ""
    speed, step = units.rate(measured.tokens_per_second), units.step_time(measured.step_seconds)
    doubt = " It may be more or less: the measurement is noisy." if measured.is_noisy else ""
    return (
        f"{speed} tokens/s ({uncertainty.interval_words(measured)}) at the median step of {step}, "
        f"peak {units.gib(measured.peak_allocated_bytes)} allocated{also}, "
        f"{units.count(measured.trainable_parameters)} trainable parameters.{flags}{doubt}"
    )


def comment(paragraphs: Iterable[str]) -> str:
    """Return paragraphs as lines that begin with ``#``; nothing in them can end a line.

    A paragraph that begins with ``- `` is a list item.
    """
    return "\n".join(line for text in paragraphs for line in _commented(text))


def _commented(text: str) -> Iterator[str]:
    hanging = "  " if text.startswith("- ") else ""
    lines = textwrap.wrap(
        printable(text), _COMMENT_WIDTH, subsequent_indent=hanging, break_on_hyphens=False
    )
    for line in lines or [""]:
        yield f"# {line}".rstrip()


def printable(text: str) -> str:
    """Return text with everything that does not print, line ends included, as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
