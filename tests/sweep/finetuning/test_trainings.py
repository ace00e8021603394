"""Trainings on the CPU, each a few steps: their end, their figures, and going on to the bit."""

from __future__ import annotations

import errno
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sweep.finetuning import checkpoints
from sweep.finetuning.card import model_card
from sweep.finetuning.trainer import MeasuredTrainer
from sweep.finetuning.wire import (
    Evaluated,
    NotFinite,
    NotSaved,
    RanOut,
    Refused,
    Saved,
    Started,
    Stopped,
    TrainingResult,
    Unable,
)
from tests.bench.try_models import spec_of
from tests.sweep.data.prepared import prepared
from tests.sweep.finetuning.trainings import SPEC, job, run

LENGTHS = [5, 40, 12, 30, 9, 22, 17, 3, 28, 14, 33, 8, 19, 25, 6]
"""Twelve rows are trained on and three held out; two are longer than the rows of a micro-batch."""

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("texts"), LENGTHS)


def adapter(end: object) -> dict[str, torch.Tensor]:
    assert isinstance(end, TrainingResult), end
    assert end.checkpoint is not None
    return load_file(f"{end.checkpoint}/adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "stop_after", "changes"),
    [
        ("none", 1, {}),
        # Behind the end of the first epoch.
        ("grouped", 3, {"adapter_dtype": "bf16"}),
        # Adapters large enough that their optimizer's state is in eight bits.
        ("packed", 2, {"optimizer": "adamw_8bit", "lora_rank": 64}),
        ("none", 1, {"quantization": "fp8", "compute_dtype": "fp8"}),
        ("packed", 2, {"quantization": "nf4", "compute_dtype": "int8"}),
    ],
)
def test_a_training_that_was_stopped_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, texts: Path, packing: str, stop_after: int, changes: dict[str, object]
) -> None:
    whole, _ = run(job(tmp_path / "whole", texts, packing=packing, epochs=2, **changes))
    assert isinstance(whole, TrainingResult), whole
    first = adapter(whole)
    assert any(value.abs().max() > 0 for name, value in first.items() if "lora_B" in name)

    output = tmp_path / "resumed"
    begun = job(output, texts, packing=packing, epochs=2, checkpoint_steps=1, **changes)
    stopped, _ = run(begun, stop_after=stop_after)
    assert isinstance(stopped, Stopped)
    assert checkpoints.steps_of(output)[0] == stopped.checkpoint_step

    # Nothing is evaluated on the way now: that must make no difference either.
    newest = str(checkpoints.newest(output))
    going_on = begun.model_copy(update={"resume_from": newest, "checkpoint_steps": 1000})
    resumed, said = run(going_on)
    assert same(first, adapter(resumed))
    assert isinstance(resumed, TrainingResult)
    assert resumed.train_loss == whole.train_loss
    assert resumed.eval_loss == whole.eval_loss
    assert resumed.tokens == whole.tokens
    started = next(message for message in said if isinstance(message, Started))
    assert (started.steps, started.steps_done) == (whole.steps, stopped.step)


def test_a_training_tells_what_it_came_to_and_keeps_the_newest_two_checkpoints(
    tmp_path: Path, texts: Path
) -> None:
    end, said = run(job(tmp_path, texts, checkpoint_steps=1))
    assert isinstance(end, TrainingResult), end
    assert (end.steps, end.rows, end.rows_held_out, end.rows_left_out) == (3, 12, 3, 0)
    kinds = [type(message) for message in said]
    assert kinds.count(Saved) == 3
    assert kinds.count(Evaluated) == 2, "the last step evaluates all that is held out"
    assert checkpoints.steps_of(tmp_path) == [3, 2]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    course = json.loads((tmp_path / "checkpoint-3" / checkpoints.COURSE).read_text())
    assert len(course["losses"]) == 3
    assert math.isclose(sum(course["losses"]) / 3, end.train_loss)
    assert sum(course["tokens"]) == end.tokens
    # Rows are cut to 32 tokens, and the first of each is predicted from nothing.
    trained = [min(length, 32) - 1 for length in LENGTHS]
    assert end.tokens < sum(trained)
    assert end.tokens_computed > end.tokens
    assert end.eval_tokens + end.tokens == sum(trained)
    assert end.peak_allocated_bytes > 0

    # What was done and not yet finished is evaluated again, the same.
    again, _ = run(job(tmp_path, texts, resume_from=str(checkpoints.newest(tmp_path))))
    assert isinstance(again, TrainingResult)
    assert (again.eval_loss, again.tokens, again.steps) == (end.eval_loss, end.tokens, 3)


def test_what_an_epoch_of_fewer_rows_than_its_steps_take_comes_to(tmp_path: Path) -> None:
    odd = prepared(tmp_path / "texts", LENGTHS[:10])
    once, _ = run(job(tmp_path / "once", odd, eval_fraction=0.0))
    assert isinstance(once, TrainingResult), once
    assert (once.steps, once.rows, once.epochs) == (3, 10, 1.0)
    assert once.tokens == sum(min(length, 32) - 1 for length in LENGTHS[:10])
    further, _ = run(job(tmp_path / "further", odd, eval_fraction=0.0, max_steps=4))
    assert isinstance(further, TrainingResult), further
    assert further.epochs == 1.4


