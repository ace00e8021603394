"""What befell a GPU is told from what a training did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from sweep.nvml import FaultWatch
from tests.sweep.pretend_nvml import PretendNvml, memory

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
        ({HANDLE: pynvml.NVMLError_NotFound()}, OFF_THE_BUS),
        ({"nvmlDeviceGetMemoryInfo": pynvml.NVMLError_GpuIsLost()}, OFF_THE_BUS),
        ({"nvmlDeviceGetTotalEccErrors": 5}, "2 uncorrectable memory errors"),
        ({"nvmlEventSetWait_v2": xids(13, 79)}, "Xid 79"),
        # An illegal access, and what ends with its program: a training's own doing.
        ({"nvmlEventSetWait_v2": xids(13, 31, 43, 45)}, None),
        ({"nvmlDeviceGetTotalEccErrors": pynvml.NVMLError_NotSupported()}, None),
        ({HANDLE: pynvml.NVMLError_Unknown()}, None),
    ],
)
def test_what_befell_the_card_is_said(then: dict[str, Any], words: str | None) -> None:
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
