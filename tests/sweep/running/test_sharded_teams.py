"""A model of which two processes hold a share each, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from search_spaces.space import StepBudget
from storage.records import Invalid, OutOfMemory
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest
from tests.sweep.running.teams import a_cpu_runner, measured
from tests.sweep.training.two_processes import told_by_two

pytestmark = pytest.mark.usefixtures("our_own_code")
STEPS = StepBudget(warmup_min=1, warmup_max=2, measured_min=3, measured_max=3)
WHOLE = TrialConfig(
    micro_batch_size=1,
    seq_len=32,
    lora_rank=2,
    target_modules="qv",
    optimizer="adamw_torch_fused",
    upcast_fp32=False,
)
DEEP = ModelSpec(
    name="deep",
    source="shipped",
    config={
        "model_type": "mistral",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "sliding_window": None,
    },
)
"""Most of it is in its layers, as of a model that one GPU cannot hold."""
SHARED = WHOLE.model_copy(update={"data_parallel": 2, "sharding": "fsdp"})


a_runner = partial(a_cpu_runner, DEEP)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedRunner]:
    with a_runner(tmp_path_factory.mktemp("logs") / "worker.log") as runner:
        yield runner


def test_two_cards_that_share_a_model_train_it_and_so_does_one_after_them(
    runner: SupervisedRunner,
) -> None:
    together = WHOLE.model_copy(update={"data_parallel": 2})
    configs = [SHARED, together, WHOLE, SHARED]
    found = [measured(runner.run(TrialRequest(config=config, steps=STEPS))) for config in configs]
    assert [one.cards for one in found] == [2, 2, 1, 2]
    # What was attached is counted as a whole, whatever a GPU holds of it.
    assert len({one.trainable_parameters for one in found}) == 1
    shared, whole, alone, again = (one.peak_allocated_bytes for one in found)
    assert shared < alone < whole
    # What is on its way between the processes differs from run to run.
    assert again == pytest.approx(shared, rel=0.2)


def test_what_one_card_has_no_room_for_two_hold_together(
    runner: SupervisedRunner, tmp_path: Path
) -> None:
    shared, alone = (
        measured(runner.run(TrialRequest(config=config, steps=STEPS))).peak_allocated_bytes
        for config in (SHARED, WHOLE)
    )
    budget = (shared + alone) // 2
    with a_runner(tmp_path / "worker.log", budget_bytes=budget) as capped:
        assert isinstance(capped.run(TrialRequest(config=WHOLE, steps=STEPS)), OutOfMemory)
        assert (
            measured(capped.run(TrialRequest(config=SHARED, steps=STEPS))).peak_allocated_bytes
            <= budget
        )


def test_a_soak_of_a_shared_model_evaluates_and_saves_on_every_card(
    runner: SupervisedRunner,
) -> None:
    soak = measured(runner.run(TrialRequest(config=SHARED, steps=STEPS, is_soak=True))).soak
    assert soak is not None
    assert soak.checkpoint_bytes > 0


def test_a_model_that_is_to_be_loaded_is_not_shared(tmp_path: Path) -> None:
    with a_runner(tmp_path / "worker.log", weights="pretrained") as runner:
        outcome = runner.run(TrialRequest(config=SHARED, steps=STEPS))
    assert isinstance(outcome, Invalid)
    assert "random weights" in outcome.detail


def test_no_bit_of_a_4_bit_weight_is_lost_on_its_way_between_the_cards(tmp_path: Path) -> None:
    for told in told_by_two("gathered_bits", directory=tmp_path, device="cpu"):
        no_numbers, are_bits_equal, are_results_equal = told
        assert int(no_numbers) > 0
        assert (are_bits_equal, are_results_equal) == ("True", "True")


def test_a_head_whose_weight_alone_is_read_is_there_in_every_step_and_shared_between_them(
    tmp_path: Path,
) -> None:
    for told in told_by_two("read_head", directory=tmp_path, device="cpu"):
        assert told == ["True", "0.5", "True", "0.5"]
