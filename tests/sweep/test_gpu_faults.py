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


def watched(**then: Any) -> str | None:
    nvml = PretendNvml(**WELL)
    watch = FaultWatch("GPU-a", nvml)
    assert watch() is None
    nvml.answers.update(then)
    return watch()


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
        ({"nvmlDeviceGetHandleByUUID": pynvml.NVMLError_GpuIsLost()}, "fallen off the bus"),
        ({"nvmlDeviceGetHandleByUUID": pynvml.NVMLError_NotFound()}, "fallen off the bus"),
        ({"nvmlDeviceGetMemoryInfo": pynvml.NVMLError_GpuIsLost()}, "fallen off the bus"),
        ({"nvmlDeviceGetTotalEccErrors": 5}, "2 uncorrectable memory errors"),
        ({"nvmlEventSetWait_v2": xids(13, 79)}, "Xid 79"),
    ],
)
def test_what_befell_the_card_is_said(then: dict[str, Any], words: str) -> None:
    assert words in (watched(**then) or "")


@pytest.mark.parametrize(
    "then",
    [
        # An illegal access, and what ends with its program: a training's own doing.
        {"nvmlEventSetWait_v2": xids(13, 31, 43, 45)},
        {"nvmlDeviceGetTotalEccErrors": pynvml.NVMLError_NotSupported()},
        {"nvmlDeviceGetHandleByUUID": pynvml.NVMLError_Unknown()},
    ],
)
def test_what_is_no_fault_of_the_card_is_none(then: dict[str, Any]) -> None:
    assert watched(**then) is None


def test_a_driver_that_refuses_every_question_knows_of_no_fault() -> None:
    refused = PretendNvml(nvmlInit=pynvml.NVMLError_LibraryNotFound())
    refused.answers["nvmlDeviceGetHandleByUUID"] = pynvml.NVMLError_Uninitialized()
    assert FaultWatch("GPU-a", refused)() is None


def test_a_card_that_is_not_known_by_its_name_is_never_said_to_have_fallen_off_the_bus() -> None:
    nvml = PretendNvml(**WELL, nvmlDeviceGetHandleByUUID=pynvml.NVMLError_NotFound())
    assert FaultWatch("0", nvml)() is None
