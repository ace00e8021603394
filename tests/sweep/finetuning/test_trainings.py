"""Trainings on the CPU, each a few steps: their end, their figures, and resuming to the bit."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from qlora_sweep.storage.records import Crashed, Diverged, Invalid, OutOfMemory
from qlora_sweep.sweep.finetuning import checkpoints
from qlora_sweep.sweep.finetuning.protocol import (
    Saved,
    TrainingJob,
    TrainingResult,
    TrainingStarted,
)
from tests.sweep.data.prepared import prepared, prepared_pairs
from tests.sweep.finetuning.trainings import (
    adapter,
    assert_same,
    ended,
    job,
    run,
    stopped_and_resumed,
)
from tests.sweep.training.tiny import TINY, saved_with_outliers

if TYPE_CHECKING:
    import torch

LENGTHS = [5, 40, 12, 30, 9, 22, 17, 3, 28, 14, 33, 8, 19, 25, 6]
"""Twelve examples are trained on and three held out; two are longer than a micro-batch's rows."""
INT8 = {"quantization": "int8", "compute_dtype": "int8", "upcast_fp32": False}
NO_DROPOUT = {"lora_dropout": 0.0, "learning_rate": 1e-7}

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("texts"), LENGTHS)


def trained(*args: Any, **changes: Any) -> TrainingResult:
    return ended(job(*args, **changes))


def trained_at(output: Path, like: TrainingJob) -> TrainingResult:
    """Train what another job begins elsewhere."""
    return ended(like.model_copy(update={"output": str(output)}))


def course(end: TrainingResult) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(f"{end.checkpoint}/course.json").read_text())
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "stop_after", "changes"),
    [
        # After the end of the first epoch.
        ("grouped", 3, {"adapter_dtype": "bf16"}),
        # Adapters large enough that their optimizer's state is in eight bits.
        ("packed", 2, {"optimizer": "adamw_8bit", "lora_rank": 64}),
        ("none", 1, {"quantization": "fp8", "compute_dtype": "fp8"}),
    ],
)
def test_a_training_that_was_stopped_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, dataset: Path, packing: str, stop_after: int, changes: dict[str, object]
) -> None:
    begun = job(tmp_path / "resumed", dataset, packing=packing, epochs=2, **changes)
    whole = trained_at(tmp_path / "whole", begun)
    assert any(value.any() for name, value in adapter(whole).items() if "lora_B" in name)
    resumed, said = stopped_and_resumed(begun, stop_after=stop_after)
    assert_same(resumed, whole)
    started = next(message for message in said if isinstance(message, TrainingStarted))
    assert started.steps == whole.steps
    assert stop_after <= started.steps_done < whole.steps


def test_a_training_tells_what_it_came_to_and_keeps_the_newest_two_checkpoints(
    tmp_path: Path, dataset: Path
) -> None:
    end, said = run(job(tmp_path, dataset, checkpoint_steps=1))
    assert isinstance(end, TrainingResult), end
    assert (end.steps, end.rows, end.rows_held_out, end.rows_left_out) == (3, 12, 3, 0)
    losses = [message.eval_loss for message in said if isinstance(message, Saved)]
    assert len(losses) == 3
    assert losses.count(None) == 1, "the last step evaluates all that is held out"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "checkpoint-2"}

    steps = course(end)
    assert math.isclose(sum(steps["losses"]) / 3, end.train_loss)
    assert sum(steps["tokens"]) == end.tokens
    # Each step's own, from the configuration's down: no step is taken with 0.
    assert steps["learning_rates"] == pytest.approx([5e-3, 5e-3 * 2 / 3, 5e-3 / 3])
    # Examples are cut to 32 tokens, and the first of each is predicted from nothing.
    assert end.eval_tokens + end.tokens == sum(min(length, 32) - 1 for length in LENGTHS)
    assert end.tokens_computed > end.tokens
    assert end.peak_allocated_bytes > 0

    # What was done and not yet finished is evaluated again, the same.
    again = trained(tmp_path, dataset, resume_from=str(checkpoints.newest(tmp_path)))
    assert (again.eval_loss, again.tokens, again.steps) == (end.eval_loss, end.tokens, 3)


