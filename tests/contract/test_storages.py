"""One suite over both databases: whatever holds a study must keep these promises."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.database import close, faults, open_for_reading, open_for_writing
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.reading import list_studies, read_spooled_study, read_study
from qlora_sweep.storage.records import (
    Crashed,
    Outcome,
    OutOfMemory,
    RunKind,
    TrialRecord,
    Verdict,
)
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.storage.urls import parse_url
from qlora_sweep.sweep.sampling.encoding import Encoding
from qlora_sweep.sweep.study.carrying import carry_over
from tests.reports.synthetic import one_of_each
from tests.storage import driver, long_studies, postgres
from tests.storage.builders import (
    DISTRIBUTIONS,
    ENVIRONMENT,
    SOAKED,
    STARTED_AT,
    a_definition,
    a_record,
    agreeing,
    begun,
    fits,
    let_go_of_the_lease,
    open_it,
    read_it,
    run_one,
)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/runs/sweep.db"
    cluster: postgres.Cluster = request.getfixturevalue("cluster")
    return cluster.new_database()


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """A database for what does not depend on its kind."""
    return f"sqlite:///{tmp_path}/runs/sweep.db"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_study_gives_back_every_kind_of_record_exactly_as_told(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        told = tuple(run_one(study, record.outcome) for record in one_of_each())
        assert study.records() == told
        assert not study.was_resumed
        constraints = [trial.constraints["fit"] for trial in study.study.trials]
        with pytest.raises(AssertionError):
            study.tell(study.ask(DISTRIBUTIONS), a_record(99))
    feasible = [told[number].verdict for number, fit in enumerate(constraints) if fit <= 0]
    assert feasible == ["fits", "pruned_slow"]
    assert read_it(url, home).records == told
    with open_it(url, home) as study:
        assert study.records() == told
        assert study.was_resumed


def test_a_sampler_continues_from_the_stored_trials(url: str, home: Path) -> None:
    definition = a_definition(objectives=("tokens_per_second", "peak_memory"))
    outcomes = (fits(), OutOfMemory(stage="backward"), Crashed(phase="attach"), fits())
    for seed in range(2):
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=2)
        with open_it(url, home, definition=definition, sampler=sampler) as study:
            for outcome in outcomes:
                run_one(study, outcome)
            directions = [direction.name for direction in study.study.directions]
    assert directions == ["MAXIMIZE", "MINIMIZE"]
    assert len(read_it(url, home).records) == 2 * len(outcomes)


def test_another_driver_of_the_database_works_while_a_sampler_chooses(url: str, home: Path) -> None:
    class Slow(optuna.samplers.RandomSampler):
        """Takes so long to choose that another study gets a trial done meanwhile."""

        def sample_relative(self, *_: Any) -> dict[str, Any]:
            with open_it(url, home, name="other") as other:
                run_one(other, batch=2)
            return {"micro_batch_size": 8}

        def infer_relative_search_space(self, *_: Any) -> dict[str, Any]:
            return dict(DISTRIBUTIONS)

    with open_it(url, home, sampler=Slow()) as study:
        assert run_one(study).config.micro_batch_size == 8


def test_the_snapshot_shows_what_runs_and_names_the_driver_while_there_is_one(
    url: str, home: Path
) -> None:
    with open_it(url, home) as study:
        trial = study.ask(DISTRIBUTIONS, params={"micro_batch_size": 8})
        study.begin(trial, TrialConfig(micro_batch_size=8), STARTED_AT)
        snapshot = read_it(url, home)
    (running,) = snapshot.running
    assert (running.config, running.started_at) == (TrialConfig(micro_batch_size=8), STARTED_AT)
    assert snapshot.records == ()
    assert snapshot.holder == f"{os.uname().nodename}:{os.getpid()}"
    assert read_it(url, home).holder is None


AGAIN = RunKind(purpose="confirm", series=2, confirms=0)


def run_again(study: OpenStudy, outcome: Outcome | None = None, **changes: Any) -> TrialRecord:
    """Ask, begin and tell a run that measures trial 0 again."""
    trial = study.ask_again()
    record = a_record(trial.number, outcome, **(AGAIN.model_dump() | changes))
    return study.tell(trial, begun(study, trial, record, run_kind=AGAIN))


def test_confirmations_come_back_as_told_and_are_no_trials(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        searched = run_one(study)
        told = (
            run_again(study, fits(900.0, joules_per_token=0.04)),
            run_again(study, fits(800.0, soak=SOAKED), purpose="soak"),
            run_again(study, OutOfMemory(stage="forward", detail="in an evaluation pass: full")),
        )
        assert study.records() == (searched,)
        assert study.confirmations() == told
        assert study.study.best_trial.number == searched.number
    snapshot = read_it(url, home)
    assert (snapshot.records, snapshot.confirmations) == ((searched,), told)
    with open_it(url, home) as study:
        assert (study.records(), study.confirmations()) == ((searched,), told)


def test_a_spooled_confirmation_of_a_killed_driver_is_told(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        run_one(study)
        trial = study.ask_again()
        record = a_record(trial.number, fits(900.0), **AGAIN.model_dump())
        record = begun(study, trial, record, run_kind=AGAIN)
        (running,) = read_it(url, home).running
        assert running.purpose == "confirm"
        study.spool.append(record)
    with open_it(url, home) as study:
        assert study.recover() == ()
        assert study.confirmations() == (record,)
        assert len(study.records()) == 1


def test_a_library_that_changed_between_runs_is_a_warning(file_url: str, home: Path) -> None:
    for version in ("2.12", "2.13", "2.13"):
        environment = ENVIRONMENT | {"versions": {"torch": version}}
        open_it(file_url, home, environment=environment).close()
    snapshot = read_it(file_url, home)
    assert snapshot.environment["versions"] == {"torch": "2.13"}
    (warning,) = snapshot.warnings
    assert "torch 2.12 -> 2.13" in warning


def test_another_definition_is_refused_with_every_difference(file_url: str, home: Path) -> None:
    open_it(file_url, home).close()
    wider = {"micro_batch_size": [1, 2]}
    other = a_definition(fingerprint="beef", gpu="l4", dimensions=wider, fixed={"lora_rank": 8})
    with pytest.raises(InputError, match="--study") as caught:
        open_it(file_url, home, definition=other)
    text = str(caught.value)
    for difference in ('target.gpu: "a10" -> "l4"', "fixed.lora_rank: 16 -> 8", "beef"):
        assert difference in text
    assert "dimensions.micro_batch_size: " in text
    assert len(text.splitlines()) == 6


def test_what_only_steers_the_search_may_change_and_other_steps_are_said(
    file_url: str, home: Path
) -> None:
    url = file_url
    said: list[str] = []
    open_it(url, home, warn=said.append).close()
    assert said == []
    steered = a_definition(
        trials=7,
        time_budget_seconds=60.0,
        sampler="gp",
        seed=3,
        confirm={"soak_seconds": 600},
        steps={"measured_max": 50},
        name="b",
    )
    with open_it(url, home, definition=steered, warn=said.append) as study:
        assert study.was_resumed
    assert read_it(url, home).definition == steered
    (line,) = said
    assert re.search(r"other steps \(measured_max: \d+ -> 50\)", line)


def test_the_seconds_of_the_clock_and_of_the_gpus_add_up(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        study.gpus = 2
        study.add_wall_seconds(1.5)
        assert study.known.wall_seconds == 1.5
        assert study.known.gpu_seconds == 3.0
    with open_it(url, home) as study:
        study.add_wall_seconds(2.0)
        study.add_wall_seconds(0.5)
    assert read_it(url, home).wall_seconds == 4.0


def test_a_driver_that_another_took_over_from_writes_nothing_more(url: str, home: Path) -> None:
    with open_it(url, home) as study:
        study.ask(DISTRIBUTIONS)
        let_go_of_the_lease(study)
        with open_it(url, home) as other:
            other.recover()
            trial = other.ask(DISTRIBUTIONS)
            record = begun(other, trial, a_record(trial.number))
        for write in (
            study.abandon,
            lambda: study.ask(DISTRIBUTIONS),
            lambda: study.note(ended={"reason": "exhausted"}),
            lambda: study.add_wall_seconds(1.0),
        ):
            with pytest.raises(EnvironmentFault, match="no longer driven from here"):
                write()
    snapshot = read_it(url, home)
    assert [trial.attempt_id for trial in snapshot.running] == [record.attempt_id]
    assert (snapshot.ended, snapshot.wall_seconds) == (None, 0.0)


def test_a_directory_that_everybody_may_write_to_is_refused(file_url: str, home: Path) -> None:
    open_it(file_url, home).close()
    (home / "study").chmod(0o777)
    with pytest.raises(EnvironmentFault, match="chmod o-w"):
        open_it(file_url, home)
    (home / "study").chmod(0o775)
    open_it(file_url, home).close()


def test_a_study_that_is_not_ours_is_refused_and_ours_are_listed_with_their_trials(
    url: str, home: Path
) -> None:
    with open_it(url, home, name="fast") as study:
        told = run_one(study, fits(100.0), batch=1), run_one(study, fits(200.0), batch=2)
        storage = study.study._storage
        other = optuna.create_study(storage=storage, study_name="theirs", direction="maximize")
        other.add_trial(optuna.trial.create_trial(value=1.0))
        with pytest.raises(InputError, match="not one of sweep's"):
            open_it(url, home, name="theirs")
    open_it(url, home, name="empty").close()
    listed = [s for s in list_studies(url, home) if isinstance(s, StudySnapshot)]
    assert [(s.name, s.records) for s in listed] == [("fast", told), ("empty", ())]
    with pytest.raises(InputError, match="did you mean 'fast'"):
        read_study("fasd", url=url, home=home)


def test_before_the_first_run_there_is_nothing_to_read_and_a_bad_name_starts_nothing(
    url: str, home: Path
) -> None:
    for read in (lambda: read_it(url, home), lambda: list_studies(url, home)):
        with pytest.raises(InputError, match="run `sweep run` first"):
            read()
    for name in ("../x", "", ".hidden", "a/b", "a b", "x" * 101):
        with pytest.raises(InputError, match="study name"):
            open_it(url, home, name=name)
    assert not home.exists()


def test_a_second_driver_is_refused_and_told_who_has_the_study(url: str, home: Path) -> None:
    first = driver.start(url, home, moment="wait", trials=0)
    first.wait_for("opened")
    with pytest.raises(EnvironmentFault, match=rf"{os.uname().nodename}:{first.pid} since 20"):
        open_it(url, home)
    open_it(url, home, name="another").close()
    first.kill()
    open_it(url, home).close()


def test_drivers_that_start_at_once_in_a_new_database_all_work(url: str, home: Path) -> None:
    drivers = [driver.start(url, home, study=f"study-{i}") for i in range(3)]
    for one in drivers:
        said, _ = one.end()
        assert [line.split()[0] for line in said].count("told") == 1, said
    listed = {s.name: len(s.records) for s in list_studies(url, home)}  # type: ignore[union-attr]
    assert listed == {f"study-{i}": 1 for i in range(3)}


@pytest.mark.parametrize(
    ("url", "moment"),
    [
        *(("sqlite", moment) for moment in driver.MOMENTS),
        # What is done for a dead driver's trial is the same in both.
        ("postgresql", "begun"),
        ("postgresql", "telling"),
    ],
    indirect=["url"],
)
def test_a_killed_driver_loses_no_finished_trial_and_its_last_one_is_retried(
    url: str, home: Path, moment: str
) -> None:
    said, code = driver.start(url, home, moment=moment).end()
    assert code == -signal.SIGKILL, said
    with open_it(url, home) as study:
        retried = study.recover()
        records = study.records()
        states = {trial.state for trial in study.study.get_trials()}
        assert study.recover() == retried
        params = {"micro_batch_size": 1}
        assert study.ask(DISTRIBUTIONS, params=params).params == params
    assert states <= {TrialState.COMPLETE, TrialState.FAIL}
    if moment in ("queued", "asked"):
        assert (records, retried) == ((), ())
    elif moment == "begun":
        assert [(r.number, r.verdict) for r in records] == [(0, Verdict.LOST)]
        assert retried == (records[0].config,)
    else:
        (record,) = records
        assert (record.number, record.outcome) == (0, agreeing(fits(1000.0), record.config))
        assert retried == ()


def close_from_outside(url: str, number: int) -> None:
    """Fail a trial as somebody does who looks into the database with Optuna."""
    storage = open_for_writing(parse_url(url))
    optuna.load_study(study_name="study", storage=storage).tell(number, state=TrialState.FAIL)
    close(storage)


def test_a_result_whose_trial_somebody_closed_is_kept_and_taken_over_once(
    url: str, home: Path
) -> None:
    said: list[str] = []
    with open_it(url, home, warn=said.append) as study:
        trial = study.ask(DISTRIBUTIONS, params={"micro_batch_size": 8})
        record = begun(study, trial, a_record(trial.number, batch=8))
        close_from_outside(url, trial.number)
        assert study.tell(trial, record).verdict is Verdict.LOST
        assert study.ledger.to_retry() == ()
        assert study.ledger.trials_spent() == 1
    assert f"--from {home}/study/spool.jsonl" in said[0]
    assert said == list(read_it(url, home).warnings)
    source = read_spooled_study(home / "study" / "spool.jsonl")
    for taken in (1, 0):
        with open_it(url, home) as study:
            assert carry_over(study, source, is_valid=lambda _: True) == taken
            assert study.recover() == ()
            (stored,) = study.records()
    assert (stored.number, stored.outcome, stored.config) == (1, record.outcome, record.config)
    assert (stored.attempt_id, stored.device_seconds) == (record.attempt_id, 0.0)
    assert read_it(url, home).warnings == ()


def test_a_study_that_was_deleted_while_driven_is_a_fault_and_its_result_is_safe(
    url: str, home: Path
) -> None:
    with open_it(url, home) as study:
        trial = study.ask(DISTRIBUTIONS)
        record = begun(study, trial, a_record(trial.number))
        storage = open_for_writing(parse_url(url))
        optuna.delete_study(study_name="study", storage=storage)
        close(storage)
        with pytest.raises(EnvironmentFault, match=r"deleted.*spool\.jsonl"):
            study.tell(trial, record)
        assert study.spool.read().records == (record,)
    with pytest.raises(InputError, match=r"--from .*spool\.jsonl"):
        open_it(url, home)
    assert list_studies(url, home) == []
    source = read_spooled_study(home / "study" / "spool.jsonl")
    with open_it(url, home, name="another") as study:
        assert carry_over(study, source, is_valid=lambda _: True) == 1
        assert study.records()[0].outcome == record.outcome


def test_a_study_can_be_read_over_and_over_while_it_is_driven(url: str, home: Path) -> None:
    process = driver.start(url, home, trials=10)
    process.wait_for("opened")
    seen = []
    while process.is_running():
        snapshot = read_it(url, home)
        seen.append(len(snapshot.records))
        assert [record.number for record in snapshot.records] == list(range(seen[-1]))
        assert len(snapshot.running) <= 1
    assert sum(line.startswith("told") for line in process.end()[0]) == 10
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


@pytest.mark.parametrize(
    "url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)], indirect=True
)
def test_a_trial_takes_as_many_statements_and_rows_late_in_a_study_as_early(
    url: str, home: Path
) -> None:
    space = long_studies.a_space("random")
    known = list(long_studies.records(space, 120))
    taken = []
    for count in (30, 120):
        name = f"of-{count}"
        long_studies.store(url, home, space, known[:count], name=name)
        taken.append(statements_of_a_trial(url, home, space, name))
    assert taken[0] == taken[1]
    statements, rows, commits = taken[0]
    assert 0 < commits <= 8
    assert statements < 200
    assert rows < 200


def statements_of_a_trial(
    url: str, home: Path, space: SearchSpace, name: str
) -> tuple[int, int, int]:
    """Return the statements, rows read and transactions of one more trial, ask to ask."""
    encoding = Encoding(space)
    counted: Counter[str] = Counter()

    def executed(_: object, cursor: Any, statement: str, values: Any, *__: object) -> None:
        counted["statements"] += 1
        if statement.startswith("SELECT"):
            count = f"SELECT count(*) FROM ({statement}) AS t"
            counted["rows"] += cursor.connection.execute(count, values).fetchone()[0]

    def committed(_: object) -> None:
        counted["commits"] += 1

    with long_studies.opened(url, home, space, name=name) as study:
        engine = study._storage.engine
        sqlalchemy.event.listen(engine, "before_cursor_execute", executed)
        sqlalchemy.event.listen(engine, "commit", committed)
        # The first teaches the sampler all there is.
        for _ in range(2):
            counted.clear()
            trial = study.ask(encoding.distributions)
            config = encoding.config(trial.params)
            outcome = agreeing(fits(1e6), config)
            record = TrialRecord(number=trial.number, config=config, outcome=outcome)
            study.tell(trial, begun(study, trial, record))
            study.add_wall_seconds(1.0)
    return counted["statements"], counted["rows"], counted["commits"]


def test_a_reader_cannot_write(url: str, home: Path) -> None:
    open_it(url, home).close()
    parsed = parse_url(url)
    storage = open_for_reading(parsed)
    with pytest.raises(EnvironmentFault, match=r"read-?only"), faults(parsed):
        storage.set_study_user_attr(1, "x", 1)
    close(storage)


# What only PostgreSQL can suffer.


@pytest.fixture
def postgres_url(cluster: postgres.Cluster) -> str:
    return cluster.new_database()


TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND datname IS NOT NULL"
)


def test_dropped_connections_are_opened_again(
    cluster: postgres.Cluster, postgres_url: str, home: Path
) -> None:
    with open_it(postgres_url, home) as study:
        run_one(study)
        cluster.execute(TERMINATE)
        run_one(study)
        trial = study.ask(DISTRIBUTIONS)
        cluster.execute(TERMINATE)
        study.tell(trial, a_record(trial.number))
        assert len(read_it(postgres_url, home).records) == 3
        with pytest.raises(EnvironmentFault, match="is driven by"):
            open_it(postgres_url, home)


def test_a_driver_that_lost_its_lease_to_another_keeps_its_result_in_the_spool(
    cluster: postgres.Cluster, postgres_url: str, home: Path
) -> None:
    with open_it(postgres_url, home) as study:
        trial = study.ask(DISTRIBUTIONS)
        record = begun(study, trial, a_record(trial.number))
        cluster.execute(TERMINATE)
        with open_it(postgres_url, home) as other:
            with pytest.raises(EnvironmentFault, match=r"is driven by .*spool.jsonl"):
                study.tell(trial, record)
            assert other.records() == ()
    with open_it(postgres_url, home) as study:
        study.recover()
        assert study.records() == (record,)


def test_a_password_is_never_shown_and_never_stored(
    cluster: postgres.Cluster, postgres_url: str, home: Path
) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        open_it(cluster.url("nowhere"), home)
    shown = "".join(traceback.format_exception(caught.value))
    assert "://sweep:***@127.0.0.1" in shown
    assert postgres.PASSWORD not in shown
    with open_it(postgres_url, home) as study:
        run_one(study)
        stored = repr(study.study.user_attrs) + repr(study.study.trials)
    files = "".join(path.read_text() for path in home.rglob("*") if path.is_file())
    assert postgres.PASSWORD not in stored + files