def test_rows_of_a_chat_are_left_out_by_what_is_left_of_its_answers(tmp_path: Path) -> None:
    # The first answer is kept and the second cut off; of the last chat none is kept.
    lengths = [60, 20, 24, 60]
    masks = [np.zeros(length, int) for length in lengths]
    for mask, answers in zip(masks, ([5, 50], [5], [20], [45]), strict=True):
        for begin in answers:
            mask[begin : begin + 4] = 1
    chats = prepared(tmp_path / "texts", lengths, masks=masks)
    end, _ = run(job(tmp_path / "out", chats, eval_fraction=0.0))
    assert isinstance(end, TrainingResult), end
    assert (end.rows, end.rows_left_out, end.tokens) == (3, 1, 12)


@pytest.mark.parametrize(
    ("packing", "model", "are_apart"),
    [("packed", None, True), ("packed", "gpt_oss", False), ("none", None, None)],
)
def test_a_training_says_whether_packed_texts_see_each_other(
    tmp_path: Path, texts: Path, packing: str, model: str | None, are_apart: bool | None
) -> None:
    # Of gpt_oss transformers does not derive a mask from the positions.
    spec = SPEC if model is None else replace(SPEC, config=spec_of(model).config)
    knobs = {"attention": "eager", "checkpoint_fraction": 0.0, "max_steps": 1}
    begun = job(tmp_path, texts, packing=packing, model=spec.to_json(), **knobs)
    end, said = run(begun)
    assert isinstance(end, TrainingResult), end
    started = next(message for message in said if isinstance(message, Started))
    assert (started.documents_apart, end.documents_apart) == (are_apart, are_apart)
    card = model_card(begun, end, texts=None, subject="tiny", environment={})
    assert ("see each other" in card) is (are_apart is False)


def test_a_model_that_looks_ahead_is_not_trained_on_texts(tmp_path: Path, texts: Path) -> None:
    config = {**spec_of("gemma3_text").config, "use_bidirectional_attention": True}
    both_ways = replace(SPEC, config={**config, "vocab_size": 512})
    begun = job(tmp_path, texts, attention="eager", model=both_ways.to_json())
    end, _ = run(begun)
    assert isinstance(end, Refused), end
    assert "'gemma3_text' looks ahead" in end.reason


@pytest.mark.parametrize("packing", ["none", "grouped", "packed"])
def test_the_loss_of_a_step_is_the_mean_over_all_its_tokens_that_carry_loss(
    tmp_path: Path, packing: str
) -> None:
    lengths = [5, 31, 12, 30, 9, 22, 17]
    odd = prepared(tmp_path / "texts", lengths, completions=[2, 20, 3, 29, 1, 4, 9])
    knobs = {"lora_dropout": 0.0, "learning_rate": 1e-7, "effective_batch_size": 6}
    begun = job(tmp_path / "out", odd, packing=packing, eval_fraction=0.0, **knobs)
    end, _ = run(begun)
    assert isinstance(end, TrainingResult), end
    assert end.checkpoint is not None
    course = json.loads((Path(end.checkpoint) / checkpoints.COURSE).read_text())
    whole = np.average(course["losses"], weights=course["tokens"])
    alone, _ = run(
        job(
            tmp_path / "alone",
            odd,
            eval_fraction=0.0,
            **{**knobs, "micro_batch_size": 1, "effective_batch_size": 1},
        )
    )
    assert isinstance(alone, TrainingResult), alone
    assert alone.checkpoint is not None
    each = json.loads((Path(alone.checkpoint) / checkpoints.COURSE).read_text())
    assert sum(course["tokens"]) == sum(each["tokens"])
    assert whole == pytest.approx(np.average(each["losses"], weights=each["tokens"]), rel=1e-3)


def test_random_rows_are_counted_as_a_trial_counts_them_and_nothing_is_kept(tmp_path: Path) -> None:
    end, said = run(job(tmp_path, None, max_steps=8, keeps_checkpoints=False, eval_fraction=0.0))
    assert isinstance(end, TrainingResult), end
    assert end.tokens == 8 * 4 * 32 == end.tokens_computed
    assert end.tokens_per_second == pytest.approx(4 * 32 / end.step_seconds, rel=0.2)
    assert end.checkpoint is None
    assert not any(isinstance(message, Saved) for message in said)
    assert list(tmp_path.iterdir()) == []


def test_a_training_shorter_than_the_warm_up_has_a_speed_and_says_that_nothing_was_measured(
    tmp_path: Path,
) -> None:
    for steps in (1, 3):
        short = job(tmp_path, None, max_steps=steps, keeps_checkpoints=False, eval_fraction=0.0)
        end, _ = run(short)
        assert isinstance(end, TrainingResult), end
        assert end.tokens_per_second is not None
        assert end.tokens_per_second > 0
        assert end.steps_measured == 0


