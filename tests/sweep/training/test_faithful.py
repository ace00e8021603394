"""8-bit compute in real trials: it ran, it is close to 16 bits, and what is not is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from storage.records import Faithfulness, Ineffective, Measured, OutOfMemory
from sweep.training import eight_bit, proof
from sweep.training.model import build_base
from sweep.training.proof import unfaithful
from sweep.training.step import TrainingLoop
from tests.sweep.predict.rows import EIGHT_BIT, Row, describe
from tests.sweep.training.tiny import TINY, tiny_base, tiny_config, trial_on

KINDS = [("fp8", "fp8"), ("fp8", "nf4"), ("int8", "int8"), ("int8", "nf4"), ("int8", "fp4")]


def outcome(**settings: Any) -> Any:
    config = tiny_config(**settings)
    with tiny_base(config) as base:
        return trial_on(base, config).run()


@pytest.mark.parametrize(("compute", "base"), KINDS)
def test_a_trial_in_8_bits_is_close_to_16(compute: str, base: str) -> None:
    measured = outcome(compute_dtype=compute, quantization=base, lora_dropout=0.1)
    assert isinstance(measured, Measured), measured
    found = measured.measurement.faithfulness
    assert found is not None
    assert 0 < found.gradient_error < found.accepted_gradient_error
    assert found.gradient_cosine > 0.99


@pytest.mark.parametrize("base", ["fp8", "int8"])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_an_8_bit_base_computes_in_16_bits_too(base: str, compute: str) -> None:
    measured = outcome(compute_dtype=compute, quantization=base)
    assert isinstance(measured, Measured), measured
    assert measured.measurement.faithfulness is None


@pytest.mark.parametrize("checkpointed", [0.0, 1.0])
def test_a_check_leaves_the_base_as_it_was(checkpointed: float) -> None:
    config = tiny_config(compute_dtype="fp8", quantization="fp8", checkpoint_fraction=checkpointed)
    with tiny_base(config) as base:
        torch.manual_seed(0)
        first = trial_on(base, config).run()
        torch.manual_seed(0)
        second = trial_on(base, config).run()
        assert not base.model.get_input_embeddings()._forward_hooks
    assert isinstance(first, Measured)
    assert isinstance(second, Measured)
    assert first.measurement.final_loss == second.measurement.final_loss


def test_a_check_that_fails_leaves_no_layer_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(proof, "multiplying_in", out_of_memory)
    config = tiny_config(compute_dtype="fp8", quantization="fp8", checkpoint_fraction=0.0)
    with tiny_base(config) as base:
        assert isinstance(trial_on(base, config).run(), OutOfMemory)
        assert not base.model.is_gradient_checkpointing


def test_attention_that_drops_scores_is_compared_without() -> None:
    spec = replace(TINY, config={**TINY.config, "attention_dropout": 0.5})
    config = tiny_config(compute_dtype="fp8", quantization="fp8")
    base = build_base(config, spec=spec, weights="random", device=torch.device("cpu"), seed=0)
    measured = trial_on(base, config).run()
    assert isinstance(measured, Measured), measured
    found = measured.measurement.faithfulness
    assert found is not None
    assert found.gradient_cosine > 0.99


def test_rows_of_pads_are_compared_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = TrainingLoop.next_batch

    def padded(loop: TrainingLoop) -> Any:
        batch = whole(loop)
        batch["labels"][-1] = -100
        return batch

    monkeypatch.setattr(TrainingLoop, "next_batch", padded)
    assert isinstance(outcome(compute_dtype="int8", quantization="nf4"), Measured)


def test_adapters_that_are_more_work_than_the_layers_below_are_no_sign_of_16_bits() -> None:
    wide = {"lora_rank": 256, "target_modules": "all-linear"}
    assert isinstance(outcome(compute_dtype="fp8", quantization="fp8", **wide), Measured)


def _forgets_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = eight_bit.rounded
    monkeypatch.setattr(
        eight_bit, "rounded", lambda values, kind, times=None: rounded(values, kind)
    )


def _mixes_up_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = eight_bit._in_8_bits

    def turned(*args: Any, is_transposed: bool) -> torch.Tensor:
        weight = whole(*args, is_transposed=is_transposed)
        return weight.flip(0) if is_transposed else weight

    monkeypatch.setattr(eight_bit, "_in_8_bits", turned)


def _rounds_to_a_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit, "_LARGEST", {"fp8": 448.0, "int8": 3.0})


@pytest.mark.parametrize(
    "spoil", [_forgets_the_scales, _mixes_up_the_gradient, _rounds_to_a_few_values]
)
def test_a_kernel_that_is_wrong_cannot_win(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    found = outcome(compute_dtype="int8", quantization="int8")
    # Without scales nothing is learned at all, which another proof sees first.
    assert isinstance(found, Ineffective), found


def test_products_that_stay_in_16_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_16_bits(layer: Any, x: torch.Tensor, _: object) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.dequantized())

    monkeypatch.setattr(eight_bit, "_forward", in_16_bits)
    found = outcome(compute_dtype="int8", quantization="int8")
    assert isinstance(found, Ineffective)
    assert found.knob == "compute_dtype"


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_weight_that_8_bits_cannot_hold_is_refused(kind: str, value: float) -> None:
    linear = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    linear.weight.data[3, 5] = value
    with pytest.raises(eight_bit.UnfitWeightError, match=r"^0 has values"):
        eight_bit.to_8_bits(torch.nn.Sequential(linear), kind)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_rows_of_zeros_stay_zeros(kind: str) -> None:
    linear = torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    linear.weight.data[3] = 0
    model = torch.nn.Sequential(linear)
    eight_bit.to_8_bits(model, kind)
    eight_bit.compute_in_8_bits(model, kind)
    x = torch.randn(40, 32, dtype=torch.bfloat16)
    x[7] = 0
    x.requires_grad_()
    y = model(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert not y[7].any()
    assert not y[:, 3].any()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_small_gradients_pass_an_8_bit_base_in_fp16(kind: str) -> None:
    linear = torch.nn.Linear(256, 128, bias=False, dtype=torch.float16)
    torch.nn.init.normal_(linear.weight, std=0.02)
    model = torch.nn.Sequential(linear)
    eight_bit.to_8_bits(model, kind)
    x = torch.randn(40, 256, dtype=torch.float16, requires_grad=True)
    gradient = 1e-4 * torch.randn(40, 128)
    model(x).backward(gradient.half())
    exact = gradient @ model[0].dequantized().float()
    assert x.grad is not None
    assert (x.grad.float() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_rows_make_no_products(shape: tuple[int, ...]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, dtype=torch.bfloat16))
    eight_bit.to_8_bits(model, "fp8")
    eight_bit.compute_in_8_bits(model, "fp8")
    assert model(torch.zeros(shape, dtype=torch.bfloat16)).shape == (*shape[:-1], 16)


@pytest.mark.parametrize("row", [r for r in EIGHT_BIT if "faithfulness" in r], ids=describe)
def test_what_ran_on_a_gpu_is_faithful(row: Row) -> None:
    found = Faithfulness.model_validate(row["faithfulness"])
    assert unfaithful(found) is None
    # The same is not said of gradients that have nothing to do with each other.
    assert unfaithful(found.model_copy(update={"gradient_error": 2**0.5})) is not None
