"""How much worse a guided search asks where its surrogate is fitted to few of many trials.

    python -m tests.bench.learn_from_few tests/data/surfaces/mistral-7b-v0.3_h200.jsonl

Of a surface so many rows are told, in an order that a seed gives; every other one of its fastest
quarter is not, so that there is something to find. Then one more is asked for. Needs no device.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

import numpy as np
import optuna

from search_spaces.gpus import GIB
from storage.surfaces import Surface, read_surface
from sweep.running.replay import ReplayRunner
from sweep.sampling import guided
from sweep.sampling.encoding import identity
from sweep.sampling.guided import GuidedSampler
from sweep.sampling.samplers import quiet_optuna
from sweep.study import recorded
from sweep.study.recorded import Recorded
from tests.bench.stamp import stamp

SEEDS = 6
EVERYTHING = 1_000_000


def behind(surface: Surface, *, budget_bytes: int, told: int, seed: int) -> tuple[float, float]:
    """Return by how much the next trial is slower than the best that is left, relative, and the
    root mean square error of the log speeds that are predicted of all that is left."""
    peaks = {
        identity(row.config): row.peak_allocated_bytes
        for row in surface.rows
        if row.peak_allocated_bytes is not None
    }
    known = Recorded(surface, budget_bytes, peaks)
    rows, forecaster = recorded.Rows(surface, seed=seed), recorded.forecaster_of(known)
    sampler = recorded.sampler_of("guided", rows, forecaster, seed=seed)
    assert isinstance(sampler, GuidedSampler), "asked for by name"
    study = optuna.create_study(sampler=sampler, direction="maximize")
    row_at = [row for c in rows.all if (row := rows.row_of(c.params)) is not None]
    speed = {at: row.tokens_per_second or 0.0 for at, row in enumerate(row_at)}
    fitting = [at for at, row in enumerate(row_at) if row.fits(budget_bytes)]
    fitting.sort(key=lambda at: -speed[at])
    hidden = {*fitting[: len(fitting) // 4 : 2]}
    order = [at for at in range(len(row_at)) if at not in hidden]
    runner = ReplayRunner(recorded.records_of(surface, budget_bytes=budget_bytes))
    for at in random.Random(seed).sample(order, min(told, len(order))):
        study.enqueue_trial(rows.all[at].params)
        trial = study.ask(rows.free)
        recorded.tell(study, trial, row_at[at], runner, forecaster)
    trials = sampler._read(study, besides=None)
    predicted = guided._speed(sampler._weighed(trials).world, trials).mean
    left = [at for at in fitting if rows.all[at].key not in trials.tried]
    errors = [predicted[at] - np.log(speed[at]) for at in left]
    asked = rows.row_of(study.ask(rows.free).params)
    assert asked is not None, "a sampler asks for rows alone"
    reached = (asked.tokens_per_second or 0.0) if asked.fits(budget_bytes) else 0.0
    best = max(speed[at] for at in left)
    return 1.0 - reached / best, float(np.sqrt(np.mean(np.square(errors))))


def main() -> None:
    """Print a line for each number of trials that are told, and that are learned from."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("surface", type=Path)
    parser.add_argument("--budget-gib", type=float, default=21.5)
    asked = parser.parse_args()
    quiet_optuna()
    print(json.dumps(stamp()))
    surface = read_surface(asked.surface)
    print("told  learned from  next trial behind the best left, %  error of log speeds")
    for told in (100, 160):
        for most in (EVERYTHING, 60, 40):
            guided.LEARNED_MAX = most
            found = [
                behind(surface, budget_bytes=int(asked.budget_gib * GIB), told=told, seed=seed)
                for seed in range(SEEDS)
            ]
            share = 100 * statistics.fmean(pair[0] for pair in found)
            error = statistics.fmean(pair[1] for pair in found)
            shown = "all" if most == EVERYTHING else str(most)
            print(f"{told:>4}  {shown:>12}  {share:>34.2f}  {error:>19.4f}", flush=True)


if __name__ == "__main__":
    main()
