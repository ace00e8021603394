"""A soak trains on, evaluates and saves as a training does, on the CPU for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.space import StepBudget
from storage.records import OutOfMemory
from tests.lazy import lazily
from tests.sweep.training.tiny import (
    TINY,
    UNIFORM_LOSS,
    measured,
    outcome_of,
    tiny_base,
    tiny_config,
    tiny_loop,
    trial_on,
)

torch = lazily("torch")
STEPS = StepBudget(warmup_min=1, warmup_max=2, measured_min=6, measured_max=24, seconds_max=60)
CONFIG = tiny_config()


def test_a_soak_trains_on_however_steady_and_evaluates_and_saves_half_way() -> None:
    phases: list[str] = []

    def hear(beat: Any) -> bool:
        phases.append(beat.phase)
        return False

    with tiny_base(CONFIG) as base:
        found = measured(trial_on(base, CONFIG, steps=STEPS, is_soak=True, report=hear).run())
        assert not hasattr(base.model, "peft_config")
    soak = found.soak
    assert soak is not None
    assert found.steps_measured == 24
    assert soak.steps == 24 + found.steps_warmup
    assert soak.seconds >= found.measured_seconds + soak.evaluation_seconds
    assert soak.evaluation_loss == pytest.approx(UNIFORM_LOSS, abs=0.5)
    # An fp32 adapter and the optimizer's two moments.
    weights = found.trainable_parameters * 4
    assert weights < soak.checkpoint_bytes < 8 * weights
    assert {"measure", "detach"} <= set(phases)


def test_the_time_of_a_soak_ends_it_as_well() -> None:
    steps = STEPS.model_copy(update={"measured_max": 100_000, "seconds_max": 0.5})
    found = measured(outcome_of(CONFIG, steps=steps, is_soak=True))
    assert found.soak is not None
    assert 0.5 <= found.soak.seconds < 20.0
    assert found.steps_measured < 100_000


def test_a_checkpoint_holds_what_a_training_goes_on_from(tmp_path: Path) -> None:
    with tiny_loop(CONFIG) as loop:
        loop.step()
        loop.save(tmp_path)
        state = torch.load(tmp_path / "optimizer.pt", weights_only=False)
        assert len(state["state"]) == len(loop.attached.trainable_parameters())
    assert (tmp_path / "adapter_model.safetensors").stat().st_size > 0
    assert (tmp_path / "scheduler.pt").exists()


def test_an_evaluation_makes_no_gradients_and_the_training_goes_on() -> None:
    modes: list[bool] = []

    def note(module: Any, *_: Any) -> None:
        modes.append(module.training or torch.is_grad_enabled())

    with tiny_loop(tiny_config(lora_dropout=0.1)) as loop:
        loop.step()
        loop.attached.layers[0].register_forward_hook(note)
        loop.evaluate(batches=2)
        loop.step()
    assert modes == [False, False, True]


def test_memory_of_the_evaluation_counts_towards_the_peak() -> None:
    from sweep.training.device import CpuDevice

    class Watched(CpuDevice):
        """Says how much was observed in the pass."""

        passes = 0

        def observed(self) -> Any:
            self.passes += 1
            return super().observed()

    device = Watched()
    outcome_of(CONFIG, steps=STEPS, is_soak=True, device=device)
    assert device.passes == 2
    with tiny_loop(CONFIG) as loop, tiny_base(CONFIG) as base:
        device.reset_peak()
        before = device.memory().peak_allocated_bytes
        trial_on(base, CONFIG, is_soak=True, device=device).evaluate_and_save(loop)
    logits = CONFIG.tokens_per_micro_batch * int(TINY.config["vocab_size"]) * 4
    assert device.memory().peak_allocated_bytes - before >= logits


def test_running_out_in_the_evaluation_is_out_of_memory_and_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> float:
        raise MemoryError("no room for the logits")

    monkeypatch.setattr("sweep.training.step.TrainingLoop.evaluate", full)
    outcome = outcome_of(CONFIG, steps=STEPS, is_soak=True)
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.detail.startswith("in an evaluation pass: ")
