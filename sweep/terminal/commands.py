"""Owns what each command does once its options are read: call, print, and say how it ended.

Knows nothing of how options are spelled or how errors become exit codes.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

from reports import images, units
from reports.cards import card_of_study, cards_of_plan
from reports.comparison import Comparison, compare_cards
from reports.decision import Job
from reports.page import (
    render,
    render_comparison,
    write_chosen_page,
    write_page,
    write_report,
)
from reports.summary import emulation_note
from search_spaces.documents import home_expanded, parse_object, read_text
from search_spaces.errors import EnvironmentFault, InputError, quote
from search_spaces.models import ModelSpec
from search_spaces.redaction import redact
from storage.best import best_document
from storage.definition import StudyDefinition, StudySnapshot
from storage.reading import count_trials, is_file_name, read_study
from storage.records import TrialRecord
from storage.removal import remove_study
from storage.spooled_study import read_spooled_study
from storage.study import OpenStudy
from storage.urls import parse_url
from sweep.export import formats
from sweep.paths import (
    STORAGE,
    cache_directory,
    comparison_path,
    report_path,
    runs_directory,
    storage_url,
)
from sweep.planning.kept_memory import with_memory_forecasts
from sweep.running.device_info import read_card
from sweep.stop_signals import INTERRUPTED
from sweep.study.events import Listener, StopReason
from sweep.study.interruption import Interruption, undisturbed
from sweep.study.session import Prepared, drive, prepare, prepare_again
from sweep.study.tuner import confirm_anew
from sweep.terminal.board import Board, fixed_words, search_words
from sweep.terminal.console import (
    STDOUT,
    announce_if_slow,
    confirmed,
    folded,
    note,
    say,
    say_as_is,
    say_json,
    width_of,
)
from sweep.terminal.doctor import check, examine, findings_text, is_healthy
from sweep.terminal.listings import read, warn_of_unreadable
from sweep.terminal.live import watching
from sweep.terminal.summary import (
    has_fit,
    last_screen,
    not_ruled_out,
    why_invalid,
)
from sweep.terminal.working import working

DONE, NOTHING_FITS, ENVIRONMENT = 0, 1, 3
_REASONS = {
    StopReason.TIME_SPENT: "The time budget is spent; the same command goes on.",
    StopReason.DOLLARS_SPENT: "The dollars of the study are spent.",
    StopReason.EXHAUSTED: "Every configuration of the space has been tried.",
    StopReason.GAIN_SPENT: "No further trial is expected to gain enough to be worth it.",
    StopReason.INTERRUPTED: "Interrupted; the same command goes on where this one stopped.",
}


def run(
    space: str,
    *,
    overrides: Mapping[str, Any],
    held: Mapping[str, Any],
    study: str | None,
    storage: str | None,
    carried: str | None,
    as_json: bool,
) -> int:
    """Start or resume a study; write its report; print the winner, or the document of `best`."""
    prepared = prepare(space, overrides=overrides, held=held, study=study, card=read_card)
    url = _driven_url(storage)
    reason = drive(
        prepared,
        storage=url,
        watch=_watch,
        warn=lambda text: note(f"warning: {text}"),
        carried=None if carried is None else _source(carried, of=prepared.name, url=url),
    )
    return _conclude(prepared, reason, storage=storage, as_json=as_json)


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


def _source(carried: str, *, of: str, url: str) -> StudySnapshot:
    """Return the study that trials are taken over from: one of the database's, or a spool's."""
    path = home_expanded(carried)
    if "/" in carried or path.suffix == ".jsonl":
        return read_spooled_study(path, url=url)
    if carried == of:
        raise InputError(
            f"--from {carried}: that is the study itself; name the new one with --study"
        )
    return read_study(carried, url=url, home=runs_directory())


def confirm(study: str, *, typed: Mapping[str, Any], storage: str | None, as_json: bool) -> int:
    """Measure a study's winner again; then end as a run does."""
    url = _driven_url(storage)
    stored = read_study(study, url=url, home=runs_directory()).definition
    prepared = prepare_again(study, stored, confirm=typed, card=read_card)
    reason = drive(
        prepared,
        storage=url,
        watch=_watch,
        warn=lambda text: note(f"warning: {text}"),
        work=confirm_anew,
    )
    return _conclude(prepared, reason, storage=storage, as_json=as_json)


def _conclude(prepared: Prepared, reason: StopReason, *, storage: str | None, as_json: bool) -> int:
    """Write the study's report and print what came out, also where Ctrl-C is pressed on."""
    with undisturbed() if reason is StopReason.INTERRUPTED else nullcontext():
        return _tell(prepared, reason, storage=storage, as_json=as_json)


def _tell(prepared: Prepared, reason: StopReason, *, storage: str | None, as_json: bool) -> int:
    """Say why a study ended and what came of it; return the exit code."""
    url = storage_url(storage)
    if reason in _REASONS:
        note(_REASONS[reason])
    snapshot = _read_for_report(prepared.name, url=url)
    if reason is not StopReason.INTERRUPTED and (left := not_ruled_out(snapshot)) is not None:
        note(folded(left, width_of(sys.stderr)))
    announce_if_slow("Writing the report ...")
    report, fault = _write_report(snapshot, report_path(prepared.name))
    if as_json:
        say_json(best_document(snapshot))
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


def _read_for_report(study: str, *, url: str) -> StudySnapshot:
    """Return a study with its prices, its speeds, and what is known of memory without tracing."""
    return with_memory_forecasts(read(study, url=url), cache_dir=cache_directory() / "memory")


