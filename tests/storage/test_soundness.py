"""What another process, machine or file says of a trial: what cannot be is left out and said, the
sound trials beside it stay, and nothing of it wins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter

from qlora_sweep.reports.document import document_of
from qlora_sweep.reports.page import render
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage import codec
from qlora_sweep.storage.definition import StudySnapshot, UnreadableStudy
from qlora_sweep.storage.directory import SPOOL
from qlora_sweep.storage.ranking import rank_study
from qlora_sweep.storage.reading import read_spooled_study, read_study
from qlora_sweep.storage.records import Measured, Outcome, TrialRecord, Verdict
from qlora_sweep.storage.soundness import Soundness
from qlora_sweep.sweep.running.wire import (
    Finished,
    UnreadableError,
    read_line,
    worker_message_adapter,
)
from qlora_sweep.sweep.study.carrying import take_over
from tests.storage.builders import (
    DISTRIBUTIONS,
    a_definition,
    begun,
    fits,
    open_it,
    run_one,
)
from tests.storage.mutants import SPEED, mutants, sound

MISTRAL = load_model_spec("mistral-7b-v0.3")
DEFINITION = a_definition().model_copy(update={"model": MISTRAL.to_json()})
SOUNDNESS = Soundness.of(DEFINITION)
NEIGHBOURS = (sound(0, 4), sound(1, 8))
MUTANTS = mutants(sound(2, 1))
IMPOSSIBLE = (
    "outcome.measurement.tokens_per_second nan",
    "outcome.measurement.tokens_per_second 1e17",
    "outcome.measurement.step_seconds negative",
    "outcome.measurement.peak_allocated_bytes zero",
    "outcome.measurement.peak_allocated_bytes 1e17",
    "outcome.measurement.steps_measured zero",
    "outcome.measurement.trainable_parameters 1e17",
    "outcome.measurement.final_loss inf",
    "outcome.measurement.quality.eval_loss zero",
    "outcome.measurement consistent and impossible",
    "outcome absent",
    "device_seconds negative",
    "wall_seconds nan",
    "started_at text",
)
"""Some of the mutants that no boundary may let through."""


def assert_never_wins(snapshot: StudySnapshot) -> None:
    """Assert that every view of a study stands, and that no speed above the sound ones is in it."""
    view = view_of(snapshot)
    view.document()
    document_of(view)
    ranked = rank_study(snapshot).ranked
    assert ranked
    assert all(r.measurement.tokens_per_second <= SPEED for r in ranked if r.measurement)


def snapshot_of(*records: TrialRecord) -> StudySnapshot:
    return StudySnapshot(name="study", definition=DEFINITION, environment={}, records=records)


def test_no_unsound_message_of_a_worker_wins() -> None:
    outcomes: TypeAdapter[Outcome] = TypeAdapter(Outcome)
    let_through = 0
    for name, mutant in MUTANTS.items():
        if not name.startswith("outcome") or "outcome" not in mutant:
            continue
        config = sound(2, 1).config
        line = {"kind": "finished", "run_id": "1", "config": config.model_dump(mode="json")}
        try:
            message = read_line(
                json.dumps(line | {"outcome": mutant["outcome"]}).encode(), worker_message_adapter
            )
        except UnreadableError:
            continue
        assert isinstance(message, Finished)
        counted = SOUNDNESS.counted(config, message.outcome)
        if isinstance(counted, Measured):
            let_through += 1
            assert counted.measurement.tokens_per_second == SPEED, name
        else:
            assert counted.verdict in (Verdict.CRASHED, Verdict.OOM, Verdict.PRUNED_SLOW), name
        assert outcomes.validate_python(counted.model_dump()) == counted
    assert let_through > 20


def test_an_outcome_that_was_never_validated_is_a_failure() -> None:
    """As of a runner in this process, or an object that was pickled on another machine."""
    for told in (None, [], {"verdict": "fits"}):
        assert SOUNDNESS.counted(TrialConfig(), told).verdict is Verdict.CRASHED
    record = sound(0, 4)
    assert record.measurement is not None
    for key in ("tokens_per_second", "step_seconds", "peak_allocated_bytes", "final_loss"):
        for wrong in (float("nan"), float("inf"), -1, "many", None):
            measured = record.measurement.model_copy(update={key: wrong})
            told = Measured.model_construct(measurement=measured)
            counted = SOUNDNESS.counted(record.config, told)
            assert counted.verdict is Verdict.CRASHED, (key, wrong)


@pytest.fixture(scope="module")
def spooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool with each mutant between sound trials."""
    home = tmp_path_factory.mktemp("spooled")
    with open_it(f"sqlite:///{home}/sweep.db", home, name="source", definition=DEFINITION) as study:
        identity = study.known.identity
    lines = [NEIGHBOURS[0].model_dump(mode="json"), *MUTANTS.values()]
    lines.append(NEIGHBOURS[1].model_dump(mode="json"))
    path = home / "source" / SPOOL
    path.write_text(
        "".join(json.dumps({"study": identity, "record": line}) + "\n" for line in lines)
    )
    return path


