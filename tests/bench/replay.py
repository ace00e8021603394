"""How many trials does each sampler need on recorded ones? They search a surface on all cores.

    python -m tests.bench.replay SURFACE [--samplers a,b] [--seeds N] [--budget-gib X] [--json]

SURFACE is a file of `sweep export --format surface`. Exit codes are those of `sweep`: 1 where
nothing of it fits the budget, 2 for what cannot be read.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.errors import (
    InputError,
    NothingFits,
    SweepError,
    did_you_mean,
    quote,
)
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.storage.surfaces import Surface, read_surface
from qlora_sweep.sweep.paths import cache_directory
from qlora_sweep.sweep.predict.forecast import TRACED, Progress
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.processes import process_pool
from qlora_sweep.sweep.sampling.encoding import identity
from qlora_sweep.sweep.study.recorded import recorded_peaks
from qlora_sweep.sweep.terminal.console import note, say_json, say_result, width_of, working
from qlora_sweep.sweep.terminal.drawing import table
from qlora_sweep.sweep.terminal.edge import guarded
from qlora_sweep.sweep.terminal.listings import warn
from tests.bench.searching import SAMPLERS, Recorded, SamplerName, Search, search

ALONE_SECONDS = 5.0
"""Work that one process does in about this long is not worth starting others for."""
SEEDS_MAX = 1000
_SECONDS_OF_SEARCH = {"guided": 0.3, "tpe": 1.0, "gp": 6.0, "random": 0.1}
"""What one search takes, roughly."""
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "trials": "{:g}".format,
    "oom": "{:g}".format,
    "device_seconds": "{:,.0f} s".format,
    "ask_seconds": lambda seconds: f"{1e3 * seconds:,.0f} ms",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Let samplers search a surface, print how many trials each needs; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("surface")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--budget-gib", type=float)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    return guarded(
        lambda: replay(
            asked.surface,
            samplers=asked.samplers,
            seeds=asked.seeds,
            budget_gib=asked.budget_gib,
            as_json=asked.json,
        )
    )


def replay(
    surface: str, *, samplers: str, seeds: int, budget_gib: float | None, as_json: bool
) -> None:
    """Let samplers search a surface, and print how many trials each needs.

    Raises:
        InputError: the surface, a sampler's name, the seeds or the budget is not right.
        NothingFits: no configuration of the surface fits the budget.
    """
    names = list(dict.fromkeys(name.strip() for name in samplers.split(",")))
    for name in names:
        if name not in SAMPLERS:
            mistake = f"unknown sampler {quote(name)}{did_you_mean(name, SAMPLERS)}"
            raise InputError(f"--samplers: {mistake}")
    if not 1 <= seeds <= SEEDS_MAX:
        raise InputError(f"--seeds must be from 1 to {SEEDS_MAX}, got {seeds}")
    if budget_gib is not None and not 0 < budget_gib < math.inf:
        raise InputError(f"--budget-gib must be greater than 0, got {budget_gib:g}")
    read = read_surface(surface)
    if read.repeated:
        again = units.plural(read.repeated, "row")
        note(f"{surface}: {again} repeated an earlier one; each configuration counts once.")
    budget_bytes = find_gpu(read.gpu).budget_bytes if budget_gib is None else int(budget_gib * GIB)
    if not read.fitting(budget_bytes):
        if as_json:
            none: dict[str, Any] = {"fitting": 0, "best": None, "samplers": {}}
            say_json(_about(read, budget_bytes) | none)
        raise NothingFits(_nothing_fits(read, budget_bytes))
    with working("replaying") as progress:
        recorded = Recorded(read, budget_bytes, predicted_peaks(read, progress=progress))
        chosen = cast(Sequence[SamplerName], names)
        searches = run_searches(recorded, chosen, seeds=seeds, progress=progress)
    document = document_of(recorded, searches)
    say_result(document, _text(recorded, document), as_json=as_json)


def _text(recorded: Recorded, document: Mapping[str, Any]) -> str:
    surface = recorded.surface
    rows = []
    for name, of in document["samplers"].items():
        cells = [name]
        for key, say in _FORMATS.items():
            cells.append(f"{say(of[key]['median'])} ({say(of[key]['p95'])})")
        rows.append(cells)
    header = ("sampler", "trials until within 2 %", "out of memory", "device time", "asking")
    whole = units.plural(document["configurations"], "configuration")
    return (
        f"{surface.name}: {surface.model.name} on {surface.measured_on.product}, "
        f"{document['fitting']} of {whole} fit {units.gib(recorded.budget_bytes)}.\n"
        f"Best: {recorded.best.tokens_per_second:,.0f} tokens/s, "
        f"{units.shape(recorded.best.config)}.\n\n"
        f"Median (95th percentile):\n{table(header, rows, width=width_of(sys.stdout))}"
    )


def _nothing_fits(surface: Surface, budget_bytes: int) -> str:
    peaks = [r.peak_allocated_bytes for r in surface.rows if r.verdict == "fits"]
    least = min((peak for peak in peaks if peak is not None), default=None)
    change = "record smaller configurations"
    if least is not None:
        needed = math.ceil(least / GIB * 100) / 100
        change = f"ask with --budget-gib {needed:g} or more, or {change}"
    none = f"none of {units.plural(len(surface.rows), 'configuration')} fits"
    return f"{surface.name}: {none} {units.gib(budget_bytes)}; {change}"


def predicted_peaks(surface: Surface, *, progress: Progress) -> dict[str, int]:
    """Return the predicted peak of each row by its identity, without those that have none: as the
    surface says it, and worked out now where it does not."""
    stated = recorded_peaks(surface)
    if len(stated) == len(surface.rows):
        return stated
    predictor = TracingPredictor(
        surface.model,
        cache_dir=cache_directory() / "memory",
        compute_capability=surface.measured_on.compute_capability,
    )
    configs = [row.config for row in surface.rows]
    try:
        memory = predictor.predict_all(configs, on_progress=progress(TRACED))
        peaks = memory.peak_allocated_bytes
    except SweepError as error:
        warn(f"memory is not predicted, so every sampler goes without: {error}")
        return {}
    known = zip(configs, peaks.tolist(), strict=True)
    return {identity(config): peak for config, peak in known if peak >= 0}


def run_searches(
    recorded: Recorded, names: Sequence[SamplerName], *, seeds: int, progress: Progress
) -> dict[SamplerName, list[Search]]:
    """Return every sampler's searches, one for each seed, on all cores where that is worth it."""
    tasks = [(name, seed) for name in names for seed in range(seeds)]
    tell = progress("searches done")
    found = defaultdict[SamplerName, list[Search]](list)

    def collect(results: Iterable[Search]) -> None:
        for done, ((name, _), result) in enumerate(zip(tasks, results, strict=True), start=1):
            found[name].append(result)
            tell(done, len(tasks))

    workers = min(len(os.sched_getaffinity(0)), len(tasks))
    if workers == 1 or sum(_SECONDS_OF_SEARCH[name] for name, _ in tasks) < ALONE_SECONDS:
        collect(search(recorded, name, seed=seed) for name, seed in tasks)
        return found
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with process_pool(workers) as pool:
        futures = [pool.submit(search, recorded, name, seed=seed) for name, seed in tasks]
        collect(future.result() for future in futures)
    return found


def document_of(
    recorded: Recorded, searches: Mapping[SamplerName, Sequence[Search]]
) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    surface, best = recorded.surface, recorded.best
    return {
        **_about(surface, recorded.budget_bytes),
        "fitting": len(surface.fitting(recorded.budget_bytes)),
        "best": {
            "config": best.config.model_dump(mode="json"),
            "tokens_per_second": best.tokens_per_second,
        },
        "samplers": {
            name: {
                "trials": _spread([one.trials for one in done]),
                "oom": _spread([one.oom for one in done]),
                "device_seconds": _spread([one.device_seconds for one in done]),
                "ask_seconds": _spread([ask for one in done for ask in one.ask_seconds]),
            }
            for name, done in searches.items()
        },
    }


def _about(surface: Surface, budget_bytes: int) -> dict[str, Any]:
    return {
        "surface": surface.name,
        "budget_bytes": budget_bytes,
        "configurations": len(surface.rows),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 95th percentile: of twenty values the nineteenth."""
    p95 = np.percentile(values, 95, method="inverted_cdf").item()
    return {"median": statistics.median(values), "p95": p95}


if __name__ == "__main__":
    sys.exit(main())
