"""Plans for texts: tokens that carry loss, an epoch's time and dollars, and which study counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qlora_sweep
from qlora_sweep.reports import format as units
from qlora_sweep.reports.answer import facts
from qlora_sweep.reports.comparison import of_study
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.preference import TIE
from qlora_sweep.storage.definition import StudySnapshot, TargetSpeed
from qlora_sweep.storage.ranking import rank_study
from qlora_sweep.storage.records import TrialRecord
from qlora_sweep.sweep.data.study_epochs import StudyEpochs
from qlora_sweep.sweep.planning.documents import gpu_document
from qlora_sweep.sweep.planning.evidence import (
    evidence_from,
    with_memory_forecasts,
    with_target_speeds,
)
from qlora_sweep.sweep.planning.plan import plan_gpu, workload_of
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset
from tests.reports import synthetic
from tests.reports.synthetic import definition, fits, snapshot
from tests.storage.builders import changed
from tests.sweep.imagined_study import MISTRAL, a_snapshot
from tests.sweep.planning import imagined
from tests.sweep.planning.imagined import an_offer
from tests.sweep.prepared_dataset import a_summary

A10 = find_gpu("a10")
CONFIG = TrialConfig(micro_batch_size=4, seq_len=512)
ROWS = np.random.default_rng(0).lognormal(4.5, 0.8, 3000).astype(np.int64) + 2


def shapes(rows: Any = ROWS) -> ShapesOnDataset:
    lengths = np.asarray(rows, dtype=np.int64)
    return ShapesOnDataset(StudyEpochs(lengths, lengths - 1, seed=0))


def a_forecaster(rows: Any = ROWS, **changes: Any) -> Forecaster:
    return imagined.a_forecaster(**({"shapes": shapes(rows)} | changes))


def test_a_plan_prices_an_epoch_and_says_what_it_takes() -> None:
    plan = plan_gpu(
        a_forecaster().expect(CONFIG), work=AskedWork(has_dataset=True), offers=[an_offer()]
    )
    document = gpu_document(plan)
    epoch, speed = document["epoch"], document["tokens_per_second"]
    assert epoch["seconds"] == pytest.approx(epoch["loss_tokens"] / speed)
    assert epoch["dollars"] == pytest.approx(epoch["seconds"] / 3600 * 3.6)
    assert epoch["seconds_low"] < epoch["seconds"] < epoch["seconds_high"]
    (bill,) = plan.bills
    assert bill.workload.steps == epoch["steps"]
    assert bill.workload.tokens == pytest.approx(epoch["loss_tokens"], rel=0.01)
    assert json.loads(json.dumps(document)) == document


def test_epochs_of_texts_are_asked_about_as_epochs() -> None:
    forecast = a_forecaster().expect(CONFIG)
    once, twice = (
        workload_of(forecast, AskedWork(epochs=epochs, has_dataset=True)) for epochs in (1.0, 2.0)
    )
    assert twice.steps == 2 * once.steps
    with pytest.raises(InputError, match="--work epochs is of the dataset"):
        AskedWork(epochs=2.0, samples=10, has_dataset=True)
    # Without texts none is spoken of.
    random_rows = a_forecaster(shapes=None).expect(CONFIG)
    assert "epoch" not in gpu_document(plan_gpu(random_rows, work=AskedWork(), offers=[]))


@pytest.mark.parametrize(
    ("studied", "asked", "said"),
    [
        ("cafe", None, "name them with --data mine.jsonl"),
        (None, "cafe", "leave --from out"),
        ("cafe", "beef", "trained on mine.jsonl"),
    ],
)
def test_other_texts_calibrate_no_plan(studied: str | None, asked: str | None, said: str) -> None:
    about = {"model": MISTRAL, "gpu": A10, "shapes": shapes()}
    with pytest.raises(InputError, match=said):
        evidence_from(study_of(studied), **about, dataset=summary(asked))
    same = summary(studied)
    assert evidence_from(study_of(studied), **about, dataset=same).study == "mine"


def summary(fingerprint: str | None) -> Any:
    return None if fingerprint is None else a_summary(fingerprint=fingerprint)


def study_of(fingerprint: str | None) -> StudySnapshot:
    known = a_snapshot()
    about = changed(known.definition, texts=summary(fingerprint))
    return replace(known, definition=about)


# A study that another GPU stood in for says how fast its trials are on the GPU it is for

MODEL = load_model_spec("mistral-7b-v0.3")


def study(*records: TrialRecord, **target: object) -> StudySnapshot:
    definition = changed(synthetic.definition(**target), model=MODEL.to_json())
    return with_target_speeds(synthetic.snapshot(records, definition=definition))


def target_speed(snapshot: StudySnapshot) -> TargetSpeed | None:
    """Return the speed of a study's only trial."""
    ranking = rank_study(snapshot)
    return ranking.target_speed(ranking.trials[0])


