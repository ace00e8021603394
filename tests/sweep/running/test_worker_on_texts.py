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
from storage.records import Measurement
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import Progress, QualityCommand, TextsSettings, TrialRequest, WorkerSettings
from tests.sweep.data.prepared import prepared
from tests.sweep.running.teams import a_cpu_runner, measured

STEPS = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2)
CONFIG = TrialConfig(micro_batch_size=2, seq_len=32)
QUALITY = QualityCommand(tokens=150, seed=1, eval_seq_len=32, eval_tokens=60)
SPEED_REUSED = "speed_reused"
pytestmark = pytest.mark.usefixtures("our_own_code")


def settings_of(directory: Path, lengths: np.ndarray) -> TextsSettings:
    prepared(directory, lengths)
    (directory / "texts.json").write_text(json.dumps({"fingerprint": "abc"}), encoding="utf-8")
    return TextsSettings(directory=str(directory), fingerprint="abc", eval_fraction=0.2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextsSettings:
    lengths = np.random.default_rng(1).integers(3, 29, 60)
    return settings_of(tmp_path_factory.mktemp("texts"), lengths)


@pytest.fixture(scope="module")
def runner(
    texts: TextsSettings, tmp_path_factory: pytest.TempPathFactory, our_own_code: None
) -> Iterator[SupervisedRunner]:
    log = tmp_path_factory.mktemp("logs") / "worker.log"
    with a_cpu_runner(log, texts=texts) as runner:
        yield runner


def trained(
    runner: SupervisedRunner, config: TrialConfig, quality: QualityCommand | None = None
) -> tuple[Measurement, list[Progress]]:
    """Return what was measured, and the signs of life on the way."""
    seen: list[Progress] = []
    request = TrialRequest(config=config, steps=STEPS, quality=quality)
    return measured(runner.run(request, observe=lambda beat: bool(seen.append(beat)))), seen


def test_its_beats_and_its_record_are_of_the_tokens_that_carry_loss(
    runner: SupervisedRunner,
) -> None:
    measurement, seen = trained(runner, CONFIG)
    assert measurement.loss_tokens_per_step is not None
    assert measurement.loss_tokens_per_step < CONFIG.tokens_per_step
    rates = [beat.tokens_per_second for beat in seen if beat.tokens_per_second]
    assert rates[-1] == pytest.approx(measurement.tokens_per_second)
    assert measurement.quality is None
    assert "quality" not in {beat.phase for beat in seen}


def test_what_fits_is_asked_what_it_learned_and_no_speed_is_measured_twice_for_that(
    runner: SupervisedRunner,
) -> None:
    first, seen = trained(runner, CONFIG, QUALITY)
    assert first.quality is not None
    assert first.quality.train_tokens >= QUALITY.tokens
    assert (first.quality.seed, first.quality.eval_seq_len) == (1, 32)
    phases = list(dict.fromkeys(beat.phase for beat in seen))
    assert phases[-3:] == ["measure", "detach", "quality"]
    assert seen[-1].step == first.quality.steps
    faster = CONFIG.model_copy(update={"learning_rate": 1e-2})
    other, seen = trained(runner, faster, QUALITY)
    assert {beat.phase for beat in seen} == {"quality"}
    assert SPEED_REUSED in other.flags
    assert other.tokens_per_second == first.tokens_per_second
    assert other.quality is not None
    assert other.quality.eval_loss != first.quality.eval_loss
    # The same configuration again is measured again: that is what it is run for.
    again, _ = trained(runner, faster, QUALITY)
    assert SPEED_REUSED not in again.flags
    assert again.quality is not None
    assert again.quality.eval_loss == pytest.approx(other.quality.eval_loss)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"fingerprint": "abd"}, "are others than"), ({"directory": "/gone"}, "cannot be read")],
)
def test_texts_that_are_not_those_of_the_study_are_refused(
    texts: TextsSettings, changes: dict[str, str], words: str
) -> None:
    from sweep.running.worker import Worker

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


def test_kernels_for_every_width_of_texts_are_no_part_of_a_budget(tmp_path: Path) -> None:
    texts = settings_of(tmp_path / "texts", np.random.default_rng(3).integers(20, 190, 120))
    config = TrialConfig(
        micro_batch_size=2,
        seq_len=192,
        target_modules="all-linear",
        upcast_fp32=False,
        packing="grouped",
    )
    many = StepBudget(warmup_min=1, warmup_max=1, measured_min=6, measured_max=6)
    with a_cpu_runner(tmp_path / "worker.log", budget_bytes=32 * 2**20, texts=texts) as runner:
        found = measured(runner.run(TrialRequest(config=config, steps=many)))
    assert found.peak_allocated_bytes < 20 * 2**20
