"""The demonstration: a study on this CPU, the same commands on a recorded GPU, and one screen.

    python -m qlora_sweep.sweep.terminal.demo SURFACE REPLAY

SURFACE are recorded trials, and REPLAY is what ``python -m tests.bench.replay SURFACE --json``
printed of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.reports.answer import facts, headline
from qlora_sweep.reports.view import StudyView, view_of
from qlora_sweep.reports.words import verdict_words
from qlora_sweep.search_spaces.documents import parse_object, read_text
from qlora_sweep.search_spaces.errors import NothingFits
from qlora_sweep.search_spaces.loading import load_space
from qlora_sweep.storage.surfaces import read_surface
from qlora_sweep.sweep.paths import report_path, storage_url
from qlora_sweep.sweep.request import RunRequest, Where
from qlora_sweep.sweep.sampling.encoding import identity
from qlora_sweep.sweep.study.events import StopReason
from qlora_sweep.sweep.terminal import driving
from qlora_sweep.sweep.terminal.console import folded, note, say, width_of
from qlora_sweep.sweep.terminal.edge import guarded


def demonstrate(surface: str, replay: str) -> int:
    """Run both studies and print what came of them."""
    note("1 of 2: a tiny model really trains on this CPU (`sweep run cpu-demo --study demo`).")
    live = _study(RunRequest(space="cpu-demo", study="demo"), None)
    typed = "sweep run a10 --rank 16 --target-modules qv"
    note(f"\n2 of 2: a recorded GPU (`{typed} --on recorded:{surface} --study demo-a10`).")
    fixed_settings = {"lora_rank": 16, "target_modules": "qv"}
    request = RunRequest(space="a10", study="demo-a10", fixed_settings=fixed_settings)
    recorded = _study(request, f"recorded:{surface}")
    lines = [""]
    lines += _found(live)
    lines += _found(recorded)
    lines += _as_published(recorded, surface)
    lines.append(_searched(replay))
    lines.append(f"Reports: {report_path(live.study)}, {report_path(recorded.study)}")
    lines.append("Next: `sweep plan a10` (no GPU needed), or `sweep run a10` on a GPU.")
    say("\n".join(folded(line, width_of(sys.stdout), indent=2) for line in lines))
    return NothingFits.exit_code if live.winner is None else 0


def _study(request: RunRequest, on: str | None) -> StudyView:
    """Run a study and write its report."""
    url = storage_url(None)
    prepared, reason = driving.tune(request, Where.parse(on), url=url)
    if reason is StopReason.INTERRUPTED:
        raise KeyboardInterrupt
    return view_of(driving.reported(prepared.name, url=url)[0])


def _found(view: StudyView) -> Iterator[str]:
    """Yield what a study was about, how its trials ended, and what it found."""
    recorded = view.snapshot.definition.target.recorded
    when = "measured now" if recorded is None else f"recorded on {recorded}"
    gpu = units.with_article(units.gpu_name(view.gpu.name))
    about = f"{units.model_name(view.model or '')} on {gpu} ({units.gib(view.gpu.budget_bytes)})"
    yield f"{about}, {when}:"
    yield f"  {verdict_words(view.snapshot.records)}"
    if view.winner is not None:
        known = dict(facts(view))
        yield f"  {headline(view)}"
        yield "  " + "; ".join(f"{name} {known[name]}" for name in ("speed", "memory", "gain"))


def _as_published(view: StudyView, surface: str) -> Iterator[str]:
    """Yield how the winner compares with the published recipe on the adapters it was published
    with."""
    recipe = identity(load_space("a10").baseline_config())
    rows = {identity(row.config): row.tokens_per_second for row in read_surface(surface).rows}
    if view.winner is not None and (known := rows.get(recipe)) is not None:
        ratio = view.winner.measurement.tokens_per_second / known
        yield f"  (that is {ratio:.2f}x the recipe as published, which has adapters on q,k,v,o)"


def _searched(replay: str) -> str:
    """Return what samplers needed to find the best of the surface."""
    document = parse_object(read_text(Path(replay), label=replay), where=replay)

    def needed(sampler: dict[str, Any]) -> str:
        trials, seconds = sampler["trials"]["median"], sampler["device_seconds"]["median"]
        return f"{units.plural(round(trials), 'trial')} and {seconds:.0f} s of the GPU"

    guided = needed(document["samplers"]["guided"])
    random = needed(document["samplers"]["random"])
    found = f"  found among {document['configurations']} by guided search in {guided}"
    return f"{found}, by random search in {random} (medians)"


if __name__ == "__main__":
    sys.exit(guarded(lambda: demonstrate(*sys.argv[1:])))
