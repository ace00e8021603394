"""Owns ``sweep replay``: a surface and samplers in, a table or a JSON document out.

The searches are `sweep.study.recorded`'s; here they are spread over the machine's cores and
put into words. Knows nothing of how a sampler chooses.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from reports import units
from search_spaces.errors import InputError, NothingFits, SweepError, did_you_mean, quote
from search_spaces.gpus import GIB, find_gpu
from storage.surfaces import Surface, read_surface
from sweep.paths import cache_directory
from sweep.predict.forecast import TRACED, Progress, silent
from sweep.predict.memory.predictor import TracingPredictor
from sweep.processes import process_pool, unheard_by_new_processes
from sweep.sampling.encoding import identity
from sweep.study.recorded import (
    SAMPLERS,
    Recorded,
    SamplerName,
    Search,
    recorded_peaks,
    search,
)
from sweep.terminal.console import note, say, say_json, table
from sweep.terminal.working import working

SEEDS_MAX = 1000
ALONE_SECONDS = 5.0
"""Work that one process does in about this long is not worth starting others for."""
_SECONDS_OF_SEARCH = {"guided": 0.3, "tpe": 1.0, "gp": 6.0, "random": 0.1}
"""What one search takes, roughly."""


def replay(
    surface: str,
    *,
    samplers: str | None,
    seeds: int,
    budget_gib: float | None,
    as_json: bool,
) -> int:
    """Let samplers search a surface, and print how many trials each needs.

    Raises:
        InputError: the surface, a sampler's name, the seeds or the budget is not right.
        NothingFits: no configuration of the surface fits the budget.
    """
    names = _samplers(samplers)
    if not 1 <= seeds <= SEEDS_MAX:
        raise InputError(f"--seeds must be from 1 to {SEEDS_MAX:,}, got {seeds}")
    recorded = read_surface(surface)
    budget_bytes = _budget(recorded, budget_gib)
    if recorded.repeated:
        note(
            f"{surface}: {units.plural(recorded.repeated, 'row')} said again what an earlier one "
            "had said; each configuration counts once."
        )
    _check_fits(recorded, budget_bytes)
    with working("replaying") as progress:
        predicted = Recorded(recorded, budget_bytes, predicted_peaks(recorded, progress=progress))
        searches = run_searches(predicted, names, seeds=seeds, progress=progress)
    document = document_of(predicted, searches)
    if as_json:
        say_json(document)
    else:
        say(_text(document, predicted))
    return 0


def _samplers(typed: str | None) -> tuple[SamplerName, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in typed.split(","))) if typed else SAMPLERS
    for name in names:
        if name not in SAMPLERS:
            raise InputError(
                f"--samplers: unknown sampler {quote(name)}{did_you_mean(name, SAMPLERS)}"
            )
    return cast(tuple[SamplerName, ...], names)


def _budget(surface: Surface, gib: float | None) -> int:
    if gib is None:
        return find_gpu(surface.gpu).budget_bytes
    if not 0 < gib < math.inf:
        raise InputError(f"--budget-gib must be greater than 0, got {gib:g}")
    return int(gib * GIB)


def _check_fits(surface: Surface, budget_bytes: int) -> None:
    if surface.fitting(budget_bytes):
        return
    peaks = [row.peak_allocated_bytes for row in surface.rows if row.verdict == "fits"]
    least = min((peak for peak in peaks if peak is not None), default=None)
    change = "every trial of it ran out of memory: record smaller configurations"
    if least is not None:
        needed = math.ceil(least / GIB * 100) / 100
        change = (
            f"the least that one of them needs is {units.gib(least)}: ask with --budget-gib "
            f"{needed:g} or more, or record smaller configurations"
        )
    raise NothingFits(
        f"{surface.name}: none of {units.plural(len(surface.rows), 'configuration')} fits "
        f"{units.gib(budget_bytes)}; {change}"
    )


def predicted_peaks(surface: Surface, *, progress: Progress = silent) -> dict[str, int]:
    """Return the predicted peak of each row by its identity, without those that have none: as the
    surface says it, and worked out now where it does not."""
    stated = recorded_peaks(surface)
    if len(stated) == len(surface.rows):
        return stated
    predictor = TracingPredictor(
        surface.model,
        cache_dir=cache_directory() / "memory",
        compute_capability=surface.card.compute_capability,
    )
    configs = [row.config for row in surface.rows]
    try:
        memory = predictor.predict_all(configs, on_progress=progress(TRACED))
        peaks = memory.peak_allocated_bytes
    except SweepError as error:
        note(f"warning: memory is not predicted, so every sampler goes without: {error}")
        return {}
    known = zip(configs, peaks.tolist(), strict=True)
    return {identity(config): peak for config, peak in known if peak >= 0}


def run_searches(
    recorded: Recorded,
    names: Sequence[SamplerName],
    *,
    seeds: int,
    progress: Progress = silent,
) -> dict[SamplerName, list[Search]]:
    """Return every sampler's searches, one for each seed, on all cores where that is worth it."""
    tasks = [(name, seed) for name in names for seed in range(seeds)]
    cores = os.process_cpu_count() if hasattr(os, "process_cpu_count") else os.cpu_count()
    expected = sum(_SECONDS_OF_SEARCH[name] for name, _ in tasks)
    found: dict[SamplerName, list[Search]] = {name: [] for name in names}
    workers = min(cores or 1, len(tasks))
    if workers == 1 or expected < ALONE_SECONDS:
        results: Iterable[Search] = (search(recorded, name, seed=seed) for name, seed in tasks)
        _collect(tasks, results, found, progress)
        return found
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with process_pool(workers) as pool:
        with unheard_by_new_processes():
            futures = [pool.submit(search, recorded, name, seed=seed) for name, seed in tasks]
        _collect(tasks, (future.result() for future in futures), found, progress)
    return found