def _write_report(
    snapshot: StudySnapshot, path: Path
) -> tuple[Path | None, EnvironmentFault | None]:
    """Write the report; a fault is handed back, so that the results are printed all the same."""
    try:
        write_report(snapshot, path)
    except EnvironmentFault as fault:
        return None, fault
    return path, None


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
    board = Board(
        name=study.study.study_name,
        definition=definition,
        records=list(records),
        confirmations=list(study.confirmations()),
        clock=time.monotonic,
    )
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
    fixed = fixed_words(definition.space)
    baseline = definition.space.baseline_config()
    yield f"Gains are over {search_words(baseline, space=definition.space)}."
    if fixed:
        yield f"The same in every other trial, and changed over the baseline: {fixed}."


def _progress(done: int, total: int) -> str:
    """Return how many trials are done; an earlier run may have been asked for more than this."""
    verb = "is" if done == 1 else "are"
    if done > total:
        return f"{units.plural(done, 'trial')} {verb} done, {total:,} asked for"
    return f"{done:,} of {units.plural(total, 'trial')} {verb} done"


def remove(study: str, *, storage: str | None, is_sure: bool) -> int:
    """Remove a study and its files, and print what is gone; a person is asked first."""
    url = storage_url(storage)
    trials = units.plural(count_trials(study, url=url), "trial")
    if not is_sure:
        if not sys.stdin.isatty():
            raise InputError(f"rm {study}: nobody is here to be asked: say --yes")
        if not confirmed(f"Remove study '{study}' with {trials} and its files?"):
            note("Nothing was removed.")
            return DONE
    removed = remove_study(study, url=url, home=runs_directory())
    say(f"Removed study {study}: {trials}")
    for path in removed.files:
        say(f"Removed {path}")
    for path in removed.left:
        say(f"Left {path}, which is not sweep's")
    return DONE


def report(
    studies: Sequence[str],
    *,
    plans: Sequence[str],
    job: Job,
    figure: str | None,
    storage: str | None,
    output: Path | None,
) -> int:
    """Print the report of a study, or of several cards, or write it and print where it is."""
    if not studies and len(plans) < 2:
        raise InputError("name a study for its report, or several studies or plans to compare")
    is_picture = output is not None and images.is_picture(output)
    if output is None and studies and not is_file_name(studies[0]):
        raise InputError(f"study {quote(studies[0])}: no file has such a name: add -o FILE")
    snapshots = [_read_for_report(study, url=storage_url(storage)) for study in studies]
    if figure is not None and not is_picture:
        raise InputError("--figure needs -o with a name that ends in .png or .svg")
    if len(studies) == 1 and not plans:
        if output is not None and is_picture:
            return _draw(snapshots[0], output, figure=figure)
        page = render(job.priced(snapshots[0]))
        return _put(page, output, unless=report_path(studies[0]))
    if is_picture:
        raise InputError("a picture is of one study: several have a page alone")
    page = render_comparison(compared(snapshots, plans, job=job))
    return _put(page, output, unless=comparison_path(studies))


def _draw(snapshot: StudySnapshot, path: Path, *, figure: str | None) -> int:
    """Write one figure of a study's report as a picture, and print where it is."""
    images.write_image(snapshot, path, figure=figure)
    say(str(path))
    return DONE


def _put(page: str, output: Path | None, *, unless: Path) -> int:
    """Print a page, or write it and print where it is: where nothing was typed, ``unless``."""
    if output is None:
        write_page(page, unless)
    elif str(output) == STDOUT:
        say_as_is(page)
        return DONE
    else:
        write_chosen_page(page, output)
    say(str(output or unless))
    return DONE


def compared(snapshots: Sequence[StudySnapshot], plans: Sequence[str], *, job: Job) -> Comparison:
    """Return studies and plans beside each other.

    Args:
        snapshots: the studies.
        plans: files with what `sweep plan --json` printed.
        job: the training that is to be priced.

    Raises:
        InputError: a file is no plan, or there is nothing to compare.
    """
    models = [
        (snapshot.definition.model_fingerprint, ModelSpec.from_json(snapshot.definition.model))
        for snapshot in snapshots
    ]
    cards = [card_of_study(snapshot) for snapshot in snapshots]
    for file in plans:
        document = parse_object(read_text(Path(file), label=file), where=file)
        cards += cards_of_plan(document, where=file, models=models)
    return compare_cards(cards, job=job)


def export(
    study: str, *, format: str, trial: int | None, storage: str | None, output: Path | None
) -> int:
    """Print a study's winner or a trial of it as a recipe, or write it and print where it is."""
    snapshot = read(study, url=storage_url(storage))
    warn_of_unreadable(snapshot)
    text = formats.export(snapshot, format=format, number=trial)
    if output is None or str(output) == STDOUT:
        say_as_is(text.removesuffix("\n"))
    else:
        formats.save(text, output)
        say(str(output))
    return DONE


def version() -> int:
    """Print the version of this program."""
    try:
        say(f"sweep {metadata.version('qlora-sweep')}")
    except metadata.PackageNotFoundError:
        say("sweep, run from a directory in which it is not installed")
    return DONE


def doctor() -> int:
    """Print a check-up of this machine."""
    with working("checking this machine"):
        findings = check(examine())
    say(findings_text(findings, width=width_of(sys.stdout)))
    return DONE if is_healthy(findings) else ENVIRONMENT
