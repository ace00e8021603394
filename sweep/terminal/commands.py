"""`sweep report`, `export`, `rm` and `doctor` once their options are read."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qlora_sweep.reports import format as units
from qlora_sweep.reports import images
from qlora_sweep.reports.comparison import compare, of_study
from qlora_sweep.reports.page import render, render_comparison, write_page
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, quote
from qlora_sweep.storage.definition import StudySnapshot, is_file_name
from qlora_sweep.storage.files import checked_output, write_output
from qlora_sweep.storage.reading import count_trials
from qlora_sweep.sweep import paths
from qlora_sweep.sweep.planning.evidence import with_memory_forecasts
from qlora_sweep.sweep.study.recorded import recorded_study
from qlora_sweep.sweep.terminal import console
from qlora_sweep.sweep.terminal.doctor import check, examine, findings_text, is_healthy
from qlora_sweep.sweep.terminal.listings import read, with_offer
from qlora_sweep.sweep.terminal.options import amounts


def read_for_report(study: str, *, url: str) -> StudySnapshot:
    """Return a study, or a surface, with its prices, its speeds, and what is known of memory
    without tracing."""
    if study.endswith(".jsonl"):
        snapshot = with_offer(recorded_study(study))
    else:
        snapshot = read(study, url=url)
    return with_memory_forecasts(snapshot, cache_dir=paths.cache_directory() / "memory")


def remove(study: str, *, storage: str | None, is_sure: bool) -> None:
    """Remove a study and its files, and print what is gone; a person is asked first."""
    url = paths.storage_url(storage)
    trials = units.plural(count_trials(study, url=url), "trial")
    question = f"Remove study '{study}' with {trials} and its files?"
    if not console.agreed(question, command=f"rm {study}", is_sure=is_sure):
        console.note("Nothing was removed.")
        return
    # Only removing needs Optuna, which takes seconds to import.
    from qlora_sweep.storage.transfer import remove_study
    from qlora_sweep.sweep.launching.rented import remove_jobs

    home = paths.runs_directory()
    removed = remove_study(study, url=url, home=home)
    gone = list(removed.files)
    # Where the directory is another study's, nothing of it was removed.
    if removed.files:
        gone += remove_jobs(home / study)
    lines = [f"Removed study {study}: {trials}"]
    lines += [f"Removed {path}" for path in gone]
    for path in removed.left:
        if path.exists() or path.is_symlink():
            lines.append(f"Left {path}, which is not sweep's")
    console.say("\n".join(lines))


def report(
    named: Sequence[str] | None,
    *,
    work: Sequence[str] | None,
    figure: str | None,
    storage: str | None,
    output: str | None,
    is_forced: bool,
) -> None:
    """Print the report of a study, or of several GPUs, or write it and print where it is."""
    studies = list(named or ())
    for name, times in Counter(studies).items():
        if times > 1:
            raise InputError(f"{name} is named twice: name each study once")
    if not studies:
        raise InputError("name a study for its report, or several studies to compare")
    asked = AskedWork(**amounts(work, ("tokens", "dataset_samples", "epochs")))
    endings = (".html", ".htm") + tuple(images.SUFFIXES)
    path = checked_output(output, what="a report", endings=endings, is_forced=is_forced)
    is_picture = path is not None and path.suffix.lower() in images.SUFFIXES
    name = studies[0]
    if name.endswith(".jsonl"):
        name = Path(name).stem
    if output is None and not is_file_name(name):
        raise InputError(f"study {quote(name)}: no file has such a name: add -o FILE")
    snapshots = [read_for_report(study, url=paths.storage_url(storage)) for study in studies]
    is_one = len(studies) == 1
    if figure is not None and not is_picture:
        raise InputError("--figure needs -o with a name that ends in .png or .svg")
    if is_picture and not is_one:
        raise InputError("a picture is of one study: several have a page alone")
    if path is not None and is_picture:
        images.write_image(snapshots[0], path, figure=figure)
    else:
        if is_one:
            page = render(snapshots[0], work=asked)
        else:
            page = render_comparison(compare(list(map(of_study, snapshots)), work=asked))
        if output == console.STDOUT:
            console.say_as_is(page)
            return
        if path is not None:
            write_output(path, page.encode("utf-8", errors="replace"))
        elif is_one:
            path = paths.report_path(name)
            write_page(page, path)
        else:
            path = paths.comparison_path(name)
            write_page(page, path)
    console.say(str(output or path))


def doctor() -> int:
    """Print a check-up of this machine."""
    with console.working("checking this machine"):
        findings = check(examine())
    console.say(findings_text(findings, width=console.width_of(sys.stdout)))
    return 0 if is_healthy(findings) else EnvironmentFault.exit_code
