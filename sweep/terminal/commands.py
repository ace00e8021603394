"""Owns what each command does once its options are read: call, print, and say how it ended.

Knows nothing of how options are spelled or how errors become exit codes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from reports import images, units
from reports.cards import card_of_study, cards_of_plan
from reports.comparison import Comparison, compare_cards
from reports.decision import Job
from reports.page import (
    render,
    render_comparison,
    write_page,
)
from search_spaces.documents import parse_object, read_text
from search_spaces.errors import InputError, listed, quote
from search_spaces.models import ModelSpec
from storage.definition import StudySnapshot
from storage.names import is_file_name
from storage.outputs import checked_output, write_output
from storage.reading import count_trials
from sweep.export import formats
from sweep.paths import (
    cache_directory,
    comparison_path,
    report_path,
    runs_directory,
    storage_url,
)
from sweep.planning.evidence import with_memory_forecasts
from sweep.study.recorded import recorded_study
from sweep.terminal.console import (
    STDOUT,
    confirmed,
    folded,
    note,
    say,
    say_as_is,
    width_of,
    working,
)
from sweep.terminal.doctor import check, examine, findings_text, is_healthy
from sweep.terminal.listings import read, warn_of_unreadable, with_offer

DONE, NOTHING_FITS, ENVIRONMENT = 0, 1, 3
_NOTES_WIDTH = 80
"""Columns of an export's notes off a terminal: each is a sentence or two, to be read."""


def read_for_report(study: str, *, url: str) -> StudySnapshot:
    """Return a study, or a surface, with its prices, its speeds, and what is known of memory
    without tracing."""
    is_surface = study.endswith(".jsonl")
    snapshot = with_offer(recorded_study(study)) if is_surface else read(study, url=url)
    return with_memory_forecasts(snapshot, cache_dir=cache_directory() / "memory")


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
    # Removing needs Optuna, whose import nobody else here waits for.
    from storage.removal import remove_study
    from sweep.launching.job_files import remove_jobs

    home = runs_directory()
    removed = remove_study(study, url=url, home=home)
    # Where the directory is another study's, nothing of it was removed.
    jobs = remove_jobs(home / study) if removed.files else ()
    say(f"Removed study {study}: {trials}")
    for path in (*removed.files, *jobs):
        say(f"Removed {path}")
    for path in removed.left:
        if path.exists() or path.is_symlink():
            say(f"Left {path}, which is not sweep's")
    return DONE


def report(
    studies: Sequence[str],
    *,
    plans: Sequence[str],
    job: Job,
    figure: str | None,
    storage: str | None,
    output: str | None,
    is_forced: bool,
) -> int:
    """Print the report of a study, or of several GPUs, or write it and print where it is."""
    endings = (".html", ".htm", *images.SUFFIXES)
    path = checked_output(output, what="a report", endings=endings, is_forced=is_forced)
    if not studies and len(plans) < 2:
        raise InputError("name a study for its report, or several studies or plans to compare")
    is_picture = path is not None and path.suffix.lower() in images.SUFFIXES
    name = "".join(studies[:1])
    name = Path(name).stem if name.endswith(".jsonl") else name
    if output is None and studies and not is_file_name(name):
        raise InputError(f"study {quote(name)}: no file has such a name: add -o FILE")
    snapshots = [read_for_report(study, url=storage_url(storage)) for study in studies]
    if figure is not None and not is_picture:
        raise InputError("--figure needs -o with a name that ends in .png or .svg")
    if len(studies) == 1 and not plans:
        if path is not None and is_picture:
            images.write_image(snapshots[0], path, figure=figure)
            say(str(path))
            return DONE
        page = render(job.priced(snapshots[0]))
        return _put(page, output, unless=report_path(name))
    if is_picture:
        raise InputError("a picture is of one study: several have a page alone")
    page = render_comparison(compared(snapshots, plans, job=job))
    return _put(page, output, unless=comparison_path([name, *studies[1:]]))


def _put(page: str, output: str | None, *, unless: Path) -> int:
    """Print a page, or write it and print where it is: where nothing was typed, ``unless``."""
    if output is None:
        write_page(page, unless)
    elif output == STDOUT:
        say_as_is(page)
        return DONE
    else:
        write_output(Path(output), page.encode("utf-8", errors="replace"))
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
    study: str,
    *,
    format: str,
    trial: int | None,
    storage: str | None,
    output: str | None,
    is_forced: bool,
) -> int:
    """Print a study's winner or a trial of it as a recipe, or write it and print where it is."""
    endings = formats.endings_of(format)
    path = checked_output(output, what=f"format {format}", endings=endings, is_forced=is_forced)
    snapshot = read(study, url=storage_url(storage))
    warn_of_unreadable(snapshot)
    export = formats.exported(snapshot, format=format, number=trial)
    lost = list(export.lost)
    if path is None and export.beside:
        lost.append(f"it needs {listed(export.beside)} beside it, which -o FILE writes too.")
    for sentence in lost:
        note(folded(f"{format}: {sentence}", width_of(sys.stderr) or _NOTES_WIDTH, indent=2))
    if path is None:
        say_as_is(export.text.removesuffix("\n"))
        return DONE
    beside = {path.with_name(name): text for name, text in export.beside.items()}
    if path in beside:
        raise InputError(f"--output: {path.name} is what this file imports: name it otherwise")
    for other in beside:
        checked_output(str(other), what=other.name, endings=endings, is_forced=is_forced)
    for each, text in {path: export.text, **beside}.items():
        write_output(each, text.encode("utf-8"))
        say(str(each))
    return DONE


def doctor() -> int:
    """Print a check-up of this machine."""
    with working("checking this machine"):
        findings = check(examine())
    say(findings_text(findings, width=width_of(sys.stdout)))
    return DONE if is_healthy(findings) else ENVIRONMENT
