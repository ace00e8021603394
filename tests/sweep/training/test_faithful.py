"""8-bit compute in real trials: it ran, it is close to 16 bits, and what is not is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qlora_sweep.storage.records import Faithfulness, Ineffective, OutOfMemory
from tests.lazy import lazily
from tests.sweep.predict.rows import EIGHT_BIT, Row, describe
from tests.sweep.training.tiny import (
    BRIEF,
    TINY,
    measured,
    outcome_of,
    tiny_base,
    tiny_config,
    trial_on,
)

pytestmark = pytest.mark.usefixtures("few_compared")
torch = lazily("torch")
eight_bit = lazily("qlora_sweep.sweep.training.eight_bit")
FP8 = {"compute_dtype": "fp8", "quantization": "fp8", "micro_batch_size": 8}
INT8 = {"compute_dtype": "int8", "quantization": "int8", "micro_batch_size": 8}


def outcome(**settings: Any) -> Any:
    return outcome_of(tiny_config(**{"micro_batch_size": 8, **settings}), steps=BRIEF)


@pytest.mark.parametrize(("compute", "base"), [("fp8", "nf4"), ("int8", "int8")])
def test_a_trial_in_8_bits_is_close_to_16(compute: str, base: str) -> None:
    found = measured(outcome(compute_dtype=compute, quantization=base, lora_dropout=0.1))
    assert found.faithfulness is not None
    assert 0 < found.faithfulness.gradient_error < found.faithfulness.accepted_gradient_error
    assert found.faithfulness.gradient_cosine > 0.99


@pytest.mark.parametrize(("base", "compute"), [("fp8", "bf16"), ("int8", "fp32")])
def test_an_8_bit_base_computes_in_16_bits_too(base: str, compute: str) -> None:
    assert measured(outcome(compute_dtype=compute, quantization=base)).faithfulness is None


def test_a_check_leaves_the_base_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**FP8)

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    with tiny_base(config) as base:

        def loss() -> float:
            torch.manual_seed(0)
            return measured(trial_on(base, config, steps=BRIEF).run()).final_loss

        assert loss() == loss()
        assert not base.model.get_input_embeddings()._forward_hooks
        # One that fails, too.
        monkeypatch.setattr("qlora_sweep.sweep.training.faithfulness.multiplying_in", out_of_memory)
        assert isinstance(trial_on(base, config).run(), OutOfMemory)
        assert not base.model.is_gradient_checkpointing


def test_attention_that_drops_scores_is_compared_without() -> None:
    spec = replace(TINY, config={**TINY.config, "attention_dropout": 0.5})
    found = measured(outcome_of(tiny_config(**FP8), spec=spec, steps=BRIEF)).faithfulness
    assert found is not None
    assert found.gradient_cosine > 0.99


def test_rows_of_pads_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from qlora_sweep.sweep.training.step import TrainingLoop

    whole = TrainingLoop.next_batch

    def padded(loop: Any) -> Any:
        batch = whole(loop)
        batch["labels"][-1] = -100
        return batch

    monkeypatch.setattr(TrainingLoop, "next_batch", padded)
    measured(outcome(compute_dtype="int8", quantization="nf4"))


def test_adapters_that_are_more_work_than_the_layers_below_are_no_sign_of_16_bits() -> None:
    measured(outcome(**FP8, lora_rank=256, target_modules="all-linear"))


def _without_scales(real: Any) -> Any:
    return lambda values, kind, *_: real(values, kind)


def _with_the_gradient_mixed_up(real: Any) -> Any:
    def turned(*args: Any, is_transposed: bool) -> Any:
        weight = real(*args, is_transposed=is_transposed)
        return weight.flip(0) if is_transposed else weight

    return turned


def _in_16_bits(_: Any) -> Any:
    return lambda layer, x, _: torch.nn.functional.linear(x, layer.dequantized())


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("rounded", _without_scales),
        ("_in_8_bits", _with_the_gradient_mixed_up),
        ("_LARGEST", lambda _: {"fp8": 448.0, "int8": 3.0}),
        ("_forward", _in_16_bits),
    ],
)
def test_a_kernel_that_is_wrong_cannot_win(
    name: str, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(eight_bit, name)
    monkeypatch.setattr(f"qlora_sweep.sweep.training.eight_bit.{name}", spoil(real))
    found = outcome(**INT8)
    # Without scales nothing is learned at all, which another proof sees first.
    assert isinstance(found, Ineffective), found
    assert name != "_forward" or found.setting == "compute_dtype"


def in_8_bits(linear: Any, kind: str, *, computes: bool = True) -> Any:
    model = torch.nn.Sequential(linear)
    eight_bit.to_8_bits(model, kind)
    if computes:
        eight_bit.compute_in_8_bits(model, kind)
    return model


@pytest.mark.parametrize(("kind", "value"), [("fp8", float("inf")), ("int8", float("nan"))])
def test_a_weight_that_8_bits_cannot_hold_is_refused(kind: str, value: float) -> None:
    linear = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    linear.weight.data[3, 5] = value
    with pytest.raises(eight_bit.UnfitWeightError, match=r"^0 has values"):
        in_8_bits(linear, kind)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_rows_of_zeros_stay_zeros_and_no_rows_make_no_products(kind: str) -> None:
    linear = torch.nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    linear.weight.data[3] = 0
    model = in_8_bits(linear, kind)
    x = torch.randn(40, 32, dtype=torch.bfloat16)
    x[7] = 0
    x.requires_grad_()
    y = model(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert not y[7].any()
    assert not y[:, 3].any()
    assert x.grad.isfinite().all()
    for shape in ((0, 32), (2, 0, 32)):
        assert model(torch.zeros(shape, dtype=torch.bfloat16)).shape == (*shape[:-1], 16)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_small_gradients_pass_an_8_bit_base_in_fp16(kind: str) -> None:
    linear = torch.nn.Linear(256, 128, bias=False, dtype=torch.float16)
    torch.nn.init.normal_(linear.weight, std=0.02)
    model = in_8_bits(linear, kind, computes=False)
    x = torch.randn(40, 256, dtype=torch.float16, requires_grad=True)
    gradient = 1e-4 * torch.randn(40, 128)
    model(x).backward(gradient.half())
    exact = gradient @ model[0].dequantized().float()
    assert (x.grad.float() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("row", [r for r in EIGHT_BIT if "faithfulness" in r], ids=describe)
def test_what_ran_on_a_gpu_is_faithful(row: Row) -> None:
    from qlora_sweep.sweep.training.faithfulness import unfaithful

    found = Faithfulness.model_validate(row["faithfulness"])
    assert unfaithful(found) is None
    # The same is not said of gradients that have nothing to do with each other.
    assert unfaithful(found.model_copy(update={"gradient_error": 2**0.5})) is not None


def test_a_loss_that_few_short_examples_set_off_by_chance_is_no_sign_of_wrong_products() -> None:
    """As fifty tokens after some training steps: that NF4 is near zero off is chance too."""
    from qlora_sweep.sweep.training.faithfulness import unfaithful

    found = Faithfulness(
        loss_error=0.054,
        loss_error_margin=0.05,
        gradient_error=0.1,
        gradient_cosine=0.99,
        accepted_gradient_error=0.3,
        accepted_loss_error=0.016,
    )
    assert unfaithful(found) is None
    assert unfaithful(found.model_copy(update={"loss_error_margin": 0.03})) is not None


def test_a_margin_is_of_how_micro_batches_differ() -> None:
    """Of 2,000 sets of micro-batches that are off by chance alone, hardly one is outside it."""
    from qlora_sweep.sweep.training.faithfulness import _margin

    numpy_random = np.random.default_rng(0)
    shares = np.array([0.1, 0.2, 0.2, 0.1, 0.1, 0.3])
    outside = 0
    for _ in range(2000):
        off = shares * numpy_random.normal(0.0, 1.0 / np.sqrt(shares))
        outside += abs(off.sum()) > _margin(off, shares)
    assert 0.002 < outside / 2000 < 0.05
    assert _margin(np.array([0.3]), np.array([1.0])) == 0.0
