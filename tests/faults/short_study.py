"""The short study that everything is injected into, and what must hold of it afterwards.

It is a real one, driven as `sweep run` drives it: search, confirmation and soak on SQLite. Only the
worker is simulated: it leaves its measurement on disk and answers. A journal beside it says what
was run, measured and told, and so what may never be lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.loading import parse_space
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.database import close, open_for_reading
from qlora_sweep.storage.definition import StudyDefinition
from qlora_sweep.storage.directory import OUTCOME, OutcomeFile
from qlora_sweep.storage.lease import holders
from qlora_sweep.storage.reading import read_study
from qlora_sweep.storage.records import RETRYABLE, Attempt, Lost, Measured, Outcome, TrialRecord
from qlora_sweep.storage.urls import parse_url
from qlora_sweep.sweep.paths import worker_log_path
from qlora_sweep.sweep.running.child import LOG_BYTES_MAX
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.runner import Observer, Runner, keep_going
from qlora_sweep.sweep.running.supervisor import Deadlines, SupervisedRunner
from qlora_sweep.sweep.running.wire import TrialRequest
from qlora_sweep.sweep.study import session
from qlora_sweep.sweep.study.events import Event, StopReason, TrialFinished
from qlora_sweep.sweep.study.prepared import Prepared
from qlora_sweep.sweep.study.session import drive
from qlora_sweep.sweep.study.targets import resolve_target
from qlora_sweep.sweep.terminal.edge import guarded
from tests.faults.kinds import INTERRUPTED, Fault
from tests.faults.obedient_worker import UNIT, measurement

NAME = "study"
_SPACE = """
name: study
gpu: cpu
model: demo
budget_gib: 0.0625
sampler: grid
trials: 10
steps: {warmup_min: 1, warmup_max: 1, measured_min: 6, measured_max: 6}
confirm: {confirm}
dimensions:
  micro_batch_size: [1, 2]
