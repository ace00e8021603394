"""The kernels of INT8 products on a GPU: exact in each of their tiles, chosen by timing."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from qlora_sweep.sweep.training import eight_bit, int8_products
from qlora_sweep.sweep.training.int8_products import Case, Gpu, Shape, Tiles, candidates
from qlora_sweep.sweep.training.proof import KernelWatch, ProductWatch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
BF16 = torch.bfloat16
ROWS = [1, 17, 5120]
DEPTHS = [(1024, 4096), (48, 4096 + 16), (208, 48)]
"""Columns of a product, and its depth."""


@pytest.fixture(autouse=True)
def own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of choices of a test that begins without any."""
    path = tmp_path / "choices.json"
    monkeypatch.setattr(int8_products, "_choices", {})
    monkeypatch.setattr(int8_products, "_path", lambda: path)
    return path


def operands(m: int, n: int, k: int) -> list[torch.Tensor]:
    """Return matrices (m, k) and (n, k) of integers, and scales of rows and columns."""
    torch.manual_seed(m + n + k)
    left = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
    right = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    return [left, right, torch.rand(m, 1, device="cuda") / k, torch.rand(n, device="cuda")]


def reference(left: Any, right: Any, row_scales: Any, column_scales: Any) -> torch.Tensor:
    """Return the product in fp32, of exact sums."""
    # Doubles hold integers up to 2**53.
    sums = left.double() @ right.double().T
    return sums.float() * row_scales * column_scales


def this_gpu() -> Gpu:
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def all_tiles() -> list[list[int]]:
    """Return what each kernel of this GPU is called with."""
    kernels = candidates(torch.cuda.get_device_capability())
    return [list(astuple(kernel)) if kernel is not None else [] for kernel in kernels]


def choose(monkeypatch: pytest.MonkeyPatch, kernels: dict[Shape, Tiles | None]) -> None:
    """Let products of bf16 be made by kernels, by their shapes."""
    if this_gpu().capability < (8, 0):
        pytest.skip("there is nothing to choose before Ampere")
    choices = {}
    for shape, kernel in kernels.items():
        case = Case(this_gpu(), shape.n, shape.k, str(BF16))
        choices[case] = {shape.m: kernel}
    monkeypatch.setattr(int8_products, "_choices", choices)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("m", ROWS)
def test_each_kernel_is_exact(m: int, dtype: torch.dtype) -> None:
    for n, k in DEPTHS:
        given = operands(m, n, k)
        plain = reference(*given)
        added = torch.randn(n, device="cuda")
        for tiles in all_tiles():
            found = int8_products._made(*given, None, dtype, tiles)
            assert torch.equal(found, plain.to(dtype)), (n, k, tiles)
            found = int8_products._made(*given, added, dtype, tiles)
            # What is added may be rounded once with the scaling.
            rtol = torch.finfo(dtype).eps
            torch.testing.assert_close(found, (plain + added).to(dtype), rtol=rtol, atol=1e-5)


def test_a_result_of_more_than_two_billion_values_is_addressed() -> None:
    m, n, k = 2**16 + 5, 2**15 + 16, 32
    given = operands(m, n, k)
    for tiles in all_tiles()[:2]:
        found = int8_products._made(*given, None, BF16, tiles)
        last = [given[0][-9:], given[1], given[2][-9:], given[3]]
        assert torch.equal(found[-9:], reference(*last).to(BF16))
        del found


def test_sums_take_little_memory() -> None:
    given = operands(5120, 14336, 512)
    int8_products._made(*given, None, BF16, [])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = int8_products._made(*given, None, BF16, [])
    assert torch.cuda.max_memory_allocated() - before <= found.nbytes + 65 * 2**20


@pytest.mark.parametrize("has_added", [False, True])
def test_a_graph_has_the_kernels_that_were_chosen(
    has_added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.utils import run_and_get_code

    # Two that only their warps tell apart, and torch's own.
    few = Tiles(128, 128, 64, stages=4, warps=4)
    many = Tiles(128, 128, 64, stages=4, warps=8)
    shapes = [Shape(300, 256, 512), Shape(300, 512, 512), Shape(300, 128, 512)]
    choose(monkeypatch, dict(zip(shapes, (few, many, None), strict=True)))
    given = [operands(*shape) for shape in shapes]
    added = [torch.randn(n, device="cuda") if has_added else None for _, n, _ in shapes]

    def run(given: Any, added: Any) -> list[torch.Tensor]:
        products = []
        for (left, right, of_rows, of_columns), more in zip(given, added, strict=True):
            made = int8_products.product(left, right, of_rows, of_columns, more, BF16)
            products.append(made * 2)
        return products

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=False)
    found, [code, *_] = run_and_get_code(compiled, given, added)
    for one, other in zip(found, run(given, added), strict=True):
        torch.testing.assert_close(one, other, rtol=torch.finfo(BF16).eps, atol=1e-5)
    assert "'num_warps': 4" in code
    assert "'num_warps': 8" in code
    assert "int8_product_in_chunks" in code


@pytest.mark.parametrize("is_triton", [True, False])
def test_products_of_a_step_are_noted(is_triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.nn.Linear(512, 256, bias=False, dtype=BF16, device="cuda")
    model = torch.nn.Sequential(wide)
    eight_bit.to_8_bits(model, "int8")
    eight_bit.compute_in_8_bits(model, "int8")
    kernel = Tiles(64, 64, 64, stages=2, warps=4) if is_triton else None
    choose(monkeypatch, {Shape(300, 256, 512): kernel, Shape(300, 512, 256): kernel})
    x = torch.randn(300, 512, device="cuda", dtype=BF16, requires_grad=True)
    work = 300 * 256 * 512
    with KernelWatch() as eager:
        forward = model(x)
    assert eager.product_work == {torch.int8: work}
    with KernelWatch() as eager:
        forward.sum().backward()
    assert eager.product_work == {torch.int8: work}
    torch._dynamo.reset()
    model.compile(fullgraph=True, dynamic=False)
    model(x).sum().backward()
    with ProductWatch() as compiled:
        model(x).sum().backward()
    assert compiled.product_work == {torch.int8: 2 * work}


def test_kernels_are_chosen_once(own_choices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.nn.Linear(1024, 4096, bias=False, dtype=BF16, device="cuda")
    model = torch.nn.Sequential(wide)
    eight_bit.to_8_bits(model, "int8")
    eight_bit.compute_in_8_bits(model, "int8")
    told: list[None] = []
    has_choice = len(candidates(torch.cuda.get_device_capability())) > 1
    state = torch.cuda.get_rng_state()
    timed = eight_bit.tune_products(model, rows=2048, on_timed=lambda: told.append(None))
    assert timed is has_choice
    assert torch.equal(torch.cuda.get_rng_state(), state)
    if not has_choice:
        return
    assert len(told) == 2 * len(candidates(torch.cuda.get_device_capability()))
    # The next process reads it.
    chosen = dict(int8_products._choices)
    assert len(chosen) == 2
    monkeypatch.setattr(int8_products, "_choices", {})
    assert not eight_bit.tune_products(model, rows=2048)
    assert int8_products._choices == chosen
