"""Trials whose rows have images: what sees is frozen, and the decoder trains on what it saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import Ineffective
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.images import SeeingRows
from qlora_sweep.sweep.training.model import decoder_layers, vision_modules
from qlora_sweep.sweep.training.step import TrainingLoop
from tests.seeing import CONFIGS, seeing, seeing_config
from tests.sweep.training.tiny import BRIEF, measured, outcome_of, tiny_base, trial_on

pytestmark = pytest.mark.usefixtures("our_own_code")
KINDS = sorted(CONFIGS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_fraction": 0.5},
        {"quantization": "nf4", "upcast_fp32": True},
        {"target_modules": "all-linear", "checkpoint_fraction": 0.0},
    ],
    ids=["half", "nf4", "all-linear"],
)
def test_a_trial_with_images_is_measured(kind: str, settings: dict[str, Any]) -> None:
    outcome = outcome_of(seeing_config(**settings), spec=seeing(kind), steps=BRIEF)
    assert measured(outcome).final_loss == pytest.approx(6.2, abs=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_compared_in_parts_where_8_bits_recompute(kind: str, few_compared: None) -> None:
    settings = {"quantization": "nf4", "compute_dtype": "int8", "micro_batch_size": 3}
    config = seeing_config(**settings, checkpoint_fraction=0.5)
    found = measured(outcome_of(config, spec=seeing(kind), steps=BRIEF))
    assert found.final_loss == pytest.approx(6.2, abs=0.3)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("qwen3_5", "none"), ("qwen3_vl_moe", "none"), ("qwen3_vl_moe", "nf4")],
)
def test_a_hybrid_and_a_mixture_train_on_images(kind: str, quantization: str) -> None:
    config = seeing_config(seq_len=72, micro_batch_size=1, quantization=quantization)
    outcome = outcome_of(config, spec=seeing(kind), steps=BRIEF)
    assert measured(outcome).final_loss == pytest.approx(6.2, abs=1.5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_adapter_and_no_4_bits_are_in_what_sees(kind: str) -> None:
    import bitsandbytes as bnb
    from peft.tuners.lora import LoraLayer

    config = seeing_config(quantization="nf4", target_modules="all-linear")
    with tiny_base(config, spec=seeing(kind)) as base, attached(base, config) as attachment:
        tower = vision_modules(base.model)
        assert not any(isinstance(one, LoraLayer | bnb.nn.Linear4bit) for one in tower)
        assert len(attachment.layers) == 6
        for layer in attachment.layers:
            assert any(isinstance(one, LoraLayer) for one in layer.modules())
        assert not any(parameter.requires_grad for one in tower for parameter in one.parameters())
        assert not set(map(id, tower)) & set(map(id, decoder_layers(base.model)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_the_upcast_leaves_what_sees_in_16_bits(kind: str, quantization: str) -> None:
    config = seeing_config(quantization=quantization, upcast_fp32=True, compute_dtype="bf16")
    with tiny_base(config, spec=seeing(kind)) as base:
        tower = {
            parameter.dtype
            for one in vision_modules(base.model)
            for parameter in one.parameters(recurse=False)
        }
        assert tower == {torch.bfloat16}
        assert base.model.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_what_sees_keeps_nothing_and_runs_once(kind: str, fraction: float) -> None:
    """transformers would have its output want a gradient where layers are recomputed."""
    config = seeing_config(checkpoint_fraction=fraction)
    wanted: list[bool] = []
    with tiny_base(config, spec=seeing(kind)) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        tower, *_ = vision_modules(base.model)
        tower.register_forward_hook(
            lambda _, __, output: wanted.append(output.last_hidden_state.requires_grad)
        )
        loop.step()
        rows = SeeingRows(256, base.model.config)
        assert attachment.seen == 2 * rows.returned
    assert wanted == [False]


def losses_of(kind: str, config: TrialConfig, *, blank: bool = False) -> tuple[float, torch.Tensor]:
    """Return a micro-batch's loss and the first adapter's gradient."""
    with tiny_base(config, spec=seeing(kind)) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        for name, parameter in attachment.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        batch = loop.next_batch()
        if blank:
            batch["pixel_values"] = torch.zeros_like(batch["pixel_values"])
        loss = loop.add_gradients(batch, weight=1.0)
        gradient = attachment.trainable_parameters()[0].grad
        assert gradient is not None
        return loss, gradient.clone()


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_changes_neither_loss_nor_gradient(kind: str) -> None:
    fp32 = seeing_config(compute_dtype="fp32", checkpoint_fraction=0.0)
    loss, gradient = losses_of(kind, fp32)
    again, same = losses_of(kind, fp32.changed(checkpoint_fraction=1.0))
    assert again == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(same, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_depends_on_what_is_seen(kind: str) -> None:
    config = seeing_config(compute_dtype="fp32")
    assert losses_of(kind, config)[0] != losses_of(kind, config, blank=True)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_images_tokens_carry_no_loss_and_no_other_token_is_taken_for_one(kind: str) -> None:
    config = seeing_config()
    with tiny_base(config, spec=seeing(kind)) as base:
        rows = SeeingRows(256, base.model.config)
        # Every token that there is, among them those that stand for an image.
        batch = rows([torch.arange(212, 512), torch.arange(202, 502)])
    is_image = batch["labels"] == -100
    assert is_image.sum(dim=1).tolist() == [rows.image.tokens] * 2
    assert torch.equal(is_image, batch["input_ids"] == 500)


def test_images_that_nobody_sees_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = seeing_config()
    with tiny_base(config, spec=seeing("qwen3_vl")) as base:
        make = SeeingRows.__call__

        def text_alone(rows: SeeingRows, given: Any) -> Any:
            tokens = make(rows, given)["input_ids"]
            tokens[tokens == 500] = 0
            return {"input_ids": tokens, "labels": tokens.clone()}

        monkeypatch.setattr(SeeingRows, "__call__", text_alone)
        outcome = trial_on(base, config, steps=BRIEF).run()
    assert isinstance(outcome, Ineffective), outcome
    assert outcome.setting == "image_size"
    assert "0 of 1,024 states" in outcome.detail


def test_a_base_with_a_tower_serves_no_text_trial() -> None:
    """So it is built anew: the tower is memory that text would not take."""
    assert seeing_config().base() != seeing_config(image_size=None).base()