def test_what_an_epoch_of_fewer_rows_than_its_steps_take_comes_to(tmp_path: Path) -> None:
    odd = prepared(tmp_path / "texts", LENGTHS[:10])
    end = trained(tmp_path / "out", odd, eval_fraction=0.0, max_steps=7)
    assert (end.rows, end.epochs) == (10, 2.4)
    steps = course(end)["tokens"]
    assert sum(steps[:3]) == sum(steps[3:6]) == sum(min(length, 32) - 1 for length in LENGTHS[:10])
    assert steps[:3] != steps[3:6], "each epoch has an order of its own"


def test_examples_of_which_no_supervised_token_is_left_are_left_out(tmp_path: Path) -> None:
    # The first answer is kept and the second cut off; of the last chat none is kept.
    masks = [np.zeros(length, int) for length in (60, 20, 24, 60)]
    for mask, answers in zip(masks, ([5, 50], [5], [20], [45]), strict=True):
        for begin in answers:
            mask[begin : begin + 4] = 1
    chats = prepared(tmp_path / "texts", [len(mask) for mask in masks], masks=masks)
    end = trained(tmp_path / "out", chats, eval_fraction=0.0)
    assert (end.rows, end.rows_left_out, end.tokens) == (3, 1, 12)


@pytest.mark.parametrize(("model", "are_apart"), [("llama", True), ("gpt_oss", False)])
def test_a_training_says_whether_packed_examples_see_each_other(
    tmp_path: Path, dataset: Path, model: str, are_apart: bool
) -> None:
    from tests.families import spec_of

    # Of gpt_oss transformers does not derive a mask from the positions.
    spec = replace(TINY, config=spec_of(model).config)
    settings = {"attention": "eager", "checkpoint_fraction": 0.0, "max_steps": 1}
    begun = job(tmp_path, dataset, packing="packed", model=spec.to_json(), **settings)
    end, said = run(begun)
    assert isinstance(end, TrainingResult), end
    started = next(message for message in said if isinstance(message, TrainingStarted))
    assert (started.documents_apart, end.documents_apart) == (are_apart, are_apart)


@pytest.mark.parametrize("packing", ["none", "packed"])
def test_the_loss_of_a_step_is_the_mean_over_all_its_supervised_tokens(
    tmp_path: Path, packing: str
) -> None:
    lengths = [5, 31, 12, 30, 9, 22, 17]
    odd = prepared(tmp_path / "texts", lengths, completions=[2, 20, 3, 29, 1, 4, 9])
    common = {"eval_fraction": 0.0, **NO_DROPOUT}
    end = trained(tmp_path / "out", odd, packing=packing, effective_batch_size=6, **common)
    whole = course(end)
    one = {"micro_batch_size": 1, "effective_batch_size": 1}
    each = course(trained(tmp_path / "alone", odd, **one, **common))
    assert sum(whole["tokens"]) == sum(each["tokens"])
    loss = np.average(each["losses"], weights=each["tokens"])
    assert np.average(whole["losses"], weights=whole["tokens"]) == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("steps", [1, 8])
def test_random_rows_are_counted_as_a_trial_counts_them_and_nothing_is_kept(
    tmp_path: Path, steps: int
) -> None:
    end = trained(tmp_path, None, max_steps=steps, keeps_checkpoints=False, eval_fraction=0.0)
    assert end.tokens == steps * 4 * 32 == end.tokens_computed
    # Of an odd number of steps, the median is one of them.
    assert end.tokens_per_second == pytest.approx(4 * 32 / end.step_seconds)  # type: ignore[operator]
    assert end.steps_measured == max(0, steps - 5), "shorter ones have a speed all the same"
    assert end.checkpoint is None
    assert list(tmp_path.iterdir()) == []


