"""The kernels of 8-bit layers on a GPU, against the reference in float."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from qlora_sweep.sweep.training import eight_bit
from qlora_sweep.sweep.training.eight_bit import TYPES, compute_in_8_bits, to_8_bits
from qlora_sweep.sweep.training.fitting import multiplying_in

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
SHAPES = [(1024, 4096), (14336, 4096), (4096, 14336), (48, 112), (16, 16), (30, 256)]
"""Output and input features, of a 7B model and odd ones."""
BASES = [("fp8", "fp8"), ("int8", "int8"), ("nf4", "fp8"), ("nf4", "int8")]
"""What a base is stored in, and computed in."""
KINDS = ["fp8", "int8"]


def linear(rows: int, columns: int, base: str, *, is_nested: bool = False) -> Any:
    """Return a model of one layer, its weight in the base."""
    torch.manual_seed(rows + columns)
    wide = torch.nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device="cuda")
    torch.nn.init.normal_(wide.weight, std=0.02)
    model = torch.nn.Sequential(wide)
    if base in TYPES:
        to_8_bits(model, base)
        return model
    packed = bnb.nn.Linear4bit(
        columns, rows, bias=False, compute_dtype=torch.bfloat16, quant_type=base
    )
    packed.weight = bnb.nn.Params4bit(
        wide.weight.data, requires_grad=False, quant_type=base, compress_statistics=is_nested
    ).to("cuda")
    return torch.nn.Sequential(packed)


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [16, 4096, 14336])
@pytest.mark.parametrize("has_times", [False, True])
@pytest.mark.parametrize("has_less", [False, True])
def test_rounding_is_that_of_the_reference(
    kind: str, columns: int, has_times: bool, has_less: bool
) -> None:
    torch.manual_seed(0)
    values = torch.randn(70, columns, device="cuda", dtype=torch.bfloat16)
    less = torch.randn(columns, device="cuda") if has_less else None
    values[3] = 0 if less is None else less
    if less is not None:
        # What is taken away from itself is nothing.
        less = less.to(torch.bfloat16).float()
    times = torch.rand(columns, device="cuda") if has_times else None
    narrow, scales = eight_bit.rounded(values, kind, times, less)
    on_host = (None if one is None else one.cpu() for one in (times, less))
    reference, expected = eight_bit.rounded(values.cpu(), kind, *on_host)
    torch.testing.assert_close(scales.cpu(), expected)
    # A value between two may go either way.
    assert error(narrow.cpu().float() * expected, reference.float() * expected) < 0.004
    assert not narrow[3].float().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_is_not_rounded_to_one(kind: str, value: float) -> None:
    values = torch.ones(4, 64, device="cuda")
    values[1, 5] = value
    narrow, scales = eight_bit.rounded(values, kind)
    assert scales.isfinite().flatten().tolist() == [True, False, True, True]
    assert not (narrow.float() * scales)[1].isfinite().any()


@pytest.mark.parametrize(("base", "kind"), BASES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_products_are_near_those_in_16_bits(base: str, kind: str, is_compiled: bool) -> None:
    limit = {"fp8": 0.05, "int8": 0.02}[kind]
    # Compiling takes seconds a shape.
    for rows, columns in SHAPES[:1] if is_compiled else SHAPES:
        model = linear(rows, columns, base, is_nested=True)
        compute_in_8_bits(model, kind)
        for tokens in (5, 512):
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            gradient = torch.randn(tokens, rows, device="cuda", dtype=torch.bfloat16)
            torch._dynamo.reset()
            run = torch.compile(model, dynamic=False) if is_compiled else model
            narrow = _result_and_gradient(run, x, gradient)
            with multiplying_in(model, None):
                wide = _result_and_gradient(model, x, gradient)
            assert error(narrow[0], wide[0]) < limit, (rows, columns, tokens)
            assert error(narrow[1], wide[1]) < limit, (rows, columns, tokens)


@pytest.mark.parametrize(("base", "kind"), BASES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_fitted_products_are_nearer(base: str, kind: str, is_compiled: bool) -> None:
    torch.manual_seed(0)
    rows, columns = SHAPES[0]
    model = linear(rows, columns, base)
    compute_in_8_bits(model, kind)
    x = torch.randn(512, columns, device="cuda", dtype=torch.bfloat16)
    x[:, 5] += 25
    x[:, 9] *= 15
    gradient = torch.randn(512, rows, device="cuda", dtype=torch.bfloat16)
    with multiplying_in(model, None):
        exact, exact_gradient = _result_and_gradient(model, x, gradient)
    plain, _ = _result_and_gradient(model, x, gradient)
    with torch.no_grad():
        eight_bit.adapt(model, lambda: model(x))
    torch._dynamo.reset()
    run = torch.compile(model, dynamic=False) if is_compiled else model
    fitted, fitted_gradient = _result_and_gradient(run, x, gradient)
    # Of what FP8 rounds, each value's error is in proportion to itself: one mean is little of it.
    least = {"fp8": 0.99, "int8": 0.8}[kind]
    assert error(fitted, exact) < least * error(plain, exact)
    assert error(fitted_gradient, exact_gradient) < 0.06


@pytest.mark.parametrize(("base", "kind"), BASES)
@pytest.mark.parametrize("columns", [512, 4096])
def test_what_the_compiler_makes_of_a_fitted_layer_is_the_same(
    base: str, kind: str, columns: int
) -> None:
    """It fuses the rounding with what makes the input, whose cast to 16 bits it may pass over: less
    a large mean the largest value is then some percent larger than what the scale was taken of."""
    torch.manual_seed(0)
    model = linear(1024, columns, base)
    compute_in_8_bits(model, kind)
    factor = torch.randn(columns, device="cuda")
    # Features whose mean is five times their spread are the largest of each row.
    factor[::64] = 0
    offset = torch.zeros(columns, device="cuda")
    offset[::64] = 40

    def made(x: torch.Tensor) -> torch.Tensor:
        varied = torch.nn.functional.silu(x) * factor + offset + 8 * x * (offset > 0)
        return varied.to(torch.bfloat16)

    def run(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(made(x))
        return result

    x = torch.randn(512, columns, device="cuda")
    with torch.no_grad():
        eight_bit.adapt(model, lambda: model(made(x)))
    gradient = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    eager, eager_gradient = _result_and_gradient(run, x, gradient)
    torch._dynamo.reset()
    compiled = torch.compile(run, dynamic=False)
    found, found_gradient = _result_and_gradient(compiled, x, gradient)
    with multiplying_in(model, None):
        exact, exact_gradient = _result_and_gradient(run, x, gradient)
    spread = (exact - exact.mean(0)).float().norm()
    off, eager_off = ((product - exact).float().norm() / spread for product in (found, eager))
    # Inputs that are not cast are another 0.01 off; values that wrap 0.14 to 0.32.
    assert off < 1.2 * eager_off + 0.01
    off, eager_off = (error(g, exact_gradient) for g in (found_gradient, eager_gradient))
    assert off < 1.2 * eager_off + 0.005


def _result_and_gradient(
    run: Any, x: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    given = x.clone().requires_grad_()
    result = run(given)
    result.backward(gradient)
    assert given.grad is not None
    return result.detach(), given.grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_keeps_its_products_in_8_bits(kind: str) -> None:
    gate, up = (
        torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    before = torch.cuda.memory_allocated()
    result = eight_bit._Gate.apply(gate, up, kind)
    kept = torch.cuda.memory_allocated() - before - result.nbytes
    assert kept < 1.1 * gate.nbytes
    gradient = torch.randn_like(result)
    found = torch.autograd.grad(result, (gate, up), gradient)
    exact = torch.autograd.grad(torch.nn.functional.silu(gate) * up, (gate, up), gradient)
    for one, other in zip(found, exact, strict=True):
        assert error(one, other) < 0.05
