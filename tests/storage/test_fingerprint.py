from __future__ import annotations

import json
import platform
from importlib import metadata

import pynvml
import pytest

from storage.environment import PACKAGES, fingerprint
from tests.sweep.pretend_nvml import PretendNvml


def test_a_fingerprint_is_plain_json_with_a_version_for_every_package() -> None:
    found = fingerprint(device="cpu")
    assert json.loads(json.dumps(found)) == found
    assert set(found["versions"]) == set(PACKAGES)
    assert found["versions"]["optuna"] == metadata.version("optuna")
    assert found["python"] == platform.python_version()
    assert found["cores"] >= 1
    assert found["cpu"]


def test_on_a_cpu_there_is_nothing_to_say_of_a_gpu() -> None:
    found = fingerprint(device="cpu")
    assert (found["gpu"], found["driver"], found["cuda_driver"]) == (None, None, None)


def test_a_gpu_that_is_not_there_is_null_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000000-0000-0000-0000-000000000000")
    assert fingerprint(device="cuda")["gpu"] is None


def test_a_figure_that_the_driver_refuses_is_null_alone() -> None:
    nvml = PretendNvml(nvmlDeviceGetName="NVIDIA GB10", nvmlSystemGetDriverVersion="580.1")
    found = fingerprint(device="cuda", nvml=nvml)
    assert (found["gpu"], found["driver"], found["cuda_driver"]) == ("NVIDIA GB10", "580.1", None)


def test_a_machine_without_nvml_has_no_gpu_figures() -> None:
    gone = PretendNvml(nvmlInit=pynvml.NVMLError_LibraryNotFound())
    assert fingerprint(device="cuda", nvml=gone)["driver"] is None
