"""What every export tells: a study's winner, what it runs on, and what was measured of it. Names
are people's own text: here they become single printable lines.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reports import units, words
from reports.sentences import status_words
from reports.words import emulation_note
from search_spaces.config import KNOBS, TrialConfig, canonical
from search_spaces.documents import home_expanded
from search_spaces.errors import InputError, NothingFits, in_percent, quote
from search_spaces.gpus import match_product
from search_spaces.linears import resolve_targets
from search_spaces.models import ModelSpec, shipped_models
from search_spaces.space import Objective
from search_spaces.texts import TextsChoice, TextsSummary
from storage.confirmations import Ratio
from storage.definition import StudySnapshot, Target
from storage.files import WRITTEN_BY
from storage.ranking import NoGain, Ranking, measured_of, rank_study
from storage.records import Measurement, TrialRecord, Verdict

_LIBRARIES = (
    *("torch", "transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel", "trl"),
    "datasets",
)
_OURS = "qlora-sweep"
_COMMENT_WIDTH = 96
_NAME_MAX = 60
_EVERY_LINEAR = "all-linear"


@dataclass(frozen=True)
class RecipeTexts:
    """The texts that a study trained on, and how it read them."""

    summary: TextsSummary
    source: str
    """Where they are: an absolute path, or a hub id."""
    eval_fraction: float
    """Share of the rows that no training saw."""
    seed: int
    """Of the choice of those."""
    tokenizer: str | None = None
    """The one that was named, a path or a hub id; None for the model's own."""

    @property
    def column(self) -> str:
        """The column with the text, where each row is one."""
        return self.summary.text_column or "text"

    def provenance(self) -> dict[str, Any]:
        """Return what they are, in plain JSON values."""
        keys = {"kind", "text_column", "fingerprint", "tokenizer", "completions_only", "rows"}
        keys |= {"broken", "tokens"}
        stated = self.summary.model_dump(mode="json", include=keys)
        held_out = {"eval_fraction": self.eval_fraction, "seed": self.seed}
        return {"source": self.source, **stated, **held_out}


