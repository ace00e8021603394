"""What a configuration would need is handed to a report where it was traced before, else not."""

from __future__ import annotations

from pathlib import Path

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GIB
from storage.definition import StudySnapshot
from sweep.planning.evidence import KeptForecasts, with_memory_forecasts
from sweep.predict.forecast import Forecaster
from tests.reports.synthetic import definition, fits, snapshot
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.imagined_study import MISTRAL


def _forecaster(predictor: ImaginedPredictor, budget_bytes: int) -> Forecaster:
    about = {"model": MISTRAL, "budget_bytes": budget_bytes, "violation": lambda _: None}
    return Forecaster(**about, predictor=predictor, warn=lambda _: None)


def _study(**target: str) -> StudySnapshot:
    return snapshot([fits(0, 9_000.0)], definition=definition(**target))


def test_a_structure_that_was_never_traced_is_not_traced_for_a_report(tmp_path: Path) -> None:
    study = with_memory_forecasts(_study(), cache_dir=tmp_path)
    assert study.memory_forecasts.get(study.records[0].config) is None
    assert list(study.memory_forecasts) == []
    assert not any(tmp_path.iterdir())
    on_cpu = _study(device="cpu")
    assert with_memory_forecasts(on_cpu, cache_dir=tmp_path) is on_cpu


def test_each_configuration_is_predicted_once_and_only_when_it_is_asked_for() -> None:
    predictor = ImaginedPredictor()
    small, large = TrialConfig(), TrialConfig(micro_batch_size=64, seq_len=2048)
    known = KeptForecasts([small], _forecaster(predictor, 20 * GIB))
    assert known[large] == known[large]
    assert known[large].fits == "no"
    assert predictor.asked.count(large) == 1
    assert list(known) == [small]
    assert known[small].fits == "yes"
    assert sum(known[small].parts.values()) == known[small].peak_allocated_bytes
    assert predictor.asked.count(small) == 1
    # What cannot be predicted is not in it.
    fault = ImaginedPredictor(fault=InputError("no"))
    known = KeptForecasts([TrialConfig()], _forecaster(fault, GIB))
    assert TrialConfig() not in known
    assert len(known) == 0