def test_a_plan_best_and_a_comparison_say_one_interval_of_a_configuration() -> None:
    record = synthetic.fits(0, 17_000.0, TrialConfig(micro_batch_size=8, checkpoint_fraction=0.0))
    shown = replace(study(record), offer=an_offer(boot_seconds=600.0))
    asked = a_forecaster(model=MODEL, shapes=None).expect(record.config)
    plan = gpu_document(plan_gpu(asked, work=AskedWork(), offers=[shown.offer]))
    best = view_of(shown).document()
    low, high = plan["tokens_per_second_range"]
    speeds = pytest.approx([plan["tokens_per_second"], low, high])
    assert [best["target_tokens_per_second"][end] for end in ("value", "low", "high")] == speeds
    studied = of_study(shown)
    (option,) = studied.options
    assert list(option.speed) == speeds
    dollars = pytest.approx([1e3 / rate for rate in (option.speed[0], high, low)])
    of_best = [best["cost"][f"usd_per_million_tokens{end}"] for end in ("", "_low", "_high")]
    of_plan = plan["cost"]
    assert of_best == dollars
    both = [of_plan["usd_per_million_tokens"], *of_plan["usd_per_million_tokens_range"]]
    assert both == dollars
    # Screens draw the same numbers.
    told = dict(facts(view_of(shown)))
    assert f"{units.rate(low)}–{units.rate(high)}" in told["speed"]


def test_a_gpu_that_ran_itself_has_the_speed_that_was_measured() -> None:
    record = synthetic.fits(0, 17_000.0)
    speed = target_speed(study(record, emulated_on=None))
    assert (speed.basis, speed.tokens_per_second) == ("measured", 17_000.0)
    assert (speed.low, speed.high) == pytest.approx(record.measurement.speed_interval)  # type: ignore[union-attr]


def test_what_cannot_be_predicted_has_no_speed() -> None:
    record = synthetic.fits(0, 17_000.0)
    assert target_speed(study(record, gpu="a-card-of-an-older-catalogue")) is None
    unknown = {"model": replace(MODEL, config={}).to_json()}
    definition = synthetic.definition().model_copy(update=unknown)
    snapshot = with_target_speeds(synthetic.snapshot((record,), definition=definition))
    assert target_speed(snapshot) is None


# What a configuration would need is handed to a report where it was traced before, else not


def _study(**target: str) -> StudySnapshot:
    return snapshot([fits(0, 9_000.0)], definition=definition(**target))


def test_a_structure_that_was_never_traced_is_not_traced_for_a_report(tmp_path: Path) -> None:
    study = with_memory_forecasts(_study(), cache_dir=tmp_path)
    assert study.memory_forecasts.get(study.records[0].config) is None
    assert list(study.memory_forecasts) == []
    assert not any(tmp_path.iterdir())
    on_cpu = _study(device="cpu")
    assert with_memory_forecasts(on_cpu, cache_dir=tmp_path) is on_cpu


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_a_base_that_is_free_is_no_slower_than_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows are fastest here with some layers in 4 bits, which a 16-bit base knows not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    data = {"texts": str(Path("docs/examples/dataset.jsonl").absolute()), "tokenizer": "demo"}
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "data": data, "numerics": "16-bit"}
    free = qlora_sweep.plan("rtx-4090", seq_len=1024, **asked)
    named = qlora_sweep.plan("rtx-4090", seq_len=1024, quantization="nf4", **asked)
    assert named.tokens_per_second is not None
    assert free.tokens_per_second is not None
    assert free.tokens_per_second >= named.tokens_per_second / (1.0 + TIE)