@dataclass(frozen=True)
class GainOver:
    """How a trial compares with the study's baseline."""

    baseline: TrialRecord | None
    """Or its recipe in the trial's capacity class; None where that was not measured."""
    gain: Ratio | None
    reason: NoGain | None
    """Why no gain is stated; None where one is. Without a baseline it says nothing."""
    is_baseline: bool = False
    """Whether the trial is compared with itself."""

    def words(self) -> str:
        """Return that as a sentence."""
        if self.baseline is None:
            return "Baseline: none was measured beside it, so no gain is stated."
        if self.is_baseline:
            return "Baseline: this trial itself, so there is no gain to state."
        measured = measured_of(self.baseline)
        beside = (
            f"Baseline: trial {self.baseline.number}, {units.rate(measured.tokens_per_second)} "
            "tokens/s; gain "
        )
        if self.gain is None:
            return f"{beside}not stated: {words.why_no_gain(self.reason, 'it')}."
        return f"{beside}{words.gain(self.gain)}."

    def provenance(self, model: ModelSpec) -> dict[str, Any]:
        """Return that in plain JSON values."""
        base, gain = self.baseline, self.gain
        return {
            "baseline": None
            if base is None
            else {
                "trial": base.number,
                "tokens_per_second": measured_of(base).tokens_per_second,
                "config": _resolved(base.config, model),
            },
            "gain": None
            if gain is None
            else {"ratio": gain.value, "low": gain.low, "high": gain.high},
            "no_gain": "no_baseline" if base is None else self.reason,
        }


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
    date: str | None = None
    """When the trial began, UTC, ISO 8601; None where an earlier version ran it."""
    comparison: GainOver = GainOver(None, None, None)
    texts: RecipeTexts | None = None
    """None where full random rows were trained on."""

    @property
    def texts_kind(self) -> str | None:
        """What the rows of the texts are; None where full random rows were trained on."""
        return None if self.texts is None else self.texts.summary.kind

    @property
    def dtype(self) -> str:
        """Of matrix products, where none is in 8 bits; beside 8-bit ones, of all else."""
        if not self.config.is_8bit_compute:
            return self.config.compute_dtype
        target = match_product(self.target.gpu)
        return "bf16" if target is None else target.half

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
        """Names of the layers with an adapter; None for every linear layer of a model type whose
        layers' names nobody knows."""
        names = resolve_targets(self.config, self.model)
        return None if _EVERY_LINEAR in names else names

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """The configuration with every default written out, in plain JSON values."""
        return _resolved(self.config, self.model)

    @property
    def targets(self) -> str | list[str]:
        """The layers with an adapter, as PEFT takes them."""
        targets: str | list[str] = self.resolved["target_modules"]
        return targets

    def output_directory(self, format: str) -> str:
        """Return a directory for what a format's training leaves: no other export has it."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.study)[:_NAME_MAX].strip("-.")
        if plain != self.study:
            # Two names may look alike once what is no name of a file is gone.
            digest = hashlib.sha256(self.study.encode("utf-8", "surrogateescape")).hexdigest()
            plain = f"{plain or 'study'}-{digest[:8]}"
        return f"outputs/{plain}-trial{self.number}-{format}"

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
        begun = "At a time that is not recorded" if self.date is None else f"Begun {self.date}"
        known = [
            f"{name} {self._versions[name]}" for name in _LIBRARIES if self._versions.get(name)
        ]
        kinds = [
            KNOBS[k].phrase(getattr(self.config, k)) for k in ("quantization", "compute_dtype")
        ]
        role = "One of the configurations that fit, not the best"
        if self.is_best:
            role = words.best_by(self.objectives, is_confirmed=self.is_confirmed)
        return (
            f"{WRITTEN_BY}.",
            f"{role}, of study {quote(self.study)}: "
            f"trial {self.number}{f', {self.certainty}' if self.certainty else ''}.",
            _numbers(self.measurement),
            emulation_note(self.target) or f"Measured on {self._device()}.",
            f"{begun}, by {self._sweep()}, with {self._driver()}.",
            self.comparison.words(),
            f"Model: {self.model.name}, {', '.join(kinds)}. "
            f"Libraries: {', '.join(known) or 'not recorded'}.",
            self._rows(),
        )

    def provenance(self) -> dict[str, Any]:
        """Return where all of this comes from, in plain JSON values; null where nobody knows."""
        environment, versions = self.environment, self._versions
        return {
            "study": self.study,
            "trial": self.number,
            "date": self.date,
            "gpu": environment.get("gpu") or self.target.gpu,
            "target": self.target.model_dump(mode="json"),
            "driver": environment.get("driver"),
            "cuda_driver": environment.get("cuda_driver"),
            "python": environment.get("python"),
            "sweep": {"version": versions.get(_OURS), "commit": environment.get("commit")},
            "versions": {name: version for name, version in versions.items() if name != _OURS},
            "model": {"name": self.model.name, "fingerprint": self.model.fingerprint},
            "tokens_per_second": self.measurement.tokens_per_second,
            "tokens_per_second_ci95": self.measurement.speed_interval,
            "peak_allocated_bytes": self.measurement.peak_allocated_bytes,
            "confirmed": self.is_confirmed,
            **self.comparison.provenance(self.model),
            "texts": None if self.texts is None else self.texts.provenance(),
        }

    @property
    def _versions(self) -> dict[str, Any]:
        return dict(self.environment.get("versions") or {})

    def _sweep(self) -> str:
        version, commit = self._versions.get(_OURS), self.environment.get("commit")
        return f"qlora-sweep {version or 'of no known version'} (commit {commit or 'not recorded'})"

    def _driver(self) -> str:
        if self.target.device == "cpu":
            return "no GPU driver"
        return f"driver {self.environment.get('driver') or 'not recorded'}"

    def _rows(self) -> str:
        if self.texts is None:
            return f"Rows: random tokens, each row full ({self.config.seq_len} tokens)."
        summary = self.texts.summary
        loss = "completions alone carry loss" if summary.completions_only else "every token counts"
        return (
            f"Texts: {quote(self.texts.source)} ({summary.kind}, {loss}; fingerprint "
            f"{summary.fingerprint}), {in_percent(self.texts.eval_fraction)} of the rows held out."
        )

    def _device(self) -> str:
        if self.target.device == "cpu":
            return "a CPU"
        return str(self.environment.get("gpu") or self.target.gpu)


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
    gain = ranking.gain_of(chosen)
    baseline = ranking.reference_for(chosen.config) or ranking.baseline
    is_baseline = baseline is not None and baseline.number == chosen.number
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
        date=chosen.started_at,
        comparison=GainOver(baseline, gain.ratio, gain.reason, is_baseline),
        texts=_texts(snapshot),
    )


def _resolved(config: TrialConfig, model: ModelSpec) -> dict[str, Any]:
    """Return a configuration with every default and set of layers written out."""
    names = resolve_targets(config, model)
    targets = _EVERY_LINEAR if _EVERY_LINEAR in names else list(names)
    return {**canonical(config).model_dump(mode="json"), "target_modules": targets}


def _texts(snapshot: StudySnapshot) -> RecipeTexts | None:
    summary, space = snapshot.definition.texts, snapshot.definition.space
    if summary is None:
        return None
    choice = space.data or TextsChoice(texts=summary.source)
    return RecipeTexts(
        summary, choice.texts, float(choice.eval_fraction), space.seed, _found(choice.tokenizer)
    )


def _found(tokenizer: str | None) -> str | None:
    """Return a tokenizer as trainers find it: they know no names of ours."""
    if tokenizer is None or home_expanded(tokenizer).is_dir():
        return tokenizer
    paths = {spec.name: spec.tokenizer_path for spec in shipped_models()}
    return str(paths.get(tokenizer) or tokenizer)


def _trial(snapshot: StudySnapshot, ranking: Ranking, number: int) -> TrialRecord:
    """Return a trial as it is ranked: what was measured again with the speed of those runs."""
    known = {record.number: record for record in ranking.records}
    tried = {record.number for record in snapshot.records}
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
        f"{speed} tokens/s ({words.interval_words(measured)}) at the median step of {step}, "
        f"peak {units.gib(measured.peak_allocated_bytes)} allocated{also}, "
        f"{units.count(measured.trainable_parameters)} trainable parameters.{flags}{doubt}"
    )


def plain_number(value: float) -> float | int:
    """Return a whole number without its decimal point."""
    return int(value) if value == int(value) else value


def comment(paragraphs: Iterable[str]) -> str:
    """Return paragraphs as lines that begin with ``#``; nothing in them can end a line.

    A paragraph that begins with ``- `` is a list item.
    """
    wrapper = textwrap.TextWrapper(_COMMENT_WIDTH, break_on_hyphens=False)
    lines: list[str] = []
    for text in paragraphs:
        wrapper.subsequent_indent = "  " if text.startswith("- ") else ""
        lines += wrapper.wrap(printable(text)) or [""]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def printable(text: str) -> str:
    """Return text with everything that does not print, line ends included, as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