def _collect(
    tasks: Sequence[tuple[SamplerName, int]],
    results: Iterable[Search],
    found: dict[SamplerName, list[Search]],
    progress: Progress,
) -> None:
    tell = progress("searches done")
    for done, ((name, _), result) in enumerate(zip(tasks, results, strict=True), start=1):
        found[name].append(result)
        tell(done, len(tasks))


def document_of(recorded: Recorded, searches: dict[SamplerName, list[Search]]) -> dict[str, Any]:
    """Return the document of ``sweep replay --json``."""
    surface, best = recorded.surface, recorded.best
    return {
        "surface": surface.name,
        "budget_bytes": recorded.budget_bytes,
        "configurations": len(surface.rows),
        "fitting": len(surface.fitting(recorded.budget_bytes)),
        "best": {
            "config": best.config.model_dump(mode="json"),
            "tokens_per_second": best.tokens_per_second,
        },
        "samplers": {name: _summary(done) for name, done in searches.items()},
    }


def _summary(done: Sequence[Search]) -> dict[str, dict[str, float]]:
    return {
        "trials": _spread([one.trials for one in done]),
        "oom": _spread([one.oom for one in done]),
        "device_seconds": _spread([one.device_seconds for one in done]),
        "ask_seconds": _spread([ask for one in done for ask in one.ask_seconds]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 95th percentile: of twenty values the nineteenth."""
    p95 = np.percentile(values, 95, method="inverted_cdf").item()
    return {"median": statistics.median(values), "p95": p95}


def _text(document: dict[str, Any], recorded: Recorded) -> str:
    surface, best = recorded.surface, recorded.best
    opening = (
        f"{surface.name}: {surface.model.name} on {surface.card.product}, "
        f"{document['fitting']} of {units.plural(document['configurations'], 'configuration')} "
        f"fit {units.gib(recorded.budget_bytes)}.\n"
        f"Best: {best.tokens_per_second:,.0f} tokens/s, {units.shape(best.config)}.\n"
    )
    header = ("sampler", "trials until within 2 %", "out of memory", "device time", "asking")
    rows = [
        (name, *(_pair(values[key], words) for key, words in _WORDS.items()))
        for name, values in document["samplers"].items()
    ]
    return f"{opening}\nMedian (95th percentile):\n{table(header, rows)}"


_WORDS: dict[str, Callable[[float], str]] = {
    "trials": lambda value: f"{value:g}",
    "oom": lambda value: f"{value:g}",
    "device_seconds": lambda value: f"{value:,.0f} s",
    "ask_seconds": lambda value: f"{1e3 * value:,.0f} ms",
}


def _pair(values: dict[str, float], words: Callable[[float], str]) -> str:
    return f"{words(values['median'])} ({words(values['p95'])})"
