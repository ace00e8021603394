"""Owns what lists things: studies, GPUs, models and presets, each as a table or as JSON.

Knows nothing of how options are spelled or how errors become exit codes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from reports import units
from reports.view import view_of
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, gpu_catalogue
from search_spaces.linears import parameters
from search_spaces.loading import shipped_presets
from search_spaces.models import ModelSpec, shipped_models
from search_spaces.prices import load_prices
from search_spaces.space import SearchSpace
from storage.definition import StudySnapshot, StudySummary, TargetSpeed, UnreadableStudy
from storage.reading import list_studies, read_study, unreadable_in_words
from sweep.paths import own_price_file, runs_directory, storage_url
from sweep.terminal.console import note, say, say_json, table, width_of
from sweep.terminal.summary import best_text, has_fit, status_text, studies_text

DONE, NOTHING_FITS = 0, 1


def warn(text: str) -> None:
    """Print a warning on stderr."""
    note(f"warning: {text}")


def read(study: str, *, url: str, warn: Callable[[str], None] = warn) -> StudySnapshot:
    """Return a study, with its speeds on the target GPU and that GPU's cheapest offer."""
    return with_offer(_on_target(read_study(study, url=url, home=runs_directory())), warn=warn)


def with_offer(snapshot: StudySnapshot, *, warn: Callable[[str], None] = warn) -> StudySnapshot:
    """Return a study with its GPU's cheapest offer, where a price is known."""
    try:
        offers = load_prices(own_price_file()).get(snapshot.definition.target.gpu)
    except InputError as error:
        # What was measured is worth showing without its price.
        warn(f"no cost is shown: {error}")
        return snapshot
    return replace(snapshot, offer=offers[0]) if offers else snapshot


def _on_target(snapshot: StudySnapshot) -> StudySnapshot:
    """Return a study with its speeds on the target GPU."""
    if snapshot.definition.target.emulated_on is None:
        return snapshot
    # Predicting takes longer to import than everything else that a listing needs.
    from sweep.planning.evidence import with_target_speeds

    return with_target_speeds(snapshot)


def best(study: str, *, storage: str | None, as_json: bool) -> int:
    """Print the winner of a study."""
    snapshot = read(study, url=storage_url(storage))
    if as_json:
        warn_of_unreadable(snapshot)
        say_json(view_of(snapshot).document())
    else:
        say(best_text(snapshot, width=width_of(sys.stdout)))
    return DONE if has_fit(snapshot) else NOTHING_FITS


def warn_of_unreadable(snapshot: StudySnapshot) -> None:
    """Say of which trials nothing is known, where a result does not say it itself."""
    for words in unreadable_in_words(snapshot.unreadable):
        warn(words)


def status(study: str | None, *, storage: str | None, as_json: bool, watch: bool) -> int:
    """Print what ran, what is running and the best so far, of one study or of all."""
    url = storage_url(storage)
    if study is None:
        if watch:
            raise InputError("--watch follows one study: name it")
        summaries = list_studies(url, runs_directory(), completed=_on_target)
        if as_json:
            return _as_json({"studies": [_study_line(summary) for summary in summaries]})
        say(studies_text(summaries, width=width_of(sys.stdout)))
        return DONE
    if watch:
        from sweep.terminal.live import follow

        # Who has seen enough is told how it stands: the study goes on without them.
        with suppress(KeyboardInterrupt):
            follow(lambda: read(study, url=url), stream=sys.stderr)
    snapshot = read(study, url=url)
    if as_json:
        return _as_json(status_document(snapshot))
    say(status_text(snapshot, width=width_of(sys.stdout)))
    return DONE


def _as_json(document: Mapping[str, Any]) -> int:
    say_json(document)
    return DONE


def _study_line(study: StudySummary | UnreadableStudy) -> dict[str, Any]:
    """Return one study of ``sweep status --json``.

    ``{"study", "gpu", "model", "trials", "objectives", "best": {"number", "tokens_per_second",
    "peak_allocated_bytes", "target_tokens_per_second": {"value", "low", "high", "basis"} | null} |
    null, "is_confirmed", "seconds": {"wall"}, "driven_by", "driven_since", "running": [numbers],
    "unreadable", "unreadable_trials"}``

    ``driven_by`` is ``host:pid``, ``driven_since`` when that began, by its own clock in UTC; both
    null where nobody does. ``unreadable`` is null, or why nothing can be said of the study: then
    all else is null but for the number of its trials, none of which is known.
    """
    if isinstance(study, UnreadableStudy):
        nothing = ("gpu", "model", "objectives", "best", "is_confirmed", "seconds")
        counts = {"trials": study.trials, "unreadable_trials": study.trials}
        unknown = dict.fromkeys((*nothing, "driven_by", "driven_since", "running"))
        return {"study": study.name, **unknown, **counts, "unreadable": study.reason}
    measured = study.best
    return {
        "study": study.name,
        "gpu": study.gpu,
        "model": study.model,
        "trials": study.trials,
        "objectives": list(study.objectives),
        "best": None
        if measured is None
        else {
            "number": study.best_number,
            "tokens_per_second": measured.tokens_per_second,
            "peak_allocated_bytes": measured.peak_allocated_bytes,
            "target_tokens_per_second": _target_speed(study.speed),
        },
        "is_confirmed": study.is_confirmed,
        "seconds": {"wall": study.wall_seconds},
        "driven_by": study.holder,
        "driven_since": study.driven_since,
        "running": list(study.running),
        "unreadable": None,
        "unreadable_trials": study.unreadable,
    }


