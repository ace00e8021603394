"""The GPUs of a machine: what NVML and CUDA tell of them, and which a study runs on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.sweep.nvml import FaultWatch
from qlora_sweep.sweep.running.device_info import (
    GpuInfo,
    GpuProcess,
    choose_gpus,
    gpus_for,
    read_gpu,
    read_gpus,
    teams_of,
)
from tests.sweep.pretend_nvml import REFUSED, PretendNvml, memory, processes

WHOLE: dict[str, Any] = {
    "nvmlDeviceGetName": "NVIDIA A10",
    "nvmlDeviceGetMemoryInfo": memory(24 * GIB, 23 * GIB),
    "nvmlDeviceGetCudaComputeCapability": (8, 6),
    "nvmlSystemGetDriverVersion": "570.1",
    "nvmlDeviceGetEnforcedPowerLimit": 150_000,
    "nvmlSystemGetCudaDriverVersion_v2": 12080,
    "nvmlDeviceGetComputeRunningProcesses": processes(7),
}
A10 = GpuInfo(
    *("NVIDIA A10", 24 * GIB, 23 * GIB, (8, 6), "570.1", "12.8", (GpuProcess(7, None),)),
    power_limit_watts=150.0,
)
BY_CUDA = GpuInfo("NVIDIA GB10", 120 * GIB, None, (12, 1), None, None, shares_host_memory=True)
"""What CUDA says on a machine whose GPU has no memory of its own."""
NO_NVML = {"nvmlInit": pynvml.NVMLError_LibraryNotFound()}


@pytest.mark.parametrize(
    ("answers", "by_cuda", "read"),
    [
        ({}, None, A10),
        ({"nvmlDeviceGetName": REFUSED}, BY_CUDA, {"product": "NVIDIA GB10"}),
        (
            {"nvmlDeviceGetCudaComputeCapability": REFUSED},
            BY_CUDA,
            {"compute_capability": (12, 1)},
        ),
        ({"nvmlSystemGetCudaDriverVersion_v2": REFUSED}, BY_CUDA, {"cuda": None}),
        ({"nvmlDeviceGetComputeRunningProcesses": REFUSED}, BY_CUDA, {"processes": ()}),
        # Nobody knows what is free of a memory that is the host's.
        (
            {"nvmlDeviceGetMemoryInfo": memory(0, 0)},
            BY_CUDA,
            {"memory_bytes": 120 * GIB, "free_bytes": None, "shares_host_memory": True},
        ),
        (NO_NVML, BY_CUDA, BY_CUDA),
        (NO_NVML, None, None),
    ],
)
def test_what_nvml_refuses_is_told_by_cuda_or_is_missing_alone(
    answers: dict[str, Any], by_cuda: GpuInfo | None, read: GpuInfo | dict[str, Any] | None
) -> None:
    expected = replace(A10, **read) if isinstance(read, dict) else read
    found = read_gpu(nvml=PretendNvml(**(WHOLE | answers)), ask_cuda=lambda: by_cuda)
    if found is not None and expected is not None and "nvmlDeviceGetMemoryInfo" not in answers:
        found = replace(found, shares_host_memory=expected.shares_host_memory)
    assert found == expected


def refuse() -> int:
    raise REFUSED


def many(count: int) -> PretendNvml:
    return PretendNvml(
        **WHOLE,
        nvmlDeviceGetCount=count,
        nvmlDeviceGetHandleByIndex=lambda at: at if at < count else refuse(),
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid.removeprefix("GPU-")),
        nvmlDeviceGetUUID=lambda at: f"GPU-{at}",
    )


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0", "GPU-1", "GPU-2"]),
        ("2,0", ["GPU-2", "GPU-0"]),
        ("GPU-1", ["GPU-1"]),
        ("0,,1", ["GPU-0"]),
        ("", []),
        ("-1", []),
    ],
)
def test_a_machines_gpus_are_those_that_cuda_would_see_in_its_order(
    visible: str | None, uuids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in read_gpus(nvml=many(3))] == uuids
    if not uuids:
        assert read_gpu() is None


def test_a_gpu_whose_memory_is_the_hosts_counts_where_cuda_tells_of_it() -> None:
    nvml = many(1)
    nvml.answers["nvmlDeviceGetMemoryInfo"] = REFUSED
    (gpu,) = read_gpus(nvml=nvml, ask_cuda=lambda: BY_CUDA)
    assert gpu.memory_bytes == BY_CUDA.memory_bytes
    assert read_gpus(nvml=nvml, ask_cuda=lambda: None) == ()


FREE = replace(A10, processes=(), free_bytes=int(23.6 * GIB), uuid="GPU-a")
L4, LAST = replace(FREE, product="NVIDIA L4", uuid="GPU-l"), replace(FREE, uuid="GPU-z")
BUSY = replace(FREE, uuid="GPU-b", processes=(GpuProcess(4711, 3 * GIB),))
FOUR = [replace(FREE, uuid=f"GPU-{at}") for at in range(4)]
UNTOLD = replace(FREE, free_bytes=None)


@pytest.mark.parametrize(
    ("typed", "gpus", "indices"),
    [
        ("all", FOUR, [0, 1, 2, 3]),
        ("2,", FOUR, [2]),
        ("3,0", FOUR, [3, 0]),
        ("0,2", [FREE, L4, LAST], [0, 2]),
        ("0,2", [FREE, BUSY, LAST], [0, 2]),
        # A driver that tells no free memory says nothing of who uses a GPU.
        ("1", [UNTOLD], [0]),
    ],
)
def test_gpus_are_all_so_many_or_those_that_are_named(
    typed: str, gpus: list[GpuInfo], indices: list[int]
) -> None:
    chosen = choose_gpus(typed, gpus)
    assert [gpu.index for gpu in chosen] == indices
    assert [gpu.cuda_name for gpu in chosen] == [gpus[at].uuid for at in indices]


@pytest.mark.parametrize(
    ("typed", "gpus", "error", "words"),
    [
        ("8", FOUR, InputError, "this machine has 4 GPUs, 0 to 3"),
        ("0,4", FOUR, InputError, "there is no GPU 4"),
        ("1,1", FOUR, InputError, "GPU 1 is named twice"),
        ("0", FOUR, InputError, "GPU 0 alone is --devices 0,"),
        ("-1", FOUR, InputError, "name all, how many"),
        ("１", FOUR, InputError, "name all, how many"),
        ("all", [], EnvironmentFault, "shows no NVIDIA GPU"),
        ("all", [FREE, L4, LAST], InputError, "GPU 0 is a NVIDIA A10.*L4.*--devices 0,2"),
        (
            "all",
            [FREE, replace(FREE, memory_bytes=40 * GIB, uuid="GPU-m"), LAST],
            InputError,
            "GPU 1 a NVIDIA A10 with 40.00 GiB.*--devices 0,2",
        ),
        ("all", [FREE, BUSY, LAST], EnvironmentFault, "GPU 1 .*4711 has 3.00 GiB.*--devices 0,2"),
        (
            "all",
            [FREE, replace(BUSY, processes=(), free_bytes=20 * GIB)],
            EnvironmentFault,
            "another process has 4.00 GiB",
        ),
        ("all", [FREE, FREE], InputError, "GPU 0 and GPU 1 are one and the same"),
    ],
)
def test_what_names_no_free_gpus_of_one_product_is_refused_with_what_would_do(
    typed: str, gpus: list[GpuInfo], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        choose_gpus(typed, gpus)


def test_gpus_train_together_in_whole_teams() -> None:
    chosen = choose_gpus("all", FOUR)
    for count, teams in ((4, [[0, 1], [2, 3]]), (3, [[0, 1]]), (0, [])):
        found = teams_of(chosen[:count], size=2)
        assert [[gpu.index for gpu in team] for team in found] == teams


def test_a_trial_of_several_gpus_takes_the_first_or_says_how_many_are_missing() -> None:
    assert [gpu.index for gpu in gpus_for(2, FOUR)] == [0, 1]
    for gpus, error in ((FOUR[:2], InputError), ([], EnvironmentFault)):
        with pytest.raises(error, match="needs 4 GPUs"):
            gpus_for(4, gpus)


# What befell a GPU is told from what a training did.

WELL: dict[str, Any] = {
    "nvmlDeviceGetMemoryInfo": memory(24, 23),
    "nvmlDeviceGetTotalEccErrors": 3,
    "nvmlEventSetCreate": "events",
    "nvmlDeviceRegisterEvents": None,
    "nvmlEventSetWait_v2": pynvml.NVMLError_Timeout(),
}
HANDLE, OFF_THE_BUS = "nvmlDeviceGetHandleByUUID", "fallen off the bus"


def xids(*codes: int) -> Any:
    left = [SimpleNamespace(eventData=code) for code in codes]

    def wait(*_: Any) -> Any:
        if not left:
            raise pynvml.NVMLError_Timeout
        return left.pop(0)

    return wait


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ({HANDLE: pynvml.NVMLError_GpuIsLost()}, OFF_THE_BUS),
        ({"nvmlDeviceGetMemoryInfo": pynvml.NVMLError_GpuIsLost()}, OFF_THE_BUS),
        ({"nvmlDeviceGetTotalEccErrors": 5}, "2 uncorrectable memory errors"),
        ({"nvmlEventSetWait_v2": xids(13, 79)}, "Xid 79"),
        # An illegal access, and what ends with its program: a training's own doing.
        ({"nvmlEventSetWait_v2": xids(13, 31, 43, 45)}, None),
        ({"nvmlDeviceGetTotalEccErrors": pynvml.NVMLError_NotSupported()}, None),
        ({HANDLE: pynvml.NVMLError_Unknown()}, None),
    ],
)
def test_what_befell_the_gpu_is_said(then: dict[str, Any], words: str | None) -> None:
    nvml = PretendNvml(**WELL)
    watch = FaultWatch("GPU-a", nvml)
    assert watch() is None
    nvml.answers.update(then)
    said = watch()
    assert said is None if words is None else words in (said or "")


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        # A driver that refuses every question; a GPU that is not known by its name.
        ("GPU-a", {"nvmlInit": pynvml.NVMLError_LibraryNotFound()}),
        ("0", {**WELL, HANDLE: pynvml.NVMLError_NotFound()}),
    ],
)
def test_of_what_never_answered_no_fault_is_known(name: str, answers: dict[str, Any]) -> None:
    refused = {HANDLE: pynvml.NVMLError_Uninitialized(), **answers}
    assert FaultWatch(name, PretendNvml(**refused))() is None
