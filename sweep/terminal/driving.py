"""Owns what the commands that drive a study do: `run` and `confirm`, from first line to last.

Apart from `commands`, as whoever only looks at a study needs nothing that drives one.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from reports import units
from reports.page import (
    write_report,
)
from reports.sentences import stopped_words
from reports.view import view_of
from reports.words import emulation_note
from search_spaces.documents import home_expanded
from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.redaction import redact
from storage.definition import StudyDefinition, StudySnapshot
from storage.reading import read_spooled_study, read_study
from storage.records import TrialRecord
from storage.study import OpenStudy
from storage.urls import parse_url
from sweep.paths import (
    STORAGE,
    report_path,
    runs_directory,
    storage_url,
)
from sweep.request import RunRequest, Where
from sweep.running.device_info import check_spelling, read_card, teams_of
from sweep.stop_signals import INTERRUPTED
from sweep.study.events import Interruption, Listener, StopReason, undisturbed
from sweep.study.session import Prepared, Watch, drive, prepare, prepare_again
from sweep.terminal.board import Board, fixed_words, search_words
from sweep.terminal.commands import DONE, NOTHING_FITS, read_for_report
from sweep.terminal.console import (
    ReaderGoneError,
    folded,
    note,
    say,
    say_json,
    width_of,
)
from sweep.terminal.dataset import prepared as read_texts
from sweep.terminal.live import watching
from sweep.terminal.places import OnCards, places
from sweep.terminal.summary import (
    has_fit,
    last_screen,
    why_invalid,
)
from sweep.terminal.working import working

_REASONS = {
    StopReason.TIME_SPENT: "The time budget is spent; the same command goes on.",
    StopReason.DOLLARS_SPENT: "The dollars of the study are spent; a higher --max-dollars goes on.",
    StopReason.EXHAUSTED: "Every configuration of the space has been tried.",
    StopReason.INTERRUPTED: "Interrupted; the same command goes on where this one stopped.",
}


def run(request: RunRequest, where: Where, *, models: Sequence[str] = (), is_dry: bool) -> int:
    """Start or resume a study, or one for each of several models; write its report; print the
    winner, or the document of `best`."""
    if is_dry:
        return _say_what_would_run(request, where, models=models)
    if len(models) > 1:
        return _run_models(request, models=models)
    prepared, reason = tune(
        request.space,
        url=_driven_url(request.storage),
        where=where,
        devices=request.devices,
        overrides=request.overrides,
        held=request.held,
        study=request.study,
        carried=request.carried,
    )
    return _conclude(prepared, reason, storage=request.storage, as_json=request.as_json)


def _say_what_would_run(request: RunRequest, where: Where, *, models: Sequence[str]) -> int:
    from sweep.terminal.many_models import study_name

    if request.devices is not None:
        check_spelling(request.devices)
    for model in models or (None,):
        one = request
        if model is not None:
            study = study_name(request.study, model) if len(models) > 1 else request.study
            changes = {"overrides": {**request.overrides, "model": model}, "study": study}
            one = request.model_copy(update=changes)
        name, space = one.named()
        about = {"space": space.name, "model": space.model, "gpu": space.gpu}
        if request.as_json:
            say_json({"study": name, "on": str(where), **about, "trials": space.trials})
            continue
        words = ", ".join(f"{key} {value}" for key, value in about.items())
        most = units.plural(space.trials, "trial")
        say(f"Would start or resume study {name} on {where}: {words}, at most {most}.")
    return DONE


def _warn(text: str) -> None:
    note(f"warning: {text}")


def _run_models(request: RunRequest, *, models: Sequence[str]) -> int:
    """Start or resume a study for each of several models, on as many GPUs as were typed."""
    from sweep.terminal import many_models

    if request.carried is not None:
        raise InputError("--from: trials are taken over by a study of one --model")
    url, chosen = _driven_url(request.storage), OnCards(request.devices)
    seams: dict[str, Any] = {"card": chosen.first, "read_texts": read_texts}
    planned = many_models.plan_studies(
        models,
        study=request.study,
        prepare=lambda model, name: chosen.given_to(
            prepare(
                request.space,
                overrides={**request.overrides, "model": model},
                held=request.held,
                study=name,
                stored=partial(_stored, url=url),
                **seams,
            )
        ),
    )
    size = max(each.prepared.cards_per_trial for each in planned)
    teams = teams_of(chosen.cards, size=size)
    devices: list[str | None] = [",".join(str(c.index) for c in team) + "," for team in teams]
    return many_models.run(planned, request=request, places=devices or [None])


def _stored(study: str, *, url: str) -> StudyDefinition | None:
    """Return the definition of the study of that name; None where there is none to be read."""
    try:
        return read_study(study, url=url, home=runs_directory()).definition
    except InputError:
        # Opening it says why, where it is there at all.
        return None


def _driven_url(typed: str | None) -> str:
    """Return the database to drive a study in, and say who may read a password that was typed."""
    url = storage_url(typed)
    # What is no database URL is refused, and nothing else is said of it.
    parse_url(url)
    if typed is not None and redact(typed) != typed:
        note(
            "note: the list of processes shows the password in --storage to every user of this "
            f"machine; {STORAGE} stands in for the option and is not shown"
        )
    return url


def carried_source(carried: str, *, of: str, url: str) -> StudySnapshot:
    """Return the study that trials are taken over from: one of the database's, or a spool's."""
    path = home_expanded(carried)
    if "/" in carried or path.suffix == ".jsonl":
        return read_spooled_study(path)
    if carried == of:
        raise InputError(
            f"--from {carried}: that is the study itself; name the new one with --study"
        )
    return read_study(carried, url=url, home=runs_directory())


def confirm(study: str, *, typed: Mapping[str, Any], storage: str | None, as_json: bool) -> int:
    """Measure a study's winner again; then end as a run does."""
    url = _driven_url(storage)
    stored = read_study(study, url=url, home=runs_directory()).definition
    if stored.target.recorded is not None:
        raise InputError(
            f"study '{study}': its trials were recorded; nothing can be measured again"
        )
    again = prepare_again(study, stored, **typed, card=read_card, read_texts=read_texts)
    prepared = OnCards(None).given_to(again)
    reason = drive(
        prepared,
        storage=url,
        watch=_watch,
        warn=_warn,
        is_anew=True,
    )
    return _conclude(prepared, reason, storage=storage, as_json=as_json)


