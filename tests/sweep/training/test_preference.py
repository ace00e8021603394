"""Training on pairs of completions, held against TRL's `DPOTrainer`."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import PairLoss, TrialConfig
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.records import QualityReport
from qlora_sweep.sweep.data.batches import TokenizedDataset
from qlora_sweep.sweep.predict.memory.predictor import CpuMemory
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.training.messages import QualityCommand
from qlora_sweep.sweep.training.preference import Preference
from qlora_sweep.sweep.training.quality import Quality
from tests.sweep.data.prepared import prepared_pairs
from tests.sweep.training.devices import Full
from tests.sweep.training.tiny import (
    BRIEF,
    TINY,
    measured,
    outcome_of,
    tiny_base,
    tiny_config,
    tiny_loop,
)
from tests.tables import column

PAIRS: tuple[dict[str, list[int]], ...] = (
    {"prompt_ids": [5, 6, 7], "chosen_ids": [8, 9, 10, 2], "rejected_ids": [11, 2]},
    {"prompt_ids": [15, 16], "chosen_ids": [18, 2], "rejected_ids": [19, 20, 21, 22, 2]},
    {"prompt_ids": [25, 26, 27, 28, 29], "chosen_ids": [30], "rejected_ids": [31, 32]},
    {"prompt_ids": [35], "chosen_ids": [36, 37, 38, 39, 40, 41, 2], "rejected_ids": [36, 2]},
)
EXACT: dict[str, Any] = {
    "compute_dtype": "fp32",
    "quantization": "none",
    "double_quant": False,
    "checkpoint_fraction": 0.0,
    "micro_batch_size": len(PAIRS),
}


def on_pairs(**settings: Any) -> TrialConfig:
    return tiny_config(method="dpo", **settings)


@pytest.mark.parametrize(
    "settings",
    column(
        """
        {reference: precomputed}
        {loss_type: ipo, dpo_beta: 0.5, effective_batch_size: 4}
        {checkpoint_fraction: 0.0, micro_batch_size: 3}
        {lora_dropout: 0.1, loss_type: hinge}
        """
    ),
    ids=str,
)
def test_a_trial_on_pairs_is_a_real_one(settings: dict[str, Any]) -> None:
    config = on_pairs(**settings)
    found = measured(outcome_of(config, steps=BRIEF))
    assert found.tokens_per_second == pytest.approx(config.tokens_per_step / found.step_seconds)
    assert found.samples_per_second == pytest.approx(config.samples_per_step / found.step_seconds)
    assert config.tokens_per_step == 2 * config.samples_per_step * config.seq_len
    # The adapters begin at zero, so that policy and reference agree.
    at_first = {"sigmoid": math.log(2), "ipo": (1 / (2 * config.dpo_beta)) ** 2, "hinge": 1.0}
    assert 0.5 * at_first[config.loss_type] < found.final_loss < at_first[config.loss_type]


def test_8_bits_are_compared_where_the_loss_of_pairs_has_vanished() -> None:
    config = on_pairs(compute_dtype="int8", loss_type="hinge", dpo_beta=1000)
    found = measured(outcome_of(config, steps=BRIEF))
    assert found.final_loss == 0.0
    assert found.faithfulness is not None
    assert 0 < found.faithfulness.gradient_error < found.faithfulness.accepted_gradient_error


@pytest.fixture(scope="module")
def trls_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what makes TRL's trainer on a model."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from qlora_sweep.sweep.data.preparing import load_tokenizer

    class Trainer(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    directory = load_model_spec("demo").tokenizer_path
    assert directory is not None
    tokenizer = load_tokenizer(directory, name="demo")

    def made(model: Any, config: TrialConfig) -> Any:
        arguments = DPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=config.micro_batch_size,
            beta=config.dpo_beta,
            loss_type=config.loss_type,
            precompute_ref_log_probs=config.reference == "precomputed",
            max_length=config.seq_len,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
        )
        rows = Dataset.from_list(list(PAIRS))
        return Trainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)

    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("loss_type", "reference"),
    [*((loss, "adapter_off") for loss in get_args(PairLoss)), ("sigmoid", "precomputed")],
)
def test_a_step_on_pairs_is_trls(trls_trainer: Any, loss_type: str, reference: str) -> None:
    import torch

    config = on_pairs(**EXACT, loss_type=loss_type, reference=reference, dpo_beta=0.3, seq_len=8)
    with tiny_loop(config) as loop:
        trainer = trls_trainer(loop.attached.model, config)
        trainer.get_train_dataloader()
        batch = trainer.data_collator(list(trainer.train_dataset))
        # TRL keeps a copy of adapters that it is given, as the reference: fresh ones are the base.
        for name, parameter in loop.attached.model.named_parameters():
            if "lora_B.default" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        asked = trainer.compute_loss(trainer.model, dict(batch))
        asked.backward()
        parameters = loop.attached.trainable_parameters()
        gradients = [parameter.grad.clone() for parameter in parameters]
        loop.optimizer.zero_grad()
        own = {"input_ids": batch["input_ids"]}
        own["labels"] = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        if reference == "precomputed":
            own = loop._with_reference(own)
            known = torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]])
            torch.testing.assert_close(own["reference"], known, rtol=1e-5, atol=1e-5)
        loss = loop.trained(**own).loss
        loss.backward()
        assert float(loss) == pytest.approx(float(asked), abs=1e-5)
        for gradient, parameter in zip(gradients, parameters, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{}, {"reference": "precomputed", "packing": "grouped", "seq_len": 16}],
    ids=str,
)
def test_a_trial_on_a_dataset_of_pairs_trains_on_whole_ones(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    from qlora_sweep.sweep.data.batches import trial_batches

    dataset = TokenizedDataset(prepared_pairs(tmp_path, count=40), eval_fraction=0.1, seed=0)
    config = on_pairs(**{"micro_batch_size": 4, "seq_len": 12, **settings})
    made = trial_batches(dataset, config)
    for batch in (*made.largest, *made.round):
        chosen, rejected = batch["input_ids"].chunk(2)
        assert len(chosen) == 4
        assert (chosen[:, :3] == rejected[:, :3]).all()
        assert (chosen[:, 3:] != 80).all()
        assert (rejected[:, 3:] != 70).all()
    for batch in made.largest:
        assert batch["input_ids"].shape == (8, min(config.seq_len, 15))
    found = measured(outcome_of(config, dataset=dataset, steps=BRIEF))
    assert found.loss_tokens_per_step == pytest.approx(made.loss_tokens_per_step)
    each = found.loss_tokens_per_step / config.samples_per_step
    assert found.tokens_per_second == pytest.approx(found.samples_per_second * each, rel=1e-3)
    assert found.padding_waste == pytest.approx(made.epoch.waste)


def test_what_pairs_teach_shows_in_the_loss_and_the_wins_of_those_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = TokenizedDataset(prepared_pairs(tmp_path, count=60), eval_fraction=0.2, seed=0)
    settings = {"learning_rate": 1e-2, "target_modules": "all-linear", "packing": "grouped"}
    config = on_pairs(reference="precomputed", micro_batch_size=4, seq_len=16, **settings)
    with tiny_base(config) as base:

        def learned(tokens: int) -> QualityReport:
            asked = QualityCommand(tokens=tokens, seed=3, eval_seq_len=16, eval_tokens=10_000)
            found = Quality(base, config, dataset, asked, Full()).run()
            assert isinstance(found, QualityReport), found
            return found

        little = learned(30)
        much = learned(2000)
        real = Preference.forward

        def small(self: Preference, **batch: Any) -> Any:
            if not self.training and len(batch["labels"]) > 4:
                raise RuntimeError("not enough memory")
            return real(self, **batch)

        monkeypatch.setattr(Preference, "forward", small)
        parts = learned(2000)
    assert little.steps == 1
    assert little.train_loss == pytest.approx(math.log(2), rel=1e-3), "policy and reference agree"
    assert much.eval_loss < 0.5 * little.eval_loss
    assert sum(n for _, n in much.eval_blocks or ()) == much.eval_rows == 12
    assert much.reward_accuracy_ci95 == pytest.approx((0.757, 1.0), abs=1e-3), "Wilson's"
    for report in (much, parts):
        assert (report.eval_rows, report.eval_wins) == (12, 12)
    assert parts.eval_tokens == much.eval_tokens
    assert parts.eval_loss == pytest.approx(much.eval_loss, rel=1e-2)


def test_pairs_that_are_cut_before_they_differ_are_left_out(tmp_path: Path) -> None:
    from qlora_sweep.sweep.data.batches import trained_epoch
    from qlora_sweep.sweep.data.epoch import DIFFERENCES

    directory = prepared_pairs(tmp_path, count=10)
    np.save(directory / DIFFERENCES, np.array([3, 3, 3, 3, 3, 6, 6, 5, 9, 9], np.int32))
    dataset = TokenizedDataset(directory, eval_fraction=0.0, seed=0)
    for length, kept in ((5, 5), (7, 8), (30, 10)):
        whole = trained_epoch(dataset, on_pairs(micro_batch_size=2, seq_len=length))
        assert (len(whole.rows), whole.rows_left_out) == (kept, 10 - kept)
        assert sorted(whole.rows.documents % 2) == [0] * kept + [1] * kept


def test_what_a_cpu_needs_for_pairs_is_predicted(
    tmp_path: Path, tracing_child: TracingChildren
) -> None:
    """As near as for texts: the CPU's attention keeps less than a GPU's (`CPU_UNCERTAINTY`)."""
    config = on_pairs(micro_batch_size=8, seq_len=64, reference="precomputed")
    cpu = CpuMemory(TINY, cache_dir=tmp_path, tracer=tracing_child)
    predicted = cpu.predict(config).peak_allocated_bytes
    from qlora_sweep.sweep.training.device import CpuDevice

    # What earlier tests left counts as well.
    gc.collect()
    before = CpuDevice().allocated_bytes()
    found = measured(outcome_of(config, steps=BRIEF)).peak_allocated_bytes
    assert predicted == pytest.approx(found - before, rel=0.05)
