"""The shipped GPUs: what they are called, and figures that hang together."""

from __future__ import annotations

import statistics
from datetime import date

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import (
    GIB,
    UNMEASURED_COPY_SHARE,
    UNMEASURED_HALVED_SHARE,
    UNMEASURED_MATRIX_SHARE,
    find_gpu,
    gpu_catalogue,
    match_product,
    product_of,
)
from tests.tables import cases

NAMES = """
t4 16, v100-16gb 16, v100-32gb 32, l4 24, a10 24, a10g 24, rtx-3090 24, rtx-4090 24, rtx-5090 32,
a6000 48, l40s 48, rtx-6000-ada 48, a100-40gb 40, a100-80gb 80, a100-80gb-pcie 80, h100-80gb 80,
h100-pcie 80, h100-nvl 94, rtx-pro-6000 96, h200 141, b200 192, rtx-4060-ti-8gb 8, rtx-3080 10,
rtx-2080-ti 11, rtx-3060 12, rtx-3080-12gb 12, rtx-3080-ti 12, p100-16gb 16, a4000 16,
rtx-4060-ti-16gb 16, rtx-4070-ti-super 16, rtx-4080 16, rtx-4080-super 16, rtx-5060-ti-16gb 16,
rtx-5070-ti 16, rtx-5080 16, rtx-4000-ada 20, rtx-3090-ti 24, a5000 24, a40 48, l40 48,
gh200-96gb 96, gb10 128, b300 288
"""
BOXES = {name: int(gib) for name, gib in (line.split() for line in NAMES.split(","))}
"""GiB on the box: no rule says them across generations, so the figures are told one by one."""


def test_gpus_are_listed_from_the_smallest_memory_to_the_largest() -> None:
    boxes = [BOXES[name] for name in gpu_catalogue()]
    assert boxes == sorted(BOXES.values())
    names = [name for spec in gpu_catalogue().values() for name in (spec.name, *spec.aliases)]
    assert len(names) == len({name.lower() for name in names})


@pytest.mark.parametrize("name", BOXES)
def test_the_figures_of_a_gpu_hang_together_and_have_a_source(name: str) -> None:
    spec = find_gpu(name)
    peaks, half, bandwidth = spec.peak_flops, spec.half, spec.bandwidth_bytes_per_second
    assert 0.85 < spec.memory_bytes / (BOXES[name] * GIB) < 1.0
    assert 0 < spec.budget_bytes < spec.memory_bytes
    assert spec.sources
    assert all(one.url.startswith("https://") and one.what for one in spec.sources)
    assert all(one.date <= date.today() for one in spec.sources)
    assert ("bf16" in peaks) == (spec.compute_capability >= (8, 0))
    assert "fp8" not in peaks or spec.compute_capability >= (8, 9)
    assert "int8" not in peaks or spec.compute_capability >= (7, 5)
    # Tensor cores give two to thirty times the plain fp32 rate; sparsity would double the ratio.
    has_tensor_cores = spec.compute_capability >= (7, 0)
    assert (1.9 if has_tensor_cores else 0.9) < peaks["fp16"] / peaks["fp32"] < 31
    assert 10 < peaks["fp16"] / bandwidth < 450
    # GeForce GPUs halve products with fp32 accumulation, and integers have none.
    eight_bit = [peaks[kind] / peaks[half] for kind in ("fp8", "int8") if kind in peaks]
    assert all(round(ratio, 1) in (2.0, 4.0) for ratio in eight_bit)
    assert set(spec.measured_8bit) | set(spec.matrix_flops) <= set(peaks)
    # GeForce GPUs boost beyond the clock that their data sheet counts with.
    assert all(0.3 < rate / peaks[kind] < 1.15 for kind, rate in spec.matrix_flops.items())
    assert 0.7 < (spec.copy_bytes_per_second or bandwidth) / bandwidth <= 1.0
    if spec.matrix_flops or spec.copy_bytes_per_second:
        assert any(source.what.startswith("Measured") for source in spec.sources)


