from __future__ import annotations

from dataclasses import replace
from typing import Any

import pynvml
import pytest

from search_spaces.gpus import GIB
from sweep.running.device_info import Card, CardProcess, read_card
from tests.sweep.pretend_nvml import REFUSED, PretendNvml, memory, processes


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_card_that_is_hidden_from_cuda_is_not_there(
    hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert read_card() is None


WHOLE = {
    "nvmlDeviceGetName": "NVIDIA A10",
    "nvmlDeviceGetMemoryInfo": memory(24 * GIB, 23 * GIB),
    "nvmlDeviceGetCudaComputeCapability": (8, 6),
    "nvmlSystemGetDriverVersion": "570.1",
    "nvmlSystemGetCudaDriverVersion_v2": 12080,
    "nvmlDeviceGetComputeRunningProcesses": processes(7),
}


def pretend_cuda() -> Card:
    """What CUDA says on a machine whose GPU has no memory of its own."""
    return Card(
        product="NVIDIA GB10",
        memory_bytes=120 * GIB,
        free_bytes=None,
        compute_capability=(12, 1),
        driver=None,
        cuda=None,
        shares_host_memory=True,
    )


def unasked() -> Card | None:
    raise AssertionError("CUDA was asked for what NVML had told")


def test_a_card_that_tells_everything_is_read_through_nvml_alone() -> None:
    assert read_card(nvml=PretendNvml(**WHOLE), ask_cuda=unasked) == Card(
        product="NVIDIA A10",
        memory_bytes=24 * GIB,
        free_bytes=23 * GIB,
        compute_capability=(8, 6),
        driver="570.1",
        cuda="12.8",
        processes=(CardProcess(7, None),),
    )


@pytest.mark.parametrize("refusal", [REFUSED, memory(0, 0)], ids=["refused", "nought"])
def test_a_card_without_memory_figures_has_cudas_total_and_nobody_knows_what_is_free(
    refusal: Any,
) -> None:
    nvml = PretendNvml(**(WHOLE | {"nvmlDeviceGetMemoryInfo": refusal}))
    card = read_card(nvml=nvml, ask_cuda=pretend_cuda)
    assert card is not None
    assert (card.product, card.memory_bytes, card.free_bytes) == ("NVIDIA A10", 120 * GIB, None)
    assert card.shares_host_memory
    assert card.driver == "570.1"


@pytest.mark.parametrize(
    ("refused", "figure", "left"),
    [
        ("nvmlDeviceGetName", "product", "NVIDIA GB10"),
        ("nvmlDeviceGetCudaComputeCapability", "compute_capability", (12, 1)),
        ("nvmlSystemGetDriverVersion", "driver", None),
        ("nvmlSystemGetCudaDriverVersion_v2", "cuda", None),
        ("nvmlDeviceGetComputeRunningProcesses", "processes", ()),
    ],
)
def test_what_nvml_refuses_is_missing_alone(refused: str, figure: str, left: object) -> None:
    whole = read_card(nvml=PretendNvml(**WHOLE), ask_cuda=unasked)
    assert whole is not None
    card = read_card(nvml=PretendNvml(**(WHOLE | {refused: REFUSED})), ask_cuda=pretend_cuda)
    assert card is not None
    expected = replace(whole, **{figure: left})
    assert replace(card, shares_host_memory=False) == expected


def test_without_nvml_cuda_alone_is_a_card_and_without_either_there_is_none() -> None:
    gone = PretendNvml(nvmlInit=pynvml.NVMLError_LibraryNotFound())
    card = read_card(nvml=gone, ask_cuda=pretend_cuda)
    assert card is not None
    assert (card.product, card.memory_bytes) == ("NVIDIA GB10", 120 * GIB)
    assert read_card(nvml=gone, ask_cuda=lambda: None) is None
    no_memory = PretendNvml(**(WHOLE | {"nvmlDeviceGetMemoryInfo": REFUSED}))
    assert read_card(nvml=no_memory, ask_cuda=lambda: None) is None


def test_a_capability_that_nobody_tells_leaves_a_card() -> None:
    nvml = PretendNvml(**(WHOLE | {"nvmlDeviceGetCudaComputeCapability": REFUSED}))
    card = read_card(nvml=nvml, ask_cuda=lambda: None)
    assert card is not None
    assert card.compute_capability is None