baseline: {micro_batch_size: 2}
"""
_CONFIRM = "{seconds: 1, repeats: 2, soak_seconds: 1, soak_steps: 10}"
BATCHES = (1, 2)
ROOT = Path(__file__).parents[2]
_QUICK = Deadlines(start=20.0, build=2.0, attach=2.0, warmup=2.0, measure=2.0, detach=2.0)
"""A worker says everything at once, if it says anything."""


@dataclass(frozen=True)
class Place:
    """Where a study and its journal are."""

    directory: Path
    confirms: bool = True
    """Whether the study ends with its confirmation, as most do."""
    server: str | None = None
    """URL of a database; by default a file of SQLite below the studies' directory."""

    @property
    def home(self) -> Path:
        """What `SWEEP_HOME` is set to."""
        return self.directory / "home"

    @property
    def runs(self) -> Path:
        return self.home / "runs"

    @property
    def url(self) -> str:
        return self.server or f"sqlite:///{self.runs / 'sweep.db'}"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def say(self, *words: object) -> None:
        """Add a line, whatever is injected into what the study writes."""
        descriptor = _OPEN(self.journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        _WRITE(descriptor, (" ".join(map(str, words)) + "\n").encode())
        _CLOSE(descriptor)

    def said(self, word: str) -> list[list[str]]:
        """Return the journal's lines of one kind, without the word."""
        if not self.journal.exists():
            return []
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        return [words[1:] for words in lines if words[0] == word]


_OPEN, _WRITE, _CLOSE = os.open, os.write, os.close
"""As they are before anything is replaced."""


@cache
def prepared(*, confirms: bool = True) -> Prepared:
    text = _SPACE.replace("{confirm}", _CONFIRM if confirms else "false")
    space = parse_space(text, label="the study of the faults")
    model, resolved = load_model_spec(space.model), resolve_target(space, None)
    definition = StudyDefinition(
        space=space,
        model=model.to_json(),
        model_fingerprint=model.fingerprint,
        target=resolved.target,
    )
    return Prepared(name=NAME, definition=definition, model=model, resolved=resolved, gpu=None)


def measured(config: TrialConfig, run: int) -> Measured:
    """Return what the simulated worker measures in its n-th run over all drivers."""
    known = measurement(config.micro_batch_size, config.seq_len, run)
    return Measured.model_validate({"measurement": known})


def run_of(record: TrialRecord) -> int | None:
    """Return which run of the worker a record holds; None where it holds none."""
    if not isinstance(record.outcome, Measured):
        return None
    first = measurement(record.config.micro_batch_size, record.config.seq_len, 0)
    found = record.outcome.measurement.tokens_per_second / first["tokens_per_second"]
    return round((found - 1) / UNIT)


class JournalingRunner(ReplayRunner):
    """Runs configurations as a worker does, and keeps a journal of it."""

    def __init__(self, place: Place, beat: Any) -> None:
        super().__init__(otherwise=self._answer, pause=lambda: beat(lambda: None))
        self._place = place
        self._run = 0

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        config = request.config
        self._run = len(self._place.said("ran")) + 1
        self._place.say("ran", self._run, config.micro_batch_size)
        outcome = super().run(request, observe=observe)
        if isinstance(outcome, Measured):
            self._place.say("leaves", self._run)
            leave(self._place, request.attempt, config, outcome)
            self._place.say("measured", self._run)
        return outcome

    def _answer(self, config: TrialConfig) -> Outcome:
        return measured(config, self._run)


def supervised(place: Place, fault: Fault) -> Runner:
    """Return the real runner, with a worker that measures at once and meets a fault."""
    os.environ["PYTHONPATH"] = str(ROOT)
    place.say("driver")
    (place.directory / "fault").write_text(json.dumps({"kind": fault.kind, "n": fault.n}))
    what = prepared(confirms=place.confirms)
    return SupervisedRunner(
        what.model,
        target=what.target,
        log_path=worker_log_path(NAME),
        deadlines=_QUICK,
        module="tests.faults.obedient_worker",
    )


def leave(place: Place, attempt: Attempt | None, config: TrialConfig, outcome: Outcome) -> None:
    """Leave a measurement on disk, as the worker does before it answers, come what may of that."""
    assert attempt is not None
    with contextlib.suppress(EnvironmentFault):
        OutcomeFile(place.runs / NAME / OUTCOME).write(attempt, config, outcome)


def run(place: Place, *, beat: Any = lambda do: do(), worker: Fault | None = None) -> StopReason:
    """Start or resume the study and drive it to its end.

    Args:
        place: where it is.
        beat: called between two signs of life of a trial.
        worker: what befalls the worker, which is a process then.
    """
    os.environ["SWEEP_HOME"] = str(place.home)
    session.fingerprint = lambda **_: {"gpu": None, "versions": {}}  # type: ignore[assignment]

    def runner(_: Prepared) -> Runner:
        return JournalingRunner(place, beat) if worker is None else supervised(place, worker)

    def listen(event: Event) -> None:
        """Write down what is said to be stored."""
        if isinstance(event, TrialFinished):
            record = event.record
            place.say("told", record.number, record.purpose, run_of(record))

    return drive(
        prepared(confirms=place.confirms),
        storage=place.url,
        watch=lambda *_: nullcontext(listen),
        warn=lambda _: None,
        new_runner=runner,
    )


def stored(place: Place) -> list[TrialRecord]:
    """Return every record, of search and confirmation, by number."""
    snapshot = read_study(NAME, url=place.url, home=place.runs)
    return sorted((*snapshot.records, *snapshot.confirmations), key=lambda r: r.number)


def broken_at_once(place: Place) -> Iterator[str]:
    """Yield what is wrong before anybody resumed: what was told is there, and can be read."""
    told = place.said("told")
    if not told:
        return
    runs = {record.number: run_of(record) for record in stored(place)}
    for number, _, run in told:
        if str(runs.get(int(number))) != run:
            yield f"trial {number} was told with run {run}, storage has {runs.get(int(number))}"


def broken(place: Place) -> Iterator[str]:
    """Yield what is wrong once the study was resumed without a fault."""
    records = stored(place)
    yield from broken_at_once(place)
    yield from _lost_or_doubled(place, records)
    yield from _wrong_set(records, confirms=place.confirms)
    yield from _wrong_attempts(records)
    yield from _left_open(place)
    yield from _left_behind(place)


def _lost_or_doubled(place: Place, records: list[TrialRecord]) -> Iterator[str]:
    kept = Counter(run for record in records if (run := run_of(record)) is not None)
    known = {int(run) for (run,) in place.said("measured")}
    left = {int(run) for (run,) in place.said("leaves")}
    for run in sorted(known - kept.keys()):
        yield f"run {run} was measured and is nowhere"
    for run, times in kept.items():
        if times > 1:
            yield f"run {run} is stored {times} times"
        if run not in left:
            yield f"run {run} is stored and was never measured"


def _wrong_set(records: list[TrialRecord], *, confirms: bool) -> Iterator[str]:
    """Say where other things concluded than in a study that nothing befell."""
    concluded = Counter(
        (str(r.purpose), r.config.micro_batch_size) for r in records if r.verdict not in RETRYABLE
    )
    wanted = {("search", batch): 1 for batch in BATCHES}
    if confirms:
        wanted |= {("confirm", batch): 2 for batch in BATCHES} | {("soak", min(BATCHES)): 1}
    if concluded != wanted:
        yield f"concluded {sorted(concluded.items())}, wanted {sorted(wanted.items())}"


def _wrong_attempts(records: list[TrialRecord]) -> Iterator[str]:
    tried: Counter[tuple[object, ...]] = Counter()
    for record in records:
        what = record.purpose, record.series, record.config.micro_batch_size
        if record.attempt != tried[what] + 1:
            yield f"trial {record.number} says attempt {record.attempt}, is {tried[what] + 1}"
        tried[what] += record.verdict in RETRYABLE and not _was_interrupted(record)


def _was_interrupted(record: TrialRecord) -> bool:
    return isinstance(record.outcome, Lost) and record.outcome.is_interrupted


def _left_open(place: Place) -> Iterator[str]:
    storage = open_for_reading(parse_url(place.url))
    assert storage is not None
    trials = storage.get_all_trials(storage.get_study_id_from_name(NAME), deepcopy=False)
    holder = holders(storage.engine, parse_url(place.url), [NAME]).get(NAME)
    close(storage)
    for trial in trials:
        if trial.state in (TrialState.RUNNING, TrialState.WAITING):
            yield f"trial {trial.number} is {trial.state.name}"
    if holder is not None:
        yield f"the lease is held by {holder}"


_FILES = {
    "sweep.db",
    f"sweep.db.{NAME}.lock",
    NAME,
    f"{NAME}/spool.jsonl",
    f"{NAME}/study.json",
    f"{NAME}/{OUTCOME}",
    f"{NAME}/worker.log",
    f"{NAME}/worker.log.1",
}


def _left_behind(place: Place) -> Iterator[str]:
    there = {str(path.relative_to(place.runs)) for path in place.runs.rglob("*")}
    for name in sorted(there - _FILES):
        yield f"{name} was left behind"
    for log in (place.runs / NAME).glob("worker.log*"):
        if log.stat().st_size > LOG_BYTES_MAX:
            yield f"{log.name} has {log.stat().st_size} bytes"
    with contextlib.suppress(FileNotFoundError):
        if b"Traceback" in (place.directory / "output").read_bytes():
            yield "a traceback was shown"


def main(directory: str, server: str, beat_seconds: float) -> int:
    """Drive the study as a program; its trials take so long between two signs of life."""

    def beat(_: object) -> None:
        place.say("beat")
        time.sleep(beat_seconds)

    place = Place(Path(directory), server=server or None)
    return guarded(lambda: int(run(place, beat=beat) == StopReason.INTERRUPTED) and INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