def _target_speed(speed: TargetSpeed | None) -> dict[str, Any] | None:
    if speed is None:
        return None
    ends = {"low": speed.low, "high": speed.high}
    return {"value": speed.tokens_per_second, **ends, "basis": speed.basis}


def status_document(snapshot: StudySnapshot) -> dict[str, Any]:
    """Return the document of ``sweep status STUDY --json``.

    That of ``sweep best --json``, and beside it ``{"driven_by", "driven_since", "running":
    [{"number", "config", "started_at", "purpose"}], "ended": {"reason", "open", "most_promising"} |
    null, "warnings", "unreadable": [{"number", "reason"}]}``. What is most promising has a
    ``chance`` to be better, a ``gain`` that is expected over all cases, and its
    ``gain_if_better``.
    """
    running = [
        {
            "number": trial.number,
            "config": None if trial.config is None else trial.config.model_dump(mode="json"),
            "started_at": trial.started_at,
            "purpose": trial.purpose,
        }
        for trial in snapshot.running
    ]
    return {
        **view_of(snapshot).document(),
        "driven_by": snapshot.holder,
        "driven_since": snapshot.driven_since,
        "running": running,
        "ended": snapshot.ended,
        "warnings": list(snapshot.warnings),
        "unreadable": [{"number": t.number, "reason": t.reason} for t in snapshot.unreadable],
    }


def presets(*, as_json: bool) -> int:
    """Print the shipped search spaces."""
    known = shipped_presets()
    if as_json:
        return _as_json({"presets": [_preset_document(space) for space in known]})
    rows = [(p.name, p.gpu, p.model, units.count(p.size()), p.description) for p in known]
    _say_table(("preset", "gpu", "model", "configurations", "what"), rows)
    return DONE


def _preset_document(space: SearchSpace) -> dict[str, Any]:
    """Return one preset of ``sweep presets --json``.

    ``{"name", "description", "gpu", "model", "configurations", "searched": [keys], "fixed"}``
    """
    return {
        "name": space.name,
        "description": space.description,
        "gpu": space.gpu,
        "model": space.model,
        "configurations": space.size(),
        "searched": list(space.dimensions),
        "fixed": space.model_dump(mode="json")["fixed"],
    }


def gpus(*, as_json: bool) -> int:
    """Print the GPUs of the catalogue, and which of them is here."""
    from sweep.running.device_info import read_card

    card = read_card()
    here = None if card is None else card.product
    if as_json:
        known = [_gpu_document(spec) for spec in gpu_catalogue().values()]
        return _as_json({"gpus": known, "here": here})
    header = (
        "gpu",
        "product",
        "memory",
        "for a training",
        "bandwidth",
        "peak TFLOP/s",
        "measured",
        "speed within",
    )
    _say_table(header, [_gpu_row(spec) for spec in gpu_catalogue().values()])
    note("No NVIDIA GPU here." if here is None else f"Here: {here}.")
    return DONE


def _gpu_row(spec: GpuSpec) -> tuple[str, ...]:
    return (
        spec.name,
        spec.product,
        units.gib(spec.memory_bytes),
        units.gib(spec.budget_bytes),
        f"{spec.bandwidth_bytes_per_second / 1e9:,.0f} GB/s",
        f"{spec.peak_flops[spec.half] / 1e12:,.0f}",
        f"{spec.matrix_flops[spec.half] / 1e12:,.0f}" if spec.matrix_flops else "-",
        units.percent(spec.device_uncertainty),
    )


def _gpu_document(spec: GpuSpec) -> dict[str, Any]:
    """Return one GPU of ``sweep gpus --json``; rates by compute dtype.

    ``{"name", "product", "memory_bytes", "budget_bytes", "bandwidth_bytes_per_second",
    "peak_flops": {...}, "measured_flops": {...}, "speed_uncertainty"}``
    """
    return {
        "name": spec.name,
        "product": spec.product,
        "memory_bytes": spec.memory_bytes,
        "budget_bytes": spec.budget_bytes,
        "bandwidth_bytes_per_second": spec.bandwidth_bytes_per_second,
        "peak_flops": dict(spec.peak_flops),
        "measured_flops": dict(spec.matrix_flops),
        "speed_uncertainty": spec.device_uncertainty,
    }


def models(*, as_json: bool) -> int:
    """Print the shipped architectures."""
    known = shipped_models()
    if as_json:
        return _as_json({"models": [_model_document(model) for model in known]})
    rows = [
        (
            model.name,
            f"{(parameters(model) or 0) / 1e6:,.0f} M",
            units.count(model.hidden_layers),
            units.count(model.hidden_size),
            units.count(model.vocab_size),
            units.count(model.max_positions or 0),
        )
        for model in known
    ]
    _say_table(("model", "parameters", "layers", "width", "vocabulary", "positions"), rows)
    note("A directory with a config.json or a hub id (org/name) is a model as well.")
    return DONE


def _model_document(model: ModelSpec) -> dict[str, Any]:
    """Return one architecture of ``sweep models --json``.

    ``{"name", "parameters", "layers", "width", "vocabulary", "positions"}``, null where unknown
    """
    return {
        "name": model.name,
        "parameters": parameters(model),
        "layers": model.hidden_layers,
        "width": model.hidden_size,
        "vocabulary": model.vocab_size,
        "positions": model.max_positions,
    }


def _say_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    say(table(header, rows, width=width_of(sys.stdout)))
