"""What a trial's peak is made of is handed to a report where it was traced before, and else not."""

from __future__ import annotations

from pathlib import Path

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from storage.definition import StudySnapshot
from sweep.planning.memory_parts import KeptParts, with_memory_parts
from tests.reports.synthetic import definition, fits, snapshot
from tests.sweep.imagined_memory import ImaginedPredictor


def _study(**target: str) -> StudySnapshot:
    return snapshot([fits(0, 9_000.0)], definition=definition(**target))


def test_a_structure_that_was_never_traced_is_not_traced_for_a_report(tmp_path: Path) -> None:
    study = with_memory_parts(_study(), cache_dir=tmp_path)
    assert study.memory_parts.get(0) is None
    assert list(study.memory_parts) == []
    assert not any(tmp_path.iterdir())


def test_nothing_is_predicted_of_a_study_on_the_cpu(tmp_path: Path) -> None:
    study = _study(device="cpu")
    assert with_memory_parts(study, cache_dir=tmp_path) is study


def test_each_trial_is_predicted_once_and_only_when_it_is_looked_at() -> None:
    predictor = ImaginedPredictor()
    configs = {0: TrialConfig(), 1: TrialConfig(micro_batch_size=8)}
    parts = KeptParts(configs, predictor=predictor)
    assert parts[1] == parts[1]
    assert parts[1]["activations"] > 0
    assert predictor.asked == [configs[1]]
    assert list(parts) == [0, 1]


def test_what_cannot_be_predicted_is_not_in_it() -> None:
    parts = KeptParts({0: TrialConfig()}, predictor=ImaginedPredictor(fault=InputError("no")))
    assert 0 not in parts
    assert len(parts) == 0
