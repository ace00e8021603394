"""Training on pairs of completions, held against TRL's `DPOTrainer`."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from search_spaces.config import PairLoss, TrialConfig
from search_spaces.models import load_model_spec
from tests.sweep.training.tiny import BRIEF, measured, outcome_of, tiny_config, tiny_loop

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


def on_pairs(**knobs: Any) -> TrialConfig:
    return tiny_config(method="dpo", **knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"reference": "precomputed"},
        {"loss_type": "ipo", "dpo_beta": 0.5, "effective_batch_size": 4},
        {"checkpoint_fraction": 0.0, "micro_batch_size": 3},
        {"data_parallel": 1, "lora_dropout": 0.1, "loss_type": "hinge"},
    ],
    ids=str,
)
def test_a_trial_on_pairs_is_a_real_one(knobs: dict[str, Any]) -> None:
    config = on_pairs(**knobs)
    found = measured(outcome_of(config, steps=BRIEF))
    assert found.tokens_per_second == pytest.approx(config.tokens_per_step / found.step_seconds)
    assert found.samples_per_second == pytest.approx(config.samples_per_step / found.step_seconds)
    assert config.tokens_per_step == 2 * config.samples_per_step * config.seq_len
    # The adapters begin at zero, so that policy and reference agree.
    at_first = {"sigmoid": math.log(2), "ipo": (1 / (2 * config.dpo_beta)) ** 2, "hinge": 1.0}
    assert 0.5 * at_first[config.loss_type] < found.final_loss < at_first[config.loss_type]


LOSSES = (*get_args(PairLoss),)


@pytest.fixture(scope="module")
def trls_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what makes TRL's trainer on a model."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from sweep.data.preparing import load_tokenizer

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
@pytest.mark.parametrize("reference", ["adapter_off", "precomputed"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_step_on_pairs_is_trls(trls_trainer: Any, loss_type: str, reference: str) -> None:
    config = on_pairs(**EXACT, loss_type=loss_type, reference=reference, dpo_beta=0.3, seq_len=8)
    import torch

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
