"""Holds samplers against surfaces, with right priors and wrong ones, and says where a search ends.

    python -m tests.bench.replays SURFACE ... [--budgets 21.5,39] [--seeds 20] [--samplers ...]

Prints a row for each surface and budget: of every sampler the median and the 95th percentile of the
trials until one is within 2 % of the best, and of the trials that ran out of memory on the way; of
the guided one also what becomes of it where the speed prior is reversed (seconds become k/seconds)
or the memory prior is off by 30 % either way, and after how many trials it ends by itself, how far
from the best. `tests/bench/README.md` keeps what was measured.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.records import TrialRecord
from storage.surfaces import Surface, read_surface
from sweep.predict.speed.predictor import StepTimes
from sweep.sampling.guided import GuidedSampler
from sweep.sampling.surrogate import Array
from sweep.study.recorded import (
    SAMPLERS,
    Recorded,
    Rows,
    forecast_of,
    forecaster_of,
    sampler_of,
    search,
    tell,
)
from sweep.terminal.replay import document_of, predicted_peaks, run_searches

GAIN = 0.01


@dataclass(frozen=True)
class Reversed:
    """A speed model by which what is slow is fast: seconds become k / seconds."""

    right: StepTimes
    log_k: float

    @property
    def spread(self) -> Array:
        return self.right.spread

    @property
    def launch_shares(self) -> Array:
        return self.right.launch_shares

    def log_seconds(self, log_factors: Array, rows: Any) -> Array:
        return self.log_k - self.right.log_seconds(log_factors, rows)

    def slopes(self, log_factors: Array, rows: Any) -> Array:
        return -self.right.slopes(log_factors, rows)


class ReversedForecast:
    """Predicts each step by `Reversed`."""

    def __init__(self, surface: Surface) -> None:
        self._right = forecast_of(surface)

    def physics(self, configs: Sequence[TrialConfig]) -> Any:
        right = self._right.physics(configs)
        if right is None:
            return None
        seconds = right.log_seconds(np.zeros(len(right.spread)), slice(None))
        return Reversed(right, 2 * float(np.median(seconds)))

    def predict(self, config: TrialConfig) -> float | None:
        return None

    def learn(self, record: TrialRecord) -> None:
        self._right.learn(record)


def wrong(recorded: Recorded, *, is_reversed: bool, memory: float) -> Recorded:
    """Return the same surface, foreseen wrongly."""
    peaks = {key: int(peak * memory) for key, peak in recorded.peaks.items()}
    speed = ReversedForecast if is_reversed else forecast_of
    return replace(recorded, peaks=peaks, speed=speed)


def ended(recorded: Recorded) -> tuple[int, float]:
    """Return after how many trials a guided search ends by itself, and how far below the best."""
    fastest, count, gain = 0.0, 0, math.inf
    rows, forecaster = Rows(recorded.surface, seed=0), forecaster_of(recorded)
    sampler = sampler_of("guided", rows, forecaster, seed=0)
    assert isinstance(sampler, GuidedSampler), "asked for by name"
    study = optuna.create_study(sampler=sampler, direction="maximize")
    for _ in rows.all:
        trial = study.ask(rows.free)
        row = rows.row_of(trial.params)
        assert row is not None, "a sampler asks for rows alone"
        tell(study, trial, row, recorded, forecaster)
        count += 1
        if row.fits(recorded.budget_bytes):
            fastest = max(fastest, row.tokens_per_second or 0.0)
        before, gain = gain, sampler.outlook(study).gain
        if max(before, gain) < GAIN:
            break
    return count, 1.0 - fastest / (recorded.best.tokens_per_second or 1.0)


def report(recorded: Recorded, samplers: Iterable[Any], *, seeds: int) -> str:
    """Return the lines of one surface under one budget."""
    surface, budget = recorded.surface, recorded.budget_bytes / GIB
    document = document_of(recorded, run_searches(recorded, tuple(samplers), seeds=seeds))
    lines = [
        f"{surface.name} {budget:g} GiB: {document['fitting']} of {document['configurations']} fit"
    ]
    for name, values in document["samplers"].items():
        trials, oom, ask = values["trials"], values["oom"], values["ask_seconds"]
        lines.append(
            f"  {name}: {trials['median']:g} / {trials['p95']:g} trials, "
            f"{oom['median']:g} / {oom['p95']:g} out of memory, "
            f"{values['device_seconds']['median']:.0f} s, ask {1e3 * ask['median']:.0f} ms"
        )
    count, short = ended(recorded)
    lines.append(f"  guided ends by itself after {count} trials, {short:.1%} below the best")
    for is_reversed in (False, True):
        for memory in (1.0, 1.3, 0.7):
            if not is_reversed and memory == 1.0:
                continue
            priors = wrong(recorded, is_reversed=is_reversed, memory=memory)
            done = [search(priors, "guided", seed=seed) for seed in range(min(seeds, 3))]
            trials = statistics.median(one.trials for one in done)
            oom = statistics.median(one.oom for one in done)
            speed = "reversed" if is_reversed else "right"
            lines.append(
                f"  guided, speed {speed}, memory x {memory}: {trials:g} trials, {oom:g} oom, "
                f"ends after {ended(priors)[0]}, {ended(priors)[1]:.1%} below"
            )
    return "\n".join(lines)


def main() -> None:
    """Print the report of every surface and budget that was named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("surfaces", nargs="+")
    parser.add_argument("--budgets", default="21.5,39")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    for name in arguments.surfaces:
        surface = read_surface(name)
        peaks = predicted_peaks(surface)
        for gib in map(float, arguments.budgets.split(",")):
            budget = int(gib * GIB)
            if surface.fitting(budget):
                recorded = Recorded(surface, budget, peaks)
                samplers = arguments.samplers.split(",")
                print(report(recorded, samplers, seeds=arguments.seeds), flush=True)


if __name__ == "__main__":
    main()
