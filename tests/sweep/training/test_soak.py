"""A soak trains on, evaluates and saves as a training does, on the CPU for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from search_spaces.space import StepBudget
from storage.records import Measured, OutOfMemory
from sweep.training.adapters import attached
from sweep.training.device import CpuDevice
from sweep.training.messages import Progress
from sweep.training.step import TrainingLoop
from tests.sweep.training.tiny import TINY, tiny_base, tiny_config, trial_on

STEPS = StepBudget(warmup_min=1, warmup_max=2, measured_min=6, measured_max=24, seconds_max=60)


def test_a_soak_trains_on_however_steady_and_evaluates_and_saves_half_way() -> None:
    config = tiny_config()
    beats: list[Progress] = []

    def report(beat: Progress) -> bool:
        beats.append(beat)
        return False

    with tiny_base(config) as base:
        outcome = trial_on(base, config, steps=STEPS, is_soak=True, report=report).run()
        assert not hasattr(base.model, "peft_config")
    assert isinstance(outcome, Measured)
    measured, soak = outcome.measurement, outcome.measurement.soak
    assert soak is not None
    assert measured.steps_measured == 24
    assert soak.steps == 24 + measured.steps_warmup
    assert soak.seconds >= measured.measured_seconds + soak.evaluation_seconds
    assert soak.evaluation_loss == pytest.approx(6.24, abs=0.5)
    # An fp32 adapter of rank 16 on four matrices of four layers, and the optimizer's two moments.
    weights = measured.trainable_parameters * 4
    assert weights < soak.checkpoint_bytes < 8 * weights
    assert {"measure", "detach"} <= {beat.phase for beat in beats}


def test_the_time_of_a_soak_ends_it_as_well() -> None:
    config = tiny_config()
    steps = STEPS.model_copy(update={"measured_max": 100_000, "seconds_max": 1.0})
    with tiny_base(config) as base:
        outcome = trial_on(base, config, steps=steps, is_soak=True).run()
    assert isinstance(outcome, Measured)
    assert outcome.measurement.soak is not None
    assert 1.0 <= outcome.measurement.soak.seconds < 20.0
    assert outcome.measurement.steps_measured < 100_000


def test_a_run_that_is_no_soak_reports_none() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Measured)
    assert outcome.measurement.soak is None


def test_a_checkpoint_holds_what_a_training_goes_on_from(tmp_path: Path) -> None:
    config = tiny_config()
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        loop.step()
        loop.save(tmp_path)
        state = torch.load(tmp_path / "optimizer.pt", weights_only=False)
        assert len(state["state"]) == len(attachment.trainable_parameters())
    assert (tmp_path / "adapter_model.safetensors").stat().st_size > 0
    assert (tmp_path / "scheduler.pt").exists()


def test_an_evaluation_makes_no_gradients_and_the_training_goes_on() -> None:
    config = tiny_config(lora_dropout=0.1)
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        loop.step()
        modes: list[bool] = []
        handle = attachment.layers[0].register_forward_hook(
            lambda module, *_: modes.append(module.training or torch.is_grad_enabled())
        )
        loop.evaluate(batches=2)
        assert modes == [False, False]
        loop.step()
        assert modes == [False, False, True]
        handle.remove()


class Watched(CpuDevice):
    """Says how much was observed in the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def observed(self):  # type: ignore[no-untyped-def]
        self.passes += 1
        return super().observed()


def test_memory_of_the_evaluation_counts_towards_the_peak() -> None:
    # The whole vocabulary's logits, which training with a mask of one token would never hold.
    config = tiny_config(checkpoint_fraction=1.0)
    with tiny_base(config) as base:
        device = Watched()
        trial_on(base, config, steps=STEPS, is_soak=True, device=device).run()
        assert device.passes == 2
        trial = trial_on(base, config, is_soak=True, device=device)
        with attached(base, config) as attachment:
            loop = TrainingLoop(attachment, config, seed=0)
            device.reset_peak()
            before = device.memory().peak_allocated_bytes
            trial.evaluate_and_save(loop)
        logits = config.tokens_per_micro_batch * int(TINY.config["vocab_size"]) * 4
        assert device.memory().peak_allocated_bytes - before >= logits


def test_running_out_in_the_evaluation_is_out_of_memory_and_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> float:
        raise MemoryError("no room for the logits")

    monkeypatch.setattr(TrainingLoop, "evaluate", full)
    config = tiny_config()
    with tiny_base(config) as base:
        outcome = trial_on(base, config, steps=STEPS, is_soak=True).run()
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.detail.startswith("in an evaluation pass: ")
