"""The shipped cards: what they are called, and figures that hang together."""

from __future__ import annotations

from datetime import date

import pytest

from search_spaces.errors import InputError
from search_spaces.gpus import GIB, find_gpu, gpu_catalogue, match_product

# Threads of a multiprocessor x 2 is no rule across generations, so the figures are told one by one.
BOXES = {
    "t4": 16,
    "l4": 24,
    "a10": 24,
    "a10g": 24,
    "rtx-3090": 24,
    "rtx-4090": 24,
    "rtx-5090": 32,
    "a6000": 48,
    "l40s": 48,
    "a100-40gb": 40,
    "a100-80gb": 80,
    "a100-80gb-pcie": 80,
    "h100-80gb": 80,
    "h100-pcie": 80,
    "h200": 141,
    "b200": 192,
}


def test_every_card_is_in_the_catalogue() -> None:
    assert set(gpu_catalogue()) == set(BOXES)


@pytest.mark.parametrize("name", BOXES)
def test_less_is_usable_than_the_box_says(name: str) -> None:
    spec = find_gpu(name)
    assert 0.85 < spec.memory_bytes / (BOXES[name] * GIB) < 1.0
    assert 0 < spec.budget_bytes < spec.memory_bytes


@pytest.mark.parametrize("name", BOXES)
def test_every_figure_has_a_source_that_was_read(name: str) -> None:
    spec = find_gpu(name)
    assert spec.sources
    for source in spec.sources:
        assert source.url.startswith("https://")
        assert source.what
        assert source.date <= date.today()


@pytest.mark.parametrize("name", BOXES)
def test_peaks_are_dense_and_bf16_needs_ampere(name: str) -> None:
    spec = find_gpu(name)
    assert ("bf16" in spec.peak_flops) == (spec.compute_capability >= (8, 0))
    # Tensor cores give two to thirty times the plain fp32 rate; sparsity would double the ratio.
    assert 1.9 < spec.peak_flops["fp16"] / spec.peak_flops["fp32"] < 31
    assert 10 < spec.peak_flops["fp16"] / spec.bandwidth_bytes_per_second < 450


def test_an_a10_leaves_about_21_and_a_half_gib_for_a_training() -> None:
    assert find_gpu("a10").budget_bytes / GIB == pytest.approx(21.5, abs=0.05)


@pytest.mark.parametrize(
    ("typed", "name"),
    [("A10", "a10"), (" h100 ", "h100-80gb"), ("H100-SXM", "h100-80gb"), ("4090", "rtx-4090")],
)
def test_a_card_is_found_by_name_or_alias(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


def test_an_unknown_card_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"unknown GPU 'a100'; did you mean 'a100-40'\?"):
        find_gpu("a100")


def test_no_name_or_alias_is_used_twice() -> None:
    names = [
        name.lower() for spec in gpu_catalogue().values() for name in (spec.name, *spec.aliases)
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Quadro P400", None),
        ("", None),
    ],
)
def test_a_product_is_recognised_exactly_or_not_at_all(product: str, name: str | None) -> None:
    spec = match_product(product)
    assert (spec and spec.name) == name