def test_a_rate_that_nobody_measured_is_the_usual_share_of_the_data_sheet() -> None:
    a10 = find_gpu("a10")
    unmeasured = a10.model_copy(update={"matrix_flops": {}, "copy_bytes_per_second": None})
    assert unmeasured.matrix_rate("bf16") == UNMEASURED_MATRIX_SHARE * a10.peak_flops["bf16"]
    assert unmeasured.copy_rate == UNMEASURED_COPY_SHARE * a10.bandwidth_bytes_per_second
    # A type that was not measured is held to the share that 16 bits reach.
    assert a10.matrix_rate("int8") == 2 * a10.matrix_flops["bf16"]
    assert find_gpu("t4").matrix_rate("bf16") is None
    # GeForce GPUs, which halve their rate, come to more of it.
    geforce = find_gpu("rtx-4080")
    assert geforce.matrix_rate("bf16") == UNMEASURED_HALVED_SHARE * geforce.peak_flops["bf16"]
    shares: dict[float, list[float]] = {UNMEASURED_MATRIX_SHARE: [], UNMEASURED_HALVED_SHARE: []}
    for spec in gpu_catalogue().values():
        for dtype in {"bf16", "fp16"} & set(spec.matrix_flops):
            if spec.power_limit_watts is None:
                share = spec.matrix_flops[dtype] / spec.peak_flops[dtype]
                shares[spec.unmeasured_share].append(share)
    for stated, measured in shares.items():
        assert statistics.median(measured) == pytest.approx(stated, abs=0.03)


ALIASES = {
    "A10": "a10",
    " h100 ": "h100-80gb",
    "H100-SXM": "h100-80gb",
    "4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "RTX_6000_Ada": "rtx-6000-ada",
    "A100 80GB": "a100-80gb",
    "tesla v100": "v100-16gb",
    "4060ti": "rtx-4060-ti-16gb",
    "RTX 3060 12 GB": "rtx-3060",
    "3080 12GB": "rtx-3080-12gb",
    "DGX Spark": "gb10",
}


@pytest.mark.parametrize(("typed", "name"), ALIASES.items())
def test_a_gpu_is_found_by_name_or_alias(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


def test_an_unknown_gpu_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"'A100'; did you mean 'a100-40gb', 'a100-80gb' or 'a10"):
        find_gpu("A100")


PRODUCTS = """
NVIDIA A10: a10
NVIDIA A10G: a10g
Tesla V100-PCIE-32GB: v100-32gb
NVIDIA RTX PRO 6000 Blackwell Server Edition: rtx-pro-6000
NVIDIA GeForce RTX 4090: rtx-4090
NVIDIA RTX 4000 Ada Generation: rtx-4000-ada
NVIDIA GH200 480GB: gh200-96gb
NVIDIA B300 SXM6 AC: b300
NVIDIA GB10: gb10
Tesla P100-SXM2-16GB: p100-16gb
NVIDIA RTX 4000 SFF Ada Generation:
Quadro RTX 4000:
NVIDIA GeForce RTX 3080 Laptop GPU:
NVIDIA GeForce RTX 5090 D:
NVIDIA A100-SXM4-80GB MIG 1g.10gb:
NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition:
NVIDIA RTX 6000D:
NVIDIA GeForce RTX 4090 Laptop GPU:
"""


@pytest.mark.parametrize("line", PRODUCTS.strip().splitlines())
def test_a_product_is_recognised_exactly_or_not_at_all(line: str) -> None:
    product, _, name = line.partition(":")
    spec = match_product(product)
    assert (spec.name if spec else "") == name.strip()


@pytest.mark.parametrize(
    ("product", "mebibytes", "name"),
    cases(
        """
        NVIDIA GeForce RTX 3080 | 10240 | rtx-3080
        NVIDIA GeForce RTX 3080 | 12288 | rtx-3080-12gb
        NVIDIA GeForce RTX 5060 Ti | 16311 | rtx-5060-ti-16gb
        NVIDIA GeForce RTX 5060 Ti | 8151
        NVIDIA GeForce RTX 2080 Ti | 22528
        # With error correction and without.
        NVIDIA A40 | 46068 | a40
        NVIDIA A40 | 49140 | a40
        # Host and GPU share what the kernel leaves.
        NVIDIA GB10 | 124610 | gb10
        """
    ),
)
def test_of_gpus_that_drivers_call_alike_the_memory_decides(
    product: str, mebibytes: int, name: str | None
) -> None:
    spec = match_product(product, mebibytes * 2**20)
    assert (None if spec is None else spec.name) == name


def test_every_gpu_is_known_by_what_its_driver_tells_and_by_a_name_of_its_own() -> None:
    for spec in gpu_catalogue().values():
        assert match_product(spec.product, spec.memory_bytes) == spec
        assert match_product(product_of(spec)) == spec
