"""The demonstration: a study on this CPU, the same commands on a recorded GPU, and one screen.

    python -m sweep.terminal.demo SURFACE REPLAY

SURFACE are recorded trials, and REPLAY is what ``sweep replay SURFACE --json`` printed of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from reports import units
from reports.sentences import gain_words
from reports.view import view_of
from reports.words import verdict_words
from search_spaces.documents import parse_object, read_text
from search_spaces.loading import load_space
from storage.definition import StudySnapshot
from storage.ranking import measured_of, rank_study
from storage.surfaces import Surface, read_surface
from sweep.paths import report_path, storage_url
from sweep.request import RunRequest, Where
from sweep.sampling.encoding import identity
from sweep.stop_signals import INTERRUPTED
from sweep.study.events import StopReason
from sweep.terminal import driving
from sweep.terminal.commands import DONE, NOTHING_FITS
from sweep.terminal.console import folded, note, say, width_of
from sweep.terminal.edge import guarded
from sweep.terminal.summary import has_fit

RECIPE = {"lora_rank": 16, "target_modules": "qv"}
"""Adapters of the recorded study: its winner's."""


def demonstrate(surface: str, replay: str) -> int:
    """Run both studies and print what came of them; return 130 where somebody stopped it."""
    note("1 of 2: a tiny model really trains on this CPU (`sweep run cpu-demo --study demo`).")
    live = _study("cpu-demo", name="demo", on=None, held={})
    if live is None:
        return INTERRUPTED
    shown = "--rank 16 --target-modules qv"
    typed = f"sweep run a10 {shown} --on recorded:{surface} --study demo-a10"
    note(f"\n2 of 2: a recorded GPU (`{typed}`).")
    recorded = _study("a10", name="demo-a10", on=f"recorded:{surface}", held=RECIPE)
    if recorded is None:
        return INTERRUPTED
    lines = ["", *_found(live), *_found(recorded), *_as_published(recorded, read_surface(surface))]
    lines += [_searched(replay), *_next(live, recorded)]
    say("\n".join(folded(line, width_of(sys.stdout), indent=2) for line in lines))
    return DONE if has_fit(live) else NOTHING_FITS


def _study(
    space: str, *, name: str, on: str | None, held: dict[str, object]
) -> StudySnapshot | None:
    """Run a study and write its report; None where somebody asked to stop."""
    url = storage_url(None)
    request = RunRequest(space=space, held=held, study=name)
    _, reason = driving.tune(request, Where.parse(on), url=url)
    return None if reason is StopReason.INTERRUPTED else driving.reported(name, url=url)[0]


def _found(snapshot: StudySnapshot) -> Iterator[str]:
    """Yield what a study was about, how its trials ended, and what it found."""
    target, winner = snapshot.definition.target, rank_study(snapshot).winner
    model = units.model_name(snapshot.definition.model["name"])
    when = "measured now" if target.recorded is None else f"recorded on {target.recorded}"
    gpu, budget = units.gpu_name(target.gpu), units.gib(target.budget_bytes)
    yield f"{model} on {units.with_article(gpu)} ({budget}), {when}:"
    yield f"  {verdict_words(snapshot.records)}"
    if winner is not None:
        measured = measured_of(winner)
        known = (
            units.phrase("compute_dtype", winner.config.compute_dtype),
            f"{units.rate(measured.tokens_per_second)} tokens/s",
            units.gib(measured.peak_allocated_bytes),
            gain_words(view_of(snapshot), winner).partition(" (")[0],
        )
        yield f"  fastest: {units.size(winner.config)}, {', '.join(filter(None, known))}"


def _as_published(snapshot: StudySnapshot, surface: Surface) -> Iterator[str]:
    """Yield how the winner compares with the published recipe on the adapters it was published
    with."""
    winner = rank_study(snapshot).winner
    recipe = load_space("a10").baseline_config()
    rows = {identity(row.config): row.tokens_per_second for row in surface.rows}
    known = rows.get(identity(recipe))
    if winner is not None and known is not None:
        ratio = measured_of(winner).tokens_per_second / known
        yield f"  (that is {ratio:.2f}x the recipe as published, which has adapters on q,k,v,o)"


def _searched(replay: str) -> str:
    """Return what samplers needed to find the best of the surface."""
    document = parse_object(read_text(Path(replay), label=replay), where=replay)
    guided, rand = (document["samplers"][name] for name in ("guided", "random"))
    return (
        f"  found among {document['configurations']} by guided search in "
        f"{units.plural(int(guided['trials']['median']), 'trial')} and "
        f"{guided['device_seconds']['median']:.0f} s of the GPU, by random search in "
        f"{rand['trials']['median']:.0f} and {rand['device_seconds']['median']:.0f} s (medians)"
    )


def _next(*snapshots: StudySnapshot) -> Iterator[str]:
    yield f"Reports: {', '.join(str(report_path(snapshot.name)) for snapshot in snapshots)}"
    yield "Next: `sweep plan a10` (no GPU needed), or `sweep run a10` on a GPU."


if __name__ == "__main__":
    sys.exit(guarded(lambda: demonstrate(*sys.argv[1:])))