def test_a_loss_that_is_no_number_ends_a_training_and_the_checkpoint_before_it_is_kept(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = MeasuredTrainer.training_step
    calls = []

    def broken(self: MeasuredTrainer, *args: object) -> torch.Tensor:
        calls.append(1)
        loss = step(self, *args)  # type: ignore[arg-type]
        if len(calls) == 5:
            self._course.add_loss(loss * math.nan)
        return loss

    monkeypatch.setattr(MeasuredTrainer, "training_step", broken)
    end, _ = run(job(tmp_path, texts, checkpoint_steps=1, epochs=3))
    assert end == NotFinite(step=3, what="loss nan", checkpoint_step=2)
    assert checkpoints.steps_of(tmp_path) == [2, 1]


def test_memory_that_runs_out_in_the_middle_is_an_end_with_the_checkpoint_kept(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = MeasuredTrainer.training_step

    def running_out(self: MeasuredTrainer, *args: object) -> torch.Tensor:
        if self.state.global_step == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 99 bytes")
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MeasuredTrainer, "training_step", running_out)
    end, _ = run(job(tmp_path, texts, checkpoint_steps=1))
    assert isinstance(end, RanOut)
    assert (end.step, end.checkpoint_step, end.doing) == (2, 2, "a training step")
    assert "99 bytes" in end.detail


def test_a_peak_above_the_budget_is_out_of_memory(tmp_path: Path, texts: Path) -> None:
    roomy, _ = run(job(tmp_path / "roomy", texts, max_steps=2))
    assert isinstance(roomy, TrainingResult)
    # What is counted beside the tensors of a step differs by some bytes from run to run.
    budget = int(0.95 * roomy.peak_allocated_bytes)
    tight, _ = run(job(tmp_path / "tight", texts, max_steps=3, budget_bytes=budget))
    assert isinstance(tight, RanOut), tight
    assert tight.step <= 2
    assert tight.checkpoint_step is None


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_not_the_training(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = MeasuredTrainer.save_model

    def full(self: MeasuredTrainer, *args: object, **options: object) -> None:
        save(self, *args, **options)  # type: ignore[arg-type]
        if self.state.global_step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MeasuredTrainer, "save_model", full)
    end, said = run(job(tmp_path, texts, checkpoint_steps=1))
    assert isinstance(end, TrainingResult), end
    lost = [message for message in said if isinstance(message, NotSaved)]
    assert [message.step for message in lost] == [2]
    assert checkpoints.steps_of(tmp_path) == [3, 1]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-3", "checkpoint-1"}


def test_a_disk_that_stays_full_is_the_machines_fault_and_whole_checkpoints_stay(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = MeasuredTrainer.save_model

    def full(self: MeasuredTrainer, *args: object, **options: object) -> None:
        save(self, *args, **options)  # type: ignore[arg-type]
        if self.state.global_step >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MeasuredTrainer, "save_model", full)
    end, _ = run(job(tmp_path, texts, checkpoint_steps=1))
    assert isinstance(end, Unable)
    assert end.checkpoint_step == 1
    assert "disk" in end.reason
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1"}


def test_texts_that_make_no_micro_batch_are_refused(tmp_path: Path) -> None:
    few = prepared(tmp_path / "texts", [9, 9, 9])
    end, _ = run(job(tmp_path / "out", few, micro_batch_size=8, effective_batch_size=8))
    assert isinstance(end, Refused)
    assert "micro_batch_size is 8" in end.reason


def test_target_modules_that_the_model_has_not_are_refused(tmp_path: Path, texts: Path) -> None:
    end, _ = run(job(tmp_path, texts, target_modules=["q_prog"]))
    assert isinstance(end, Refused)
    assert "q_prog" in end.reason
    shutil.rmtree(tmp_path)


def test_the_held_out_loss_is_the_same_whatever_the_micro_batch(tmp_path: Path) -> None:
    """A mean over tokens, of the same rows on the way and of all of them at the end."""
    lengths = np.random.default_rng(5).integers(3, 30, 100)
    many = prepared(tmp_path / "texts", lengths)
    seen = {}
    for size in (1, 4):
        asked = job(
            tmp_path / str(size),
            many,
            micro_batch_size=size,
            compute_dtype="fp32",
            quantization="none",
            lora_dropout=0.0,
            learning_rate=1e-7,
            eval_fraction=0.8,
            max_steps=2,
            checkpoint_steps=1,
        )
        end, said = run(asked)
        assert isinstance(end, TrainingResult), end
        (first,) = (message.loss for message in said if isinstance(message, Evaluated))
        seen[size] = first, end.eval_loss, end.eval_tokens
    assert seen[1] == pytest.approx(seen[4], rel=1e-5)
    assert seen[1][0] != pytest.approx(seen[1][1], rel=5e-6), "80 rows are held out"