def _conclude(prepared: Prepared, reason: StopReason, *, storage: str | None, as_json: bool) -> int:
    """Write the study's report and print what came out, also where Ctrl-C is pressed on."""
    if reason is not StopReason.INTERRUPTED:
        return _tell(prepared, reason, storage=storage, as_json=as_json)
    with undisturbed(), suppress(ReaderGoneError):
        _tell(prepared, reason, storage=storage, as_json=as_json)
    return INTERRUPTED


def _tell(prepared: Prepared, reason: StopReason, *, storage: str | None, as_json: bool) -> int:
    """Say why a study ended and what came of it; return the exit code."""
    url = storage_url(storage)
    if reason in _REASONS:
        note(_REASONS[reason])
    snapshot, report, fault = reported(prepared.name, url=url)
    if reason is not StopReason.INTERRUPTED and (expected := stopped_words(snapshot)):
        _note(expected)
    if as_json:
        say_json(view_of(snapshot).document())
    else:
        option = f" --storage {shlex.quote(redact(storage))}" if storage else ""
        width = width_of(sys.stdout)
        say(last_screen(snapshot, report=report, storage_option=option, width=width))
    if fault is not None:
        raise fault
    if reason is StopReason.INTERRUPTED:
        return INTERRUPTED
    invalid = why_invalid(snapshot)
    if invalid is not None:
        # Only the real model knows its modules, where its architecture is not known from here.
        raise InputError(
            f"space '{prepared.space.name}': no configuration that was tried is valid: "
            f"{invalid.rule}: {invalid.detail}"
        )
    return DONE if has_fit(snapshot) else NOTHING_FITS


