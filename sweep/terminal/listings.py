"""What lists things: studies, GPUs, models and presets, each as a table or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.errors import InputError, NothingFits
from qlora_sweep.search_spaces.gpus import gpu_catalogue
from qlora_sweep.search_spaces.linears import parameters
from qlora_sweep.search_spaces.loading import shipped_presets
from qlora_sweep.search_spaces.models import shipped_models
from qlora_sweep.search_spaces.prices import load_prices
from qlora_sweep.storage.definition import StudySnapshot, UnreadableStudy
from qlora_sweep.storage.reading import list_studies, read_study
from qlora_sweep.sweep.paths import own_price_file, runs_directory, storage_url
from qlora_sweep.sweep.terminal.console import note, say_result, width_of
from qlora_sweep.sweep.terminal.drawing import table
from qlora_sweep.sweep.terminal.summary import best_text, status_text, studies_text

Rows = Sequence[Sequence[str]]


def warn(text: str) -> None:
    """Print a warning on stderr."""
    note(f"warning: {text}")


def read(study: str, *, url: str, warn: Callable[[str], None] = warn) -> StudySnapshot:
    """Return a study, with its speeds on the target GPU and that GPU's cheapest offer."""
    snapshot = read_study(study, url=url, home=runs_directory())
    for words in snapshot.left_out:
        warn(words)
    return with_offer(_on_target(snapshot), warn=warn)


def with_offer(snapshot: StudySnapshot, *, warn: Callable[[str], None] = warn) -> StudySnapshot:
    """Return a study with its GPU's cheapest offer, where a price is known."""
    try:
        offers = load_prices(own_price_file()).get(snapshot.definition.target.gpu)
    except InputError as error:
        # What was measured is worth showing without its price.
        warn(f"no cost is shown: {error}")
        return snapshot
    if not offers:
        return snapshot
    return replace(snapshot, offer=offers[0])


def _on_target(snapshot: StudySnapshot) -> StudySnapshot:
    if snapshot.definition.target.emulated_on is None:
        return snapshot
    # Predicting takes longer to import than everything else that a listing needs.
    from qlora_sweep.sweep.planning.evidence import with_target_speeds

    return with_target_speeds(snapshot)


def best(study: str, *, storage: str | None, as_json: bool) -> int:
    """Print the winner of a study."""
    snapshot = read(study, url=storage_url(storage))
    view = view_of(snapshot)
    text = best_text(snapshot, width=width_of(sys.stdout))
    say_result(view.document(), text, as_json=as_json)
    return 0 if view.winner else NothingFits.exit_code


def status(study: str | None, *, storage: str | None, as_json: bool, watch: bool) -> None:
    """Print what ran, what is running and the best so far, of one study or of all."""
    url = storage_url(storage)
    width = width_of(sys.stdout)
    if study is None:
        if watch:
            raise InputError("--watch follows one study: name it")
        studies: list[StudySnapshot | UnreadableStudy] = []
        for listed in list_studies(url, runs_directory()):
            if not isinstance(listed, UnreadableStudy):
                listed = _on_target(listed)
            studies.append(listed)
        document = {"studies": list(map(_study_line, studies))}
        say_result(document, studies_text(studies, width=width), as_json=as_json)
        return
    if watch:
        from qlora_sweep.sweep.terminal.live import follow

        # Ctrl-C ends the following, not the study.
        with suppress(KeyboardInterrupt):
            follow(lambda: read(study, url=url), stream=sys.stderr)
    snapshot = read(study, url=url)
    say_result(status_document(snapshot), status_text(snapshot, width=width), as_json=as_json)


def _study_line(study: StudySnapshot | UnreadableStudy) -> dict[str, Any]:
    """Return one study of ``sweep status --json``.

    ``{"study", "gpu", "model", "trials", "objectives", "best": {"number", "tokens_per_second",
    "peak_allocated_bytes", "target_tokens_per_second": {"value", "low", "high", "basis"} | null} |
    null, "is_confirmed", "seconds": {"wall"}, "driven_by", "driven_since", "running": [numbers],
    "unreadable", "unreadable_trials"}``

    ``driven_by`` is ``host:pid``, ``driven_since`` when that began, by its own clock in UTC; both
    null where no process does. ``unreadable`` is null, or why the study cannot be read: then all
    else is null but for the number of its trials, none of which is known.
    """
    if isinstance(study, UnreadableStudy):
        unknown = ("gpu", "model", "objectives", "best", "is_confirmed", "seconds", "running")
        return {
            **dict.fromkeys(unknown + ("driven_by", "driven_since")),
            "study": study.name,
            "trials": study.trials,
            "unreadable_trials": study.trials,
            "unreadable": study.reason,
        }
    view = view_of(study)
    best = None
    if view.best is not None:
        measurement = view.best.measurement
        speed = view.target_tokens_per_second
        best = {
            "number": view.best.number,
            "tokens_per_second": measurement["tokens_per_second"],
            "peak_allocated_bytes": measurement["peak_allocated_bytes"],
            "target_tokens_per_second": None if speed is None else speed.model_dump(),
        }
    return {
        "study": study.name,
        "gpu": view.gpu.name,
        "model": view.model,
        "trials": len(study.records),
        "objectives": list(view.objectives),
        "best": best,
        "is_confirmed": view.confirmed,
        "seconds": {"wall": study.wall_seconds},
        "driven_by": study.holder,
        "driven_since": study.driven_since,
        "running": [trial.number for trial in study.running],
        "unreadable": None,
        "unreadable_trials": 0,
    }


