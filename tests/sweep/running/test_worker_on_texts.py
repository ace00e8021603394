"""A worker that was given texts: trials train on them, and are asked what they learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from search_spaces.gpus import GIB
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from storage.records import Invalid, Measured, Measurement
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import Progress, QualityCommand, TextsSettings, TrialRequest, WorkerSettings
from sweep.running.worker import SPEED_REUSED, Worker
from tests.sweep.data.prepared import prepared

ROOT = Path(__file__).parents[3]
CPU = Target(gpu="cpu", device="cpu", budget_bytes=GIB // 2)
STEPS = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2)
CONFIG = TrialConfig(micro_batch_size=2, seq_len=32)
QUALITY = QualityCommand(tokens=150, seed=1, eval_seq_len=32, eval_tokens=60)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextsSettings:
    lengths = np.random.default_rng(1).integers(3, 29, 60)
    directory = prepared(tmp_path_factory.mktemp("texts"), lengths)
    (directory / "texts.json").write_text(json.dumps({"fingerprint": "abc"}), encoding="utf-8")
    return TextsSettings(directory=str(directory), fingerprint="abc", eval_fraction=0.2)


@pytest.fixture(scope="module")
def runner(
    texts: TextsSettings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        log = tmp_path_factory.mktemp("logs") / "worker.log"
        spec = load_model_spec("demo")
        with SupervisedRunner(spec, target=CPU, log_path=log, texts=texts) as runner:
            yield runner


def measured(outcome: object) -> Measurement:
    assert isinstance(outcome, Measured), outcome
    return outcome.measurement


def test_its_beats_and_its_record_are_of_the_tokens_that_carry_loss(
    runner: SupervisedRunner,
) -> None:
    seen: list[Progress] = []
    outcome = runner.run(
        TrialRequest(config=CONFIG, steps=STEPS), observe=lambda beat: bool(seen.append(beat))
    )
    measurement = measured(outcome)
    assert measurement.loss_tokens_per_step is not None
    assert measurement.loss_tokens_per_step < CONFIG.tokens_per_step
    rates = [beat.tokens_per_second for beat in seen if beat.tokens_per_second]
    assert rates[-1] == pytest.approx(measurement.tokens_per_second)
    assert measurement.quality is None
    assert "quality" not in {beat.phase for beat in seen}


def test_what_fits_is_asked_what_it_learned_and_no_speed_is_measured_twice_for_that(
    runner: SupervisedRunner,
) -> None:
    seen: list[Progress] = []
    first = measured(
        runner.run(
            TrialRequest(config=CONFIG, steps=STEPS, quality=QUALITY),
            observe=lambda beat: bool(seen.append(beat)),
        )
    )
    assert first.quality is not None
    assert first.quality.train_tokens >= QUALITY.tokens
    assert (first.quality.seed, first.quality.eval_seq_len) == (1, 32)
    phases = list(dict.fromkeys(beat.phase for beat in seen))
    assert phases[-3:] == ["measure", "detach", "quality"]
    assert seen[-1].step == first.quality.steps
    faster = CONFIG.model_copy(update={"learning_rate": 1e-2})
    seen.clear()
    other = measured(
        runner.run(
            TrialRequest(config=faster, steps=STEPS, quality=QUALITY),
            observe=lambda beat: bool(seen.append(beat)),
        )
    )
    assert {beat.phase for beat in seen} == {"quality"}
    assert SPEED_REUSED in other.flags
    assert other.tokens_per_second == first.tokens_per_second
    assert other.quality is not None
    assert other.quality.eval_loss != first.quality.eval_loss
    # The same configuration again is measured again: that is what it is run for.
    again = measured(runner.run(TrialRequest(config=faster, steps=STEPS, quality=QUALITY)))
    assert SPEED_REUSED not in again.flags
    assert again.quality is not None
    assert again.quality.eval_loss == pytest.approx(other.quality.eval_loss)


def test_a_micro_batch_that_the_texts_do_not_fill_is_invalid(runner: SupervisedRunner) -> None:
    config = CONFIG.model_copy(update={"micro_batch_size": 64})
    outcome = runner.run(TrialRequest(config=config, steps=STEPS, quality=QUALITY))
    assert isinstance(outcome, Invalid)
    assert "take a smaller micro_batch_size" in outcome.detail


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"fingerprint": "abd"}, "are others than"), ({"directory": "/gone"}, "cannot be read")],
)
def test_texts_that_are_not_those_of_the_study_are_refused(
    texts: TextsSettings, changes: dict[str, str], words: str
) -> None:
    settings = WorkerSettings(
        device="cpu",
        budget_bytes=GIB,
        model=load_model_spec("demo").to_json(),
        weights="random",
        seed=0,
        is_emulated=False,
        texts=texts.model_copy(update=changes),
    )
    with pytest.raises(EnvironmentFault, match=words):
        Worker(settings, send=lambda _: None)


def test_kernels_for_every_width_of_texts_are_no_part_of_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    lengths = np.random.default_rng(3).integers(20, 190, 120)
    directory = prepared(tmp_path / "texts", lengths)
    (directory / "texts.json").write_text(json.dumps({"fingerprint": "abc"}), encoding="utf-8")
    texts = TextsSettings(directory=str(directory), fingerprint="abc", eval_fraction=0.1)
    config = TrialConfig(
        micro_batch_size=2,
        seq_len=192,
        target_modules="all-linear",
        upcast_fp32=False,
        packing="grouped",
    )
    target, log = Target(gpu="cpu", device="cpu", budget_bytes=32 * 2**20), tmp_path / "worker.log"
    many = StepBudget(warmup_min=1, warmup_max=1, measured_min=6, measured_max=6)
    with SupervisedRunner(load_model_spec("demo"), target=target, log_path=log, texts=texts) as one:
        assert (
            measured(one.run(TrialRequest(config=config, steps=many))).peak_allocated_bytes
            < 20 * 2**20
        )