def _ruin(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss * math.nan


def _ruin_gradients(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    for parameter in trainer.model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(math.nan)
    return loss


def _run_out(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 99 bytes")


@pytest.mark.parametrize(
    ("fault", "kind", "step", "detail"),
    [
        (_ruin, Diverged, 3, "loss nan"),
        (_ruin_gradients, Diverged, 3, "adapters that are not finite"),
        (_run_out, OutOfMemory, 2, "a training step"),
    ],
)
def test_what_goes_wrong_in_the_third_step_leaves_the_checkpoints_before_it(
    tmp_path: Path,
    dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Any, torch.Tensor], torch.Tensor],
    kind: type[Any],
    step: int,
    detail: str,
) -> None:
    from transformers import Trainer

    training_step = Trainer.training_step

    def faulty(self: Trainer, *args: Any, **options: Any) -> torch.Tensor:
        loss = training_step(self, *args, **options)
        if self.state.global_step == 2:
            return fault(self, loss)
        return loss

    monkeypatch.setattr(Trainer, "training_step", faulty)
    end, _ = run(job(tmp_path, dataset, checkpoint_steps=1, epochs=3))
    assert isinstance(end, kind), end
    assert end.step == step
    assert detail in end.detail
    assert checkpoints.steps_of(tmp_path) == [2, 1]


def test_a_peak_above_the_budget_is_out_of_memory(tmp_path: Path, dataset: Path) -> None:
    roomy = trained(tmp_path / "roomy", dataset, max_steps=2)
    # What is counted beside the tensors of a step differs by some bytes from run to run.
    budget = int(0.95 * roomy.peak_allocated_bytes)
    tight, _ = run(job(tmp_path / "tight", dataset, max_steps=3, budget_bytes=budget))
    assert isinstance(tight, OutOfMemory), tight
    assert tight.step <= 2
    assert checkpoints.steps_of(tmp_path / "tight") == []


@pytest.mark.parametrize(("full_for_good", "kept"), [(False, [3, 1]), (True, [1])])
def test_a_full_disk_costs_a_checkpoint_and_only_the_last_one_ends_the_training(
    tmp_path: Path,
    dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
    full_for_good: bool,
    kept: list[int],
) -> None:
    from qlora_sweep.sweep.finetuning.run import AdapterTrainer

    save = AdapterTrainer.save_model

    def full(self: AdapterTrainer, *args: Any, **options: Any) -> None:
        save(self, *args, **options)
        step = self.state.global_step
        if step == 2 or (full_for_good and step > 2):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(AdapterTrainer, "save_model", full)
    end, said = run(job(tmp_path, dataset, checkpoint_steps=1))
    refused = [m.step for m in said if isinstance(m, Saved) and m.refusal is not None]
    assert refused == ([2, 3] if full_for_good else [2])
    assert isinstance(end, Crashed if full_for_good else TrainingResult), end
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in kept}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch_size": 13, "effective_batch_size": 13}, "micro_batch_size is 13"),
        ({"target_modules": ["q_prog"]}, "q_prog"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, dataset: Path, changes: dict[str, Any], words: str
) -> None:
    import torch

    end, _ = run(job(tmp_path, dataset, **changes))
    assert isinstance(end, Invalid), end
    assert words in end.detail
    assert not torch.is_autocast_enabled("cpu"), "what trains next would use its first adapters"