def status_document(snapshot: StudySnapshot) -> dict[str, Any]:
    """Return the document of ``sweep status STUDY --json``.

    That of ``sweep best --json``, and beside it ``{"driven_by", "driven_since", "running":
    [{"number", "config", "started_at", "purpose"}], "ended": {"reason", "open", "most_promising"} |
    null, "warnings", "unreadable"}``, the last always empty: a study is read whole or not at all.
    What is most promising has a ``chance`` to be better, a ``gain`` that is expected over all
    cases, and its ``gain_if_better``.
    """
    running = [
        {
            "number": trial.number,
            "config": trial.config.model_dump(mode="json"),
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
        "unreadable": [],
    }


def _list(document: Mapping[str, Any], header: Sequence[str], rows: Rows, *, as_json: bool) -> None:
    say_result(document, table(header, rows, width=width_of(sys.stdout)), as_json=as_json)


def presets(*, as_json: bool) -> None:
    """Print the shipped search spaces."""
    documents: list[dict[str, Any]] = []
    rows: list[Sequence[str]] = []
    same = {"name", "description", "gpu", "model", "fixed"}
    for space in shipped_presets():
        size = space.size()
        document = space.model_dump(mode="json", include=same)
        documents.append({**document, "configurations": size, "searched": list(space.dimensions)})
        rows.append((space.name, space.gpu, space.model, units.count(size), space.description))
    header = ("preset", "gpu", "model", "configurations", "what")
    _list({"presets": documents}, header, rows, as_json=as_json)


def gpus(*, as_json: bool) -> None:
    """Print the GPUs of the catalogue, and which of them is here; rates are by compute dtype."""
    from qlora_sweep.sweep.predict.speed.predictor import within
    from qlora_sweep.sweep.running.device_info import read_gpu

    gpu = read_gpu()
    here = None if gpu is None else gpu.product
    documents: list[dict[str, Any]] = []
    rows: list[Sequence[str]] = []
    for spec in gpu_catalogue().values():
        most = within(1.0, spec.speed.device).high
        documents.append(
            {
                **spec.model_dump(mode="json", exclude={"matrix_flops"}),
                "budget_bytes": spec.budget_bytes,
                "measured_flops": dict(spec.matrix_flops),
                "speed_uncertainty": most - 1.0,
            }
        )
        measured = "-"
        if spec.matrix_flops:
            measured = f"{spec.matrix_flops[spec.half] / 1e12:,.0f}"
        rows.append(
            (
                spec.name,
                spec.product,
                units.gib(spec.memory_bytes),
                units.gib(spec.budget_bytes),
                f"{spec.bandwidth_bytes_per_second / 1e9:,.0f} GB/s",
                f"{spec.peak_flops[spec.half] / 1e12:,.0f}",
                measured,
                f"{most:.2f}x",
            )
        )
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
    _list({"gpus": documents, "here": here}, header, rows, as_json=as_json)
    if not as_json:
        note("No NVIDIA GPU here." if here is None else f"Here: {here}.")


def models(*, as_json: bool) -> None:
    """Print the shipped architectures; what is not known of one is null."""
    documents: list[dict[str, Any]] = []
    rows: list[Sequence[str]] = []
    for model in shipped_models():
        count = parameters(model)
        sizes = (model.hidden_layers, model.hidden_size, model.vocab_size, model.max_positions)
        layers, width, vocabulary, positions = sizes
        documents.append(
            {
                "name": model.name,
                "parameters": count,
                "layers": layers,
                "width": width,
                "vocabulary": vocabulary,
                "positions": positions,
            }
        )
        millions = f"{(count or 0) / 1e6:,.0f} M"
        rows.append((model.name, millions) + tuple(map(units.count, sizes)))
    header = ("model", "parameters", "layers", "width", "vocabulary", "positions")
    _list({"models": documents}, header, rows, as_json=as_json)
    if not as_json:
        note("A directory with a config.json or a hub id (org/name) is a model as well.")