def reported(study: str, *, url: str) -> tuple[StudySnapshot, Path | None, EnvironmentFault | None]:
    """Return a study and where its report was written, or why it was not: the results are printed
    all the same."""
    with working("writing the report"):
        snapshot, path = read_for_report(study, url=url), report_path(study)
        try:
            write_report(snapshot, path)
        except EnvironmentFault as fault:
            return snapshot, None, fault
    return snapshot, path, None


@contextmanager
def _watch(study: OpenStudy, interruption: Interruption) -> Iterator[Listener]:
    """Say what begins or goes on, then show it on stderr."""
    definition, records = study.definition, study.records()
    total = definition.space.trials
    width = width_of(sys.stderr)
    most = "at most " if definition.space.sampler == "guided" else ""
    if study.was_resumed:
        done = study.ledger.trials_spent(since=study.ledger.next_number)
        note(f"Resuming study {study.study.study_name}: {_progress(done, total)}.")
    else:
        note(f"Starting study {study.study.study_name}: {most}{units.plural(total, 'trial')}.")
    for line in (*_carried_words(records), *_opening(definition)):
        note(folded(line, width))
    known = (*records, *study.confirmations())
    board = Board(study.study.study_name, definition, known, clock=time.monotonic)
    with watching(board, is_stopping=interruption.is_requested, stream=sys.stderr) as listener:
        yield listener


def _carried_words(records: Sequence[TrialRecord]) -> Iterator[str]:
    known = [record.carried.study for record in records if record.carried is not None]
    for name in dict.fromkeys(known):
        count = units.plural(known.count(name), "trial")
        yield f"Carried over from {name}: {count}, measured there and not run again."


def _opening(definition: StudyDefinition) -> Iterator[str]:
    """Yield what holds for every trial, so that the trials' lines need not say it."""
    emulation = emulation_note(definition.target)
    if emulation is not None:
        yield emulation
    space = definition.space
    fixed, baseline = fixed_words(space), space.baseline_config()
    what = "" if space.holds(baseline) else ": a reference that the space does not hold, no answer"
    yield f"Gains are over {search_words(baseline, space=space)}{what}."
    if fixed:
        yield f"The same in every other trial, and changed over the baseline: {fixed}."


def _progress(done: int, total: int) -> str:
    """Return how many trials are done; an earlier run may have been asked for more than this."""
    verb = "is" if done == 1 else "are"
    if done > total:
        return f"{units.plural(done, 'trial')} {verb} done, {total:,} asked for"
    return f"{done:,} of {units.plural(total, 'trial')} {verb} done"


def _note(line: str) -> None:
    note(folded(line, width_of(sys.stderr)))


def tune(
    space: str,
    *,
    url: str,
    where: Where,
    devices: str | None = None,
    overrides: Mapping[str, Any],
    carried: str | None = None,
    watch: Watch = _watch,
    tell: Callable[[str], None] = _note,
    warn: Callable[[str], None] = _warn,
    **typed: Any,
) -> tuple[Prepared, StopReason]:
    """Start or resume a study; return what it is about and why it stopped.

    Args:
        space, overrides: as for `prepare`.
        url: of the database.
        where, devices: where trials run, as for `places`.
        carried: a study, or the spool of one, whose trials are taken over.
        watch: shows the study while it runs.
        tell: is told what the dataset made of the space.
        warn: is told of what works less well than it could.
        typed: what else `prepare` takes: ``held``, ``study`` and ``read_texts``.

    Raises what `prepare` and `drive` raise.
    """
    with places(where, devices=devices, space=space, overrides=overrides, warn=warn) as place:
        seams: dict[str, Any] = {"card": place.first, "narrowed": place.narrowed}
        seams |= {"read_texts": read_texts, "stored": partial(_stored, url=url), **typed}
        prepared = place.given_to(prepare(space, overrides=overrides, **seams))
        for line in prepared.notes:
            tell(line)
        reason = drive(
            prepared,
            storage=url,
            watch=watch,
            warn=warn,
            carried=None if carried is None else carried_source(carried, of=prepared.name, url=url),
            new_runner=place.new_runner,
        )
    return prepared, reason
