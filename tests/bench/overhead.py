"""What a trial costs beside its training steps.

    python -m tests.bench.overhead [--trials 100,1000,10000] [--samplers random,guided] [--more 20]
    python -m tests.bench.overhead --study NAME [--storage URL]

Without a study the driver's own processor seconds, with what the terminal shows: a study of so many
trials is resumed on a GPU that answers at once. Of a study that ran on a GPU, the seconds from one
trial's start to the next one's less those of its training steps: attaching, detaching, sampling,
predicting, storing.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from qlora_sweep.search_spaces.space import SamplerName
from qlora_sweep.storage.reading import read_study
from qlora_sweep.storage.records import TrialRecord, Verdict
from qlora_sweep.sweep.paths import runs_directory, storage_url
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.sampling.samplers import quiet_optuna
from qlora_sweep.sweep.study.driver import Driver
from qlora_sweep.sweep.study.events import Event, TrialFinished
from qlora_sweep.sweep.study.tuner import tune
from qlora_sweep.sweep.terminal.board import Board
from qlora_sweep.sweep.terminal.live import watching
from tests.bench.harness import Row, asked, middle, write
from tests.storage import long_studies
from tests.sweep.simulated_device import StopsWhen, train


def of_driver(known: Sequence[TrialRecord], sampler: SamplerName, *, more: int) -> Row:
    """Return the processor's seconds to open a study, to its first trial's end, and of others."""
    quiet_optuna()
    space, ends = long_studies.a_space(sampler), []
    with tempfile.TemporaryDirectory() as directory:
        home, url = Path(directory), f"sqlite:///{directory}/sweep.db"
        long_studies.store(url, home, long_studies.a_space(), known)
        began = time.process_time()
        with long_studies.opened(url, home, space) as study, Path(os.devnull).open("w") as nowhere:
            opened = time.process_time()
            board = Board(study.name, study.definition, known, clock=time.monotonic)
            stopping = StopsWhen(lambda: len(ends) > more)
            with watching(board, is_stopping=stopping.is_requested, stream=nowhere) as show:

                def listen(event: Event) -> None:
                    show(event)
                    if isinstance(event, TrialFinished):
                        ends.append(time.process_time())

                tune(
                    Driver(
                        study,
                        runner=ReplayRunner(otherwise=train),
                        forecaster=long_studies.a_forecaster(space),
                        on_event=listen,
                        interruption=stopping,
                    )
                )
    return {
        "trials": len(known),
        "sampler": sampler,
        "open_seconds": round(opened - began, 3),
        "first_trial_seconds": round(ends[0] - opened, 3),
        "median_trial_seconds": middle([after - before for before, after in pairwise(ends)]),
        "mean_trial_seconds": round((ends[-1] - ends[0]) / (len(ends) - 1), 4),
    }


def of_study(records: Sequence[TrialRecord]) -> Row:
    """Return the seconds of a study's trials that no training step took."""
    spent = []
    for record, after in pairwise(r for r in records if r.started_at):
        measured = record.measurement
        if record.verdict is Verdict.FITS and measured is not None and after.started_at:
            began, ended = map(datetime.fromisoformat, (record.started_at, after.started_at))
            steps = measured.steps_warmup + measured.steps_measured
            spent.append((ended - began).total_seconds() - steps * measured.step_seconds)
    return {"trials": len(spent), "median_trial_seconds": middle(spent)}


def main() -> None:
    options = {"trials": "100,1000,10000", "samplers": "random,guided", "more": 20}
    typed = asked(__doc__, **options, study=str, storage=str)
    if typed.study is not None:
        found = read_study(typed.study, url=storage_url(typed.storage), home=runs_directory())
        write(of_study(found.records), typed.output)
        return
    for count in map(int, typed.trials.split(",")):
        known = list(long_studies.records(long_studies.a_space(), count))
        for sampler in typed.samplers.split(","):
            write(of_driver(known, sampler, more=typed.more), typed.output)


if __name__ == "__main__":
    main()