def test_the_sound_trials_of_a_spool_are_taken_over_and_the_others_are_named(
    spooled: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    url = f"sqlite:///{tmp_path}/sweep.db"
    home = tmp_path / "runs"
    source = read_spooled_study(spooled)
    assert all(SOUNDNESS.fault_of_record(record) is None for record in source.records)
    for _ in range(2):
        with open_it(url, home, definition=DEFINITION) as study:
            take_over(study, source, is_valid=lambda _: True, warn=said.append)
            study.recover()
    stored = read_study("study", url=url, home=home)
    assert stored.running == ()
    batches = [record.config.micro_batch_size for record in stored.records]
    assert {4, 8} <= set(batches)
    assert len(batches) == len(set(batches))
    assert_never_wins(stored)
    render(stored)
    words = "\n".join(said)
    assert "cannot be read" in words
    assert "left out of the spool" in words


def stored_trials(*records: dict[str, Any]) -> Iterator[FrozenTrial]:
    for number, values in enumerate(records):
        trial = optuna.trial.create_trial(
            state=TrialState.COMPLETE,
            value=1.0,
            user_attrs={codec.RECORD: values | {"number": number}, codec.VERDICT: "fits"},
        )
        trial.number = number
        yield trial


def stored_study(*records: dict[str, Any]) -> codec.StoredStudy | UnreadableStudy:
    attributes = {
        "definition": DEFINITION.model_dump(mode="json"),
        "identity": "one",
        "driver": "one",
        "format": codec.FORMAT_WRITTEN,
        "runs": [],
    }
    return codec.read_stored("study", attributes, list(stored_trials(*records)))


def test_a_stored_study_opens_without_its_unsound_trials() -> None:
    beside = [record.model_dump(mode="json") for record in NEIGHBOURS]
    for name, mutant in MUTANTS.items():
        stored = stored_study(beside[0], mutant, beside[1])
        assert isinstance(stored, codec.StoredStudy), name
        assert [r.number for r in stored.records if r.number != 1] == [0, 2], name
        if len(stored.records) > 2:
            assert name not in IMPOSSIBLE
            assert_never_wins(snapshot_of(*stored.records))
        else:
            assert list(stored.left_out) == [1], name
    assert_never_wins(snapshot_of(*stored.records))


def test_an_unsound_stored_trial_is_named_hidden_from_samplers_and_run_again(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    home = tmp_path / "runs"
    with open_it(url, home) as study:
        for batch in (1, 2):
            run_one(study, fits(100.0), batch=batch)
        # As an earlier version would have stored it.
        trial = study.ask(DISTRIBUTIONS, params={"micro_batch_size": 4})
        record = begun(study, trial, sound(trial.number, 4))
        assert record.measurement is not None
        broken = record.measurement.model_copy(update={"peak_allocated_bytes": -1})
        outcome = Measured.model_construct(verdict=Verdict.FITS, measurement=broken)
        study.tell(trial, record.model_copy(update={"outcome": outcome}))
        damaged = study.ask(DISTRIBUTIONS, params={"micro_batch_size": 8})
        begun(study, damaged, sound(damaged.number, 8))
        damaged.set_user_attr(codec.RECORD, {"number": -1})
    stored = read_study("study", url=url, home=home)
    assert [record.number for record in stored.records] == [0, 1]
    assert any("trial 2" in words and "left out" in words for words in stored.warnings)
    said: list[str] = []
    with open_it(url, home, warn=said.append) as study:
        study.recover()
        assert any("trial 2" in words for words in said)
        states = [trial.state for trial in study.study.get_trials()]
        assert states == [TrialState.COMPLETE] * 2 + [TrialState.FAIL] * 2
        assert TrialConfig(micro_batch_size=4) not in study.ledger
        run_one(study, fits(200.0), batch=4)
    again = read_study("study", url=url, home=home)
    assert [record.number for record in again.records] == [0, 1, 4]
    assert again.running == ()