def test_the_held_out_loss_is_the_same_whatever_the_micro_batch(tmp_path: Path) -> None:
    """A mean over tokens, of the same examples on the way and of all of them at the end."""
    lengths = np.random.default_rng(5).integers(3, 30, 100)
    many = prepared(tmp_path / "texts", lengths)
    exact = {"compute_dtype": "fp32", "quantization": "none", **NO_DROPOUT}
    seen = {}
    for size in (1, 4):
        few = {"micro_batch_size": size, "max_steps": 2, "checkpoint_steps": 1}
        end, said = run(job(tmp_path / str(size), many, eval_fraction=0.8, **few, **exact))
        assert isinstance(end, TrainingResult), end
        first, _ = (message.eval_loss for message in said if isinstance(message, Saved))
        seen[size] = first, end.eval_loss, end.eval_tokens
    assert seen[1] == pytest.approx(seen[4], rel=1e-5)
    assert seen[1][0] != pytest.approx(seen[1][1], rel=5e-6), "80 examples are held out"


def test_8_bit_products_are_fitted_to_real_weights_and_a_resumed_training_to_the_bit(
    tmp_path: Path, dataset: Path
) -> None:
    spec = saved_with_outliers(tmp_path / "model")
    settings = {"model": spec.to_json(), "weights": "pretrained", "epochs": 2.0, **INT8}
    begun = job(tmp_path / "stopped", dataset, **settings)
    whole = trained_at(tmp_path / "whole", begun)
    assert whole.eight_bit is not None
    assert whole.eight_bit.loss_8_bit == pytest.approx(whole.eight_bit.loss_16_bit, rel=0.01)
    resumed, _ = stopped_and_resumed(begun, stop_after=2)
    assert_same(resumed, whole)


def test_weights_that_8_bits_do_not_suit_are_not_trained_in_8_bits(
    tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = saved_with_outliers(tmp_path / "model")
    monkeypatch.setattr("qlora_sweep.sweep.training.fitting.MOST_ERROR", 1e-6)
    eight_bit = {"quantization": "fp8", "compute_dtype": "fp8", "upcast_fp32": False}
    asked = job(tmp_path / "out", dataset, model=spec.to_json(), weights="pretrained", **eight_bit)
    end, _ = run(asked)
    assert isinstance(end, Invalid)
    assert "compute_dtype=bf16" in end.detail


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifteen pairs: the chosen completion counts up, the rejected one down."""
    return prepared_pairs(tmp_path_factory.mktemp("pairs"), count=15)


def test_a_training_on_pairs_learns_to_tell_them_apart_and_is_resumed_to_the_bit(
    tmp_path: Path, pairs: Path
) -> None:
    how: dict[str, Any] = {"method": "dpo", "reference": "precomputed", "epochs": 4}
    how |= {"lora_dropout": 0.0, "learning_rate": 0.05}
    begun = job(tmp_path / "resumed", pairs, **how)
    whole = trained_at(tmp_path / "whole", begun)
    assert (whole.rows, whole.rows_held_out, whole.eval_pairs) == (12, 3, 3)
    assert whole.eval_wins == 3
    assert whole.final_train_loss < 0.5 * math.log(2)
    assert whole.reward_accuracy_ci95 is not None
    low, high = whole.reward_accuracy_ci95
    assert 0.4 < low < high == pytest.approx(1)
    resumed, _ = stopped_and_resumed(begun, stop_after=4)
    assert_same(resumed, whole)


def test_a_step_in_which_something_is_compiled_is_no_measure_of_speed() -> None:
    import torch

    from qlora_sweep.sweep.finetuning.course import WARMUP_STEPS, RunTracker, Steps
    from qlora_sweep.sweep.training.adapters import Compilation
    from qlora_sweep.sweep.training.device import open_device

    compilation, steps = Compilation(), Steps()
    watch = RunTracker(open_device("cpu"), steps, compilation=compilation)
    for index in range(WARMUP_STEPS + 5):
        if index in (0, WARMUP_STEPS + 2):
            compilation.seconds += 3.0
        watch.end_step(torch.tensor(1.0), tokens=10, computed=12, learning_rate=1e-4)
    watch.settle()
    warm = [index - WARMUP_STEPS for index, is_warm in enumerate(steps.is_warm) if is_warm]
    assert warm == [0, 1, 3, 4]
