"""What another process, machine or file says of a trial: what cannot be is left out and said, the
sound trials beside it stay, and nothing of it wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from qlora_sweep.reports.document import document_of
from qlora_sweep.reports.page import render
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.directory import SPOOL
from qlora_sweep.storage.ranking import rank_study
from qlora_sweep.storage.reading import read_spooled_study
from qlora_sweep.storage.records import Measured, Outcome, Verdict
from qlora_sweep.storage.soundness import Soundness
from qlora_sweep.sweep.running.wire import (
    Finished,
    UnreadableError,
    read_line,
    worker_message_adapter,
)
from qlora_sweep.sweep.study.carrying import take_over
from tests.storage.builders import (
    a_definition,
    changed,
    open_it,
    read_it,
)
from tests.storage.mutants import SPEED, mutants, sound

MISTRAL = load_model_spec("mistral-7b-v0.3")
DEFINITION = changed(a_definition(), model=MISTRAL.to_json())
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
            assert name not in IMPOSSIBLE
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
    stored = read_it(url, home)
    assert stored.running == ()
    batches = [record.config.micro_batch_size for record in stored.records]
    assert {4, 8} <= set(batches)
    assert len(batches) == len(set(batches))
    assert_never_wins(stored)
    render(stored)
    words = "\n".join(said)
    assert "cannot be read" in words
    assert "left out of the spool" in words
